"""Checksums against NumPy, and what they must tell apart."""

import json

import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from interdomain_jax.checksums import checksum, checksums
from tests.virtual_devices import run_on_eight_devices

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
DTYPES = [np.float32, jnp.bfloat16, np.int32, np.uint32, np.uint8]


def oracle(array: np.ndarray) -> int:
    """The same in Python's whole numbers, entry after entry."""
    bits = array.reshape(-1).view(UNSIGNED[array.dtype.itemsize]).tolist()
    return sum(scrambled(scrambled(place) ^ value) for place, value in enumerate(bits)) % 2**32


def scrambled(number: int) -> int:
    number ^= number >> 16
    number = number * 0x85EBCA6B % 2**32
    number ^= number >> 13
    number = number * 0xC2B2AE35 % 2**32
    return number ^ number >> 16


def random_bits(dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4, 5), (0,), (4, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_equals_a_sum_over_whole_numbers(dtype, shape):
    # Every pattern of bits, those of NaN and of the infinities too.
    array = random_bits(dtype, shape)
    result = checksum(jnp.asarray(array))
    assert result.dtype == jnp.uint32
    assert int(result) == oracle(array)


@hypothesis.given(st.data(), st.sampled_from(DTYPES), hypothesis.extra.numpy.array_shapes(max_dims=3, max_side=6))
def test_a_flipped_bit_changes_it(data, dtype, shape):
    array = random_bits(dtype, shape)
    flipped = array.copy()
    place = data.draw(st.integers(0, array.nbytes * 8 - 1))
    flipped.reshape(-1).view(np.uint8)[place // 8] ^= 1 << (place % 8)
    assert int(checksum(jnp.asarray(flipped))) != int(checksum(jnp.asarray(array)))


def test_of_a_tree():
    tree = {"a": jnp.arange(3.0), "b": [jnp.int32(-1), jnp.zeros((2, 2))]}
    sums = checksums(tree)
    assert jax.tree.structure(sums) == jax.tree.structure(tree)
    expected = [oracle(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)]
    assert [int(value) for value in jax.tree.leaves(sums)] == expected


def test_tells_apart_what_differs_in_high_bits_alone():
    """Where entries were only weighed and added, their high bits would cancel out modulo 2^32."""
    array = np.zeros((64, 64), np.float32)
    array[0], array[32] = 1.0, 2.0
    swapped, other_zero = array.copy(), array.copy()
    swapped[[0, 32]] = swapped[[32, 0]]
    other_zero[1] = -0.0
    others = [array, swapped, -array, other_zero, array.reshape(128, 32)[::-1], array.T]
    sums = [int(checksum(jnp.asarray(other))) for other in others]
    assert len({*sums}) == len(others)
    assert int(checksum(jnp.asarray(array.reshape(-1)))) == sums[0]


PROGRAM = """
import json
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
from interdomain_jax.checksums import checksums
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
array = np.random.default_rng(0).random((4, 24), np.float32)
layouts = [(), ("x",), (None, "y"), ("x", "y"), (None, ("y", "x")), ("y", "x")]
places = [NamedSharding(mesh, PartitionSpec(*layout)) for layout in layouts]
print(json.dumps([int(value) for value in checksums([jax.device_put(array, place) for place in places])]))
"""


def test_is_independent_of_the_layout_over_devices():
    expected = oracle(np.random.default_rng(0).random((4, 24), np.float32))
    assert json.loads(run_on_eight_devices(PROGRAM)) == [expected] * 6
