"""The diagonal recurrence of one head: S4D-Inv parameters, and the tables of lambda powers made from them.

The pair (log decay, angle) is the only source of lambda = exp(log_decay + i angle). Every power is taken from the pair
at its own lag, with the phase reduced modulo 2 pi before its cosine, and no negative power is ever formed; so any decay
is exact, and an angle of 128 rad per step (reached at initialisation) is as accurate as one of 0.1.
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from interdomain_jax.array_types import Complex, Modes

Read = Literal["bilinear", "hermitian"]

# 2 pi = _TURN_HIGH + _TURN_MID + _TURN_LOW. The first part has 8 significant bits and the second 11, so that their
# products with any whole number of turns below 2^13 are exact in float32 (Cody and Waite's reduction).
_TURN_HIGH = 201 / 32
_TURN_MID = math.floor((2 * math.pi - _TURN_HIGH) * 2**20) / 2**20
_TURN_LOW = 2 * math.pi - _TURN_HIGH - _TURN_MID
# Angles are split at this grid: a multiple of 2^-9 below pi has 11 bits, so its product with a lag up to 2^12 is exact.
_PHASE_GRID = 2.0**9
# Lags are written in two digits of this base: lambda^lag = (lambda^base)^high lambda^low.
_LAG_BASE = 2**12

MAX_LAG = _LAG_BASE**2 - 1
"""The largest lag that `lambda_powers` takes."""


class Dynamics(NamedTuple):
    """One complex diagonal state-space recurrence for each of Hkv heads, discretised, with its readout.

    The state follows x_t = exp(log_decay + i angle) x_{t-1} + input_weight z_t, and its coefficients are
    readout @ x_t (paper, section 2, steps 6 and 7).

    Attributes:
        log_decay: [Hkv, M], Delta Re(A), nats per step, at most 0.
        angle: [Hkv, M], Delta Im(A), radians per step.
        input_weight: pair of [Hkv, M], the discretised B.
        readout: pair of [Hkv, M, M], the full matrix C; rows are coefficients, columns are modes.
        mode_weights: [Hkv, M], a real weight on each coefficient where the modes are summed, or None for ones.
    """

    log_decay: Modes
    angle: Modes
    input_weight: Complex
    readout: Complex
    mode_weights: Modes | None = None


def s4d_inv(state_dim: int) -> np.ndarray:
    """The S4D-Inv eigenvalues A_n = -1/2 + i (M/pi) (M/(2n+1) - 1), n = 0..M-1: [M] complex128.

    From the paper, section 2, after Gu, Gupta, Goel and Re (2022).
    """
    n = np.arange(state_dim)
    return -0.5 + 1j * (state_dim / math.pi) * (state_dim / (2 * n + 1) - 1)


def discretize(
    log_delta: Float[Array, " Hkv"],
    log_neg_a_real: Modes,
    a_imag: Modes,
    readout: Complex,
    mode_weights: Modes | None = None,
) -> Dynamics:
    """Zero-order hold of A over a step of length Delta: lambda = exp(Delta A), input weight (exp(Delta A) - 1) / A.

    Args:
        log_delta: [Hkv], log of the step length.
        log_neg_a_real: [Hkv, M], log(-Re A), so that no value of the parameter can make the state grow.
        a_imag: [Hkv, M], Im A.
        readout: pair of [Hkv, M, M].
        mode_weights: [Hkv, M] or None.

    Returns:
        The `Dynamics`, in the dtype of its arguments.
    """
    delta = jnp.exp(log_delta)[:, None]
    a_real = -jnp.exp(log_neg_a_real)
    log_decay, angle = delta * a_real, delta * a_imag
    coarse, fine = _split_angle(angle)
    phase = coarse + fine
    # exp(Delta A) - 1 without the cancellation of slow modes: expm1 for the decay, -2 sin^2(half) for cos - 1.
    real = jnp.expm1(log_decay) * jnp.cos(phase) - 2 * jnp.sin(phase / 2) ** 2
    imag = jnp.exp(log_decay) * jnp.sin(phase)
    norm = a_real**2 + a_imag**2
    input_weight = Complex((real * a_real + imag * a_imag) / norm, (imag * a_real - real * a_imag) / norm)
    return Dynamics(log_decay, angle, input_weight, readout, mode_weights)


def lambda_powers(log_decay: Modes, angle: Modes, lags: Int[Array, " L"]) -> Float[Array, "Hkv L 2 M"]:
    """exp(lag (log_decay + i angle)) for each lag.

    The absolute error of a phase is a few float32 units for a lag up to 4096, and lag / 4096 times that for longer
    ones.

    Args:
        log_decay: [Hkv, M], nats per step.
        angle: [Hkv, M], radians per step.
        lags: [L], whole numbers from 0 to MAX_LAG, in steps.

    Returns:
        [Hkv, L, 2, M], real pairs in the dtype of `log_decay`.
    """
    base = jnp.full(1, _LAG_BASE)
    low = _powers(log_decay, angle, lags % _LAG_BASE)
    high = _powers(log_decay * _LAG_BASE, _phases(angle, base)[:, 0], lags // _LAG_BASE)
    return complex_multiply(low, high)


def _powers(log_decay: Modes, angle: Modes, lags: Int[Array, " L"]) -> Float[Array, "Hkv L 2 M"]:
    phases = _phases(angle, lags)
    magnitude = jnp.exp(lags.astype(log_decay.dtype)[:, None] * log_decay[:, None])
    return jnp.stack([magnitude * jnp.cos(phases), magnitude * jnp.sin(phases)], axis=2)


def _phases(angle: Modes, lags: Int[Array, " L"]) -> Float[Array, "Hkv L M"]:
    """lag * angle modulo 2 pi, for lags up to _LAG_BASE."""
    lags = lags.astype(angle.dtype)[:, None]
    coarse, fine = _split_angle(angle[:, None])
    turned = lags * coarse
    turns = _whole_turns(turned)
    return turned - turns * _TURN_HIGH - turns * _TURN_MID - turns * _TURN_LOW + lags * fine


def input_powers(dynamics: Dynamics, lags: Array) -> Float[Array, "Hkv L 2 M"]:
    """The response of each mode to one unit input, `lag` steps later: input_weight * lambda^lag (P in `chunked.py`).

    Args:
        dynamics: of Hkv states.
        lags: [L], as in `lambda_powers`.

    Returns:
        [Hkv, L, 2, M], real pairs in the dtype of the dynamics.
    """
    return complex_multiply(
        lambda_powers(dynamics.log_decay, dynamics.angle, lags),
        jnp.stack(dynamics.input_weight, axis=1)[:, None],
    )


def complex_multiply(a: Array, b: Array, axis: int = -2) -> Array:
    """Product of complex numbers stored as pairs on `axis`, broadcasting over the other axes.

    a b = a Re(b) + i a Im(b), where i a is a with its parts exchanged and one sign turned: a form that compilers fuse,
    while slicing the parts of a and stacking the results would be copies.

    Args:
        a: [..., 2, M] for the default axis.
        b: [..., 2, M], the smaller one.
        axis: of the pairs, counted from the end.

    Returns:
        [..., 2, M], in the wider dtype of the two.
    """
    real, imag = jnp.split(b, 2, axis)
    return a * real + jnp.flip(a, axis) * jnp.concatenate([-imag, imag], axis)


class ReadFactors(NamedTuple):
    """The read as two products: w = ((y @ readout^T) * scale) @ readout for rows y of 2M reals.

    With y = X_k q (real parts, then imaginary), w is C^T W C y for the bilinear read and conj(C^H W C y) for the
    hermitian one, W = diag(mode_weights), written as (Re w, -Im w): the output Re(w . X_v), which is
    Re w . Re X_v - Im w . Im X_v, is then a plain product with a state stored as (real, imaginary).

    Attributes:
        readout: [Hkv, 2M, 2M], C as a real matrix, [[Re C, -Im C], [Im C, Re C]].
        scale: [Hkv, 2M], the mode weights, negated on the imaginary half for the bilinear read.
    """

    readout: Float[Array, "Hkv c m"]
    scale: Float[Array, "Hkv c"]


def read_factors(dynamics: Dynamics, read: Read) -> ReadFactors:
    """The factors of the read, for one token at a time: two products of M^2."""
    real, imag = dynamics.readout
    weights = jnp.ones_like(dynamics.log_decay) if dynamics.mode_weights is None else dynamics.mode_weights
    sign = 1 if read == "hermitian" else -1
    return ReadFactors(jnp.block([[real, -imag], [imag, real]]), jnp.concatenate([weights, sign * weights], axis=-1))


def read_matrix(dynamics: Dynamics, read: Read) -> Float[Array, "Hkv m p"]:
    """The two factors multiplied out, for many tokens at a time: w = y @ matrix (G in `chunked.py`).

    [Hkv, 2M, 2M], in the dtype of the dynamics.
    """
    readout, scale = read_factors(dynamics, read)
    return jnp.einsum("hcm,hcp->hmp", readout * scale[..., None], readout, precision="highest")


def contraction_weights(dynamics: Dynamics) -> Float[Array, "Hkv 2 M"]:
    """Weights w = C^T mode_weights of the linear contraction Re(w . x), as the pair (Re w, -Im w).

    [Hkv, 2, M], in the dtype of the dynamics.
    """
    weights = dynamics.mode_weights
    if weights is None:
        weights = jnp.ones_like(dynamics.log_decay)
    real, imag = (jnp.einsum("hc,hcm->hm", weights, part, precision="highest") for part in dynamics.readout)
    return jnp.stack([real, -imag], axis=1)


def _split_angle(angle: Array) -> tuple[Array, Array]:
    """angle modulo 2 pi as a coarse part on the grid of 2^-9 rad and a fine remainder, with no digit of the angle lost.

    The coarse part is a constant to autodiff; the fine part carries the whole derivative.
    """
    turns = _whole_turns(angle)
    rest = angle - turns * _TURN_HIGH - turns * _TURN_MID
    coarse = jax.lax.stop_gradient(jnp.round(rest * _PHASE_GRID) / _PHASE_GRID)
    return coarse, (rest - coarse) - turns * _TURN_LOW


def _whole_turns(angle: Array) -> Array:
    return jax.lax.stop_gradient(jnp.round(angle / (2 * math.pi)))
