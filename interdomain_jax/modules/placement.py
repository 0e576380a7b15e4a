"""Where the tokens of a call stand: in their row once its padding is moved behind them, and in their documents."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from interdomain_jax.array_types import Activations, Positions, SegmentIds
from interdomain_jax.ops.packing import TokenOrder, find_documents, padding_last, reorder, restore


class Progress(NamedTuple):
    """How far each row has come; the part that all caches share.

    Attributes:
        position: [B] int32, tokens seen of the present document.
        segment_id: [B] int32, the id of the present document; 0 before the first token, or if no ids were given.
    """

    position: Int[Array, " B"]
    segment_id: Int[Array, " B"]


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
    """

    positions: Positions
    progress: Progress
    lengths: Int[Array, " B"]
    order: TokenOrder | None = None
    segment_ids: SegmentIds | None = None
    real: Bool[Array, "B T"] | None = None
    document: Int[Array, "B T"] | None = None

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


def place_tokens(progress: Progress | None, segment_ids: SegmentIds | None, batch: int, length: int) -> Placement:
    """Places T tokens behind `progress`, or at the start if it is None.

    Raises:
        ValueError: segment ids of another shape.
    """
    progress = no_progress(batch) if progress is None else progress
    place = jnp.arange(length)
    if segment_ids is None:
        after = progress._replace(position=progress.position + length)
        return Placement(progress.position[:, None] + place, after, jnp.full(batch, length))
    if segment_ids.shape != (batch, length):
        raise ValueError(f"segment_ids must be [B, T] = {(batch, length)}; got shape {segment_ids.shape}.")
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
    return Placement(positions, after, lengths, order, segment_ids, real, document)
