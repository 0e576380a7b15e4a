"""What saving costs: updates per second with a checkpoint every so many updates, and without.

    python -m benchmarks.checkpointing
    python -m benchmarks.checkpointing --every=10 --steps=100

Both run the updates of `train.py` on the same batches, in turn; the time ends when the last file is written. A save
holds up training for checksums and copies from the device; the files are written in the background, which on a CPU
takes its share of the cores.
"""

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
from absl import app, flags
from etils import epath
from ml_collections import config_flags
from rich.console import Console
from rich.progress import track

from interdomain_jax import checkpoints as storage
from interdomain_jax import cli, sharding
from interdomain_jax.training import checkpoints as checkpointing
from interdomain_jax.training import loop
from interdomain_jax.training.state import init_state
from interdomain_jax.training.step import StepOutput, lower_train_step

_CONFIG = config_flags.DEFINE_config_file("config", "configs/tiny.py", "The run.")
_EVERY = flags.DEFINE_integer("every", 50, "Updates between two checkpoints.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 200, "Updates of a measurement.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Measurements of each kind.", lower_bound=1)


class Timing(NamedTuple):
    """Seconds of a measurement, and of the pauses in it."""

    seconds: float
    pauses: float


def main(_: list[str]) -> None:
    if _STEPS.value < _EVERY.value:
        sys.exit(f"--steps is {_STEPS.value}; it must be at least --every, {_EVERY.value}, for one checkpoint")
    every_kind: dict[str, list[Timing]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as directory:
        run = loop.prepare(_CONFIG.value, epath.Path(directory) / "run")
        program = lower_train_step(run.config, run.model, run.optimizer, run.mesh).compile()
        for repeat in track(range(_REPEATS.value), console=Console(stderr=True)):
            for kind, timings in every_kind.items():
                workdir = epath.Path(directory) / f"{kind}{repeat}"
                timings.append(_measure(run, program, workdir, saves=kind == "with"))
    without, with_saves = (statistics.median(timing.seconds for timing in each) for each in every_kind.values())
    pause = statistics.median(timing.pauses for timing in every_kind["with"]) / (_STEPS.value // _EVERY.value)
    print(
        f"{_STEPS.value} updates: {without:.2f} s without checkpoints, {with_saves:.2f} s with one every {_EVERY.value}"
    )
    print(f"slower by {with_saves / without - 1:.1%}; a save holds up training for {1e3 * pause:.0f} ms")


def _measure(run: loop.Run, program: Callable[..., StepOutput], workdir: epath.Path, *, saves: bool) -> Timing:
    state = init_state(run.model, run.optimizer, seed=run.config.seed, mesh=run.mesh)
    batches = loop.train_batches(run)
    pauses = 0.0
    with contextlib.closing(batches), storage.open_checkpoints(workdir, keep=2) as checkpoints:
        # The first batch waits for the first documents, and the first checkpoint for its programs.
        next(batches)
        checkpointing.save(checkpoints, state, batches.get_state(), run.config)
        storage.wait_until_saved(checkpoints)
        start = time.perf_counter()
        for step in range(1, _STEPS.value + 1):
            batch = sharding.place_batch(next(batches), run.mesh, run.config.data.batch_size)
            state, _ = jax.block_until_ready(program(state, batch))
            if saves and step % _EVERY.value == 0:
                before = time.perf_counter()
                checkpointing.save(checkpoints, state, batches.get_state(), run.config)
                pauses += time.perf_counter() - before
        storage.wait_until_saved(checkpoints)
        return Timing(time.perf_counter() - start, pauses)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
