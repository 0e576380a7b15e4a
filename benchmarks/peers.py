"""Other fixed-state mixers with a public JAX form, set the same problem: mamba2-jax and mlstm-kernels.

Both update a real state [state_size, head_dim] of each head by one decay for each token and head, and both are given
values, gates and states as wide as ours: for M complex modes and key and value widths R and D, a state_size of
2 M (R + D) / D. Queries and keys (C and B of Mamba-2) are of that width too. Final states are returned, as ours is.

Each mixer comes as a dict of problems, one for each way of running it; the benchmark times the fastest.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cells import PEERS
from benchmarks.timing import Problem

MIXERS = {
    "mamba2": "mamba2-jax, `ssd_forward`: Mamba-2's chunked form, with its step lengths and its skip, at its fastest "
    "chunk size, states as large as ours; no projections, convolution or norm",
    "mlstm": "mlstm-kernels, `mlstm_chunkwise`: the mLSTM's chunked form in plain JAX, with its gates and its "
    "normalizer, likewise; the package's kernels in Triton are for GPUs and not timed",
}
"""The peers of the op, and what they do and do not do."""

# mlstm-kernels writes a step for every chunk into the program: compile times grow with their square, past minutes.
_UNROLLED_CHUNKS = 16
_SEGMENT_CHUNKS = 8


class Sizes(NamedTuple):
    """Sequences of `length` tokens, `heads` states of [state_size, head_dim] reals each."""

    length: int
    heads: int
    head_dim: int
    state_size: int
    batch: int = 1


def exit_if_missing(*packages: str) -> None:
    """Ends the process, in one sentence, if one of these packages, named as in `cells.PEERS`, is not installed."""
    missing = [package for package in packages if importlib.util.find_spec(PEERS[package]) is None]
    if missing:
        sys.exit(f"{', '.join(missing)} must be installed to time the peers (make bench does it); or pass --nopeers.")


def mamba2_problems(rng: np.random.Generator, sizes: Sizes, chunk_sizes: Sequence[int]) -> dict[str, Problem]:
    """Mamba-2's chunked state-space dual form at each chunk size."""
    arguments = mamba2_arguments(rng, sizes)
    return {str(size): Problem(partial(_ssd, size, None), arguments) for size in chunk_sizes}


def mamba2_step(state: jax.Array, arguments: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """One token, as the package's model decodes: its chunked form on one token, here in a chunk of one; state
    [B, H, head_dim, state_size]."""
    out, state = _ssd(1, state[:, None], *arguments)
    return state, out


def mamba2_arguments(rng: np.random.Generator, sizes: Sizes, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    """Random tokens in `dtype`, with step lengths and decays as the package's layer starts."""
    from mamba2_jax import Mamba2Config

    start = Mamba2Config()
    rows = (sizes.batch, sizes.length, sizes.heads)
    x = _normal(rng, *rows, sizes.head_dim).astype(dtype)
    step = _normal(rng, *rows)
    b, c = _normal(rng, 2, *rows, sizes.state_size).astype(dtype)
    slowest, fastest = start.A_initializer_range
    decay = -jnp.asarray(rng.uniform(slowest, fastest, sizes.heads), jnp.float32)
    first_step = np.exp(rng.uniform(np.log(start.time_step_min), np.log(start.time_step_max), sizes.heads))
    step_bias = jnp.asarray(np.log(np.expm1(first_step)), jnp.float32)  # softplus brings the step back
    return x, step, decay, b, c, jnp.ones(sizes.heads), step_bias


def _ssd(chunk_size: int, state: jax.Array | None, *arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
    from mamba2_jax import Mamba2Config, ssd_forward

    x, step, decay, b, c, skip, step_bias = arguments
    limits = Mamba2Config().time_step_limit
    return ssd_forward(x, step, decay, b, c, chunk_size, skip, step_bias, *limits, state, return_final_states=True)


def mlstm_problems(rng: np.random.Generator, sizes: Sizes, chunk_sizes: Sequence[int]) -> dict[str, Problem]:
    """The mLSTM's chunkwise form in plain JAX at each chunk size that divides the length.

    The whole sequence in one call, if its chunks are few enough to compile; and in calls of a few chunks, scanned, each
    starting from the state that the last one returned.
    """
    arguments = mlstm_arguments(rng, sizes)
    mixer = _mlstm_function("chunkwise/native/fw.py", "mlstm_chunkwise")
    problems = {}
    for size in chunk_sizes:
        if sizes.length % size == 0 and sizes.length // size <= _UNROLLED_CHUNKS:
            whole = partial(mixer, chunk_size=size, return_last_states=True)
            problems[str(size)] = Problem(whole, arguments)
        if sizes.length % (_SEGMENT_CHUNKS * size) == 0 and sizes.length > _SEGMENT_CHUNKS * size:
            problems[f"{_SEGMENT_CHUNKS} x {size}"] = Problem(partial(mlstm_by_segments, mixer, size), arguments)
    return problems


def mlstm_arguments(rng: np.random.Generator, sizes: Sizes, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    """Random queries, keys and values in `dtype`; standard normal input gates, forget gates about biases of 3 to 6."""
    rows = (sizes.batch, sizes.heads, sizes.length)
    q, k = _normal(rng, 2, *rows, sizes.state_size).astype(dtype)
    v = _normal(rng, *rows, sizes.head_dim).astype(dtype)
    input_gate, forget_gate = _normal(rng, 2, *rows)
    return q, k, v, input_gate, forget_gate + jnp.linspace(3.0, 6.0, sizes.heads)[:, None]


def mlstm_step(state: tuple[jax.Array, ...], arguments: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
    """One token by the package's recurrent step in plain JAX; state as `mlstm_state` has it."""
    step = _mlstm_function("recurrent/native_step.py", "mlstm_recurrent_step__native")
    q, k, v, input_gate, forget_gate = arguments
    out, state = step(*(x[:, :, 0] for x in (q, k, v)), input_gate, forget_gate, *state)
    return state, out


def mlstm_state(memory: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A memory [B, H, state_size, head_dim] with the normalizer [B, H, state_size] and the level of no token."""
    return memory, jnp.zeros(memory.shape[:3], memory.dtype), jnp.zeros((*memory.shape[:2], 1), memory.dtype)


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


@cache
def _mlstm_function(file: str, name: str) -> Callable[..., Any]:
    """A function of the package, loaded from its file: importing it by name needs Triton and its JAX bindings."""
    package = importlib.util.find_spec("mlstm_kernels")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "jax" / file
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)
