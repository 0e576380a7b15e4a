"""The run's directory, on a local disk or in a bucket, and its config, `config.json`, written before the first step."""

import json
import os
from typing import Any

import fsspec
from etils import epath
from ml_collections import ConfigDict

from interdomain_jax import strict_json

# Other processes write to a bucket too: what was listed once may have changed.
fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False

# What may change when a run goes on: where the corpora lie, for they are known by what they hold; how often it reports
# and saves, when it gives up, and the mesh and the scan over layers, which round sums differently and change nothing
# else. Everything else must match, so that a resumed run equals an uninterrupted one, bit for bit on the same mesh.
FREE_ON_RESUME = (
    "data.corpora",
    "data.directory",
    "log_every",
    "checkpoint_every",
    "checkpoint_minutes",
    "checkpoints_to_keep",
    "best_checkpoints_to_keep",
    "max_skipped_in_a_row",
    "hang_seconds",
    "model.scan_layers",
    "mesh.data",
    "mesh.fsdp",
    "mesh.tensor",
    "mesh.seq",
)


def is_remote(path: epath.PathLike) -> bool:
    """Whether the path is one in a bucket, such as "gs://bucket/run"."""
    return "://" in os.fspath(path)


def copy_files(source: epath.Path, target: epath.Path) -> None:
    """Copies all files below a directory to the same places below another one, over those that are there."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_dir():
            copy_files(path, target / path.name)
        else:
            path.copy(target / path.name, overwrite=True)


def save_config(workdir: epath.Path, config: ConfigDict) -> None:
    """Writes `<workdir>/config.json`, creating the directory."""
    workdir.mkdir(parents=True, exist_ok=True)
    strict_json.write(workdir / "config.json", config.to_dict())


def load_config(workdir: epath.Path) -> ConfigDict:
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


def require_writable(field: str, directory: epath.Path) -> None:
    """Checks that `directory` can be written, or can be made.

    Raises:
        ValueError: it cannot; it names the field.
    """
    if is_remote(directory):
        return
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"{field} {directory} cannot be a directory: {existing} is a file")
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{field} {directory} cannot be written: no permission for {existing}")


def check_config(workdir: epath.Path, config: ConfigDict) -> None:
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
