"""The experiments on small language models: what is planned, one run of them for real, and that the report is true."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from PIL import Image

from experiments import mqar_report, text_report, text_runs
from experiments.mqar_runs import Run
from interdomain_jax.modules.decoder import Decoder
from tests.quick import quick_environment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
TINY = (
    "num_steps=2",
    "optimizer.warmup_steps=1",
    "model.d_model=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.head_dim=8",
    "model.state_dim=4",
    "model.vocab_size=257",
    "data.tokenizer=bytes",
    "data.sequence_length=8",
    "data.batch_size=2",
    "eval_tokens=64",
)


def test_what_is_planned():
    """Issue-sized: seven cells and three seeds, a million parameters or more, ten million tokens or more."""
    seeds = (42, 43, 44)
    runs = [run for make in text_runs.EXPERIMENTS.values() for run in make(seeds)]
    assert len({run.name for run in runs}) == len(runs) == (7 + 1 + 2 + 2 + 3 * 3) * len(seeds)
    for run in text_runs.cube_runs(seeds):
        config = run.config
        assert config.num_steps * config.data.batch_size * config.data.sequence_length >= 10e6
        shapes = jax.eval_shape(Decoder(**config.model).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
        assert 1e6 <= sum(leaf.size for leaf in jax.tree.leaves(shapes)) <= 3e6
    for run in text_runs.scaling_runs(seeds[:1]):
        assert run.config.model.num_heads * run.config.model.head_dim == run.config.model.d_model


def experiment(*arguments, environment=None):
    return subprocess.run(
        [sys.executable, "-m", "experiments.text", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_for_real(tmp_path):
    """Trained, evaluated, reported; and not made again."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(300):
        (texts / f"{number}.txt").write_text(f"text {number} " * 5)
    corpus = tmp_path / "corpus"
    subprocess.run(
        [
            *(sys.executable, "-m", "interdomain_jax.data.prepare", "--corpus=text_files", f"--files={texts}/*.txt"),
            *("--tokenizer=bytes", f"--output={corpus}", "--validation_one_in=20"),
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    output = tmp_path / "results"
    arguments = [
        *(f"--field={field}" for field in (*TINY, f"data.corpora=('{corpus}',)")),
        *("--experiments=reads", "--seeds=7", f"--workdirs={tmp_path / 'runs'}", f"--output={output}"),
    ]
    first = experiment(*arguments, environment=quick_environment())
    assert first.returncode == 0, first.stderr
    assert "0 of 1 runs are done" in first.stderr
    record = json.loads((output / "interdomain_7" / "evaluations" / "perplexity.json").read_text())
    assert record["config"]["model"]["read"] == "bilinear"
    assert record["model"]["tokens"] == 2 * 2 * 8
    assert [each["at"] for each in record["measurements"] if each["metric"] == "loss"] == [8, 16, 32, 64, 128]
    assert "Perplexity by compute" not in (output / text_report.MARKDOWN).read_text()
    again = experiment(*arguments, environment=quick_environment())
    assert again.returncode == 0, again.stderr
    assert "1 of 1 runs are done" in again.stderr


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--experiments=cubes", "--experiments=cubes; they must be some of cube, reads, rotations, memory, scaling"),
        ("--seeds=", "--seeds is empty; it must name at least one"),
        ("--field=num_steps", "--field is 'num_steps'; it must be a name, '=' and a value, such as num_steps=10"),
        ("--field=num_step=3", "--field is 'num_step=3'; configs/small.py has no field 'num_step'"),
        ("--field=num_steps='three'", "--field: "),
    ],
)
def test_bad_input(argument, sentence, tmp_path):
    result = experiment(argument, f"--output={tmp_path}", f"--workdirs={tmp_path}")
    assert result.returncode != 0
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert not any(tmp_path.iterdir())


def test_the_committed_report_is_what_the_records_say(tmp_path):
    """The Markdown to the letter, the figures but for what another version of matplotlib draws differently."""
    committed = RESULTS / "text"
    for path in [*committed.glob("*/evaluations/*.json"), *committed.glob("*.json")]:
        copy = tmp_path / path.relative_to(committed)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    text_report.write(epath.Path(tmp_path))
    assert (tmp_path / text_report.MARKDOWN).read_text() == (committed / text_report.MARKDOWN).read_text()
    figures = sorted(path.name for path in committed.glob("*.png"))
    assert figures == sorted(path.name for path in tmp_path.glob("*.png"))
    for name in figures:
        ours, theirs = (np.asarray(Image.open(place / name).convert("L"), float) for place in (tmp_path, committed))
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).mean() < 2


def test_the_committed_table_of_mqar_is_what_its_runs_say():
    content = json.loads((RESULTS / "mqar.json").read_text())
    runs = [Run(**run | {"accuracies": tuple(run["accuracies"])}) for run in content["runs"]]
    assert mqar_report.as_markdown(runs, content) == (RESULTS / "mqar.md").read_text()


def test_seeds_are_compared_one_by_one():
    """Hand-made losses: the spread of the differences is not that of the losses."""
    model = text_report.Model(
        mixer="interdomain",
        read="bilinear",
        d_model=8,
        delta_range=(0.1, 0.2),
        rope_base=1e4,
        parameters=10,
        tokens=20,
        seeds=(1, 2),
        lengths=(4, 8),
        losses=np.array([[1.0, 1.5], [3.0, 3.5]]),
        position_ends=(4,),
        position_losses=np.zeros((2, 1)),
    )
    other = model._replace(mixer="s4d", losses=model.losses + 0.25)
    assert text_report.difference(other, model) == "+0.2500 ± 0.0000"
    assert text_report.difference(other._replace(seeds=(2, 3)), model) == "-1.7500"
    assert text_report.number(model.losses[:, 0]) == "2.0000 ± 1.4142 (2)"
    assert model.compute == 6 * 10 * 20
