"""The public ops: `interdomain_attention`, and `linear_contraction` for the controls that read without a query.

Each checks its arguments, fills in the defaults, and hands over to one implementation.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

from interdomain_jax.array_types import Channels, Keys, Output, Queries, SegmentIds, State, Values
from interdomain_jax.ops.chunked import interdomain_chunked, linear_chunked
from interdomain_jax.ops.dynamics import MAX_LAG, Dynamics, Read
from interdomain_jax.ops.sequential import interdomain_sequential, linear_sequential

Implementation = Literal["sequential", "xla"]

DEFAULT_CHUNK_SIZE = 64


def interdomain_attention(
    q: Queries,
    k: Keys,
    v: Values,
    dynamics: Dynamics,
    *,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    read: Read = "bilinear",
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Output, State]:
    """Causal attention through a fixed-size state: o_t = Re(q_t^T U_t^T Gamma_t), [U_t, Gamma_t] = C x_t.

    x_t = lambda x_{t-1} + b [k_t, v_t] is one complex diagonal recurrence for each head (paper, section 2, steps 6-8),
    and U and Gamma are never formed. One call serves training, prefill and decoding: pass the state that the last call
    returned.

    Args:
        q: [B, T, H, R] query features.
        k: [B, T, Hkv, R] key features; H is a multiple of Hkv, and query head h reads state h // (H // Hkv).
        v: [B, T, Hkv, D] values.
        dynamics: the recurrence and readout of each of the Hkv states.
        initial_state: [B, Hkv, 2, M, R + D], the state before the first token; zeros if None.
        segment_ids: not yet supported; must be None.
        read: "bilinear", Re(q^T U^T Gamma), or "hermitian", Re(conj(q^T U^T) Gamma).
        chunk_size: tokens in a chunk of the chunked form, at most 4096; any value gives the same result.
        implementation: "xla" (chunked), "sequential" (token by token), or None for the best: the first, and the second
            for a single token.

    Returns:
        The output [B, T, H, D] in the dtype of v, and the state after the last token, shaped as `initial_state`, in
        float32 (float64 if the dynamics are).

    Gradients are reverse-mode; forward mode (`jax.jvp`) needs the sequential implementation.

    Raises:
        ValueError: a shape, a read, a chunk size or an implementation that does not fit, in one sentence.
    """
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, k and v must be [B, T, heads, width]; got shapes {q.shape}, {k.shape} and {v.shape}.")
    if k.shape[:3] != v.shape[:3] or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q [B, T, H, R], k [B, T, Hkv, R] and v [B, T, Hkv, D] must agree; got {q.shape}, {k.shape} and {v.shape}."
        )
    for name, array in (("q", q), ("k", k), ("v", v)):
        _require_tokens(name, array)
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"the {q.shape[2]} query heads must be a multiple of the {k.shape[2]} key/value heads.")
    if read not in get_args(Read):
        raise ValueError(f"read must be one of {get_args(Read)}; got {read!r}.")
    implementation = _choose(implementation, k.shape[1])
    channels = k.shape[3] + v.shape[3]
    dynamics, state = _prepare(k, dynamics, channels, initial_state, segment_ids, chunk_size)
    if implementation == "sequential":
        return interdomain_sequential(q, k, v, dynamics, state, read)
    return interdomain_chunked(q, k, v, dynamics, state, read, chunk_size or DEFAULT_CHUNK_SIZE)


def linear_contraction(
    z: Channels,
    dynamics: Dynamics,
    *,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Channels, State]:
    """The controls' read, the same for every token: r_t = Re(sum_m mode_weights_m (C x_t)_m) (paper, section 3).

    Args:
        z: [B, T, H, C] inputs of the recurrence.
        dynamics, initial_state, segment_ids, chunk_size, implementation: as in `interdomain_attention`, with Hkv = H.

    Returns:
        The contraction [B, T, H, C] in the dtype of z, and the state after the last token, [B, H, 2, M, C].

    Raises:
        ValueError: a shape, a chunk size or an implementation that does not fit, in one sentence.
    """
    if z.ndim != 4:
        raise ValueError(f"z must be [B, T, H, C]; got shape {z.shape}.")
    _require_tokens("z", z)
    implementation = _choose(implementation, z.shape[1])
    dynamics, state = _prepare(z, dynamics, z.shape[3], initial_state, segment_ids, chunk_size)
    if implementation == "sequential":
        return linear_sequential(z, dynamics, state)
    return linear_chunked(z, dynamics, state, chunk_size or DEFAULT_CHUNK_SIZE)


def _require_tokens(name: str, array: Array) -> None:
    if 0 in array.shape:
        raise ValueError(f"every size of {name} must be at least 1, the number of tokens too; got shape {array.shape}.")


def _prepare(
    inputs: Array,
    dynamics: Dynamics,
    channels: int,
    initial_state: State | None,
    segment_ids: SegmentIds | None,
    chunk_size: int | None,
) -> tuple[Dynamics, State]:
    """Checks what both ops share; the dynamics and the initial state come back in the state's dtype."""
    batch, _, heads, _ = inputs.shape
    if segment_ids is not None:
        raise ValueError("segment_ids is not supported by these implementations; pass None.")
    if chunk_size is not None and not 1 <= chunk_size <= MAX_LAG:
        raise ValueError(f"chunk_size must lie between 1 and {MAX_LAG}; got {chunk_size}.")
    modes = dynamics.log_decay.shape[-1]
    for field, value in dynamics._asdict().items():
        shape = (heads, modes, modes) if field == "readout" else (heads, modes)
        for leaf in jax.tree.leaves(value):
            if leaf.shape != shape:
                raise ValueError(f"dynamics.{field} must have shape {shape} for {heads} states; got {leaf.shape}.")
    dtype = jnp.promote_types(dynamics.log_decay.dtype, jnp.float32)
    dynamics = jax.tree.map(lambda leaf: leaf.astype(dtype), dynamics)
    state_shape = (batch, heads, 2, modes, channels)
    if initial_state is None:
        return dynamics, jnp.zeros(state_shape, dtype)
    if initial_state.shape != state_shape:
        raise ValueError(f"initial_state must have shape [B, Hkv, 2, M, C] = {state_shape}; got {initial_state.shape}.")
    return dynamics, initial_state.astype(dtype)


def _choose(implementation: Implementation | None, length: int) -> Implementation:
    if implementation is None:
        return "sequential" if length == 1 else "xla"
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation must be one of {get_args(Implementation)} or None; got {implementation!r}.")
    return implementation
