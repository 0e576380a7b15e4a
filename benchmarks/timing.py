"""Compiled cases, and their median times and memory, measured in turn."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import psutil

# A program may take this share of the memory that is free when it is about to run: on a CPU its products need scratch
# memory on top of what the program is known to allocate.
_MEMORY_SHARE = 0.5
# A case is not called again once its timed calls have taken this long.
_SECONDS_PER_CASE = 10.0
_LARGE_MEMORY = 2**30
_SETTLING_SECONDS = 1.0
_PEAK_SIZES = (512, 1024, 2048)

Name = TypeVar("Name")


class Problem(NamedTuple):
    """A function of arrays, with its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Case(NamedTuple):
    """A compiled program with its arguments, and the bytes of its temporaries and outputs."""

    compiled: Any
    arguments: tuple[Any, ...]
    memory: int


class Measurement(NamedTuple):
    """Median seconds of a call, NaN if it did not fit, and bytes it allocates."""

    seconds: float
    memory: int


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function's outputs together with the gradients of its arguments for given cotangents."""

    def run(arguments: tuple[Any, ...], cotangents: Any) -> Any:
        outputs, pull_back = jax.vjp(function, *arguments)
        return outputs, pull_back(cotangents)

    return run


def gradient_problem(problem: Problem) -> Problem:
    """The outputs and the gradients of every argument, for standard normal cotangents of every output."""
    rng = np.random.default_rng(1)
    cotangents = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype),
        jax.eval_shape(problem.function, *problem.arguments),
    )
    return Problem(with_gradients(problem.function), (problem.arguments, cotangents))


def compile_case(problem: Problem) -> Case:
    """Compiles the function for the arguments, and reads what the program allocates."""
    compiled = jax.jit(problem.function).lower(*problem.arguments).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return Case(compiled, problem.arguments, analysis.temp_size_in_bytes + analysis.output_size_in_bytes)


def measure(cases: Mapping[Name, Case], repeats: int) -> dict[Name, Measurement]:
    """Runs the cases in turn, at most `repeats` times, leaving out those that do not fit the free memory."""
    seconds = run_in_turn(cases, repeats)
    return {
        name: Measurement(float(np.median(seconds[name])) if name in seconds else math.nan, case.memory)
        for name, case in cases.items()
    }


def run_in_turn(
    cases: Mapping[Name, Case], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[Name, list[float]]:
    """The seconds of each call, at most `repeats` of each case; a case that does not fit the free memory has no entry.

    The clock may be that of the process, which stands still while others have the cores. Each timed call follows an
    untimed one of the same program, and a second of them behind a case that took gigabytes: a system that is still
    giving them back slows its neighbours.
    """
    free = psutil.virtual_memory().available
    seconds: dict[Name, list[float]] = {name: [] for name, case in cases.items() if case.memory < _MEMORY_SHARE * free}
    memory_before = 0
    for _ in range(repeats):
        for name, times in seconds.items():
            if sum(times) > _SECONDS_PER_CASE:
                continue
            settled = _run_seconds(cases[name], clock)
            while memory_before > _LARGE_MEMORY and settled < _SETTLING_SECONDS:
                settled += _run_seconds(cases[name], clock)
            times.append(_run_seconds(cases[name], clock))
            memory_before = cases[name].memory
    return seconds


def _run_seconds(case: Case, clock: Callable[[], float]) -> float:
    start = clock()
    jax.block_until_ready(case.compiled(*case.arguments))
    return clock() - start


def fastest(cases: Mapping[str, Case]) -> str:
    """The name of the case with the least time in a short measurement."""
    seconds = {name: result.seconds for name, result in measure(cases, repeats=3).items()}
    return min(seconds, key=lambda name: math.inf if math.isnan(seconds[name]) else seconds[name])


def peak_cases() -> dict[int, Case]:
    """Square float32 products, by size; the fastest of them stands for what the machine can do."""
    square = jnp.asarray(np.random.default_rng(0).normal(size=(max(_PEAK_SIZES),) * 2), jnp.float32)
    return {size: compile_case(Problem(jnp.matmul, (square[:size, :size],) * 2)) for size in _PEAK_SIZES}
