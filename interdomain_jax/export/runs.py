"""From the checkpoint of a run to an exported model, and from an exported model to a run of no steps yet."""

from typing import NamedTuple

import jax
from etils import epath
from ml_collections import ConfigDict

from interdomain_jax import checkpoints, sharding
from interdomain_jax import workdir as workdirs
from interdomain_jax.experiment import build_experiment, check_fields
from interdomain_jax.export.llama_layout import read_exported, write_llama
from interdomain_jax.export.safetensors_files import model_fields, save_model
from interdomain_jax.tensor_files import local_path
from interdomain_jax.trained import find_trained
from interdomain_jax.training import checkpoints as training_checkpoints
from interdomain_jax.training.optimizer import make_optimizer
from interdomain_jax.training.state import init_state

LAYOUTS = ("safetensors", "llama")

_OF_STATES = ("state_dim", "read", "output_gate")


class Summary(NamedTuple):
    """What was written: the step of the parameters, and their number."""

    step: int
    parameters: int


def export_run(
    workdir: epath.PathLike, output: str, *, checkpoint: str = "latest", layout: str = "safetensors"
) -> Summary:
    """Writes the parameters of a checkpoint for others.

    Args:
        workdir: of the run.
        output: the file, or with the layout "llama" the directory, to write.
        checkpoint: "latest", "best" or the number of a step, as `checkpoints.find_step` takes it.
        layout: "safetensors", see `save_model`; or "llama", see `write_llama`.

    Raises:
        FileNotFoundError: there is no run or no checkpoint, or its tokenizer's file is gone.
        ValueError: the layout cannot express the model, or the output cannot be there.
        RunError: the checkpoint is damaged, or the output cannot be written.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {LAYOUTS}")
    workdirs.require_writable("output", epath.Path(local_path(output).absolute().parent))
    trained = find_trained(workdir, sharding.mesh_config(), checkpoint, jax.devices()[:1])
    params = trained.restore_params()
    if layout == "llama":
        length, eos_id = trained.config.data.sequence_length, trained.tokenizer.eos_id
        write_llama(output, trained.model, params, max_length=length, eos_id=eos_id)
    else:
        save_model(output, trained.model, params)
    return Summary(trained.step, _count(params))


def load_run(source: str, config: ConfigDict, workdir: epath.PathLike) -> Summary:
    """Makes an exported model a run of no steps yet, which can be evaluated, and trained on.

    Args:
        source: a file that `save_model` wrote, or the directory of a Hugging Face Llama.
        config: all that the run needs beside the model: data, tokenizer, optimizer, and how the model is computed. The
            other fields of its model are replaced by those of the file.
        workdir: that does not exist yet, or is empty.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the source holds no model that can be read, the config does not go with it, or the workdir is not
            empty.
        RunError: the workdir cannot be written.
    """
    workdir = epath.Path(workdir)
    if workdir.exists() and any(workdir.iterdir()):
        raise ValueError(f"workdir {workdir} is not empty; give one that is not there yet")
    workdirs.require_writable("workdir", workdir)
    mesh = sharding.make_mesh(config.mesh)
    loaded = read_exported(source, scan_layers=config.model.scan_layers, mesh=mesh)
    config = config.copy_and_resolve_references()
    fields = model_fields(loaded.model)
    if set(loaded.model.mixers) == {"softmax"}:
        # Nothing hangs on them, so that the command that trains the like trains this one.
        fields = {name: value for name, value in fields.items() if name not in _OF_STATES}
    config.model.update(fields)
    check_fields(config)
    model = build_experiment(config).model
    optimizer = make_optimizer(num_steps=config.num_steps, **config.optimizer)
    state = init_state(model, optimizer, seed=config.seed, mesh=mesh)._replace(params=loaded.params)
    with checkpoints.open_checkpoints(workdir) as opened:
        training_checkpoints.save(opened, state, None, config)
    # The last, so that there is no run without a checkpoint.
    workdirs.save_config(workdir, config)
    return Summary(0, _count(state.params))


def _count(params: object) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
