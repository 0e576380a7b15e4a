"""Segment ids: what they say, the order that puts padding last, and cumulative lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax.ops import segment_ids_from_cu_seqlens
from interdomain_jax.ops.packing import find_documents, padding_last, reorder, restore


def test_documents_by_hand():
    ids = jnp.asarray([[0, 1, 1, 0, 1, 2, 0, 0, 3, 1], [2, 2, 2, 2, 2, 2, 2, 0, 0, 0], [0] * 10])
    real, starts = find_documents(ids)
    np.testing.assert_array_equal(real, ids != 0)
    np.testing.assert_array_equal(np.flatnonzero(starts[0]), [5, 8, 9])
    assert not starts[1:].any()
    starts = find_documents(ids, jnp.asarray([1, 1, 7])).starts
    np.testing.assert_array_equal(np.flatnonzero(starts[0]), [5, 8, 9])
    np.testing.assert_array_equal(np.flatnonzero(starts[1]), [0])
    assert not starts[2].any()


# Few lengths, for each compiles anew.
rows = st.sampled_from((1, 2, 9, 20)).flatmap(lambda n: st.lists(st.integers(0, 3), min_size=n, max_size=n))


@given(rows, st.integers(0, 2**32 - 1))
def test_padding_goes_last_and_comes_back(row, seed):
    ids = jnp.asarray([row, row[::-1]])
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(2, len(row), 3)), jnp.float32)
    order = padding_last(ids)
    arranged = reorder(ids, order)
    for before, after in zip(ids, arranged, strict=True):
        tokens = before[before != 0]
        np.testing.assert_array_equal(after, np.pad(tokens, (0, len(row) - len(tokens))))
    np.testing.assert_array_equal(restore(reorder(x, order), order), x)
    weights = jnp.arange(2.0 * len(row)).reshape(2, -1, 1)
    gradient = jax.grad(lambda x: jnp.sum(weights * reorder(x, order)))(x)
    np.testing.assert_array_equal(gradient, jnp.broadcast_to(restore(weights, order), x.shape))


def test_cumulative_lengths_become_segment_ids():
    """Documents of 3, 0 and 2 tokens in a row of 7; traced too."""
    expected = [[1, 1, 1, 3, 3, 0, 0]]
    np.testing.assert_array_equal(segment_ids_from_cu_seqlens(np.array([0, 3, 3, 5]), 7), expected)
    traced = jax.jit(segment_ids_from_cu_seqlens, static_argnums=1)
    np.testing.assert_array_equal(traced(jnp.array([0, 3, 3, 5]), 7), expected)
    np.testing.assert_array_equal(segment_ids_from_cu_seqlens(np.array([0]), 2), [[0, 0]])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 3], "cu_seqlens must start at 0, never fall and end at or below length = 4; got [1, 3]"),
        ([0, 3, 2], "never fall"),
        ([0, 5], "end at or below length = 4; got [0, 5]"),
        ([[0, 2]], "cu_seqlens must be one row of whole numbers; got shape (1, 2) of int64"),
        ([0.0, 2.0], "of float64"),
    ],
)
def test_bad_cumulative_lengths_get_one_sentence(lengths, message):
    with pytest.raises(ValueError) as error:
        segment_ids_from_cu_seqlens(np.array(lengths), 4)
    assert message in str(error.value)
