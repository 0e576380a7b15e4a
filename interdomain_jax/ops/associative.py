"""The recurrence by `jax.lax.associative_scan` over tokens: logarithmic depth, every state held in memory at once.

That a recurrence is a scan is known from prefix sums (Blelloch, 1990). A run of tokens is summed up by the number of
steps it takes, whether a document starts in it, and what it adds to the state; a run followed by another is again one.
The decay of a run is looked up by its number of steps, not multiplied up from decays, so that its phase stays exact.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from interdomain_jax.array_types import Channels, Keys, Output, Queries, State, Values
from interdomain_jax.ops.dynamics import (
    Dynamics,
    Read,
    complex_multiply,
    contraction_weights,
    lambda_powers,
    read_matrix,
)
from interdomain_jax.ops.packing import Packing


def interdomain_associative(
    q: Queries, k: Keys, v: Values, dynamics: Dynamics, initial_state: State, packing: Packing | None, read: Read
) -> tuple[Output, State]:
    """`interdomain_attention` by an associative scan; arguments already validated."""
    batch, length, heads, width = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], width).astype(initial_state.dtype)
    states = _all_states(jnp.concatenate([k, v], axis=-1), dynamics, initial_state, packing)
    modes = states.reshape(*states.shape[:3], -1, states.shape[-1])
    y = jnp.einsum("bthgr,tbhmr->tbhgm", grouped, modes[..., :width], precision="highest")
    w = jnp.einsum("tbhgm,hmp->tbhgp", y, read_matrix(dynamics, read), precision="highest")
    out = jnp.einsum("tbhgm,tbhmd->bthgd", w, modes[..., width:], precision="highest")
    return out.reshape(batch, length, heads, -1).astype(v.dtype), states[-1]


def linear_associative(
    z: Channels, dynamics: Dynamics, initial_state: State, packing: Packing | None
) -> tuple[Channels, State]:
    """`linear_contraction` by an associative scan; arguments already validated."""
    states = _all_states(z, dynamics, initial_state, packing)
    out = jnp.einsum("hpm,tbhpmc->bthc", contraction_weights(dynamics), states, precision="highest")
    return out.astype(z.dtype), states[-1]


class _Run(NamedTuple):
    """Consecutive tokens; T is the number of runs.

    Attributes:
        steps: [T, B], tokens that are not padding.
        starts: [T, B], whether a document starts inside, so that nothing of the state before the run is left.
        added: [T, B, Hkv, 2, M, C], the state after the run if it was zero before it.
    """

    steps: Int[Array, "T B"]
    starts: Bool[Array, "T B"]
    added: Float[Array, "T B Hkv 2 M C"]


def _all_states(z: Channels, dynamics: Dynamics, initial_state: State, packing: Packing | None) -> Array:
    """The state after every token, [T, B, Hkv, 2, M, C]; padding brings zeros in z and takes no step."""
    batch, length = z.shape[:2]
    powers = jnp.moveaxis(lambda_powers(dynamics.log_decay, dynamics.angle, jnp.arange(length + 1)), 1, 0)

    def decayed(state: Array, steps: Array) -> Array:
        return complex_multiply(state, powers[steps][..., None], axis=-3)

    def follow(first: _Run, second: _Run) -> _Run:
        kept = jnp.where(second.starts[..., None, None, None, None], 0, decayed(first.added, second.steps))
        return _Run(first.steps + second.steps, first.starts | second.starts, kept + second.added)

    if packing is None:
        packing = Packing(jnp.ones((batch, length), bool), jnp.zeros((batch, length), bool))
    weight = jnp.stack(dynamics.input_weight, axis=1)[..., None]
    added = weight * z.swapaxes(0, 1)[:, :, :, None, None, :].astype(initial_state.dtype)
    steps, starts = packing.real.T.astype(jnp.int32), packing.starts.T
    added = added.at[0].add(decayed(initial_state, steps[0]))
    return jax.lax.associative_scan(follow, _Run(steps, starts, added)).added
