"""One optimizer update: accumulated gradients, AdamW, and the figures a run reports."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from interdomain_jax import sharding
from interdomain_jax.checksums import checksum
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.ops.shards import constrain
from interdomain_jax.scoring import LanguageModel, model_score
from interdomain_jax.training.optimizer import Optimizer
from interdomain_jax.training.state import TrainState, WideCount, abstract_state


class TrainMetrics(NamedTuple):
    """Scalars of one update, float32 where nothing else is said.

    Attributes:
        loss: nats per token, before the update.
        grad_norm: global norm of the gradient, before clipping.
        param_norm: global norm of the parameters, after the update; where it was skipped, as it would have been.
        learning_rate: rate of this update.
        ssm_learning_rate: rate of this update for the SSM group.
        tokens: tokens scored, int32.
        tokens_seen: tokens scored in all updates so far.
        batch_checksum: `checksums.checksum` of the inputs, uint32: which batch it was.
        skipped: updates skipped so far, int32.
        skipped_in_a_row: as in the state, int32.
        spike: whether the loss is a spike, bool.
    """

    loss: jax.Array
    grad_norm: jax.Array
    param_norm: jax.Array
    learning_rate: jax.Array
    ssm_learning_rate: jax.Array
    tokens: jax.Array
    tokens_seen: WideCount
    batch_checksum: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    spike: jax.Array


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
    vocab_chunks: int,
    place: Callable[[Any], Any] = lambda gradient: gradient,
) -> LossAndGradient:
    """Computes the loss and its gradient, one micro-batch after another.

    Every token of the batch weighs the same, in whichever micro-batch it falls: the result does not
    depend on `accumulation_steps`, which only bounds the memory for activations.

    Args:
        model: maps tokens [B, T] to hidden states.
        params: its parameters.
        batch: `inputs`, `targets` int [B, T] and `loss_mask` [B, T].
        accumulation_steps: number of micro-batches; must divide B.
        vocab_chunks: number of parts in which logits are computed, as in `next_token_score`.
        place: lays a gradient out over devices, so that none holds the whole of it.
    """
    tokens = jnp.sum(batch["loss_mask"] > 0, dtype=jnp.int32)

    def loss_share(params: Any, micro_batch: Mapping[str, jax.Array]) -> jax.Array:
        score = model_score(model, params, micro_batch, vocab_chunks=vocab_chunks)
        # A batch of padding alone has loss 0 and no gradient.
        return score.nats / jnp.maximum(tokens, 1)

    def accumulate(total: Any, micro_batch: Mapping[str, jax.Array]) -> tuple[Any, None]:
        micro_batch = jax.tree.map(lambda x: constrain(x, "B T"), micro_batch)
        loss, gradient = jax.value_and_grad(loss_share)(params, micro_batch)
        return jax.tree.map(jnp.add, total, (loss, place(gradient))), None

    # Row i goes to micro-batch i mod accumulation_steps: where the rows are split over devices,
    # each device then finds its part of every micro-batch among its own rows.
    micro_batches = jax.tree.map(lambda x: x.reshape(-1, accumulation_steps, *x.shape[1:]).swapaxes(0, 1), dict(batch))
    zero = (jnp.zeros((), jnp.float32), place(jax.tree.map(jnp.zeros_like, params)))
    (loss, gradient), _ = jax.lax.scan(accumulate, zero, micro_batches)
    return LossAndGradient(loss, gradient, tokens)


def make_train_step(
    model: LanguageModel,
    optimizer: Optimizer,
    *,
    accumulation_steps: int,
    vocab_chunks: int,
    mesh: Mesh,
    spike_threshold: float | None = None,
) -> jax.stages.Wrapped:
    """Returns the jitted update `(state, batch) -> StepOutput`, both on the mesh; it consumes the state.

    An update whose loss, gradient or result is not finite changes nothing but the counts, nor does one whose loss is a
    spike: parameters and moments stay finite, and the schedule counts the updates that were made.

    Args:
        model: maps tokens [B, T] to hidden states.
        optimizer: from `make_optimizer`.
        accumulation_steps: number of micro-batches; B must be a multiple of it times `sharding.row_parts(mesh)`.
        vocab_chunks: number of parts in which logits are computed, as in `next_token_score`.
        mesh: from `sharding.make_mesh`.
        spike_threshold: standard deviations above the mean at which a loss is a spike; None for never.
    """
    place = lambda tree: jax.lax.with_sharding_constraint(tree, sharding.state_sharding(tree, mesh))

    def train_step(state: TrainState, batch: Mapping[str, jax.Array]) -> StepOutput:
        loss, gradient, tokens = loss_and_gradient(
            model,
            state.params,
            batch,
            accumulation_steps=accumulation_steps,
            vocab_chunks=vocab_chunks,
            place=place,
        )
        updates, opt_state = optimizer.transformation.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        grad_norm, param_norm = optax.tree.norm(gradient), optax.tree.norm(params)

        spike = state.trend.is_spike(loss, spike_threshold) if spike_threshold else jnp.zeros((), bool)
        accepted = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & jnp.isfinite(param_norm) & ~spike
        updates_made = state.step - state.skipped
        after = TrainState(
            step=state.step + 1,
            tokens_seen=state.tokens_seen.plus(tokens),
            skipped=state.skipped + ~accepted,
            skipped_in_a_row=jnp.where(accepted, 0, state.skipped_in_a_row + 1),
            trend=_where(accepted, state.trend.plus(loss), state.trend),
            params=_where(accepted, params, state.params),
            opt_state=_where(accepted, opt_state, state.opt_state),
        )
        metrics = TrainMetrics(
            loss=loss,
            grad_norm=grad_norm,
            param_norm=param_norm,
            learning_rate=jnp.asarray(optimizer.learning_rate(updates_made), jnp.float32),
            ssm_learning_rate=jnp.asarray(optimizer.ssm_learning_rate(updates_made), jnp.float32),
            tokens=tokens,
            tokens_seen=after.tokens_seen,
            batch_checksum=checksum(batch["inputs"]),
            skipped=after.skipped,
            skipped_in_a_row=after.skipped_in_a_row,
            spike=spike,
        )
        metrics = jax.lax.with_sharding_constraint(metrics, sharding.replicated(mesh))
        # What is carried from step to step stays where it was.
        return StepOutput(place(after), metrics)

    return jax.jit(sharding.on_mesh(train_step, mesh), donate_argnums=0)


def _where(condition: jax.Array, chosen: Any, other: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), chosen, other)


def lower_train_step(config: ConfigDict, model: Decoder, optimizer: Optimizer, mesh: Mesh) -> jax.stages.Lowered:
    """The update of a config, ready to be compiled for the devices of the mesh, which need not be here.

    Raises:
        ValueError: mesh axes that do not divide an axis of a parameter.
    """
    state = abstract_state(model, optimizer, mesh)
    data = config.data
    batch = sharding.abstract_batch(mesh, data.batch_size, data.sequence_length, reset=data.reset)
    step = make_train_step(
        model,
        optimizer,
        accumulation_steps=config.accumulation_steps,
        vocab_chunks=config.vocab_chunks,
        mesh=mesh,
        spike_threshold=None if config.spikes.action == "none" else config.spikes.threshold,
    )
    platform = mesh.devices.flat[0].platform
    return step.trace(state, batch).lower(lowering_platforms=("cuda" if platform == "gpu" else platform,))
