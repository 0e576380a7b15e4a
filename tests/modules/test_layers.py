"""The layers against NumPy and hand-computed values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interdomain_jax.modules.layers import (
    RMSNorm,
    ShortConvolution,
    SwiGLU,
    apply_rope,
    convolve,
    normalize_l2,
    swiglu_hidden_dim,
)
from interdomain_jax.modules.placement import place_tokens


def test_rms_norm_by_hand():
    """(3, 4) has mean square 12.5."""
    norm = RMSNorm(epsilon=0.0)
    out = norm.apply({"params": {"scale": jnp.array([1.0, 2.0])}}, jnp.array([3.0, 4.0]))
    np.testing.assert_allclose(out, [3 / 12.5**0.5, 8 / 12.5**0.5], rtol=1e-6)


def test_rms_norm_takes_its_mean_in_float32():
    x = jnp.full((1, 4096), 300.0, jnp.bfloat16)
    norm = RMSNorm(dtype=jnp.bfloat16)
    out = norm.apply({"params": {"scale": jnp.ones(4096)}}, x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), 1.0)


def test_l2_norm_of_zero_is_finite_with_its_gradient():
    np.testing.assert_array_equal(normalize_l2(jnp.zeros(4)), 0)
    assert np.isfinite(jax.grad(lambda x: normalize_l2(x).sum())(jnp.zeros(4))).all()


def test_rope_by_hand():
    """Four channels: pair (0, 2) turns by the position, pair (1, 3) by position / 100, or the root of another base."""
    x = jnp.array([1.0, 1.0, 0.0, 0.0])[None, None, None]
    out = apply_rope(x, jnp.array([[3]]))[0, 0, 0]
    np.testing.assert_allclose(out, [np.cos(3), np.cos(0.03), np.sin(3), np.sin(0.03)], rtol=1e-5)
    out = apply_rope(x, jnp.array([[3]]), 36.0)[0, 0, 0]
    np.testing.assert_allclose(out, [np.cos(3), np.cos(0.5), np.sin(3), np.sin(0.5)], rtol=1e-5)


def test_rope_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    q, k = jnp.asarray(rng.normal(size=(2, 1, 1, 1, 16)), jnp.float32)
    score = lambda i, j: float(jnp.sum(apply_rope(q, jnp.array([[i]])) * apply_rope(k, jnp.array([[j]]))))
    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(8, 3), abs=1e-2)


def test_short_convolution_against_numpy_and_across_calls():
    rng = np.random.default_rng(1)
    x, kernel = rng.normal(size=(2, 11, 3)), rng.normal(size=(4, 3))
    expected = np.stack(
        [[np.convolve(x[b, :, c], kernel[::-1, c])[:11] for c in range(3)] for b in range(2)]
    ).transpose(0, 2, 1)
    taps = ShortConvolution().apply({"params": {"kernel": jnp.asarray(kernel, jnp.float32)}}, 3)

    def convolved(x, previous=None):
        return convolve(jnp.asarray(x, jnp.float32), taps, place_tokens(None, None, *x.shape[:2]), previous)

    whole, last = convolved(x)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(last, x[:, -3:], rtol=1e-6)
    pieces, previous = [], None
    for piece in np.split(np.float32(x), [1, 3, 8], axis=1):
        y, previous = convolved(piece, previous)
        pieces.append(y)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("d_model", "hidden"), [(128, 384), (768, 2048), (1024, 2816), (1536, 4096), (2048, 5504)])
def test_swiglu_hidden_width(d_model, hidden):
    """(2/3)(4 d_model) rounded up to a multiple of 128, by hand."""
    assert swiglu_hidden_dim(d_model) == hidden


@pytest.mark.parametrize(("given", "hidden"), [(None, 128), (24, 24)])
def test_swiglu_against_numpy(given, hidden):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 3, 8))
    w1, w3, w2 = rng.normal(size=(8, hidden)), rng.normal(size=(8, hidden)), rng.normal(size=(hidden, 8))
    gate = x @ w1
    expected = (gate / (1 + np.exp(-gate)) * (x @ w3)) @ w2
    params = {name: {"kernel": jnp.asarray(w, jnp.float32)} for name, w in (("w1", w1), ("w2", w2), ("w3", w3))}
    out = SwiGLU(given).apply({"params": params}, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
