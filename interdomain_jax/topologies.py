"""Devices that are not there, to compile for: the real TPU and GPU compilers, on a machine with neither.

Needs the extra `compilers`, and a process that has not looked for accelerators yet: set `JAX_PLATFORMS=cpu`.
"""

import importlib.util
import math
import os
import re
from pathlib import Path

import jax
from jax.experimental import topologies

# The compiler's name for the chip's cores seen as one device, where it is not the default.
_TPUS: dict[str, dict[str, str]] = {"v4": {"chip_config_name": "megacore"}, "v5e": {}, "v5p": {}, "v6e": {}}
_H100 = Path(__file__).with_name("h100_target_config.txt")
# Joined by NVLink in one machine.
_GPUS_OF_A_HOST = 8

ENVIRONMENT = {
    # There is no cloud to ask about this machine, and no device that only one process may use.
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Nor a GPU's driver whose version matters.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
"""What `absent_devices` sets, unless it is set."""


def absent_devices(topology: str, num_slices: int = 1) -> list[jax.Device]:
    """Returns devices that programs can be compiled for, but not run on; one for each chip.

    Args:
        topology: `v4:2x2x1`, `v5e:16x16`, `v5p:4x4x4` or `v6e:8x8`: a TPU slice by its chips along each axis; or
            `h100:8`, the GPUs of one machine.
        num_slices: as many TPU slices, joined by the data centre's network; of several, each device has a
            `slice_index`.

    Raises:
        ValueError: the topology is not written so, or the compiler refuses it or is not installed.
    """
    match = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", topology)
    if match is None:
        raise ValueError(f"topology is {topology!r}; it must be like 'v5e:16x16' or 'h100:8'")
    chip, sizes = match[1], [int(size) for size in match[2].split("x")]
    if chip not in (*_TPUS, "h100"):
        raise ValueError(f"topology {topology!r} names no known chip; known: {', '.join([*_TPUS, 'h100'])}")
    if num_slices < 1:
        raise ValueError(f"num_slices is {num_slices}; it must be at least 1")
    if package := missing_compiler(chip):
        raise ValueError(
            f"topology {topology!r} needs the package {package}; `pip install -e '.[compilers]'` brings it"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if chip == "h100":
        return _gpus(topology, sizes, num_slices)
    options: dict[str, str | int | tuple[int, int, int]] = {**_TPUS[chip]}
    if math.prod(sizes) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if num_slices > 1:
        options["num_slices"] = num_slices
    try:
        return topologies.get_topology_desc(topology_name=topology, platform="tpu", **options).devices
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"topology {topology!r} is refused by the TPU compiler: {str(error).splitlines()[0]}"
        ) from error


def missing_compiler(chip: str) -> str | None:
    """The package that compiling for a chip ("v5e", "h100") wants and this environment lacks, if any."""
    is_gpu = chip.lower() == "h100"
    module, package = ("jax_plugins.xla_cuda12", "jax-cuda12-plugin") if is_gpu else ("libtpu", "libtpu")
    try:
        return None if importlib.util.find_spec(module) else package
    except ModuleNotFoundError:
        return package


def compiler_options(device: jax.Device) -> dict[str, str | bool]:
    """The options that `lowered.compile(compiler_options=...)` needs for an absent device."""
    # A GPU's compiler times its candidates on the device, unless told that there is none.
    return {} if device.platform == "tpu" else {"xla_gpu_autotune_level": "0"}


def _gpus(topology: str, sizes: list[int], num_slices: int) -> list[jax.Device]:
    if len(sizes) != 1 or sizes[0] > _GPUS_OF_A_HOST or num_slices > 1:
        raise ValueError(
            f"topology {topology!r} with num_slices={num_slices} is not known here; "
            f"of GPUs, one machine of at most {_GPUS_OF_A_HOST} is: 'h100:{_GPUS_OF_A_HOST}'"
        )
    try:
        return topologies.get_topology_desc(
            topology_name="H100",
            platform="cuda",
            target_config=_H100.read_text(),
            topology=f"1x1x{sizes[0]}",
        ).devices
    except NotImplementedError as error:
        raise ValueError(
            f"topology {topology!r} needs jax's CUDA plugin, which did not start; run with JAX_PLATFORMS=cpu"
        ) from error
