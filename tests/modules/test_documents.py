"""Packed documents and padding through the modules: each document as if it were alone.

The names in brackets are reports of the fault in other codebases.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax import MIXERS, Decoder
from tests.numerics import assert_close, double_precision, random_segment_ids, relative_rms, to_numpy
from tests.quick import quick_jit

SMALL = dict(vocab_size=61, d_model=16, num_layers=2, num_heads=2, head_dim=8, state_dim=8, chunk_size=8)
PATTERNS = (("interdomain",), ("s4d_rope",), ("softmax",), ("interdomain", "softmax"))
CAPACITY = 48


class Language:
    """A small decoder with its variables, and its calls compiled once for each shape."""

    def __init__(self, mixers):
        self.model = Decoder(mixers=mixers, **SMALL)
        self.variables = quick_jit(self.model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
        self.apply = quick_jit(self.model.apply)

    def __call__(self, tokens, segment_ids=None, cache=None):
        return self.apply(self.variables, tokens, segment_ids=segment_ids, cache=cache)

    def empty_cache(self, batch=1):
        return self.model.init_cache(batch, CAPACITY)


language = functools.cache(Language)


def random_tokens(rng, *shape):
    return jnp.asarray(rng.integers(0, SMALL["vocab_size"], shape), jnp.int32)


@pytest.mark.parametrize("name", ["interdomain", "s4d_rope", "softmax"])
def test_gradients_of_packed_documents_are_the_sum_of_separate_ones(name):
    """Two rows of 1,024 tokens, documents shorter than the convolution among them (fla#955: only a weight gradient
    was wrong)."""
    settings = {} if name == "softmax" else dict(state_dim=4, chunk_size=32)
    mixer = MIXERS[name](num_heads=2, head_dim=4, dtype=jnp.float64, param_dtype=jnp.float64, **settings)
    lengths = ((252, 3, 1, 256, 256, 256), (256, 1, 256, 252, 3, 256))
    ids = jnp.asarray([np.repeat(np.arange(1, 7), row) for row in lengths])
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(2, 2, 1024, 8))

    def documents(array):
        """The documents by length, {length: [documents of it, length, E]}."""
        parts = [part for row, cuts in zip(array, lengths, strict=True) for part in np.split(row, np.cumsum(cuts)[:-1])]
        return {length: np.stack([part for part in parts if len(part) == length]) for length in {1, 3, 252, 256}}

    with double_precision():
        variables = quick_jit(mixer.init)(jax.random.key(1), x)
        noise = np.random.default_rng(2)
        variables = jax.tree.map(lambda leaf: leaf + 0.3 * noise.normal(size=leaf.shape), variables)

        @quick_jit
        @jax.value_and_grad
        def packed(variables):
            return jnp.sum(weights * mixer.apply(variables, x, segment_ids=ids)[0])

        @quick_jit
        @jax.value_and_grad
        def separate(variables):
            pairs = zip(documents(x).values(), documents(weights).values(), strict=True)
            return sum(jnp.sum(weight * mixer.apply(variables, part)[0]) for part, weight in pairs)

        # jax.nn.dot_product_attention takes its softmax in float32.
        tolerance = 1e-6 if name == "softmax" else 1e-10
        assert_close(to_numpy(packed(variables)), to_numpy(separate(variables)), tolerance)


@given(split=st.integers(1, 23), seed=st.integers(0, 2**32 - 1))
def test_a_packed_row_in_two_calls_equals_one(split, seed):
    """Documents that begin, go on and end on either side of the cut, with padding anywhere."""
    rng = np.random.default_rng(seed)
    model = language(("interdomain", "softmax"))
    tokens, ids = random_tokens(rng, 2, 24), random_segment_ids(rng, 2, 24)
    whole, end = model(tokens, ids, model.empty_cache(2))
    # Calls of one width, the rest of it padding, so that one program serves every split.
    fill = lambda x: jnp.pad(x, [(0, 0), (0, 24 - x.shape[1])])
    head, cache = model(fill(tokens[:, :split]), fill(ids[:, :split]), model.empty_cache(2))
    tail, cache = model(fill(tokens[:, split:]), fill(ids[:, split:]), cache)
    pieces = jnp.concatenate([head[:, :split], tail[:, : 24 - split]], axis=1)
    np.testing.assert_allclose(pieces, whole, atol=1e-4)
    for (recurrent, attention), (other_recurrent, other_attention) in zip(cache, end, strict=True):
        assert_close(recurrent, other_recurrent, 1e-4)
        jax.tree.map(np.testing.assert_array_equal, attention[2:], other_attention[2:])


@pytest.mark.parametrize("mixers", PATTERNS)
@pytest.mark.parametrize("place", ["left", "right", "inside"])
def test_padding_changes_nothing(mixers, place):
    """Equal logits, state and next token (mamba#66, transformers#32677)."""
    rng = np.random.default_rng(1)
    model = language(mixers)
    tokens, after = random_tokens(rng, 1, 20), random_tokens(rng, 1, 1)
    expected, cache = model(tokens, None, model.empty_cache())
    expected_after, _ = model(after, None, cache)
    real = np.ones(32, bool)
    real[{"left": slice(0, 12), "right": slice(20, 32), "inside": np.r_[0:3, 9:14, 28:32]}[place]] = False
    # Padding may hold any token, one out of the vocabulary too.
    padded = np.full((1, 32), 10**6, np.int32)
    padded[:, real] = tokens
    logits, padded_cache = model(jnp.asarray(padded), jnp.asarray(real[None], jnp.int32), model.empty_cache())
    np.testing.assert_allclose(logits[:, real], expected, atol=1e-4)
    logits, _ = model(after, jnp.ones((1, 1), jnp.int32), padded_cache)
    np.testing.assert_allclose(logits, expected_after, atol=1e-4)


@pytest.mark.parametrize("length", [7, 8, 9, 20])
def test_prompts_about_the_prefill_length(length):
    """Prefill by eights, the last call padded; then one token (mlxcel#1749: answered from the last part only)."""
    rng = np.random.default_rng(length)
    model = language(("interdomain", "softmax"))
    tokens = random_tokens(rng, 1, length + 1)
    whole, _ = model(tokens)
    cache = model.empty_cache()
    padded = jnp.pad(tokens[:, :-1], [(0, 0), (0, -length % 8)])
    real = (jnp.arange(padded.shape[1]) < length).astype(jnp.int32)[None]
    for start in range(0, length, 8):
        logits, cache = model(padded[:, start : start + 8], real[:, start : start + 8], cache)
    np.testing.assert_allclose(logits[:, (length - 1) % 8], whole[:, -2], atol=1e-4)
    logits, _ = model(tokens[:, -1:], None, cache)
    np.testing.assert_allclose(logits[:, 0], whole[:, -1], atol=1e-4)


@pytest.mark.parametrize("requests", [1, 3, 7])
def test_a_batch_filled_up_with_padding_rows(requests):
    """Prompts of different lengths, decoded three steps: each row equals its solo run (tpu-inference#2752)."""
    rng = np.random.default_rng(requests)
    model = language(("interdomain", "softmax"))
    lengths = rng.choice([2, 7, 12], requests)
    tokens = random_tokens(rng, 8, 12 + 3)
    ids = jnp.asarray((np.arange(12) < np.pad(lengths, (0, 8 - requests))[:, None]), jnp.int32)
    logits, cache = model(tokens[:, :12], ids, model.empty_cache(8))
    rows = jnp.asarray(np.arange(8) < requests, jnp.int32)[:, None]
    steps = [logits[np.arange(requests), lengths - 1]]
    for t in range(12, 15):
        logits, cache = model(tokens[:, t : t + 1], rows, cache)
        steps.append(logits[:requests, 0])
    for row, length in enumerate(lengths):
        solo = jnp.concatenate([tokens[row : row + 1, :length], tokens[row : row + 1, 12:]], axis=1)
        expected, _ = model(solo)
        np.testing.assert_allclose(jnp.stack(steps)[:, row], expected[0, length - 1 :], atol=1e-4)
    np.testing.assert_array_equal(cache[0][0].progress.position[requests:], 0)


def test_twenty_lengths_take_one_program_a_bucket():
    """fla#1147: a recompilation for every packed length."""
    model = Language(("interdomain",))
    rng = np.random.default_rng(2)
    for length in range(5, 25):
        size = 16 if length <= 16 else 32
        ids = jnp.asarray(np.arange(size)[None] < length, jnp.int32)
        model(random_tokens(rng, 1, size), ids)
    assert model.apply._cache_size() == 2


def test_positions_restart_with_every_document():
    """The default positions, written out by hand: RoPE restarts, and goes on behind padding."""
    mixer = MIXERS["interdomain"](num_heads=1, head_dim=4, state_dim=4)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(1, 9, 8)), jnp.float32)
    variables = quick_jit(mixer.init)(jax.random.key(0), x)
    noise = np.random.default_rng(4)
    variables = jax.tree.map(lambda leaf: leaf + 0.3 * noise.normal(size=leaf.shape), variables)
    ids = jnp.asarray([[1, 1, 0, 1, 2, 2, 2, 0, 2]])
    apply = quick_jit(lambda positions: mixer.apply(variables, x, segment_ids=ids, positions=positions)[0])
    default = apply(None)
    np.testing.assert_array_equal(default, apply(jnp.asarray([[0, 1, 77, 2, 0, 1, 2, 77, 3]])))
    assert relative_rms(apply(jnp.arange(9)[None]), default) > 1e-2


def test_segment_ids_of_another_shape_get_one_sentence():
    mixer = MIXERS["softmax"](num_heads=1, head_dim=4)
    x = jnp.zeros((2, 5, 8))
    with pytest.raises(ValueError, match=r"segment_ids must be \[B, T\] = \(2, 5\); got shape \(5,\)"):
        mixer.init(jax.random.key(0), x, segment_ids=jnp.ones(5, jnp.int32))
