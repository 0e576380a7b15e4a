"""The same run in one process and in several: losses, checkpoints and evaluations do not depend on their number."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest

from interdomain_jax.evaluation.records import read_records
from interdomain_jax.training.metrics import read_metrics
from tests.processes import run_processes
from tests.training.conftest import SMALL

# train.py on the tests' documents; or, if asked, what eval.py does.
PROGRAM = """
import jax
import train
from absl import app, flags
from etils import epath
from interdomain_jax import cli
from interdomain_jax.evaluation import perplexity, perplexity_report
from interdomain_jax.evaluation.records import write_record
from interdomain_jax.preemption import Notice
from interdomain_jax.training import loop
from tests.training.conftest import open_corpora

EVALUATE = flags.DEFINE_bool("evaluate", False, "")
loop.open_corpora = perplexity.open_corpora = open_corpora

def main(argv):
    if not EVALUATE.value:
        return train.main(argv)
    workdir = epath.Path(flags.FLAGS.workdir)
    cli.join_processes(workdir, Notice())
    record = perplexity.evaluate(perplexity.prepare(workdir, dict(data=1, fsdp=-1, tensor=1, seq=1)))
    if jax.process_index() == 0:
        perplexity_report.draw(record, write_record(workdir, record).with_suffix(".png"))

app.run(main, flags_parser=cli.parse_flags)
"""
STEPS, HALF = 6, 3
CONFIG = SMALL | {"num_steps": STEPS, "eval_every": HALF, "checkpoint_every": HALF, "accumulation_steps": 1}


def run(count: int, workdir: Path, *flags: str, cache: Path, devices: int = 1, evaluates: bool = False) -> list[str]:
    """What the processes print that train; others may evaluate what they come to."""
    config = [f"--config.{field}={value}" for field, value in CONFIG.items()]
    flags = ("--config=configs/tiny.py", *config, f"--workdir={workdir}", *flags)
    outputs = run_processes(count, PROGRAM, *flags, devices=devices, cache=cache)
    if evaluates:
        run_processes(count, PROGRAM, *flags, "--evaluate", devices=devices, cache=cache)
    return outputs


def rows_with(name: str, workdir: Path) -> list[dict[str, float]]:
    return [row for row in read_metrics(workdir) if name in row]


def assert_same_losses(actual: Path, expected: Path) -> None:
    for name in ("train/loss", "validation/loss"):
        rows, other_rows = rows_with(name, actual), rows_with(name, expected)
        assert [row["step"] for row in rows] == [row["step"] for row in other_rows]
        losses, other_losses = [row[name] for row in rows], [row[name] for row in other_rows]
        np.testing.assert_allclose(losses, other_losses, rtol=0, atol=1e-5)
        assert len(set(losses)) == len(losses)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The workdir of the run in one process, evaluated."""
    workdir = tmp_path_factory.mktemp("processes") / "one"
    run(1, workdir, cache=cache, evaluates=True)
    return workdir


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The workdir of the run in four, the rows split over all of them and the parameters over two."""
    workdir = tmp_path_factory.mktemp("processes") / "four"
    outputs = run(4, workdir, "--config.mesh.fsdp=2", cache=cache)
    assert ["6/6" in output for output in outputs] == [True, False, False, False]
    return workdir


def test_four_processes_train_as_one(one, four):
    assert_same_losses(four, one)
    rows = rows_with("train/loss", four)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # The last row of an epoch is filled up.
    tokens = [row["train/tokens"] for row in rows_with("train/loss", one)]
    assert max(tokens) == 4 * 32 > min(tokens) > 3 * 32
    assert [row["train/tokens_seen"] for row in rows] == list(itertools.accumulate(tokens))
    assert [row["step"] for row in rows_with("validation/loss", four)] == [HALF, STEPS]
    assert len(list((four / "tensorboard").iterdir())) == 1
    assert len(list((four / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize(
    ("count", "devices", "mesh"),
    [
        (1, 1, []),
        # The tokens of each row lie on all devices, so each row in both processes.
        (2, 2, ["--config.mesh.data=1", "--config.mesh.seq=4"]),
    ],
)
def test_another_number_of_processes_goes_on_with_a_checkpoint_of_four(
    one, four, cache, tmp_path, count, devices, mesh
):
    """And evaluates what it comes to."""
    workdir = tmp_path / "run"
    shutil.copytree(four, workdir)
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))
    outputs = run(count, workdir, *mesh, cache=cache, devices=devices, evaluates=True)
    assert f"steps {HALF + 1} to {STEPS}" in outputs[0]

    assert_same_losses(workdir, one)
    assert rows_with("train/loss", workdir)[:HALF] == rows_with("train/loss", four)[:HALF]
    # In several parts contexts longer than that of training are read in pieces.
    (record,), (expected,) = read_records(workdir), read_records(one)
    assert (record.model, record.settings) == (expected.model, expected.settings)
    assert {each.metric for each in expected.measurements} == {
        "loss",
        "perplexity",
        "bits_per_byte",
        "loss_by_position",
    }
    for measured, wanted in zip(record.measurements, expected.measurements, strict=True):
        assert measured._replace(value=None) == wanted._replace(value=None)
        tolerance = 1e-5 if measured.metric == "loss" else 1e-3
        assert measured.value == pytest.approx(wanted.value, rel=0, abs=tolerance)
