"""What accelerators can do at most, by their makers' published figures: the yardstick of utilisation and rooflines."""

from typing import NamedTuple

_GIB = 2**30


class Chip(NamedTuple):
    """One accelerator chip, with all its cores.

    Attributes:
        name: short name, "v5e" or "H100".
        flops: bfloat16 operations per second, dense; a multiplication and an addition are two.
        memory_bytes: of its high-bandwidth memory; the runtime keeps a part of it for itself.
        memory_bandwidth: bytes per second between that memory and the chip.
        link_bandwidth: bytes per second that the chip can send to other chips, over all its ICI or NVLink links.
    """

    name: str
    flops: float
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float


# TPUs: Google Cloud's documentation, the page of each version; where it gives the interconnect for both directions,
# half of it. v4's interconnect: Google's announcement of v5p, which compares the two (2,400 Gbit/s).
# GPUs: NVIDIA's data sheets for the SXM modules, figures without sparsity, half of the NVLink total.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 275e12, 32 * _GIB, 1.2e12, 300e9),
        Chip("v5e", 197e12, 16 * _GIB, 819e9, 200e9),
        Chip("v5p", 459e12, 95 * _GIB, 2.765e12, 600e9),
        Chip("v6e", 918e12, 32 * _GIB, 1.638e12, 400e9),
        Chip("A100 40GB", 312e12, 40 * _GIB, 1.555e12, 300e9),
        Chip("A100 80GB", 312e12, 80 * _GIB, 2.039e12, 300e9),
        Chip("H100", 989e12, 80 * _GIB, 3.35e12, 450e9),
        Chip("H200", 989e12, 141 * _GIB, 4.8e12, 450e9),
    )
}
"""By name."""

# In full: "TPU v5" starts both v5p and v5e, and the PCIe boards of an H100 have other figures than its SXM modules.
_NAMES = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100-SXM4-80GB": "A100 80GB",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
}


def chip(device_kind: str) -> Chip | None:
    """The chip that `jax.Device.device_kind` names, or None for a CPU or a kind whose figures are not listed here."""
    name = _NAMES.get(device_kind)
    return None if name is None else CHIPS[name]
