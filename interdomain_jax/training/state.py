"""The training state: everything an update reads and writes."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from interdomain_jax import sharding
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.training.optimizer import Optimizer


class TrainState(NamedTuple):
    """A pytree of arrays.

    Attributes:
        step: int32 scalar, the number of updates done.
        params: the model's parameters.
        opt_state: the optimizer's moments and counts.
    """

    step: jax.Array
    params: Any
    opt_state: Any


def init_state(model: Decoder, optimizer: Optimizer, *, seed: int, mesh: Mesh) -> TrainState:
    """Initialises the state under jit, so that it is born where it belongs.

    The values depend on `seed` alone, not on the number of devices.
    """
    init = functools.partial(_init, model, optimizer)
    return jax.jit(init, out_shardings=sharding.replicated(mesh))(jax.random.key(seed))


def abstract_state(model: Decoder, optimizer: Optimizer) -> TrainState:
    """Returns the state as `jax.ShapeDtypeStruct`s, computing nothing."""
    return jax.eval_shape(functools.partial(_init, model, optimizer), jax.random.key(0))


def _init(model: Decoder, optimizer: Optimizer, rng: jax.Array) -> TrainState:
    # Parameters do not depend on the length; one token is the cheapest to trace.
    params = model.init(rng, jnp.zeros((1, 1), jnp.int32))["params"]
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.transformation.init(params),
    )
