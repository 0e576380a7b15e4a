"""The op: against the paper's own form in NumPy, chunked against sequential in double precision, and its contract."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax.ops import interdomain_attention, linear_contraction
from tests.numerics import (
    assert_close,
    paper_attention,
    paper_coefficients,
    random_dynamics,
    random_like,
    random_qkv,
    to_float64,
    to_numpy,
)

READS = ("bilinear", "hermitian")


def with_gradients(op, inputs, cotangents):
    """The op's outputs, and the gradient of every input for the given cotangents, in one compilation."""

    @jax.jit
    def run(inputs, cotangents):
        outputs, pull_back = jax.vjp(lambda kwargs: op(**kwargs), inputs)
        return outputs, pull_back(cotangents)[0]

    return run(inputs, cotangents)


def check_against_float64(op, inputs, rng, **settings):
    """Chunked float32 against the sequential form in float64, outputs and states to 1e-5, every gradient to 1e-4."""
    chunked = lambda **kwargs: op(implementation="xla", **settings, **kwargs)
    settings = {name: value for name, value in settings.items() if name != "chunk_size"}
    sequential = lambda **kwargs: op(implementation="sequential", **settings, **kwargs)
    cotangents = random_like(rng, jax.eval_shape(lambda kwargs: chunked(**kwargs), inputs))
    outputs, gradients = with_gradients(chunked, inputs, cotangents)
    with jax.enable_x64(True):
        expected, expected_gradients = to_numpy(with_gradients(sequential, to_float64(inputs), to_float64(cotangents)))
    assert_close(outputs, expected, 1e-5)
    assert_close(gradients, expected_gradients, 1e-4)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("mode_weights", [False, True])
def test_sequential_is_the_papers_form(read, mode_weights):
    """The reassociated read against U and Gamma formed for every token in NumPy; grouped heads, a state in."""
    rng = np.random.default_rng(0)
    inputs = random_qkv(rng, 2, 20, 4, 2, 5, 3)
    dynamics = random_dynamics(rng, 2, 8, mode_weights=mode_weights)
    state = 0.1 * rng.normal(size=(2, 2, 2, 8, 8))
    expected = paper_attention(*to_numpy(inputs), dynamics, state, read)
    with jax.enable_x64(True):
        q, k, v, dynamics, state = to_float64((*inputs, dynamics, state))
        got = interdomain_attention(q, k, v, dynamics, initial_state=state, read=read, implementation="sequential")
    assert_close(got, expected, 1e-12)


def test_linear_sequential_is_the_papers_form():
    rng = np.random.default_rng(1)
    dynamics = random_dynamics(rng, 3, 8, mode_weights=True)
    z = rng.normal(size=(2, 20, 3, 5))
    state = 0.1 * rng.normal(size=(2, 3, 2, 8, 5))
    coefficients, final_state = paper_coefficients(z, dynamics, state)
    out = np.einsum("hm,bthmc->bthc", np.float64(dynamics.mode_weights), coefficients).real
    with jax.enable_x64(True):
        z, dynamics, state = to_float64((z, dynamics, state))
        got = linear_contraction(z, dynamics, initial_state=state, implementation="sequential")
    assert_close(got, (out, final_state), 1e-12)


@given(
    length=st.integers(1, 300),
    chunk_size=st.integers(1, 128),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    state_dim=st.integers(1, 33),
    key_dim=st.integers(1, 20),
    value_dim=st.integers(1, 20),
    read=st.sampled_from(READS),
    seed=st.integers(0, 2**32 - 1),
)
def test_chunked_against_sequential(length, chunk_size, kv_heads, groups, state_dim, key_dim, value_dim, read, seed):
    rng = np.random.default_rng(seed)
    q, k, v = random_qkv(rng, 2, length, kv_heads * groups, kv_heads, key_dim, value_dim)
    inputs = dict(
        q=q,
        k=k,
        v=v,
        dynamics=random_dynamics(rng, kv_heads, state_dim),
        initial_state=jnp.asarray(rng.normal(size=(2, kv_heads, 2, state_dim, key_dim + value_dim)), jnp.float32),
    )
    check_against_float64(interdomain_attention, inputs, rng, read=read, chunk_size=chunk_size)


@given(
    length=st.integers(1, 300),
    chunk_size=st.integers(1, 128),
    heads=st.integers(1, 4),
    state_dim=st.integers(1, 33),
    channels=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_linear_chunked_against_sequential(length, chunk_size, heads, state_dim, channels, seed):
    rng = np.random.default_rng(seed)
    inputs = dict(
        z=jnp.asarray(rng.normal(size=(2, length, heads, channels)), jnp.float32),
        dynamics=random_dynamics(rng, heads, state_dim, mode_weights=True),
        initial_state=jnp.asarray(rng.normal(size=(2, heads, 2, state_dim, channels)), jnp.float32),
    )
    check_against_float64(linear_contraction, inputs, rng, chunk_size=chunk_size)


@pytest.mark.fast
def test_several_blocks_of_chunks_and_both_remainders():
    """A sequence long enough for whole blocks, then whole chunks, then single tokens (4096 tokens a block on a CPU)."""
    rng = np.random.default_rng(2)
    q, k, v = random_qkv(rng, 1, 2 * 4096 + 3 * 16 + 5, 1, 1, 4, 4)
    inputs = dict(q=q, k=k, v=v, dynamics=random_dynamics(rng, 1, 4))
    check_against_float64(interdomain_attention, inputs, rng, chunk_size=16)


@pytest.mark.parametrize("split", [1, 7, 16, 40])
def test_the_state_carries_a_sequence_across_calls(split):
    rng = np.random.default_rng(3)
    q, k, v = random_qkv(rng, 2, 50, 2, 1, 6, 4)
    dynamics = random_dynamics(rng, 1, 8)
    whole = interdomain_attention(q, k, v, dynamics, chunk_size=16)
    head, state = interdomain_attention(q[:, :split], k[:, :split], v[:, :split], dynamics, chunk_size=16)
    tail, state = interdomain_attention(
        q[:, split:], k[:, split:], v[:, split:], dynamics, initial_state=state, chunk_size=16
    )
    assert_close((jnp.concatenate([head, tail], axis=1), state), whole, 1e-5)


@pytest.mark.parametrize("implementation", ["xla", "sequential"])
def test_no_output_depends_on_a_later_token(implementation):
    rng = np.random.default_rng(4)
    q, k, v = random_qkv(rng, 1, 21, 2, 2, 4, 4)
    dynamics = random_dynamics(rng, 2, 4)

    @jax.jit
    @partial(jax.grad, argnums=(1, 2, 3))
    def gradients(t, q, k, v):
        out, _ = interdomain_attention(q, k, v, dynamics, chunk_size=8, implementation=implementation)
        return out[0, t].sum()

    for t in (0, 7, 8, 13, 20):
        for gradient in gradients(t, q, k, v):
            np.testing.assert_array_equal(gradient[:, t + 1 :], 0)
            assert np.abs(gradient[:, t]).max() > 0


def test_a_not_a_number_reaches_no_earlier_chunk():
    """A NaN stays in its chunk and the later ones; inside the chunk it may spread, since 0 x NaN is NaN."""
    rng = np.random.default_rng(5)
    q, k, v = random_qkv(rng, 1, 24, 1, 1, 4, 4)
    dynamics = random_dynamics(rng, 1, 4)
    clean = interdomain_attention(q, k, v, dynamics, chunk_size=8, implementation="xla")[0]
    poisoned = [x.at[:, 17].set(jnp.nan) for x in (q, k, v)]
    out = interdomain_attention(*poisoned, dynamics, chunk_size=8, implementation="xla")[0]
    np.testing.assert_array_equal(out[:, :16], clean[:, :16])


@pytest.mark.parametrize("read", READS)
def test_bfloat16_inputs_keep_a_float32_state(read):
    rng = np.random.default_rng(6)
    dynamics = random_dynamics(rng, 2, 32)
    q, k, v = (x.astype(jnp.bfloat16) for x in random_qkv(rng, 2, 200, 2, 2, 32, 32))
    exact = interdomain_attention(
        *(x.astype(jnp.float32) for x in (q, k, v)), dynamics, read=read, implementation="sequential"
    )
    out, state = interdomain_attention(q, k, v, dynamics, read=read, chunk_size=64)
    assert out.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    assert_close((out.astype(jnp.float32), state), exact, 1e-2)


def test_one_token_is_decoded_by_the_sequential_form():
    rng = np.random.default_rng(7)
    q, k, v = random_qkv(rng, 3, 1, 2, 2, 4, 4)
    dynamics = random_dynamics(rng, 2, 4)
    default = interdomain_attention(q, k, v, dynamics)
    assert_close(default, interdomain_attention(q, k, v, dynamics, implementation="xla"), 1e-6)
    jaxpr = jax.make_jaxpr(lambda *qkv: interdomain_attention(*qkv, dynamics))(q, k, v)
    assert str(jaxpr) == str(
        jax.make_jaxpr(lambda *qkv: interdomain_attention(*qkv, dynamics, implementation="sequential"))(q, k, v)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=(1, 4, 3, 8)), "the 3 query heads must be a multiple of the 2 key/value heads"),
        (dict(q=(1, 5, 2, 8)), "must agree"),
        (dict(q=(1, 4, 2)), "must be [B, T, heads, width]"),
        (
            dict(q=(1, 0, 2, 8), k=(1, 0, 2, 8), v=(1, 0, 2, 8)),
            "every size of q must be at least 1, the number of tokens too; got shape (1, 0, 2, 8)",
        ),
        (dict(k=(1, 4, 1, 8), v=(1, 4, 1, 8)), "dynamics.log_decay must have shape (1, 4) for 1 states; got (2, 4)"),
        (dict(chunk_size=0), "chunk_size must lie between 1 and 4096; got 0"),
        (dict(chunk_size=5000), "chunk_size must lie between 1 and 4096; got 5000"),
        (dict(read="real"), "read must be one of ('bilinear', 'hermitian'); got 'real'"),
        (dict(implementation="pallas"), "implementation must be one of ('sequential', 'xla') or None; got 'pallas'"),
        (dict(initial_state=(1, 2, 2, 4, 15)), "initial_state must have shape [B, Hkv, 2, M, C] = (1, 2, 2, 4, 16)"),
        (dict(segment_ids=(1, 4)), "segment_ids is not supported"),
    ],
)
def test_bad_arguments_get_one_sentence(change, message):
    arrays = dict(q=(1, 4, 2, 8), k=(1, 4, 2, 8), v=(1, 4, 2, 8)) | change
    arguments = {name: jnp.zeros(value) if isinstance(value, tuple) else value for name, value in arrays.items()}
    dynamics = random_dynamics(np.random.default_rng(0), 2, 4)
    with pytest.raises(ValueError) as error:
        interdomain_attention(dynamics=dynamics, **arguments)
    assert message in str(error.value)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)
