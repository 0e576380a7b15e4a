"""The mixer inside a model written with `flax.nnx`: it learns to go on with a pattern, then decodes with the cache.

`nnx.bridge.ToNNX` makes the Linen layer an nnx module, and `lazy_init` gives it its parameters. The cache is a value,
not a part of the module: it goes in and comes out with every call, as in Linen. Run as

    python examples/nnx_model.py
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from interdomain_jax import InterdomainAttention

VOCABULARY, WIDTH, PERIOD, LENGTH, BATCH, STEPS = 8, 32, 4, 16, 32, 150


class Model(nnx.Module):
    """One mixer and a head: tokens [B, T] to logits [B, T, V], and the cache after them if one came in."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        layer = InterdomainAttention(num_heads=2, head_dim=16, state_dim=16)
        self.mixer = nnx.bridge.ToNNX(layer, rngs=rngs).lazy_init(jnp.zeros((1, 1, WIDTH)))
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: Array, cache: Any = None) -> tuple[Array, Any]:
        x = self.embedding(tokens)
        mixed, cache = self.mixer(self.norm(x), cache=cache)
        return self.head(x + mixed), cache


def sample(rng: np.random.Generator) -> Array:
    """Sequences [B, T], each of a random pattern of PERIOD tokens again and again."""
    return jnp.asarray(np.tile(rng.integers(VOCABULARY, size=(BATCH, PERIOD)), LENGTH // PERIOD))


def loss(model: Model, tokens: Array) -> Array:
    """Mean over the tokens after the first period, which the tokens before them determine."""
    logits, _ = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses[:, PERIOD - 1 :].mean()


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, tokens: Array) -> Array:
    """Updates the model in place; returns the loss before."""
    value, gradients = nnx.value_and_grad(loss)(model, tokens)
    optimizer.update(model, gradients)
    return value


@nnx.jit
def read(model: Model, cache: Any, tokens: Array) -> tuple[Array, Any]:
    """Reads any number of tokens [B, T] after those in the cache; returns the likeliest next one [B, 1]."""
    logits, cache = model(tokens, cache)
    return logits[:, -1:].argmax(axis=-1), cache


def main() -> None:
    """Trains the model, lets it go on after two periods of new patterns, and prints how well."""
    model, rng = Model(nnx.Rngs(0)), np.random.default_rng(0)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = [step(model, optimizer, sample(rng)) for _ in range(STEPS)]

    tokens = sample(rng)
    cache = model.mixer.init_cache(BATCH, LENGTH)
    token, cache = read(model, cache, tokens[:, : 2 * PERIOD])
    continuation = []
    for _ in range(2 * PERIOD):
        continuation.append(token)
        token, cache = read(model, cache, token)
    right = (jnp.concatenate(continuation, axis=1) == tokens[:, 2 * PERIOD :]).mean()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token in {STEPS} steps; {right:.0%} continued rightly")


if __name__ == "__main__":
    main()
