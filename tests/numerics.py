"""What the numeric tests share: the error metric, random inputs, and the paper's own form of the op in NumPy."""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from interdomain_jax.array_types import Complex
from interdomain_jax.ops import Dynamics, s4d_inv
from tests.quick import quick_jit


def relative_rms(value, reference) -> float:
    """RMS(value - reference) / RMS(reference), in float64; RMS(value) where the reference is zero everywhere."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    assert value.shape == reference.shape
    scale = np.sqrt(np.mean(reference**2)) if value.size else 0.0
    return float(np.sqrt(np.mean((value - reference) ** 2)) / (scale or 1.0)) if value.size else 0.0


def assert_close(values, references, tolerance: float) -> None:
    """Every leaf of `values` lies within `tolerance`, by relative RMS, of its leaf in `references`."""
    paths = jax.tree_util.tree_leaves_with_path(values)
    for (path, value), reference in zip(paths, jax.tree.leaves(references), strict=True):
        error = relative_rms(value, reference)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: relative RMS {error:.2e} above {tolerance:.0e}"


@contextlib.contextmanager
def double_precision():
    """float64, in programs that compile fast and run slowly: for references and for checks of logic."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with jax.enable_x64(True):
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def to_float64(tree):
    """The tree with float64 leaves; to be called, and its result used, under `double_precision`."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), tree)


def to_numpy(tree):
    """The tree with NumPy leaves."""
    return jax.tree.map(np.asarray, tree)


def random_dynamics(rng: np.random.Generator, heads: int, state_dim: int, *, mode_weights: bool = False) -> Dynamics:
    """S4D-Inv at log-uniform steps, as (log decay, angle) pairs in float32, with a random full readout."""
    a = s4d_inv(state_dim)
    delta = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), (heads, 1)))
    weight = (np.exp(delta * a) - 1) / a
    readout = (2 * state_dim) ** -0.5 * rng.normal(size=(2, heads, state_dim, state_dim))
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf, jnp.float32),
        Dynamics(
            delta * a.real,
            delta * a.imag,
            Complex(weight.real, weight.imag),
            Complex(*readout),
            rng.normal(size=(heads, state_dim)) if mode_weights else None,
        ),
    )


def random_qkv(rng: np.random.Generator, batch, length, heads, kv_heads, key_dim, value_dim):
    """Standard normal q [B, T, H, R], k [B, T, Hkv, R], v [B, T, Hkv, D] in float32."""
    shapes = ((heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim))
    return tuple(jnp.asarray(rng.normal(size=(batch, length, *shape)), jnp.float32) for shape in shapes)


def random_like(rng: np.random.Generator, tree):
    """Standard normal arrays with the shapes of `tree`, float32."""
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), tree)


def random_segment_ids(rng: np.random.Generator, batch: int, length: int):
    """Documents of random lengths with ids 1 to 3, padding between, before and behind some: [B, T] int32."""
    rows = []
    for _ in range(batch):
        row: list[int] = []
        while len(row) < length:
            row += [int(rng.integers(0, 4))] * int(rng.integers(1, max(length // 3, 2) + 1))
        rows.append(row[:length])
    return jnp.asarray(rows, jnp.int32)


class OutputsAndGradients(NamedTuple):
    """What a function gives, and the gradient of its arguments."""

    outputs: Any
    gradients: Any


def vjp_program(function, *, jit=quick_jit):
    """A program that takes inputs, cotangents and, by name, what has no gradient, and gives `OutputsAndGradients`."""

    @jit
    def run(inputs, cotangents, **fixed):
        outputs, pull_back = jax.vjp(lambda kwargs: function(**kwargs, **fixed), inputs)
        return OutputsAndGradients(outputs, pull_back(cotangents)[0])

    return run


def jitted_vjp(function, inputs, cotangents, *, jit=quick_jit) -> OutputsAndGradients:
    """The outputs of function(**inputs), and the gradients of the inputs for the cotangents, in one compilation."""
    return vjp_program(function, jit=jit)(inputs, cotangents)


def paper_coefficients(z, dynamics: Dynamics, initial_state) -> tuple[np.ndarray, np.ndarray]:
    """[U_t, Gamma_t] = C x_t, [B, T, Hkv, M, C] complex128, and the last state, token by token in NumPy."""
    lam = np.exp(np.float64(dynamics.log_decay) + 1j * np.float64(dynamics.angle))
    weight = np.float64(dynamics.input_weight.real) + 1j * np.float64(dynamics.input_weight.imag)
    readout = np.float64(dynamics.readout.real) + 1j * np.float64(dynamics.readout.imag)
    initial_state = np.float64(initial_state)
    state = initial_state[:, :, 0] + 1j * initial_state[:, :, 1]
    coefficients = []
    for t in range(z.shape[1]):
        state = lam[None, :, :, None] * state + weight[None, :, :, None] * np.float64(z[:, t])[:, :, None, :]
        coefficients.append(readout @ state)
    return np.stack(coefficients, axis=1), np.stack([state.real, state.imag], axis=2)


def paper_attention(q, k, v, dynamics: Dynamics, initial_state, read: str):
    """The read exactly as the paper writes it, o = Re(q^T U^T Gamma), with U and Gamma formed; float64 NumPy."""
    coefficients, final_state = paper_coefficients(np.concatenate([k, v], axis=-1), dynamics, initial_state)
    u, gamma = np.split(coefficients, [k.shape[-1]], axis=-1)
    groups = q.shape[2] // k.shape[2]
    u, gamma = (np.repeat(x, groups, axis=2) for x in (u, gamma))
    scores = np.einsum("bthr,bthmr->bthm", np.float64(q), u)
    if read == "hermitian":
        scores = scores.conj()
    if dynamics.mode_weights is not None:
        scores = scores * np.repeat(np.float64(dynamics.mode_weights), groups, axis=0)
    return np.einsum("bthm,bthmd->bthd", scores, gamma).real, final_state
