"""Log-likelihoods of continuations behind contexts, both as token ids, in batches of rows."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from interdomain_jax import sharding
from interdomain_jax.scoring import TokenScores

# The shortest row that a program is compiled for; others are powers of two of it, up to the longest.
_SHORTEST = 16


class Continuation(NamedTuple):
    """What to score.

    Attributes:
        context: ids, at least one.
        tokens: the ids to score behind it; none have the likelihood 1.
    """

    context: Sequence[int]
    tokens: Sequence[int]


class Likelihood(NamedTuple):
    """The score of a continuation.

    Attributes:
        log_likelihood: of all its tokens together, in nats.
        is_greedy: whether each of them is the most likely one.
    """

    log_likelihood: float
    is_greedy: bool


def continuation_likelihoods(
    score: jax.stages.Wrapped,
    params: Any,
    continuations: Sequence[Continuation],
    mesh: Mesh,
    *,
    batch_size: int,
    max_length: int,
) -> Iterator[tuple[int, Likelihood]]:
    """Scores continuations, the longest first, and gives each with its number as soon as its batch is done.

    A row is filled up to a power of two that depends on its own length alone, and so does its score.

    Args:
        score: from `scoring.make_token_score_function`.
        params: of its model, on the mesh.
        continuations: in any order.
        mesh: from `sharding.make_mesh`.
        batch_size: rows of a batch; a multiple of `sharding.row_parts(mesh)`.
        max_length: most tokens that the model reads, which are all but the last; a multiple of `mesh.seq`.

    Raises:
        ValueError: a continuation has no context, or does not fit `max_length`.
    """
    lengths = []
    for number, (context, tokens) in enumerate(continuations):
        lengths.append(len(context) + len(tokens) - 1)
        if not len(context):
            raise ValueError(f"continuation {number} has no context; give at least one token, such as that of a start")
        if lengths[-1] > max_length:
            raise ValueError(
                f"continuation {number} has {len(context)} tokens of context and {len(tokens)} of its own; max_length "
                f"is {max_length}, and must be at least {lengths[-1]}"
            )
    rows: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        if len(continuations[number].tokens):
            rows.setdefault(_row_length(length, max_length, mesh.shape["seq"]), []).append(number)
        else:
            yield number, Likelihood(0.0, True)
    mine = sharding.process_rows(mesh, batch_size)
    groups = [
        (row_length, numbers[first : first + batch_size])
        for row_length, numbers in sorted(rows.items(), reverse=True)
        for first in range(0, len(numbers), batch_size)
    ]
    pending: list[tuple[list[int], TokenScores]] = []
    for row_length, group in groups:
        batch = _batch([continuations[number] for number in group], batch_size, row_length)
        placed = sharding.place_batch({name: each[mine] for name, each in batch.items()}, mesh, batch_size)
        pending.append((group, score(params, placed)))
        # One batch is scored while the one before is fetched.
        if len(pending) > 1:
            yield from _fetched(*pending.pop(0), continuations)
    for group, scores in pending:
        yield from _fetched(group, scores, continuations)


def _row_length(length: int, max_length: int, parts: int) -> int:
    """The tokens of a row: so many, rounded up for few programs to serve all lengths."""
    power = 1 << (-(-length // parts) - 1).bit_length()
    return min(max(_SHORTEST, power) * parts, max_length)


def _batch(continuations: Sequence[Continuation], batch_size: int, row_length: int) -> dict[str, np.ndarray]:
    """Whole rows of tokens, what follows each, and which of that is scored; [batch_size, row_length]."""
    shape = batch_size, row_length
    inputs, targets, loss_mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, (context, tokens) in enumerate(continuations):
        ids = np.array([*context, *tokens], np.int32)
        end = len(ids) - 1
        inputs[row, :end], targets[row, :end] = ids[:-1], ids[1:]
        loss_mask[row, len(context) - 1 : end] = 1
    return {"inputs": inputs, "targets": targets, "loss_mask": loss_mask}


def _fetched(
    group: Sequence[int], scores: TokenScores, continuations: Sequence[Continuation]
) -> Iterator[tuple[int, Likelihood]]:
    host = jax.device_get(scores)
    for row, number in enumerate(group):
        context, tokens = continuations[number]
        scored = slice(len(context) - 1, len(context) + len(tokens) - 1)
        # Added up on the host: in float32 the sum of a long text would lose what a token adds to it.
        nats = float(host.nats[row, scored].sum(dtype=np.float64))
        yield number, Likelihood(-nats, bool(host.is_greedy[row, scored].all()))
