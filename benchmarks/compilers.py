"""Compiling for accelerators that are not there: the real TPU and GPU compilers, on a machine with neither.

Needs the extra `compilers`. What is compiled cannot be run here; it tells the memory it needs, and what it does.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.extend.core import Jaxpr
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

TPU_TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
DEVICES = (*TPU_TOPOLOGIES, "H100")

_H100 = Path(__file__).with_name("h100_target_config.txt")


def missing_compiler(device: str) -> str | None:
    """The package that compiling for a device of `DEVICES` wants and this environment lacks, if any."""
    module, package = ("jax_plugins.xla_cuda12", "jax-cuda12-plugin") if device == "H100" else ("libtpu", "libtpu")
    try:
        return None if importlib.util.find_spec(module) else package
    except ModuleNotFoundError:
        return package


@cache
def absent_mesh(device: str) -> Mesh:
    """A mesh of one device of a kind in `DEVICES`, to compile for, on one axis, `data`."""
    if device == "H100":
        topology = topologies.get_topology_desc(
            topology_name="H100", platform="cuda", target_config=_H100.read_text(), topology="1x1x1"
        )
    else:
        # There is no cloud to ask about this machine, and no device that only one process may use.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        topology = topologies.get_topology_desc(topology_name=TPU_TOPOLOGIES[device], platform="tpu")
    return Mesh(np.array(topology.devices[:1]), ("data",), axis_types=(AxisType.Auto,))


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
    # A GPU's compiler times its candidates on the device, unless told that there is none.
    options = {"xla_gpu_autotune_level": "0"} if platform == "cuda" else None
    with jax.set_mesh(mesh):
        traced = jax.jit(function, donate_argnums=donate).trace(*jax.tree.map(place, arguments))
        return traced.lower(lowering_platforms=(platform,)).compile(compiler_options=options)


def trace_for(device: str, function: Callable[..., Any], *arguments: Any) -> Jaxpr:
    """The program of a function of abstract arrays, as it is traced for a device of a kind in `DEVICES`."""
    with jax.set_mesh(absent_mesh(device)):
        return jax.make_jaxpr(function)(*arguments).jaxpr
