"""The mode report: its kernel against the op, its timescales and angles by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interdomain_jax.ops import describe, interdomain_attention
from interdomain_jax.ops.dynamics import MAX_LAG
from tests.numerics import assert_close, random_dynamics, random_qkv, to_float64, to_numpy


def with_modes(log_decay, angle):
    """Dynamics with these modes in one head."""
    dynamics = random_dynamics(np.random.default_rng(0), 1, len(log_decay))
    return dynamics._replace(log_decay=jnp.array([log_decay]), angle=jnp.array([angle]))


def double_sum(q, k, v, kernel):
    """o_t = sum_{s, s' <= t} (q_t . k_s) W(t-s, t-s') v_{s'}, one token after the other."""
    groups = q.shape[2] // k.shape[2]
    k, v, kernel = np.repeat(k, groups, axis=2), np.repeat(v, groups, axis=2), np.repeat(kernel, groups, axis=0)
    out = []
    for t in range(q.shape[1]):
        lags = t - np.arange(t + 1)
        scores = np.einsum("bhr,bshr->bhs", q[:, t], k[:, : t + 1])
        out.append(np.einsum("bhs,hsu,buhd->bhd", scores, kernel[:, lags[:, None], lags], v[:, : t + 1]))
    return np.stack(out, axis=1)


@pytest.mark.parametrize("read", ["bilinear", "hermitian"])
@pytest.mark.parametrize("mode_weights", [False, True])
def test_the_op_is_the_double_sum_with_the_lag_kernel(read, mode_weights):
    rng = np.random.default_rng(0)
    inputs = random_qkv(rng, 2, 24, 4, 2, 5, 3)
    dynamics = random_dynamics(rng, 2, 8, mode_weights=mode_weights)
    with jax.enable_x64(True):
        q, k, v, dynamics = to_float64((*inputs, dynamics))
        kernel = describe(dynamics, read=read, max_lag=23).lag_kernel
        out, _ = interdomain_attention(q, k, v, dynamics, read=read)
    assert kernel.shape == (2, 24, 24)
    assert_close(double_sum(*to_numpy((q, k, v, kernel))), out, 1e-12)


def test_lag_kernel_of_one_mode_by_hand():
    """M = 1, b = 1, C = 2, lambda = i / 2: W(j, j') = 4 Re(i^(j+j')) / 2^(j+j'), or with i^(j-j') if hermitian."""
    dynamics = with_modes([np.log(0.5)], [np.pi / 2])
    one, zero = jnp.ones((1, 1)), jnp.zeros((1, 1))
    dynamics = dynamics._replace(
        input_weight=dynamics.input_weight._replace(real=one, imag=zero),
        readout=dynamics.readout._replace(real=2 * one[None], imag=zero[None]),
    )
    bilinear = [[4, 0, -1], [0, -1, 0], [-1, 0, 0.25]]
    hermitian = [[4, 0, -1], [0, 1, 0], [-1, 0, 0.25]]
    np.testing.assert_allclose(describe(dynamics, max_lag=2).lag_kernel[0], bilinear, atol=1e-6)
    np.testing.assert_allclose(describe(dynamics, read="hermitian", max_lag=2).lag_kernel[0], hermitian, atol=1e-6)


def test_timescales_by_hand():
    report = describe(with_modes([-1.0, -0.5, -0.001, 0.0, -0.0, np.nan], [0.0] * 6), max_lag=0)
    np.testing.assert_allclose(report.timescales, [[1, 2, 1000, np.inf, np.inf, np.nan]], rtol=1e-6)


def test_angles_are_reduced_by_whole_turns():
    angles = [128.0, -128.0, 0.5, 0.0, 2 * np.pi - 0.25, 2 * np.pi, np.pi + 0.5]
    turn = 2 * np.pi
    expected = [128 - 20 * turn, 20 * turn - 128, 0.5, 0, -0.25, 0, 0.5 - np.pi]
    got = describe(with_modes([-0.1] * len(angles), angles), max_lag=0).angles
    np.testing.assert_allclose(got, [expected], atol=1e-6)


def test_half_a_turn_is_pi_whatever_its_sign():
    with jax.enable_x64(True):
        got = describe(to_float64(with_modes([-0.1] * 2, [0.0] * 2))._replace(angle=jnp.array([[np.pi, -np.pi]])))
    np.testing.assert_array_equal(got.angles, [[np.pi, np.pi]])


def test_no_angle_lies_outside_the_half_open_turn():
    """Float32 angles next to odd multiples of pi, where the last digit decides the sign."""
    odd = np.float32(np.pi * np.arange(-41, 42, 2))
    angles = np.concatenate([odd, np.nextafter(odd, np.float32(-1e3)), np.nextafter(odd, np.float32(1e3))])
    got = np.asarray(describe(with_modes([-0.1] * len(angles), angles.tolist()), max_lag=0).angles)
    assert (got > -np.float32(np.pi)).all()
    assert (got <= np.float32(np.pi)).all()
    np.testing.assert_allclose(np.abs(got), np.pi, atol=2e-5)


def test_half_precision_dynamics_are_reported_in_float32():
    dynamics = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_dynamics(np.random.default_rng(0), 2, 4))
    report = describe(dynamics, max_lag=3)
    assert {leaf.dtype for leaf in report} == {jnp.dtype("float32")}
    assert_close(report, describe(jax.tree.map(jnp.float32, dynamics), max_lag=3), 1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(max_lag=-1), f"max_lag must lie between 0 and {MAX_LAG}; got -1."),
        (dict(max_lag=MAX_LAG + 1), f"max_lag must lie between 0 and {MAX_LAG}; got {MAX_LAG + 1}."),
        (dict(read="linear"), "read must be one of ('bilinear', 'hermitian'); got 'linear'."),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError) as caught:
        describe(random_dynamics(np.random.default_rng(0), 1, 2), **arguments)
    assert str(caught.value) == message


def test_dynamics_of_many_layers_are_refused():
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), random_dynamics(np.random.default_rng(0), 1, 2))
    with pytest.raises(ValueError) as caught:
        describe(stacked)
    assert str(caught.value) == "dynamics.log_decay must be [Hkv, M], one layer's; got shape (3, 1, 2)."
