"""Checkpoints: trees of arrays on disk, with what is needed to know that they came back as they were.

`<workdir>/checkpoints/<step>/` holds one item for each tree, such as `params`, and `run`: plain JSON with the config,
the version of the code, the position in the data, the validation loss, and shape, dtype and checksum of every array. A
checkpoint is written under another name and renamed when it is complete. Its arrays may be restored onto any mesh by
any number of processes, with scanned layers or without.
"""

import contextlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from interdomain_jax import sharding, strict_json
from interdomain_jax.checksums import checksums
from interdomain_jax.errors import CheckpointError, DamagedError, MismatchError
from interdomain_jax.modules.layer_layout import like_layers_of
from interdomain_jax.workdir import is_remote

# The parameters are an item of their own, so that a reader of the model never touches the moments.
PARAMS_ITEM = "params"
_RUN_ITEM = "run"
_LEAVES = "leaves"
_LOSS = "validation_loss"
_LOSS_FILE = "validation_loss.json"

DIRECTORY = "checkpoints"
DAMAGED = "damaged_checkpoint_"


class Restored(NamedTuple):
    """What `restore` gives back.

    Attributes:
        items: the tree of each item that was asked for.
        run: the JSON that was saved beside them.
        validation_loss: that was saved with them; None if there was none.
    """

    items: dict[str, Any]
    run: dict[str, Any]
    validation_loss: float | None


class _Best:
    """An orbax policy that preserves the `number` checkpoints with the smallest validation losses."""

    def __init__(self, directory: epath.Path, number: int):
        self._directory = directory
        self._number = number

    def should_preserve(
        self,
        checkpoints: Sequence[ocp.checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: ocp.checkpoint_managers.PreservationContext,
    ) -> list[bool]:
        del context
        losses: dict[int, float] = {}
        unreadable = set()
        for info in checkpoints:
            try:
                # The one that is being saved cannot be read yet.
                loss = (
                    _validation_loss(self._directory / str(info.step)) if info.metrics is None else info.metrics[_LOSS]
                )
            except DamagedError as error:
                # It may be the best, and readable again.
                logging.warning("%s; it is kept", error)
                unreadable.add(info.step)
            else:
                losses |= {} if loss is None else {info.step: loss}
        best = sorted(losses, key=lambda step: losses[step])[: self._number]
        return [info.step in best or info.step in unreadable for info in checkpoints]


@contextlib.contextmanager
def open_checkpoints(
    workdir: epath.Path, *, keep: int | None = None, keep_best: int = 1, removes_unfinished: bool = False
) -> Iterator[ocp.CheckpointManager]:
    """Opens the checkpoints of a run; leaving the context waits for those that are being written.

    Args:
        workdir: the run's directory; created if missing.
        keep: number of latest checkpoints to keep, None for all.
        keep_best: number of others to keep, those with the smallest validation loss.
        removes_unfinished: whether to remove what saves left behind that were killed; for the run itself, for they may
            also be saves that it is still writing.

    Raises:
        CheckpointError: on leaving, one could not be written.
    """
    directory = _absolute(workdir / DIRECTORY)
    with _naming_failures(directory):
        checkpoints = ocp.CheckpointManager(directory, options=_options(directory, keep, keep_best, removes_unfinished))
    try:
        yield checkpoints
    finally:
        with _naming_failures(directory):
            checkpoints.close()


def _options(
    directory: epath.Path, keep: int | None, keep_best: int, removes_unfinished: bool
) -> ocp.CheckpointManagerOptions:
    policies = ocp.checkpoint_managers
    return ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), _Best(directory, keep_best)]),
        # Which steps to save is the training loop's business.
        save_decision_policy=policies.FixedIntervalPolicy(1),
        # One checkpoint that is damaged must not keep the others from being opened.
        lightweight_initialize=True,
        cleanup_tmp_directories=removes_unfinished,
    )


def save(
    checkpoints: ocp.CheckpointManager,
    step: int,
    items: Mapping[str, Any],
    run: Mapping[str, Any],
    *,
    validation_loss: float | None = None,
) -> None:
    """Saves the trees under `step`; every process calls it, with its parts of the arrays and the same `run`.

    Returns once the arrays are copied from the devices; the files are written in the background.

    Args:
        checkpoints: from `open_checkpoints`.
        step: that is not saved yet, above all that are.
        items: trees of arrays by name.
        run: JSON to save beside them.
        validation_loss: of these parameters, by which the best checkpoints are known; None if it is not known.

    Raises:
        CheckpointError: this checkpoint, or the one before, could not be written.
    """
    leaves = _named_leaves(items)
    sums = jax.device_get(checksums(leaves))
    described = {
        name: {"shape": list(leaf.shape), "dtype": leaf.dtype.name, "checksum": int(sums[name])}
        for name, leaf in leaves.items()
    }
    content = json.loads(strict_json.dumps({**run, _LEAVES: described, _LOSS: validation_loss}))
    args = {name: ocp.args.StandardSave(item) for name, item in items.items()}
    args[_RUN_ITEM] = ocp.args.JsonSave({"crc32": _crc32(content), "content": content})
    # For `_Best`, and only there: an empty dict would be no metrics either.
    metrics = {_LOSS: content[_LOSS]}
    with _naming_failures(checkpoints.directory):
        checkpoints.save(step, args=ocp.args.Composite(**args), metrics=metrics)


def add_validation_loss(checkpoints: ocp.CheckpointManager, step: int, loss: float) -> None:
    """Adds the loss to a checkpoint that was saved without, which stays what it is; every process calls it.

    Raises:
        CheckpointError: it cannot be written.
    """
    if jax.process_index() == 0:
        with _naming_failures(checkpoints.directory):
            strict_json.write(checkpoints.directory / str(step) / _LOSS_FILE, {_LOSS: loss})


def check_for_errors(checkpoints: ocp.CheckpointManager) -> None:
    """Raises CheckpointError if a checkpoint could not be written in the background; cheap enough for every step."""
    # Not with the manager's own method, which forgets an error that it has raised: the thread that deletes old
    # checkpoints may not have seen it yet, and would take the new one for complete.
    if not checkpoints.is_saving_in_progress():
        wait_until_saved(checkpoints)


def wait_until_saved(checkpoints: ocp.CheckpointManager) -> None:
    """Waits for the checkpoint that is being written; raises CheckpointError if it could not be."""
    with _naming_failures(checkpoints.directory):
        checkpoints.wait_until_finished()


def validation_losses(checkpoints: ocp.CheckpointManager, *, skips_damaged: bool) -> dict[int, float]:
    """The losses by step, of the checkpoints that bear one.

    Raises:
        DamagedError: one cannot be read, and those are not to be skipped.
    """
    losses = {}
    for step in checkpoints.all_steps():
        with contextlib.suppress(DamagedError) if skips_damaged else contextlib.nullcontext():
            losses[step] = _validation_loss(checkpoints.directory / str(step))
    return {step: loss for step, loss in losses.items() if loss is not None}


def find_step(workdir: epath.Path, which: str) -> int:
    """The step of a complete checkpoint; writes nothing.

    Args:
        workdir: the run's directory.
        which: "latest"; "best", of the smallest validation loss; or the number of a step.

    Raises:
        FileNotFoundError: there is none.
        ValueError: `which` is none of these.
        DamagedError: which is the best cannot be told.
    """
    if which not in ("latest", "best") and not which.isdecimal():
        raise ValueError(f"checkpoint is {which!r}; it must be 'latest', 'best' or the number of a step")
    directory = epath.Path(workdir) / DIRECTORY
    steps, losses = [], {}
    if directory.is_dir():
        with open_checkpoints(epath.Path(workdir)) as checkpoints:
            steps = sorted(checkpoints.all_steps())
            losses = validation_losses(checkpoints, skips_damaged=False) if which == "best" else {}
    if not steps:
        raise FileNotFoundError(f"{workdir} holds no checkpoint: nothing is saved in {directory}")
    if which == "latest":
        return steps[-1]
    if which == "best":
        if not losses:
            raise FileNotFoundError(f"{workdir} holds no checkpoint that was validated; there are {steps}")
        return min(losses, key=lambda step: losses[step])
    if int(which) not in steps:
        raise FileNotFoundError(f"{workdir} holds no checkpoint of step {which}; there are {steps}")
    return int(which)


def restore_params(workdir: epath.Path, step: int, abstract_params: Any, *, cast: bool = False) -> Any:
    """Restores the parameters alone; arguments and errors as for `restore`."""
    with open_checkpoints(epath.Path(workdir)) as checkpoints:
        return restore(checkpoints, step, {PARAMS_ITEM: abstract_params}, cast=cast).items[PARAMS_ITEM]


def restore(
    checkpoints: ocp.CheckpointManager, step: int, abstract: Mapping[str, Any], *, cast: bool = False
) -> Restored:
    """Restores the trees of a checkpoint, all or none, and checks each array against its checksum.

    Args:
        checkpoints: from `open_checkpoints`.
        step: a saved step.
        abstract: for each item wanted, its tree of `jax.ShapeDtypeStruct`s with their places on a mesh, from
            `sharding.placed`. Layers may be scanned where they were not when saved, and the other way round.
        cast: whether floating-point arrays may have been saved in another dtype than is wanted.

    Raises:
        DamagedError: the checkpoint cannot be read, or does not hold what was written.
        MismatchError: it holds other arrays than `abstract` says; the message names them, and nothing is loaded.
    """
    directory = checkpoints.directory / str(step)
    with _in_all_processes(step):
        run, loss = _read_run(directory), _validation_loss(directory)
    saved = run.pop(_LEAVES)
    places = {name: leaf.sharding for name, leaf in _named_leaves(abstract).items()}
    mesh = next(iter(places.values())).mesh
    as_saved = like_layers_of(saved, dict(abstract))
    _require_same_leaves(_named_leaves(as_saved), saved, items=abstract.keys(), step=step, cast=cast)
    as_saved = sharding.placed(
        jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, saved[_name(path)]["dtype"]), as_saved
        ),
        mesh,
    )
    with _in_all_processes(step), _damage(step):
        # Not through the manager, where each process waits for all the others, and so for one that has failed.
        reader = ocp.StandardCheckpointHandler()
        items = {
            name: reader.restore(directory / name, args=ocp.args.StandardRestore(item))
            for name, item in as_saved.items()
        }
    sums = jax.device_get(checksums(_named_leaves(items)))
    wrong = [name for name, value in sums.items() if value != saved[name]["checksum"]]
    if wrong:
        raise DamagedError(f"checkpoint {step} is damaged: {_some(wrong)} changed since it was written")
    del run[_LOSS]
    return Restored(_converted(items, dict(abstract)), run, loss)


def move_aside(workdir: epath.Path, step: int) -> epath.Path:
    """Moves a damaged checkpoint out of the way, to where it can be looked at; every process calls it.

    Returns:
        Its new place.
    """
    target = workdir / f"{DAMAGED}{step}"
    if jax.process_index() == 0:
        if target.exists():
            target.rmtree()
        (workdir / DIRECTORY / str(step)).rename(target)
    multihost_utils.sync_global_devices(f"{target} is there")
    return target


def _read_run(directory: epath.Path) -> dict[str, Any]:
    """The content of the item of plain JSON of the checkpoint in `directory`.

    Raises:
        DamagedError: it is not what was written.
    """
    step = int(directory.name)
    with _damage(step):
        saved = ocp.JsonCheckpointHandler().restore(directory / _RUN_ITEM)
        content = saved["content"]
        if saved["crc32"] != _crc32(content):
            raise DamagedError(f"checkpoint {step} is damaged: its item {_RUN_ITEM!r} changed since it was written")
    return content


def _validation_loss(directory: epath.Path) -> float | None:
    """The loss that a checkpoint bears; None if it was not computed yet."""
    loss = _read_run(directory)[_LOSS]
    if loss is None and (directory / _LOSS_FILE).exists():
        with _damage(int(directory.name)):
            loss = json.loads((directory / _LOSS_FILE).read_text())[_LOSS]
    return loss


def _require_same_leaves(
    wanted: Mapping[str, Any], saved: Mapping[str, Any], *, items: Any, step: int, cast: bool
) -> None:
    """Compares the saved leaves of these items with those that are wanted.

    Raises:
        MismatchError: they are not the same; it names the leaves.
    """
    saved = {name: leaf for name, leaf in saved.items() if name.split("/")[0] in items}
    differences = [f"{name} is missing" for name in wanted if name not in saved]
    differences += [f"{name} is not expected" for name in saved if name not in wanted]
    for name in wanted.keys() & saved.keys():
        shape, dtype = tuple(saved[name]["shape"]), jnp.dtype(saved[name]["dtype"])
        may_cast = cast and jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(wanted[name].dtype, jnp.floating)
        if shape != wanted[name].shape or (dtype != wanted[name].dtype and not may_cast):
            there, here = f"{dtype.name} {shape}", f"{wanted[name].dtype.name} {wanted[name].shape}"
            differences.append(f"{name} is {there} there and {here} here")
    if differences:
        raise MismatchError(f"checkpoint {step} is of another model: {_some(sorted(differences))}")


def _converted(items: dict[str, Any], abstract: dict[str, Any]) -> dict[str, Any]:
    """The restored items with the layers, dtypes and places that are wanted."""
    described = lambda tree: {name: (leaf.shape, leaf.dtype) for name, leaf in _named_leaves(tree).items()}
    if described(items) == described(abstract):
        return items

    def convert(items: dict[str, Any]) -> dict[str, Any]:
        laid_out = like_layers_of(_named_leaves(abstract), items)
        return jax.tree.map(lambda leaf, wanted: leaf.astype(wanted.dtype), laid_out, abstract)

    places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(convert, out_shardings=places)(items)


def _named_leaves(items: Mapping[str, Any]) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(dict(items))}


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _some(texts: list[str], most: int = 8) -> str:
    rest = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return "; ".join(texts[:most] + rest)


def _crc32(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


@contextlib.contextmanager
def _in_all_processes(step: int) -> Iterator[None]:
    """Raises DamagedError in all processes if one of them does: they read different parts of the arrays."""
    error = None
    try:
        yield
    except DamagedError as raised:
        error = raised
    if np.any(multihost_utils.process_allgather(np.asarray(error is not None))):
        raise error or DamagedError(f"checkpoint {step} is damaged: another process cannot read its part")


@contextlib.contextmanager
def _damage(step: int) -> Iterator[None]:
    """Turns what reading damaged files raises into DamagedError.

    Raises:
        DamagedError: in place of anything but the following, which say themselves what is wrong.
        CheckpointError: as it came.
        PermissionError: as it came.
        ConnectionError: as it came.
        TimeoutError: as it came.
    """
    try:
        yield
    except (CheckpointError, PermissionError, ConnectionError, TimeoutError):
        raise
    # Whatever can be wrong with a file, some library below has its own exception for it.
    except Exception as error:
        raise DamagedError(f"checkpoint {step} is damaged: {first_line(error)}") from error


@contextlib.contextmanager
def _naming_failures(directory: epath.Path) -> Iterator[None]:
    """Names the directory in what a failed write raises.

    Raises:
        CheckpointError: in place of any other exception.
    """
    try:
        yield
    # A full disk, a directory without permission and a bucket out of reach arrive as exceptions of several libraries.
    except Exception as error:
        raise CheckpointError(
            f"checkpoints could not be written to {directory}: {first_line(error)}; "
            "those that were complete before are untouched"
        ) from error


def _absolute(path: epath.Path) -> epath.Path:
    return path if is_remote(path) else path.resolve()


def first_line(error: BaseException) -> str:
    """What a library says about a failure, cut to the length of a sentence."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
