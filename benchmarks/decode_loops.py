"""The steps of `benchmarks.decode` in compiled loops, and their times."""

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import psutil
from rich.console import Console

from benchmarks.cells import Cell
from benchmarks.decode_report import FIRST, Machine
from benchmarks.decode_steps import OURS, STEPS, Layer, carry_shape, inputs_of, keeps_tokens, start
from benchmarks.timing import Case, measure, peak_cases

# A program may take this share of the memory that is free.
_MEMORY_SHARE = 0.5
_MOST_TURNS = 2000
_STEPS_OF_A_TURN = 16
_STREAM_BYTES = 2**28


class Plan(NamedTuple):
    """How cells are timed.

    Attributes:
        layer: whose mixer.
        names: the cases, from `STEPS`.
        first: the prefix that flatness is measured by, tokens.
        dtype: of tokens and caches.
        repeats: timings of each case.
        seconds: about how long a timing takes, unless one step takes longer.
    """

    layer: Layer
    names: Sequence[str]
    first: int
    dtype: Any
    repeats: int
    seconds: float


class Loop(NamedTuple):
    """A compiled loop.

    Attributes:
        run: (carry, inputs, turns) -> (carry, output of the last step).
        steps: in a turn.
        memory: bytes of all it needs.
    """

    run: Callable[..., Any]
    steps: int
    memory: int


@cache
def compile_loop(name: str, layer: Layer, batch: int, prefix: int, dtype: Any) -> Loop:
    """Compiles the loop, of as many turns as it is told; what the case carries stays where it lies."""
    # Of a loop whose length a program does not know, an accelerator asks its host after each turn whether to go on.
    steps = 1 if jax.default_backend() == "cpu" else _STEPS_OF_A_TURN
    step = STEPS[name]
    carry = carry_shape(name, layer, batch, prefix, dtype)
    inputs = inputs_of(name, layer, batch, dtype)

    def run(carry: Any, inputs: Any, turns: Any) -> Any:
        def one(_: Any, both: Any) -> Any:
            # Together behind a barrier, they all seem to change in every step: nothing is worked out ahead of the loop.
            return step(*jax.lax.optimization_barrier((both[0], inputs)))

        out = jax.eval_shape(step, carry, inputs)[1]
        turn = lambda _, both: jax.lax.fori_loop(0, steps, one, both)
        return jax.lax.fori_loop(0, turns, turn, (carry, jnp.zeros(out.shape, out.dtype)))

    turns = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = jax.jit(run, donate_argnums=0).lower(carry, inputs, turns).compile()
    analysis: Any = compiled.memory_analysis()
    memory = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    return Loop(compiled, steps, memory - analysis.alias_size_in_bytes)


class Steps:
    """A loop with what it carries; each call goes on where the last one ended."""

    def __init__(self, loop: Loop, carry: Any, inputs: Any, turns: int = 1) -> None:
        self._loop, self._carry, self._inputs = loop, carry, inputs
        self.turns = turns

    def __call__(self) -> Any:
        self._carry, out = self._loop.run(self._carry, self._inputs, jnp.int32(self.turns))
        return out

    def lengthen(self, seconds: float) -> None:
        """Sets the turns so that they take about so long."""
        jax.block_until_ready(self())
        before = time.perf_counter()
        jax.block_until_ready(self())
        self.turns = min(max(round(seconds / (time.perf_counter() - before)), 1), _MOST_TURNS)


def measure_cell(plan: Plan, batch: int, prefix: int) -> Cell:
    """Times the cases of one batch and prefix in turn."""
    layer, names, first, dtype, repeats, seconds = plan
    cases, counts, memory = {}, {}, {}
    # Next to each other, the two that are to be equal.
    labels = {OURS: (OURS, prefix), FIRST: (OURS, first)} | {name: (name, prefix) for name in names}
    for label, (name, length) in labels.items():
        try:
            loop = compile_loop(name, layer, batch, length if keeps_tokens(name) else 0, dtype)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            # A rival may lack what this device needs; ours may not.
            if name == OURS:
                raise
            Console(stderr=True).print(f"{name} does not compile: {str(error)[:300]}", markup=False)
            continue
        memory[label] = loop.memory
        if loop.memory > _MEMORY_SHARE * free_memory():
            continue
        steps = Steps(loop, start(name, layer, batch, length, dtype), inputs_of(name, layer, batch, dtype))
        steps.lengthen(seconds)
        cases[label] = Case(steps, (), 0)
        counts[label] = steps.turns * loop.steps
    measured = measure(cases, repeats)
    medians = {label: measured[label].seconds / counts[label] for label in cases}
    seconds_by_case = {label: medians.get(label, math.nan) for label in memory}
    return Cell({"batch": batch, "prefix": prefix}, seconds_by_case, memory)


def free_memory() -> int:
    """Bytes, of the first device."""
    stats = jax.devices()[0].memory_stats()
    if not stats:
        return psutil.virtual_memory().available
    return stats["bytes_limit"] - stats["bytes_in_use"]


def measure_machine(plan: Plan) -> Machine:
    """What the machine does at most, and what starting a loop of steps costs."""
    layer, dtype = plan.layer, plan.dtype
    negate = jax.jit(jnp.negative, donate_argnums=0)
    stream = jnp.ones(_STREAM_BYTES // 4)

    def turn() -> Any:
        nonlocal stream
        stream = negate(stream)
        return stream

    carry, inputs = start(OURS, layer, 1, 1, dtype), inputs_of(OURS, layer, 1, dtype)
    nothing = Steps(compile_loop(OURS, layer, 1, 0, dtype), carry, inputs, turns=0)
    products = {str(size): case for size, case in peak_cases().items()}
    measured = measure({"stream": Case(turn, (), 0), "nothing": Case(nothing, (), 0), **products}, plan.repeats)
    return Machine(
        2 * _STREAM_BYTES / measured["stream"].seconds,
        max(2 * int(size) ** 3 / measured[size].seconds for size in products),
        measured["nothing"].seconds,
    )
