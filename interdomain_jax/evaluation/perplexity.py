"""Perplexity of a trained checkpoint on validation splits: at any context lengths, and by the position in the context.

What a context is, and how it is scored, is in `corpus_scores`.
"""

import collections
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast, get_args

import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from interdomain_jax import sharding
from interdomain_jax.data.contexts import first_tokens
from interdomain_jax.data.corpora import open_corpora
from interdomain_jax.data.loader import corpus_counts
from interdomain_jax.data.windows import TokenSequences
from interdomain_jax.evaluation.corpus_scores import (
    Mode,
    PositionScores,
    Reading,
    bucket_ends,
    make_scorer,
    score_corpus,
)
from interdomain_jax.evaluation.progress import show_progress
from interdomain_jax.evaluation.records import MEAN, Measurement, Record, make_record
from interdomain_jax.evaluation.unfinished import read_unfinished, remove_unfinished, write_unfinished
from interdomain_jax.experiment import require_positive
from interdomain_jax.modules.softmax import require_whole_rows
from interdomain_jax.trained import Trained, find_trained

CONTEXT_MULTIPLES = (1, 2, 4)
"""The context lengths that are measured unless others are given, in units of the training context."""
SPLIT = "validation"


class Task(NamedTuple):
    """A checkpoint to evaluate, its inputs checked; nothing is compiled yet.

    Attributes:
        trained: the checkpoint.
        name: of the record.
        corpora: the documents to score, by the corpus' name.
        reading: how.
        lengths: tokens of a context, rising; (None,) for the whole split.
        position_ends: of the buckets of positions, rising; the last one is the longest context.
        piece_tokens: tokens of a context that are read at once.
        tokens_per_batch: bound on the tokens of a batch, which holds a row for each part of the mesh all the same.
    """

    trained: Trained
    name: str
    corpora: Mapping[str, TokenSequences]
    reading: Reading
    lengths: tuple[int | None, ...]
    position_ends: tuple[int, ...]
    piece_tokens: int
    tokens_per_batch: int


def prepare(
    workdir: epath.PathLike,
    mesh_sizes: Mapping[str, int],
    *,
    checkpoint: str = "latest",
    max_tokens: int | None = None,
    mode: str = "windows",
    stride: int | None = None,
    lengths: Sequence[int] | None = None,
    corpora: Sequence[str] | None = None,
    positions: Sequence[int] | None = None,
    piece_tokens: int | None = None,
    name: str | None = None,
) -> Task:
    """Checks that `workdir` holds a checkpoint and builds the model and data it was trained with.

    Args:
        workdir: of the run.
        mesh_sizes: as `sharding.make_mesh` takes them; the run may have had others.
        checkpoint: "latest", "best" or the number of a step, as `checkpoints.find_step` takes it.
        max_tokens: tokens to score from the start of each corpus, None for all.
        mode: one of `Mode`.
        stride: tokens that each window of the mode "strided" scores.
        lengths: tokens of a context; if None, `CONTEXT_MULTIPLES` of the training context. "carried" takes none.
        corpora: as `data.corpora` of a config names them; those of the run if None.
        positions: ends of the buckets of positions, in tokens; the powers of two if None.
        piece_tokens: most tokens of a context that are read at once; if None, as many as a micro-batch of training has.
        name: of the record; one that tells the mode, the lengths and the corpora apart if None.

    Raises:
        FileNotFoundError: there is no run, no checkpoint or no corpus, or the tokenizer's file is gone.
        ValueError: an argument, a saved field or the mesh is out of range.
    """
    _check_arguments(max_tokens, mode, stride, lengths, corpora, positions, piece_tokens, name)
    trained = find_trained(workdir, mesh_sizes, checkpoint)
    config, parts = trained.config, sharding.row_parts(trained.mesh)
    _check_model(config, trained.mesh, mode)
    reading = Reading(cast(Mode, mode), config.data.reset or mode == "documents", stride, max_tokens)
    default_lengths = [config.data.sequence_length * multiple for multiple in CONTEXT_MULTIPLES]
    chosen = sorted({*(default_lengths if lengths is None else lengths)})
    if mode != "carried":
        _check_token_shards("lengths", chosen, trained.mesh)
        if stride is not None and stride > chosen[0]:
            raise ValueError(f"stride is {stride}; it must be at most the shortest of the lengths, {chosen[0]}")
    tokens_per_batch = config.data.batch_size // config.accumulation_steps * config.data.sequence_length
    if piece_tokens is None:
        shards = trained.mesh.shape["seq"]
        piece_tokens = max(1, tokens_per_batch // (parts * shards)) * shards
    _check_token_shards("piece_tokens", [piece_tokens], trained.mesh)
    data = ConfigDict(config.data)
    if corpora is not None:
        data.corpora = tuple(corpora)
    documents = dict(zip(data.corpora, open_corpora(data, SPLIT, trained.tokenizer), strict=True))
    longest = chosen[-1]
    if mode == "carried":
        longest = max(int(first_tokens(each.lengths, max_tokens).sum()) for each in documents.values())
    return Task(
        trained,
        name or _default_name(mode, stride, lengths, corpora, max_tokens),
        documents,
        reading,
        (None,) if mode == "carried" else tuple(chosen),
        bucket_ends(longest, positions),
        piece_tokens,
        tokens_per_batch,
    )


def evaluate(task: Task) -> Record:
    """Restores the parameters and scores every corpus at every length.

    What has been scored is kept in a file beside the record to be, so that the same evaluation of the same checkpoint
    goes on where it was interrupted, at the last length that it had finished.
    """
    trained = task.trained
    params = trained.restore_params()
    scorer = make_scorer(
        trained.model, trained.mesh, vocab_chunks=trained.config.vocab_chunks, buckets=len(task.position_ends)
    )
    settings = _settings(task)
    scores = {
        (name, length): PositionScores(np.array(nats, np.float64), np.array(tokens, np.int64))
        for name, length, nats, tokens in read_unfinished(trained, task.name, settings)
    }
    totals = {name: first_tokens(each.lengths, task.reading.max_tokens).sum() for name, each in task.corpora.items()}
    with show_progress(len(task.lengths) * int(sum(totals.values())), "tokens") as advance:
        for name, documents in task.corpora.items():
            for length in task.lengths:
                what = f"{name}, {task.reading.mode}" + (f" of {length:,} tokens" if length else "")
                if (name, length) in scores:
                    advance(what, int(totals[name]))
                    continue
                scores[name, length] = score_corpus(
                    scorer,
                    params,
                    documents,
                    task.reading,
                    context_length=length,
                    position_ends=task.position_ends,
                    piece_tokens=task.piece_tokens,
                    tokens_per_batch=task.tokens_per_batch,
                    eos_id=trained.tokenizer.eos_id,
                    mesh=trained.mesh,
                    on_tokens=partial(advance, what),
                )
                if len(scores) < len(task.corpora) * len(task.lengths):
                    done = [[*key, each.nats.tolist(), each.tokens.tolist()] for key, each in scores.items()]
                    write_unfinished(trained, task.name, settings, done)
    remove_unfinished(trained, task.name)
    return make_record("perplexity", task.name, trained, settings, _measurements(task, scores))


def _measurements(task: Task, scores: Mapping[tuple[str, int | None], PositionScores]) -> list[Measurement]:
    """Loss, perplexity and bits per byte of each corpus and of all at each length; and the loss by position."""
    measurements = []
    for length in task.lengths:
        found: dict[str, list[float]] = collections.defaultdict(list)
        for name, documents in task.corpora.items():
            score, tokens = scores[name, length], int(scores[name, length].tokens.sum())
            # Of a part of a split the bytes are not known; as many tokens of the whole have so many.
            size = documents.text_bytes * tokens / int(documents.lengths.sum())
            for metric, value in (
                ("loss", score.loss),
                ("perplexity", float(np.exp(score.loss))),
                ("bits_per_byte", float(score.nats.sum()) / (math.log(2.0) * size) if size else math.nan),
            ):
                measurements.append(Measurement(name, metric, value, tokens, at=length))
                found[metric].append(value)
        if len(task.corpora) > 1:
            total = sum(int(scores[name, length].tokens.sum()) for name in task.corpora)
            measurements += [
                Measurement(MEAN, metric, float(np.mean(values)), total, at=length) for metric, values in found.items()
            ]
    for name in task.corpora:
        nats, counts = scores[name, task.lengths[-1]]
        measurements += [
            Measurement(name, "loss_by_position", float(nats[i] / counts[i]), int(counts[i]), at=end)
            for i, end in enumerate(task.position_ends)
            if counts[i]
        ]
    return measurements


def _settings(task: Task) -> dict[str, Any]:
    """All that the numbers depend on beside the checkpoint."""
    whole = all(
        task.reading.max_tokens is None or task.reading.max_tokens >= documents.lengths.sum()
        for documents in task.corpora.values()
    )
    corpora = {
        name: {"digest": documents.digest, **corpus_counts([documents])._asdict()}
        for name, documents in task.corpora.items()
    }
    return task.reading._asdict() | {
        "lengths": task.lengths,
        "split": SPLIT,
        "corpora": corpora,
        "position_ends": task.position_ends,
        "bytes_per_token": "counted" if whole else "of the whole split",
    }


def _check_arguments(
    max_tokens: int | None,
    mode: str,
    stride: int | None,
    lengths: Sequence[int] | None,
    corpora: Sequence[str] | None,
    positions: Sequence[int] | None,
    piece_tokens: int | None,
    name: str | None,
) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"mode is {mode!r}; it must be one of {get_args(Mode)}")
    if (stride is None) == (mode == "strided"):
        raise ValueError(f"stride is {stride} and mode is {mode!r}; the mode 'strided' needs one, and no other has one")
    if mode == "carried" and lengths is not None:
        raise ValueError(
            f"lengths is {_listed(lengths)}; the mode 'carried' takes none, for the whole split is one context"
        )
    for field, value in (("max_tokens", max_tokens), ("stride", stride), ("piece_tokens", piece_tokens)):
        if value is not None:
            require_positive(field, value)
    for field, values in (("lengths", lengths), ("positions", positions)):
        if values is not None and (not values or min(values) < 1):
            raise ValueError(f"{field} is {_listed(values)}; it must be numbers of tokens, each at least 1")
    if positions is not None and sorted({*positions}) != list(positions):
        raise ValueError(f"positions is {_listed(positions)}; each must be above the one before")
    if corpora is not None and (not all(corpora) or len({*corpora}) != len(corpora) or not corpora):
        raise ValueError(f"corpora is {_listed(corpora)}; it must name at least one corpus, and each once")
    if name is not None and not re.fullmatch(r"[\w-][\w.-]*", name):
        raise ValueError(f"name is {name!r}; it must be letters, digits, '.', '_' and '-', for it names a file")


def _check_model(config: ConfigDict, mesh: Mesh, mode: str) -> None:
    if "softmax" not in config.model.mixers:
        return
    sharding.on_mesh(require_whole_rows, mesh)()
    if mode == "carried":
        raise ValueError(
            "mode is 'carried', but softmax layers keep every token that they have seen: memory would grow with the "
            "split; give the mode 'windows' and the lengths that fit"
        )


def _check_token_shards(field: str, values: Sequence[int], mesh: Mesh) -> None:
    for value in values:
        if value % mesh.shape["seq"]:
            raise ValueError(f"{field} has {value}; mesh.seq={mesh.shape['seq']} must divide it")


def _default_name(
    mode: str,
    stride: int | None,
    lengths: Sequence[int] | None,
    corpora: Sequence[str] | None,
    max_tokens: int | None,
) -> str:
    parts = ["perplexity", *([] if mode == "windows" else [mode]), *([f"stride{stride}"] if stride else [])]
    parts += map(str, lengths or ())
    parts += [re.sub(r"[^\w.]+", "_", epath.Path(corpus).name) for corpus in corpora or ()]
    return "-".join(parts + ([f"first{max_tokens}"] if max_tokens else []))


def _listed(values: Sequence[Any]) -> str:
    return repr(",".join(map(str, values)))
