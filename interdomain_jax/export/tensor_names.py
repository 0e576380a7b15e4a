"""The names that a model's parameters have on disk: Flax's, joined by dots, with the layers counted through.

    embed.embedding
    layers.0.mixer_norm.scale
    layers.0.mixer.query.kernel
    ...
    norm.scale
    unembed.kernel

Layer `n` is block `n % P` of repeat `n // P` of a pattern of `P` mixers, whether the layers are scanned or not. A
tensor has the shape of its parameter: kernels are [inputs, outputs].
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from interdomain_jax import sharding
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.modules.layer_layout import separate_layers, stack_layers

_LAYER = re.compile(r"layers(?:_(\d+))?\.block_(\d+)\.")
_MOST_DIFFERENCES = 8

Tensors = dict[str, np.ndarray]
Shapes = Mapping[str, jax.ShapeDtypeStruct]
Index = tuple[slice, ...]


def tensor_shapes(model: Decoder) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each tensor of the model by its name on disk; computes nothing."""
    return _by_name(model, _abstract_separate_params(model))


def to_tensors(model: Decoder, params: Any) -> Tensors:
    """The parameters as NumPy arrays by their names on disk.

    Args:
        model: whose parameters they are.
        params: its parameters, with scanned layers or without, whatever `model.scan_layers` says.

    Raises:
        ValueError: they are of another model; the message names the tensors that differ.
    """
    tensors = _by_name(model, separate_layers(jax.device_get(params)))
    require_same(tensor_shapes(model), tensors, source="the tree of parameters")
    return tensors


def to_params(model: Decoder, read: Callable[[str, Index], np.ndarray], mesh: Mesh | None) -> Any:
    """The parameters of the model, arrays of JAX.

    Args:
        model: whose parameters they are; its `scan_layers` says how they lie.
        read: gives a part of a tensor of `tensor_shapes`, from its name and a slice for each of its axes.
        mesh: where `sharding.placed` lays them, each process reading what its devices hold; None for the default
            device.

    Raises:
        ValueError: mesh axes that do not divide an axis of a parameter.
    """
    abstract = _abstract_separate_params(model)
    abstract = jax.eval_shape(stack_layers, abstract) if model.scan_layers else abstract
    abstract = abstract if mesh is None else sharding.placed(abstract, mesh)

    def make(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        def part(index: Index | None) -> np.ndarray:
            index = index or (slice(None),) * leaf.ndim
            if path[0].key != "layers":
                return read(_name(model, path), index)
            repeats = range(leaf.shape[0])[index[0]]
            return np.stack([read(_name(model, path, repeat), index[1:]) for repeat in repeats])

        if leaf.sharding is None:
            return jnp.asarray(part(None))
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part, dtype=leaf.dtype)

    return jax.tree_util.tree_map_with_path(make, abstract)


def require_same(wanted: Shapes, tensors: Mapping[str, Any], *, source: str) -> None:
    """Checks that tensors have the names, shapes and dtypes that are wanted.

    Args:
        wanted: by name.
        tensors: by name; anything with a shape and a dtype.
        source: where they are from, as the subject of the message.

    Raises:
        ValueError: some have not; it names them.
    """
    differences = [f"{name} is missing" for name in wanted if name not in tensors]
    differences += [f"{name} is not expected" for name in tensors if name not in wanted]
    differences += [
        f"{name} is {_described(tensors[name])} where {_described(wanted[name])} is expected"
        for name in wanted.keys() & tensors.keys()
        if _described(tensors[name]) != _described(wanted[name])
    ]
    if differences:
        rest = len(differences) - _MOST_DIFFERENCES
        told = sorted(differences)[:_MOST_DIFFERENCES] + ([f"and {rest} more"] if rest > 0 else [])
        raise ValueError(f"{source} does not fit the model: {'; '.join(told)}")


def _abstract_separate_params(model: Decoder) -> Any:
    # A scanned model is traced in the time of one pattern; how it computes plays no part.
    scanned = model.clone(scan_layers=True, implementation=None)
    init = lambda key: separate_layers(scanned.init(key, jnp.zeros((1, 1), jnp.int32))["params"])
    return jax.eval_shape(init, jax.random.key(0))


def _by_name(model: Decoder, params: Any) -> dict[str, Any]:
    return {_name(model, path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _name(model: Decoder, path: tuple[Any, ...], repeat: int = 0) -> str:
    """The name on disk of a parameter of separate layers, or of one repeat of stacked ones."""
    number = lambda match: f"layers.{int(match[1] or repeat) * len(model.mixers) + int(match[2])}."
    return _LAYER.sub(number, jax.tree_util.keystr(path, simple=True, separator="."))


def _described(tensor: Any) -> str:
    return f"{jnp.dtype(tensor.dtype).name} {tuple(tensor.shape)}"
