"""The ideal derivation: online coefficients against exact projections, and the regression against exact attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from numpy.polynomial import legendre

from interdomain_jax.ops.kernel_regression import (
    draw_frequencies,
    fourier_features,
    kernel_regression,
    legs_change,
    legs_step,
)
from tests.numerics import assert_close, random_qkv, relative_rms, to_float64

regression = jax.jit(kernel_regression, static_argnames="order")


@partial(jax.jit, static_argnames="order")
def online(inputs, *, order):
    """The coefficients after each token of inputs [T, C]: [T, M, C], in the dtype of the inputs."""

    def step(coefficients, token):
        coefficients = legs_step(coefficients, token[1], token[0])
        return coefficients, coefficients

    nothing = jnp.zeros((order, inputs.shape[1]), inputs.dtype)
    return jax.lax.scan(step, nothing, (jnp.arange(len(inputs)), inputs))[1]


def basis_integrals(tokens, order):
    """1/t times the integral of each orthonormal Legendre function of [0, t] over each token: [t, M], exactly."""
    edges = np.linspace(-1, 1, tokens + 1)
    antiderivatives = [legendre.legval(edges, legendre.legint(np.eye(order)[m])) for m in range(order)]
    return np.diff(antiderivatives).T / 2 * np.sqrt(2 * np.arange(order) + 1)


def hippo_legs(order):
    """A_nk = sqrt((2n+1)(2k+1)) below the diagonal, n + 1 on it (Gu et al., 2020, equation 3)."""
    root = np.sqrt(2 * np.arange(order) + 1)
    return np.tril(np.outer(root, root), -1) + np.diag(np.arange(order) + 1.0)


def kernel_attention(kernel, v):
    """sum_n K(q_t, k_n) v_n / sum_n K(q_t, k_n) over n <= t, from the kernel's values [B, H, T, T]."""
    kernel = np.tril(kernel)
    return np.einsum("bhts,bshd->bthd", kernel / kernel.sum(axis=-1, keepdims=True), v)


def gaussian_kernel(q, k, bandwidth):
    differences = q[:, :, None] - k[:, None]
    return np.exp(-np.sum(differences**2, axis=-1) / (2 * bandwidth**2)).transpose(0, 3, 1, 2)


def band_limited(rng, length, width, cycles):
    """Random sums of the sinusoids of 1..cycles periods in the whole: [1, T, 1, width], of unit mean square norm."""
    phase = 2 * np.pi * np.arange(1, cycles + 1) * (np.arange(length) + 0.5)[:, None] / length
    cosines, sines = rng.normal(size=(2, cycles, width)) / np.sqrt(cycles * width)
    return (np.cos(phase) @ cosines + np.sin(phase) @ sines)[None, :, None]


def smooth_problem(rng, length, cycles):
    """Queries of norm 1 in random directions; smooth keys and values. Width 4, one head, in JAX's default dtype."""
    q = rng.normal(size=(1, length, 1, 4))
    q /= np.linalg.norm(q, axis=-1, keepdims=True)
    return tuple(
        jnp.asarray(x) for x in (q, band_limited(rng, length, 4, cycles), band_limited(rng, length, 4, cycles))
    )


def frequency_draws(count, *, features, bandwidth):
    """Independent draws: [draws, R / 2, 4]."""
    frequencies = draw_frequencies(jax.random.key(features), features=count * features, width=4, bandwidth=bandwidth)
    return frequencies.reshape(count, features // 2, 4)


def features_of(x, draws):
    """The features of x [1, T, H, d] for each draw of frequencies, one by batch row: [draws, T, H, R]."""
    return jax.vmap(fourier_features, (None, 0))(x[0], draws)


@pytest.mark.parametrize("order", [1, 12])
def test_online_coefficients_are_the_projection(order):
    inputs = np.random.default_rng(0).normal(size=(200, 3))
    with jax.enable_x64(True):
        coefficients = np.asarray(online(jnp.asarray(inputs), order=order))
    for tokens in (1, 2, 5, 12, 13, 100, 200):
        exact = basis_integrals(tokens, order).T @ inputs[:tokens]
        np.testing.assert_allclose(coefficients[tokens - 1], exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("order", [1, 32])
def test_the_change_is_that_of_the_matrix_exponential(order):
    change = jax.jit(legs_change, static_argnames=("order", "dtype"))
    for tokens in (1, 2, 7, 1000):
        exact = scipy.linalg.expm(-hippo_legs(order) * np.log((tokens + 1) / tokens)) - np.eye(order)
        with jax.enable_x64(True):
            np.testing.assert_allclose(change(tokens, order, jnp.float64), exact, rtol=0, atol=1e-12)
        assert_close(change(tokens, order), exact, 1e-5)


def test_before_the_first_token_there_is_nothing_to_keep():
    np.testing.assert_array_equal(legs_change(0, 6), -np.eye(6))


def test_the_reconstruction_is_the_best_polynomial():
    """Of degree below M, in the mean square over [0, t], as a least squares fit finds it."""
    tokens, order = 100, 8
    times = np.arange(tokens) + 0.5
    signal = np.sin(2 * np.pi * times / tokens) + np.exp(-times / 30)
    with jax.enable_x64(True):
        coefficients = np.asarray(online(jnp.asarray(signal)[:, None], order=order))[-1, :, 0]
    # Gauss-Legendre points within each token: both fits and errors are integrals without error.
    nodes, weights = legendre.leggauss(order)
    points = (2 * times[:, None] + nodes).ravel() / tokens - 1
    root_weights = np.sqrt(np.tile(weights / 2, tokens) / tokens)
    values = np.repeat(signal, order)
    fit = np.linalg.lstsq(root_weights[:, None] * legendre.legvander(points, order - 1), root_weights * values)[0]
    reconstruction = legendre.legval(points, coefficients * np.sqrt(2 * np.arange(order) + 1))
    np.testing.assert_allclose(reconstruction, legendre.legval(points, fit), rtol=0, atol=1e-10)
    # What no polynomial of low degree follows is the steps, whose mean square is slope^2 / 12.
    error = np.sqrt(np.sum(root_weights**2 * (reconstruction - values) ** 2))
    assert error == pytest.approx(np.sqrt(np.mean(np.gradient(signal) ** 2) / 12), rel=0.02)


def test_a_constant_stays_to_the_last_bit():
    coefficients = np.asarray(online(jnp.full((300, 1), 0.7), order=24))[..., 0]
    np.testing.assert_array_equal(coefficients, np.float32(0.7) * np.eye(1, 24).repeat(300, axis=0))


def test_float32_coefficients_do_not_drift():
    inputs = np.random.default_rng(1).normal(size=(3000, 2))
    with jax.enable_x64(True):
        exact = np.asarray(online(jnp.asarray(inputs), order=32))[-1]
    assert_close(online(jnp.asarray(inputs, jnp.float32), order=32)[-1], exact, 2e-5)


def test_the_error_of_random_features():
    """The root mean square over draws is (1 - K^2) / sqrt(R), for any pair of points; and no draw has any at q = k."""
    rng = np.random.default_rng(2)
    q, k = rng.normal(size=(2, 1, 5, 1, 4))
    draws = frequency_draws(4000, features=16, bandwidth=2.0)
    q_features, k_features = (np.asarray(features_of(x, draws))[:, :, 0] for x in (q, k))
    kernel = gaussian_kernel(q, k, 2.0)[0, 0]
    errors = np.einsum("ntr,nsr->nts", q_features, k_features) - kernel
    np.testing.assert_allclose(np.sqrt(np.mean(errors**2, axis=0)), (1 - kernel**2) / 4, rtol=0.1)
    assert np.abs(errors.mean(axis=0)).max() < 5 / 4 / np.sqrt(4000)
    np.testing.assert_allclose(np.sum(q_features**2, axis=-1), 1, rtol=1e-5)


@pytest.mark.parametrize("order", [1, 3, 9])
def test_regression_is_the_read_of_exact_coefficients(order):
    """Equation 9 with U, Gamma and eta from exact integrals, token by token in NumPy; heads and batches apart."""
    rng = np.random.default_rng(4)
    q, k, v = np.abs(rng.normal(size=(3, 2, 7, 3, 5)))
    expected = np.zeros_like(v)
    for tokens in range(1, 8):
        integrals = basis_integrals(tokens, order)
        u, gamma = (np.einsum("tm,bthc->bhmc", integrals, x[:, :tokens]) for x in (k, v))
        scores = np.einsum("bhr,bhmr->bhm", q[:, tokens - 1], u)
        denominator = np.einsum("bhm,m->bh", scores, integrals.sum(axis=0))
        expected[:, tokens - 1] = np.einsum("bhm,bhmd->bhd", scores, gamma) / denominator[..., None]
    with jax.enable_x64(True):
        got = regression(*to_float64((q, k, v)), order=order)
    assert_close(got, expected, 1e-12)


def test_one_coefficient_gives_the_mean_of_the_past():
    q, k, v = (jnp.abs(x) for x in random_qkv(np.random.default_rng(5), 2, 20, 2, 2, 4, 3))
    mean = np.cumsum(v, axis=1) / np.arange(1, 21)[None, :, None, None]
    assert_close(regression(q, k, v, order=1), mean, 1e-6)


def test_error_falls_with_the_order_down_to_the_steps_between_tokens():
    """Against attention with the very kernel of the features. What is left is sum_n da_n dv_n / (12 sum_n K_n) for the
    changes da of K(q, k_n) and dv of the values from one token to the next, for no polynomial follows a staircase."""
    with jax.enable_x64(True):
        q, k, v = smooth_problem(np.random.default_rng(6), 256, 3)
        features = [features_of(x, frequency_draws(1, features=256, bandwidth=1.0)) for x in (q, k)]
        outputs = [np.asarray(regression(*features, v, order=order)) for order in (2, 8, 24)]
    kernel, v = np.einsum("bthr,bshr->bhts", *features), np.asarray(v)
    exact = kernel_attention(kernel, v)
    errors = [relative_rms(output, exact) for output in outputs]
    assert errors[0] > 3 * errors[1] > 100 * errors[2]
    assert errors[2] < 2e-4
    lost = []
    for t in range(128, 256):
        past = kernel[0, 0, t, : t + 1]
        lost.append(np.gradient(past) @ np.gradient(v[0, : t + 1, 0], axis=0) / (12 * past.sum()))
    assert_close((exact - outputs[2])[0, 128:, 0], np.stack(lost), 0.05)


def test_more_coefficients_than_steps_converge_to_attention():
    """A staircase too is followed in the end, though slowly: the error of a jump falls as 1 / M."""
    q, k, v = (np.abs(x) for x in np.random.default_rng(7).normal(size=(3, 1, 6, 1, 4)))
    exact = kernel_attention(np.einsum("bthr,bshr->bhts", q, k), v)
    with jax.enable_x64(True):
        coarse, fine = (relative_rms(regression(q, k, v, order=order), exact) for order in (16, 128))
    assert fine < 2e-3
    assert fine < 0.2 * coarse


def test_error_falls_with_the_square_root_of_the_features():
    """Against exact Gaussian attention, over draws; to first order in the error of the features it is at most
    sum_n (1 - K_n^2) |v_n - o| / (sqrt(R) sum_n K_n), by Minkowski's inequality."""
    q, k, v = smooth_problem(np.random.default_rng(8), 64, 2)
    kernel = gaussian_kernel(q, k, 1.25)
    exact = kernel_attention(kernel, v)
    kernel = np.tril(kernel[0, 0])
    spread = np.einsum("ts,tsd->td", np.tril(1 - kernel**2), np.abs(v[0, None, :, 0] - exact[0, :, None, 0]))
    bound = np.sqrt(np.mean((spread / kernel.sum(axis=1, keepdims=True)) ** 2))
    errors = []
    for features in (64, 1024):
        draws = frequency_draws(16, features=features, bandwidth=1.25)
        output = regression(features_of(q, draws), features_of(k, draws), jnp.repeat(v, 16, axis=0), order=16)
        errors.append(np.sqrt(np.mean((output - exact) ** 2)))
        assert errors[-1] < bound / np.sqrt(features)
    assert 3 < errors[0] / errors[1] < 5.4
    assert errors[1] < 0.03 * np.sqrt(np.mean(exact**2))


def test_causality_by_gradient():
    q, k, v = (jnp.abs(x) for x in random_qkv(np.random.default_rng(9), 1, 6, 1, 1, 4, 3))
    jacobians = jax.jacrev(lambda q, k, v: regression(q, k, v, order=4)[0, :, 0].sum(axis=-1), argnums=(0, 1, 2))(
        q, k, v
    )
    by_query, by_key, by_value = (np.abs(jacobian[:, 0, :, 0]).max(axis=-1) for jacobian in jacobians)
    assert all(np.isfinite(jacobian).all() for jacobian in jacobians)
    for influence in (by_key, by_value):
        np.testing.assert_array_equal(np.triu(influence, 1), 0)
    np.testing.assert_array_equal(by_query, np.diag(np.diag(by_query)))
    # The first output is the first value, whatever the query and the key.
    assert by_value[np.tril_indices(6)].min() > 1e-3
    assert by_key[1:][np.tril_indices(5, 1, 6)].min() > 1e-4
    assert np.diag(by_query)[1:].min() > 1e-4


def test_bfloat16_inputs_keep_float32_coefficients():
    q, k, v = (jnp.abs(x).astype(jnp.bfloat16) for x in random_qkv(np.random.default_rng(10), 2, 40, 2, 2, 8, 4))
    out = regression(q, k, v, order=16)
    exact = regression(*(x.astype(jnp.float32) for x in (q, k, v)), order=16)
    assert out.dtype == jnp.bfloat16
    assert_close(out.astype(jnp.float32), exact, 4e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: draw_frequencies(jax.random.key(0), features=7, width=2, bandwidth=1.0), "features must be even"),
        (lambda x: draw_frequencies(jax.random.key(0), features=8, width=0, bandwidth=1.0), "width must be at least 1"),
        (
            lambda x: draw_frequencies(jax.random.key(0), features=8, width=2, bandwidth=0.0),
            "bandwidth must be positive",
        ),
        (lambda x: fourier_features(x, jnp.zeros((3, 5))), "must agree; got shapes (1, 4, 2, 8) and (3, 5)"),
        (
            lambda x: kernel_regression(x, x, x, order=0),
            "order must be at least 1, the number of coefficients kept; got 0",
        ),
        (lambda x: kernel_regression(x, x[..., :3], x, order=2), "q and k must be [B, T, H, R] of one shape"),
        (lambda x: kernel_regression(x, x, x[:, :3], order=2), "got (1, 4, 2, 8), (1, 4, 2, 8) and (1, 3, 2, 8)"),
        (lambda x: kernel_regression(x[:, :0], x[:, :0], x[:, :0], order=2), "every size at least 1"),
        (lambda x: kernel_regression(x[0], x[0], x[0], order=2), "got (4, 2, 8), (4, 2, 8) and (4, 2, 8)"),
    ],
)
def test_bad_arguments_get_one_sentence(call, message):
    with pytest.raises(ValueError) as error:
        call(jnp.zeros((1, 4, 2, 8)))
    assert message in str(error.value)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)
