"""The optimizer against hand-made tables and NumPy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import common
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.training import optimizer as optimizers

RECIPE = {
    "num_steps": 8,
    "warmup_steps": 4,
    "peak_learning_rate": 3e-3,
    "final_learning_rate": 1e-5,
    "ssm_peak_learning_rate": 1e-3,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
}

# Every leaf name a model can have, and its group.
GOLDEN_GROUPS = {
    "kernel": "decay",
    "embedding": "decay",
    "scale": "no_decay",
    "channel_weights": "no_decay",
    "mode_weights": "no_decay",
    "log_delta": "ssm",
    "log_neg_a_real": "ssm",
    "a_imag": "ssm",
    "readout_real": "ssm",
    "readout_imag": "ssm",
    "key_scale": "ssm",
    "key_bias": "ssm",
    "value_scale": "ssm",
    "value_bias": "ssm",
}


def test_rates_of_a_small_run():
    """torchtitan#1261: warm-up off by one. The first rate is not 0, the last is the final one."""
    schedule = optimizers.learning_rate_schedule(1.0, final=0.1, warmup_steps=4, num_steps=8)
    rates = [float(schedule(updates_done)) for updates_done in range(8)]
    golden = [0.25, 0.5, 0.75, 1.0, 0.8681981, 0.55, 0.2318019, 0.1]
    np.testing.assert_allclose(rates, golden, rtol=1e-6)


def test_rates_that_are_applied_also_after_a_resume():
    """torchtitan#1261: a gradient that stays the same has updates of size 1 times the rate."""
    golden = [0.75e-3, 1.5e-3, 2.25e-3, 3e-3, 2.562125e-3, 1.505e-3, 4.478754e-4, 1e-5]
    ssm_golden = [0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 8.550179e-4, 5.05e-4, 1.549821e-4, 1e-5]
    params = {"scale": jnp.zeros(2), "log_delta": jnp.zeros(2)}
    gradient = {"scale": jnp.full(2, 0.3), "log_delta": jnp.full(2, -0.2)}
    state = optimizers.make_optimizer(**RECIPE).transformation.init(params)
    for updates_done, (rate, ssm_rate) in enumerate(zip(golden, ssm_golden, strict=True)):
        if updates_done in (3, 6):
            # What a checkpoint holds, and an optimizer made anew.
            state = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state)
        updates, state = optimizers.make_optimizer(**RECIPE).transformation.update(gradient, state, params)
        np.testing.assert_allclose(updates["scale"], -rate, rtol=1e-5)
        np.testing.assert_allclose(updates["log_delta"], ssm_rate, rtol=1e-5)


def test_rates_without_warmup():
    schedule = optimizers.learning_rate_schedule(1.0, final=0.5, warmup_steps=0, num_steps=2)
    np.testing.assert_allclose([schedule(0), schedule(1)], [0.75, 0.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("peak", "ssm_peak", "tokens", "num_steps"),
    [(3e-3, 1e-3, 2.5e9, 4768), (1.5e-3, 1e-3, 7e9, 13_351), (1e-3, 1e-3, 26e9, 49_591)],
)
def test_rates_of_the_published_runs(peak, ssm_peak, tokens, num_steps):
    """Paper section 5: 375 M tokens of warm-up are 715 updates; the cosine ends at 1e-5."""
    config = common.published_config(
        "interdomain",
        name="published",
        d_model=768,
        num_layers=12,
        num_heads=12,
        head_dim=64,
        tokens=tokens,
        peak_learning_rate=peak,
    )
    assert config.num_steps == num_steps
    built = optimizers.make_optimizer(num_steps=config.num_steps, **config.optimizer)
    updates = np.array([1, 2, 357, 714, 715, 716, 2000, 4000, num_steps - 1, num_steps])
    for schedule, top in ((built.learning_rate, peak), (built.ssm_learning_rate, ssm_peak)):
        cosine = (1 + np.cos(np.pi * (updates - 715) / (num_steps - 715))) / 2
        golden = np.where(updates <= 715, top * updates / 715, 1e-5 + (top - 1e-5) * cosine)
        rates = [float(schedule(update - 1)) for update in updates]
        np.testing.assert_allclose(rates, golden, rtol=2e-5)
        assert rates[0] == pytest.approx(top / 715, rel=2e-5)
        assert rates[-1] == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_steps": 8}, "warmup_steps is 8"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"peak_learning_rate": 1e-6}, "final_learning_rate is 1e-05"),
        ({"final_learning_rate": 0.0}, "final_learning_rate is 0.0"),
        ({"beta2": 1.0}, "betas are 0.9 and 1.0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"clip_norm": 0.0}, "clip_norm 0.0"),
        ({"moment_dtype": "float16"}, "moment_dtype is 'float16'; it must be 'float32' or 'bfloat16'"),
        ({"moment_dtype": "bfloat16", "beta2": 0.999}, "betas are 0.9 and 0.999; with moments in bfloat16"),
    ],
)
def test_arguments_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        optimizers.make_optimizer(**(RECIPE | changes))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_groups_of_every_parameter(scan_layers):
    """optax#25: decay on norms and biases. The groups of a model with all kinds of leaves."""
    model = Decoder(
        vocab_size=11,
        d_model=16,
        num_layers=4,
        num_heads=2,
        head_dim=8,
        state_dim=4,
        mixers=("interdomain", "s4d"),
        scan_layers=scan_layers,
    )
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    groups = jax.tree_util.tree_leaves_with_path(optimizers.parameter_groups(params))
    assert {path[-1].key for path, _ in groups} == GOLDEN_GROUPS.keys()
    for path, group in groups:
        assert group == GOLDEN_GROUPS[path[-1].key], jax.tree_util.keystr(path)


def test_without_a_gradient_decay_alone_is_left():
    """optax#25, as it is applied: 0.1 times the rate in the decayed group, nothing anywhere else."""
    params = {name: jnp.ones(2) for name in GOLDEN_GROUPS}
    built = optimizers.make_optimizer(**RECIPE)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(built.transformation.update)(zeros, built.transformation.init(params), params)
    for name, update in updates.items():
        decay = 0.1 if GOLDEN_GROUPS[name] == "decay" else 0.0
        np.testing.assert_allclose(update, -decay * 3e-3 / 4, rtol=1e-6)


def test_two_updates_of_each_group_equal_adamw_by_hand():
    """One leaf of each group; the second gradient is clipped, by its norm over all groups."""
    names = ("kernel", "scale", "log_delta")
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(3, 2)) for name in names}
    gradients = [{name: size * rng.normal(size=(3, 2)) for name in names} for size in (0.1, 50.0)]
    norms = [np.sqrt(sum(np.sum(g**2) for g in gradient.values())) for gradient in gradients]
    assert norms[0] < 1 < norms[1]

    built = optimizers.make_optimizer(**RECIPE)
    actual = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    state = built.transformation.init(actual)
    for gradient in gradients:
        gradient = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradient)
        updates, state = built.transformation.update(gradient, state, actual)
        actual = jax.tree.map(jnp.add, actual, updates)

    rates = {
        "kernel": (3e-3 / 4, 3e-3 / 2),
        "scale": (3e-3 / 4, 3e-3 / 2),
        "log_delta": (1e-3 / 4, 1e-3 / 2),
    }
    for name in names:
        expected, first, second = params[name], 0.0, 0.0
        for n, (gradient, norm, rate) in enumerate(zip(gradients, norms, rates[name], strict=True)):
            clipped = gradient[name] / max(norm, 1.0)
            first = 0.9 * first + 0.1 * clipped
            second = 0.95 * second + 0.05 * clipped**2
            step = first / (1 - 0.9 ** (n + 1)) / (np.sqrt(second / (1 - 0.95 ** (n + 1))) + 1e-8)
            decay = 0.1 if name == "kernel" else 0.0
            expected = expected - rate * (step + decay * expected)
        np.testing.assert_allclose(actual[name], expected, rtol=2e-6, atol=1e-7)


def fifty_updates(moment_dtype):
    """Linear regression on noisy batches; the parameters before and after, and the optimizer's state."""
    recipe = RECIPE | {"num_steps": 50, "peak_learning_rate": 0.1, "moment_dtype": moment_dtype}
    built = optimizers.make_optimizer(**recipe)
    rng = np.random.default_rng(0)
    start = {"kernel": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)}
    wanted = rng.normal(size=(8, 4))
    params, state = start, built.transformation.init(start)
    for _ in range(50):
        inputs = rng.normal(size=(16, 8))
        targets = inputs @ wanted + 0.1 * rng.normal(size=(16, 4))
        gradient = {"kernel": 2 * inputs.T @ (inputs @ params["kernel"] - targets) / targets.size}
        updates, state = built.transformation.update(gradient, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return start["kernel"], params["kernel"], state


def test_moments_in_bfloat16_stay_near_float32():
    """After fifty updates the parameters are within half a percent of the way they went."""
    start, expected, _ = fifty_updates("float32")
    _, actual, state = fifty_updates("bfloat16")
    (moments,) = (part for part in state if isinstance(part, optax.ScaleByAdamState))
    assert moments.mu["kernel"].dtype == moments.nu["kernel"].dtype == jnp.bfloat16
    assert actual.dtype == jnp.float32
    assert 0 < np.linalg.norm(actual - expected) < 0.005 * np.linalg.norm(expected - start)


def test_moments_in_bfloat16_forget():
    """Fed no more, the second moment shrinks by 5 % an update, as rounding lets it."""
    built = optimizers.make_optimizer(**(RECIPE | {"moment_dtype": "bfloat16", "num_steps": 101}))
    params = {"scale": jnp.zeros(1)}
    state = built.transformation.init(params)
    for gradient in (1.0, *[0.0] * 100):
        _, state = built.transformation.update({"scale": jnp.full(1, gradient)}, state, params)
    (moments,) = (part for part in state if isinstance(part, optax.ScaleByAdamState))
    assert float(moments.nu["scale"][0]) == pytest.approx(0.05 * 0.95**100, rel=0.2)


def test_moments_in_float32_are_optax_own():
    params = {"kernel": jnp.ones((2, 3)), "log_delta": jnp.ones(2)}
    state = optimizers.make_optimizer(**RECIPE).transformation.init(params)
    (moments,) = (part for part in state if isinstance(part, optax.ScaleByAdamState))
    chex.assert_trees_all_equal(moments, optax.scale_by_adam().init(params))
    low = optimizers.make_optimizer(**(RECIPE | {"moment_dtype": "bfloat16"})).transformation.init(params)
    assert jax.tree.structure(low) == jax.tree.structure(state)
