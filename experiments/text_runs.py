"""Small language models on the embedded corpus: which runs an experiment is made of, and how they are made.

Each run is `train.py` and then `eval.py` in processes of their own, one on each CPU core: models this small gain little
from a second one. What is left of a run is the record of its evaluation, with its config, commit and machine.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath
from ml_collections import ConfigDict

from configs import small
from interdomain_jax import checkpoints, strict_json
from interdomain_jax.errors import RunError
from interdomain_jax.evaluation.records import read_records, record_path
from interdomain_jax.modules.mixers import DELTA_RANGE
from interdomain_jax.ops.dynamics import Read

ROOT = Path(__file__).parents[1]
CUBE = ("interdomain", "s4d", "softmax", "interdomain_no_rope", "dual_linear", "single_query", "s4d_rope")
"""The cells of the mechanism cube, and softmax; those that say the most first."""
READ_BY_QUERIES = ("interdomain", "interdomain_no_rope", "single_query")
"""The cells in which the read matters."""
ONE_TURN = 50.0
"""Base of RoPE: 2 pi 50^(15/16), about 250 tokens, is the longest turn of 16 pairs of channels."""
SCALED = ("softmax", "interdomain", "s4d")
SCALES = ((32, 611), (64, 1_221), (96, 2_442), (128, 3_663))
"""Width of the model, and updates: about ten tokens for each parameter."""
LENGTH_MULTIPLES = (1, 2, 4, 8, 16)
"""The contexts of the evaluation, in units of that of training."""
EVALUATION = "perplexity"
"""The name of the record."""


class TextRun(NamedTuple):
    """A run of an experiment.

    Attributes:
        name: of its directory.
        mixer: of its layers.
        fields: of the config, where they are not those of `configs/small.py`.
    """

    name: str
    mixer: str
    fields: Mapping[str, Any]

    @property
    def config(self) -> ConfigDict:
        """The whole config."""
        config = small.get_config(self.mixer)
        config.update_from_flattened_dict(dict(self.fields))
        return config


def usual_read(mixer: str) -> Read:
    """The read of the cube's cells: hermitian where a query reads; elsewhere the config's, which changes nothing."""
    return "hermitian" if mixer in READ_BY_QUERIES else small.get_config(mixer).model.read


def cube_runs(seeds: Iterable[int]) -> list[TextRun]:
    """Every cell with every seed."""
    return [_usual_run(mixer, "", {"seed": seed}) for seed in seeds for mixer in CUBE]


def read_runs(seeds: Iterable[int]) -> list[TextRun]:
    """The bilinear read; the cube has the hermitian one."""
    return [TextRun(f"interdomain_{seed}", "interdomain", {"seed": seed}) for seed in seeds]


def rotation_runs(seeds: Iterable[int]) -> list[TextRun]:
    """RoPE whose slowest pair of channels turns once in the training context."""
    fields = {"model.rope_base": ONE_TURN}
    return [
        _usual_run(mixer, "_one_turn", {"seed": seed} | fields)
        for seed in seeds
        for mixer in ("interdomain", "softmax")
    ]


def memory_runs(seeds: Iterable[int]) -> list[TextRun]:
    """The range of step lengths that the paper has for 4,096 tokens, at the context of `configs/small.py`."""
    fields = {"model.delta_range": DELTA_RANGE}
    return [
        _usual_run(mixer, "_paper_steps", {"seed": seed} | fields) for seed in seeds for mixer in ("interdomain", "s4d")
    ]


def scaling_runs(seeds: Iterable[int]) -> list[TextRun]:
    """Three mixers at four sizes; the cube has one of the sizes."""
    usual = small.get_config()
    runs = []
    for seed in seeds:
        for d_model, num_steps in SCALES:
            fields = {
                "model.d_model": d_model,
                "model.num_heads": d_model // usual.model.head_dim,
                "model.init_std": round(0.02 * (768 / d_model) ** 0.5, 3),
                "num_steps": num_steps,
                "optimizer.warmup_steps": round(0.15 * num_steps),
            }
            if d_model != usual.model.d_model:
                runs += [_usual_run(mixer, f"_d{d_model}", {"seed": seed} | fields) for mixer in SCALED]
    return runs


def _usual_run(mixer: str, what: str, fields: Mapping[str, Any]) -> TextRun:
    """A run with the read of the cube's cells."""
    seed, read = fields["seed"], usual_read(mixer)
    if read == small.get_config(mixer).model.read:
        return TextRun(f"{mixer}{what}_{seed}", mixer, fields)
    return TextRun(f"{mixer}_{read}{what}_{seed}", mixer, {**fields, "model.read": read})


EXPERIMENTS = {
    "cube": cube_runs,
    "reads": read_runs,
    "rotations": rotation_runs,
    "memory": memory_runs,
    "scaling": scaling_runs,
}
WITH_ONE_SEED = ("rotations", "memory", "scaling")


def is_done(run: TextRun, results: epath.Path) -> bool:
    """Whether the results have the record of this very run."""
    if not record_path(results / run.name, EVALUATION).exists():
        return False
    return read_records(results / run.name)[0].config == strict_json.plain(run.config.to_dict())


def carry_out(runs: Sequence[TextRun], *, workdirs: epath.Path, results: epath.Path, jobs: int) -> Iterator[TextRun]:
    """Trains and evaluates runs, several at a time, and yields each when its record is among the results.

    A run that was interrupted goes on where it stopped, if its working directory is still there.

    Args:
        runs: to make.
        workdirs: where each run has its directory, with checkpoints and logs.
        results: where each run has a directory with its record alone.
        jobs: runs at a time; each has its share of the cores.

    Raises:
        RunError: a command failed; what it said is in the file that the message names.
    """
    if any(run.config.data.tokenizer == small.get_config().data.tokenizer for run in runs):
        make_tokenizer()
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(_train_and_evaluate, run, workdirs / run.name, results / run.name, jobs) for run in runs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def make_tokenizer() -> None:
    """Trains the tokenizer of `configs/small.py` if it is not there; always the same of the same Python."""
    config = small.get_config()
    if not (ROOT / config.data.tokenizer).exists():
        flags = ["--corpus=stdlib_text", f"--vocab_size={config.model.vocab_size}", f"--output={config.data.tokenizer}"]
        _command(["-m", "interdomain_jax.data.train_tokenizer", *flags], ROOT / "runs" / "tokenizer.log", jobs=1)


def _train_and_evaluate(run: TextRun, workdir: epath.Path, results: epath.Path, jobs: int) -> TextRun:
    fields = [f"--config.{field}={value}" for field, value in run.fields.items()]
    training = ["train.py", f"--config=configs/small.py:{run.mixer}", *fields, f"--workdir={workdir}"]
    _command(training, workdir / "train.log", jobs)
    if (step := checkpoints.find_step(workdir, "latest")) < run.config.num_steps:
        raise RunError(
            f"{run.name} was asked to stop, and was saved at step {step}; the same command goes on from there"
        )
    lengths = [multiple * run.config.data.sequence_length for multiple in LENGTH_MULTIPLES]
    evaluation = ["eval.py", f"--workdir={workdir}", f"--lengths={','.join(map(str, lengths))}", f"--name={EVALUATION}"]
    _command(evaluation, workdir / "eval.log", jobs)
    record = record_path(results, EVALUATION)
    record.parent.mkdir(parents=True, exist_ok=True)
    record_path(workdir, EVALUATION).copy(record, overwrite=True)
    return run


def _command(arguments: Sequence[str], log: Path, jobs: int) -> None:
    """Runs a program of the repository with its share of the cores, its output in a file."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | {"NPROC": str(threads)},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        raise RunError(f"`{shlex.join(['python', *arguments])}` ended with code {done.returncode}; see {log}")
