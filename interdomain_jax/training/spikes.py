"""Loss spikes: a loss far above those of the updates before it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Losses that the mean and the variance remember, and the fewest before anything is called a spike.
MEMORY = 100


class LossTrend(NamedTuple):
    """The running mean and variance of the losses, float32 scalars, and how many there were, int32."""

    mean: jax.Array
    variance: jax.Array
    number: jax.Array

    @classmethod
    def empty(cls) -> "LossTrend":
        """The trend of no losses yet."""
        return cls(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))

    def is_spike(self, loss: jax.Array, threshold: float) -> jax.Array:
        """Whether `loss` lies more than `threshold` standard deviations above the mean."""
        return (self.number >= MEMORY) & (loss > self.mean + threshold * jnp.sqrt(self.variance))

    def plus(self, loss: jax.Array) -> "LossTrend":
        """The trend with one more loss: a plain mean of the first `MEMORY`, after them an exponential one."""
        share = 1 / jnp.minimum(self.number + 1, MEMORY).astype(jnp.float32)
        difference = loss - self.mean
        variance = (1 - share) * (self.variance + share * difference**2)
        return LossTrend(self.mean + share * difference, variance, self.number + 1)
