"""Compiling for accelerators that are not there: the real TPU and GPU compilers, on a machine with neither.

Needs the extra `compilers`. What is compiled cannot be run here; it tells the memory it needs, and what it does.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from interdomain_jax.topologies import absent_devices, compiler_options, missing_compiler

__all__ = ["DEVICES", "TPU_TOPOLOGIES", "absent_mesh", "compile_for", "missing_compiler", "trace_for"]

TPU_TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
DEVICES = (*TPU_TOPOLOGIES, "H100")


@cache
def absent_mesh(device: str) -> Mesh:
    """A mesh of one device of a kind in `DEVICES`, to compile for, on one axis, `data`."""
    devices = absent_devices({**TPU_TOPOLOGIES, "H100": "h100:1"}[device])
    return Mesh(np.array(devices[:1]), ("data",), axis_types=(AxisType.Auto,))


def compile_for(
    device: str, function: Callable[..., Any], *arguments: Any, donate: Sequence[int] = ()
) -> jax.stages.Compiled:
    """Compiles a function of abstract arrays for one device of a kind in `DEVICES`.

    Args:
        arguments: pytrees of `jax.ShapeDtypeStruct`.
        donate: the arguments whose memory the results may take.
    """
    mesh = absent_mesh(device)
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    platform = "cuda" if device == "H100" else "tpu"
    options = compiler_options(mesh.devices.item())
    with jax.set_mesh(mesh):
        traced = jax.jit(function, donate_argnums=donate).trace(*jax.tree.map(place, arguments))
        return traced.lower(lowering_platforms=(platform,)).compile(compiler_options=options)


def trace_for(device: str, function: Callable[..., Any], *arguments: Any) -> Jaxpr:
    """The program of a function of abstract arrays, as it is traced for a device of a kind in `DEVICES`."""
    with jax.set_mesh(absent_mesh(device)):
        return jax.make_jaxpr(function)(*arguments).jaxpr
