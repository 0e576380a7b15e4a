"""A trained model, in parallel and token by token (s4#52: the two forms differed once a model had been trained)."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from interdomain_jax import Decoder
from interdomain_jax.ops.interdomain import Implementation

SMALL = dict(vocab_size=12, d_model=16, num_layers=1, num_heads=2, head_dim=8, state_dim=8, chunk_size=8)


@functools.cache
def trained():
    """Variables after 100 large steps on sequences that repeat themselves, and how far they have gone."""
    model = Decoder(**SMALL)
    half = np.random.default_rng(0).integers(0, 12, (100, 8, 12))
    batches = jnp.asarray(np.concatenate([half, half], axis=-1))
    optimizer = optax.adam(1e-2)
    start = jax.jit(model.init)(jax.random.key(0), batches[0])

    def loss(variables, tokens):
        logits, _ = model.apply(variables, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit
    def train(variables):
        def step(carry, tokens):
            variables, moments = carry
            value, gradients = jax.value_and_grad(loss)(variables, tokens)
            updates, moments = optimizer.update(gradients, moments)
            return (optax.apply_updates(variables, updates), moments), value

        (variables, _), losses = jax.lax.scan(step, (variables, optimizer.init(variables)), batches)
        return variables, losses

    variables, losses = train(start)
    return variables, start, losses


TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 12, (2, 40)))


@functools.cache
def recurrent_logits():
    """Token by token."""
    variables, *_ = trained()
    recurrent = Decoder(implementation="sequential", **SMALL)
    step = jax.jit(lambda tokens, cache: recurrent.apply(variables, tokens, cache=cache))
    cache, logits = recurrent.init_cache(2, 40), []
    for t in range(40):
        out, cache = step(TOKENS[:, t : t + 1], cache)
        logits.append(out)
    return np.concatenate(logits, axis=1)


@pytest.mark.parametrize("implementation", get_args(Implementation))
def test_parallel_and_recurrent_forms_agree_after_training(implementation):
    variables, start, losses = trained()
    assert losses[-1] < losses[0] - 0.1
    moved = jax.tree.map(lambda now, then: float(jnp.abs(now - then).max()), variables, start)
    assert all(distance > 1e-2 for distance in jax.tree.leaves(moved)), moved

    model = Decoder(implementation=implementation, **SMALL)
    whole, _ = jax.jit(model.apply)(variables, TOKENS)
    np.testing.assert_allclose(recurrent_logits(), whole, atol=1e-4)
