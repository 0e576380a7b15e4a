"""The bare op in plain JAX, without Flax: a memory that is written and asked, call after call.

Every row of a batch has a table from symbols to symbols. Each step writes one entry of it, a key with its value, and
asks for another, the query. The state goes from call to call, and gradients go back through it. Run as

    python examples/bare_op.py
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from interdomain_jax import Complex, discretize, interdomain_attention, s4d_inv

SYMBOLS, HEADS, WIDTH, MODES = 8, 2, 16, 16
BATCH, WINDOW, STEPS = 32, 16, 300


class Params(NamedTuple):
    """What is learned: a row for every symbol in each table, and the dynamics of every head."""

    features: Array  # [S, H, R], of keys and queries
    values: Array  # [S, H, D]
    output: Array  # [H, D, S]
    log_delta: Array
    log_neg_a_real: Array
    a_imag: Array
    readout: Complex


class Entries(NamedTuple):
    """Symbols [B, T]: what is written at each step, what is asked, and what the answer is."""

    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray
    answers: np.ndarray


def init(rng: np.random.Generator) -> Params:
    """Random tables; S4D-Inv eigenvalues, a fast and a slow head, a random readout."""

    def normal(*shape: int, scale: float) -> Array:
        return jnp.asarray(rng.normal(scale=scale, size=shape), jnp.float32)

    eigenvalues = s4d_inv(MODES)
    return Params(
        features=normal(SYMBOLS, HEADS, WIDTH, scale=WIDTH**-0.5),
        values=normal(SYMBOLS, HEADS, WIDTH, scale=1),
        output=normal(HEADS, WIDTH, SYMBOLS, scale=(HEADS * WIDTH) ** -0.5),
        log_delta=jnp.log(jnp.geomspace(0.1, 0.01, HEADS)),
        log_neg_a_real=jnp.tile(jnp.log(-eigenvalues.real), (HEADS, 1)),
        a_imag=jnp.tile(jnp.float32(eigenvalues.imag), (HEADS, 1)),
        readout=Complex(*normal(2, HEADS, MODES, MODES, scale=(2 * MODES) ** -0.5)),
    )


def memory(params: Params, entries: Entries, state: Array | None) -> tuple[Array, Array]:
    """Writes and asks; returns the answers' logits [B, T, S], and the state after the last step."""
    dynamics = discretize(params.log_delta, params.log_neg_a_real, params.a_imag, params.readout)
    q, k, v = params.features[entries.queries], params.features[entries.keys], params.values[entries.values]
    # In the hermitian read the turns of a mode cancel between a key and its own value, however long ago they came.
    out, state = interdomain_attention(q, k, v, dynamics, initial_state=state, read="hermitian")
    return jnp.einsum("bthd,hds->bts", out, params.output), state


def sample(rng: np.random.Generator, windows: int) -> list[Entries]:
    """Entries of random tables, each of the windows with WINDOW steps."""
    tables = rng.integers(SYMBOLS, size=(BATCH, SYMBOLS))
    rows = np.arange(BATCH)[:, None]
    pairs = rng.integers(SYMBOLS, size=(windows, 2, BATCH, WINDOW))
    return [Entries(keys, tables[rows, keys], queries, tables[rows, queries]) for keys, queries in pairs]


def loss(params: Params, first: Entries, second: Entries) -> Array:
    """Mean loss of the second window's answers, from the state that the first window left."""
    _, state = memory(params, first, None)
    logits, _ = memory(params, second, state)
    return optax.softmax_cross_entropy_with_integer_labels(logits, second.answers).mean()


def main() -> None:
    """Trains the memory on two windows, then reads a stream of ten, and prints the share of right answers in each."""
    rng, optimizer = np.random.default_rng(0), optax.adam(2e-2)
    params = init(rng)

    @jax.jit
    def step(params: Params, moments: Any, first: Entries, second: Entries) -> tuple[Params, Any]:
        gradients = jax.grad(loss)(params, first, second)
        updates, moments = optimizer.update(gradients, moments)
        return optax.apply_updates(params, updates), moments

    moments = optimizer.init(params)
    for _ in range(STEPS):
        params, moments = step(params, moments, *sample(rng, 2))

    run, state, right = jax.jit(memory), None, []
    for entries in sample(rng, 10):
        logits, state = run(params, entries, state)
        right.append((logits.argmax(axis=-1) == entries.answers).mean())
    print("right answers by window:", *(f"{share:.0%}" for share in right))


if __name__ == "__main__":
    main()
