"""Parameters with scanned layers, `layers` stacked along a first axis, and with separate ones, `layers_0`, `layers_1`.

Both hold the same numbers. The functions take any tree with dicts of parameters in it, such as Adam's moments.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

_STACKED = "layers"
_SEPARATE = re.compile(r"layers_(\d+)")


def stack_layers(tree: Any) -> Any:
    """The tree with separate layers stacked, as `scan_layers` wants them."""

    def stack(params: Mapping[str, Any]) -> dict[str, Any]:
        numbers = sorted(int(match[1]) for name in params if (match := _SEPARATE.fullmatch(name)))
        layers = [params[f"{_STACKED}_{number}"] for number in numbers]
        rest = {name: value for name, value in params.items() if not _SEPARATE.fullmatch(name)}
        return rest | {_STACKED: jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}

    return _map_dicts(stack, tree, having=lambda name: bool(_SEPARATE.fullmatch(name)))


def separate_layers(tree: Any) -> Any:
    """The tree with stacked layers apart."""

    def separate(params: Mapping[str, Any]) -> dict[str, Any]:
        stacked = params[_STACKED]
        count = jax.tree.leaves(stacked)[0].shape[0]
        rest = {name: value for name, value in params.items() if name != _STACKED}
        return rest | {
            f"{_STACKED}_{number}": jax.tree.map(lambda leaf, number=number: leaf[number], stacked)
            for number in range(count)
        }

    return _map_dicts(separate, tree, having=lambda name: name == _STACKED)


def like_layers_of(names: Iterable[str], tree: Any) -> Any:
    """The tree with its layers as leaves of these names, such as "params/layers_0/block_0/mlp/w1/kernel", have theirs.

    Works on arrays, and on each `jax.ShapeDtypeStruct`, which loses its place.
    """
    parts = {part for name in names for part in name.split("/")}
    change = stack_layers if _STACKED in parts else separate_layers
    if all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree)):
        return jax.eval_shape(change, tree)
    return change(tree)


def _map_dicts(change: Callable[[Mapping[str, Any]], Any], tree: Any, *, having: Callable[[str], bool]) -> Any:
    """Changes every dict in the tree that has such a key."""
    is_params = lambda node: isinstance(node, Mapping) and any(having(str(name)) for name in node)
    return jax.tree.map(lambda node: change(node) if is_params(node) else node, tree, is_leaf=is_params)
