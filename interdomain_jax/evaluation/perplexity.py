"""Perplexity of a trained checkpoint on the validation split, by context length."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from interdomain_jax import sharding
from interdomain_jax.data.corpora import open_corpora
from interdomain_jax.data.loader import corpus_counts, evaluation_batches
from interdomain_jax.data.windows import TokenSequences
from interdomain_jax.experiment import check_rows, require_positive
from interdomain_jax.scoring import LanguageModel, make_score_function, score_batches
from interdomain_jax.trained import Trained, find_trained

CONTEXT_MULTIPLES = (1, 2, 4)
SPLIT = "validation"


class Task(NamedTuple):
    """A checkpoint to evaluate, its inputs checked; nothing is compiled yet.

    Attributes:
        trained: the checkpoint.
        corpora: the documents to score.
        max_tokens: tokens to score from the start of the split, None for all.
    """

    trained: Trained
    corpora: Sequence[TokenSequences]
    max_tokens: int | None


class ContextResult(NamedTuple):
    """The score at one context length.

    Attributes:
        context_length: tokens in a window.
        tokens: tokens scored; the same ones at every length.
        loss: nats per token.
        perplexity: exp(loss).
        bits_per_byte: the loss in bits, per byte at the whole split's bytes per token; where the whole split is scored,
            the bits that code its text, per byte of it.
    """

    context_length: int
    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float


class Evaluation(NamedTuple):
    """All figures of one evaluation; `results[0]` is at the training context.

    Attributes:
        name: of the config.
        mixers: the repeating pattern of the model's layers.
        parameters: number of trained parameters.
        step: of the checkpoint.
        corpora: their names.
        split: of the corpora.
        documents: in the split.
        split_tokens: in the split.
        split_bytes: in the split.
        results: one for each context length.
    """

    name: str
    mixers: tuple[str, ...]
    parameters: int
    step: int
    corpora: tuple[str, ...]
    split: str
    documents: int
    split_tokens: int
    split_bytes: int
    results: tuple[ContextResult, ...]


def prepare(
    workdir: epath.PathLike,
    mesh_sizes: Mapping[str, int],
    *,
    checkpoint: str = "latest",
    max_tokens: int | None = None,
) -> Task:
    """Checks that `workdir` holds a checkpoint and builds the model and data it was trained with.

    Args:
        workdir: of the run.
        mesh_sizes: as `sharding.make_mesh` takes them; the run may have had others.
        checkpoint: "latest", "best" or the number of a step, as `checkpoints.find_step` takes it.
        max_tokens: tokens to score from the start of the split, None for all.

    Raises:
        FileNotFoundError: there is no run or no checkpoint, or its tokenizer's file is gone.
        ValueError: `max_tokens`, a saved field or the mesh is out of range.
    """
    if max_tokens is not None:
        require_positive("max_tokens", max_tokens)
    trained = find_trained(workdir, mesh_sizes, checkpoint)
    check_rows(trained.config, trained.mesh)
    return Task(trained, open_corpora(trained.config.data, SPLIT, trained.tokenizer), max_tokens)


def evaluate(task: Task) -> Evaluation:
    """Restores the parameters and scores the split at each of `CONTEXT_MULTIPLES`."""
    trained, config = task.trained, task.trained.config
    params = trained.restore_params()
    counts = corpus_counts(task.corpora)
    results = context_results(
        trained.model,
        params,
        task.corpora,
        context_lengths=[config.data.sequence_length * n for n in CONTEXT_MULTIPLES],
        tokens_per_batch=config.data.batch_size // config.accumulation_steps * config.data.sequence_length,
        vocab_chunks=config.vocab_chunks,
        bytes_per_token=counts.bytes / counts.tokens,
        max_tokens=task.max_tokens,
        reset=config.data.reset,
        eos_id=trained.tokenizer.eos_id,
        mesh=trained.mesh,
    )
    return Evaluation(
        name=config.name,
        mixers=config.model.mixers,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        step=trained.step,
        corpora=tuple(config.data.corpora),
        split=SPLIT,
        documents=counts.documents,
        split_tokens=counts.tokens,
        split_bytes=counts.bytes,
        results=results,
    )


def context_results(
    model: LanguageModel,
    params: Any,
    corpora: Sequence[TokenSequences],
    *,
    context_lengths: Sequence[int],
    tokens_per_batch: int,
    vocab_chunks: int,
    bytes_per_token: float,
    max_tokens: int | None,
    reset: bool,
    eos_id: int,
    mesh: Mesh,
) -> tuple[ContextResult, ...]:
    """Scores the same tokens in windows of each length; every token is a target exactly once.

    Args:
        model: maps tokens [B, T] to hidden states.
        params: its parameters, on `mesh`.
        corpora: the documents of each corpus.
        context_lengths: the window lengths.
        tokens_per_batch: bound on the tokens of a batch, so that memory stays level; it holds at
            least one window for each device all the same.
        vocab_chunks: number of parts in which logits are computed, as in `next_token_score`.
        bytes_per_token: of the whole split, closing EOS tokens included.
        max_tokens: tokens to score from the start of each corpus, None for all.
        reset: whether each document is a context of its own.
        eos_id: the start symbol.
        mesh: from `sharding.make_mesh`; its `seq` axis must divide every context length.
    """
    score = make_score_function(model, mesh, vocab_chunks=vocab_chunks)
    results = []
    for context_length in context_lengths:
        parts = sharding.row_parts(mesh)
        batch_size = parts * max(1, tokens_per_batch // (context_length * parts))
        batches = evaluation_batches(
            corpora,
            sequence_length=context_length,
            batch_size=batch_size,
            reset=reset,
            eos_id=eos_id,
            max_tokens=max_tokens,
            rows=sharding.process_rows(mesh, batch_size),
        )
        total = score_batches(score, params, batches, mesh, batch_size=batch_size)
        results.append(
            ContextResult(
                context_length=context_length,
                tokens=int(total.tokens),
                loss=total.loss,
                perplexity=float(np.exp(total.loss)),
                bits_per_byte=total.loss / (math.log(2.0) * bytes_per_token),
            )
        )
    return tuple(results)
