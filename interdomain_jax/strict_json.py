"""Strict JSON (RFC 8259): every file this package writes can be read by any JSON parser."""

import json
import math
from typing import Any

import numpy as np
from etils import epath


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Serialises `value`; numbers that JSON cannot express (NaN, +-inf) become `null`.

    Args:
        value: nested dicts, lists and tuples of strings, booleans, None, and Python or NumPy
            numbers.
        indent: spaces per level, or None for one line.

    Raises:
        TypeError: for any other type.
    """
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def write(path: epath.PathLike, value: Any) -> None:
    """Writes `value` to `path` so that a reader finds the old file or the new one, never half."""
    path = epath.Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def plain(value: Any) -> Any:
    """The value as it is read back: dicts with string keys, lists, and what else JSON has."""
    match value:
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case np.generic():
            return plain(value.item())
        case float() if not math.isfinite(value):
            return None
        case _:
            return value
