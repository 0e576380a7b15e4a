"""Where the tokens of a call stand: in their row once its padding is moved behind them, and in their documents."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from interdomain_jax.array_types import Activations, Positions, SegmentIds
from interdomain_jax.ops.packing import TokenOrder, find_documents, padding_last, reorder, restore
from interdomain_jax.ops.shards import AtEdges, Shards, exchange_tails, gather_shards


class Progress(NamedTuple):
    """How far each row has come; the part that all caches share.

    Attributes:
        position: [B] int32, tokens seen of the present document.
        segment_id: [B] int32, the id of the present document; 0 before the first token, or if no ids were given.
    """

    position: Int[Array, " B"]
    segment_id: Int[Array, " B"]


class Edges(NamedTuple):
    """Where this device's shard of the tokens lies in its row, when rows are split over a mesh axis.

    Attributes:
        shards: what all the shards hold.
        previous_id: [B], the document that the call before left off in.
        axis_name: the mesh axis.
    """

    shards: Shards
    previous_id: Int[Array, " B"]
    axis_name: str

    def exchange_tails(self, previous: Activations, own: Activations) -> AtEdges:
        """The last inputs [B, L, E] of the present document before the shard and after the row."""
        return exchange_tails(previous, own, self.shards, self.previous_id, self.axis_name)

    def progress(self, start: Progress, shard: int | Array) -> Progress:
        """How far the rows have come before a shard, `start` being the progress before the row."""
        goes_on, _ = self.shards.reach(shard, self.previous_id)
        tokens = jnp.concatenate([start.position[None], self.shards.last_document])
        position = jnp.sum(jnp.where(goes_on, tokens, 0), axis=0, dtype=jnp.int32)
        return Progress(position, self.shards.id_before(shard, self.previous_id))


class Placement(NamedTuple):
    """The tokens of one call. What is None without segment ids: every token is real, and goes on with the document.

    Attributes:
        positions: [B, T], of each token in its document.
        progress: how far the rows have come after the call.
        lengths: [B], tokens that are not padding.
        order: brings the padding of each row behind its tokens, or None; the other attributes are in this order.
        segment_ids: [B, T], or None.
        real: [B, T], whether a token is one, not padding; or None.
        document: [B, T], how many documents have started in the row; 0 is the one that the cache left off in. Or None.
        continues: [B], whether the row's first token belongs to the document that the cache left off in; or None.
        edges: of the shard, where the tokens are one of their rows; positions and `document` go on with those before.
    """

    positions: Positions
    progress: Progress
    lengths: Int[Array, " B"]
    order: TokenOrder | None = None
    segment_ids: SegmentIds | None = None
    real: Bool[Array, "B T"] | None = None
    document: Int[Array, "B T"] | None = None
    continues: Bool[Array, " B"] | None = None
    edges: Edges | None = None

    def arrange(self, x: Array) -> Array:
        """x [B, T, ...] with the padding last."""
        return x if self.order is None else reorder(x, self.order)

    def arrange_inputs(self, x: Activations) -> Activations:
        """x [B, T, E] with the padding last, and zeros in it whatever it held."""
        return x if self.real is None else jnp.where(self.real[..., None], self.arrange(x), 0)

    def restore_outputs(self, y: Activations) -> Activations:
        """y [B, T, E] in the call's own order, with zeros in the padding."""
        y = y if self.real is None else jnp.where(self.real[..., None], y, 0)
        return y if self.order is None else restore(y, self.order)


def no_progress(batch_size: int) -> Progress:
    """The progress before the first token."""
    return Progress(jnp.zeros(batch_size, jnp.int32), jnp.zeros(batch_size, jnp.int32))


def place_tokens(
    progress: Progress | None,
    segment_ids: SegmentIds | None,
    batch: int,
    length: int,
    axis_name: str | None = None,
) -> Placement:
    """Places T tokens behind `progress`, or at the start if it is None.

    Args:
        progress: before the row.
        segment_ids: [B, T], or None.
        batch: B.
        length: T.
        axis_name: the mesh axis that rows are split over; segment ids and T are then those of this device's shard.

    Raises:
        ValueError: segment ids of another shape.
    """
    if segment_ids is not None and segment_ids.shape != (batch, length):
        raise ValueError(f"segment_ids must be [B, T] = {(batch, length)}; got shape {segment_ids.shape}.")
    progress = no_progress(batch) if progress is None else progress
    edges, before = None, progress
    if axis_name is not None:
        edges = Edges(gather_shards(segment_ids, batch, length, axis_name), progress.segment_id, axis_name)
        before = edges.progress(progress, edges.shards.number)
    placement = _place(before, segment_ids, batch, length)
    if edges is None:
        return placement
    first_ids = edges.shards.first_id
    first = jnp.take_along_axis(first_ids, jnp.argmax(first_ids != 0, axis=0)[None], axis=0)[0]
    return placement._replace(
        progress=edges.progress(progress, len(first_ids)),
        continues=(first == 0) | (edges.previous_id == 0) | (first == edges.previous_id),
        edges=edges,
    )


def _place(progress: Progress, segment_ids: SegmentIds | None, batch: int, length: int) -> Placement:
    place = jnp.arange(length)
    if segment_ids is None:
        after = progress._replace(position=progress.position + length)
        return Placement(progress.position[:, None] + place, after, jnp.full(batch, length))
    order = padding_last(segment_ids) if length > 1 else None
    if order is not None:
        segment_ids = reorder(segment_ids, order)
    real, starts = find_documents(segment_ids, progress.segment_id)
    document = jnp.cumsum(starts, axis=1)
    since_start = place - jax.lax.cummax(jnp.where(starts, place, 0), axis=1)
    positions = since_start + jnp.where(document == 0, progress.position[:, None], 0)
    lengths = jnp.sum(real, axis=1)
    # A row of padding alone changes nothing.
    last = jnp.maximum(lengths - 1, 0)[:, None]
    ends = (jnp.take_along_axis(values, last, axis=1)[:, 0] for values in (positions + 1, segment_ids))
    after = Progress(*(jnp.where(lengths > 0, end, old) for end, old in zip(ends, progress, strict=True)))
    return Placement(positions, after, lengths, order, segment_ids, real, document, document[:, 0] == 0)
