"""The public ops: `interdomain_attention`, `linear_contraction` for the controls that read without a query, `state_at`.

Each checks its arguments, fills in the defaults, and hands over to one implementation.
"""

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

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
from interdomain_jax.ops.packing import Packing, TokenOrder, find_documents, padding_last, reorder, restore
from interdomain_jax.ops.sequential import interdomain_sequential, linear_sequential
from interdomain_jax.ops.shards import exchange_states, gather_shards, over_mesh

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
    axis_name: str | None = None,
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
        axis_name: inside `jax.shard_map`, the mesh axis over which the tokens of each row are split, in order. q, k, v
            and segment_ids are then this device's shard of the tokens, and both states are those of the whole row.
            Outside of it, under `jax.set_mesh`, axes named data, fsdp, tensor and seq are used by themselves.

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

    chunked = chunk_size or default_chunk_size(*state.shape[3:])

    def compute(
        tokens: tuple[Array, ...], dynamics: Dynamics, state: State, packing: Packing | None
    ) -> tuple[Array, State]:
        queries, keys, values = tokens
        match implementation:
            case "sequential":
                return interdomain_sequential(queries, keys, values, dynamics, state, packing, read)
            case "associative":
                return interdomain_associative(queries, keys, values, dynamics, state, packing, read)
            case "fft":
                return interdomain_fft(queries, keys, values, dynamics, state, read)
            case "xla":
                return interdomain_chunked(queries, keys, values, dynamics, state, packing, read, chunked)
            case "pallas_tpu" | "pallas_gpu":
                # Imported when named: compilers for kernels take a while to load.
                kernels = importlib.import_module(f"pallas_kernels.{implementation.removeprefix('pallas_')}")
                return interdomain_fused(queries, keys, values, dynamics, state, packing, read, chunk_size, kernels)

    if not q.size:
        return jnp.zeros((*q.shape[:3], v.shape[3]), v.dtype), state
    return _run(
        compute,
        (q, k, v),
        dynamics,
        state,
        segment_ids,
        reorders=not padding_is_last,
        implementation=implementation,
        chunk_size=chunked,
        axis_name=axis_name,
    )


def linear_contraction(
    z: Channels,
    dynamics: Dynamics,
    *,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    padding_is_last: bool = False,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    axis_name: str | None = None,
) -> tuple[Channels, State]:
    """The controls' read, the same for every token: r_t = Re(sum_m mode_weights_m (C x_t)_m) (paper, section 3).

    Args:
        z: [B, T, H, C] inputs of the recurrence.
        dynamics: of the H heads.
        initial_state: [B, H, 2, M, C], the state before the first token; zeros if None.
        segment_ids: [B, T], or None for one document a row, as in `interdomain_attention`.
        padding_is_last: as in `interdomain_attention`.
        chunk_size: as in `interdomain_attention`.
        implementation: as in `interdomain_attention`, but for the kernels.
        axis_name: as in `interdomain_attention`.

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

    chunked = chunk_size or default_chunk_size(*state.shape[3:])

    def compute(
        tokens: tuple[Array, ...], dynamics: Dynamics, state: State, packing: Packing | None
    ) -> tuple[Array, State]:
        (channels,) = tokens
        match implementation:
            case "sequential":
                return linear_sequential(channels, dynamics, state, packing)
            case "associative":
                return linear_associative(channels, dynamics, state, packing)
            case "fft":
                return linear_fft(channels, dynamics, state)
            case "xla":
                return linear_chunked(channels, dynamics, state, packing, chunked)
            case _:
                raise ValueError(
                    f"implementation {implementation!r} reads with a query, which a linear contraction has not; use "
                    "'xla', 'fft', 'associative' or 'sequential'."
                )

    if not z.size:
        return z, state
    return _run(
        compute,
        (z,),
        dynamics,
        state,
        segment_ids,
        reorders=not padding_is_last,
        implementation=implementation,
        chunk_size=chunked,
        axis_name=axis_name,
    )


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
        dynamics: of the Hkv states.
        position: how many tokens of each row to take in, padding counted; one number, or one for each row [B]. Values
            beyond the row mean the whole of it.
        initial_state: [B, Hkv, 2, M, C], the state before the first token; zeros if None.
        segment_ids: [B, T], or None for one document a row, as in `interdomain_attention`.
        chunk_size: as in `interdomain_attention`.

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

    if segment_ids is not None:
        z, ids = _reorder((z, ids), padding_last(ids))
    packing = find_documents(ids)
    return state_chunked((jnp.where(packing.real[:, :, None, None], z, 0),), dynamics, state, packing, size)


Compute = Callable[[tuple[Array, ...], Dynamics, State, Packing | None], tuple[Array, State]]


def _run(
    compute: Compute,
    tokens: tuple[Array, ...],
    dynamics: Dynamics,
    state: State,
    segment_ids: SegmentIds | None,
    *,
    reorders: bool,
    implementation: Implementation,
    chunk_size: int,
    axis_name: str | None,
) -> tuple[Array, State]:
    """`compute` on each device's own rows, heads and tokens, the padding last where that is wanted."""
    batch, length, heads = tokens[-1].shape[:3]

    def run(
        tokens: tuple[Array, ...],
        dynamics: Dynamics,
        state: State,
        segment_ids: SegmentIds | None,
        *,
        axis_name: str | None,
    ) -> tuple[Array, State]:
        order = packing = shards = None
        if segment_ids is not None and reorders and (axis_name or implementation in _CHUNKED):
            order = padding_last(segment_ids)
            tokens, segment_ids = _reorder((tokens, segment_ids), order)
        if axis_name is not None:
            rows, tokens_here = tokens[-1].shape[:2]
            shards = gather_shards(segment_ids, rows, tokens_here, axis_name)
        # A select, not a product: padding may hold anything, and neither it nor its cotangents go further than here.
        keep = lambda x: x
        if segment_ids is not None:
            packing = find_documents(segment_ids, None if shards is None else shards.id_before(shards.number))
            real = packing.real[:, :, None, None]
            keep = lambda x: jnp.where(real, x, 0)
        tokens = jax.tree.map(keep, tokens)
        if shards is None or axis_name is None:
            out, state = compute(tokens, dynamics, state, packing)
        else:
            own = state_chunked(tokens[-2:], dynamics, jnp.zeros_like(state), packing, chunk_size)
            before, state = exchange_states(state, own, dynamics, shards, axis_name)
            if packing is not None:
                # In a whole row no document starts with the first token; in a shard one may.
                before = jnp.where(packing.starts[:, 0, None, None, None, None], 0, before)
            out, _ = compute(tokens, dynamics, before, packing)
        out = keep(out)
        return out if order is None else restore(out, order), state

    if axis_name is not None:
        return run(tokens, dynamics, state, segment_ids, axis_name=axis_name)
    spread = over_mesh(
        run,
        batch=batch,
        length=length,
        heads=heads,
        in_axes=("B T H", "H", "B H", "B T"),
        out_axes=("B T H", "B H"),
        always=implementation.startswith("pallas"),
    )
    return spread(tokens, dynamics, state, segment_ids)


def _reorder(arrays: Any, order: TokenOrder) -> Any:
    return jax.tree.map(partial(reorder, order=order), arrays)


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
    """Checks what the ops share; the dynamics and the initial state come back in the state's dtype.

    Raises:
        ValueError: a shape that does not fit, or a decay above 0.
    """
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
