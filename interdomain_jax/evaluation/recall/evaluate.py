"""Recall of a trained checkpoint on tasks that are made here: needle and phonebook in text, the others in tokens.

A task is measured at several sizes; those that an interrupted evaluation has done are not done again (`unfinished`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import logging
from etils import epath

from interdomain_jax import sharding
from interdomain_jax.evaluation.progress import show_progress
from interdomain_jax.evaluation.recall import induction_heads, mqar, selective_copying
from interdomain_jax.evaluation.recall.accuracy import (
    answer_questions,
    answer_sequences,
    contains,
    first_line_equals,
    make_count_correct,
    mean_and_error,
)
from interdomain_jax.evaluation.recall.needle import CONTEXTS, RULER_ANSWER_TOKENS, needle
from interdomain_jax.evaluation.recall.phonebook import ENTRIES, phonebook
from interdomain_jax.evaluation.recall.questions import Question
from interdomain_jax.evaluation.recall.sequences import Sequences
from interdomain_jax.evaluation.records import Measurement, Record, make_record
from interdomain_jax.evaluation.unfinished import read_unfinished, remove_unfinished, write_unfinished
from interdomain_jax.experiment import require_positive
from interdomain_jax.inference import Generator, Request
from interdomain_jax.inference.texts import prompt_ids
from interdomain_jax.modules.softmax import require_whole_rows
from interdomain_jax.trained import Trained, find_trained

COUNT = 200
"""Questions of each size: the shares in the paper's table are multiples of 1/200."""

BATCH_SIZE = 16

PHONEBOOK_ANSWER_TOKENS = 50
"""Generated for a phone number, of which the first line counts, as in Jelassi et al. 2024."""

# More than any text has.
_NO_BUDGET = 10**9


class TextTask(NamedTuple):
    """A task that is answered by generating.

    Attributes:
        sizes: usual ones.
        answer_tokens: that are generated, at most.
        match: when an answer is right.
    """

    sizes: tuple[int, ...]
    answer_tokens: int
    match: Callable[[str, str], bool]


class TokenTask(NamedTuple):
    """A task that is answered by the most likely tokens.

    Attributes:
        sizes: usual lengths.
        vocab_size: its ids are below it.
    """

    sizes: tuple[int, ...]
    vocab_size: int


TEXT_TASKS = {
    "needle": TextTask(CONTEXTS, RULER_ANSWER_TOKENS, contains),
    "phonebook": TextTask(ENTRIES, PHONEBOOK_ANSWER_TOKENS, first_line_equals),
}
TOKEN_TASKS = {
    "mqar": TokenTask(tuple(part.length for part in mqar.GRID), mqar.VOCAB_SIZE),
    "selective_copying": TokenTask((selective_copying.LENGTH,), selective_copying.VOCAB_SIZE),
    # Up to 8,192; longer ones can be asked for.
    "induction_heads": TokenTask(induction_heads.TEST_LENGTHS[:8], induction_heads.VOCAB_SIZE),
}
TASKS = (*TEXT_TASKS, *TOKEN_TASKS)
TASKS_OF_ANY_LENGTH = ("needle", "selective_copying", "induction_heads")


class TextCell(NamedTuple):
    """The questions of a task of text at one size; the answers as the text goes on."""

    task: str
    at: int
    requests: list[Request]
    answers: list[str]


class TokenCell(NamedTuple):
    """The sequences of a task of tokens at one length."""

    task: str
    at: int
    sequences: Sequences


class Task(NamedTuple):
    """A checkpoint and what it is asked, its inputs checked; nothing is compiled yet.

    Attributes:
        trained: the checkpoint.
        cells: the questions, task by task and size by size.
        samples: questions, or sequences, of a cell.
        seed: of all that is drawn.
        batch_size: rows at a time, over all devices.
    """

    trained: Trained
    cells: tuple[TextCell | TokenCell, ...]
    samples: int
    seed: int
    batch_size: int


def prepare(
    workdir: epath.PathLike,
    mesh_sizes: Mapping[str, int],
    *,
    tasks: Sequence[str],
    checkpoint: str = "latest",
    lengths: Sequence[int] | None = None,
    entries: Sequence[int] | None = None,
    count: int = COUNT,
    seed: int = 0,
    batch_size: int = BATCH_SIZE,
) -> Task:
    """Checks that `workdir` holds a checkpoint that can be asked, and makes the questions.

    Args:
        workdir: of the run.
        mesh_sizes: as `sharding.make_mesh` takes them; the run may have had others.
        tasks: names from `TASKS`.
        checkpoint: "latest", "best" or the number of a step, as `checkpoints.find_step` takes it.
        lengths: tokens of needle's context, the answer's room in it, and of the sequences of selective copying and
            induction heads; None for the usual ones of each.
        entries: of the phonebooks; None for the paper's.
        count: questions, or sequences, at each size.
        seed: of all that is drawn.
        batch_size: rows at a time, rounded up to a multiple of `sharding.row_parts`: memory grows with it, and nothing
            else depends on it.

    Raises:
        FileNotFoundError: there is no run or no checkpoint, or its tokenizer's file is gone.
        ValueError: an argument is out of its range or of no use, or the model or the mesh does not suit a task.
    """
    unknown = [name for name in tasks if name not in TASKS]
    if unknown or not tasks:
        raise ValueError(f"recall tasks are {tuple(tasks)}; they must be names from {TASKS}, at least one")
    if lengths is not None and not {*tasks} & {*TASKS_OF_ANY_LENGTH}:
        raise ValueError(f"recall lengths are {tuple(lengths)}; of the tasks only {TASKS_OF_ANY_LENGTH} take them")
    if entries is not None and "phonebook" not in tasks:
        raise ValueError(f"recall entries are {tuple(entries)}; of the tasks only phonebook takes them")
    for field, value in (("recall count", count), ("recall batch_size", batch_size)):
        require_positive(field, value)
    trained = find_trained(workdir, mesh_sizes, checkpoint)
    parts = sharding.row_parts(trained.mesh)
    cells = []
    for name in dict.fromkeys(tasks):
        sizes = TEXT_TASKS[name].sizes if name in TEXT_TASKS else TOKEN_TASKS[name].sizes
        if name == "phonebook":
            sizes = sizes if entries is None else tuple(entries)
        elif lengths is not None and name in TASKS_OF_ANY_LENGTH:
            sizes = tuple(lengths)
        make = _text_cell if name in TEXT_TASKS else _token_cell
        for at in dict.fromkeys(sizes):
            try:
                cells.append(make(trained, name, at, count, seed))
            except ValueError as error:
                raise ValueError(f"recall task {name} at {at}: {error}") from error
    return Task(trained, tuple(cells), count, seed, -(-batch_size // parts) * parts)


def evaluate(task: Task) -> Record:
    """Restores the parameters and asks everything that an interrupted evaluation of the same kind has not asked.

    Accuracies are means over the questions, or over the sequences, of a cell; so are their standard errors.

    Raises:
        CheckpointError: the parameters cannot be read.
    """
    trained = task.trained
    names = tuple(dict.fromkeys(cell.task for cell in task.cells))
    name = "_".join(("recall", *names))
    settings = {
        "tasks": {name: [cell.at for cell in task.cells if cell.task == name] for name in names},
        "count": task.samples,
        "seed": task.seed,
        "answer_tokens": {name: TEXT_TASKS[name].answer_tokens for name in names if name in TEXT_TASKS},
        "match": {name: TEXT_TASKS[name].match.__name__ if name in TEXT_TASKS else "argmax" for name in names},
    }
    kept = [Measurement(**each) for each in read_unfinished(trained, name, settings)]
    done = {(each.task, each.at): each for each in kept}
    left = [cell for cell in task.cells if (cell.task, cell.at) not in done]
    if done:
        logging.info("%d of %d parts are done already", len(done), len(task.cells))
    answer = _make_answer(task, left)
    with show_progress(task.samples * len(left), "questions") as advance:
        for cell in left:
            shares = []
            for batch in answer(cell):
                shares.append(batch)
                advance(f"{cell.task} at {cell.at:,}", len(batch))
            value, error = mean_and_error(np.concatenate(shares))
            done[cell.task, cell.at] = Measurement(cell.task, "accuracy", value, task.samples, at=cell.at, error=error)
            if jax.process_index() == 0:
                logging.info("%s at %s: %.1f %% of %d", cell.task, f"{cell.at:,}", 100 * value, task.samples)
            if cell is not left[-1]:
                write_unfinished(trained, name, settings, [each._asdict() for each in done.values()])
    measurements = [done[cell.task, cell.at] for cell in task.cells]
    remove_unfinished(trained, name)
    return make_record("recall", name, trained, settings, measurements)


def _text_cell(trained: Trained, name: str, at: int, count: int, seed: int) -> TextCell:
    if jax.process_count() > 1:
        raise ValueError(f"a task of text is for one process; there are {jax.process_count()}")
    if trained.mesh.shape["seq"] > 1:
        raise ValueError(
            f"mesh.seq is {trained.mesh.shape['seq']}; tokens that come one by one cannot be split: set it to 1"
        )
    tokenizer, answer_tokens = trained.tokenizer, TEXT_TASKS[name].answer_tokens
    questions: list[Question]
    if name == "needle":
        questions = needle(tokenizer, budget=at, count=count, seed=seed, answer_tokens=answer_tokens)
    else:
        questions = phonebook(tokenizer, entries=at, budget=_NO_BUDGET, count=count, seed=seed)
    requests = [
        Request(prompt_ids(tokenizer, question.prompt), answer_tokens, stop=((tokenizer.eos_id,),))
        for question in questions
    ]
    return TextCell(name, at, requests, [question.answer for question in questions])


def _token_cell(trained: Trained, name: str, at: int, count: int, seed: int) -> TokenCell:
    mesh, model, vocab_size = trained.mesh, trained.model, TOKEN_TASKS[name].vocab_size
    if model.vocab_size < vocab_size:
        raise ValueError(f"model.vocab_size is {model.vocab_size}; the task has {vocab_size} ids, and needs as many")
    if at % mesh.shape["seq"]:
        raise ValueError(f"mesh.seq is {mesh.shape['seq']}; it must divide the length")
    if "softmax" in model.mixers:
        sharding.on_mesh(require_whole_rows, mesh)()
    if name == "mqar":
        (part,) = [part for part in mqar.GRID if part.length == at]
        sequences = mqar.mqar(part._replace(sequences=count), seed=seed)
    elif name == "selective_copying":
        sequences = selective_copying.selective_copying(count, seed=seed, length=at)
    else:
        sequences = induction_heads.induction_heads(count, seed=seed, length=at)
    return TokenCell(name, at, sequences)


def _make_answer(
    task: Task, cells: Sequence[TextCell | TokenCell]
) -> Callable[[TextCell | TokenCell], Iterator[np.ndarray]]:
    """The function from one of the cells to the shares of right answers, batch by batch; they share its programs."""
    trained = task.trained
    params = trained.restore_params()
    prompts = [request for cell in cells if isinstance(cell, TextCell) for request in cell.requests]
    count_correct = make_count_correct(trained.model, trained.mesh)
    generator: Generator | None = None
    if prompts:
        generator = Generator(
            trained.model,
            params,
            trained.mesh,
            batch_size=task.batch_size,
            max_length=max(len(request.prompt) + request.max_new_tokens for request in prompts),
        )

    def answer(cell: TextCell | TokenCell) -> Iterator[np.ndarray]:
        if isinstance(cell, TokenCell):
            return answer_sequences(count_correct, params, cell.sequences, trained.mesh, batch_size=task.batch_size)
        assert generator is not None
        match = TEXT_TASKS[cell.task].match
        return answer_questions(
            generator, trained.tokenizer, cell.requests, cell.answers, match, batch_size=task.batch_size
        )

    return answer
