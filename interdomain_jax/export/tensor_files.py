"""`.safetensors` files of NumPy arrays: written whole or not at all, and read with errors in one sentence."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from interdomain_jax.errors import RunError
from interdomain_jax.workdir import is_remote


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path; raises ValueError if it is in a bucket, which the library cannot write to or read from."""
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


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file, by name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or of another kind.
    """
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)


def read_metadata(path: Path) -> dict[str, str]:
    """The texts that a file bears beside its tensors; arguments and errors as for `read_tensors`."""
    with _opened(path) as file:
        return file.metadata() or {}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or a damaged one: {error}") from error
