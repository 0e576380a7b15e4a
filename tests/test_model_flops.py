"""The arithmetic by formula, against XLA's own count, the parameters, and the published sizes."""

import jax
import jax.numpy as jnp
import pytest

from interdomain_jax import MIXERS, Decoder
from interdomain_jax.model_flops import forward_flops, train_step_flops
from interdomain_jax.ops.chunk_sizes import default_chunk_size
from pallas_kernels.block_sizes import block_sizes

TOKENS = 64
SMALL = dict(vocab_size=512, d_model=256, num_layers=1, num_heads=4, head_dim=64, state_dim=32, chunk_size=TOKENS)
# Softmax layers at the published 1.3B size, and the published number of parameters.
LARGE = dict(vocab_size=32_000, d_model=2048, num_layers=24, num_heads=32, head_dim=64)
LARGE_PARAMETERS = 1_345_423_360


def model_of(*mixers, **settings):
    return Decoder(mixers=mixers, **(SMALL | settings))


def shapes_of(model):
    tokens = jax.ShapeDtypeStruct((2, TOKENS), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens), tokens


def counted_by_xla(model):
    """Flops a token of the program as it is lowered; its loops have one turn at these sizes."""
    lowered = jax.jit(lambda params, tokens: model.apply(params, tokens)[0]).lower(*shapes_of(model))
    return lowered.cost_analysis()["flops"] / (2 * TOKENS)


def unseen_half(model):
    """What XLA counts of softmax attention's scores and sums for keys in the future."""
    layers = model.num_layers * model.mixers.count("softmax") / len(model.mixers)
    return layers * 2 * model.num_heads * model.head_dim * (TOKENS - 1)


@pytest.mark.parametrize("settings", [{}, {"num_kv_heads": 2, "output_gate": True}], ids=["", "grouped and gated"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_within_two_percent_of_xlas_count(mixer, settings):
    """XLA adds what is no matrix product: between nothing and 2 % more, where such products dominate."""
    model = model_of(mixer, **settings)
    assert 1 < counted_by_xla(model) / (forward_flops(model, TOKENS) + unseen_half(model)) < 1.02


def test_a_hybrid_is_within_two_percent_of_xlas_count():
    model = model_of("interdomain", "softmax", "s4d", num_layers=6)
    assert 1 < counted_by_xla(model) / (forward_flops(model, TOKENS) + unseen_half(model)) < 1.02


def mixing(kind, *, kv_heads):
    """The flops of a small model that no parameter multiplies, by hand: K = R = D = 64, M = 32, 4 heads."""
    match kind:
        case "softmax":
            # 32.5 keys on average, each scored and added in.
            return 4 * 2 * 2 * 64 * 32.5
        case "query":
            # Scores, lags of the read, lags of the output, the sum; the carried state's y and o; the read; the write.
            chunk = 2 * 64 * 64 + 2 * 64 * 64 + 2 * 64 * 64 + 2 * 64 * 64
            return 4 * (chunk + 2 * 64 * 64 + 2 * 64 * 64 + 2 * 64 * 64) + kv_heads * 2 * 64 * 128
        case "linear":
            # The chunk's kernel, the carried state, the write, over 128 channels.
            return 4 * 3 * 2 * 64 * 128


KINDS = dict.fromkeys(MIXERS, "query") | {"softmax": "softmax"}
KINDS |= dict.fromkeys(("dual_linear", "s4d", "s4d_rope"), "linear")


@pytest.mark.parametrize("settings", [{}, {"num_kv_heads": 2}, {"output_gate": True}, {"mlp_dim": 100}], ids=str)
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_matrix_and_tap_counts_twice(mixer, settings):
    """Exactly: two flops for each entry of a kernel, and the mixing by hand."""
    model = model_of(mixer, **settings)
    leaves = jax.tree_util.tree_leaves_with_path(shapes_of(model)[0])
    kernels = sum(leaf.size for path, leaf in leaves if path[-1].key == "kernel")
    expected = 2 * kernels + mixing(KINDS[mixer], kv_heads=model.num_kv_heads or 4)
    assert forward_flops(model, TOKENS) == expected


def test_published_softmax_takes_six_flops_a_parameter_and_its_attention():
    model = Decoder(mixers=("softmax",), **LARGE)
    looked_up, norms = 32_000 * 2048, (2 * 24 + 1) * 2048
    attention = 12 * 24 * 2048 * 4097 / 2
    expected = 6 * (LARGE_PARAMETERS - looked_up - norms) + attention
    assert train_step_flops(model, tokens=1, context_length=4096) == expected
    # 6 N D and the half of 12 L H Q T, as it is commonly taken; the embedding, looked up, is 5 % of N.
    assert expected == pytest.approx(6 * LARGE_PARAMETERS + 12 * 24 * 2048 * 4096 / 2, rel=0.05)


def test_published_interdomain_takes_as_much_at_any_length():
    """Its mixing is 6.3 M flops a token and layer at K = 128, where causal softmax has 16.8 M at 4,096."""
    model = Decoder(mixers=("interdomain",), chunk_size=128, **LARGE)
    softmax = Decoder(mixers=("softmax",), **LARGE)
    assert forward_flops(model, 4096) == forward_flops(model, 65_536)
    token = 32 * (2 * 128 * (128 + 256) + 8 * 64**2 + 8 * 64 * 128)
    taps = 2 * 4 * 2 * 2048
    more = 24 * (token + taps - 2 * 2048 * 4097)
    assert forward_flops(model, 4096) - forward_flops(softmax, 4096) == more
    assert token == pytest.approx(6.3e6, rel=0.01)


def test_the_chunk_size_is_the_one_that_runs():
    """Unless one is given, the op's default for the device, or a kernel's; never more than there are tokens."""
    unset = model_of("interdomain", chunk_size=None)
    assert forward_flops(unset, 512) == forward_flops(unset.clone(chunk_size=default_chunk_size(32, 128)), 512)
    kernel = unset.clone(implementation="pallas_gpu")
    assert block_sizes(32, 128).chunk_size != default_chunk_size(32, 128)
    assert forward_flops(kernel, 512) == forward_flops(unset.clone(chunk_size=block_sizes(32, 128).chunk_size), 512)
    assert forward_flops(unset, 8) == forward_flops(unset.clone(chunk_size=8), 8)


@pytest.mark.parametrize("fields", [{"scan_layers": True}, {"remat": "full"}, {"dtype": jnp.bfloat16}], ids=str)
def test_how_a_model_runs_does_not_change_its_flops(fields):
    model = model_of("interdomain", num_layers=4)
    assert forward_flops(model.clone(**fields), TOKENS) == forward_flops(model, TOKENS)


def test_a_step_is_three_forward_passes():
    model = model_of("interdomain")
    assert train_step_flops(model, tokens=1000, context_length=TOKENS) == 3000 * forward_flops(model, TOKENS)


def test_a_context_without_tokens_is_refused():
    with pytest.raises(ValueError, match="context_length must be at least 1, got 0"):
        forward_flops(model_of("softmax"), 0)
