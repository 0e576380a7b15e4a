"""Stacked and separate layers hold the same model."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.modules.layer_layout import like_layers_of, separate_layers, stack_layers

PATTERNS = [("interdomain",), ("softmax", "interdomain")]
TOKENS = jnp.arange(12).reshape(2, 6) % 11


def make_decoder(mixers: tuple[str, ...], *, scan_layers: bool) -> Decoder:
    return Decoder(
        vocab_size=11,
        d_model=8,
        num_layers=2 * len(mixers),
        num_heads=2,
        head_dim=4,
        state_dim=3,
        mixers=mixers,
        scan_layers=scan_layers,
    )


def filled(abstract: Any) -> Any:
    """Numbers for every leaf, no two of them the same."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: random.uniform(0.1, 0.3, leaf.shape).astype(leaf.dtype), abstract)


@pytest.fixture(scope="module", params=PATTERNS, ids="-".join)
def separate(request):
    """A model with separate layers, and its parameters."""
    model = make_decoder(request.param, scan_layers=False)
    return model, filled(jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"])


def test_the_same_function(separate):
    model, params = separate
    scanned = make_decoder(model.mixers, scan_layers=True)
    stacked = stack_layers(params)
    wanted = jax.eval_shape(scanned.init, jax.random.key(0), TOKENS)["params"]
    chex.assert_trees_all_equal_shapes_and_dtypes(stacked, wanted)
    expected, _ = jax.jit(model.apply)({"params": params}, TOKENS)
    actual, _ = jax.jit(scanned.apply)({"params": stacked}, TOKENS)
    assert np.ptp(expected) > 1e-2
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_there_and_back(separate):
    _, params = separate
    stacked = stack_layers(params)
    chex.assert_trees_all_equal(separate_layers(stacked), params)
    chex.assert_trees_all_equal(stack_layers(separate_layers(stacked)), stacked)
    # What has no layers of the one kind is left as it is.
    chex.assert_trees_all_equal(separate_layers(params), params)
    chex.assert_trees_all_equal(stack_layers(stacked), stacked)


def test_moments_go_with_their_parameters(separate):
    _, params = separate
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    state = filled(jax.eval_shape(adam.init, params))
    stacked = stack_layers(state)
    chex.assert_trees_all_equal_shapes(stacked, jax.eval_shape(adam.init, stack_layers(params)))
    chex.assert_trees_all_equal(stacked[1][0].mu, stack_layers(state[1][0].mu))
    chex.assert_trees_all_equal(separate_layers(stacked), state)


def test_more_than_ten_layers_keep_their_order():
    params = {f"layers_{number}": {"scale": jnp.full((1,), number)} for number in range(12)}
    assert stack_layers(params)["layers"]["scale"][:, 0].tolist() == list(range(12))
    chex.assert_trees_all_equal(separate_layers(stack_layers(params)), params)


def test_like_the_layers_of_other_names(separate):
    _, params = separate
    stacked = stack_layers(params)
    names = ["params/norm/scale", "params/layers_0/block_0/mlp/w1/kernel"]
    chex.assert_trees_all_equal(like_layers_of(names, stacked), params)
    chex.assert_trees_all_equal(like_layers_of(names, params), params)
    chex.assert_trees_all_equal(like_layers_of(["params/layers/block_0/mlp/w1/kernel"], params), stacked)
    abstract = jax.eval_shape(lambda: params)
    assert like_layers_of(["optimizer/mu/layers/x"], abstract) == jax.eval_shape(lambda: stacked)
