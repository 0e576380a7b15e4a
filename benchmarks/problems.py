"""The op on random inputs, as the benchmarks time it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Problem
from interdomain_jax.array_types import Complex
from interdomain_jax.ops import Dynamics, discretize, interdomain_attention, s4d_inv
from pallas_kernels.tables import token_flops


def random_inputs(
    rng: np.random.Generator, length: int, heads: int, head_dim: int, state_dim: int
) -> tuple[jax.Array, jax.Array, jax.Array, Dynamics]:
    """q, k, v [1, T, H, head_dim] and the dynamics that a layer starts with; float32."""
    eigenvalues = s4d_inv(state_dim)
    readout = (2 * state_dim) ** -0.5 * rng.normal(size=(2, heads, state_dim, state_dim))
    dynamics = discretize(
        jnp.asarray(rng.uniform(math.log(1e-3), math.log(1e-1), heads), jnp.float32),
        jnp.broadcast_to(jnp.asarray(np.log(-eigenvalues.real), jnp.float32), (heads, state_dim)),
        jnp.broadcast_to(jnp.asarray(eigenvalues.imag, jnp.float32), (heads, state_dim)),
        Complex(*jnp.asarray(readout, jnp.float32)),
    )
    q, k, v = jnp.asarray(rng.normal(size=(3, 1, length, heads, head_dim)), jnp.float32)
    return q, k, v, dynamics


def chunked_problem(inputs: tuple[Any, ...], chunk_size: int | None) -> Problem:
    """The op's chunked form, at its default chunk size if None."""
    return Problem(lambda *inputs: interdomain_attention(*inputs, chunk_size=chunk_size, implementation="xla"), inputs)


def forward_flops(tokens: int, heads: int, head_dim: int, state_dim: int, chunk_size: int) -> int:
    """Additions and multiplications in the chunked form's products, forward, each head with a state of its own."""
    return tokens * token_flops(
        heads=heads,
        kv_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        state_dim=state_dim,
        chunk_size=chunk_size,
    )
