"""A gate against regressions of speed: a few ratios of times, measured in turn, against the bounds in `gate.json`.

    python -m benchmarks.gate
    python -m benchmarks.gate --implementation=sequential
    python -m benchmarks.gate --calibrate=10

Each ratio is that of our time to the time of something else in the same process: the matrix products that ours needs,
softmax attention, or another form of the same computation. So a slower machine is no regression. Times are medians of
several calls in turn, in seconds of the processor, which other work on the machine hardly changes: with the two cores
shared with six other busy processes, times by the clock went up and down threefold and these ratios by a fifth. What
they do not show is work that no longer runs on all cores. A ratio that is above its bound is measured again, and fails
if it is above it every time.

`--implementation` puts another implementation of the op in place of the default: the gate must then fail. `--calibrate`
measures several times and writes `gate.json`: of each ratio the median, the range, and as its bound a multiple of the
median.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Column, Table

from benchmarks.bare_matmuls import bare_problem, extract
from benchmarks.decode_loops import Steps, compile_loop
from benchmarks.decode_steps import OURS, Layer, inputs_of, start
from benchmarks.problems import chunked_problem, random_inputs
from benchmarks.timing import Case, Problem, compile_case, gradient_problem, run_in_turn
from benchmarks.train_steps import random_batch, step_case
from configs import tiny
from interdomain_jax import strict_json
from interdomain_jax.evaluation.records import machine
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.ops import interdomain_attention
from interdomain_jax.training.step import loss_and_gradient

_BOUNDS = flags.DEFINE_string("bounds", str(Path(__file__).parent / "gate.json"), "The file of bounds.")
_IMPLEMENTATION = flags.DEFINE_enum(
    "implementation", None, ["sequential", "associative", "fft"], "Of the op, in place of the default."
)
_CALIBRATE = flags.DEFINE_integer("calibrate", None, "Measures so many times, and writes the bounds.", lower_bound=3)

# A regression by this factor is to fail: twice what the ratios go up and down by.
_MARGIN = 1.5
_TRIES = 3
_REPEATS = 5

_HEADS, _HEAD_DIM, _STATE_DIM = 4, 64, 64
_LENGTH = 4096
_DECODE_BATCH = 8
_PREFIXES = (512, 65_536)
_DECODE_STEPS = 200


class Ratio(NamedTuple):
    """The time of one case in units of another's."""

    ours: str
    unit: str

    @property
    def name(self) -> str:
        """As the file of bounds has it."""
        return f"{self.ours} / {self.unit}"


RATIOS = (
    Ratio("op, forward", "its bare products"),
    Ratio("op, fwd + bwd", "their bare products"),
    Ratio("op, forward", "softmax"),
    Ratio("op, forward", "token by token"),
    Ratio("decode", "decode at the first prefix"),
    Ratio("decode", "decode as the paper"),
    Ratio("training step", "its bare products, in training"),
)


def op_cases(implementation: Any) -> dict[str, Case]:
    """The op, and what it is measured by, on one sequence."""
    inputs = random_inputs(np.random.default_rng(0), _LENGTH, _HEADS, _HEAD_DIM, _STATE_DIM)
    op = Problem(partial(interdomain_attention, implementation=implementation), inputs)
    default = chunked_problem(inputs, None)
    bare = lambda problem: bare_problem(extract(problem.function, *problem.arguments))
    softmax = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    problems = {
        "op, forward": op,
        "its bare products": bare(default),
        "op, fwd + bwd": gradient_problem(op),
        "their bare products": bare(gradient_problem(default)),
        "softmax": Problem(softmax, inputs[:3]),
        "token by token": Problem(partial(interdomain_attention, implementation="sequential"), inputs),
    }
    return {name: compile_case(problem) for name, problem in problems.items()}


def decode_cases(implementation: Any) -> dict[str, Case]:
    """A step of decoding behind few tokens and behind many, and the paper's form of it."""
    layer, ours = Layer(_HEADS, _HEAD_DIM, _STATE_DIM), OURS if implementation is None else "op"
    labels = {
        "decode": (ours, _PREFIXES[1]),
        "decode at the first prefix": (ours, _PREFIXES[0]),
        "decode as the paper": ("paper", _PREFIXES[0]),
    }
    cases = {}
    for label, (name, prefix) in labels.items():
        size = (name, layer, _DECODE_BATCH)
        loop = compile_loop(*size, 0, jnp.float32)
        carry, inputs = start(*size, prefix, jnp.float32), inputs_of(*size, jnp.float32)
        cases[label] = Case(Steps(loop, carry, inputs, _DECODE_STEPS // loop.steps), (), 0)
    return cases


def training_cases(implementation: Any) -> dict[str, Case]:
    """An update of the demo's model, and the products of its loss and gradient."""
    config = tiny.get_config()
    model = Decoder(**config.model)
    batch = {name: jnp.asarray(array) for name, array in random_batch(config).items()}
    params = jax.jit(model.init)(jax.random.key(0), batch["inputs"][:1, :1])["params"]
    loss = partial(
        loss_and_gradient, model, accumulation_steps=config.accumulation_steps, vocab_chunks=config.vocab_chunks
    )
    bare = bare_problem(extract(loss, params, batch))
    with config.unlocked():
        config.model.implementation = implementation
    return {"training step": step_case(config), "its bare products, in training": compile_case(bare)}


def measure(cases: Mapping[str, Case], ratios: Sequence[Ratio]) -> dict[Ratio, float]:
    """Each ratio, of the median processor times of calls in turn."""
    needed = {name: cases[name] for ratio in ratios for name in ratio}
    times = run_in_turn(needed, _REPEATS, time.process_time)
    seconds = {name: statistics.median(each) for name, each in times.items()}
    return {ratio: seconds[ratio.ours] / seconds[ratio.unit] for ratio in ratios}


def judge(
    bounds: Mapping[str, float], measure: Callable[[Sequence[Ratio]], Mapping[Ratio, float]]
) -> dict[Ratio, list[float]]:
    """What was measured of each ratio: once, and again as long as it is above its bound, up to `_TRIES` times."""
    tries: dict[Ratio, list[float]] = {ratio: [] for ratio in RATIOS}
    left: list[Ratio] = list(RATIOS)
    for _ in range(_TRIES):
        for ratio, value in measure(left).items():
            tries[ratio].append(value)
        left = [ratio for ratio in left if tries[ratio][-1] > bounds[ratio.name]]
        if not left:
            break
    return tries


def main(_: list[str]) -> None:
    """Passes, or ends with exit code 1; or writes the bounds."""
    started = time.monotonic()
    made = [make(_IMPLEMENTATION.value) for make in (op_cases, decode_cases, training_cases)]
    cases = {name: case for part in made for name, case in part.items()}
    if _CALIBRATE.value:
        runs = [measure(cases, RATIOS) for _ in range(_CALIBRATE.value)]
        strict_json.write(_BOUNDS.value, calibration(runs))
        return
    bounds = {name: each["bound"] for name, each in json.loads(Path(_BOUNDS.value).read_text())["ratios"].items()}
    tries = judge(bounds, lambda ratios: measure(cases, ratios))
    table = Table("ratio of times", Column("measured", justify="right"), Column("at most", justify="right"))
    for ratio, values in tries.items():
        table.add_row(ratio.name, ", ".join(f"{value:.3f}" for value in values), f"{bounds[ratio.name]:.3f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    slow = [ratio.name for ratio, values in tries.items() if values[-1] > bounds[ratio.name]]
    print(f"{time.monotonic() - started:.0f} s")
    if slow:
        sys.exit(f"slower than the bounds allow, {_TRIES} times in a row: {'; '.join(slow)}")


def calibration(runs: Sequence[Mapping[Ratio, float]]) -> dict[str, Any]:
    """The content of the file of bounds."""
    ratios = {}
    for ratio in RATIOS:
        values = sorted(run[ratio] for run in runs)
        median = statistics.median(values)
        ratios[ratio.name] = {"bound": _MARGIN * median, "median": median, "least": values[0], "most": values[-1]}
    return {"machine": machine(), "measurements": len(runs), "margin": _MARGIN, "ratios": ratios}


if __name__ == "__main__":
    app.run(main)
