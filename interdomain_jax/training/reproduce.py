"""Does a step once more that ended a run because it was not finite, and says where the numbers went wrong.

python -m interdomain_jax.training.reproduce --dump=runs/tiny/nonfinite/120
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags
from etils import epath
from ml_collections import config_flags

from interdomain_jax import checkpoints, cli, sharding
from interdomain_jax import workdir as workdirs
from interdomain_jax.experiment import build_experiment, check_batch
from interdomain_jax.training.dump import load_batch
from interdomain_jax.training.optimizer import make_optimizer
from interdomain_jax.training.state import abstract_state
from interdomain_jax.training.step import loss_and_gradient

_DUMP = flags.DEFINE_string("dump", None, "The directory that the run named when it ended.", required=True)
_MESH = config_flags.DEFINE_config_dict("mesh", sharding.mesh_config(), "The layout of the devices.")


class Reproduced(NamedTuple):
    """A step done once more.

    Attributes:
        loss: nats per token.
        bad_parameters: the parameters that are not finite, which a skipped update cannot have made.
        bad_gradients: the parameters whose gradient is not finite.
    """

    loss: float
    bad_parameters: list[str]
    bad_gradients: list[str]


def reproduce(dump: epath.Path, mesh_sizes: Mapping[str, int]) -> Reproduced:
    """Computes loss and gradient of the dumped batch at the dumped parameters.

    Args:
        dump: from `dump.dump_step`.
        mesh_sizes: as `sharding.make_mesh` takes them; the run may have had others.

    Raises:
        FileNotFoundError: there is no dump.
        DamagedError: it cannot be read.
    """
    config = workdirs.load_config(dump)
    mesh = sharding.make_mesh(mesh_sizes)
    check_batch(config, mesh)
    model, _ = build_experiment(config)
    optimizer = make_optimizer(num_steps=config.num_steps, **config.optimizer)
    abstract = abstract_state(model, optimizer, mesh)
    params = checkpoints.restore_params(dump, checkpoints.find_step(dump, "latest"), abstract.params)
    rows = sharding.process_rows(mesh, config.data.batch_size)
    batch = {name: values[rows] for name, values in load_batch(dump).items()}
    compute = lambda params, batch: loss_and_gradient(
        model, params, batch, accumulation_steps=config.accumulation_steps, vocab_chunks=config.vocab_chunks
    )
    result = jax.jit(sharding.on_mesh(compute, mesh))(params, sharding.place_batch(batch, mesh, config.data.batch_size))
    return Reproduced(float(result.loss), _not_finite(params), _not_finite(result.gradient))


def _not_finite(tree: object) -> list[str]:
    finite = jax.device_get(jax.jit(lambda tree: jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), tree))(tree))
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, is_finite in jax.tree_util.tree_leaves_with_path(finite)
        if not is_finite
    ]


def main(_: list[str]) -> None:
    """Does the step of a dump again, and prints what came of it."""
    with cli.exit_on_bad_input():
        reproduced = reproduce(epath.Path(_DUMP.value), _MESH.value)
    print(f"loss: {reproduced.loss} nats per token")
    print(f"parameters that are not finite: {', '.join(reproduced.bad_parameters) or 'none'}")
    print(f"gradients that are not finite: {', '.join(reproduced.bad_gradients) or 'none'}")


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
