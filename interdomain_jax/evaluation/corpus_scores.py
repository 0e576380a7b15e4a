"""Scores of a corpus' tokens, each predicted from those before it in its context: batch by batch, piece by piece.

A mode says what the contexts are; in each of them every token is scored once:

* "windows": the documents end to end, cut every `context_length` tokens, as in training.
* "strided": windows that overlap; each scores its last `stride` tokens, which see `context_length - stride` or more.
* "documents": each document by itself, cut only if it is longer than the context.
* "carried": the whole split as one context, for models whose state has a fixed size.

A context that is too long to be read at once is read in pieces, each from the state that the one before has left. The
numbers are those of the whole, and a recurrent model's memory is that of a piece.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from interdomain_jax import sharding
from interdomain_jax.data.contexts import Contexts, DocumentContexts, StreamContexts, context_pieces, first_tokens
from interdomain_jax.data.windows import CONTEXT, TokenSequences
from interdomain_jax.inference import decode
from interdomain_jax.scoring import LanguageModel, next_token_scores

Mode = Literal["windows", "documents", "strided", "carried"]

# Batches on their way to the devices: enough to keep those busy, few enough for memory to stay level.
_AHEAD = 2


class CachedLanguageModel(LanguageModel, Protocol):
    """What scoring in pieces needs of a model beside what scoring does."""

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        """The cache before the first of at most so many tokens."""


class Reading(NamedTuple):
    """How a corpus is scored.

    Attributes:
        mode: see the module.
        reset: whether each document is a context of its own, where one has several documents.
        stride: of the mode "strided", in tokens.
        max_tokens: tokens to score from the start of each corpus; None for all.
    """

    mode: Mode = "windows"
    reset: bool = False
    stride: int | None = None
    max_tokens: int | None = None


class PositionScores(NamedTuple):
    """Sums over scored tokens, by the bucket of their position in their context.

    Attributes:
        nats: [buckets], summed negative log-likelihood.
        tokens: [buckets], how many.
    """

    nats: Any
    tokens: Any

    @property
    def loss(self) -> float:
        """Nats per token over all positions."""
        return float(self.nats.sum() / self.tokens.sum())


class Scorer(NamedTuple):
    """The compiled parts, one program each for all batches of a shape.

    Attributes:
        empty: (rows, tokens) -> the cache of a model that has read nothing and will read so many tokens.
        whole: (params, None, batch) -> None, and the `PositionScores` of contexts that are read at once.
        piece: (params, cache, batch) -> the cache after pieces of contexts, and their `PositionScores`; the cache that
            is given is used up.
    """

    empty: jax.stages.Wrapped
    whole: jax.stages.Wrapped
    piece: jax.stages.Wrapped


def make_scorer(model: CachedLanguageModel, mesh: Mesh, *, vocab_chunks: int, buckets: int) -> Scorer:
    """Jits what scores a batch; nothing is compiled yet.

    Args:
        model: maps tokens [B, T] to hidden states.
        mesh: from `sharding.make_mesh`.
        vocab_chunks: number of parts in which logits are computed, as in `next_token_scores`.
        buckets: of positions; a batch's `buckets`, int [B, T], count them from 0.
    """
    # Stacked layers have an axis before all others.
    stacked = int(getattr(model, "scan_layers", False))
    one = jax.eval_shape(lambda: model.init_cache(sharding.row_parts(mesh), 1))
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[stacked:], leaf.dtype), one)
    places = jax.tree.map(
        lambda place: NamedSharding(mesh, PartitionSpec(*[None] * stacked, *place.spec)), decode.placement(layer, mesh)
    )

    def score(params: Any, cache: Any, batch: Mapping[str, Array]) -> tuple[Any, PositionScores]:
        context = {name: batch[name] for name in CONTEXT if name in batch}
        if cache is not None:
            context["cache"] = cache
        hidden, cache = model.apply({"params": params}, batch["inputs"], unembed=False, **context)
        kernel, mask = params["unembed"]["kernel"], batch["loss_mask"]
        nats = next_token_scores(hidden, kernel, batch["targets"], mask, vocab_chunks=vocab_chunks).nats
        here = (batch["buckets"][..., None] == jnp.arange(buckets)) & (mask > 0)[..., None]
        return cache, PositionScores(
            jnp.sum(jnp.where(here, nats[..., None], 0), axis=(0, 1)), jnp.sum(here, axis=(0, 1), dtype=jnp.int32)
        )

    jit = partial(jax.jit, sharding.on_mesh(score, mesh), donate_argnums=1)
    return Scorer(
        jax.jit(sharding.on_mesh(model.init_cache, mesh), static_argnums=(0, 1), out_shardings=places),
        jit(out_shardings=(None, sharding.replicated(mesh))),
        jit(out_shardings=(places, sharding.replicated(mesh))),
    )


def contexts_of(documents: TokenSequences, reading: Reading, context_length: int | None) -> Contexts:
    """The contexts that a corpus is read in; of `context_length` tokens, None for a single one."""
    lengths = first_tokens(documents.lengths, reading.max_tokens)
    if context_length is None:
        context_length = max(1, int(lengths.sum()))
    if reading.mode == "documents":
        return DocumentContexts(lengths, context_length=context_length)
    return StreamContexts(lengths, context_length=context_length, stride=reading.stride or context_length)


def score_corpus(
    scorer: Scorer,
    params: Any,
    documents: TokenSequences,
    reading: Reading,
    *,
    context_length: int | None,
    position_ends: Sequence[int],
    piece_tokens: int,
    tokens_per_batch: int,
    eos_id: int,
    mesh: Mesh,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> PositionScores:
    """Scores each token of a corpus once.

    Args:
        scorer: from `make_scorer`, for the mesh and as many buckets as there are ends.
        params: of its model, on the mesh.
        documents: of the corpus.
        reading: what each token is predicted from.
        context_length: tokens of a context; None for the whole corpus.
        position_ends: ends of the buckets of positions; what lies behind the last one counts there too.
        piece_tokens: most tokens of a context that are read at once; `mesh.seq` must divide it and the context.
        tokens_per_batch: bound on the tokens of a batch, which holds a row for each part of the mesh all the same.
        eos_id: the start symbol.
        mesh: from `sharding.make_mesh`.
        on_tokens: is told how many more tokens have been scored, now and then.

    Returns:
        float64 and int64 [buckets]; the same for any batch, pieces and mesh, up to rounding.

    Raises:
        ValueError: there is no token to score.
    """
    contexts = contexts_of(documents, reading, context_length)
    capacity = context_length or contexts.context_length
    length = min(piece_tokens, capacity) if context_length else piece_tokens
    parts = sharding.row_parts(mesh)
    # Of a corpus that is one context there is one row, whatever would fit beside it.
    rows = max(1, tokens_per_batch // (length * parts)) if context_length else 1
    batch_size = parts * rows
    total = PositionScores(np.zeros(len(position_ends), np.float64), np.zeros(len(position_ends), np.int64))
    ahead: collections.deque[PositionScores] = collections.deque()

    def add_first() -> None:
        score = jax.device_get(ahead.popleft())
        np.add(total.nats, score.nats, out=total.nats)
        np.add(total.tokens, score.tokens, out=total.tokens)
        on_tokens(int(score.tokens.sum()))

    step, cache = scorer.piece if length < capacity else scorer.whole, None
    for begins, batch in context_pieces(
        documents,
        contexts,
        piece_tokens=length,
        batch_size=batch_size,
        reset=reading.reset,
        eos_id=eos_id,
        rows=sharding.process_rows(mesh, batch_size),
    ):
        if begins and length < capacity:
            cache = scorer.empty(batch_size, capacity)
        batch["buckets"] = np.searchsorted(position_ends[:-1], batch["positions"], side="right").astype(np.int32)
        for name in () if reading.reset else CONTEXT:
            del batch[name]
        cache, score = step(params, cache, sharding.place_batch(batch, mesh, batch_size))
        ahead.append(score)
        if len(ahead) > _AHEAD:
            add_first()
    while ahead:
        add_first()
    if not total.tokens.sum():
        raise ValueError("there is no token to score: the evaluation text is empty")
    return total


def bucket_ends(longest: int, positions: Sequence[int] | None = None) -> tuple[int, ...]:
    """Ends of the buckets of positions of contexts up to so many tokens: those given, or 1, 2, 4, ..., and the longest.

    Bucket i holds the positions from the end before, or 0, up to its own end, exclusive.
    """
    if positions is None:
        positions = [1 << power for power in range((longest - 1).bit_length())]
    return (*(end for end in positions if end < longest), longest)
