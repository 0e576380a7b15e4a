"""Every command of README.md is run as it is printed, with flags behind it that make it small.

A command that `WAYS` does not know fails a test, and so does an entry of `WAYS` that README has no more. Of a `make`
target each command of its recipe counts. What cannot run here names the file that runs it. Each group of commands has a
directory of its own with the checkout's programs in it, and no network, and is done in README's order.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt
from packaging.requirements import Requirement

from interdomain_jax.topologies import missing_compiler
from tests.evaluation.suite_rows import write_rows
from tests.evaluation.untrained import begin_run, save_params
from tests.network import network_raises
from tests.quick import quick_environment

ROOT = Path(__file__).parents[1]
PROGRAMS = ("train.py", "eval.py", "generate.py")
COMMAND = re.compile(rf"([A-Z_]+=\S+ )*(python|pip|make|{'|'.join(PROGRAMS)}) ")


class Run(NamedTuple):
    """A command that is run here.

    Attributes:
        group: of the commands that share a directory.
        flags: what stands behind it, to make it small.
        leaves: patterns of files; it must leave one of each.
        devices: virtual ones.
        before: commands that README takes for done.
    """

    group: str
    flags: str = ""
    leaves: tuple[str, ...] = ()
    devices: int = 1
    before: tuple[str, ...] = ()


class Elsewhere(NamedTuple):
    """A command that another file runs, and the words there that do."""

    file: str
    words: str


BYTES = "--config.data.tokenizer=bytes --config.model.vocab_size=257 "
SMALL = (
    "--config.model.d_model=16 --config.model.num_layers=1 --config.model.num_heads=2 --config.model.head_dim=8 "
    "--config.model.state_dim=4 --config.model.dtype=float32 --config.data.sequence_length=32 "
    "--config.data.batch_size=4 --config.accumulation_steps=1 --config.num_steps=2 --config.eval_tokens=200 "
    "--config.optimizer.warmup_steps=1 "
)
WIDE = "--config.model.d_model=256 --config.data.batch_size=256 "
TOKENS = "--lengths=32 --max_tokens=500 "
ALONE = "--num_processes=1 --process_id=0 --coordinator_address=localhost:{port} "

WAYS: dict[str, Run | Elsewhere] = {
    "python train.py --config=configs/tiny.py --workdir=runs/tiny": Run(
        "demo",
        SMALL,
        tuple(f"runs/tiny/{name}" for name in ("checkpoints/2", "metrics.jsonl", "tensorboard/*", "loss_curve.png")),
    ),
    "python train.py --config=configs/tiny.py:s4d": Run(
        "others", f"{SMALL} --workdir=runs/s4d", ("runs/s4d/config.json",)
    ),
    "python train.py --config=configs/125m.py:s4d --workdir=runs/125m_s4d": Run(
        "125m", f"{SMALL} {BYTES} --config.data.corpora=\"('data/code',)\"", ("runs/125m_s4d/checkpoints/2",)
    ),
    "python train.py --config=configs/tiny.py:interdomain,interdomain,interdomain,softmax --workdir=runs/hybrid": Run(
        "others", f"{SMALL} --config.model.num_layers=4", ("runs/hybrid/checkpoints/2",)
    ),
    "python -m interdomain_jax.data.prepare --corpus=text_files --files='books/*.jsonl' --tokenizer=mistral "
    "--output=data/books": Run("books", "--validation_one_in=2", ("data/books/train/*", "data/books/validation/*")),
    "python train.py --config=configs/125m.py --config.data.corpora=\"('data/books',)\" --workdir=runs/books": Run(
        "books", SMALL, ("runs/books/checkpoints/2",)
    ),
    "python train.py --config=configs/1_3b.py --config.mesh.data=-1 --config.mesh.fsdp=16 --workdir=runs/1_3b "
    "--distributed": Run(
        "mesh", f"{SMALL} {BYTES} {ALONE} --config.data.batch_size=16", ("runs/1_3b/checkpoints/2",), devices=16
    ),
    "JAX_PLATFORMS=cpu python train.py --config=configs/1_3b.py --config.mesh.fsdp=16 --config.mesh.seq=2 "
    "--config.accumulation_steps=1 --compile_only --topology=v5e:16x16": Run("compilers", f"{SMALL} {BYTES} {WIDE}"),
    "python eval.py --workdir=runs/tiny": Run(
        "demo",
        TOKENS,
        ("runs/tiny/evaluations/perplexity*.json", "runs/tiny/evaluations/perplexity*.png"),
    ),
    "python eval.py --workdir=runs/125m --lengths=4096,8192,14336,1048576 --corpora=data/pg19,data/code": Run(
        "125m", TOKENS, ("runs/125m/evaluations/perplexity*.json",)
    ),
    "python eval.py --workdir=runs/125m --suite=commonsense8,wikitext2,based-recall --suite_data=data/suites": Run(
        "suites", "--limit=1", tuple(f"runs/125m/evaluations/{name}.json" for name in ("commonsense8", "wikitext2"))
    ),
    "python eval.py --workdir=runs/125m --recall=needle,phonebook": Run(
        "125m",
        "--recall_lengths=512 --recall_entries=8 --recall_count=2",
        ("runs/125m/evaluations/recall*.json",),
    ),
    "python eval.py --report=reports/125m --runs=runs/125m,runs/125m_s4d,runs/125m_softmax": Run(
        "125m",
        leaves=("reports/125m/report.md",),
        before=tuple(f"python eval.py --workdir=runs/125m_{mixer} {TOKENS}" for mixer in ("s4d", "softmax")),
    ),
    "python generate.py --workdir=runs/tiny --prompt='def main():' --max_new_tokens=200 --temperature=0.8": Run(
        "demo", "--max_new_tokens=8"
    ),
    # The recipes of `make`, where README names the target.
    "python -m pytest -n 2 --dist worksteal": Elsewhere(".ci/run", "make test\n"),
    "python -m pytest -n 2 --dist worksteal -m compiled": Elsewhere(".ci/run", "make test-compiled\n"),
    "python -m benchmarks.results --parts=mixer,decode,data,trainer": Elsewhere(
        "tests/test_results_benchmark.py", '"-m", "benchmarks.results"'
    ),
    "python -m benchmarks.results --parts=decode": Elsewhere(
        "tests/test_decode_benchmark.py", '"-m", "benchmarks.decode"'
    ),
    "python -m benchmarks.results --parts=trainer": Elsewhere(
        "tests/test_trainer_benchmark.py", '"benchmarks.trainer"'
    ),
    "python -m benchmarks.kernel_report": Elsewhere("tests/kernels/test_kernel_benchmarks.py", "kernel_report.report("),
    "python -m benchmarks.gpu --output=report.md": Elsewhere(
        "tests/kernels/test_kernel_benchmarks.py", '"benchmarks.gpu"'
    ),
    "python -m experiments.mqar": Elsewhere("tests/test_mqar_experiment.py", '"-m", "experiments.mqar"'),
    "python -m experiments.text": Elsewhere("tests/test_text_experiment.py", '"-m", "experiments.text"'),
    "python -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/docs": Elsewhere(
        ".ci/run", "make release-check docs "
    ),
}
"""How each command is run, `pip install` apart: those are held against pyproject.toml."""

MARKS = {"others": pytest.mark.slow, "compilers": pytest.mark.compiled}
GROUPS = [
    pytest.param(group, marks=MARKS.get(group, ()))
    for group in dict.fromkeys(way.group for way in WAYS.values() if isinstance(way, Run))
]


class Readme(NamedTuple):
    """What README tells its reader to do, in a shell and in Python."""

    commands: tuple[str, ...]
    programs: tuple[str, ...]


@cache
def readme() -> Readme:
    """Reads fenced and indented blocks, and command lines in the text; a block of paths that are there is none."""
    commands, programs = [], []
    for token in MarkdownIt().enable("table").parse((ROOT / "README.md").read_text()):
        if token.type == "fence" and token.info == "python":
            programs.append(token.content)
        elif token.type in ("fence", "code_block"):
            assert token.info in ("", "sh"), f"no way to run a block of {token.info!r}"
            lines = token.content.replace("\\\n", " ").splitlines()
            named = [line.split()[0] for line in lines if line and not line[0].isspace()]
            if not all([*ROOT.glob(name)] for name in named):
                commands += [" ".join(line.split()) for line in lines if line]
        for child in token.children or ():
            if child.type == "code_inline" and COMMAND.match(child.content):
                commands.append(f"python {child.content}" if child.content.startswith(PROGRAMS) else child.content)
    return Readme(tuple(dict.fromkeys(commands)), tuple(programs))


def steps(command: str) -> list[str]:
    """The command, or those that `make` would run in an environment that is there."""
    if not command.startswith("make "):
        return [command]
    ready = [f"--old-file=.venv/{name}" for name in ("run", "dev", "bench", "compilers", "docs")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    shown = subprocess.run(
        [*command.split(), "VENV=.venv", "--dry-run", *ready], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    return [line.replace("JAX_PLATFORMS=cpu ", "").replace(".venv/bin/", "") for line in shown.stdout.splitlines()]


@cache
def every_step() -> tuple[str, ...]:
    """All commands of README, each once, in its order."""
    return tuple(dict.fromkeys(step for command in readme().commands for step in steps(command)))


def is_install(step: str) -> bool:
    return re.match(r"(python -m )?pip install ", step) is not None


def test_every_command_has_a_way():
    assert [step for step in every_step() if step not in WAYS and not is_install(step)] == []
    assert [command for command in WAYS if command not in every_step()] == []


def test_what_is_installed_can_be():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installs = [step for step in every_step() if is_install(step)]
    assert installs
    for install in installs:
        for wanted in shlex.split(install.partition(" install ")[2]):
            if own := re.fullmatch(r"\.(?:\[(.+)\])?", wanted):
                assert {*(own[1] or "").split(",")} - {""} <= {*extras}, install
            elif not wanted.startswith("-"):
                Requirement(wanted)


@pytest.mark.parametrize("command", [command for command, way in WAYS.items() if isinstance(way, Elsewhere)])
def test_another_file_runs(command):
    assert WAYS[command].words in (ROOT / WAYS[command].file).read_text()


def test_its_programs():
    assert readme().programs
    for program in readme().programs:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=quick_environment(), capture_output=True)
        assert done.returncode == 0, done.stderr.decode()


def prepare(group: str, place: Path, run: Callable[[str], None]) -> None:
    """Makes what README takes for granted."""
    if group == "compilers" and (package := missing_compiler("v5e:16x16")):
        pytest.skip(f"{package} is not installed")
    (place / "books").mkdir()
    texts = [
        f"Chapter {n}. " + "The keeper of the light wrote the hours down and kept the book dry. " * 9 for n in range(8)
    ]
    (place / "books" / "one.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    if group in ("125m", "suites"):
        for mixer in ("interdomain", "softmax") if group == "125m" else ("interdomain",):
            workdir = place / "runs" / ("125m" if mixer == "interdomain" else f"125m_{mixer}")
            save_params(workdir, 5, begin_run(workdir, mixer))
    if group == "125m":
        run(
            "python -m interdomain_jax.data.prepare --corpus=text_files --files='books/*.jsonl' --tokenizer=bytes "
            "--validation_one_in=2 --output=data/code"
        )
        shutil.copytree(place / "data" / "code", place / "data" / "pg19")
    if group == "suites":
        write_rows(place / "data" / "suites")


@pytest.mark.parametrize("group", GROUPS)
def test_it_does_what_it_says(group, tmp_path, cache):
    for name in (*PROGRAMS, "configs", "interdomain_jax", "pallas_kernels"):
        (tmp_path / name).symlink_to(ROOT / name)
    # Python runs this module before a program.
    (tmp_path / "sitecustomize.py").write_text(network_raises("AssertionError"))

    def run(command: str, devices: int = 1) -> None:
        environment = quick_environment(f"--xla_force_host_platform_device_count={devices}") | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
            "HOME": str(tmp_path),
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    prepare(group, tmp_path, run)
    for step in every_step():
        match WAYS.get(step):
            case Run(of_group, flags, leaves, devices, before) if of_group == group:
                for needed in before:
                    run(needed)
                with socket.socket() as probe:
                    probe.bind(("localhost", 0))
                    port = probe.getsockname()[1]
                run(f"{step} {flags.format(port=port)}", devices)
                for pattern in leaves:
                    assert [*tmp_path.glob(pattern)], f"{step} left no {pattern}"
