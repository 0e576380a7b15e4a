"""The table of chunk sizes."""

import math

from interdomain_jax.ops.chunk_sizes import CHUNK_SIZES, default_chunk_size
from interdomain_jax.ops.interdomain import MAX_CHUNK_SIZE


def test_every_state_has_a_chunk_size_on_every_platform():
    for buckets in CHUNK_SIZES.values():
        limits = [bucket.reals for bucket in buckets]
        assert limits == sorted(set(limits))
        assert limits[-1] == math.inf
        assert all(1 <= bucket.chunk_size <= MAX_CHUNK_SIZE for bucket in buckets)


def test_the_published_sizes_on_a_cpu():
    """64 modes, heads of 64 (125M, 350M, 1.3B) or 96 (760M); small states take shorter chunks, large ones longer."""
    assert default_chunk_size(64, 128) == default_chunk_size(64, 192) == 64
    assert default_chunk_size(16, 32) == 32
    assert default_chunk_size(128, 256) == 128
