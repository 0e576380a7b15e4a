"""Several documents in one row: what segment ids say, and how to bring the padding of a row behind its tokens.

A row of segment ids names the document of every token. The recurrence restarts where the id changes; id 0 is padding,
which may lie anywhere and changes nothing: a document goes on behind the padding inside it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from interdomain_jax.array_types import SegmentIds


class Packing(NamedTuple):
    """The documents of packed rows.

    Attributes:
        real: [B, T], whether a token is one, not padding.
        starts: [B, T], whether the state restarts before a token: its id is not that of the last token before it.
    """

    real: Bool[Array, "B T"]
    starts: Bool[Array, "B T"]


class TokenOrder(NamedTuple):
    """A permutation of each row's tokens.

    Attributes:
        source: [B, T], the place where the token that comes to stand here stood.
        destination: [B, T], the place that the token from here goes to; the inverse of `source`.
    """

    source: Int[Array, "B T"]
    destination: Int[Array, "B T"]


def find_documents(segment_ids: SegmentIds, previous_id: Int[Array, " B"] | None = None) -> Packing:
    """Where the documents of each row start.

    Args:
        segment_ids: [B, T]; 0 is padding.
        previous_id: [B], the id of the last token before the row; 0, or None for all rows, if there was none. A row
            whose first token follows nothing does not restart.
    """
    before = jnp.zeros_like(segment_ids[:, :1]) if previous_id is None else previous_id[:, None]
    ids = jnp.concatenate([before, segment_ids], axis=1)
    latest = jax.lax.associative_scan(lambda left, right: jnp.where(right == 0, left, right), ids, axis=1)[:, :-1]
    real = segment_ids != 0
    return Packing(real, real & (latest != 0) & (latest != segment_ids))


def padding_last(segment_ids: SegmentIds) -> TokenOrder:
    """The order in which each row's tokens come first, as they stood, and its padding last, from segment_ids [B, T]."""
    real = segment_ids != 0
    count = jnp.sum(real, axis=1, keepdims=True)
    destination = jnp.where(real, jnp.cumsum(real, axis=1), count + jnp.cumsum(~real, axis=1)) - 1
    return TokenOrder(jnp.argsort(destination, axis=1), destination)


@jax.custom_vjp
def reorder(x: Array, order: TokenOrder) -> Array:
    """x [B, T, ...], of any dtype, with the tokens of each row in another order; the gradient is a gather too."""
    return jnp.take_along_axis(x, order.source.reshape(*order.source.shape, *[1] * (x.ndim - 2)), axis=1)


def restore(x: Array, order: TokenOrder) -> Array:
    """Undoes `reorder`."""
    return reorder(x, TokenOrder(order.destination, order.source))


def _reorder_forward(x: Array, order: TokenOrder) -> tuple[Array, TokenOrder]:
    return reorder(x, order), order


def _reorder_backward(order: TokenOrder, x_bar: Array) -> tuple[Array, None]:
    return restore(x_bar, order), None


reorder.defvjp(_reorder_forward, _reorder_backward)


def segment_ids_from_cu_seqlens(cu_seqlens: Int[Array, " S"] | np.ndarray, length: int) -> SegmentIds:
    """Segment ids [1, T] of one packed row, from the cumulative lengths of its documents.

    Args:
        cu_seqlens: [S + 1] non-decreasing whole numbers, 0 first: document i holds tokens cu_seqlens[i] up to, and
            without, cu_seqlens[i + 1]; a document may be empty.
        length: tokens T of the row; those beyond cu_seqlens[-1] are padding.

    Returns:
        [1, T] int32: i + 1 inside document i, 0 beyond the last.

    Raises:
        ValueError: lengths that do not start at 0, fall, or exceed the row, where their values are known (not traced).
    """
    if cu_seqlens.ndim != 1 or not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
        raise ValueError(
            f"cu_seqlens must be one row of whole numbers; got shape {cu_seqlens.shape} of {cu_seqlens.dtype}."
        )
    if not isinstance(cu_seqlens, jax.core.Tracer):
        values = np.asarray(cu_seqlens)
        if not values.size or values[0] or (np.diff(values) < 0).any() or values[-1] > length:
            raise ValueError(
                f"cu_seqlens must start at 0, never fall and end at or below length = {length}; got {values.tolist()}."
            )
    ends = jnp.asarray(cu_seqlens)[1:]
    place = jnp.arange(length)
    ids = jnp.searchsorted(ends, place, side="right") + 1
    return jnp.where(ids <= ends.size, ids, 0)[None].astype(jnp.int32)
