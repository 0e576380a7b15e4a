"""The decoder: patterns of mixers, scanned layers, remat, and decoding that equals the whole-sequence call."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax import MIXERS, Decoder
from interdomain_jax.modules.decoder import Remat
from interdomain_jax.modules.layers import swiglu_hidden_dim
from tests.quick import quick_jit

SMALL = dict(vocab_size=61, d_model=16, num_layers=4, num_heads=2, head_dim=8, state_dim=8, chunk_size=8)
HYBRID = ("interdomain", "interdomain", "interdomain", "softmax")
LENGTH = 40


def tokens_of(seed=0, length=LENGTH):
    return jax.random.randint(jax.random.key(seed), (2, length), 0, SMALL["vocab_size"])


@functools.cache
def with_cache(model, jit):
    """The cached call, compiled once for each length of a piece."""
    return jit(lambda variables, piece, cache: model.apply(variables, piece, cache=cache))


def in_pieces(model, variables, tokens, sizes, *, jit=quick_jit):
    """Logits of the pieces, run one after the other through a cache."""
    assert sum(sizes) == tokens.shape[1]
    cache, logits = model.init_cache(len(tokens), LENGTH), []
    for piece in jnp.split(tokens, np.cumsum(sizes)[:-1], axis=1):
        out, cache = with_cache(model, jit)(variables, piece, cache)
        logits.append(out)
    return jnp.concatenate(logits, axis=1)


@pytest.mark.fast
@pytest.mark.parametrize("mixers", [*[(name,) for name in MIXERS], HYBRID])
def test_prefill_then_decode_equals_the_whole_sequence(mixers):
    """Logits to 1e-4: a prefill in two parts, then one token at a time past 30 tokens (mamba#683)."""
    model = Decoder(mixers=mixers, **SMALL | {"num_layers": len(mixers)})
    tokens = tokens_of()
    variables = quick_jit(model.init)(jax.random.key(1), tokens)
    whole, no_cache = jax.jit(model.apply)(variables, tokens)
    assert no_cache is None
    assert whole.dtype == jnp.float32
    sizes = [17, 3] + [1] * 20
    pieces = in_pieces(model, variables, tokens, sizes, jit=jax.jit if mixers == HYBRID else quick_jit)
    np.testing.assert_allclose(pieces, whole, atol=1e-4)
    assert float(whole.std()) > 0.05


PIECES = (1, 2, 5, 8, 9, 17)


@given(st.lists(st.sampled_from(PIECES), min_size=LENGTH))
def test_any_split_equals_the_whole_sequence(sizes):
    """Pieces shorter than, equal to and longer than a chunk of 8, in any order; what is left goes token by token."""
    fitting = [size for size, end in zip(sizes, np.cumsum(sizes), strict=True) if end <= LENGTH]
    fitting += [1] * (LENGTH - sum(fitting))
    model, variables, tokens, whole = hybrid_of_two_layers()
    np.testing.assert_allclose(in_pieces(model, variables, tokens, fitting), whole, atol=1e-4)


@functools.cache
def hybrid_of_two_layers():
    """Compiled once for all examples: the model, its parameters, tokens, and their logits."""
    model = Decoder(mixers=("interdomain", "softmax"), **SMALL | {"num_layers": 2})
    tokens = tokens_of()
    variables = quick_jit(model.init)(jax.random.key(1), tokens)
    return model, variables, tokens, quick_jit(model.apply)(variables, tokens)[0]


def mean_square(model, variables):
    """A loss of the logits, with its gradient."""
    return quick_jit(jax.value_and_grad(lambda v: jnp.mean(model.apply(v, tokens_of())[0] ** 2)))(variables)


@functools.cache
def two_repeats(mixers):
    """A model of layers that are not scanned, and its parameters."""
    model = Decoder(mixers=mixers, **SMALL | {"num_layers": 2 * len(mixers)})
    return model, quick_jit(model.init)(jax.random.key(1), tokens_of())


@functools.cache
def mean_square_of_two_repeats(mixers):
    return mean_square(*two_repeats(mixers))


def stacked(tree):
    """The parameters, or their gradient, as scanned layers hold them."""
    layers = {name: leaves for name, leaves in tree["params"].items() if name.startswith("layers_")}
    others = {name: leaves for name, leaves in tree["params"].items() if name not in layers}
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layers[f"layers_{i}"] for i in range(len(layers))))
    return {"params": others | {"layers": stack}}


@pytest.mark.parametrize(
    ("remat", "scan_layers"),
    [
        *((remat, True) for remat in ("none", "dots", "mixer_inputs", "full")),
        ("mixer_inputs", False),
        *(pytest.param(remat, False, marks=pytest.mark.slow) for remat in ("dots", "full")),
    ],
)
def test_neither_scan_nor_remat_changes_a_gradient(remat, scan_layers):
    mixers = ("interdomain", "softmax")
    plain, variables = two_repeats(mixers)
    value, gradient = mean_square_of_two_repeats(mixers)
    if scan_layers:
        variables, gradient = stacked(variables), stacked(gradient)
    actual, actual_gradient = mean_square(plain.clone(scan_layers=scan_layers, remat=remat), variables)
    assert float(actual) == pytest.approx(float(value), rel=1e-5)
    assert jax.tree.structure(actual_gradient) == jax.tree.structure(gradient)
    for mine, theirs in zip(jax.tree.leaves(actual_gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("mixers", [("interdomain",), ("interdomain", "softmax")])
def test_scanned_layers_decode_alike(mixers):
    plain, variables = two_repeats(mixers)
    pieces = in_pieces(plain.clone(scan_layers=True), stacked(variables), tokens_of(), [39, 1])
    np.testing.assert_allclose(pieces, quick_jit(plain.apply)(variables, tokens_of())[0], atol=1e-4)


def test_scanned_layers_do_not_begin_to_decode():
    model = hybrid_of_two_layers()[0].clone(scan_layers=True)
    with pytest.raises(ValueError, match="scan_layers is True; decode with separate layers"):
        model.begin_decoding({}, model.init_cache(1, 4))


def kept_bytes(model, tokens):
    """Bytes that a training step holds from the forward pass until the backward pass."""
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(variables):
        return jnp.sum(model.apply(variables, tokens, unembed=False)[0].astype(jnp.float32))

    kept = jax.eval_shape(lambda variables: jax.vjp(loss, variables)[1], variables)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize(
    ("mixer", "inputs"),
    [
        *(("interdomain", 3), ("s4d", 2), ("softmax", 3)),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in (("single_query", 3), ("dual_linear", 2))),
    ],
)
def test_remat_keeps_what_it_says(mixer, inputs, scan_layers):
    """To the byte, in bfloat16: "dots" keeps every product but W2's, which no gradient needs."""
    settings = SMALL | {"d_model": 32, "head_dim": 8, "num_heads": 3, "num_layers": 2}
    model = Decoder(mixers=(mixer,), dtype="bfloat16", scan_layers=scan_layers, **settings)
    tokens = tokens_of()
    kept = {remat: kept_bytes(model.clone(remat=remat), tokens) for remat in get_args(Remat)}
    per_channel = 2 * tokens.size * model.num_layers
    assert kept["mixer_inputs"] - kept["full"] == per_channel * inputs * 24
    assert kept["dots"] - kept["full"] == per_channel * (inputs * 24 + 32 + 2 * swiglu_hidden_dim(32))
    assert kept["none"] > 2 * kept["dots"]


def test_hidden_states_in_place_of_logits():
    model = Decoder(mixers=("softmax",), dtype="bfloat16", **SMALL | {"num_layers": 1})
    tokens = tokens_of()
    variables = jax.jit(model.init, static_argnames="unembed")(jax.random.key(1), tokens, unembed=False)
    logits, _ = jax.jit(model.apply)(variables, tokens)
    hidden, _ = jax.jit(model.apply, static_argnames="unembed")(variables, tokens, unembed=False)
    assert (hidden.dtype, hidden.shape) == (jnp.bfloat16, (*tokens.shape, SMALL["d_model"]))
    kernel = variables["params"]["unembed"]["kernel"].astype(jnp.bfloat16)
    np.testing.assert_allclose(np.float64(hidden) @ np.float64(kernel), logits, atol=1e-5)


def test_a_hybrid_repeats_its_pattern():
    variables = jax.eval_shape(
        Decoder(mixers=HYBRID, **(SMALL | {"num_layers": 8})).init, jax.random.key(0), tokens_of()
    )
    for i in range(2):
        pattern = variables["params"][f"layers_{i}"]
        recurrent = [("readout_real" in pattern[f"block_{j}"]["mixer"]) for j in range(4)]
        assert recurrent == [True, True, True, False]


def test_residual_outputs_start_smaller():
    """W_O and W2 have standard deviation 0.02 / sqrt(2 layers), every other matrix 0.02 (paper, section 5)."""
    model = Decoder(vocab_size=500, d_model=128, num_layers=2, num_heads=4, head_dim=32, state_dim=4)
    params = quick_jit(model.init)(jax.random.key(0), tokens_of())["params"]
    block = params["layers_0"]["block_0"]
    for small in (block["mixer"]["output"]["kernel"], block["mlp"]["w2"]["kernel"]):
        assert float(small.std()) == pytest.approx(0.01, rel=0.05)
    for usual in (block["mixer"]["key"]["kernel"], block["mlp"]["w1"]["kernel"], params["unembed"]["kernel"]):
        assert float(usual.std()) == pytest.approx(0.02, rel=0.05)
    assert float(params["embed"]["embedding"].std()) == pytest.approx(0.02, rel=0.05)


def test_mixed_precision_keeps_float32_parameters_and_logits():
    tokens = tokens_of()
    settings = SMALL | {"mixers": ("interdomain", "softmax"), "num_layers": 2}
    model = Decoder(dtype="bfloat16", param_dtype="float32", **settings)
    variables = quick_jit(model.init)(jax.random.key(1), tokens)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    logits, _ = jax.jit(model.apply)(variables, tokens)
    assert logits.dtype == jnp.float32
    assert (logits != logits.astype(jnp.bfloat16).astype(jnp.float32)).any()
    exact, _ = jax.jit(Decoder(**settings).apply)(variables, tokens)
    assert float(jnp.abs(logits - exact).max()) < 0.05


@pytest.mark.parametrize(("name", "rotates"), [("interdomain", True), ("softmax", True), ("s4d", False)])
def test_the_base_of_the_rotations_reaches_the_mixers(name, rotates):
    tokens = tokens_of()
    model = Decoder(mixers=(name,), **SMALL | {"num_layers": 1})
    variables = quick_jit(model.init)(jax.random.key(1), tokens)
    usual, other = (quick_jit(each.apply)(variables, tokens)[0] for each in (model, model.clone(rope_base=50.0)))
    assert bool((usual != other).any()) == rotates


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(mixers=("mamba",)), "mixers must be names from ('interdomain', "),
        (dict(mixers=()), "mixers must be names from"),
        (dict(num_layers=0), "num_layers must be at least 1; got 0"),
        (
            dict(num_layers=3, mixers=("s4d", "softmax")),
            "num_layers must be a multiple of the 2 mixers of the pattern; got 3",
        ),
        (dict(head_dim=7), "head_dim must be even, for RoPE turns pairs of channels; got 7"),
        (dict(num_kv_heads=3), "num_kv_heads must divide num_heads = 2; got 3"),
        (dict(chunk_size=0), "chunk_size must lie between 1 and 4096; got 0"),
        (dict(init_std=0.0), "init_std must be above 0; got 0.0"),
        (dict(rope_base=-1.0), "rope_base must be above 0; got -1.0"),
        (dict(rope_base=float("nan")), "rope_base must be above 0; got nan"),
        (dict(delta_range=(0.1, 0.01)), "delta_range must be two numbers above 0, the smaller first; got (0.1, 0.01)"),
        (dict(delta_range=(0.0, 0.1)), "delta_range must be two numbers above 0, the smaller first; got (0.0, 0.1)"),
        (dict(mlp_dim=0), "mlp_dim must be at least 1; got 0"),
        (dict(read="real"), "read must be one of ('bilinear', 'hermitian'); got 'real'"),
        (dict(remat=True), "remat must be one of ('none', 'dots', 'mixer_inputs', 'full'); got True"),
        (
            dict(implementation="cuda"),
            "implementation must be one of (None, 'sequential', 'associative', 'fft', 'xla', 'pallas_tpu', "
            "'pallas_gpu'); got 'cuda'",
        ),
    ],
)
def test_bad_fields_get_one_sentence(change, message):
    with pytest.raises(ValueError) as error:
        Decoder(**(SMALL | change))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
