"""The decoder: patterns of mixers, scanned layers, remat, and decoding that equals the whole-sequence call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax import MIXERS, Decoder

SMALL = dict(vocab_size=61, d_model=16, num_layers=4, num_heads=2, head_dim=8, state_dim=8, chunk_size=8)
HYBRID = ("interdomain", "interdomain", "interdomain", "softmax")
LENGTH = 40


def tokens_of(seed=0, length=LENGTH):
    return jax.random.randint(jax.random.key(seed), (2, length), 0, SMALL["vocab_size"])


@functools.cache
def with_cache(model):
    """The cached call, compiled once for each length of a piece."""
    return jax.jit(lambda variables, piece, cache: model.apply(variables, piece, cache=cache))


def in_pieces(model, variables, tokens, sizes):
    """Logits of the pieces, run one after the other through a cache."""
    assert sum(sizes) == tokens.shape[1]
    cache, logits = model.init_cache(len(tokens), LENGTH), []
    for piece in jnp.split(tokens, np.cumsum(sizes)[:-1], axis=1):
        out, cache = with_cache(model)(variables, piece, cache)
        logits.append(out)
    return jnp.concatenate(logits, axis=1)


@pytest.mark.fast
@pytest.mark.parametrize("mixers", [*[(name,) for name in MIXERS], HYBRID])
def test_prefill_then_decode_equals_the_whole_sequence(mixers):
    """Logits to 1e-4: a prefill in two parts, then one token at a time past 30 tokens (mamba#683)."""
    model = Decoder(mixers=mixers, **SMALL | {"num_layers": len(mixers)})
    tokens = tokens_of()
    variables = jax.jit(model.init)(jax.random.key(1), tokens)
    whole, no_cache = jax.jit(model.apply)(variables, tokens)
    assert no_cache is None
    assert whole.dtype == jnp.float32
    pieces = in_pieces(model, variables, tokens, [17, 3] + [1] * 20)
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
    variables = jax.jit(model.init)(jax.random.key(1), tokens)
    return model, variables, tokens, jax.jit(model.apply)(variables, tokens)[0]


@pytest.mark.parametrize("mixers", [("interdomain",), ("interdomain", "softmax")])
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_are_the_same_function(mixers, remat):
    tokens = tokens_of()
    settings = SMALL | {"num_layers": 2 * len(mixers)}
    plain = Decoder(mixers=mixers, **settings)
    variables = jax.jit(plain.init)(jax.random.key(1), tokens)
    layers = {name: params for name, params in variables["params"].items() if name.startswith("layers_")}
    others = {name: params for name, params in variables["params"].items() if name not in layers}
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layers[f"layers_{i}"] for i in range(len(layers))))
    scanned = Decoder(mixers=mixers, scan_layers=True, remat=remat, **settings)
    scanned_variables = {"params": others | {"layers": stacked}}

    def loss(model, variables):
        return jnp.mean(model.apply(variables, tokens)[0] ** 2)

    value, gradient = jax.jit(jax.value_and_grad(lambda v: loss(plain, v)))(variables)
    scanned_value, scanned_gradient = jax.jit(jax.value_and_grad(lambda v: loss(scanned, v)))(scanned_variables)
    assert float(value) == pytest.approx(float(scanned_value), rel=1e-5)
    for i in range(len(layers)):
        pairs = zip(
            jax.tree.leaves(gradient["params"][f"layers_{i}"]),
            jax.tree.leaves(scanned_gradient["params"]["layers"]),
            strict=True,
        )
        for mine, theirs in pairs:
            np.testing.assert_allclose(mine, theirs[i], rtol=1e-3, atol=1e-6)
    pieces = in_pieces(scanned, scanned_variables, tokens, [39, 1])
    np.testing.assert_allclose(pieces, jax.jit(plain.apply)(variables, tokens)[0], atol=1e-4)


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
    params = jax.jit(model.init)(jax.random.key(0), tokens_of())["params"]
    block = params["layers_0"]["block_0"]
    for small in (block["mixer"]["output"]["kernel"], block["mlp"]["w2"]["kernel"]):
        assert float(small.std()) == pytest.approx(0.01, rel=0.05)
    for usual in (block["mixer"]["key"]["kernel"], block["mlp"]["w1"]["kernel"], params["unembed"]["kernel"]):
        assert float(usual.std()) == pytest.approx(0.02, rel=0.05)
    assert float(params["embed"]["embedding"].std()) == pytest.approx(0.02, rel=0.05)


def test_mixed_precision_keeps_float32_parameters_and_logits():
    tokens = tokens_of()
    model = Decoder(mixers=HYBRID, dtype="bfloat16", param_dtype="float32", **SMALL)
    variables = jax.jit(model.init)(jax.random.key(1), tokens)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    logits, _ = model.apply(variables, tokens)
    assert logits.dtype == jnp.float32
    assert (logits != logits.astype(jnp.bfloat16).astype(jnp.float32)).any()
    exact, _ = Decoder(mixers=HYBRID, **SMALL).apply(variables, tokens)
    assert float(jnp.abs(logits - exact).max()) < 0.05


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
        (dict(read="real"), "read must be one of ('bilinear', 'hermitian'); got 'real'"),
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
