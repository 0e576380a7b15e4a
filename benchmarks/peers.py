"""Other fixed-state mixers with a public JAX form, set the same problem: mamba2-jax and mlstm-kernels.

Both update a real state [state_size, head_dim] of each head by one decay for each token and head, and both are given
values, gates and states as wide as ours: for M complex modes and key and value widths R and D, a state_size of
2 M (R + D) / D. Queries and keys (C and B of Mamba-2) are of that width too. Final states are returned, as ours is.

Each mixer comes as a dict of problems, one for each way of running it; the benchmark times the fastest.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Problem

# mlstm-kernels writes a step for every chunk into the program: compile times grow with their square, past minutes.
_UNROLLED_CHUNKS = 16
_SEGMENT_CHUNKS = 8


class Sizes(NamedTuple):
    """One sequence of `length` tokens, `heads` states of [state_size, head_dim] reals."""

    length: int
    heads: int
    head_dim: int
    state_size: int


def missing_packages() -> list[str]:
    """The packages of the peers that are not installed."""
    modules = {"mamba2-jax": "mamba2_jax", "mlstm-kernels": "mlstm_kernels", "einops": "einops"}
    return [package for package, module in modules.items() if importlib.util.find_spec(module) is None]


def mamba2_problems(rng: np.random.Generator, sizes: Sizes, chunk_sizes: Sequence[int]) -> dict[str, Problem]:
    """Mamba-2's chunked state-space dual form at each chunk size, with step lengths and decays as its layer starts."""
    from mamba2_jax import Mamba2Config, ssd_forward

    start = Mamba2Config()
    x = _normal(rng, 1, sizes.length, sizes.heads, sizes.head_dim)
    step = _normal(rng, 1, sizes.length, sizes.heads)
    b, c = _normal(rng, 2, 1, sizes.length, sizes.heads, sizes.state_size)
    slowest, fastest = start.A_initializer_range
    decay = -jnp.asarray(rng.uniform(slowest, fastest, sizes.heads), jnp.float32)
    first_step = np.exp(rng.uniform(np.log(start.time_step_min), np.log(start.time_step_max), sizes.heads))
    step_bias = jnp.asarray(np.log(np.expm1(first_step)), jnp.float32)  # softplus brings the step back
    skip = jnp.ones(sizes.heads)

    def run(chunk_size: int, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, step, decay, b, c, skip, step_bias = arrays
        limits = start.time_step_limit
        return ssd_forward(x, step, decay, b, c, chunk_size, skip, step_bias, *limits, return_final_states=True)

    arguments = (x, step, decay, b, c, skip, step_bias)
    return {str(size): Problem(partial(run, size), arguments) for size in chunk_sizes}


def mlstm_problems(rng: np.random.Generator, sizes: Sizes, chunk_sizes: Sequence[int]) -> dict[str, Problem]:
    """The mLSTM's chunkwise form in plain JAX at each chunk size that divides the length.

    The whole sequence in one call, if its chunks are few enough to compile; and in calls of a few chunks, scanned, each
    starting from the state that the last one returned. Input gates are standard normal, forget gates likewise about
    biases from 3 to 6.
    """
    q, k = _normal(rng, 2, 1, sizes.heads, sizes.length, sizes.state_size)
    v = _normal(rng, 1, sizes.heads, sizes.length, sizes.head_dim)
    input_gate, forget_gate = _normal(rng, 2, 1, sizes.heads, sizes.length)
    arguments = (q, k, v, input_gate, forget_gate + jnp.linspace(3.0, 6.0, sizes.heads)[:, None])

    mixer = _mlstm_chunkwise()
    problems = {}
    for size in chunk_sizes:
        if sizes.length % size == 0 and sizes.length // size <= _UNROLLED_CHUNKS:
            whole = partial(mixer, chunk_size=size, return_last_states=True)
            problems[str(size)] = Problem(whole, arguments)
        if sizes.length % (_SEGMENT_CHUNKS * size) == 0 and sizes.length > _SEGMENT_CHUNKS * size:
            problems[f"{_SEGMENT_CHUNKS} x {size}"] = Problem(partial(mlstm_by_segments, mixer, size), arguments)
    return problems


def mlstm_by_segments(mixer: Callable[..., Any], chunk_size: int, *tokens: jax.Array) -> tuple[jax.Array, Any]:
    """The mixer's output and last state, a few chunks to a call; the length is a multiple of a segment's."""
    q, _, v, *_ = tokens
    segment = _SEGMENT_CHUNKS * chunk_size
    split = lambda x: jnp.moveaxis(x.reshape(*x.shape[:2], -1, segment, *x.shape[3:]), 2, 0)

    def step(state: tuple[jax.Array, ...], tokens: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], jax.Array]:
        out, state = mixer(*tokens, *state, chunk_size=chunk_size, return_last_states=True)
        return state, out

    shapes = ((q.shape[3], v.shape[3]), (q.shape[3],), ())
    start = tuple(jnp.zeros((*q.shape[:2], *shape), q.dtype) for shape in shapes)
    state, out = jax.lax.scan(step, start, tuple(map(split, tokens)))
    return jnp.moveaxis(out, 0, 2).reshape(v.shape), state


def _mlstm_chunkwise() -> Callable[..., Any]:
    """The package's function, loaded from its file: importing it by name needs Triton and its JAX bindings."""
    package = importlib.util.find_spec("mlstm_kernels")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "jax" / "chunkwise" / "native" / "fw.py"
    specification = importlib.util.spec_from_file_location("mlstm_chunkwise_native", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    chunkwise: Callable[..., Any] = module.mlstm_chunkwise
    return chunkwise


def _normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)
