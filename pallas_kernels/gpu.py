"""The fused chunked recurrence for GPUs (Pallas to Triton): forward, backward and one step.

A program walks the tokens of one row for one key/value head and all queries that share it, in chunks of K tokens. The
state stays in registers; q, k and v are read once and o is written once, straight from [B, T, H R].

Triton has neither slices nor rolls of a tile, and its tiles have sides that are powers of two. So complex tiles are
pairs of real ones, loaded one by one; what a tile has beyond its array is masked to zero. Positions become lags through
memory: a [K, K] tile, which belongs to the program and stays in cache, is written with the columns of row t in the
order of their lags, and read back as it lies. The map is its own inverse and its own adjoint.

Letters as in `tables.py`.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.block_sizes import BlockSizes, device_kind, interpreted
from pallas_kernels.gradients import attention, single_step
from pallas_kernels.tables import Rows, Tables, forward_flops, joined

# The least side of a tile in a matrix product.
_MIN_SIDE = 16


def check_chunk_size(chunk_size: int) -> None:
    """Refuses chunks that a GPU cannot take; interpreted, any do.

    Raises:
        ValueError: the device is one, and cannot.
    """
    if (chunk_size < _MIN_SIDE or chunk_size & (chunk_size - 1)) and device_kind().startswith("NVIDIA"):
        raise ValueError(f"chunk_size must be a power of two, {_MIN_SIDE} or more, for 'pallas_gpu'; got {chunk_size}.")


def padded_modes(modes: int) -> int:
    """The number of modes: any does."""
    return modes


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

    @property
    def channels(self) -> int:
        return self.key_dim + self.value_dim

    @property
    def blocks(self) -> int:
        return -(-self.length // (self.chunk * self.chunks))

    @property
    def tile(self) -> int:
        """The side of a tile of tokens."""
        return _Axis.of(0, self.chunk).size


def _shape(q: Array, k: Array, v: Array, tables: Tables, sizes: BlockSizes) -> _Shape:
    batch, length, heads, key_dim = q.shape
    kv_heads, value_dim = v.shape[2:]
    size = tables.chunk_size
    chunks = max(1, min(sizes.chunks, -(-length // size)))
    return _Shape(batch, length, kv_heads, heads // kv_heads, key_dim, value_dim, tables.state_dim, size, chunks)


@single_step
def step(
    q: Array, k: Array, v: Array, state: Array, tables: Tables, rows: Rows, sizes: BlockSizes
) -> tuple[Array, Array]:
    """`attend` for one token a row, T = 1: the state is read once, and written once, where it lies.

    A row of length 0 keeps its state.
    """
    shape = _shape(q, k, v, tables, sizes)
    dtype = state.dtype

    def kernel(at, state_ref, out_ref, next_ref):  # type: ignore[no-untyped-def]
        real = at.length() > 0
        decay, weight = (at.row_of(ref, 0).load() for ref in (at.tables.decays, at.tables.responses))
        stand = lambda x: _Pair(x.re[:, None], x.im[:, None])
        token = lambda ref, head, width: at.tokens(ref, 0, head, width).load(dtype)[None, :]
        inputs = token(at.k, at.head, shape.key_dim), token(at.v, at.head, shape.value_dim)
        news = []
        state = _load_state(at.state(state_ref))
        # Small tiles are loaded by many threads, and what is stored takes the place of what they load.
        at.barrier()
        for before, new, x in zip(state, at.state(next_ref), inputs, strict=True):
            after = _add(_turn(before, stand(decay)), _Pair(*(part[:, None] * x for part in weight)))
            news.append(_Pair(*(jnp.where(real, a, b) for a, b in zip(after, before, strict=True))))
            new.store(news[-1])
        keys, values = news
        matrix = [at.table(at.tables.matrix, modes).load() for modes in at.modes]
        for member in at.members():
            query = token(at.q, member, shape.key_dim)
            y = _Pair(*(jnp.sum(part * query, axis=1, keepdims=True) for part in keys))
            # The modes of w lie across the columns of the matrix, and have to stand before the rows of the state.
            w = _Pair(*(jnp.sum(y.re * a + y.im * b, axis=0)[:, None] for a, b in zip(*matrix, strict=True)))
            out = jnp.sum(w.re * values.re + w.im * values.im, axis=0)
            at.tokens(out_ref, 0, member, shape.value_dim).store(out)

    out, last = _run(
        kernel,
        shape,
        (q, k, v, tables, rows),
        [_flat(state)],
        [_outputs_like(q, v), _like(_flat(state))],
        sizes,
        name="interdomain_step",
        flops=forward_flops(q, v, tables),
        aliases={0: 1},
    )
    return out.reshape(*q.shape[:3], shape.value_dim), last.reshape(state.shape)


def _forward(
    q: Array, k: Array, v: Array, state: Array, tables: Tables, rows: Rows, sizes: BlockSizes, *, keep: bool
) -> tuple[Array, ...]:
    """The output, the last state and, to `keep`, the state before each block, [B, Hkv, blocks, 2M, C]."""
    shape = _shape(q, k, v, tables, sizes)
    flat = _flat(state)
    results = [_outputs_like(q, v), _like(flat), _scratch(shape, q.dtype, 2, shape.tile)]
    if keep:
        results.append(_states_like(flat, shape.blocks))

    def kernel(at, initial_ref, out_ref, last_ref, lags_ref, *starts_refs):  # type: ignore[no-untyped-def]
        def body(index: Array, state: _State) -> _State:
            index = index.astype(jnp.int32)
            for starts_ref in starts_refs:

                @pl.when(jax.lax.rem(index, jnp.int32(shape.chunks)) == 0)
                def _() -> None:
                    _store_state(at.state(starts_ref, jax.lax.div(index, jnp.int32(shape.chunks))), state)  # noqa: B023

            return at.if_any(index, walk, index, state)

        def walk(index: Array, state: _State) -> _State:
            chunk = _Chunk(at, index, lags_ref)

            def read(member: Array, carry: None) -> None:
                seen = _read(chunk, chunk.queries(member), state.__getitem__)
                out = at.dot(seen.weights, chunk.values(), _NN)
                out += at.dot(seen.turned.re, state[1].re, _NN) + at.dot(seen.turned.im, state[1].im, _NN)
                chunk.tile(out_ref, member, shape.value_dim).store(out)

            at.each_member(read, None)
            return _advance(chunk, state)

        chunks = -(-shape.length // shape.chunk)
        state = jax.lax.fori_loop(0, chunks, body, _load_state(at.state(initial_ref)))
        _store_state(at.state(last_ref), state)

    out, last, _, *starts = _run(
        kernel,
        shape,
        (q, k, v, tables, rows),
        [flat],
        results,
        sizes,
        name="interdomain_forward",
        flops=forward_flops(q, v, tables),
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
    """The gradients, from the state before each block; blocks and the chunks in them are walked last first.

    Each program has gradients of the tables of its own, in memory; they are summed over the rows when all is done.
    """
    shape = _shape(q, k, v, tables, sizes)
    flat = _flat(last_bar)
    results = [
        *(_like(joined(x)) for x in (q, k, v)),
        _like(flat),
        *(jax.ShapeDtypeStruct((shape.batch, *table.shape), table.dtype) for table in tables),
        _scratch(shape, q.dtype, 4, shape.tile),
        _scratch(shape, q.dtype, 4, 2 * shape.modes),
        # The states before the chunks of the block at hand.
        _states_like(flat, shape.chunks),
    ]

    def kernel(at, starts_ref, out_bar_ref, last_bar_ref, *refs):  # type: ignore[no-untyped-def]
        q_bar_ref, k_bar_ref, v_bar_ref, first_bar_ref, *bar_refs, lags_ref, modes_ref, states_ref = refs
        bars_ref = Tables(*bar_refs)
        for ref in bars_ref:
            tile = at.own(ref)
            tile.store(jnp.zeros([axis.size for axis in tile.axes], ref.dtype))

        def block(index: Array, state_bar: _State) -> _State:
            index = shape.blocks - 1 - index.astype(jnp.int32)
            return at.if_any(index * shape.chunks, walk, index, state_bar)

        def walk(block: Array, state_bar: _State) -> _State:
            first = block * shape.chunks

            def advance(index: Array, state: _State) -> _State:
                index = index.astype(jnp.int32)
                _store_state(at.state(states_ref, index), state)
                walk = lambda index, state: _advance(_Chunk(at, index, lags_ref), state)
                return at.if_any(first + index, walk, first + index, state)

            state = _load_state(at.state(starts_ref, block))
            state = jax.lax.fori_loop(0, shape.chunks - 1, advance, state)
            _store_state(at.state(states_ref, shape.chunks - 1), state)

            def body(index: Array, state_bar: _State) -> _State:
                index = shape.chunks - 1 - index.astype(jnp.int32)
                return at.if_any(first + index, read_chunk, index, state_bar)

            def read_chunk(index: Array, state_bar: _State) -> _State:
                # What the program has written of states and of gradients is there for all its threads.
                at.barrier()
                chunk = _Chunk(at, first + index, lags_ref)
                state = lambda part: at.state(states_ref, index)[part].load()
                bars = _advance_bar(chunk, bars_ref, state, state_bar)

                def read(member: Array, bars: _Bars) -> _Bars:
                    out_bar = lambda: chunk.tile(out_bar_ref, member, shape.value_dim).load(q.dtype)
                    q_bar, bars = _read_bar(chunk, bars_ref, modes_ref, member, out_bar, state, bars)
                    chunk.tile(q_bar_ref, member, shape.key_dim).store(q_bar)
                    return bars

                k_bar, v_bar, state_bar = at.each_member(read, bars)
                chunk.tile(k_bar_ref, at.head, shape.key_dim).store(k_bar)
                chunk.tile(v_bar_ref, at.head, shape.value_dim).store(v_bar)
                return state_bar

            state_bar = jax.lax.fori_loop(0, shape.chunks, body, state_bar)
            # The next block writes its states over those of this one.
            at.barrier()
            return state_bar

        state_bar = jax.lax.fori_loop(0, shape.blocks, block, _load_state(at.state(last_bar_ref)))
        _store_state(at.state(first_bar_ref), state_bar)

    q_bar, k_bar, v_bar, first_bar, *table_bars = _run(
        kernel,
        shape,
        (q, k, v, tables, rows),
        [starts, joined(out_bar), flat],
        results,
        sizes,
        name="interdomain_backward",
        flops=3 * forward_flops(q, v, tables),
    )[: 4 + 4]
    bars = (q_bar.reshape(q.shape), k_bar.reshape(k.shape), v_bar.reshape(v.shape), first_bar.reshape(last_bar.shape))
    return *bars, Tables(*(jnp.sum(bar, axis=0) for bar in table_bars))


attend = attention(_forward, _backward)


class _Pair(NamedTuple):
    """The real and the imaginary parts of a tile of complex numbers."""

    re: Array
    im: Array


_State = tuple[_Pair, _Pair]
"""The states of the keys, [M, R], and of the values, [M, D]."""

_Part = Callable[[int], _Pair]
"""Either of them, by its number: where registers are short, it is loaded for each use."""

_Bars = tuple[Array, Array, _State]
"""The gradients of the keys [K, R] and values [K, D] of a chunk, and of the state before it."""


def _turn(x: _Pair, y: _Pair) -> _Pair:
    """x y."""
    return _Pair(x.re * y.re - x.im * y.im, x.im * y.re + x.re * y.im)


def _turn_back(x: _Pair, y: _Pair) -> _Pair:
    """x conj(y): the gradient of either factor of a product, from that of the product and the other factor."""
    return _Pair(x.re * y.re + x.im * y.im, x.im * y.re - x.re * y.im)


def _add(x: _Pair, y: _Pair) -> _Pair:
    return _Pair(x.re + y.re, x.im + y.im)


class _Axis(NamedTuple):
    """Places `start` to `start + length` of an axis of an array, in a tile of `size` >= length."""

    start: Array | int
    length: Array | int
    size: int

    @staticmethod
    def of(start: Array | int, length: int) -> "_Axis":
        return _Axis(start, length, max(_MIN_SIDE, pl.next_power_of_2(length)))


class _Tile(NamedTuple):
    """A tile of ref[first] in memory. What it has outside of its axes is zero when loaded, and is not stored."""

    ref: Any
    first: tuple
    axes: tuple[_Axis, ...]

    def load(self, dtype: jnp.dtype | None = None) -> Array:
        places, mask = self._places()
        other = None if mask is None else jnp.zeros((), self.ref.dtype)
        return plgpu.load(self.ref.at[places], mask=mask, other=other).astype(dtype or self.ref.dtype)

    def store(self, x: Array) -> None:
        places, mask = self._places()
        plgpu.store(self.ref.at[places], x.astype(self.ref.dtype), mask=mask)

    def add(self, x: Array) -> None:
        self.store(self.load() + x)

    def _places(self) -> tuple[tuple, Array | None]:
        sizes = [axis.size for axis in self.axes]
        places, mask = list(self.first), None
        for number, axis in enumerate(self.axes):
            side = [size if number == other else 1 for other, size in enumerate(sizes)]
            iota = jax.lax.broadcasted_iota(jnp.int32, side, number)
            places.append(axis.start + iota)
            if not (isinstance(axis.length, int) and axis.length == axis.size):
                mask = iota < axis.length if mask is None else mask & (iota < axis.length)
        return tuple(places), None if mask is None else jnp.broadcast_to(mask, sizes)


class _PairTile(NamedTuple):
    """The tiles of a pair."""

    re: _Tile
    im: _Tile

    def load(self) -> _Pair:
        return _Pair(self.re.load(), self.im.load())

    def store(self, x: _Pair) -> None:
        self.re.store(x.re)
        self.im.store(x.im)

    def add(self, x: _Pair) -> None:
        self.re.add(x.re)
        self.im.add(x.im)


def _load_state(tiles: tuple[_PairTile, _PairTile]) -> _State:
    return tiles[0].load(), tiles[1].load()


def _store_state(tiles: tuple[_PairTile, _PairTile], state: _State) -> None:
    tiles[0].store(state[0])
    tiles[1].store(state[1])


# Which axis of each operand a product sums over.
_NN, _NT, _TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))


class _Program:
    """A program: its row and head, what it reads, where its tiles lie, and how it multiplies them."""

    def __init__(self, shape: _Shape, refs: Sequence, *, interpret: bool) -> None:
        count_ref, self.q, self.k, self.v, *tables, self.document = refs
        self.tables = Tables(*tables)
        self.shape, self.interpret = shape, interpret
        self.operands, self.accumulator = self.q.dtype, self.tables.matrix.dtype
        self.head, self.row = pl.program_id(0), pl.program_id(1)
        self.count_ref = count_ref
        self.modes = _Axis.of(0, shape.modes), _Axis.of(shape.modes, shape.modes)

    def of_head(self, head: Array) -> "_Program":
        program = copy.copy(self)
        program.head = head
        return program

    def length(self) -> Array:
        """The tokens of the row."""
        return self.count_ref[self.row]

    def if_any(self, chunk: Array, function: Callable, index: Array, state: _State) -> _State:
        """function(index, state) if the chunk has tokens, else the state as it is."""
        any_token = self.length() > chunk * self.shape.chunk
        return jax.lax.cond(any_token, function, lambda _, state: state, index, state)

    def barrier(self) -> None:
        """Threads meet, and see what the others have written."""
        if not self.interpret:
            plgpu.debug_barrier()

    def members(self) -> list[Array]:
        """The query heads of the state."""
        return [self.head * self.shape.group + n for n in range(self.shape.group)]

    def each_member(self, function: Callable, carry):  # type: ignore[no-untyped-def]
        """Calls function(query head, carry) for each query of the state, one after the other."""
        first = self.head * self.shape.group
        if self.shape.group == 1:
            return function(first, carry)
        body = lambda n, carry: function(first + n.astype(jnp.int32), carry)
        return jax.lax.fori_loop(0, self.shape.group, body, carry)

    def tokens(self, ref, tokens: _Axis | Array | int, head: Array, width: int) -> _Tile:  # type: ignore[no-untyped-def]
        """What one head has of q, k, v, the output or their gradients, for some tokens, or for one."""
        columns = _Axis.of(head * width, width)
        if isinstance(tokens, _Axis):
            return _Tile(ref, (self.row,), (tokens, columns))
        return _Tile(ref, (self.row, tokens), (columns,))

    def state(self, ref, *place: Array) -> tuple[_PairTile, _PairTile]:  # type: ignore[no-untyped-def]
        """The tiles of a state of the head."""
        keys, values = _Axis.of(0, self.shape.key_dim), _Axis.of(self.shape.key_dim, self.shape.value_dim)
        first = (self.row, self.head, *place)
        of = lambda channels: _PairTile(*(_Tile(ref, first, (modes, channels)) for modes in self.modes))
        return of(keys), of(values)

    def table(self, ref, rows: _Axis | None = None, *place: int) -> _PairTile:  # type: ignore[no-untyped-def]
        """K, or some, rows of a table of the head; of gradients, each program has tables of its own."""
        rows = _Axis.of(0, self.shape.chunk) if rows is None else rows
        return _PairTile(*(_Tile(ref, (*self._own(ref), *place), (rows, modes)) for modes in self.modes))

    def own(self, ref, *place: int) -> _Tile:  # type: ignore[no-untyped-def]
        """A whole tile of the program's own."""
        axes = tuple(_Axis.of(0, side) for side in ref.shape[-2:])
        return _Tile(ref, (self.row, self.head, *place), axes)

    def row_of(self, ref, row: Array | int) -> _PairTile:  # type: ignore[no-untyped-def]
        """One row of a table, [M]."""
        return _PairTile(*(_Tile(ref, (*self._own(ref), row), (modes,)) for modes in self.modes))

    def _own(self, ref) -> tuple:  # type: ignore[no-untyped-def]
        return (self.head,) if len(ref.shape) == 3 else (self.row, self.head)

    def dot(self, a: Array, b: Array, dims: tuple, *, exact: bool = False) -> Array:
        """A matrix product of operands rounded to the dtype of q, or as they are, summed in the dtype of the state."""
        if not exact:
            a, b = a.astype(self.operands), b.astype(self.operands)
        product = partial(
            jax.lax.dot_general,
            dimension_numbers=(dims, ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=self.accumulator,
        )
        if self.interpret or a.dtype != jnp.float32:
            return product(a, b)
        # Matrix units do not take float32. Sums of short numbers hold as many digits, and their products are exact; all
        # digits where q has them, and twice those of q where it has few.
        count = 3 if self.operands == jnp.float32 else 2
        left, right = _digits(a, count), _digits(b, count)
        terms = [product(left[n - m], right[m]) for n in reversed(range(count)) for m in range(n + 1)]
        return sum(terms[1:], terms[0])

    def exact_dot(self, a: Array, b: Array, dims: tuple) -> Array:
        return self.dot(a, b, dims, exact=True)


def _digits(x: Array, count: int) -> list[Array]:
    """Numbers of eight bits each, largest first, whose sum is x."""
    parts = []
    for _ in range(count):
        parts.append(x.astype(jnp.bfloat16))
        x -= parts[-1].astype(x.dtype)
    return parts


class _Chunk:
    """A chunk of the tokens of a program, and what documents change in it (None where there are none).

    Attributes:
        same: [K, K], two tokens of one document.
        first: [K, 1], tokens that see the carried state.
        last: [K, 1], tokens that the next state sees.
        keep: [1, 1], whether the carried state reaches the next.
    """

    same: Array | None = None
    first: Array | None = None
    last: Array | None = None
    keep: Array | None = None

    def __init__(self, at: _Program, index: Array, lags_ref) -> None:  # type: ignore[no-untyped-def]
        size = at.shape.chunk
        start = index * size
        count = at.length()
        self.count = jnp.minimum(count - start, size)
        # Plus zero, which the compiler does not know: else it works out the hundreds of addresses of all tables before
        # the loop over chunks, and fills the registers with them.
        self.at, self.lags_ref = at.of_head(at.head + jnp.minimum(count, 0)), lags_ref
        self.axis = _Axis(start, self.count, at.shape.tile)
        # The last token of a chunk meets lag 0: in a chunk that is not full, the lags move up.
        self.lags = _Axis(size - self.count, self.count, at.shape.tile)
        if at.document is not None:
            document = _Tile(at.document, (at.row, 0), (self.axis,)).load()
            final = jnp.full((1, 1), at.document[at.row, 0, start + self.count - 1])
            down = document[:, None]
            self.same, self.first = down == document[None, :], down == 0
            self.last, self.keep = down == final, final == 0

    def tile(self, ref, head: Array, width: int) -> _Tile:  # type: ignore[no-untyped-def]
        return self.at.tokens(ref, self.axis, head, width)

    def queries(self, head: Array) -> Array:
        return self.tile(self.at.q, head, self.at.shape.key_dim).load()

    def keys(self) -> Array:
        return self.tile(self.at.k, self.at.head, self.at.shape.key_dim).load(self.at.operands)

    def values(self) -> Array:
        return self.tile(self.at.v, self.at.head, self.at.shape.value_dim).load(self.at.operands)

    def responses(self) -> _Pair:
        return self.at.table(self.at.tables.responses).load()

    def decays(self) -> _Pair:
        return self.at.table(self.at.tables.decays).load()

    def reversed(self) -> _Pair:
        return self.at.table(self.at.tables.reversed, self.lags).load()

    def last_decay(self) -> _Pair:
        """[M, 1]."""
        decay = self.at.row_of(self.at.tables.decays, self.count - 1).load()
        return _Pair(decay.re[:, None], decay.im[:, None])

    def quarter(self, rows: int, columns: int) -> Array:
        """The matrix from real (0) or imaginary (1) y to real or imaginary w."""
        return self.at.table(self.at.tables.matrix, self.at.modes[rows])[columns].load()

    def skew(self, slot: int, x: Array) -> Array:
        """[K, K]: column c of row t goes to column t - c; zero where there is none. In the dtype of q.

        What is returned stays in tile `slot` of `lags`, too, until the next call for it.
        """
        row, column = (jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))
        # Every place of the tile is written: the columns that go nowhere stay where they are.
        place = jnp.where(column <= row, row - column, column)
        tile = self.lags_ref.at[self.at.row, self.at.head, slot, row, place]
        plgpu.store(tile, jnp.where(column <= row, x, 0).astype(self.lags_ref.dtype))
        self.at.barrier()
        return self.lag_tile(slot)

    def lag_tile(self, slot: int) -> Array:
        return self.at.own(self.lags_ref, slot).load()


def _keep(mask: Array | None, x: Array) -> Array:
    return x if mask is None else jnp.where(mask, x, 0)


def _keep_pair(mask: Array | None, x: _Pair) -> _Pair:
    return _Pair(_keep(mask, x.re), _keep(mask, x.im))


class _Seen(NamedTuple):
    """What the tokens of a query see through the state.

    Attributes:
        y: [K, M].
        w: [K, M].
        weights: [K, K], of the values.
        turned: [K, M], weights of the value states.
    """

    y: _Pair
    w: _Pair
    weights: Array
    turned: _Pair


def _carried(chunk: _Chunk, queries: Array, state: _Part) -> _Pair:
    return _Pair(*(_keep(chunk.first, chunk.at.dot(queries, part, _NT)) for part in state(0)))


def _read(chunk: _Chunk, queries: Array, state: _Part) -> _Seen:
    """What the queries [K, R] see; its scores, by lag, stay in tile 0."""
    # Here and below tables are loaded for each use, so that no registers hold them between.
    dot, exact_dot = chunk.at.dot, chunk.at.exact_dot
    # No thread still reads the tiles that are written from here on.
    chunk.at.barrier()
    y = _turn(_carried(chunk, queries, state), chunk.decays())
    scores = chunk.skew(0, _keep(chunk.same, dot(queries, chunk.keys(), _NT)))
    y = _add(y, _Pair(*(dot(scores, part, _NN) for part in chunk.responses())))
    column = lambda n: exact_dot(y.re, chunk.quarter(0, n), _NN) + exact_dot(y.im, chunk.quarter(1, n), _NN)
    w = _Pair(column(0), column(1))
    weights = _keep(chunk.same, chunk.skew(1, _paired(chunk, w, chunk.responses())))
    # w is a conjugate: it turns by the conjugate of lambda.
    return _Seen(y, w, weights, _keep_pair(chunk.first, _turn_back(w, chunk.decays())))


def _paired(chunk: _Chunk, x: _Pair, y: _Pair, dims: tuple = _NT) -> Array:
    """The product of real parts, plus that of imaginary ones."""
    return chunk.at.dot(x.re, y.re, dims) + chunk.at.dot(x.im, y.im, dims)


def _read_bar(  # type: ignore[no-untyped-def]
    chunk: _Chunk, bars_ref: Tables, modes_ref, head: Array, out_bar: Callable[[], Array], state: _Part, bars: _Bars
) -> tuple[Array, _Bars]:
    """The gradient of the queries; those of all else are added to `bars`, and to the tables in memory.

    What only the gradients of tables need is kept for the end in `modes_ref`, tiles of [K, 2M]: registers are short.
    """
    at, dot, exact_dot = chunk.at, chunk.at.dot, chunk.at.exact_dot
    keep = lambda slot, x: at.table(modes_ref, _Axis.of(0, at.shape.tile), slot).store(x)
    kept = lambda slot: at.own(modes_ref, slot).load()
    k_bar, v_bar, (key_bar, value_bar) = bars
    seen = _read(chunk, chunk.queries(head), state)
    keep(0, seen.y)
    keep(1, seen.w)

    v_bar += dot(seen.weights, out_bar(), _TN)
    value_bar = _add(value_bar, _Pair(*(dot(part, out_bar(), _TN) for part in seen.turned)))
    turned_bar = _Pair(*(_keep(chunk.first, dot(out_bar(), part, _NT)) for part in state(1)))
    at.table(bars_ref.decays).add(_turn_back(seen.w, turned_bar))
    w_bar = _turn(turned_bar, chunk.decays())
    lagged_bar = chunk.skew(2, _keep(chunk.same, dot(out_bar(), chunk.values(), _NT)))
    w_bar = _add(w_bar, _Pair(*(dot(lagged_bar, part, _NN) for part in chunk.responses())))
    keep(2, w_bar)
    row = lambda n: exact_dot(w_bar.re, chunk.quarter(n, 0), _NT) + exact_dot(w_bar.im, chunk.quarter(n, 1), _NT)
    y_bar = _Pair(row(0), row(1))
    keep(3, y_bar)

    at.table(bars_ref.decays).add(_turn_back(y_bar, _carried(chunk, chunk.queries(head), state)))
    carried_bar = _keep_pair(chunk.first, _turn_back(y_bar, chunk.decays()))
    scores_bar = _keep(chunk.same, chunk.skew(3, _paired(chunk, y_bar, chunk.responses())))
    k_bar += dot(scores_bar, chunk.queries(head), _TN)
    key_bar = _add(key_bar, _Pair(*(dot(part, chunk.queries(head), _TN) for part in carried_bar)))
    q_bar = dot(scores_bar, chunk.keys(), _NN) + _paired(chunk, carried_bar, state(0), _NN)

    # The barrier of `skew` lies behind all that was kept.
    at.own(bars_ref.matrix).add(dot(kept(0), kept(2), _TN))
    at.own(bars_ref.responses).add(dot(chunk.lag_tile(2), kept(1), _TN) + dot(chunk.lag_tile(0), kept(3), _TN))
    return q_bar, (k_bar, v_bar, (key_bar, value_bar))


def _advance(chunk: _Chunk, state: _State) -> _State:
    """The state after a chunk."""
    decay = chunk.last_decay()

    def part(x: _Pair, z: Array) -> _Pair:
        added = _Pair(*(chunk.at.dot(weights, _keep(chunk.last, z), _TN) for weights in chunk.reversed()))
        return _add(_keep_pair(chunk.keep, _turn(x, decay)), added)

    return part(state[0], chunk.keys()), part(state[1], chunk.values())


def _advance_bar(chunk: _Chunk, bars_ref: Tables, state: _Part, state_bar: _State) -> _Bars:
    """The gradients of `_advance`; those of the tables are added in memory."""
    dot = chunk.at.dot
    decay = chunk.last_decay()
    inputs_bar, states_bar, weights_bar, decay_bar = [], [], [], []
    for number, (inputs, bar) in enumerate(zip((chunk.keys, chunk.values), state_bar, strict=True)):
        inputs_bar.append(_keep(chunk.last, _paired(chunk, chunk.reversed(), bar, _NN)))
        weights_bar.append(_Pair(*(dot(_keep(chunk.last, inputs()), part, _NT) for part in bar)))
        kept_bar = _keep_pair(chunk.keep, bar)
        states_bar.append(_turn_back(kept_bar, decay))
        decay_bar.append(_Pair(*(jnp.sum(part, axis=1) for part in _turn_back(kept_bar, state(number)))))
    chunk.at.table(bars_ref.reversed, chunk.lags).add(_add(*weights_bar))
    chunk.at.row_of(bars_ref.decays, chunk.count - 1).add(_add(*decay_bar))
    return inputs_bar[0], inputs_bar[1], (states_bar[0], states_bar[1])


def _run(
    kernel: Callable,
    shape: _Shape,
    shared: tuple[Array, Array, Array, Tables, Rows],
    inputs: list[Array],
    results: list[jax.ShapeDtypeStruct],
    sizes: BlockSizes,
    *,
    flops: int,
    name: str,
    aliases: dict[int, int] | None = None,
) -> list[Array]:
    """Runs a kernel for each row and key/value head: on an NVIDIA GPU compiled, on a CPU interpreted.

    The kernel is given its program, which has what all kernels read, and references to the inputs and the results;
    `aliases` are inputs that lie where results do.
    """
    q, k, v, tables, rows = shared
    documents = [] if rows.document is None else [rows.document]
    arguments = [rows.lengths, joined(q), joined(k), joined(v), *tables, *documents]
    before = len(arguments)
    arguments += inputs
    arrays: list[Any] = [*arguments, *results]
    moved = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)

    interpret = interpreted("NVIDIA")

    def program(*refs) -> None:  # type: ignore[no-untyped-def]
        read = refs[:before] if documents else (*refs[:before], None)
        kernel(_Program(shape, read, interpret=interpret), *refs[before:])

    return pl.pallas_call(
        program,
        out_shape=results,
        grid=(shape.kv_heads, shape.batch),
        # No pipelining: loads of what the program itself has written must stay behind their barrier.
        compiler_params=plgpu.CompilerParams(num_warps=sizes.num_warps, num_stages=1),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0),
        input_output_aliases={before + source: target for source, target in (aliases or {}).items()},
        interpret=interpret,
        name=name,
    )(*arguments)


def _scratch(shape: _Shape, dtype: jnp.dtype, number: int, width: int) -> jax.ShapeDtypeStruct:
    """A number of tiles [K, width] for each program to work in."""
    return jax.ShapeDtypeStruct((shape.batch, shape.kv_heads, number, shape.tile, width), dtype)


def _states_like(state: Array, number: int) -> jax.ShapeDtypeStruct:
    """A number of states for each row and head, [B, Hkv, number, 2M, C]."""
    return jax.ShapeDtypeStruct((*state.shape[:2], number, *state.shape[2:]), state.dtype)


def _outputs_like(q: Array, v: Array) -> jax.ShapeDtypeStruct:
    """[B, T, H D]."""
    return jax.ShapeDtypeStruct((*q.shape[:2], q.shape[2] * v.shape[3]), v.dtype)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _flat(state: Array) -> Array:
    """[B, Hkv, 2M, C]."""
    return state.reshape(*state.shape[:2], -1, state.shape[-1])
