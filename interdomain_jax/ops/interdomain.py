"""The public ops: `interdomain_attention`, `linear_contraction` for the controls that read without a query, `state_at`.

Each checks its arguments, fills in the defaults, and hands over to one implementation.
"""

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from interdomain_jax.array_types import Channels, Keys, Output, Queries, SegmentIds, State, Values
from interdomain_jax.ops.associative import interdomain_associative, linear_associative
from interdomain_jax.ops.chunk_sizes import default_chunk_size
from interdomain_jax.ops.chunked import interdomain_chunked, linear_chunked, state_chunked
from interdomain_jax.ops.dynamics import Dynamics, Read
from interdomain_jax.ops.fft import interdomain_fft, linear_fft
from interdomain_jax.ops.fused import interdomain_fused
from interdomain_jax.ops.packing import Packing, find_documents, padding_last, reorder, restore
from interdomain_jax.ops.sequential import interdomain_sequential, linear_sequential

Implementation = Literal["sequential", "associative", "fft", "xla", "pallas_tpu", "pallas_gpu"]

_CHUNKED = ("xla", "pallas_tpu", "pallas_gpu")
"""They want the padding of a row behind its tokens."""

MAX_CHUNK_SIZE = 4096


def interdomain_attention(
    q: Queries,
    k: Keys,
    v: Values,
    dynamics: Dynamics,
    *,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    padding_is_last: bool = False,
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
        segment_ids: [B, T] whole numbers, or None for one document a row. The state restarts, from zero, where the id
            changes; the initial state belongs to the document of the first token. Tokens of id 0 are padding, wherever
            they lie: they leave the state as it is, whatever they hold, and their output is zero.
        padding_is_last: promises that in every row the padding follows all tokens, which saves the reordering that
            "xla" and the kernels otherwise do.
        read: "bilinear", Re(q^T U^T Gamma), or "hermitian", Re(conj(q^T U^T) Gamma).
        chunk_size: tokens in a chunk of the chunked form, at most 4096; any value gives the same result. None for the
            best for this platform and size of state (`chunk_sizes.py`).
        implementation: "xla" (chunked), "sequential" (token by token), "associative" (`jax.lax.associative_scan` over
            the tokens), "fft" (convolution; no segment ids), "pallas_tpu" or "pallas_gpu" (the chunked form in one
            kernel; on a CPU it is interpreted, slowly), or None for the best: the first, and the second for a single
            token. A kernel is chosen by name alone, until a measurement on its device shows it ahead.

    Returns:
        The output [B, T, H, D] in the dtype of v, and the state after the last token, shaped as `initial_state`, in
        float32 (float64 if the dynamics are). Without tokens, T = 0 or B = 0, the state is the initial one.

    Gradients are reverse-mode; forward mode (`jax.jvp`) needs another implementation than "xla" or a kernel.

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
        _require_channels(name, array)
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"the {q.shape[2]} query heads must be a multiple of the {k.shape[2]} key/value heads.")
    if read not in get_args(Read):
        raise ValueError(f"read must be one of {get_args(Read)}; got {read!r}.")
    dynamics, state = _prepare(k, dynamics, k.shape[3] + v.shape[3], initial_state)
    _check_segment_ids(segment_ids, k)
    implementation = _choose(implementation, k.shape[1], segment_ids)
    _check_chunk_size(chunk_size)

    def compute(packing: Packing | None, q: Array, k: Array, v: Array) -> tuple[Array, State]:
        match implementation:
            case "sequential":
                return interdomain_sequential(q, k, v, dynamics, state, packing, read)
            case "associative":
                return interdomain_associative(q, k, v, dynamics, state, packing, read)
            case "fft":
                return interdomain_fft(q, k, v, dynamics, state, read)
            case "xla":
                size = chunk_size or default_chunk_size(*state.shape[3:])
                return interdomain_chunked(q, k, v, dynamics, state, packing, read, size)
            case "pallas_tpu" | "pallas_gpu":
                # Imported when named: compilers for kernels take a while to load.
                kernels = importlib.import_module(f"pallas_kernels.{implementation.removeprefix('pallas_')}")
                return interdomain_fused(q, k, v, dynamics, state, packing, read, chunk_size, kernels)

    if not q.size:
        return jnp.zeros((*q.shape[:3], v.shape[3]), v.dtype), state
    return _packed(compute, (q, k, v), segment_ids, reorders=implementation in _CHUNKED and not padding_is_last)


def linear_contraction(
    z: Channels,
    dynamics: Dynamics,
    *,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    padding_is_last: bool = False,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Channels, State]:
    """The controls' read, the same for every token: r_t = Re(sum_m mode_weights_m (C x_t)_m) (paper, section 3).

    Args:
        z: [B, T, H, C] inputs of the recurrence.
        dynamics, initial_state, segment_ids, padding_is_last, chunk_size, implementation: as in
            `interdomain_attention`, with Hkv = H.

    Returns:
        The contraction [B, T, H, C] in the dtype of z, and the state after the last token, [B, H, 2, M, C].

    Raises:
        ValueError: a shape, a chunk size or an implementation that does not fit, in one sentence.
    """
    if z.ndim != 4:
        raise ValueError(f"z must be [B, T, H, C]; got shape {z.shape}.")
    _require_channels("z", z)
    dynamics, state = _prepare(z, dynamics, z.shape[3], initial_state)
    _check_segment_ids(segment_ids, z)
    implementation = _choose(implementation, z.shape[1], segment_ids)
    _check_chunk_size(chunk_size)

    def compute(packing: Packing | None, z: Array) -> tuple[Array, State]:
        match implementation:
            case "sequential":
                return linear_sequential(z, dynamics, state, packing)
            case "associative":
                return linear_associative(z, dynamics, state, packing)
            case "fft":
                return linear_fft(z, dynamics, state)
            case "xla":
                size = chunk_size or default_chunk_size(*state.shape[3:])
                return linear_chunked(z, dynamics, state, packing, size)
            case _:
                raise ValueError(
                    f"implementation {implementation!r} reads with a query, which a linear contraction has not; use "
                    "'xla', 'fft', 'associative' or 'sequential'."
                )

    if not z.size:
        return z, state
    return _packed(compute, (z,), segment_ids, reorders=implementation in _CHUNKED and not padding_is_last)


def state_at(
    z: Channels,
    dynamics: Dynamics,
    position: int | Int[Array, " B"],
    *,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
) -> State:
    """The state after the first `position` tokens of each row, without any output.

    Args:
        z: [B, T, Hkv, C] inputs of the recurrence; for `interdomain_attention`, k and v side by side.
        dynamics, initial_state, segment_ids, chunk_size: as in `interdomain_attention`.
        position: how many tokens of each row to take in, padding counted; one number, or one for each row [B]. Values
            beyond the row mean the whole of it.

    Returns:
        [B, Hkv, 2, M, C], shaped as `initial_state`.

    Raises:
        ValueError: a shape or a chunk size that does not fit, in one sentence.
    """
    if z.ndim != 4:
        raise ValueError(f"z must be [B, T, Hkv, C]; got shape {z.shape}.")
    _require_channels("z", z)
    batch, length = z.shape[:2]
    if jnp.shape(position) not in ((), (batch,)):
        raise ValueError(f"position must be one number or one for each of {batch} rows; got {jnp.shape(position)}.")
    dynamics, state = _prepare(z, dynamics, z.shape[3], initial_state)
    _check_segment_ids(segment_ids, z)
    _check_chunk_size(chunk_size)
    size = chunk_size or default_chunk_size(*state.shape[3:])
    if not z.size:
        return state
    taken = jnp.arange(length) < jnp.broadcast_to(position, batch)[:, None]
    ids = taken.astype(jnp.int32) if segment_ids is None else jnp.where(taken, segment_ids, 0)

    def compute(packing: Packing | None, z: Array) -> tuple[Array, State]:
        return z[..., :0], state_chunked(z, dynamics, state, packing, size)

    return _packed(compute, (z,), ids, reorders=segment_ids is not None)[1]


def _packed(
    compute: Callable[..., tuple[Array, State]],
    tokens: tuple[Array, ...],
    segment_ids: SegmentIds | None,
    *,
    reorders: bool,
) -> tuple[Array, State]:
    """`compute(packing, *tokens)`, with zeros in the padding and, if it `reorders`, the padding last while it runs."""
    if segment_ids is None:
        return compute(None, *tokens)
    order = padding_last(segment_ids) if reorders and segment_ids.shape[1] > 1 else None
    if order is not None:
        tokens, segment_ids = jax.tree.map(partial(reorder, order=order), (tokens, segment_ids))
    packing = find_documents(segment_ids)
    # A select, not a product: padding may hold anything, and neither it nor its cotangents go further than here.
    keep = lambda x: jnp.where(packing.real[:, :, None, None], x, 0)
    out, state = compute(packing, *(keep(x) for x in tokens))
    out = keep(out)
    return out if order is None else restore(out, order), state


def _check_segment_ids(segment_ids: SegmentIds | None, inputs: Array) -> None:
    shape = inputs.shape[:2]
    if segment_ids is None:
        return
    if segment_ids.shape != shape or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids must be whole numbers [B, T] = {shape}; got shape {segment_ids.shape} of {segment_ids.dtype}."
        )


def _require_channels(name: str, array: Array) -> None:
    if not math.prod(array.shape[2:]):
        raise ValueError(f"the heads and the width of {name} must be at least 1; got shape {array.shape}.")


def _prepare(inputs: Array, dynamics: Dynamics, channels: int, initial_state: State | None) -> tuple[Dynamics, State]:
    """Checks what the ops share; the dynamics and the initial state come back in the state's dtype."""
    batch, _, heads, _ = inputs.shape
    modes = dynamics.log_decay.shape[-1]
    for field, value in dynamics._asdict().items():
        shape = (heads, modes, modes) if field == "readout" else (heads, modes)
        for leaf in jax.tree.leaves(value):
            if leaf.shape != shape:
                raise ValueError(f"dynamics.{field} must have shape {shape} for {heads} states; got {leaf.shape}.")
    if not isinstance(dynamics.log_decay, jax.core.Tracer) and (np.asarray(dynamics.log_decay) > 0).any():
        raise ValueError(
            f"dynamics.log_decay must be at most 0, or the state grows; got {float(dynamics.log_decay.max())}."
        )
    dtype = jnp.promote_types(dynamics.log_decay.dtype, jnp.float32)
    dynamics = jax.tree.map(lambda leaf: leaf.astype(dtype), dynamics)
    state_shape = (batch, heads, 2, modes, channels)
    if initial_state is None:
        return dynamics, jnp.zeros(state_shape, dtype)
    if initial_state.shape != state_shape:
        raise ValueError(f"initial_state must have shape [B, Hkv, 2, M, C] = {state_shape}; got {initial_state.shape}.")
    return dynamics, initial_state.astype(dtype)


def _choose(implementation: Implementation | None, length: int, segment_ids: SegmentIds | None) -> Implementation:
    if implementation is None:
        return "sequential" if length == 1 else "xla"
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation must be one of {get_args(Implementation)} or None; got {implementation!r}.")
    if implementation == "fft" and segment_ids is not None:
        raise ValueError(
            "implementation 'fft' cannot take segment_ids, for a convolution is the same for every token; "
            "use 'xla', 'associative' or 'sequential'."
        )
    return implementation


def _check_chunk_size(chunk_size: int | None) -> None:
    if chunk_size is not None and not 1 <= chunk_size <= MAX_CHUNK_SIZE:
        raise ValueError(f"chunk_size must lie between 1 and {MAX_CHUNK_SIZE}; got {chunk_size}.")
