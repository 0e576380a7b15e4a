"""Rows, heads and tokens spread over the devices of a mesh.

Every device runs its own rows and heads. Where the tokens of a row are spread too, each device holds one shard of them,
in order, and what lies before its shard reaches it as numbers of a fixed size, whatever the length of the row: how many
tokens each shard holds and whether a document starts in it, and the state that each shard would end in if it began with
none. The decay over a shard is known in closed form (paper, section 2, step 6: it does not depend on the tokens), so
the state before shard n is a weighted sum of those:

    x_n = sum_{j < n} lambda^{tokens between shard j and shard n} X_j        over the j from which the document goes on.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Bool, Int

from interdomain_jax.array_types import SegmentIds, State
from interdomain_jax.ops.dynamics import MAX_LAG, Dynamics, complex_multiply, lambda_powers
from interdomain_jax.ops.packing import find_documents

# Mesh axes that rows, heads and tokens may lie on. A mesh may lack any of them; along others arrays are whole.
ROW_AXES = ("data", "fsdp")
HEAD_AXES = ("tensor",)
TOKEN_AXIS = "seq"


def over_mesh(
    run: Callable[..., Any], *, batch: int, length: int, heads: int, in_axes: Any, out_axes: Any, always: bool = False
) -> Callable[..., Any]:
    """`run(*arguments, axis_name=...)` on each device's own part of the arguments, under the mesh that is in use.

    Where there is no mesh of several devices, or it has none of the axes above, `run` is called as it is.

    Args:
        run: a function of arrays; `axis_name` is the mesh axis that the tokens are split over, or None.
        batch: rows B of the arguments.
        length: tokens T of a row.
        heads: the number that every count of heads is a multiple of.
        in_axes: for each argument a tree prefix of strings that name the axes in order, "B T H" for example: B, T and H
            are split where their size allows it, any other letter is whole. H may be heads joined with their width.
        out_axes: the same for the result.
        always: whether to do so on any mesh of several devices: kernels cannot be split by the compiler.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    used = {name for name in free & {*ROW_AXES, *HEAD_AXES, TOKEN_AXIS} if mesh.shape[name] > 1}
    if not used and not (always and free and mesh.size > 1):
        return lambda *arguments: run(*arguments, axis_name=None)
    parts = {
        "B": _axes(ROW_AXES, used, batch, mesh.shape),
        "T": _axes((TOKEN_AXIS,), used, length, mesh.shape),
        "H": _axes(HEAD_AXES, used, heads, mesh.shape),
    }
    in_specs, out_specs = jax.tree.map(
        lambda letters: PartitionSpec(*(parts.get(letter) for letter in letters.split())), (in_axes, out_axes)
    )
    axis_name = TOKEN_AXIS if parts["T"] else None
    # Results do not say which axes they are equal over: those of kernels cannot.
    return jax.shard_map(
        lambda *arguments: run(*arguments, axis_name=axis_name),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=free,
        check_vma=False,
    )


def constrain(x: Array, axes: str) -> Array:
    """x, to be laid out over the mesh that is in use: rows B, tokens T and the vocabulary V split, all else whole.

    Where there is no such mesh, x as it is. The compiler settles the layout of what lies between two such places.

    Args:
        x: [...], of any shape and dtype.
        axes: the names of its axes in order, "B T E" for example.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or not {*mesh.axis_names} & {*ROW_AXES, TOKEN_AXIS} or mesh.manual_axes:
        return x
    used = {*mesh.axis_names}
    names = {"B": ROW_AXES, "T": (TOKEN_AXIS,), "V": HEAD_AXES}
    parts = [
        _axes(names.get(letter, ()), used, size, mesh.shape) for letter, size in zip(axes.split(), x.shape, strict=True)
    ]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*parts))


def _axes(names: tuple[str, ...], used: set[str], size: int, extent: dict[str, int]) -> tuple[str, ...]:
    """The axes that an array axis of this size can be split over, in turn."""
    chosen: list[str] = []
    for name in names:
        if name in used and not size % extent[name]:
            chosen.append(name)
            size //= extent[name]
    return tuple(chosen)


class Reach(NamedTuple):
    """How what lies before some shard reaches it: entry 0 is what came before the row, entry j + 1 is shard j.

    Attributes:
        goes_on: [S + 1, B], whether the document that an entry ends in goes on right up to the shard.
        lag: [S + 1, B], tokens between the end of an entry and the shard.
    """

    goes_on: Bool[Array, "S1 B"]
    lag: Int[Array, "S1 B"]


class Shards(NamedTuple):
    """What the S shards of each row hold, known to all of them.

    Attributes:
        number: which of them is this device's, a scalar.
        tokens: [S, B], those that are not padding.
        last_document: [S, B], how many of them belong to the shard's last document.
        first_id: [S, B], the id of the first one; 0 for a shard of padding.
        last_id: [S, B], of the last one.
        restarts: [S, B], whether a document starts behind the first token.
    """

    number: Int[Array, ""]
    tokens: Int[Array, "S B"]
    last_document: Int[Array, "S B"]
    first_id: Int[Array, "S B"]
    last_id: Int[Array, "S B"]
    restarts: Bool[Array, "S B"]

    def id_before(self, shard: int | Array, previous_id: Int[Array, " B"] | None = None) -> Int[Array, " B"]:
        """The id [B] of the last token before a shard, in the dtype of the segment ids.

        Args:
            shard: its number, a scalar.
            previous_id: [B], what to give where there is none in the row; 0 if None.
        """
        return self._ids_before(previous_id)[shard]

    def reach(self, shard: int | Array, previous_id: Int[Array, " B"] | None = None) -> Reach:
        """How the shards, and what came before the row, reach a shard.

        Args:
            shard: its number, a scalar; that of number S is the row's end.
            previous_id: [B], the document that what came before the row is of; 0 if None.
        """
        before = self._ids_before(previous_id)[:-1]
        enters = (self.first_id != before) & (self.first_id != 0) & (before != 0)
        starts = _sums(self.restarts | enters)
        count = _sums(self.tokens)
        entry = jnp.arange(len(count))[:, None]
        return Reach((starts[shard] == starts) & (entry <= shard), count[shard] - count)

    def _ids_before(self, previous_id: Int[Array, " B"] | None) -> Int[Array, "S1 B"]:
        first = jnp.zeros_like(self.last_id[0]) if previous_id is None else previous_id
        ids = jnp.concatenate([first[None], self.last_id])
        return jax.lax.associative_scan(lambda left, right: jnp.where(right == 0, left, right), ids)


def _sums(x: Array) -> Array:
    return jnp.concatenate([jnp.zeros_like(x[:1], jnp.int32), jnp.cumsum(x, axis=0, dtype=jnp.int32)])


def gather_shards(segment_ids: SegmentIds | None, batch: int, length: int, axis_name: str) -> Shards:
    """Tells every shard along a mesh axis what the others hold.

    Args:
        segment_ids: [B, T] of this shard's tokens, or None for one document a row.
        batch: B.
        length: T.
        axis_name: of the mesh axis.

    Raises:
        ValueError: the row is longer than any lag that a power of lambda is taken for.
    """
    number, size = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    if length * size > MAX_LAG:
        raise ValueError(f"a row split over {axis_name!r} may hold {MAX_LAG} tokens; got {size} x {length}.")
    if segment_ids is None:
        # One document without an id: nothing to tell.
        count, none = jnp.full((size, batch), length), jnp.zeros((size, batch), jnp.int32)
        return Shards(number, count, count, none, none, none.astype(bool))
    real, starts = find_documents(segment_ids)
    place = jnp.arange(length)
    first = jnp.argmax(real, axis=1)
    last = length - 1 - jnp.argmax(real[:, ::-1], axis=1)
    start = jnp.max(jnp.where(starts, place, 0), axis=1)
    id_at = lambda where: jnp.where(real.any(1), jnp.take_along_axis(segment_ids, where[:, None], axis=1)[:, 0], 0)
    in_last = jnp.sum(real & (place >= start[:, None]), axis=1)
    mine = (jnp.sum(real, axis=1), in_last, id_at(first), id_at(last), starts.any(1))
    return Shards(number, *jax.lax.all_gather(mine, axis_name))


class AtEdges(NamedTuple):
    """Something that is handed on along a row.

    Attributes:
        before: [B, ...], as it is before this device's shard.
        after: [B, ...], as it is after the row.
    """

    before: Array
    after: Array


def exchange_states(initial_state: State, own: State, dynamics: Dynamics, shards: Shards, axis_name: str) -> AtEdges:
    """The states [B, Hkv, 2, M, C] at the edges, from those that every shard would end in if it began with none.

    One all-gather of 2 M C numbers a head, row and shard.

    Args:
        initial_state: [B, Hkv, 2, M, C], before the row; it belongs to the document of the row's first token.
        own: [B, Hkv, 2, M, C], the state that this device's shard ends in if it begins with none.
        dynamics: of the Hkv states.
        shards: from `gather_shards`.
        axis_name: of the mesh axis.
    """
    states = jnp.concatenate([initial_state[None], jax.lax.all_gather(own, axis_name)])

    def reaching(shard: int | Array) -> State:
        goes_on, lag = shards.reach(shard)
        powers = lambda_powers(dynamics.log_decay, dynamics.angle, jnp.maximum(lag, 0).reshape(-1))
        weights = jnp.moveaxis(powers, 1, 0).reshape(*lag.shape, *powers.shape[:1], *powers.shape[2:])
        weights = jnp.where(goes_on[:, :, None, None, None], weights, 0)
        return jnp.sum(complex_multiply(states, weights[..., None], axis=-3), axis=0)

    return AtEdges(reaching(shards.number), reaching(len(shards.tokens)))


def exchange_tails(
    previous: Array, own: Array, shards: Shards, previous_id: Int[Array, " B"] | None, axis_name: str
) -> AtEdges:
    """The last L tokens of the present document at the edges, zeros where it has fewer.

    Args:
        previous: [B, L, E], before the row.
        own: [B, L, E], the last tokens of this device's shard.
        shards: from `gather_shards`.
        previous_id: [B], the document that `previous` is of.
        axis_name: of the mesh axis.
    """
    tails = jnp.concatenate([previous[None], jax.lax.all_gather(own, axis_name)])
    size = previous.shape[1]
    # What came before the row counts as L tokens: those that are not there are zeros.
    held = jnp.concatenate([jnp.full_like(shards.tokens[:1], size), shards.last_document])

    def reaching(shard: int | Array) -> Array:
        goes_on, _ = shards.reach(shard, previous_id)
        slots = goes_on[:, None] & (jnp.arange(size)[:, None] >= size - held[:, None])
        slots = slots.reshape(-1, slots.shape[-1])
        from_end = jnp.cumsum(slots[::-1], axis=0)[::-1] - 1
        wanted = slots & (from_end == jnp.arange(size)[::-1, None, None])
        tokens = tails.swapaxes(1, 2).reshape(len(slots), *previous.shape[::2])
        return jnp.sum(jnp.where(wanted[..., None], tokens, 0), axis=1).swapaxes(0, 1)

    return AtEdges(reaching(shards.number), reaching(len(shards.tokens)))
