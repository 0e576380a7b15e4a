"""Saving and resuming a run: its state, its position in the data, and how it came about."""

from typing import Any, NamedTuple

import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from ml_collections import ConfigDict

from interdomain_jax import checkpoints as storage
from interdomain_jax.errors import DamagedError
from interdomain_jax.training.state import TrainState
from interdomain_jax.version import code_version

_OPTIMIZER_ITEM = "optimizer"


class Start(NamedTuple):
    """Where a run goes on.

    Attributes:
        step: batches trained on so far.
        state: after them.
        position: of the data, to be given to its iterator's `set_state`.
        validation_loss: of the state; None where it was not computed before the checkpoint was written.
    """

    step: int
    state: TrainState
    position: Any
    validation_loss: float | None


def save(
    checkpoints: ocp.CheckpointManager,
    state: TrainState,
    position: Any,
    config: ConfigDict,
    *,
    validation_loss: float | None = None,
) -> None:
    """Saves `state`, and the position in the data that belongs to it, under the state's step; every process calls it.

    The position is the same in all processes, so one of them writes it, and any number of them can go on from it.
    Returns once the arrays are copied from the devices; the files are written in the background.

    Raises:
        CheckpointError: this checkpoint, or the one before, could not be written.
    """
    run = {"config": config.to_dict(), "code": code_version(), "data": position}
    storage.save(checkpoints, int(state.step), _as_items(state), run, validation_loss=validation_loss)


def restore(checkpoints: ocp.CheckpointManager, step: int, abstract: TrainState) -> Start:
    """Restores what `save` wrote at `step`.

    Args:
        checkpoints: from `checkpoints.open_checkpoints`.
        step: a saved step.
        abstract: the structure, shapes, dtypes and places to restore to, from `state.abstract_state`.

    Raises:
        DamagedError: the checkpoint cannot be read, or does not hold what was written.
        MismatchError: it holds the state of another model.
    """
    restored = storage.restore(checkpoints, step, _as_items(abstract))
    state = TrainState(params=restored.items[storage.PARAMS_ITEM], **restored.items[_OPTIMIZER_ITEM])
    return Start(step, state, restored.run["data"], restored.validation_loss)


def restore_latest(checkpoints: ocp.CheckpointManager, workdir: epath.Path, abstract: TrainState) -> Start | None:
    """Restores the latest checkpoint that is whole; None if there is no checkpoint at all.

    Damaged ones after it are reported and moved aside, for the run will write their steps again.

    Raises:
        DamagedError: all are damaged; they stay where they are.
        MismatchError: the latest that can be read is of another model.
    """
    damages: dict[int, DamagedError] = {}
    for step in sorted(checkpoints.all_steps(), reverse=True):
        try:
            start = restore(checkpoints, step, abstract)
        except DamagedError as error:
            damages[step] = error
            continue
        for damaged, damage in damages.items():
            logging.error("%s; it is moved to %s", damage, storage.move_aside(workdir, damaged))
        if damages:
            checkpoints.reload()
        return start
    if damages:
        raise DamagedError("; ".join(map(str, damages.values())) + "; there is no other checkpoint")
    return None


def _as_items(state: TrainState) -> dict[str, Any]:
    """The state as trees to save: the parameters are one, all the rest another."""
    rest = state._asdict()
    return {storage.PARAMS_ITEM: rest.pop("params"), _OPTIMIZER_ITEM: rest}
