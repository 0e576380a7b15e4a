"""The chunkwise form in plain XLA: the same recurrence, with every sum over tokens a real matrix product.

Chunks are known from linear attention (Hua et al., 2022; Sun et al., 2023); here the state is read twice.

Inside a chunk of K tokens, with P_j = b lambda^j the response of the modes to an input j steps back,

    S[t, s] = q_t . k_s                              Z[t, j] = S[t, t - (K-1-j)]         the skew: columns are lags
    y       = Z @ P_rev + lambda^{t+1} (q_t X_k)     w = y @ G
    L[t, j] = Re(w_t P_{K-1-j})                      A[t, s] = L[t, K-1-t+s]             the unskew
    o       = A @ v + Re(w_t lambda^{t+1} X_v)

where X is the state before the chunk. Lag tables run from the longest lag to the shortest, so that skew and unskew
are a pad and a reshape (a copy, not a gather) and one table serves the read and the state. Only non-negative powers of
lambda appear, so any decay is exact.

Tokens are walked in blocks of chunks: within a block the chunks run side by side, as few large products; from block to
block only the state is carried. Each block is recomputed in the backward pass, so what training keeps is q, k, v and
one state a block.

Axes inside a block: [Hkv, B, N, ...], heads first, so that a product with a head's table sees all the tokens of a
block at once; g is the queries that share a state, t and s tokens of a chunk, j reversed lags, m and p the 2M reals of
M modes.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from interdomain_jax.array_types import Channels, Keys, Output, Queries, State, Values
from interdomain_jax.ops.chunk_sizes import compile_platform
from interdomain_jax.ops.dynamics import (
    Dynamics,
    Read,
    complex_multiply,
    contraction_weights,
    lambda_powers,
    read_matrix,
)
from interdomain_jax.ops.packing import Packing


class LagTables(NamedTuple):
    """Powers of lambda for chunks of K tokens.

    Attributes:
        inputs: [Hkv, K, 2, M], b lambda^j for j = K-1 down to 0.
        read_decay: [Hkv, K, 2, M], lambda^{t+1} for t = 0 to K-1; its last row is the decay over the chunk.
    """

    inputs: Float[Array, "Hkv K 2 M"]
    read_decay: Float[Array, "Hkv K 2 M"]

    def shorter(self, size: int) -> "LagTables":
        """The tables of a chunk of `size` <= K tokens."""
        return LagTables(self.inputs[:, -size:], self.read_decay[:, :size])


def lag_tables(dynamics: Dynamics, chunk_size: int) -> LagTables:
    """The tables of `dynamics` for chunks of `chunk_size` tokens."""
    lags = jnp.stack([jnp.arange(chunk_size)[::-1], jnp.arange(1, chunk_size + 1)])
    # A loop, for compilers keep in memory what comes out of one. Without, they may fuse the tables with what reads them
    # and work out every cosine again for each token.
    responses, read_decay = jax.lax.map(partial(lambda_powers, dynamics.log_decay, dynamics.angle), lags)
    return LagTables(complex_multiply(responses, jnp.stack(dynamics.input_weight, axis=1)[:, None]), read_decay)


def interdomain_chunked(
    q: Queries,
    k: Keys,
    v: Values,
    dynamics: Dynamics,
    initial_state: State,
    packing: Packing | None,
    read: Read,
    chunk_size: int,
) -> tuple[Output, State]:
    """`interdomain_attention` by chunks of `chunk_size` tokens; arguments already validated, padding last."""
    batch, length, heads, width = q.shape
    kv_heads, value_width = v.shape[2:]
    dtype, state_dtype = q.dtype, initial_state.dtype
    matrix = read_matrix(dynamics, read)

    def block(state: Parts, tokens: Tokens, documents: Documents | None, tables: LagTables) -> Walked:
        (queries,), (keys, values) = tokens
        key_states, key_state = _chunk_states(keys, state[0], documents, tables)
        value_states, value_state = _chunk_states(values, state[1], documents, tables)
        table = _flat(tables.inputs)

        scores = _product("hbngtr,hbnsr->hbngts", queries, keys, state_dtype)
        if documents is not None:
            scores = jnp.where(documents.same[:, :, None], scores, 0)
        y = _project(_skew(scores), table, state_dtype, dtype)
        carried = _product("hbngtr,hbnmr->hbngtm", queries, key_states, state_dtype, dtype)
        if documents is not None:
            carried = jnp.where(documents.first[:, :, None, :, None], carried, 0)
        w = _project(y + _turn(carried, tables.read_decay), matrix, state_dtype)

        lags = _project(w, table.swapaxes(1, 2), state_dtype, dtype)
        weights = _unskew(lags)
        # w holds (Re w, -Im w), a conjugate, so it turns by the conjugate of lambda^{t+1}.
        turned = _turn(w, _conjugate(tables.read_decay))
        if documents is not None:
            weights = jnp.where(documents.same[:, :, None], weights, 0)
            turned = jnp.where(documents.first[:, :, None, :, None], turned, 0)
        out = _product("hbngts,hbnsd->hbngtd", weights, values, state_dtype, dtype)
        out = out + _product("hbngtm,hbnmd->hbngtd", turned, value_states, state_dtype, dtype)
        return Walked((key_state, value_state), out)

    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, width)
    state, out = _walk(block, Tokens((grouped,), (k, v)), packing, dynamics, initial_state, chunk_size)
    return out.reshape(batch, length, heads, value_width), state


def linear_chunked(
    z: Channels, dynamics: Dynamics, initial_state: State, packing: Packing | None, chunk_size: int
) -> tuple[Channels, State]:
    """`linear_contraction` by chunks of `chunk_size` tokens; arguments already validated, padding last."""
    dtype, state_dtype = z.dtype, initial_state.dtype
    weights = contraction_weights(dynamics)

    def block(state: Parts, tokens: Tokens, documents: Documents | None, tables: LagTables) -> Walked:
        (channels,) = tokens.inputs
        states, state_after = _chunk_states(channels, state[0], documents, tables)
        lags = jnp.einsum("hm,hjm->hj", _flat(weights), _flat(tables.inputs), precision="highest")
        kernel = _unskew(jnp.broadcast_to(lags[:, None], (*lags.shape, lags.shape[1])))
        turned = _flat(complex_multiply(weights[:, None], _conjugate(tables.read_decay)))
        carried = _product("htm,hbnmc->hbntc", turned, states, state_dtype, dtype)
        if documents is None:
            return Walked((state_after,), carried + _product("hts,hbnsc->hbntc", kernel, channels, state_dtype, dtype))
        kernel = jnp.where(documents.same, kernel[:, None, None], 0)
        carried = jnp.where(documents.first[..., None], carried, 0)
        return Walked((state_after,), carried + _product("hbnts,hbnsc->hbntc", kernel, channels, state_dtype, dtype))

    state, out = _walk(block, Tokens((), (z,)), packing, dynamics, initial_state, chunk_size)
    return out, state


def state_chunked(
    inputs: tuple[Channels, ...], dynamics: Dynamics, initial_state: State, packing: Packing | None, chunk_size: int
) -> State:
    """The state after the last token, and no output; arguments already validated, padding last.

    Args:
        inputs: the parts [B, T, Hkv, ...] of the channels, together [B, T, Hkv, C].
        dynamics: of the Hkv states.
        initial_state: [B, Hkv, 2, M, C].
        packing: of the rows, or None for one document each.
        chunk_size: tokens in a chunk.

    Returns:
        [B, Hkv, 2, M, C] in the dtype of `initial_state`.
    """

    def block(state: Parts, tokens: Tokens, documents: Documents | None, tables: LagTables) -> Walked:
        parts = zip(tokens.inputs, state, strict=True)
        after = tuple(_chunk_states(part, before, documents, tables)[1] for part, before in parts)
        return Walked(after, tokens.inputs[0][..., :0])

    return _walk(block, Tokens((), inputs), packing, dynamics, initial_state, chunk_size)[0]


# Tokens of a block, counted over batch and heads: on a CPU few enough that a block's arrays stay in cache. The batch is
# the whole one, over all devices.
_BLOCK_TOKENS = {"cpu": 4096}
_DEFAULT_BLOCK_TOKENS = 2**18


class Documents(NamedTuple):
    """What packed documents change inside the chunks of a block; padding stands behind all tokens of its row.

    Attributes:
        same: [B, N, K, K], whether two tokens of a chunk belong to one document.
        first: [B, N, K], whether no document has started in the chunk up to the token: it sees the carried state.
        last: [B, N, K], whether no document starts in the chunk after the token: the next state sees it.
        full: [B, N], whether a chunk has no padding; one that has does not advance the carried state.
    """

    same: Bool[Array, "B N K K"]
    first: Bool[Array, "B N K"]
    last: Bool[Array, "B N K"]
    full: Bool[Array, "B N"]


Parts = tuple[Array, ...]
"""The state, in the parts that the inputs are in: [Hkv, B, 2, M, C] each."""


class Walked(NamedTuple):
    """What comes of a block.

    Attributes:
        state: its parts [Hkv, B, 2, M, ...], after the block.
        out: [Hkv, B, N, ..., K, D], of the tokens of its N chunks, in the order of axes inside a block.
    """

    state: Parts
    out: Array


class Tokens(NamedTuple):
    """What the chunked form takes in.

    Attributes:
        queries: [B, T, Hkv, G, R], grouped, or nothing.
        inputs: the parts [B, T, Hkv, ...] of the channels, together [B, T, Hkv, C].
    """

    queries: tuple[Array, ...]
    inputs: tuple[Array, ...]


Block = Callable[[Parts, Tokens, Documents | None, LagTables], Walked]


def _walk(
    block: Block,
    tokens: Tokens,
    packing: Packing | None,
    dynamics: Dynamics,
    initial_state: State,
    chunk_size: int,
) -> tuple[State, Array]:
    """Runs `block` over all tokens.

    Tokens are laid out in blocks and chunks once, before the loop, whose backward pass then meets them so.

    Returns:
        The state, and the outputs [B, T, Hkv, ...].
    """
    batch, length, *heads = jax.tree.leaves(tokens)[0].shape[:-1]
    chunk_size = min(chunk_size, length)
    budget = _BLOCK_TOKENS.get(compile_platform(), _DEFAULT_BLOCK_TOKENS)
    # 2M tokens at the least, so that the states kept for the backward pass, one a block, are no more than the inputs.
    block_tokens = max(budget // (batch * math.prod(heads)), 2 * dynamics.log_decay.shape[-1])
    block_size = max(block_tokens // chunk_size, 1) * chunk_size
    tables = lag_tables(dynamics, chunk_size)

    ends = list(itertools.accumulate(x.shape[-1] for x in tokens.inputs))
    state: Parts = tuple(jnp.split(jnp.moveaxis(initial_state, 1, 0), ends[:-1], axis=-1))
    outputs = []
    for span in _spans(length, block_size, chunk_size):
        run = jax.checkpoint(partial(_run, block, tables.shorter(span.chunk_size)))
        blocks = jax.tree.map(partial(_chunk, span=span), tokens)
        rows = jax.tree.map(partial(_split_rows, span=span), packing)
        state, out = jax.lax.scan(run, state, (blocks, rows))
        outputs.append(_unchunk(out))
    whole = jnp.moveaxis(jnp.concatenate(state, axis=-1), 0, 1)
    if packing is not None:
        whole = _through_last_chunk(whole, tokens.inputs, packing, dynamics, tables)
    return whole, jnp.concatenate(outputs, axis=1)


def _run(block: Block, tables: LagTables, state: Parts, inputs: tuple[Tokens, Packing | None]) -> tuple[Parts, Array]:
    tokens, packing = inputs
    size = tables.inputs.shape[1]
    documents = None if packing is None else _documents(packing, size)
    walked = block(state, tokens, documents, tables)
    return walked.state, walked.out.astype(tokens.inputs[-1].dtype)


def _documents(packing: Packing, chunk_size: int) -> Documents:
    real, starts = (x.reshape(x.shape[0], -1, chunk_size) for x in packing)
    document = jnp.cumsum(starts, axis=-1)
    return Documents(
        document[..., :, None] == document[..., None, :],
        document == 0,
        document == document[..., -1:],
        real[..., -1],
    )


def _through_last_chunk(
    state: State, inputs: tuple[Array, ...], packing: Packing, dynamics: Dynamics, tables: LagTables
) -> State:
    """The state after each row's last token, from the state before its first chunk with padding."""
    size, length = tables.inputs.shape[1], packing.real.shape[1]
    count = jnp.sum(packing.real, axis=1)
    left = jnp.where(count < length, count % size, 0)
    # The last K tokens of each row, so that the table of lags fits as it is; those before the chunk are masked.
    place = count[:, None] + jnp.arange(-size, 0)
    inside = place >= (count - left)[:, None]
    place = jnp.maximum(place, 0)
    document = jnp.cumsum(jnp.take_along_axis(packing.starts, place, axis=1) & inside, axis=1)
    channels = jnp.concatenate([jnp.take_along_axis(x, place[:, :, None, None], axis=1) for x in inputs], axis=-1)
    channels = jnp.where((inside & (document == document[:, -1:]))[:, :, None, None], channels, 0)
    decay = jnp.moveaxis(lambda_powers(dynamics.log_decay, dynamics.angle, left), 1, 0)
    carried = complex_multiply(state, decay[..., None], axis=-3)
    carried = jnp.where((document[:, -1] == 0)[:, None, None, None, None], carried, 0)
    added = _product("hspm,bshc->bhpmc", tables.inputs, channels, state.dtype, channels.dtype)
    return carried + added


class Span(NamedTuple):
    """Tokens [start, stop) that are walked in blocks of `block_size`, each in chunks of `chunk_size`."""

    start: int
    stop: int
    block_size: int
    chunk_size: int


def _spans(length: int, block_size: int, chunk_size: int) -> list[Span]:
    """The whole blocks of a sequence, then the whole chunks that are left, then the tokens that are left."""
    blocks = length // block_size * block_size
    chunks = length // chunk_size * chunk_size
    spans = [
        Span(0, blocks, block_size, chunk_size),
        Span(blocks, chunks, chunks - blocks, chunk_size),
        Span(chunks, length, length - chunks, length - chunks),
    ]
    return [span for span in spans if span.start < span.stop]


def _chunk_states(z: Array, state: Array, documents: Documents | None, tables: LagTables) -> tuple[Array, Array]:
    """The state before each chunk of z [Hkv, B, N, K, C], as [Hkv, B, N, 2M, C], and the state after the last."""
    steps = None
    if documents is not None:
        z = jnp.where((documents.last & documents.full[..., None])[..., None], z, 0)
        steps = Steps(*(x.T.astype(state.dtype) for x in (documents.full & documents.first[..., -1], ~documents.full)))
    added = _product("hspm,hbnsc->nhbpmc", tables.inputs, z, state.dtype, z.dtype)
    states, state = _recur(tables.read_decay[:, -1], steps, added, state)
    states = jnp.moveaxis(states, 0, 2)
    return states.reshape(*states.shape[:3], -1, states.shape[-1]), state


class Steps(NamedTuple):
    """What a step of the recurrence keeps of the state before it: all of it, decayed, all of it as it is, or nothing.

    Attributes:
        decayed: [N, B], 1 or 0.
        held: [N, B], 1 or 0, where the other is 0.
    """

    decayed: Float[Array, "N B"]
    held: Float[Array, "N B"]


@jax.custom_vjp
def _recur(decay: Array, steps: Steps | None, added: Array, state: Array) -> tuple[Array, Array]:
    """x_{n+1} = decay x_n + added_n over axis 0, where `steps` has no other word: the x before each step, and the last.

    decay [Hkv, 2, M], added [N, Hkv, B, 2, M, C], state [Hkv, B, 2, M, C]. The adjoint is the same recurrence,
    backwards, with the conjugate decay; written out so that the decay's gradient is one sum over all steps.
    """
    return _scan_states(decay, steps, added, state)


def _scan_states(
    decay: Array, steps: Steps | None, added: Array, state: Array, *, reverse: bool = False
) -> tuple[Array, Array]:
    decay = decay[:, None, :, :, None]

    def step(state: Array, inputs: tuple[Array, Steps | None]) -> tuple[Array, Array]:
        added, steps = inputs
        kept = complex_multiply(state, decay, axis=-3)
        if steps is not None:
            kept = _over_rows(steps.decayed) * kept + _over_rows(steps.held) * state
        return kept + added, state

    last, before = jax.lax.scan(step, state, (added, steps), reverse=reverse)
    return before, last


def _over_rows(rows: Array) -> Array:
    return rows[..., None, :, None, None, None]


def _recur_forward(
    decay: Array, steps: Steps | None, added: Array, state: Array
) -> tuple[tuple[Array, Array], tuple[Array, Steps | None, Array]]:
    before, last = _recur(decay, steps, added, state)
    return (before, last), (decay, steps, before)


def _recur_backward(
    saved: tuple[Array, Steps | None, Array], cotangents: tuple[Array, Array]
) -> tuple[Array, None, Array, Array]:
    decay, steps, before = saved
    added_bar, state_bar = _scan_states(_conjugate(decay), steps, *cotangents, reverse=True)
    if steps is not None:
        before = _over_rows(steps.decayed) * before
    return _decay_gradient(added_bar, before, pair=3, over=(0, 2, 5)), None, added_bar, state_bar


_recur.defvjp(_recur_forward, _recur_backward)


@jax.custom_vjp
def _turn(x: Array, decay: Array) -> Array:
    """Modes x [Hkv, B, N, G, K, 2M] times decays [Hkv, K, 2, M]; the decays' gradient is one sum over chunks."""
    return _flat(complex_multiply(_pairs(x), decay[:, None, None, None]))


def _turn_forward(x: Array, decay: Array) -> tuple[Array, tuple[Array, Array]]:
    return _turn(x, decay), (x, decay)


def _turn_backward(saved: tuple[Array, Array], out_bar: Array) -> tuple[Array, Array]:
    x, decay = saved
    return _turn(out_bar, _conjugate(decay)), _decay_gradient(_pairs(out_bar), _pairs(x), pair=5, over=(1, 2, 3))


_turn.defvjp(_turn_forward, _turn_backward)


def _decay_gradient(out_bar: Array, x: Array, *, pair: int, over: tuple[int, ...]) -> Array:
    """The sum of out_bar conj(x) over some axes, complex numbers in pairs on axis `pair`; the sums' pair on axis -2."""
    sign = jnp.array([-1, 1], x.dtype).reshape([2 if axis == pair else 1 for axis in range(x.ndim)])
    turned = jnp.flip(x, pair) * sign
    return jnp.stack([jnp.sum(out_bar * factor, axis=(*over, pair)) for factor in (x, turned)], axis=-2)


def _product(subscripts: str, a: Array, b: Array, accumulator: jnp.dtype, dtype: jnp.dtype | None = None) -> Array:
    """einsum with operands in `dtype` (their own if None), accumulated and returned in the state's dtype."""
    if dtype is not None:
        a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(subscripts, a, b, precision="highest", preferred_element_type=accumulator)


def _project(x: Array, table: Array, accumulator: jnp.dtype, dtype: jnp.dtype | None = None) -> Array:
    """Every row of x [Hkv, ..., j] times its head's table [Hkv, j, m]; dtypes as in `_product`."""
    if dtype is not None:
        x, table = x.astype(dtype), table.astype(dtype)
    return _rows_by_table(x, table, accumulator)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows_by_table(x: Array, table: Array, accumulator: jnp.dtype) -> Array:
    return _product("h...j,hjm->h...m", x, table, accumulator)


def _rows_by_table_forward(x: Array, table: Array, accumulator: jnp.dtype) -> tuple[Array, tuple[Array, Array]]:
    return _rows_by_table(x, table, accumulator), (x, table)


def _rows_by_table_backward(accumulator: jnp.dtype, saved: tuple[Array, Array], out_bar: Array) -> tuple[Array, Array]:
    x, table = saved
    out_bar = out_bar.astype(x.dtype)
    x_bar = _product("h...m,hjm->h...j", out_bar, table, accumulator)
    # One product over all rows has to turn one operand over: x lies in memory, while the cotangent is often a sum that
    # is still to be formed. Autodiff would turn the cotangent.
    x, out_bar = (rows.reshape(len(rows), -1, rows.shape[-1]) for rows in (x, out_bar))
    table_bar = _product("hxj,hxm->hjm", x, out_bar, accumulator)
    return x_bar.astype(x.dtype), table_bar.astype(table.dtype)


_rows_by_table.defvjp(_rows_by_table_forward, _rows_by_table_backward)


def _chunk(x: Array, span: Span) -> Array:
    """The span of x [B, T, Hkv, *inner, C] as [blocks, Hkv, B, N, *inner, K, C]."""
    chunks = span.block_size // span.chunk_size
    x = x[:, span.start : span.stop].reshape(x.shape[0], -1, chunks, span.chunk_size, *x.shape[2:])
    inner = range(5, x.ndim - 1)
    return jnp.transpose(x, (1, 4, 0, 2, *inner, 3, x.ndim - 1))


def _split_rows(x: Array, span: Span) -> Array:
    """The span of x [B, T] as [blocks, B, tokens of a block]."""
    return x[:, span.start : span.stop].reshape(len(x), -1, span.block_size).swapaxes(0, 1)


def _unchunk(x: Array) -> Array:
    """[blocks, Hkv, B, N, *inner, K, C] to [B, T, Hkv, *inner, C]."""
    inner = range(4, x.ndim - 2)
    x = jnp.transpose(x, (2, 0, 3, x.ndim - 2, 1, *inner, x.ndim - 1))
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2] * x.shape[3], *x.shape[4:])


def _skew(scores: Array) -> Array:
    """[..., t, s] to [..., t, j], s = t - (K-1-j): columns become reversed lags; zero where s is before the chunk."""
    size = scores.shape[-1]
    flat = scores.reshape(*scores.shape[:-2], size * size)
    flat = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(size - 1, 1)])
    return jnp.where(_reaches(size), flat.reshape(*scores.shape[:-2], size, size + 1)[..., :size], 0)


def _unskew(lags: Array) -> Array:
    """[..., t, j] over reversed lags to [..., t, s], j = K-1-t+s: columns become positions; zero in the future."""
    size = lags.shape[-1]
    flat = jnp.pad(lags, [(0, 0)] * (lags.ndim - 1) + [(0, 1)]).reshape(*lags.shape[:-2], size * (size + 1))
    return jnp.tril(flat[..., size - 1 : size - 1 + size * size].reshape(lags.shape))


def _reaches(size: int) -> Array:
    """[t, j]: whether reversed lag j, from token t, lies inside the chunk."""
    return jnp.arange(size)[None, :] >= size - 1 - jnp.arange(size)[:, None]


def _conjugate(pairs: Array) -> Array:
    return pairs * jnp.array([1, -1], pairs.dtype)[:, None]


def _pairs(x: Array) -> Array:
    return x.reshape(*x.shape[:-1], 2, -1)


def _flat(x: Array) -> Array:
    return x.reshape(*x.shape[:-2], -1)
