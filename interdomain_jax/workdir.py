"""The run's directory: its saved config and its checkpoints.

* `config.json`: the config of the run, written before its first step;
* `checkpoints/<step>/`: the items `params`, `optimizer` and `data` of a step.
"""

import json
import os
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from interdomain_jax import strict_json

# The parameters are an item of their own, so that a reader of the model never touches the moments.
PARAMS_ITEM = "params"

# What may change when a run goes on: where the corpora lie, how often it reports and saves, and the mesh, which rounds
# sums differently and changes nothing else. Everything else must match, so that a resumed run equals an uninterrupted
# one, bit for bit on the same mesh.
FREE_ON_RESUME = (
    "data.directory",
    "log_every",
    "checkpoint_every",
    "checkpoints_to_keep",
    "mesh.data",
    "mesh.fsdp",
    "mesh.tensor",
    "mesh.seq",
)


def save_config(workdir: Path, config: ConfigDict) -> None:
    """Writes `<workdir>/config.json`, creating the directory."""
    workdir.mkdir(parents=True, exist_ok=True)
    strict_json.write(workdir / "config.json", config.to_dict())


def load_config(workdir: Path) -> ConfigDict:
    """Reads the config that a run saved; tuples come back as tuples.

    Raises:
        FileNotFoundError: `workdir` holds no run.
        ValueError: the saved config is damaged.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{workdir} holds no run: there is no {path}")
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not the config of a run: it is not JSON") from error
    return ConfigDict(_with_tuples(saved))


def require_writable(field: str, directory: Path) -> None:
    """Raises ValueError, naming the field, unless `directory` is one that can be written, or can be made."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"{field} {directory} cannot be a directory: {existing} is a file")
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{field} {directory} cannot be written: no permission for {existing}")


def check_config(workdir: Path, config: ConfigDict) -> None:
    """Checks that `config` continues the run in `workdir`, if there is one.

    Raises:
        ValueError: fields outside `FREE_ON_RESUME` differ; all are listed, with both values.
    """
    if not (workdir / "config.json").is_file():
        return
    saved, given = _flat(load_config(workdir)), _flat(config)
    absent = "absent"
    differences = [
        f"{field} is {saved.get(field, absent)!r} there and {given.get(field, absent)!r} here"
        for field in sorted(saved.keys() | given.keys())
        if field not in FREE_ON_RESUME and saved.get(field, absent) != given.get(field, absent)
    ]
    if differences:
        raise ValueError(
            f"{workdir} holds a run with another config: {'; '.join(differences)}; "
            "give the same values to go on with it, or another workdir"
        )


def open_checkpoints(workdir: Path, *, keep: int | None = None) -> ocp.CheckpointManager:
    """Opens `<workdir>/checkpoints`; use it as a context manager, which waits for pending saves.

    Args:
        workdir: the run's directory; created if missing.
        keep: number of latest checkpoints to keep, None for all.
    """
    return ocp.CheckpointManager(
        (workdir / "checkpoints").resolve(),
        options=ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            # Which steps to save is the training loop's business.
            save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(1),
        ),
    )


def latest_step(workdir: Path) -> int:
    """Returns the step of the latest complete checkpoint; writes nothing.

    Raises:
        FileNotFoundError: there is none.
    """
    directory = workdir / "checkpoints"
    if directory.is_dir():
        with open_checkpoints(workdir) as checkpoints:
            step = checkpoints.latest_step()
        if step is not None:
            return step
    raise FileNotFoundError(f"{workdir} holds no checkpoint: nothing is saved in {directory}")


def restore_params(workdir: Path, step: int, abstract_params: Any) -> Any:
    """Restores the parameters alone.

    Args:
        workdir: the run's directory.
        step: a saved step, from `latest_step`.
        abstract_params: the pytree of `jax.ShapeDtypeStruct` to expect, with their places.
    """
    args = ocp.args.Composite(**{PARAMS_ITEM: ocp.args.StandardRestore(abstract_params)})
    with open_checkpoints(workdir) as checkpoints:
        return checkpoints.restore(step, args=args)[PARAMS_ITEM]


def _with_tuples(value: Any) -> Any:
    match value:
        case dict():
            return {key: _with_tuples(item) for key, item in value.items()}
        case list():
            return tuple(_with_tuples(item) for item in value)
        case _:
            return value


def _flat(config: ConfigDict) -> dict[str, Any]:
    """Maps dotted field names to values, as they read back from JSON."""
    plain = json.loads(strict_json.dumps(config.to_dict()))
    return dict(_leaves(plain, prefix=""))


def _leaves(node: dict[str, Any], *, prefix: str) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for name, value in node.items():
        if isinstance(value, dict):
            leaves += _leaves(value, prefix=f"{prefix}{name}.")
        else:
            leaves.append((prefix + name, value))
    return leaves
