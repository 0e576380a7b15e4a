"""A trained model in a run's directory: what evaluation, generation and export begin with."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from interdomain_jax import checkpoints, sharding
from interdomain_jax import workdir as workdirs
from interdomain_jax.data.tokenizers import Tokenizer
from interdomain_jax.experiment import build_experiment
from interdomain_jax.modules.decoder import Decoder


class Trained(NamedTuple):
    """A checkpoint that is there, its parameters not read yet.

    Attributes:
        config: that the run saved.
        workdir: of the run.
        step: of the checkpoint.
        mesh: on which the parameters will lie; the run may have had another.
        model: of the config.
        tokenizer: of the config.
        abstract_params: shapes, dtypes and places.
    """

    config: ConfigDict
    workdir: epath.Path
    step: int
    mesh: Mesh
    model: Decoder
    tokenizer: Tokenizer
    abstract_params: Any

    def restore_params(self) -> Any:
        """The parameters; raises CheckpointError if they cannot be read."""
        return checkpoints.restore_params(self.workdir, self.step, self.abstract_params)


def find_trained(
    workdir: epath.PathLike,
    mesh_sizes: Mapping[str, int],
    checkpoint: str,
    devices: Sequence[jax.Device] | None = None,
) -> Trained:
    """Finds a checkpoint of a run, and compiles nothing.

    Args:
        workdir: of the run.
        mesh_sizes: as `sharding.make_mesh` takes them.
        checkpoint: "latest", "best" or the number of a step, as `checkpoints.find_step` takes it.
        devices: as `sharding.make_mesh` takes them.

    Raises:
        FileNotFoundError: there is no run or no checkpoint, or its tokenizer's file is gone.
        ValueError: a saved field or the mesh is out of range.
    """
    workdir = epath.Path(workdir)
    config = workdirs.load_config(workdir)
    step = checkpoints.find_step(workdir, checkpoint)
    model, tokenizer = build_experiment(config)
    mesh = sharding.make_mesh(mesh_sizes, devices)
    variables = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), jnp.int32))
    return Trained(config, workdir, step, mesh, model, tokenizer, sharding.placed(variables["params"], mesh))
