"""Drawing tokens, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax.inference.sampling import Sampling, _filtered, next_tokens

SETTINGS = st.builds(
    Sampling,
    temperature=st.just(1.0),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    repetition_penalty=st.just(1.0),
)


def as_arrays(*settings):
    return Sampling(*(jnp.asarray(values) for values in zip(*settings, strict=True)))


def kept_by_numpy(logits, settings):
    """The tokens that the filters leave, one after the other over a sorted list."""
    order = np.argsort(-logits, kind="stable")
    if settings.top_k:
        order = order[: settings.top_k]
    probabilities = np.exp(logits[order] - logits[order[0]])
    probabilities /= probabilities.sum()
    kept, total = [], 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if kept and total >= settings.top_p:
            break
        kept.append(token)
        total += probability
    return {int(token) for token in kept if np.exp(logits[token] - logits[order[0]]) >= settings.min_p}


@given(seed=st.integers(0, 1000), settings=st.lists(SETTINGS, min_size=1, max_size=3))
def test_the_filters(seed, settings):
    logits = np.random.default_rng(seed).normal(scale=2.0, size=(len(settings), 10)).astype(np.float32)
    filtered = np.asarray(_filtered(jnp.asarray(logits), as_arrays(*settings)))
    for row, each in enumerate(settings):
        kept = np.flatnonzero(np.isfinite(filtered[row]))
        cumulative = np.cumsum(np.sort(np.exp(logits[row].astype(np.float64)))[::-1])
        # Where the sum comes within rounding of top_p, one more or less is as right.
        if np.any(np.abs(cumulative / cumulative[-1] - each.top_p) < 1e-5):
            continue
        assert set(kept.tolist()) == kept_by_numpy(logits[row].astype(np.float64), each)
        np.testing.assert_array_equal(filtered[row, kept], logits[row, kept])


def test_each_row_has_settings_of_its_own():
    logits = jnp.asarray([[0.0, 1.0, 3.0, 2.9]] * 4)
    seen = jnp.asarray([[False, False, True, False]] * 4)
    settings = as_arrays(
        Sampling(), Sampling(repetition_penalty=2.0), Sampling(temperature=1e-3), Sampling(temperature=5.0, top_k=1)
    )
    keys = jax.random.split(jax.random.key(0), 4)
    assert next_tokens(logits, seen, settings, keys).tolist() == [2, 3, 2, 2]


def test_the_penalty_makes_tokens_that_were_seen_less_likely_whatever_their_sign():
    logits = jnp.asarray([[-1.0, -1.5], [1.0, 0.9]])
    seen = jnp.asarray([[True, False], [True, False]])
    settings = as_arrays(*[Sampling(repetition_penalty=1.6)] * 2)
    assert next_tokens(logits, seen, settings, jax.random.split(jax.random.key(0), 2)).tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature):
    count = 20_000
    logits = np.array([0.0, 1.0, 2.0, -1.0], np.float32)
    expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    drawn = next_tokens(
        jnp.broadcast_to(logits, (count, 4)),
        jnp.zeros((count, 4), bool),
        as_arrays(*[Sampling(temperature=temperature)] * count),
        jax.random.split(jax.random.key(1), count),
    )
    shares = np.bincount(drawn, minlength=4) / count
    # Five standard deviations.
    np.testing.assert_array_less(np.abs(shares - expected), 5 * np.sqrt(expected * (1 - expected) / count))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (dict(temperature=-0.1), "temperature is -0.1; it must be at least 0"),
        (dict(temperature=float("nan")), "temperature is nan"),
        (dict(top_k=-1), "top_k is -1"),
        (dict(top_p=0.0), "top_p is 0.0; it must be above 0 and at most 1"),
        (dict(min_p=1.5), "min_p is 1.5"),
        (dict(repetition_penalty=0.0), "repetition_penalty is 0.0"),
    ],
)
def test_settings_out_of_range(settings, named):
    with pytest.raises(ValueError, match=named):
        Sampling(**settings).check()
