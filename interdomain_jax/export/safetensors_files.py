"""A model as one `.safetensors` file: its parameters, and in the metadata what is needed to build it.

The metadata has one text, `interdomain_jax`: JSON with `format_version`, 1, and `model`, the fields of `Decoder`.
`tensor_names` has the names. Tensors keep the dtype of the parameters, bfloat16 among them.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from interdomain_jax import strict_json
from interdomain_jax.export.tensor_names import require_same, tensor_shapes, to_params, to_tensors
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.tensor_files import local_path, read_metadata, stored_tensors, write_tensors

FORMAT_VERSION = 1

# One alone: the library writes several in an order that differs from one time to the next.
_TEXT = "interdomain_jax"

# Flax's own; how a model begins, for it has begun; and how it is computed, for whoever computes it to say.
_NOT_SAVED = ("parent", "name", "init_std", "delta_range", "chunk_size", "implementation", "remat", "scan_layers")


class Loaded(NamedTuple):
    """A model that was read from disk.

    Attributes:
        model: the module.
        params: its parameters, `jax.Array`s; `model.apply({"params": params}, tokens)`.
    """

    model: Decoder
    params: Any


def save_model(path: str | os.PathLike[str], model: Decoder, params: Any) -> None:
    """Writes a model to one file, over one that is there, whole or not at all.

    Args:
        path: the file, by custom ending in `.safetensors`; directories that are missing are made.
        model: the module.
        params: its parameters, with scanned layers or without: the file is the same.

    Raises:
        ValueError: the parameters are of another model, and the message names the tensors that differ; or the path is
            in a bucket.
        RunError: the file cannot be written.
    """
    text = strict_json.dumps({"format_version": FORMAT_VERSION, "model": model_fields(model)})
    write_tensors(local_path(path), to_tensors(model, params), {_TEXT: text})


def load_model(path: str | os.PathLike[str], *, scan_layers: bool = False, mesh: Mesh | None = None) -> Loaded:
    """Reads a file that `save_model` wrote.

    Args:
        path: the file.
        scan_layers: whether the module scans its layers, and the parameters lie as that needs them.
        mesh: from `sharding.make_mesh`, on which the parameters are laid as in training; each process reads what its
            own devices hold. None for the default device.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, of another kind or format version, or holds other tensors than its model has; or
            the mesh does not divide a parameter.
    """
    path = local_path(path)
    model = _model_of(path, read_metadata(path)).clone(scan_layers=scan_layers)
    tensors = stored_tensors(path)
    require_same(tensor_shapes(model), tensors, source=f"{path}")
    return Loaded(model, to_params(model, lambda name, index: tensors[name].parts[index], mesh))


def model_fields(model: Decoder) -> dict[str, Any]:
    """The fields that a trained model is made of, dtypes by name, without those that its logits do not depend on."""
    names = [field.name for field in dataclasses.fields(model) if field.name not in _NOT_SAVED]
    fields = {name: getattr(model, name) for name in names}
    return fields | {name: jnp.dtype(fields[name]).name for name in ("dtype", "param_dtype")}


def _model_of(path: Path, metadata: dict[str, str]) -> Decoder:
    if _TEXT not in metadata:
        raise ValueError(f"{path} was not written by this package: its metadata has no {_TEXT!r}")
    try:
        content = json.loads(metadata[_TEXT])
        version, fields = content["format_version"], content["model"]
        if version != FORMAT_VERSION:
            raise ValueError(f"the format version is {version!r}; this package reads {FORMAT_VERSION}")
        fields |= {name: jnp.dtype(fields[name]) for name in ("dtype", "param_dtype")}
        return Decoder(**fields | {"mixers": tuple(fields["mixers"])})
    # No JSON; a field that is missing or that no Decoder has; a value out of its range.
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the metadata of {path} describes no model that can be read: {error}") from error
