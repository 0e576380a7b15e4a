"""The train step: accumulation, devices, and the figures it reports."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from interdomain_jax import sharding
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.training import optimizer as optimizers
from interdomain_jax.training.state import WideCount, init_state
from interdomain_jax.training.step import loss_and_gradient, make_train_step

INTERDOMAIN = Decoder(vocab_size=19, d_model=16, num_layers=1, num_heads=2, head_dim=8, state_dim=4)
# Where the mixer does not matter, the one that compiles fastest.
MODEL = INTERDOMAIN.copy(mixers=("softmax",))
OPTIMIZER = optimizers.make_optimizer(
    num_steps=10,
    warmup_steps=2,
    peak_learning_rate=2e-3,
    final_learning_rate=1e-5,
    ssm_peak_learning_rate=1e-3,
    weight_decay=0.1,
    clip_norm=1.0,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
)


def make_batch(lengths: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Rows of which the first `lengths[b]` tokens count."""
    rng = np.random.default_rng(1)
    shape = (len(lengths), 24)
    return {
        "inputs": rng.integers(19, size=shape, dtype=np.int32),
        "targets": rng.integers(19, size=shape, dtype=np.int32),
        "loss_mask": (np.arange(24) < np.array(lengths)[:, None]).astype(np.float32),
    }


@pytest.fixture(scope="module")
def params():
    return jax.jit(MODEL.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


@functools.partial(jax.jit, static_argnames="accumulation_steps")
def accumulated(params, batch, accumulation_steps):
    return loss_and_gradient(MODEL, params, batch, accumulation_steps=accumulation_steps, vocab_chunks=2)


@pytest.mark.parametrize("accumulation_steps", [1, 2, 4])
def test_every_token_weighs_the_same(params, accumulation_steps):
    """transformers#24725: the mean over all tokens, however they fall into micro-batches."""
    batch = make_batch((3, 24, 0, 11))

    def mean_loss(params):
        logits, _ = MODEL.apply({"params": params}, batch["inputs"])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(nats * batch["loss_mask"]) / 38

    loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(params)
    actual = accumulated(params, batch, accumulation_steps)
    assert actual.tokens == 38
    np.testing.assert_allclose(actual.loss, loss, rtol=1e-6)
    chex.assert_trees_all_close(actual.gradient, gradient, rtol=1e-5, atol=1e-6)


def test_a_batch_of_padding_has_no_gradient(params):
    actual = accumulated(params, make_batch((0, 0, 0, 0)), 2)
    assert actual.loss == 0
    assert actual.tokens == 0
    chex.assert_trees_all_equal(actual.gradient, jax.tree.map(jnp.zeros_like, params))


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_metrics_and_state_of_an_update(accumulation_steps):
    """maxtext#3452: the schedule counts updates, not micro-batches."""
    mesh = sharding.make_mesh(sharding.mesh_config(), jax.devices()[:1])
    state = init_state(MODEL, OPTIMIZER, seed=0, mesh=mesh)
    batch = sharding.place_batch(make_batch((24, 24, 5, 24)), mesh, 4)
    expected = accumulated(state.params, batch, 1)
    step = make_train_step(MODEL, OPTIMIZER, accumulation_steps=accumulation_steps, vocab_chunks=2, mesh=mesh)
    rates = []
    for _ in range(3):
        before = state
        state, metrics = step(state, batch)
        rates.append((float(metrics.learning_rate), float(metrics.ssm_learning_rate)))
        if len(rates) == 1:
            np.testing.assert_allclose(metrics.loss, expected.loss, rtol=1e-6)
            norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(expected.gradient)))
            np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-5)
    assert state.step == 3
    assert int(state.tokens_seen) == int(metrics.tokens_seen) == 3 * 77
    counts = [int(count) for _, count in optax.tree.get_all_with_path(state.opt_state, "count")]
    assert counts == [3] * 4, "Adam and the schedule of each group"
    assert metrics.tokens == 77
    norm = np.sqrt(sum(np.sum(np.square(p)) for p in jax.tree.leaves(state.params)))
    np.testing.assert_allclose(metrics.param_norm, norm, rtol=1e-5)
    np.testing.assert_allclose(rates[:2], [(1e-3, 5e-4), (2e-3, 1e-3)], rtol=1e-6)
    # The state is donated: its memory becomes the next state's.
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))


def test_tokens_seen_go_beyond_32_bits():
    count = WideCount(jnp.uint32(6), jnp.uint32(2**32 - 5))
    for _ in range(3):
        count = jax.jit(WideCount.plus)(count, jnp.int32(2**31 - 1))
    assert int(count) == 6 * 2**32 + 2**32 - 5 + 3 * (2**31 - 1)
