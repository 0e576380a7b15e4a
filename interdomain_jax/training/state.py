"""The training state: everything an update reads and writes."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from interdomain_jax import sharding
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.training.optimizer import Optimizer
from interdomain_jax.training.spikes import LossTrend


class WideCount(NamedTuple):
    """A whole number of 64 bits in two uint32 scalars, since JAX has 32 bits by default: 2^32 high + low."""

    high: jax.Array
    low: jax.Array

    def plus(self, amount: jax.Array) -> "WideCount":
        """The count, `amount` (at least 0, below 2^31) higher."""
        low = self.low + amount.astype(jnp.uint32)
        return WideCount(self.high + (low < self.low), low)

    def __int__(self) -> int:
        return (int(self.high) << 32) + int(self.low)


class TrainState(NamedTuple):
    """A pytree of arrays.

    Attributes:
        step: int32 scalar, the number of batches trained on.
        tokens_seen: the number of tokens scored in them.
        skipped: int32 scalar, how many of them changed nothing, for the loss or an update was not finite, or a spike.
        skipped_in_a_row: int32 scalar, how many of the last ones.
        trend: of the loss.
        params: the model's parameters.
        opt_state: the optimizer's moments and counts.
    """

    step: jax.Array
    tokens_seen: WideCount
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    trend: LossTrend
    params: Any
    opt_state: Any


def init_state(model: Decoder, optimizer: Optimizer, *, seed: int, mesh: Mesh) -> TrainState:
    """Initialises the state under jit, so that each device makes its own part and nothing else.

    The values depend on `seed` alone, not on the mesh.
    """
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer, mesh))
    return jax.jit(functools.partial(_init, model, optimizer), out_shardings=places)(jax.random.key(seed))


def abstract_state(model: Decoder, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """Returns each array of the state as a `jax.ShapeDtypeStruct` with its place on the mesh, computing nothing.

    Raises:
        ValueError: mesh axes that do not divide an axis of a parameter.
    """
    abstract = jax.eval_shape(functools.partial(_init, model, optimizer), jax.random.key(0))
    return sharding.placed(abstract, mesh)


def _init(model: Decoder, optimizer: Optimizer, rng: jax.Array) -> TrainState:
    # Parameters do not depend on the length; one token is the cheapest to trace.
    params = model.init(rng, jnp.zeros((1, 1), jnp.int32))["params"]
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        tokens_seen=WideCount(jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32)),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
        trend=LossTrend.empty(),
        params=params,
        opt_state=optimizer.transformation.init(params),
    )
