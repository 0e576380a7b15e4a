"""One optimizer update: accumulated gradients, AdamW, and the figures a run reports."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from interdomain_jax import sharding
from interdomain_jax.scoring import LanguageModel, next_token_score
from interdomain_jax.training.optimizer import Optimizer
from interdomain_jax.training.state import TrainState


class TrainMetrics(NamedTuple):
    """Float32 scalars of one update.

    Attributes:
        loss: nats per token, before the update.
        grad_norm: global norm of the gradient, before clipping.
        param_norm: global norm of the parameters, after the update.
        learning_rate: rate of this update.
        ssm_learning_rate: rate of this update for the SSM group.
        tokens: tokens scored.
    """

    loss: jax.Array
    grad_norm: jax.Array
    param_norm: jax.Array
    learning_rate: jax.Array
    ssm_learning_rate: jax.Array
    tokens: jax.Array


class StepOutput(NamedTuple):
    """The next state and the metrics of the update that led to it."""

    state: TrainState
    metrics: TrainMetrics


class LossAndGradient(NamedTuple):
    """The mean loss over a batch, its gradient, and the number of tokens it is a mean of."""

    loss: jax.Array
    gradient: Any
    tokens: jax.Array


def loss_and_gradient(
    model: LanguageModel,
    params: Any,
    batch: Mapping[str, jax.Array],
    *,
    accumulation_steps: int,
) -> LossAndGradient:
    """Computes the loss and its gradient, one micro-batch after another.

    Every token of the batch weighs the same, in whichever micro-batch it falls: the result does not
    depend on `accumulation_steps`, which only bounds the memory for activations.

    Args:
        model: maps tokens [B, T] to logits.
        params: its parameters.
        batch: `inputs`, `targets` int [B, T] and `loss_mask` [B, T].
        accumulation_steps: number of micro-batches; must divide B.
    """
    tokens = jnp.sum(batch["loss_mask"] > 0, dtype=jnp.float32)

    def loss_share(params: Any, micro_batch: Mapping[str, jax.Array]) -> jax.Array:
        logits, _ = model.apply({"params": params}, micro_batch["inputs"])
        score = next_token_score(logits, micro_batch["targets"], micro_batch["loss_mask"])
        # A batch of padding alone has loss 0 and no gradient.
        return score.nats / jnp.maximum(tokens, 1.0)

    def accumulate(total: Any, micro_batch: Mapping[str, jax.Array]) -> tuple[Any, None]:
        share = jax.value_and_grad(loss_share)(params, micro_batch)
        return jax.tree.map(jnp.add, total, share), None

    # Row i goes to micro-batch i mod accumulation_steps: where the rows are split over devices,
    # each device then finds its part of every micro-batch among its own rows.
    micro_batches = jax.tree.map(lambda x: x.reshape(-1, accumulation_steps, *x.shape[1:]).swapaxes(0, 1), dict(batch))
    zero = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
    (loss, gradient), _ = jax.lax.scan(accumulate, zero, micro_batches)
    return LossAndGradient(loss, gradient, tokens)


def make_train_step(
    model: LanguageModel, optimizer: Optimizer, *, accumulation_steps: int, mesh: Mesh
) -> jax.stages.Wrapped:
    """Returns the jitted update `(state, batch on the mesh) -> StepOutput`; it consumes the state.

    Args:
        model: maps tokens [B, T] to logits.
        optimizer: from `make_optimizer`.
        accumulation_steps: number of micro-batches; B must be a multiple of it times the devices.
        mesh: from `sharding.data_mesh`.
    """

    def train_step(state: TrainState, batch: Mapping[str, jax.Array]) -> StepOutput:
        loss, gradient, tokens = loss_and_gradient(model, state.params, batch, accumulation_steps=accumulation_steps)
        updates, opt_state = optimizer.transformation.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = TrainMetrics(
            loss=loss,
            grad_norm=optax.tree.norm(gradient),
            param_norm=optax.tree.norm(params),
            learning_rate=jnp.asarray(optimizer.learning_rate(state.step), jnp.float32),
            ssm_learning_rate=jnp.asarray(optimizer.ssm_learning_rate(state.step), jnp.float32),
            tokens=tokens,
        )
        return StepOutput(TrainState(state.step + 1, params, opt_state), metrics)

    copied = sharding.replicated(mesh)
    return jax.jit(
        sharding.on_mesh(train_step, mesh),
        in_shardings=(copied, sharding.batch_sharded(mesh)),
        out_shardings=copied,
        donate_argnums=0,
    )
