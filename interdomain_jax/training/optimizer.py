"""AdamW with the paper's parameter groups and schedule (paper section 5)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

DECAY, NO_DECAY, SSM = "decay", "no_decay", "ssm"

# Groups go by the leaf's own name, so that stacked (scanned) and separate layers agree.
_DECAYED_LEAVES = frozenset({"kernel", "embedding"})
_SSM_LEAVES = frozenset(
    {
        "log_delta",
        "log_neg_a_real",
        "a_imag",
        "readout_real",
        "readout_imag",
        "key_scale",
        "key_bias",
        "value_scale",
        "value_bias",
    }
)


# A moment moves by (1 - beta) of its distance to the new value, and bfloat16 drops what is below 0.4 % of it. With the
# paper's beta2 = 0.95 a moment that is no longer fed shrinks by 5 % an update, and one that is fed stays within 8 % of
# its due, 4 % of the step. With beta2 = 0.999 it would shrink by 0.1 %, rounded away: it would never forget. The bound
# leaves five times the rounding.
_LARGEST_BFLOAT16_BETA = 0.98


class Optimizer(NamedTuple):
    """The gradient transformation and the rates it follows.

    Attributes:
        transformation: clips, scales by Adam's moments, decays and applies the rates.
        learning_rate: number of updates done -> rate of the next one.
        ssm_learning_rate: the same for the SSM group.
    """

    transformation: optax.GradientTransformation
    learning_rate: optax.Schedule
    ssm_learning_rate: optax.Schedule


def learning_rate_schedule(peak: float, *, final: float, warmup_steps: int, num_steps: int) -> optax.Schedule:
    """Linear warm-up, then cosine decay that arrives at `final` with the last update.

    Update n of N (counted from 1) has rate `peak * n / warmup_steps` during warm-up and
    `final + (peak - final) * (1 + cos(pi (n - warmup_steps) / (N - warmup_steps))) / 2` after it.
    No update has rate 0.

    Args:
        peak: rate of update `warmup_steps`, the largest.
        final: rate of update `num_steps`, the last.
        warmup_steps: updates of warm-up; 0 for none.
        num_steps: updates in the whole run, warm-up included.

    Returns:
        A function from the number of updates already done to the rate of the next.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 0 <= warmup_steps < num_steps:
        raise ValueError(
            f"optimizer.warmup_steps is {warmup_steps}; it must be at least 0 and below num_steps, {num_steps}"
        )
    if not 0 < final <= peak:
        raise ValueError(
            f"optimizer.final_learning_rate is {final}; it must be above 0 and at most the peak rate, {peak}"
        )
    by_update = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=peak,
        warmup_steps=warmup_steps,
        decay_steps=num_steps,
        end_value=final,
    )
    return lambda updates_done: by_update(updates_done + 1)


def parameter_groups(params: Any) -> Any:
    """Labels every leaf of `params` with its group.

    `decay`: matrices, embeddings and the taps of the convolutions. `ssm`: Delta, A, C and the scales and biases of
    the input RMSNorm, which have their own rate and no decay. `no_decay`: all the rest, such as the backbone's norm
    scales and the channel weights of B.
    """

    def group(path: tuple[Any, ...], _: Any) -> str:
        name = path[-1].key
        if name in _SSM_LEAVES:
            return SSM
        return DECAY if name in _DECAYED_LEAVES else NO_DECAY

    return jax.tree_util.tree_map_with_path(group, params)


def make_optimizer(
    *,
    num_steps: int,
    warmup_steps: int,
    peak_learning_rate: float,
    final_learning_rate: float,
    ssm_peak_learning_rate: float,
    weight_decay: float,
    clip_norm: float,
    beta1: float,
    beta2: float,
    eps: float,
    moment_dtype: str = "float32",
) -> Optimizer:
    """Builds AdamW for the three groups of `parameter_groups`.

    The gradient is clipped by its norm over all groups together. Decay is decoupled: it is scaled
    by the rate, not by Adam's moments.

    Args:
        num_steps: updates in the whole run; micro-batches do not count.
        warmup_steps: updates of linear warm-up.
        peak_learning_rate: rate at the end of warm-up.
        final_learning_rate: rate of the last update, for every group.
        ssm_peak_learning_rate: bound on the SSM group's peak; the smaller of the two peaks holds.
        weight_decay: of the `decay` group.
        clip_norm: largest global norm of a gradient.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        moment_dtype: what both moments are kept in, "float32" or "bfloat16"; they are worked on in float32. The paper
            does not say, and float32 is what its tools do.

    Raises:
        ValueError: an argument is out of range.
    """
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"optimizer betas are {beta1} and {beta2}; they must lie in [0, 1)")
    if weight_decay < 0 or clip_norm <= 0 or eps <= 0:
        raise ValueError(
            f"optimizer.weight_decay is {weight_decay}, clip_norm {clip_norm} and eps {eps}; the "
            "first must not be negative, and the others must be positive"
        )
    if moment_dtype not in ("float32", "bfloat16"):
        raise ValueError(f"optimizer.moment_dtype is {moment_dtype!r}; it must be 'float32' or 'bfloat16'")
    if moment_dtype == "bfloat16" and max(beta1, beta2) > _LARGEST_BFLOAT16_BETA:
        raise ValueError(
            f"optimizer betas are {beta1} and {beta2}; with moments in bfloat16, which rounds by 0.4 %, they must be "
            f"at most {_LARGEST_BFLOAT16_BETA}"
        )
    learning_rate, ssm_learning_rate = (
        learning_rate_schedule(peak, final=final_learning_rate, warmup_steps=warmup_steps, num_steps=num_steps)
        for peak in (peak_learning_rate, min(peak_learning_rate, ssm_peak_learning_rate))
    )

    def is_decayed(params: Any) -> Any:
        return jax.tree.map(lambda group: group == DECAY, parameter_groups(params))

    rates = {DECAY: learning_rate, NO_DECAY: learning_rate, SSM: ssm_learning_rate}
    transformation = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        _with_moments_in(moment_dtype, optax.scale_by_adam(b1=beta1, b2=beta2, eps=eps)),
        optax.add_decayed_weights(weight_decay, mask=is_decayed),
        optax.partition(
            {group: optax.scale_by_learning_rate(rate) for group, rate in rates.items()},
            parameter_groups,
        ),
    )
    return Optimizer(transformation, learning_rate, ssm_learning_rate)


def _with_moments_in(dtype: str, adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with both moments kept in `dtype` between updates."""
    if dtype == "float32":
        return adam

    def cast(state: optax.ScaleByAdamState, dtype: jax.typing.DTypeLike) -> optax.ScaleByAdamState:
        return state._replace(mu=optax.tree.cast(state.mu, dtype), nu=optax.tree.cast(state.nu, dtype))

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        return cast(adam.init(params), dtype)

    def update(
        updates: optax.Updates, state: optax.ScaleByAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
        updates, state = adam.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)
