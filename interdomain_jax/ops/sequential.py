"""The reference: one token at a time. Its step is also what decodes.

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


def interdomain_sequential(
    q: Queries, k: Keys, v: Values, dynamics: Dynamics, initial_state: State, read: Read
) -> tuple[Output, State]:
    """`interdomain_attention` by a scan over tokens; arguments already validated."""
    batch, _, heads, width = q.shape
    groups = heads // k.shape[2]
    dtype = initial_state.dtype
    grouped = q.reshape(*q.shape[:2], k.shape[2], groups, width)
    advance = _update(dynamics)
    readout, scale = read_factors(dynamics, read)

    def step(state: State, token: tuple[Array, Array]) -> tuple[State, Array]:
        query, channels = token
        state = advance(state, channels)
        modes = state.reshape(*state.shape[:2], -1, state.shape[-1])
        y = jnp.einsum("bhgr,bhmr->bhgm", query, modes[..., :width], precision="highest")
        coefficients = jnp.einsum("bhgm,hcm->bhgc", y, readout, precision="highest") * scale[:, None]
        w = jnp.einsum("bhgc,hcm->bhgm", coefficients, readout, precision="highest")
        return state, jnp.einsum("bhgm,bhmd->bhgd", w, modes[..., width:], precision="highest")

    tokens = (_by_token(grouped, dtype), _by_token(jnp.concatenate([k, v], axis=-1), dtype))
    final_state, out = jax.lax.scan(step, initial_state, tokens)
    return jnp.moveaxis(out, 0, 1).reshape(batch, -1, heads, v.shape[-1]).astype(v.dtype), final_state


def linear_sequential(z: Channels, dynamics: Dynamics, initial_state: State) -> tuple[Channels, State]:
    """`linear_contraction` by a scan over tokens; arguments already validated."""
    advance = _update(dynamics)
    weights = contraction_weights(dynamics)

    def step(state: State, channels: Array) -> tuple[State, Array]:
        state = advance(state, channels)
        return state, jnp.einsum("hpm,bhpmc->bhc", weights, state, precision="highest")

    final_state, out = jax.lax.scan(step, initial_state, _by_token(z, initial_state.dtype))
    return jnp.moveaxis(out, 0, 1).astype(z.dtype), final_state


def _update(dynamics: Dynamics) -> Callable[[State, Array], State]:
    """The recurrence x <- lambda x + b z as a function of the state and the channels z [B, Hkv, C]."""
    decay = lambda_powers(dynamics.log_decay, dynamics.angle, jnp.ones(1))[:, 0, :, :, None]
    weight = jnp.stack(dynamics.input_weight, axis=1)[..., None]
    return lambda state, z: complex_multiply(state, decay, axis=-3) + weight * z[:, :, None, None, :]


def _by_token(x: Array, dtype: jnp.dtype) -> Array:
    return jnp.moveaxis(x, 1, 0).astype(dtype)
