"""The fused chunked recurrence for TPUs (Mosaic): forward, backward and one step.

A program walks one row of tokens for a group of heads, block by block, each block in chunks of K tokens. The state
stays on the chip, transposed, [C, 2M], so that modes lie on lanes as in all tables; q, k and v are read once and o is
written once, straight from [B, T, H R], in groups of heads that fill whole 128-lane tiles.

Positions become lags without a gather: with J the exchange matrix, column c of S J holds position K-1-c, and rolling
row t by t+1 brings position s to column t-s. The map is its own inverse and its own adjoint, so the one function
`_skew` serves both directions and both passes. What a chunk does is written once, as pure functions of arrays, and the
backward kernel is their vector-Jacobian product, traced inside the kernel.

Letters as in `tables.py`; rows of a chunk are G K: the tokens of the chunk for each of the heads that share a state.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_sizes import BlockSizes, device_kind, interpreted
from pallas_kernels.gradients import attention, single_step
from pallas_kernels.tables import Rows, Tables, forward_flops, joined

_LANES = 128
# Rows of the batch whose step a program takes: a tile's worth.
_STEPS = 8


def check_chunk_size(chunk_size: int) -> None:
    """Refuses chunks that a TPU cannot take; interpreted, any do.

    Raises:
        ValueError: the device is one, and cannot.
    """
    if chunk_size % _LANES and device_kind().startswith("TPU"):
        raise ValueError(f"chunk_size must be a multiple of {_LANES} for 'pallas_tpu'; got {chunk_size}.")


def padded_modes(modes: int) -> int:
    """The number of modes, made whole: real and imaginary parts together fill lanes."""
    return -(-modes // (_LANES // 2)) * (_LANES // 2)


class _Shape(NamedTuple):
    """The sizes of a problem, and how it is cut."""

    batch: int
    length: int
    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    modes: int
    chunk: int
    chunks: int
    heads: int
    """Key/value heads of a program."""
    stacked: int
    """Queries of one state that are worked on at once."""

    @property
    def channels(self) -> int:
        return self.key_dim + self.value_dim

    @property
    def block(self) -> int:
        return self.chunk * self.chunks

    @property
    def blocks(self) -> int:
        return -(-self.length // self.block)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.kv_heads // self.heads, self.batch, self.blocks


def _shape(q: Array, k: Array, v: Array, tables: Tables, sizes: BlockSizes) -> _Shape:
    batch, length, heads, key_dim = q.shape
    kv_heads, value_dim = v.shape[2:]
    group = heads // kv_heads
    fills = lambda n: not (n * key_dim % _LANES or n * value_dim % _LANES)
    chunk = tables.chunk_size
    together = next((n for n in range(1, kv_heads) if not kv_heads % n and fills(n)), kv_heads)
    # q, k, v, the output's gradient, and three gradients; each is fetched or written while another is worked on.
    width = together * (group * (2 * key_dim + value_dim) + 2 * (key_dim + value_dim))
    fitting = sizes.token_bytes // (2 * chunk * width * q.dtype.itemsize)
    if not fitting:
        raise ValueError(
            f"a chunk of {chunk} tokens with {together} states of {group} heads, {key_dim} and {value_dim} wide, in "
            f"{q.dtype} does not fit the chip; use implementation 'xla'."
        )
    return _Shape(
        batch,
        length,
        kv_heads,
        group,
        key_dim,
        value_dim,
        modes=tables.state_dim,
        chunk=chunk,
        chunks=min(sizes.chunks, fitting, -(-length // chunk)),
        heads=together,
        stacked=min(group, max(sizes.max_rows // chunk, 1)),
    )


@single_step
def step(
    q: Array, k: Array, v: Array, state: Array, tables: Tables, rows: Rows, sizes: BlockSizes
) -> tuple[Array, Array]:
    """`attend` for one token a row, T = 1: the state is read once, and written once, where it lies.

    A row of length 0 keeps its state. Tables may have one row, for chunks of one token.
    """
    batch, _, heads, key_dim = q.shape
    shape = _shape(q, k, v, tables, sizes)
    together, group, modes, channels, dtype = shape.heads, shape.group, shape.modes, shape.channels, state.dtype
    side = min(batch, _STEPS)
    flat = state.reshape(batch, shape.kv_heads, 2 * modes, channels)
    # lambda as in `_turn`, and b, for each mode; modes lie on lanes here, and are brought to rows on the chip.
    real, imag = jnp.split(tables.decays[:, 0], 2, axis=-1)
    turns = [jnp.concatenate(pair, axis=-1) for pair in ((real, real), (-imag, imag))]
    vectors = jnp.stack([*turns, tables.responses[:, 0]], axis=1)

    def kernel(lengths_ref, q_ref, k_ref, v_ref, vectors_ref, matrix_ref, state_ref, out_ref, next_ref):  # type: ignore[no-untyped-def]
        first_row = pl.program_id(1) * side
        lane = jax.lax.broadcasted_iota(jnp.int32, (2 * modes, side * group), 1)
        cos, sin, weight = (vectors_ref[0].T[:, n : n + 1] for n in range(3))

        def advance(head: int) -> None:
            columns = lambda ref, head, width: ref[:, head * width : (head + 1) * width].astype(dtype)
            parts = [columns(k_ref, head, key_dim), columns(v_ref, head, shape.value_dim)]
            inputs = jnp.concatenate(parts, axis=1)
            members = range(head * group, (head + 1) * group)
            queries = [columns(q_ref, member, key_dim) for member in members]
            y = jnp.zeros(lane.shape, dtype)
            for row in range(side):
                old = state_ref[row, 0]
                turned = old * cos + jnp.concatenate([old[modes:], old[:modes]], axis=0) * sin
                new = turned + weight * inputs[row : row + 1]
                length = lengths_ref[jnp.minimum(first_row + row, batch - 1)]
                new = jnp.where(jnp.full(new.shape, length) > 0, new, old)
                next_ref[row, 0] = new
                for member, query in enumerate(queries):
                    seen = jnp.sum(new[:, :key_dim] * query[row : row + 1], axis=1, keepdims=True)
                    y = jnp.where(lane == row * group + member, seen, y)
            w = _dot(matrix_ref[0], y, _TN, dtype)
            outputs = []
            for row in range(side):
                values = next_ref[row, 0][:, key_dim:]
                column = lambda n: jnp.sum(jnp.where(lane == n, w, 0), axis=1, keepdims=True)
                weights = (column(row * group + member) for member in range(group))
                of_row = [jnp.sum(values * weight, axis=0, keepdims=True) for weight in weights]
                outputs.append(jnp.concatenate(of_row, axis=1))
            width = group * shape.value_dim
            out = jnp.concatenate(outputs, axis=0).astype(out_ref.dtype)
            out_ref[:, head * width : (head + 1) * width] = out

        # Heads share blocks of tokens; which one it is must be known where columns are cut.
        for head in range(together):
            pl.when(pl.program_id(2) == head)(partial(advance, head))

    tokens = lambda width: pl.BlockSpec((side, together * width), lambda h, b, n, _: (b, h))
    of_head = lambda *block: pl.BlockSpec((1, *block), lambda h, b, n, _: (h * together + n, 0, 0))
    states = pl.BlockSpec((side, 1, 2 * modes, channels), lambda h, b, n, _: (b, h * together + n, 0, 0))
    out, last = _run(
        kernel,
        (rows.lengths, *(x.reshape(batch, -1) for x in (q, k, v)), vectors, tables.matrix, flat),
        grid=(shape.kv_heads // together, -(-batch // side), together),
        in_specs=[
            tokens(group * key_dim),
            tokens(key_dim),
            tokens(shape.value_dim),
            of_head(3, 2 * modes),
            of_head(2 * modes, 2 * modes),
            states,
        ],
        results=[
            (jax.ShapeDtypeStruct((batch, heads * shape.value_dim), v.dtype), tokens(group * shape.value_dim)),
            (jax.ShapeDtypeStruct(flat.shape, dtype), states),
        ],
        scratch=[],
        sizes=sizes,
        semantics=("parallel", "parallel", "arbitrary"),
        flops=forward_flops(q, v, tables),
        name="interdomain_step",
        input_output_aliases={6: 1},
    )
    return out.reshape(batch, 1, heads, shape.value_dim), last.reshape(state.shape)


def _forward(
    q: Array, k: Array, v: Array, state: Array, tables: Tables, rows: Rows, sizes: BlockSizes, *, keep: bool
) -> tuple[Array, ...]:
    """The output, the last state and, to `keep`, the state before each block, [B, blocks, Hkv, C, 2M]."""
    shape = _shape(q, k, v, tables, sizes)
    specs = _Specs(shape)
    dtype = state.dtype
    flat = state.reshape(shape.batch, shape.kv_heads, 2 * shape.modes, shape.channels)
    results = [
        (jax.ShapeDtypeStruct((shape.batch, shape.length, q.shape[2] * shape.value_dim), v.dtype), specs.outputs()),
        (jax.ShapeDtypeStruct(flat.shape, dtype), specs.state()),
    ]
    if keep:
        kept = (shape.batch, shape.blocks, shape.kv_heads, shape.channels, 2 * shape.modes)
        results.append((jax.ShapeDtypeStruct(kept, dtype), specs.starts()))

    def kernel(lengths_ref, *refs):  # type: ignore[no-untyped-def]
        document_ref, inputs, others = _unpack(rows, refs, 5 + 3)
        q_ref, k_ref, v_ref, initial_ref, *table_refs = inputs
        out_ref, last_ref, *starts_refs, state_ref = others
        tables_ref = Tables(*table_refs)
        row, block = pl.program_id(1), pl.program_id(2)

        @pl.when(block == 0)
        def _() -> None:
            for head in range(shape.heads):
                state_ref[head] = initial_ref[0, head].T

        for starts_ref in starts_refs:
            starts_ref[0, 0] = state_ref[...]

        def chunk(index: Array, carry: None) -> None:
            place = _Place.of(index, block * shape.chunks, lengths_ref[row], shape)

            @pl.when(place.inside > 0)
            def _() -> None:
                masks = _Masks.of(place, document_ref, shape, dtype)
                loaded = [_load(ref, place, dtype) for ref in (q_ref, k_ref, v_ref)]
                outputs = []
                for head in range(shape.heads):
                    queries, keys, values = _of_head(loaded, head, shape)
                    table = _HeadTables.load(tables_ref, head, place)
                    state = state_ref[head]
                    read = partial(_read, masks=masks, shape=shape, sizes=sizes, dtype=q.dtype)
                    outputs += [read(part, keys, values, state, *table.of_read) for part in queries]
                    state_ref[head] = _advance(keys, values, state, *table.of_state, masks=masks, dtype=q.dtype)
                out_ref[0, place.rows] = _columns(outputs, shape.chunk).astype(out_ref.dtype)

        jax.lax.fori_loop(0, shape.chunks, chunk, None)

        @pl.when(block == shape.blocks - 1)
        def _() -> None:
            for head in range(shape.heads):
                last_ref[0, head] = state_ref[head].T

    out, last, *starts = _call(
        kernel,
        shape,
        sizes,
        rows,
        specs,
        inputs=[
            (joined(q), specs.queries()),
            (joined(k), specs.keys()),
            (joined(v), specs.values()),
            (flat, specs.state()),
            *specs.of_tables(tables),
        ],
        results=results,
        scratch=[pltpu.VMEM((shape.heads, shape.channels, 2 * shape.modes), dtype)],
        semantics=("parallel", "parallel", "arbitrary"),
        flops=forward_flops(q, v, tables),
        name="interdomain_forward",
    )
    return out.reshape(*q.shape[:3], shape.value_dim), last.reshape(state.shape), *starts


def _backward(
    q: Array,
    k: Array,
    v: Array,
    starts: Array,
    tables: Tables,
    rows: Rows,
    out_bar: Array,
    last_bar: Array,
    sizes: BlockSizes,
) -> tuple[Array, Array, Array, Array, Tables]:
    """The gradients, from the state before each block; blocks and the chunks in them are walked last first."""
    shape = _shape(q, k, v, tables, sizes)
    specs = _Specs(shape, reverse=True)
    dtype = last_bar.dtype
    flat = last_bar.reshape(shape.batch, shape.kv_heads, 2 * shape.modes, shape.channels)
    like = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype)

    def kernel(lengths_ref, *refs):  # type: ignore[no-untyped-def]
        document_ref, inputs, others = _unpack(rows, refs, 6 + 4)
        q_ref, k_ref, v_ref, starts_ref, *table_refs, out_bar_ref, last_bar_ref = inputs
        q_bar_ref, k_bar_ref, v_bar_ref, first_bar_ref, *table_bar_refs, states_ref, state_bar_ref = others
        tables_ref, tables_bar_ref = Tables(*table_refs), Tables(*table_bar_refs)
        row, block = pl.program_id(1), pl.program_id(2)

        @pl.when((row == 0) & (block == 0))
        def _() -> None:
            for ref in table_bar_refs:
                ref[...] = jnp.zeros_like(ref)

        @pl.when(block == 0)
        def _() -> None:
            for head in range(shape.heads):
                state_bar_ref[head] = last_bar_ref[0, head].T

        states_ref[0] = starts_ref[0, 0]
        first_chunk = (shape.blocks - 1 - block) * shape.chunks

        def advance(index: Array, carry: None) -> None:
            place = _Place.of(index, first_chunk, lengths_ref[row], shape)

            @pl.when(place.inside > 0)
            def _() -> None:
                masks = _Masks.of(place, document_ref, shape, dtype)
                loaded = [_load(ref, place, dtype) for ref in (k_ref, v_ref)]
                for head in range(shape.heads):
                    keys, values = _of_head(loaded, head, shape)
                    table = _HeadTables.load(tables_ref, head, place)
                    state = states_ref[index, head]
                    states_ref[index + 1, head] = _advance(
                        keys, values, state, *table.of_state, masks=masks, dtype=q.dtype
                    )

        jax.lax.fori_loop(0, shape.chunks - 1, advance, None)

        def chunk(index: Array, carry: None) -> None:
            index = shape.chunks - 1 - index
            place = _Place.of(index, first_chunk, lengths_ref[row], shape)

            @pl.when(place.inside > 0)
            def _() -> None:
                masks = _Masks.of(place, document_ref, shape, dtype)
                loaded = [_load(ref, place, dtype) for ref in (q_ref, k_ref, v_ref)]
                loaded_bar = _load(out_bar_ref, place, dtype)
                q_bars, k_bars, v_bars = [], [], []
                for head in range(shape.heads):
                    queries, keys, values = _of_head(loaded, head, shape)
                    table = _HeadTables.load(tables_ref, head, place)
                    state = states_ref[index, head]
                    advance = partial(_advance, masks=masks, dtype=q.dtype)
                    _, pull = jax.vjp(advance, keys, values, state, *table.of_state)
                    k_bar, v_bar, state_bar, *of_state_bar = pull(state_bar_ref[head])
                    of_read_bar = [jnp.zeros_like(array) for array in table.of_read]
                    out_bars = _stacked(loaded_bar, head, shape, shape.value_dim)
                    read = partial(_read, masks=masks, shape=shape, sizes=sizes, dtype=q.dtype)
                    for part, part_bar in zip(queries, out_bars, strict=True):
                        _, pull = jax.vjp(read, part, keys, values, state, *table.of_read)
                        q_bar, *shared = pull(part_bar)
                        q_bars.append(q_bar)
                        sums = jax.tree.map(jnp.add, [k_bar, v_bar, state_bar, *of_read_bar], shared)
                        k_bar, v_bar, state_bar, *of_read_bar = sums
                    k_bars.append(k_bar)
                    v_bars.append(v_bar)
                    state_bar_ref[head] = state_bar
                    table.add(tables_bar_ref, head, place, of_read_bar, of_state_bar)
                q_bar_ref[0, place.rows] = _columns(q_bars, shape.chunk).astype(q.dtype)
                k_bar_ref[0, place.rows] = jnp.concatenate(k_bars, axis=1).astype(k.dtype)
                v_bar_ref[0, place.rows] = jnp.concatenate(v_bars, axis=1).astype(v.dtype)

        jax.lax.fori_loop(0, shape.chunks, chunk, None)

        @pl.when(block == shape.blocks - 1)
        def _() -> None:
            for head in range(shape.heads):
                first_bar_ref[0, head] = state_bar_ref[head].T

    tokens = [(joined(q), specs.queries()), (joined(k), specs.keys()), (joined(v), specs.values())]
    q_bar, k_bar, v_bar, first_bar, *table_bars = _call(
        kernel,
        shape,
        sizes,
        rows,
        specs,
        inputs=[
            *tokens,
            (starts, specs.starts()),
            *specs.of_tables(tables),
            (joined(out_bar), specs.outputs()),
            (flat, specs.state()),
        ],
        results=[
            *((like(array), spec) for array, spec in tokens),
            (like(flat), specs.state()),
            *((like(table), spec) for table, spec in specs.of_tables(tables)),
        ],
        scratch=[
            pltpu.VMEM((shape.chunks, shape.heads, shape.channels, 2 * shape.modes), dtype),
            pltpu.VMEM((shape.heads, shape.channels, 2 * shape.modes), dtype),
        ],
        semantics=("parallel", "arbitrary", "arbitrary"),
        flops=3 * forward_flops(q, v, tables),
        name="interdomain_backward",
    )
    bars = (q_bar.reshape(q.shape), k_bar.reshape(k.shape), v_bar.reshape(v.shape), first_bar.reshape(last_bar.shape))
    return *bars, Tables(*table_bars)


attend = attention(_forward, _backward)


class _Place(NamedTuple):
    """A chunk: its rows in the block, and how many of its tokens are no padding."""

    rows: Any
    inside: Array

    @staticmethod
    def of(index: Array, first_chunk: Array, length: Array, shape: _Shape) -> "_Place":
        """Chunk `index` of the block that starts with the row's chunk `first_chunk`; the row has `length` tokens."""
        start = pl.multiple_of(index * shape.chunk, shape.chunk)
        inside = jnp.clip(length - (first_chunk + index) * shape.chunk, 0, shape.chunk)
        return _Place(pl.ds(start, shape.chunk), inside)


class _Masks(NamedTuple):
    """What documents change inside a chunk, as 0 or 1; None where there are none.

    Attributes:
        same: [K, K], two tokens of one document.
        first: [K, 2M], tokens that see the carried state.
        last: [K, C], tokens that the next state sees.
        keep: [C, 2M], whether the carried state reaches the next.
    """

    same: Array | None
    first: Array | None
    last: Array | None
    keep: Array | None

    @staticmethod
    def of(place: _Place, document_ref, shape: _Shape, dtype: jnp.dtype) -> "_Masks":  # type: ignore[no-untyped-def]
        if document_ref is None:
            return _Masks(None, None, None, None)
        size, width = shape.chunk, 2 * shape.modes
        document = document_ref[0, :, place.rows].astype(dtype)
        inside = jax.lax.broadcasted_iota(jnp.int32, document.shape, 1) < place.inside
        final = jnp.max(jnp.where(inside, document, 0))
        across = jnp.broadcast_to(document, (size, size))
        down = across.T
        column = lambda width: jnp.broadcast_to(down[:, :1], (size, width))
        return _Masks(
            across == down,
            column(width) == 0,
            column(shape.channels) == final,
            jnp.full((shape.channels, width), final) == 0,
        )


class _HeadTables(NamedTuple):
    """The tables of one head, as a chunk uses them."""

    responses: Array
    decays: Array
    matrix: Array
    reversed: Array
    last_decay: Array

    @property
    def of_read(self) -> tuple[Array, ...]:
        return self.responses, self.decays, self.matrix

    @property
    def of_state(self) -> tuple[Array, ...]:
        return self.reversed, self.last_decay

    @staticmethod
    def load(refs: Tables, head: int, place: _Place) -> "_HeadTables":
        # The last token of a chunk meets lag 0: in a chunk that is not full, the lags move up.
        return _HeadTables(
            refs.responses[head],
            refs.decays[head],
            refs.matrix[head],
            pltpu.roll(refs.reversed[head], place.inside, 0),
            refs.decays[head, pl.ds(place.inside - 1, 1)],
        )

    def add(self, refs: Tables, head: int, place: _Place, of_read_bar: list[Array], of_state_bar: list[Array]) -> None:
        """Adds the gradients of what was loaded to those of the tables."""
        responses_bar, decays_bar, matrix_bar = of_read_bar
        reversed_bar, last_decay_bar = of_state_bar
        size = reversed_bar.shape[0]
        refs.responses[head] += responses_bar
        refs.decays[head] += decays_bar
        refs.matrix[head] += matrix_bar
        refs.reversed[head] += pltpu.roll(reversed_bar, size - place.inside, 0)
        refs.decays[head, pl.ds(place.inside - 1, 1)] += last_decay_bar


def _read(
    queries: Array,
    keys: Array,
    values: Array,
    state: Array,
    responses: Array,
    decays: Array,
    matrix: Array,
    *,
    masks: _Masks,
    shape: _Shape,
    sizes: BlockSizes,
    dtype: jnp.dtype,
) -> Array:
    """The outputs [G K, D] of a chunk, for queries [G K, R] and the state [C, 2M] before it."""
    groups = len(queries) // shape.chunk
    repeat = lambda x: x if groups == 1 else jnp.concatenate([x] * groups, axis=0)
    same, first = (None if mask is None else repeat(mask) for mask in (masks.same, masks.first))
    skew = _self_adjoint(partial(_skew, strided_roll=sizes.strided_roll, dtype=dtype))
    key_state, value_state = state[: shape.key_dim], state[shape.key_dim :]
    decays = repeat(decays)

    scores = _keep(same, _dot(queries, keys, _NT, dtype))
    carried = _keep(first, _dot(queries, key_state, _NN, dtype))
    y = _dot(skew(scores), responses, _NN, dtype) + _turn(carried, decays)
    w = _dot(y, matrix, _NN, state.dtype)
    weights = _keep(same, skew(_dot(w, responses, _NT, dtype)))
    # w is a conjugate: it turns by the conjugate of lambda.
    turned = _keep(first, _turn(w, decays, conjugate=True))
    return _dot(weights, values, _NN, dtype) + _dot(turned, value_state, _NT, dtype)


def _advance(
    keys: Array, values: Array, state: Array, reversed: Array, decay: Array, *, masks: _Masks, dtype: jnp.dtype
) -> Array:
    """The state [C, 2M] after a chunk."""
    inputs = _keep(masks.last, jnp.concatenate([keys, values], axis=1))
    kept = _keep(masks.keep, _turn(state, decay))
    return kept + _dot(inputs, reversed, _TN, dtype)


def _keep(mask: Array | None, x: Array) -> Array:
    return x if mask is None else jnp.where(mask, x, 0)


# Which axis of each operand a product sums over.
_NN, _NT, _TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _dot(a: Array, b: Array, dims: tuple, dtype: jnp.dtype) -> Array:
    """A matrix product of operands rounded to `dtype`, summed and returned in their own; its gradients are such too."""
    precision = jax.lax.Precision.HIGHEST if dtype == a.dtype else jax.lax.Precision.DEFAULT
    a, b, accumulator = a.astype(dtype), b.astype(dtype), a.dtype
    return jax.lax.dot_general(a, b, (dims, ((), ())), precision=precision, preferred_element_type=accumulator)


def _dot_forward(a: Array, b: Array, dims: tuple, dtype: jnp.dtype) -> tuple[Array, tuple[Array, Array]]:
    return _dot(a, b, dims, dtype), (a, b)


def _dot_backward(dims: tuple, dtype: jnp.dtype, saved: tuple[Array, Array], bar: Array) -> tuple[Array, Array]:
    a, b = saved
    if dims == _NN:
        return _dot(bar, b, _NT, dtype), _dot(a, bar, _TN, dtype)
    if dims == _NT:
        return _dot(bar, b, _NN, dtype), _dot(bar, a, _TN, dtype)
    return _dot(b, bar, _NT, dtype), _dot(a, bar, _NN, dtype)


_dot.defvjp(_dot_forward, _dot_backward)


def _self_adjoint(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A linear function that is its own transpose, for autodiff."""
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(lambda x: (function(x), None), lambda _, bar: (function(bar),))
    return wrapped


def _skew(x: Array, *, strided_roll: bool, dtype: jnp.dtype) -> Array:
    """[G K, K]: column c of row t goes to column t - c; zero where there is none."""
    size = x.shape[1]
    iota = partial(jax.lax.broadcasted_iota, jnp.int32)
    exchange = (iota((size, size), 0) + iota((size, size), 1) == size - 1).astype(x.dtype)
    x = _dot(x, exchange, _NN, dtype)
    token = iota(x.shape, 0) % size
    if strided_roll:
        x = pltpu.roll(x, 1, 1, stride=1, stride_axis=0)
    else:
        for bit in range(math.ceil(math.log2(size + 1))):
            x = jnp.where((token + 1) >> bit & 1, pltpu.roll(x, 2**bit % size, 1), x)
    return jnp.where(iota(x.shape, 1) <= token, x, 0)


@_self_adjoint
def _swap(x: Array) -> Array:
    """The real and the imaginary halves of the last axis, exchanged."""
    return pltpu.roll(x, x.shape[1] // 2, 1)


def _turn(x: Array, decay: Array, *, conjugate: bool = False) -> Array:
    """The complex numbers of x [., 2M] times those of decay, or their conjugates; [K, 2M] or one row for all."""
    real_half = jax.lax.broadcasted_iota(jnp.int32, decay.shape, 1) < decay.shape[1] // 2
    swapped = _swap(decay)
    cos, sin = jnp.where(real_half, decay, swapped), jnp.where(real_half, -swapped, decay)
    return x * cos - _swap(x) * sin if conjugate else x * cos + _swap(x) * sin


def _load(ref, place: _Place, dtype: jnp.dtype) -> Array:  # type: ignore[no-untyped-def]
    """The rows of a chunk, zero behind the last token: what lies there may be anything."""
    x = ref[0, place.rows].astype(dtype)
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) < place.inside, x, 0)


def _of_head(loaded: list[Array], head: int, shape: _Shape) -> list:
    """Queries (if given), keys and values of one head, from those of a chunk; queries as in `_stacked`."""
    *queries, keys, values = loaded
    columns = lambda x, width: x[:, head * width : (head + 1) * width]
    parts = [_stacked(x, head, shape, shape.key_dim) for x in queries]
    return [*parts, columns(keys, shape.key_dim), columns(values, shape.value_dim)]


def _stacked(x: Array, head: int, shape: _Shape, width: int) -> list[Array]:
    """What the queries of a state have, from [K, heads G width]: in parts of `stacked` heads or fewer, [g K, width]."""
    columns = [x[:, n * width : (n + 1) * width] for n in range(head * shape.group, (head + 1) * shape.group)]
    parts = [columns[n : n + shape.stacked] for n in range(0, shape.group, shape.stacked)]
    return [part[0] if len(part) == 1 else jnp.concatenate(part, axis=0) for part in parts]


def _columns(parts: list[Array], size: int) -> Array:
    """Undoes the stacking: parts [g K, width] side by side."""
    pieces = [part[n : n + size] for part in parts for n in range(0, len(part), size)]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)


class _Specs:
    """The blocks that a program of the grid (heads, rows, blocks of tokens) sees of each array."""

    def __init__(self, shape: _Shape, *, reverse: bool = False) -> None:
        self.shape = shape
        self.block = (lambda n: shape.blocks - 1 - n) if reverse else (lambda n: n)

    def _tokens(self, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.shape.block, width), lambda h, b, n, _: (b, self.block(n), h))

    def queries(self) -> pl.BlockSpec:
        return self._tokens(self.shape.heads * self.shape.group * self.shape.key_dim)

    def keys(self) -> pl.BlockSpec:
        return self._tokens(self.shape.heads * self.shape.key_dim)

    def values(self) -> pl.BlockSpec:
        return self._tokens(self.shape.heads * self.shape.value_dim)

    def outputs(self) -> pl.BlockSpec:
        return self._tokens(self.shape.heads * self.shape.group * self.shape.value_dim)

    def state(self) -> pl.BlockSpec:
        shape = self.shape
        return pl.BlockSpec((1, shape.heads, 2 * shape.modes, shape.channels), lambda h, b, n, _: (b, h, 0, 0))

    def starts(self) -> pl.BlockSpec:
        shape = self.shape
        block = (1, 1, shape.heads, shape.channels, 2 * shape.modes)
        return pl.BlockSpec(block, lambda h, b, n, _: (b, self.block(n), h, 0, 0))

    def document(self) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, self.shape.block), lambda h, b, n, _: (b, 0, self.block(n)))

    def of_tables(self, tables: Tables) -> list[tuple[Array, pl.BlockSpec]]:
        """Each table, with its block: what the program's heads have of it."""
        # They change with the heads alone, so it hardly pays to fetch them ahead, in memory of their own.
        once = pl.Buffered(buffer_count=1)
        block = lambda table: pl.BlockSpec(
            (self.shape.heads, *table.shape[1:]), lambda h, b, n, _: (h, 0, 0), pipeline_mode=once
        )
        return [(table, block(table)) for table in tables]


def _call(  # type: ignore[no-untyped-def]
    kernel,
    shape: _Shape,
    sizes: BlockSizes,
    rows: Rows,
    specs: _Specs,
    *,
    inputs: list[tuple[Array, pl.BlockSpec]],
    **settings,
) -> list[Array]:
    """Runs a kernel of `attend` over its grid; the document ids, if there are any, are its first input."""
    if rows.document is not None:
        inputs = [(rows.document, specs.document()), *inputs]
    arrays, in_specs = zip(*inputs, strict=True)
    return _run(kernel, (rows.lengths, *arrays), grid=shape.grid, in_specs=in_specs, sizes=sizes, **settings)


def _run(  # type: ignore[no-untyped-def]
    kernel,
    arguments: tuple[Array, ...],
    *,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    results: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    scratch: Sequence,
    sizes: BlockSizes,
    semantics: tuple[Literal["parallel", "arbitrary"], ...],
    flops: int,
    name: str,
    **settings,
) -> list[Array]:
    """Runs a kernel whose first argument is known before it starts: on a TPU compiled, on a CPU interpreted."""
    like = [like for like, _ in results]
    arrays: list[Any] = [*arguments, *like]
    moved = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)

    return pl.pallas_call(
        kernel,
        out_shape=like,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=in_specs,
            out_specs=[spec for _, spec in results],
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=sizes.vmem_limit_bytes),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0),
        interpret=interpreted("TPU"),
        name=name,
        **settings,
    )(*arguments)


def _unpack(rows: Rows, refs: tuple, inputs: int) -> tuple:
    """The document ids if there are any, the inputs, and what else the kernel was given."""
    document, *others = refs if rows.document is not None else (None, *refs)
    return document, others[:inputs], others[inputs:]
