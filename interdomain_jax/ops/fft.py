"""The recurrence as a convolution over all tokens, by the fast Fourier transform.

The state of mode m is z convolved with b_m lambda_m^j, as in S4 (Gu, Goel and Re, 2022). Modes are taken one after the
other, first for y = X_k q and then for Re(w . X_v), so that what is held at once is one mode's state for all tokens and
never all of them. A convolution is the same for every token, so this form has no packed documents.
"""

import jax
import jax.numpy as jnp
from jax import Array

from interdomain_jax.array_types import Channels, Keys, Output, Queries, State, Values
from interdomain_jax.ops.dynamics import (
    Dynamics,
    Read,
    complex_multiply,
    contraction_weights,
    input_powers,
    lambda_powers,
    read_matrix,
)


def interdomain_fft(
    q: Queries, k: Keys, v: Values, dynamics: Dynamics, initial_state: State, read: Read
) -> tuple[Output, State]:
    """`interdomain_attention` by convolution; arguments already validated."""
    batch, length, heads, width = q.shape
    kv_heads, value_width = v.shape[2:]
    dtype, out_dtype = initial_state.dtype, v.dtype
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, width).astype(dtype)
    kernels = _transformed(jnp.transpose(input_powers(dynamics, jnp.arange(length)), (3, 2, 0, 1)))
    k, v = k.astype(dtype), v.astype(dtype)
    keys, values = (_transformed(jnp.moveaxis(x, 1, 3)) for x in (k, v))
    decays = _read_decays(dynamics, length)

    @jax.checkpoint
    def score(_: None, kernel: Array) -> tuple[None, Array]:
        states = _convolved(kernel[:, None], keys, length)
        return None, jnp.einsum("bthgr,pbhrt->bthgp", grouped, states, precision="highest")

    _, y = jax.lax.scan(score, None, kernels)
    carried = jnp.einsum("bthgr,bhpmr->bthgpm", grouped, initial_state[..., :width], precision="highest")
    y = jnp.moveaxis(y, 0, -1) + complex_multiply(carried, decays)
    w = jnp.einsum("bthgm,hmp->bthgp", y.reshape(*y.shape[:4], -1), read_matrix(dynamics, read), precision="highest")
    w = w.reshape(y.shape)

    @jax.checkpoint
    def accumulate(out: Array, mode: tuple[Array, Array]) -> tuple[Array, None]:
        kernel, w = mode
        states = _convolved(kernel[:, None], values, length)
        return out + jnp.einsum("bthgp,pbhdt->bthgd", w, states, precision="highest"), None

    # w holds (Re w, -Im w), a conjugate, so it turns by the conjugate of lambda^{t+1}.
    turned = complex_multiply(w, decays * jnp.array([1, -1], dtype)[:, None])
    out = jnp.einsum("bthgpm,bhpmd->bthgd", turned, initial_state[..., width:], precision="highest")
    out, _ = jax.lax.scan(accumulate, out, (kernels, jnp.moveaxis(w, -1, 0)))
    state = _last_state(jnp.concatenate([k, v], axis=-1), dynamics, initial_state)
    return out.reshape(batch, length, heads, value_width).astype(out_dtype), state


def linear_fft(z: Channels, dynamics: Dynamics, initial_state: State) -> tuple[Channels, State]:
    """`linear_contraction` by convolution with the one kernel left when the modes are summed."""
    length, dtype = z.shape[1], z.dtype
    z = z.astype(initial_state.dtype)
    weights = contraction_weights(dynamics)
    powers = input_powers(dynamics, jnp.arange(length))
    kernel = _transformed(jnp.einsum("hpm,htpm->ht", weights, powers, precision="highest"))
    out = jnp.moveaxis(_convolved(kernel, _transformed(jnp.moveaxis(z, 1, 3)), length), 3, 1)
    # The weights are a conjugate pair too, (Re w, -Im w).
    decays = lambda_powers(dynamics.log_decay, -dynamics.angle, jnp.arange(1, length + 1))
    turned = complex_multiply(decays, weights[:, None])
    out = out + jnp.einsum("htpm,bhpmc->bthc", turned, initial_state, precision="highest")
    return out.astype(dtype), _last_state(z, dynamics, initial_state)


def _transformed(x: Array) -> Array:
    """The transform of x over its last axis, tokens, behind which zeros keep a convolution from wrapping around."""
    return jnp.fft.rfft(x, n=1 << (2 * x.shape[-1] - 1).bit_length())


def _convolved(kernel: Array, x: Array, length: int) -> Array:
    return jnp.fft.irfft(kernel[..., None, :] * x)[..., :length]


def _read_decays(dynamics: Dynamics, length: int) -> Array:
    """lambda^{t+1} as [T, Hkv, 1, 2, M], to turn what each token reads of the initial state."""
    powers = lambda_powers(dynamics.log_decay, dynamics.angle, jnp.arange(1, length + 1))
    return jnp.moveaxis(powers, 0, 1)[:, :, None]


def _last_state(z: Channels, dynamics: Dynamics, initial_state: State) -> State:
    length = z.shape[1]
    decay = lambda_powers(dynamics.log_decay, dynamics.angle, jnp.full(1, length))[:, 0, :, :, None]
    added = jnp.einsum("htpm,bthc->bhpmc", input_powers(dynamics, jnp.arange(length)[::-1]), z, precision="highest")
    return complex_multiply(initial_state, decay, axis=-3) + added
