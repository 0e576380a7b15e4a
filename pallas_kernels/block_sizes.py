"""How the kernels cut their work, by device and shape.

No row of the table has been timed on its device yet: the sizes are those that fill the matrix units and fit the memory
on the chip, checked with the real compilers.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax

_MIB = 2**20


@dataclass(frozen=True)
class BlockSizes:
    """What one program of a kernel works on.

    Attributes:
        chunk_size: tokens in a chunk. On a TPU a multiple of the 128 lanes, on a GPU a power of two.
        chunks: chunks in a block of tokens, which is fetched as one. Training keeps one state a block, and the backward
            pass works out the others again from it.
        token_bytes: TPU: what blocks of tokens and their gradients may fill, each there twice; a block has fewer chunks
            where so many do not fit.
        max_rows: TPU: rows of queries that are worked on at once, those of all the heads on a state.
        strided_roll: TPU: whether rows can be rolled by their index in one instruction; log2(chunk_size) plain rolls
            do the same.
        vmem_limit_bytes: TPU: the memory on the chip that a program may use.
        num_warps: GPU: warps of a program.
    """

    chunk_size: int = 128
    chunks: int = 4
    token_bytes: int = 16 * _MIB
    max_rows: int = 512
    strided_roll: bool = True
    vmem_limit_bytes: int | None = None
    num_warps: int = 8


class Bucket(NamedTuple):
    """Heads whose state holds up to `reals` numbers are worked on in these sizes."""

    reals: float
    sizes: BlockSizes


_WIDE_TPU = (Bucket(math.inf, BlockSizes(chunks=8, vmem_limit_bytes=48 * _MIB)),)
# By the start of `jax.Device.device_kind`, the longest that fits.
BLOCK_SIZES = {
    # 16 MiB on the chip, and no rolls by the row's index.
    "TPU v4": (Bucket(math.inf, BlockSizes(token_bytes=5 * _MIB, max_rows=128, strided_roll=False)),),
    "TPU v5": _WIDE_TPU,
    "TPU v6": _WIDE_TPU,
    "TPU": (Bucket(math.inf, BlockSizes(vmem_limit_bytes=32 * _MIB)),),
    # 16 rows are the least that a matrix instruction takes; 64 tokens fill a warp group's.
    "NVIDIA": (Bucket(math.inf, BlockSizes(chunk_size=64)),),
    # A CPU only interprets the kernels: small chunks compile fastest.
    "cpu": (Bucket(math.inf, BlockSizes(chunk_size=16, chunks=2, strided_roll=False)),),
}


def device_kind() -> str:
    """The kind of device that is compiled for: that of the mesh in use, which need not be here, or the default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind


def interpreted(wanted: str) -> bool:
    """Whether a kernel for devices whose kind starts with `wanted` is interpreted here: on a CPU, for tests.

    Raises:
        ValueError: the device is neither.
    """
    kind = device_kind()
    if kind != "cpu" and not kind.startswith(wanted):
        raise ValueError(f"this kernel is for devices of kind {wanted!r}, or a CPU that interprets it; got {kind!r}.")
    return kind == "cpu"


def block_sizes(state_dim: int, channels: int) -> BlockSizes:
    """The sizes for states of 2 M C reals on the device that is compiled for.

    Raises:
        ValueError: there is no row for the device.
    """
    kind = device_kind()
    known = [name for name in BLOCK_SIZES if kind.startswith(name)]
    if not known:
        raise ValueError(f"there are no block sizes for device kind {kind!r}; known are {', '.join(BLOCK_SIZES)}.")
    buckets = BLOCK_SIZES[max(known, key=len)]
    return next(bucket.sizes for bucket in buckets if 2 * state_dim * channels <= bucket.reals)
