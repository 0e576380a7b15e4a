"""The mixer as a layer of your own Flax Linen model: a bidirectional tagger.

The mixer is causal, so an encoder runs one over the sequence and one over the sequence reversed. The task is to mark
every token that occurs again in its sequence, earlier or later, which neither direction can see alone. Run as

    python examples/linen_encoder.py
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from jax import Array

from interdomain_jax import InterdomainAttention

VOCABULARY, LENGTH, BATCH, STEPS = 16, 16, 32, 200


class Bidirectional(nn.Module):
    """Mixes [B, T, d_model] in both directions: every token reads the whole sequence."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        # Equal tokens match wherever they stand, so queries and keys are not rotated.
        mixer = partial(InterdomainAttention, num_heads=4, head_dim=16, state_dim=16, rope=False)
        forward, _ = mixer(name="forward")(x)
        backward, _ = mixer(name="backward")(x[:, ::-1])
        return forward + backward[:, ::-1]


class Tagger(nn.Module):
    """One block over token embeddings; a logit for every token [B, T]."""

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x = nn.Embed(VOCABULARY, 64)(tokens)
        x += Bidirectional()(nn.LayerNorm()(x))
        x += nn.Dense(64)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
        return nn.Dense(1)(x)[..., 0]


def sample(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens [B, T], and whether each occurs more than once in its sequence."""
    tokens = rng.integers(VOCABULARY, size=(BATCH, LENGTH))
    return tokens, (tokens[:, :, None] == tokens[:, None, :]).sum(axis=-1) > 1


def main() -> None:
    """Trains the tagger, each step on new sequences, and prints the loss before and after."""
    model, optimizer, rng = Tagger(), optax.adam(1e-2), np.random.default_rng(0)
    params = jax.jit(model.init)(jax.random.key(0), sample(rng)[0])

    def loss(params: Any, tokens: Array, repeated: Array) -> Array:
        return optax.sigmoid_binary_cross_entropy(model.apply(params, tokens), repeated).mean()

    @jax.jit
    def step(params: Any, moments: Any, tokens: Array, repeated: Array) -> tuple[Any, Any, Array]:
        value, gradients = jax.value_and_grad(loss)(params, tokens, repeated)
        updates, moments = optimizer.update(gradients, moments)
        return optax.apply_updates(params, updates), moments, value

    moments, losses = optimizer.init(params), []
    for _ in range(STEPS):
        params, moments, value = step(params, moments, *sample(rng))
        losses.append(value)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token in {STEPS} steps")


if __name__ == "__main__":
    main()
