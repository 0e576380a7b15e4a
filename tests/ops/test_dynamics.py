"""The recurrence's parameters and tables, against closed forms in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interdomain_jax.array_types import Complex
from interdomain_jax.ops import discretize, s4d_inv
from interdomain_jax.ops.dynamics import (
    complex_multiply,
    input_powers,
    lambda_powers,
    read_factors,
    read_matrix,
)
from tests.numerics import random_dynamics


def test_s4d_inv_by_hand():
    """M = 4: Im A_n = (4/pi)(4/(2n+1) - 1) = (4/pi) {3, 1/3, -1/5, -3/7}."""
    eigenvalues = s4d_inv(4)
    np.testing.assert_allclose(eigenvalues.real, -0.5)
    np.testing.assert_allclose(eigenvalues.imag, 4 / np.pi * np.array([3, 1 / 3, -1 / 5, -3 / 7]))


def test_the_fastest_published_mode_turns_128_rad_per_step():
    assert 0.1 * s4d_inv(64).imag[0] == pytest.approx(128.3, abs=0.1)


@pytest.mark.parametrize("delta", [1e-3, 1e-2, 1e-1])
def test_discretize_is_the_zero_order_hold(delta):
    a = s4d_inv(64)
    readout = Complex(jnp.eye(64)[None], jnp.zeros((1, 64, 64)))
    dynamics = discretize(
        jnp.log(jnp.full(1, delta)),
        jnp.log(-jnp.asarray(a.real, jnp.float32))[None],
        jnp.asarray(a.imag, jnp.float32)[None],
        readout,
    )
    np.testing.assert_allclose(dynamics.log_decay[0], delta * a.real, rtol=2e-6)
    np.testing.assert_allclose(dynamics.angle[0], delta * a.imag, rtol=2e-6)
    # The hold is compared at the float32 angle itself: at 128 rad one unit of the angle is already 8e-6 rad.
    held = (np.exp(np.float64(dynamics.log_decay[0]) + 1j * np.float64(dynamics.angle[0])) - 1) / a
    got = dynamics.input_weight.real[0] + 1j * dynamics.input_weight.imag[0]
    np.testing.assert_allclose(got, held, rtol=1e-5, atol=1e-6 * np.abs(held).min())


@pytest.mark.parametrize(("longest", "tolerance"), [(4095, 1e-6), (65_536, 1e-5)])
def test_lambda_powers_at_128_rad_per_step(longest, tolerance):
    """docs/method.md, Numerics: the phase error does not grow with the angle, nor with the lag up to 4096."""
    rng = np.random.default_rng(0)
    angle = jnp.asarray(np.concatenate([[128.3, -128.3, np.pi, 0.0], rng.uniform(-130, 130, 60)]), jnp.float32)[None]
    log_decay = jnp.full_like(angle, -1e-6)
    lags = np.array([0, 1, 2, 63, 64, 127, 255, 1023, longest])
    exact = np.exp(lags[:, None] * (np.float64(log_decay[0]) + 1j * np.float64(angle[0])))
    table = lambda_powers(log_decay, angle, jnp.asarray(lags))[0]
    assert np.abs(table[:, 0] + 1j * table[:, 1] - exact).max() < tolerance


def test_lambda_powers_of_extreme_decays_are_finite():
    """fla#215: log decays from -1e4 to -1e-6."""
    log_decay = -jnp.logspace(-6, 4, 11)[None]
    table = lambda_powers(log_decay, jnp.ones_like(log_decay), jnp.arange(65))
    gradient = jax.grad(lambda d: lambda_powers(d, jnp.ones_like(d), jnp.arange(65)).sum())(log_decay)
    assert np.isfinite(table).all()
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(table[:, 0], np.stack([np.ones((1, 11)), np.zeros((1, 11))], axis=1))


def test_gradients_of_lambda_powers_by_hand():
    """d lambda^j = j lambda^j (d log_decay + i d angle)."""
    log_decay, angle = jnp.array([[-0.01, -0.3]]), jnp.array([[100.0, 0.7]])
    lags = np.array([0, 1, 5, 64])
    power = np.exp(lags[:, None] * (np.float64(log_decay[0]) + 1j * np.float64(angle[0])))
    by_decay, by_angle = jax.jacfwd(lambda_powers, argnums=(0, 1))(log_decay, angle, jnp.asarray(lags))
    for got, factor in ((by_decay, 1), (by_angle, 1j)):
        got = np.einsum("hlpmhm->lpm", got)
        exact = lags[:, None] * power * factor
        np.testing.assert_allclose(got[:, 0], exact.real, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(got[:, 1], exact.imag, rtol=1e-5, atol=1e-4)


def test_input_powers_start_at_the_input_weight():
    dynamics = random_dynamics(np.random.default_rng(0), 2, 8)
    table = input_powers(dynamics, jnp.arange(3))
    np.testing.assert_allclose(table[:, 0, 0], dynamics.input_weight.real, rtol=1e-6)
    np.testing.assert_allclose(table[:, 0, 1], dynamics.input_weight.imag, rtol=1e-6)


def test_complex_multiply_by_hand():
    product = complex_multiply(jnp.array([[1.0], [2.0]]), jnp.array([[3.0], [-4.0]]))
    np.testing.assert_array_equal(product, [[11.0], [2.0]])


@pytest.mark.parametrize("read", ["bilinear", "hermitian"])
def test_read_matrix_against_complex_numpy(read):
    rng = np.random.default_rng(1)
    dynamics = random_dynamics(rng, 2, 6, mode_weights=True)
    y = rng.normal(size=(2, 6)) + 1j * rng.normal(size=(2, 6))
    readout = np.float64(dynamics.readout.real) + 1j * np.float64(dynamics.readout.imag)
    left = readout.conj() if read == "hermitian" else readout
    w = np.einsum("hci,hc,hcj,hj->hi", left, np.float64(dynamics.mode_weights), readout, y)
    w = w.conj() if read == "hermitian" else w
    row = np.concatenate([y.real, y.imag], axis=-1)
    readout, scale = read_factors(dynamics, read)
    factored = np.einsum("hc,hcm->hm", np.einsum("hm,hcm->hc", row, readout) * scale, readout)
    np.testing.assert_allclose(factored, np.concatenate([w.real, -w.imag], axis=-1), rtol=1e-5, atol=1e-5)
    got = np.einsum("hm,hmn->hn", row, read_matrix(dynamics, read))
    np.testing.assert_allclose(got, np.concatenate([w.real, -w.imag], axis=-1), rtol=1e-5, atol=1e-5)
