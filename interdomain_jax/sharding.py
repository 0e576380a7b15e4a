"""The device mesh and how arrays lie on it.

One axis, `data`: a batch is split over every device, parameters are copied to each. Training and
evaluation share this module, so that neither needs to know the other.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA_AXIS = "data"

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def data_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a one-axis mesh over `devices`, by default all of them.

    Raises:
        ValueError: there are several processes; each would write the files of the run.
    """
    if jax.process_count() > 1:
        raise ValueError(f"training and evaluation run in one process; here are {jax.process_count()}")
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh((len(devices),), (DATA_AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """The placement of parameters and metrics: a copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharded(mesh: Mesh) -> NamedSharding:
    """The placement of batches: the leading axis split over the devices."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS))


def on_mesh(function: Callable[Arguments, Result], mesh: Mesh) -> Callable[Arguments, Result]:
    """The function, to be jitted, with the mesh known inside: kernels run on each device's own rows only if it is."""

    @functools.wraps(function)
    def traced(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args, **kwargs)

    return traced


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Puts this process's rows of a batch on its devices, as a part of the global batch.

    Args:
        batch: NumPy arrays [rows of this process, ...]; rows divisible by its number of devices.
        mesh: from `data_mesh`.
    """
    sharding = batch_sharded(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, array) for name, array in batch.items()}
