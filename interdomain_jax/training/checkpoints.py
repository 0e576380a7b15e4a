"""Saving and resuming: parameters, optimizer and the position in the data, as one checkpoint."""

from typing import Any

import grain
import orbax.checkpoint as ocp

from interdomain_jax import workdir as workdirs
from interdomain_jax.training.state import TrainState, WideCount

_OPTIMIZER_ITEM = "optimizer"
_DATA_ITEM = "data"


def save(checkpoints: ocp.CheckpointManager, state: TrainState, batches: grain.DatasetIterator) -> None:
    """Saves `state`, and `batches` at its present position, under the state's step; every process calls it.

    The position is the same in all processes, so one of them writes it, and any number of them can go on from it.
    Returns once the arrays are copied from the devices; the files are written in the background.
    """
    args = {
        workdirs.PARAMS_ITEM: ocp.args.StandardSave(state.params),
        _OPTIMIZER_ITEM: ocp.args.StandardSave(_optimizer_item(state)),
        _DATA_ITEM: ocp.args.JsonSave(batches.get_state()),
    }
    checkpoints.save(int(state.step), args=ocp.args.Composite(**args))


def restore(
    checkpoints: ocp.CheckpointManager,
    step: int,
    abstract: TrainState,
    batches: grain.DatasetIterator,
) -> TrainState:
    """Restores what `save` wrote at `step`; moves `batches` to the position it had then.

    Args:
        checkpoints: from `workdir.open_checkpoints`.
        step: a saved step.
        abstract: the structure, shapes, dtypes and places to restore to, from `state.abstract_state`.
        batches: an iterator over the same data.
    """
    args = {
        workdirs.PARAMS_ITEM: ocp.args.StandardRestore(abstract.params),
        _OPTIMIZER_ITEM: ocp.args.StandardRestore(_optimizer_item(abstract)),
        _DATA_ITEM: ocp.args.JsonRestore(),
    }
    items = checkpoints.restore(step, args=ocp.args.Composite(**args))
    batches.set_state(items[_DATA_ITEM])
    optimizer = items[_OPTIMIZER_ITEM]
    return TrainState(
        step=optimizer["step"],
        tokens_seen=WideCount(*optimizer["tokens_seen"]),
        params=items[workdirs.PARAMS_ITEM],
        opt_state=optimizer["opt_state"],
    )


def _optimizer_item(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "tokens_seen": tuple(state.tokens_seen), "opt_state": state.opt_state}
