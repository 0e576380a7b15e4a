"""The device mesh, and how parameters and batches lie on it.

Four axes: `data` copies the parameters and splits the rows of a batch, `fsdp` splits both, `tensor` splits heads, the
hidden width and the vocabulary, and `seq` splits the tokens of every row and the parameters once more. The program is
one and the same for every mesh; the compiler moves the data. Training and evaluation share this module, so that neither
needs to know the other.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from interdomain_jax.data.windows import CONTEXT
from interdomain_jax.ops.shards import HEAD_AXES, ROW_AXES, TOKEN_AXIS

AXES = (*ROW_AXES, *HEAD_AXES, TOKEN_AXIS)
"""The axes of every mesh, those that want the fastest links last."""

MESH_AXES: dict[str | None, tuple[str, ...]] = {
    "batch": ROW_AXES,
    "length": (TOKEN_AXIS,),
    "embed": ("fsdp", TOKEN_AXIS),
    "heads": HEAD_AXES,
    "mlp": HEAD_AXES,
    "vocab": HEAD_AXES,
    None: (),
}
"""Where each logical axis lies."""

_PER_HEAD = ("heads",)
PARAMETER_AXES: dict[tuple[str, str], tuple[str | None, ...]] = {
    ("embed", "embedding"): ("vocab", "embed"),
    ("unembed", "kernel"): ("embed", "vocab"),
    ("query", "kernel"): ("embed", "heads"),
    ("key", "kernel"): ("embed", "heads"),
    ("value", "kernel"): ("embed", "heads"),
    ("gate", "kernel"): ("embed", "heads"),
    ("output", "kernel"): ("heads", "embed"),
    ("query_convolution", "kernel"): (None, "heads"),
    ("key_convolution", "kernel"): (None, "heads"),
    ("value_convolution", "kernel"): (None, "heads"),
    ("w1", "kernel"): ("embed", "mlp"),
    ("w3", "kernel"): ("embed", "mlp"),
    ("w2", "kernel"): ("mlp", "embed"),
    ("norm", "scale"): (None,),
    ("mixer_norm", "scale"): (None,),
    ("mlp_norm", "scale"): (None,),
    ("mixer", "channel_weights"): (None,),
    ("mixer", "log_delta"): _PER_HEAD,
    ("mixer", "mode_weights"): (*_PER_HEAD, None),
    ("mixer", "log_neg_a_real"): (*_PER_HEAD, None),
    ("mixer", "a_imag"): (*_PER_HEAD, None),
    ("mixer", "readout_real"): (*_PER_HEAD, None, None),
    ("mixer", "readout_imag"): (*_PER_HEAD, None, None),
    ("mixer", "key_scale"): (*_PER_HEAD, None),
    ("mixer", "key_bias"): (*_PER_HEAD, None),
    ("mixer", "value_scale"): (*_PER_HEAD, None),
    ("mixer", "value_bias"): (*_PER_HEAD, None),
}
"""The logical axes of each parameter, by its module and its own name; scanned layers have one more axis before them."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def mesh_config() -> ConfigDict:
    """The sizes of a mesh as a field of a config, or as flags: all devices along `data`."""
    config = ConfigDict()
    # Copies of the parameters, each with its own rows of the batch; the only axis between slices of TPUs.
    config.data = -1
    # Parts that parameters and rows are split into.
    config.fsdp = 1
    # Parts that heads, the hidden width and the vocabulary are split into.
    config.tensor = 1
    # Parts that the tokens of a row are split into, and the parameters once more; not for softmax attention.
    config.seq = 1
    return config


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lays devices out in a mesh with the axes `AXES`, neighbours on the last axes as near as their links allow.

    Where the devices lie in several slices of TPUs, `data` alone goes from slice to slice, over the slower network.

    Args:
        sizes: devices along each of `AXES`; one of them may be -1, for as many as are left.
        devices: the devices, which need not be here; all that there are if None.

    Raises:
        ValueError: the sizes do not fit the devices or the slices.
    """
    devices = jax.devices() if devices is None else devices
    shape = _filled(sizes, len(devices))
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if shape[0] % slices:
        raise ValueError(
            f"mesh.data is {shape[0]}, but the devices lie in {slices} slices; it must be a multiple of that, for no "
            "other axis goes from slice to slice"
        )
    if slices == 1:
        layout = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        layout = mesh_utils.create_hybrid_device_mesh(
            (shape[0] // slices, *shape[1:]), (slices, 1, 1, 1), devices, allow_split_physical_axes=True
        )
    return Mesh(layout, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _filled(sizes: Mapping[str, int], num_devices: int) -> tuple[int, ...]:
    """The size of each axis, -1 filled in.

    Raises:
        ValueError: they do not multiply to the number of devices.
    """
    given = ", ".join(f"{axis}={sizes[axis]}" for axis in AXES)
    if any(size < 1 and size != -1 for size in sizes.values()) or list(sizes.values()).count(-1) > 1:
        raise ValueError(f"mesh is {given}; sizes must be at least 1; one of them may be -1, for as many as are left")
    known = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values() and num_devices % known:
        raise ValueError(f"mesh is {given}; the sizes without the -1 must divide the number of devices, {num_devices}")
    if -1 not in sizes.values() and num_devices != known:
        raise ValueError(f"mesh is {given}; the sizes must multiply to the number of devices, {num_devices}")
    return tuple(num_devices // known if sizes[axis] == -1 else sizes[axis] for axis in AXES)


def replicated(mesh: Mesh) -> NamedSharding:
    """The placement of metrics: a copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The placement of batches [B, T]."""
    return NamedSharding(mesh, PartitionSpec(MESH_AXES["batch"], MESH_AXES["length"]))


def abstract_batch(
    mesh: Mesh, batch_size: int, sequence_length: int, *, reset: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of the loader, each array [B, T] a `jax.ShapeDtypeStruct` with its place.

    With `reset` each document is a context of its own.
    """
    dtypes = {"inputs": jnp.int32, "targets": jnp.int32, "loss_mask": jnp.float32}
    dtypes |= dict.fromkeys(CONTEXT if reset else (), jnp.int32)
    shape = (batch_size, sequence_length)
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(mesh)) for name, dtype in dtypes.items()}


def state_sharding(tree: Any, mesh: Mesh) -> Any:
    """The placement of each leaf of a tree of parameters, or of what has their paths in it, such as Adam's moments.

    Args:
        tree: arrays, real or `jax.ShapeDtypeStruct`; numbers without axes are copied to every device.
        mesh: from `make_mesh`.

    Raises:
        ValueError: mesh axes that do not divide an axis of a parameter.
    """

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        if not leaf.ndim:
            return replicated(mesh)
        module, name = path[-2].key, path[-1].key
        logical = PARAMETER_AXES[module, name]
        first = leaf.ndim - len(logical)
        for axis, size in zip(logical, leaf.shape[first:], strict=True):
            parts = math.prod(mesh.shape[mesh_axis] for mesh_axis in MESH_AXES[axis])
            if size % parts:
                along = " x ".join(f"mesh.{mesh_axis}={mesh.shape[mesh_axis]}" for mesh_axis in MESH_AXES[axis])
                raise ValueError(
                    f"parameter {module}/{name} has {size} entries along its axis {axis!r}; {along} must divide that"
                )
        return NamedSharding(mesh, PartitionSpec(*[None] * first, *(MESH_AXES[axis] for axis in logical)))

    return jax.tree_util.tree_map_with_path(place, tree)


def placed(abstract: Any, mesh: Mesh) -> Any:
    """The tree of `jax.ShapeDtypeStruct`s with each leaf's placement from `state_sharding`."""
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(place, abstract, state_sharding(abstract, mesh))


def on_mesh(function: Callable[Arguments, Result], mesh: Mesh) -> Callable[Arguments, Result]:
    """The function, to be jitted, with the mesh known inside: the mixers then run on each device's own part."""

    @functools.wraps(function)
    def traced(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args, **kwargs)

    return traced


def row_parts(mesh: Mesh) -> int:
    """How many parts the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def process_rows(mesh: Mesh, batch_size: int) -> list[int]:
    """The rows of a batch of `batch_size` that this process's devices hold, in order: those that it has to load."""
    parts = NamedSharding(mesh, PartitionSpec(ROW_AXES)).addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for part in parts if part for row in range(batch_size)[part[0]]})


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh, batch_size: int) -> dict[str, jax.Array]:
    """Puts this process's rows of a batch on its devices, as a part of the global batch.

    Args:
        batch: NumPy arrays [rows of `process_rows`, T].
        mesh: from `make_mesh`.
        batch_size: rows of the global batch.
    """
    sharding = batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, rows, (batch_size, rows.shape[1]))
        for name, rows in batch.items()
    }
