"""The reference: one token at a time (paper, section 2, steps 6-8).

The op takes single tokens this way; loops of them have `decoding.py`.

Even here the coefficients U = C X_k and Gamma = C X_v are never formed: by associativity the read
xi(q)^T U^T Gamma is (C^T C X_k q)^T X_v, which costs O(M (R + D) + M^2) a token instead of O(M^2 (R + D)).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from interdomain_jax.array_types import Channels, Keys, Output, Queries, State, Values
from interdomain_jax.ops.dynamics import (
    Dynamics,
    Read,
    complex_multiply,
    contraction_weights,
    lambda_powers,
    read_factors,
)
from interdomain_jax.ops.packing import Packing


def interdomain_sequential(
    q: Queries, k: Keys, v: Values, dynamics: Dynamics, initial_state: State, packing: Packing | None, read: Read
) -> tuple[Output, State]:
    """`interdomain_attention` by a scan over tokens; arguments already validated."""
    batch, length, heads, width = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], width)
    readout, scale = read_factors(dynamics, read)

    def read_state(state: State, query: Array) -> Array:
        modes = state.reshape(*state.shape[:2], -1, state.shape[-1])
        y = jnp.einsum("bhgr,bhmr->bhgm", query, modes[..., :width], precision="highest")
        coefficients = jnp.einsum("bhgm,hcm->bhgc", y, readout, precision="highest") * scale[:, None]
        w = jnp.einsum("bhgc,hcm->bhgm", coefficients, readout, precision="highest")
        return jnp.einsum("bhgm,bhmd->bhgd", w, modes[..., width:], precision="highest")

    out, state = _scan(read_state, grouped, jnp.concatenate([k, v], axis=-1), dynamics, initial_state, packing)
    return out.reshape(batch, length, heads, v.shape[-1]).astype(v.dtype), state


def linear_sequential(
    z: Channels, dynamics: Dynamics, initial_state: State, packing: Packing | None
) -> tuple[Channels, State]:
    """`linear_contraction` by a scan over tokens; arguments already validated."""
    weights = contraction_weights(dynamics)

    def read_state(state: State, _: None) -> Array:
        return jnp.einsum("hpm,bhpmc->bhc", weights, state, precision="highest")

    out, state = _scan(read_state, None, z, dynamics, initial_state, packing)
    return out.astype(z.dtype), state


def _scan(
    read_state: Callable[..., Array],
    queries: Array | None,
    z: Channels,
    dynamics: Dynamics,
    state: State,
    packing: Packing | None,
) -> tuple[Array, State]:
    """x <- lambda x + b z, then `read_state(x, query)`, for each token; the reads [B, T, ...] and the last x."""
    decay = lambda_powers(dynamics.log_decay, dynamics.angle, jnp.ones(1, jnp.int32))[:, 0, :, :, None]
    weight = jnp.stack(dynamics.input_weight, axis=1)[..., None]

    def step(state: State, token: tuple[Array | None, Array, Packing | None]) -> tuple[State, Array]:
        query, channels, packing = token
        before = state if packing is None else jnp.where(_over_state(packing.starts), 0, state)
        after = complex_multiply(before, decay, axis=-3) + weight * channels[:, :, None, None, :]
        state = after if packing is None else jnp.where(_over_state(packing.real), after, state)
        return state, read_state(state, query)

    queries, z = jax.tree.map(lambda x: x.astype(state.dtype), (queries, z))
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (queries, z, packing))
    state, out = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def _over_state(rows: Array) -> Array:
    return rows[:, None, None, None, None]
