"""Recall of checkpoints, against plain loops: a whole forward pass for each token, one question after the other."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interdomain_jax import sharding
from interdomain_jax.evaluation.recall.accuracy import (
    answer_sequences,
    contains,
    first_line_equals,
    make_count_correct,
    mean_and_error,
)
from interdomain_jax.evaluation.recall.evaluate import TextCell, evaluate, prepare
from interdomain_jax.evaluation.recall.induction_heads import induction_heads
from interdomain_jax.evaluation.recall.mqar import Part, mqar
from interdomain_jax.evaluation.records import read_records
from tests.evaluation.untrained import begin_run, save_params
from tests.quick import quick_environment, quick_jit
from tests.virtual_devices import run_on_eight_devices

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("quick_programs")

ONE = dict(data=1, fsdp=1, tensor=1, seq=1)
ASKED = dict(tasks=("needle", "phonebook", "induction_heads"), lengths=(600,), entries=(3,), count=5, seed=3)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """With layers of both kinds, and more ids than the tokenizer has."""
    directory = tmp_path_factory.mktemp("run")
    fields = {"model.vocab_size": 260, "model.num_layers": 2, "model.state_dim": 4}
    save_params(directory, 5, begin_run(directory, "interdomain,softmax", fields))
    return directory


@pytest.fixture(scope="module")
def task(workdir):
    """The questions, two answers of each cell replaced by what the model itself says, as plain loops find it."""
    task = prepare(workdir, ONE, **ASKED)
    params = task.trained.restore_params()
    forward = quick_jit(lambda tokens: jnp.argmax(task.trained.model.apply({"params": params}, tokens)[0], axis=-1))

    def said(request) -> str:
        tokens = np.zeros((1, 600), np.int32)
        length = len(request.prompt)
        tokens[0, :length] = request.prompt
        written = []
        while len(written) < request.max_new_tokens:
            token = int(forward(tokens)[0, length - 1 + len(written)])
            if token == task.trained.tokenizer.eos_id:
                break
            tokens[0, length + len(written)] = token
            written.append(token)
        return bytes(token for token in written if token < 256).decode(errors="replace")

    cells = []
    for cell in task.cells:
        if isinstance(cell, TextCell):
            # Few tokens, and as many in both tasks: programs compile once.
            cell = cell._replace(requests=[each._replace(max_new_tokens=16) for each in cell.requests])
            for number in (1, 2):
                line = said(cell.requests[number]).split("\n")[0].strip()
                assert len(line) > 3
                # Of a needle's text a piece is enough, of a phonebook's it is the whole line.
                cell.answers[number] = f" {line[1:-1] if cell.task == 'needle' else line}"
        else:
            for number in (1, 2):
                cell.sequences.targets[number, -1] = forward(cell.sequences.tokens[[number]])[0, -1]
        cells.append(cell)
    return task._replace(cells=tuple(cells))


@pytest.fixture(scope="module")
def record(task):
    return evaluate(task)


def test_the_share_of_right_answers(record):
    expected = [("needle", 600), ("phonebook", 3), ("induction_heads", 600)]
    assert [(each.task, each.at) for each in record.measurements] == expected
    for measurement in record.measurements:
        assert (measurement.metric, measurement.value, measurement.samples) == ("accuracy", 0.4, 5)
        # The deviation of two ones and three zeros, over the root of five.
        assert measurement.error == pytest.approx((1.2 / 4 / 5) ** 0.5)
    assert (record.kind, record.name) == ("recall", "recall_needle_phonebook_induction_heads")
    assert record.model["step"] == 5
    assert (record.settings["seed"], record.settings["count"]) == (3, 5)


def test_the_context_holds_the_answer_too(workdir):
    """lm-eval#2963. RULER keeps 128 tokens for the answer."""
    for at in (600, 601, 1_024):
        (cell,) = prepare(workdir, ONE, tasks=["needle"], lengths=[at], count=3).cells
        for request, answer in zip(cell.requests, cell.answers, strict=True):
            # All but the start symbol; one line of noise is 92 bytes.
            assert at - 92 < len(request.prompt) - 1 + request.max_new_tokens <= at
            assert len(answer) <= request.max_new_tokens == 128


def test_what_was_done_before_an_interruption_is_not_done_again(task, record):
    """In smaller batches too, which change nothing."""
    needle, _, heads = task.cells
    # They cannot be asked.
    broken_needle = needle._replace(requests=[needle.requests[0]._replace(prompt=[10**6])])
    broken_heads = heads._replace(sequences=None)
    task = task._replace(batch_size=2)
    with pytest.raises(ValueError, match="token 1000000 is not in the vocabulary"):
        evaluate(task._replace(cells=(heads, broken_needle)))
    (partial,) = (Path(task.trained.workdir) / "evaluations").glob("*.partial")
    kept = partial.read_text()
    # Of another seed, or damaged, it counts for nothing.
    for content, seed in ((kept, 4), (kept[: len(kept) // 2], 3), ("{}", 3)):
        partial.write_text(content)
        with pytest.raises(AttributeError):
            evaluate(task._replace(cells=(broken_heads, broken_needle), seed=seed))
    partial.write_text(kept)
    done = evaluate(task._replace(cells=(broken_heads, needle)))
    assert done.measurements == (record.measurements[2], record.measurements[0])
    assert not partial.exists()


class Reader:
    """A language model that says what followed the present token when it first came; 0 where it is new."""

    def apply(self, variables, tokens, *, unembed):
        assert not unembed
        length = tokens.shape[1]
        is_same = (tokens[:, :, None] == tokens[:, None, :]) & (jnp.arange(length)[:, None] > jnp.arange(length))
        following = jnp.take_along_axis(tokens, (jnp.argmax(is_same, axis=2) + 1) % length, axis=1)
        said = jnp.where(is_same.any(axis=2), following, 0)
        return jax.nn.one_hot(said, len(variables["params"]["unembed"]["kernel"])), None


def shares_of(sequences, batch_size=4):
    params = {"unembed": {"kernel": jnp.eye(20)}}
    mesh = sharding.make_mesh(ONE, jax.devices()[:1])
    count_correct = make_count_correct(Reader(), mesh)
    return np.concatenate(list(answer_sequences(count_correct, params, sequences, mesh, batch_size=batch_size)))


def test_a_model_that_looks_back_answers_everything():
    for sequences in (mqar(Part(16, 4, 11), seed=0, vocab_size=20), induction_heads(11, seed=0, length=30)):
        np.testing.assert_array_equal(shares_of(sequences), np.ones(11))
        # Questions whose answers are others.
        targets = sequences.targets.copy()
        expected = np.ones(11)
        for row in (1, 6, 10):
            places = np.flatnonzero(sequences.is_scored[row])
            targets[row, places[-1]] = 19 if targets[row, places[-1]] != 19 else 18
            expected[row] -= 1 / len(places)
        for batch_size in (1, 4, 16):
            np.testing.assert_allclose(shares_of(sequences._replace(targets=targets), batch_size), expected)


def test_rows_may_have_different_numbers_of_questions():
    sequences = mqar(Part(16, 4, 3), seed=0, vocab_size=20)
    is_scored = sequences.is_scored.copy()
    is_scored[1, np.flatnonzero(is_scored[1])[1:]] = False
    targets = np.where(is_scored, sequences.targets, 0)
    targets[0, np.flatnonzero(is_scored[0])[0]] = 0
    np.testing.assert_allclose(shares_of(sequences._replace(targets=targets, is_scored=is_scored)), [0.75, 1, 1])


@pytest.mark.parametrize(
    ("text", "answer", "is_contained", "is_first_line"),
    [
        (" 1234567", " 1234567", True, True),
        (" 1234567. The lake", " 1234567", True, False),
        ("the number\nis 1234567", " 1234567", True, False),
        ("1234567\nThe lake", " 1234567", True, True),
        ("\n1234567", " 1234567", True, False),
        (" 1234568", " 1234567", False, False),
        ("", " 1234567", False, False),
        (" BLUE", " blue", True, False),
    ],
)
def test_rules_of_right_answers(text, answer, is_contained, is_first_line):
    assert contains(text, answer) == is_contained
    assert first_line_equals(text, answer) == is_first_line


def test_one_sample_has_no_error():
    assert mean_and_error(np.array([0.25])) == (0.25, None)
    assert mean_and_error(np.array([0.0, 1.0])) == (0.5, pytest.approx(0.5))


EIGHT_DEVICES = """
import jax, numpy as np
from interdomain_jax import sharding
from interdomain_jax.evaluation.recall.accuracy import answer_sequences, make_count_correct
from interdomain_jax.evaluation.recall.mqar import Part, mqar
from interdomain_jax.modules import Decoder

jax.config.update("jax_disable_most_optimizations", True)
model = Decoder(
    vocab_size=20, d_model=16, num_layers=1, num_heads=2, head_dim=8, state_dim=4, init_std=0.3, scan_layers=True,
)
params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
made = mqar(Part(16, 3, 21), seed=0, vocab_size=20)
said = np.argmax(jax.jit(lambda tokens: model.apply({"params": params}, tokens)[0])(made.tokens), axis=-1)
# What the model says is the answer to the first of the three questions of every other row.
rows = np.arange(0, 21, 2)
places = np.argmax(made.is_scored[rows], axis=1)
made.targets[:] = -2
made.targets[rows, places] = said[rows, places]
for sizes, batch_size in (((1, 1, 1, 1), 5), ((2, 2, 2, 1), 8), ((1, 2, 1, 4), 4)):
    mesh = sharding.make_mesh(dict(zip(sharding.AXES, sizes, strict=True)), jax.devices()[:int(np.prod(sizes))])
    placed = jax.device_put(params, sharding.state_sharding(params, mesh))
    shares = answer_sequences(make_count_correct(model, mesh), placed, made, mesh, batch_size=batch_size)
    np.testing.assert_allclose(np.concatenate(list(shares)), np.where(np.arange(21) % 2, 0, 1 / 3), err_msg=sizes)
"""


def test_sequences_are_answered_alike_on_every_mesh():
    run_on_eight_devices(EIGHT_DEVICES, quick=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ()}, "recall tasks are (); they must be names from ('needle', 'phonebook', 'mqar', "),
        ({"tasks": ("needles",)}, "recall tasks are ('needles',); they must be names from ('needle', "),
        ({"tasks": ("phonebook",)}, "recall lengths are (600,); of the tasks only ('needle', "),
        ({"tasks": ("needle",)}, "recall entries are (3,); of the tasks only phonebook takes them"),
        ({"count": 0}, "recall count is 0; it must be at least 1"),
        ({"batch_size": 0}, "recall batch_size is 0; it must be at least 1"),
        ({"seed": -1}, "recall task needle at 600: seed is -1; it must be 0 or more"),
        ({"lengths": (300,)}, "recall task needle at 300: budget is 300; with one line of noise the question and its "),
        ({"entries": (2,)}, "recall task phonebook at 2: entries is 2; it must lie between 3, "),
        (
            {"tasks": ("mqar",), "lengths": None, "entries": None},
            "recall task mqar at 64: model.vocab_size is 260; the task ",
        ),
    ],
)
def test_arguments_out_of_range_are_refused_in_a_sentence(workdir, changes, message):
    with pytest.raises(ValueError) as caught:
        prepare(workdir, ONE, **ASKED | changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_eval_py_writes_a_record(workdir):
    flags = ["--recall=induction_heads", "--recall_lengths=64,128", "--recall_count=9", "--seed=3"]
    command = [sys.executable, "eval.py", f"--workdir={workdir}", *flags]
    done = subprocess.run(command, cwd=ROOT, env=quick_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "induction_heads at 128: " in done.stderr
    (record,) = read_records(workdir)
    assert record.command.endswith("--seed=3")
    assert record.settings["tasks"] == {"induction_heads": [64, 128]}
    asked = [(each.at, each.metric, each.samples) for each in record.measurements]
    assert asked == [(64, "accuracy", 9), (128, "accuracy", 9)]


BAD_FLAGS = {
    "--recall_count=9": "--recall_count is for --recall; give that too",
    "--recall=mqar --max_tokens=9": "--max_tokens is for perplexity; leave it out, or --recall",
    "--batch_size=9": "--batch_size is for --suite or --recall; give that too",
    "--recall=needle --suite=lambada": "--suite and --recall are each done by itself; give one of them",
    "--recall=needle --recall_lengths=1k": "--recall_lengths is '1k'; it must be whole numbers, separated by commas",
    "--recall=": "recall tasks are (); they must be names from",
}
# Each would take a process seconds to start.
IN_ONE_PROCESS = """
import json, sys
from absl.testing import flagsaver
import eval
from interdomain_jax import cli

for arguments in sys.argv[1:]:
    with flagsaver.flagsaver():
        try:
            cli.parse_flags(["eval.py", "--workdir=nowhere", *arguments.split()])
            eval.main([])
        except SystemExit as refused:
            print(refused.code)
"""


def test_bad_flags_are_told_in_a_sentence():
    command = [sys.executable, "-c", IN_ONE_PROCESS, *BAD_FLAGS]
    done = subprocess.run(command, cwd=ROOT, env=quick_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for told, message in zip(done.stdout.splitlines(), BAD_FLAGS.values(), strict=True):
        assert f": {message}" in told
