"""Time and memory of the op against softmax attention, on this machine, in one run.

    python benchmarks/mixer.py
    python benchmarks/mixer.py --lengths=1024,4096 --repeats=3

Cases:
    chunked     interdomain_attention, the chunked form in plain XLA (the default)
    sequential  interdomain_attention token by token, U and Gamma never formed
    paper       token by token as the paper writes it: U = C X_k and Gamma = C X_v formed for every token
    softmax     jax.nn.dot_product_attention, causal

Each is timed forward, and forward with the gradients of every input for random cotangents. The cases are interleaved
and medians reported, for a machine is rarely alone; the ratios are what to read. Memory is what the compiled program
allocates: its temporaries and its outputs.
"""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from absl import app, flags
from rich.console import Console
from rich.table import Column, Table

from interdomain_jax.array_types import Complex
from interdomain_jax.ops import Dynamics, discretize, interdomain_attention, s4d_inv

_LENGTHS = flags.DEFINE_list("lengths", ["1024", "4096", "16384"], "Tokens of a sequence.")
_HEADS = flags.DEFINE_integer("heads", 4, "Heads.")
_HEAD_DIM = flags.DEFINE_integer("head_dim", 64, "Width of a head's queries, keys and values.")
_STATE_DIM = flags.DEFINE_integer("state_dim", 64, "Complex modes of a state.")
_CHUNK_SIZE = flags.DEFINE_integer("chunk_size", None, "Tokens in a chunk; the op's default if not given.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed calls of each case.")

# A program may take this share of the memory that is free when it is about to run.
_MEMORY_SHARE = 0.8


class Case(NamedTuple):
    """A compiled program with its arguments."""

    compiled: Any
    arguments: tuple[Any, ...]
    memory: int


class Measurement(NamedTuple):
    """Median seconds of a call, and bytes it allocates; no seconds if it did not fit."""

    seconds: float
    memory: int


def paper_form(q: jax.Array, k: jax.Array, v: jax.Array, dynamics: Dynamics) -> jax.Array:
    """The op as written in the paper: U and Gamma of every token, then Re(q^T U^T Gamma), [B, T, H, D]."""
    decay = jnp.exp(jax.lax.complex(dynamics.log_decay, dynamics.angle))[..., None]
    weight, readout = (jax.lax.complex(*pair) for pair in (dynamics.input_weight, dynamics.readout))
    width = k.shape[-1]

    def step(state: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        query, z = token
        state = decay * state + weight[..., None] * z[:, :, None]
        coefficients = jnp.einsum("hcm,bhmz->bhcz", readout, state)
        u, gamma = coefficients[..., :width], coefficients[..., width:]
        return state, jnp.einsum("bhr,bhmr,bhmd->bhd", query, u, gamma).real

    z = jnp.concatenate([k, v], axis=-1)
    start = jnp.zeros((k.shape[0], *weight.shape, z.shape[-1]), weight.dtype)
    _, out = jax.lax.scan(step, start, (q.swapaxes(0, 1), z.swapaxes(0, 1)))
    return out.swapaxes(0, 1)


def operations() -> dict[str, Callable[..., Any]]:
    """Each case as a function of (q, k, v, dynamics); softmax has no dynamics."""
    return {
        "chunked": lambda q, k, v, dynamics: interdomain_attention(
            q, k, v, dynamics, chunk_size=_CHUNK_SIZE.value, implementation="xla"
        ),
        "sequential": lambda q, k, v, dynamics: interdomain_attention(q, k, v, dynamics, implementation="sequential"),
        "paper": paper_form,
        "softmax": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
    }


def random_inputs(rng: np.random.Generator, length: int) -> tuple[Any, ...]:
    """q, k, v [1, T, H, head_dim] and the dynamics that a layer starts with; float32."""
    heads, width, modes = _HEADS.value, _HEAD_DIM.value, _STATE_DIM.value
    eigenvalues = s4d_inv(modes)
    readout = (2 * modes) ** -0.5 * rng.normal(size=(2, heads, modes, modes))
    dynamics = discretize(
        jnp.asarray(rng.uniform(math.log(1e-3), math.log(1e-1), heads), jnp.float32),
        jnp.broadcast_to(jnp.asarray(np.log(-eigenvalues.real), jnp.float32), (heads, modes)),
        jnp.broadcast_to(jnp.asarray(eigenvalues.imag, jnp.float32), (heads, modes)),
        Complex(*jnp.asarray(readout, jnp.float32)),
    )
    q, k, v = jnp.asarray(rng.normal(size=(3, 1, length, heads, width)), jnp.float32)
    return q, k, v, dynamics


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function's outputs together with the gradients of its arguments for given cotangents."""

    def run(arguments: tuple[Any, ...], cotangents: Any) -> Any:
        outputs, pull_back = jax.vjp(function, *arguments)
        return outputs, pull_back(cotangents)

    return run


def compile_case(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Case:
    """Compiles the function for the arguments, and reads what the program allocates."""
    compiled = jax.jit(function).lower(*arguments).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return Case(compiled, arguments, analysis.temp_size_in_bytes + analysis.output_size_in_bytes)


def measure(cases: dict[str, Case], repeats: int) -> dict[str, Measurement]:
    """Runs the cases in turn, `repeats` times, leaving out those that do not fit the free memory.

    Each timed call follows an untimed one of the same program, which takes up what the case before it left behind: a
    system that is still giving gigabytes back slows its neighbours.
    """
    free = psutil.virtual_memory().available
    seconds: dict[str, list[float]] = {name: [] for name, case in cases.items() if case.memory < _MEMORY_SHARE * free}
    for _ in range(repeats):
        for name, times in seconds.items():
            for _ in range(2):
                start = time.perf_counter()
                jax.block_until_ready(cases[name].compiled(*cases[name].arguments))
                elapsed = time.perf_counter() - start
            times.append(elapsed)
    medians = {name: float(np.median(times)) for name, times in seconds.items()}
    return {name: Measurement(medians.get(name, math.nan), case.memory) for name, case in cases.items()}


def measure_length(length: int) -> dict[str, dict[str, Measurement]]:
    """The measurements of every case, by pass and name, at one sequence length."""
    rng = np.random.default_rng(0)
    inputs = random_inputs(rng, length)
    forward, both = {}, {}
    for name, function in operations().items():
        arguments = inputs[:3] if name == "softmax" else inputs
        forward[name] = compile_case(function, arguments)
        cotangents = jax.tree.map(
            lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), jax.eval_shape(function, *arguments)
        )
        both[name] = compile_case(with_gradients(function), (arguments, cotangents))
    return {
        "forward": measure(forward, _REPEATS.value),
        "fwd + bwd": measure(both, _REPEATS.value),
    }


def main(_: list[str]) -> None:
    """Measures every length and prints one table, and how the chunked form's time grows with the length."""
    console = Console()
    table = Table(
        Column("tokens", justify="right"),
        "pass",
        "case",
        *(Column(header, justify="right") for header in ("ms", "MB", "of chunked")),
        title=f"{_HEADS.value} heads of {_HEAD_DIM.value}, {_STATE_DIM.value} modes, float32, "
        f"{psutil.cpu_count()} cores ({jax.devices()[0].device_kind}), jax {jax.__version__}",
    )
    chunked: dict[str, list[tuple[int, float]]] = {}
    for length in map(int, _LENGTHS.value):
        for direction, results in measure_length(length).items():
            reference = results["chunked"].seconds
            chunked.setdefault(direction, []).append((length, reference))
            for name, result in results.items():
                fits = not math.isnan(result.seconds)
                table.add_row(
                    f"{length:,}",
                    direction,
                    name,
                    f"{result.seconds * 1e3:,.1f}" if fits else "does not fit",
                    f"{result.memory / 1e6:,.0f}",
                    f"{result.seconds / reference:.1f}" if fits else "",
                )
            table.add_section()
    console.print(table)
    for direction, points in chunked.items():
        for (short, before), (long, after) in itertools.pairwise(points):
            console.print(f"chunked, {direction}: {long:,} tokens take {after / before:.2f} times {short:,}")


if __name__ == "__main__":
    app.run(main)
