"""Whole runs: from a config to a checkpoint, a curve and an evaluation."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import chex
import numpy as np
import pytest

from interdomain_jax import checkpoints, cli, sharding
from interdomain_jax import workdir as workdirs
from interdomain_jax.errors import MismatchError, RunError
from interdomain_jax.evaluation import perplexity
from interdomain_jax.evaluation.records import read_records
from interdomain_jax.training import loop
from interdomain_jax.training.metrics import read_metrics
from tests.token_lists import tokenised
from tests.training.conftest import without_speed

ROOT = Path(__file__).parents[2]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.mark.usefixtures("small_corpus")
def test_a_killed_run_resumes_bit_for_bit(make_config, tmp_path, monkeypatch):
    """gpt-neox#308: accumulation 4, killed at step 7: the rest equals the uninterrupted run."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = loop.train(loop.prepare(make_config(), whole))

    class Killed(BaseException):
        pass

    write = loop.MetricsWriter.write

    def write_until_step_7(self, step, values):
        write(self, step, values)
        if step == 7:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(loop.MetricsWriter, "write", write_until_step_7)
        with pytest.raises(Killed):
            loop.train(loop.prepare(make_config(), killed))
    assert read_metrics(killed)[-1]["step"] == 7
    # The checkpoint of the smallest validation loss so far.
    assert checkpoints.find_step(killed, "latest") == 6
    # What may change on resume does not change the run.
    actual = loop.train(loop.prepare(make_config({"log_every": 3}), killed))

    chex.assert_trees_all_equal(actual, expected)
    assert without_speed(read_metrics(killed)) == without_speed(read_metrics(whole))
    rows = read_metrics(whole)
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 13))
    assert [row["step"] for row in rows if "validation/loss" in row] == [6, 12]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert np.mean(losses[-3:]) < losses[0] - 0.5
    # The last row of an epoch is filled up.
    batches = loop.train_batches(loop.prepare(make_config(), whole))
    masks = [next(batches)["loss_mask"] for _ in range(12)]
    batches.close()
    assert [row["train/tokens"] for row in rows if "train/loss" in row] == [mask.sum() for mask in masks]
    assert {mask.sum() for mask in masks} > {4 * 32}
    assert (whole / "loss_curve.png").read_bytes().startswith(PNG_SIGNATURE)
    assert list((whole / "tensorboard").glob("events*"))

    # A finished run is left as it is.
    again = loop.train(loop.prepare(make_config(), whole))
    chex.assert_trees_all_equal(again, expected)
    assert read_metrics(whole) == rows


@pytest.mark.usefixtures("small_corpus")
def test_processes_that_read_different_corpora_end(make_config, tmp_path, monkeypatch):
    run = loop.prepare(make_config(), tmp_path)
    numbers = []

    def with_another(number):
        numbers.append(number)
        return np.array([number, number + 1])

    monkeypatch.setattr(loop.multihost_utils, "process_allgather", with_another)
    with pytest.raises(RunError, match="the processes read different corpora, this one those with the digests"):
        loop.train(run)
    assert len(numbers) == 1
    assert not list(tmp_path.glob("metrics*"))


@pytest.mark.usefixtures("small_corpus")
def test_other_corpora_than_those_it_began_with_are_refused(make_config, tmp_path, monkeypatch):
    """Their place is free, and they are known by what they hold."""
    fields = {"num_steps": 4, "optimizer.warmup_steps": 2, "checkpoint_every": 2, "eval_every": 4}
    loop.train(loop.prepare(make_config(fields), tmp_path))
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    moved = {"data.corpora": ("elsewhere",)}
    with monkeypatch.context() as patch:
        patch.setattr(loop, "open_corpora", lambda data, split, tokenizer: (tokenised(["other text"] * 9),))
        with pytest.raises(MismatchError, match="the run was trained on corpora with the digests"):
            loop.train(loop.prepare(make_config(fields | moved), tmp_path))
    assert int(loop.train(loop.prepare(make_config(fields | moved), tmp_path)).step) == 4


BAD_INPUT = [
    ({"data.sequence_length": 0}, "data.sequence_length is 0"),
    ({"data.batch_size": 6}, "data.batch_size is 6"),
    ({"accumulation_steps": 0}, "accumulation_steps is 0"),
    ({"num_steps": 0}, "num_steps is 0"),
    ({"seed": -1}, "seed is -1"),
    ({"model.dtype": "float99"}, "model.dtype is 'float99'"),
    ({"optimizer.beta1": 1.0}, "betas are 1.0"),
    ({"optimizer.warmup_steps": 12}, "warmup_steps is 12"),
    ({"model.mixers": ("interdoman",)}, "interdoman"),
    ({"model.d_model": 0}, "d_model"),
    ({"model.vocab_size": 256}, "model.vocab_size is 256"),
    ({"data.tokenizer": "missing.model"}, "missing.model"),
    ({"data.tokenizer": "missing.json"}, "missing.json"),
    ({"data.tokenizer": "words"}, "words"),
    ({"data.corpora": ("the_web",)}, "data.corpora names 'the_web'"),
    ({"data.corpora": ()}, "data.corpora is empty"),
    ({"data.corpora": ("one", "other")}, "data.weights is (); it must have one number for each of the corpora, 2"),
    ({"data.weights": (0.0,)}, "data.weights is (0.0,); all of them must be numbers above 0"),
    ({"data.weights": (math.nan,)}, "data.weights is (nan,); all of them must be numbers above 0"),
    ({"data.weights": (math.inf,)}, "data.weights is (inf,); all of them must be numbers above 0"),
    ({"data.weights": ("1",)}, "data.weights is ('1',); all of them must be numbers above 0"),
    ({"data.packing": "loose"}, "data.packing is 'loose'; it must be one of ('concatenate', 'best_fit')"),
]


@pytest.mark.parametrize(("overrides", "named"), BAD_INPUT)
def test_bad_input_is_one_sentence_and_nothing_is_written(make_config, tmp_path, overrides, named):
    workdir = tmp_path / "run"
    with pytest.raises(SystemExit) as raised, cli.exit_on_bad_input():
        loop.prepare(make_config(overrides | {"data.directory": str(tmp_path / "data")}), workdir)
    message = raised.value.code
    assert isinstance(message, str)
    assert named in message
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == []


def test_a_workdir_with_another_config_is_refused(make_config, tmp_path):
    workdirs.save_config(tmp_path, make_config())
    before = (tmp_path / "config.json").read_bytes()
    other = make_config({"num_steps": 13, "model.read": "hermitian", "checkpoint_every": 5})
    with pytest.raises(SystemExit) as raised, cli.exit_on_bad_input():
        loop.prepare(other, tmp_path)
    assert "num_steps is 12 there and 13 here" in raised.value.code
    assert "model.read is 'bilinear' there and 'hermitian' here" in raised.value.code
    assert "checkpoint_every" not in raised.value.code
    assert (tmp_path / "config.json").read_bytes() == before


def test_a_workdir_that_cannot_be_a_directory_is_refused(make_config, tmp_path):
    (tmp_path / "file").touch()
    for workdir in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(SystemExit) as raised, cli.exit_on_bad_input():
            loop.prepare(make_config(), workdir)
        assert f"{tmp_path / 'file'} is a file" in raised.value.code


def test_an_error_of_the_program_keeps_its_traceback():
    with pytest.raises(AttributeError), cli.exit_on_bad_input():
        raise AttributeError


def test_a_saved_config_reads_back_the_same(make_config, tmp_path):
    config = make_config({"model.mixers": ("interdomain", "softmax")})
    workdirs.save_config(tmp_path, config)
    assert workdirs.load_config(tmp_path).to_dict() == config.to_dict()


def test_evaluation_without_a_checkpoint_is_refused(make_config, tmp_path):
    for message in ("holds no run", "holds no checkpoint"):
        with pytest.raises(SystemExit) as raised, cli.exit_on_bad_input():
            perplexity.prepare(tmp_path / "run", sharding.mesh_config())
        assert message in raised.value.code
        workdirs.save_config(tmp_path / "run", make_config())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]


def run_main(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, program, *flags], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.fast
def test_the_two_commands(tmp_path):
    """`train.py`, then `eval.py`, on the default corpus."""
    workdir = tmp_path / "run"
    trained = run_main(
        "train.py",
        "--config=configs/tiny.py:softmax,interdomain",
        "--config.model.d_model=16",
        "--config.model.num_layers=2",
        "--config.model.num_heads=2",
        "--config.model.head_dim=8",
        "--config.model.state_dim=4",
        "--config.model.dtype=bfloat16",
        "--config.model.scan_layers=true",
        "--config.model.remat=full",
        "--config.data.sequence_length=32",
        f"--config.data.directory={tmp_path / 'data'}",
        "--config.data.packing=best_fit",
        "--config.data.reset=true",
        "--config.optimizer.warmup_steps=2",
        "--config.num_steps=8",
        "--config.log_every=4",
        "--config.eval_tokens=2000",
        f"--workdir={workdir}",
    )
    assert trained.returncode == 0, trained.stderr
    assert "step 4/8  loss" in trained.stderr
    assert "step 8/8  loss" in trained.stderr
    assert "step 3/8" not in trained.stderr

    evaluated = run_main("eval.py", f"--workdir={workdir}", "--max_tokens=2000")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "perplexity" in evaluated.stdout
    (record,) = read_records(workdir)
    assert record.model["name"] == "tiny"
    assert record.model["step"] == 8
    assert record.model["mixers"] == ["softmax", "interdomain"]
    losses = [each for each in record.measurements if each.metric == "loss"]
    assert [each.at for each in losses] == [32, 64, 128]
    assert [each.samples for each in losses] == [2000] * 3
    validation = read_metrics(workdir)[-1]["validation/loss"]
    assert losses[0].value == pytest.approx(validation, rel=1e-6)
    assert (workdir / "evaluations" / f"{record.name}.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--config=configs/tiny.py", "--config.model.d_modle=3"], "config.model.d_model?"),
        (["--config=configs/tiny.py:nonesuch"], "nonesuch"),
        (["--config=configs/none.py", "--config.num_steps=3"], "configs/none.py"),
    ],
)
def test_a_bad_command_line_is_one_sentence(tmp_path, flags, named):
    finished = run_main("train.py", *flags, f"--workdir={tmp_path / 'run'}")
    assert finished.returncode == 1
    assert finished.stderr.startswith("train.py: ")
    assert finished.stderr.count("\n") == 1
    assert named in finished.stderr
    assert list(tmp_path.iterdir()) == []
