"""Chunk sizes by platform and size of the state, as measured by `benchmarks/chunk_sizes.py`.

A longer chunk does more work inside it and keeps fewer states; what is best depends on how large a state is.
"""

import math
from typing import NamedTuple

from pallas_kernels.block_sizes import device_kind


class Bucket(NamedTuple):
    """States of up to `reals` numbers are best walked in chunks of `chunk_size` tokens."""

    reals: float
    chunk_size: int


CHUNK_SIZES = {
    # Two cores, float32, forward and backward, 4,096 tokens of 4 heads.
    "cpu": (Bucket(2**11, 32), Bucket(2**15, 64), Bucket(math.inf, 128)),
    # Not measured yet: the width of a matrix unit.
    "tpu": (Bucket(math.inf, 128),),
    "gpu": (Bucket(math.inf, 128),),
}


def compile_platform() -> str:
    """The platform that is compiled for, a key of `CHUNK_SIZES`; see `device_kind`."""
    kind = device_kind()
    return "cpu" if kind == "cpu" else "tpu" if kind.startswith("TPU") else "gpu"


def default_chunk_size(state_dim: int, channels: int) -> int:
    """The chunk size for states of 2 M C reals on the platform that is compiled for."""
    buckets = CHUNK_SIZES[compile_platform()]
    return next(bucket.chunk_size for bucket in buckets if 2 * state_dim * channels <= bucket.reals)
