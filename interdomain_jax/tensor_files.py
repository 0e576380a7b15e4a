"""`.safetensors` files: written whole or not at all, and read part by part, with errors in one sentence."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from interdomain_jax.errors import RunError
from interdomain_jax.workdir import is_remote

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class StoredTensor(NamedTuple):
    """A tensor in a file, not read yet.

    Attributes:
        shape: of the whole.
        dtype: of the whole.
        parts: what to index with a tuple of slices, one for each axis; that reads this part, a NumPy array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: Any


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path, on a local disk.

    Raises:
        ValueError: it is in a bucket, which the library cannot write to or read from.
    """
    if is_remote(path):
        raise ValueError(f"{os.fspath(path)} is not on a local disk, as exported models must be; copy it")
    return Path(path)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes a file so that a reader finds the old one or the new one, never half.

    Raises:
        RunError: it cannot be written; what was there before is untouched.
    """
    # The library writes the memory that an array begins at, whatever its strides are.
    contiguous = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(contiguous, temporary, dict(metadata))
        # The library lets nobody else read what it writes.
        temporary.chmod(mode)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"{path} cannot be written: {error}") from error


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name; the file must not change while they are read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, of another kind, or has tensors of a dtype that no model has.
    """
    file = _open(path)
    tensors = {}
    for name in file.keys():  # noqa: SIM118 (it is no dict)
        parts = file.get_slice(name)
        dtype = _DTYPES.get(parts.get_dtype())
        if dtype is None:
            raise ValueError(f"{path} has {name} in {parts.get_dtype()}; it must be one of {tuple(_DTYPES)}")
        tensors[name] = StoredTensor(tuple(parts.get_shape()), jnp.dtype(dtype), parts)
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """The texts that a file bears beside its tensors; arguments and errors as for `stored_tensors`."""
    return _open(path).metadata() or {}


def _open(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        return safe_open(path, framework="np")
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or a damaged one: {error}") from error
