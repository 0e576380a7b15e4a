"""What an evaluation has done before it is finished: a file beside the record to be, from which the same one goes on.

<workdir>/evaluations/<name>.partial
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

from interdomain_jax import strict_json
from interdomain_jax.evaluation.records import record_path
from interdomain_jax.trained import Trained
from interdomain_jax.version import code_version


def read_unfinished(trained: Trained, name: str, settings: Mapping[str, Any]) -> list[Any]:
    """What was done of an evaluation by the same code, of the same checkpoint; nothing if it cannot be read.

    Args:
        trained: the checkpoint.
        name: of the record to be.
        settings: all that the numbers depend on beside, the same then and now.
    """
    path = _path(trained, name)
    try:
        content = json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        return []
    is_same = isinstance(content, dict) and content.get("key") == _key(trained, settings)
    return content["done"] if is_same else []


def write_unfinished(trained: Trained, name: str, settings: Mapping[str, Any], done: Sequence[Any]) -> None:
    """Keeps what is done, in process 0, over what was kept before.

    Keep nothing when all is done: where there is such a file, something is left that all processes do together, so that
    none removes the file before the others have read it.
    """
    if jax.process_index() == 0:
        path = _path(trained, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        strict_json.write(path, {"key": _key(trained, settings), "done": done})


def remove_unfinished(trained: Trained, name: str) -> None:
    """Forgets it, in process 0: the evaluation is finished."""
    if jax.process_index() == 0:
        _path(trained, name).unlink(missing_ok=True)


def _path(trained: Trained, name: str) -> epath.Path:
    return record_path(trained.workdir, name).with_suffix(".partial")


def _key(trained: Trained, settings: Mapping[str, Any]) -> Any:
    return strict_json.plain({"step": trained.step, "settings": settings, "versions": code_version()})
