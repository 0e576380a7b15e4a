"""Decoding, a token at a time, with a state that stays where it lies.

In the recurrence (paper, section 2, step 6) lambda turns real parts into imaginary ones, so a compiler writes lambda x
beside x and copies it back, for every token. Here x is carried in a frame that turns with it, and only shrinks and
takes in inputs, each number by itself:

    x_t = phase_t s_t        phase_t = e^(i angle) phase_{t-1}        s_t = e^(log_decay) s_{t-1} + conj(phase_t) b z_t

The turning is left to vectors: y = phase (s_k q) is the read of the keys, and w phase that of the values. A phase is
kept at its length of 1, so its rounding adds up as it does in the powers of lambda, and s never grows. What the
dynamics give is worked out once, before the first token.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from interdomain_jax.array_types import Channels, Keys, Output, Queries, State, Values
from interdomain_jax.ops.dynamics import (
    Dynamics,
    Read,
    complex_multiply,
    contraction_weights,
    lambda_powers,
    read_matrix,
)


class DecodingState(NamedTuple):
    """A state in the turning frame, and what its dynamics give.

    Attributes:
        parts: [B, Hkv, 2M, R] of the keys and [B, Hkv, 2M, D] of the values; of a linear contraction one for all
            channels, [B, Hkv, 2M, C].
        phase: [B, Hkv, 2, M], of length 1.
        decay: [Hkv, M], the absolute value of lambda.
        rotation: [Hkv, 2, M], lambda without it.
        weight: [Hkv, 2, M], the input weight b.
        read: [Hkv, 2M, 2M], the product of y that gives w; of a linear contraction w itself, [Hkv, 2, M].
    """

    parts: tuple[Array, ...]
    phase: Float[Array, "B Hkv 2 M"]
    decay: Float[Array, "Hkv M"]
    rotation: Float[Array, "Hkv 2 M"]
    weight: Float[Array, "Hkv 2 M"]
    read: Array


def begin_interdomain(state: State, dynamics: Dynamics, key_width: int, read: Read = "bilinear") -> DecodingState:
    """The state of `interdomain_attention`, to go on with `interdomain_step`.

    Args:
        state: [B, Hkv, 2, M, R + D].
        dynamics: of it.
        key_width: R.
        read: as in `interdomain_attention`.
    """
    return _begin(state, (key_width,), dynamics, read_matrix(dynamics, read))


def begin_linear(state: State, dynamics: Dynamics) -> DecodingState:
    """The state [B, H, 2, M, C] of `linear_contraction`, to go on with `linear_step`."""
    return _begin(state, (), dynamics, contraction_weights(dynamics))


def end_decoding(decoding: DecodingState) -> State:
    """The state [B, Hkv, 2, M, C] as the ops take it, in the dtype that it was decoded in."""
    batch, heads, _, modes = decoding.phase.shape
    turned = jnp.concatenate(decoding.parts, axis=-1).reshape(batch, heads, 2, modes, -1)
    return complex_multiply(turned, decoding.phase[..., None], axis=-3)


def interdomain_step(
    q: Queries,
    k: Keys,
    v: Values,
    decoding: DecodingState,
    *,
    real: Bool[Array, " B"] | None = None,
    continues: Bool[Array, " B"] | None = None,
) -> tuple[Output, DecodingState]:
    """One token of `interdomain_attention`.

    Args:
        q: [B, 1, H, R].
        k: [B, 1, Hkv, R].
        v: [B, 1, Hkv, D].
        decoding: from `begin_interdomain`, or from the step before.
        real: [B], whether each row's token is one; padding leaves the state as it is, and its output is zero. None if
            all are.
        continues: [B], whether each row's token belongs to the document before it; the state restarts where it does
            not. None if all do.

    Returns:
        The output [B, 1, H, D] in the dtype of v, and the state after the token.
    """
    batch, _, heads, width = q.shape
    decoding = _write(decoding, (k, v), real, continues)
    keys, values = decoding.parts
    grouped = _keep(real, q).astype(keys.dtype).reshape(batch, keys.shape[1], -1, width)
    y = jnp.einsum("bhgr,bhmr->bhgm", grouped, keys, precision="highest")
    y = _turn(y, decoding.phase[:, :, None])
    # The matrix is symmetric; this order of it is the faster one to multiply by.
    w = jnp.einsum("hpm,bhgm->bhgp", decoding.read, y, precision="highest")
    # (Re w, -Im w) is the conjugate of w, and turns the other way.
    w = _turn(w, _conjugate(decoding.phase)[:, :, None])
    out = jnp.einsum("bhgm,bhmd->bhgd", w, values, precision="highest").reshape(batch, 1, heads, -1)
    return _keep(real, out).astype(v.dtype), decoding


def linear_step(
    z: Channels,
    decoding: DecodingState,
    *,
    real: Bool[Array, " B"] | None = None,
    continues: Bool[Array, " B"] | None = None,
) -> tuple[Channels, DecodingState]:
    """One token of `linear_contraction`: z [B, 1, H, C]; everything else as in `interdomain_step`."""
    decoding = _write(decoding, (z,), real, continues)
    (part,) = decoding.parts
    weights = complex_multiply(_conjugate(decoding.phase), decoding.read)
    out = jnp.einsum("bhm,bhmc->bhc", weights.reshape(part.shape[:3]), part, precision="highest")[:, None]
    return _keep(real, out).astype(z.dtype), decoding


def _begin(state: State, splits: tuple[int, ...], dynamics: Dynamics, read: Array) -> DecodingState:
    batch, heads, _, modes, channels = state.shape
    parts = jnp.split(state.reshape(batch, heads, 2 * modes, channels), splits, axis=-1)
    phase = jnp.zeros((batch, heads, 2, modes), state.dtype).at[:, :, 0].set(1)
    one = jnp.ones(1, jnp.int32)
    rotation = lambda_powers(jnp.zeros_like(dynamics.log_decay), dynamics.angle, one)[:, 0]
    weight = jnp.stack(dynamics.input_weight, axis=1)
    return DecodingState(tuple(parts), phase, jnp.exp(dynamics.log_decay), rotation, weight, read)


def _write(
    decoding: DecodingState,
    tokens: tuple[Array, ...],
    real: Bool[Array, " B"] | None,
    continues: Bool[Array, " B"] | None,
) -> DecodingState:
    """The state after one token, [B, 1, Hkv, width] of each part."""
    before = decoding.phase
    phase = complex_multiply(before, decoding.rotation)
    # One step of Newton's for 1 / sqrt, enough for what a product takes off or adds.
    phase = phase * (1.5 - 0.5 * jnp.sum(phase**2, axis=2, keepdims=True))
    decay = jnp.broadcast_to(decoding.decay, (len(before), *decoding.decay.shape))
    if real is not None:
        decay = jnp.where(real[:, None, None], decay, 1)
        phase = jnp.where(real[:, None, None, None], phase, before)
    weight = complex_multiply(_conjugate(phase), decoding.weight).reshape(*phase.shape[:2], -1, 1)
    decay = jnp.concatenate([decay, decay], axis=-1)[..., None]
    parts = tuple(
        decay * _keep(continues, part) + weight * _keep(real, token).swapaxes(1, 2).astype(part.dtype)
        for part, token in zip(decoding.parts, tokens, strict=True)
    )
    return decoding._replace(parts=parts, phase=phase)


def _turn(y: Array, by: Array) -> Array:
    """The rows y [..., 2M], complex numbers in halves, times `by` [..., 2, M]."""
    return complex_multiply(y.reshape(*y.shape[:-1], 2, -1), by).reshape(y.shape)


def _conjugate(phase: Array) -> Array:
    return phase * jnp.array([1, -1], phase.dtype)[:, None]


def _keep(kept: Bool[Array, " B"] | None, x: Array) -> Array:
    """x [B, ...] with zeros in rows that are not kept; a select, not a product: they may hold anything."""
    return x if kept is None else jnp.where(kept[:, None, None, None], x, 0)
