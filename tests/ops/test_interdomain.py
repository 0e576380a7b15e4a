"""The op beside its implementations' contract: defaults, memory, long sequences, the state at a position, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax.ops import interdomain_attention, linear_contraction, state_at
from tests.numerics import (
    assert_close,
    double_precision,
    jitted_vjp,
    random_dynamics,
    random_like,
    random_qkv,
    random_segment_ids,
    to_float64,
    to_numpy,
)


@pytest.mark.fast
@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_several_blocks_of_chunks_and_both_remainders(packed):
    """A sequence long enough for whole blocks, then whole chunks, then single tokens (4096 tokens a block on a CPU)."""
    rng = np.random.default_rng(2)
    length = 4 * 4096 + 3 * 16 + 5
    q, k, v = random_qkv(rng, 1, length, 1, 1, 4, 4)
    inputs = dict(q=q, k=k, v=v, dynamics=random_dynamics(rng, 1, 4))
    ids = random_segment_ids(rng, 1, length) if packed else None
    attend = lambda **kwargs: interdomain_attention(**kwargs, segment_ids=ids, chunk_size=16, implementation="xla")
    cotangents = random_like(rng, jax.eval_shape(lambda kwargs: attend(**kwargs), inputs))
    got = jitted_vjp(attend, inputs, cotangents, jit=jax.jit)
    with double_precision():
        reference = lambda **kwargs: interdomain_attention(**kwargs, segment_ids=ids, implementation="sequential")
        expected = to_numpy(jitted_vjp(reference, *to_float64((inputs, cotangents))))
    assert_close(got.outputs, expected.outputs, 1e-5)
    assert_close(got.gradients, expected.gradients, 1e-4)


@pytest.mark.parametrize(("batch", "heads", "chunk_size"), [(1, 4, None), (8, 16, 16), (64, 16, 64)])
def test_training_keeps_twice_the_inputs_and_outputs_at_most(batch, heads, chunk_size):
    """What the backward pass is given, per token, against q, k, v and the output; any batch and chunk size."""
    shape, modes = (batch, 2048, heads, 64), 64
    dynamics = random_dynamics(np.random.default_rng(0), heads, modes)
    array = jax.ShapeDtypeStruct(shape, jnp.float32)

    def saved(q, k, v):
        return jax.vjp(lambda *qkv: interdomain_attention(*qkv, dynamics, chunk_size=chunk_size)[0], q, k, v)[1]

    residuals = jax.tree.leaves(jax.eval_shape(saved, array, array, array))
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in residuals)
    tables = heads * 2 * modes * (2 * modes + 3 * 4096)
    assert kept <= 2 * 4 * 4 * array.size + 4 * tables


def test_a_million_tokens_in_pieces_equal_the_whole():
    """mamba#614: scoring a very long text ran out of memory. One program, its memory that of one piece."""
    rng = np.random.default_rng(1)
    length, piece = 2**20, 2**14
    q, k, v = random_qkv(rng, 1, length, 1, 1, 2, 2)
    dynamics = random_dynamics(rng, 1, 2)
    step = jax.jit(lambda q, k, v, state: interdomain_attention(q, k, v, dynamics, initial_state=state))
    state, outputs = jnp.zeros((1, 1, 2, 2, 4)), []
    for start in range(0, length, piece):
        out, state = step(*(x[:, start : start + piece] for x in (q, k, v)), state)
        outputs.append(out)
    assert step._cache_size() == 1
    whole = jax.jit(interdomain_attention)(q, k, v, dynamics)
    assert_close((jnp.concatenate(outputs, axis=1), state), whole, 1e-5)


@pytest.mark.slow
def test_more_elements_than_32_bits_can_count():
    """fla#1080: above 2^31 elements an answer was silently wrong. The last rows against runs of their own."""
    batch, length, heads, width = 2**15 + 1, 16, 8, 512
    assert batch * length * heads * width > 2**31
    dynamics = random_dynamics(np.random.default_rng(3), 1, 1)
    k, v = jnp.asarray(np.random.default_rng(4).normal(size=(2, batch, length, 1, width)), jnp.bfloat16)
    v = v[..., :1]

    @jax.jit
    def queries(rows):
        """A different query everywhere, made from its place."""
        place = rows[:, None, None, None] * 0.37 + jnp.arange(length * heads * width).reshape(length, heads, width)
        return jnp.sin(place).astype(jnp.bfloat16)

    attend = jax.jit(lambda q, k, v: interdomain_attention(q, k, v, dynamics, chunk_size=4)[0])
    out = attend(queries(jnp.arange(batch)), k, v)
    for row in (0, batch // 2, batch - 2, batch - 1):
        rows = slice(row, row + 1)
        solo = attend(queries(jnp.arange(batch)[rows]), k[rows], v[rows])
        assert np.abs(solo).max() > 0
        assert_close(out[rows].astype(jnp.float32), solo.astype(jnp.float32), 1e-2)


@functools.cache
def compiled_state_at(packed):
    function = lambda z, dynamics, state, ids, position: state_at(
        z, dynamics, position, initial_state=state, segment_ids=ids if packed else None, chunk_size=7
    )
    return jax.jit(function)


@given(
    packed=st.booleans(),
    positions=st.tuples(st.integers(0, 42), st.integers(0, 42)),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_state_at_a_position_is_that_of_the_tokens_before(packed, positions, seed):
    """mamba#518. Against the recurrence token by token in NumPy; positions beyond the row mean all of it."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(2, 40, 2, 3)).astype(np.float32)
    dynamics = random_dynamics(rng, 2, 4)
    start = rng.normal(size=(2, 2, 2, 4, 3)).astype(np.float32)
    ids = np.asarray(random_segment_ids(rng, 2, 40)) if packed else np.ones((2, 40), np.int32)
    got = compiled_state_at(packed)(z, dynamics, start, ids, jnp.asarray(positions))

    lam = np.exp(np.float64(dynamics.log_decay) + 1j * np.float64(dynamics.angle))[..., None]
    weight = (np.float64(dynamics.input_weight.real) + 1j * np.float64(dynamics.input_weight.imag))[..., None]
    for row, position in enumerate(positions):
        state, latest = start[row, :, 0] + 1j * np.float64(start[row, :, 1]), 0
        for token, document in zip(z[row, :position], ids[row, :position], strict=True):
            if document:
                state = lam * (state if latest in (0, document) else 0) + weight * token[:, None]
                latest = document
        assert_close(got[row], np.stack([state.real, state.imag], axis=1), 1e-5)


def test_the_state_at_one_position_for_all_rows_has_gradients():
    rng = np.random.default_rng(5)
    inputs = dict(z=jnp.asarray(rng.normal(size=(2, 20, 1, 3)), jnp.float32), dynamics=random_dynamics(rng, 1, 4))
    weights = jnp.asarray(rng.normal(size=(2, 1, 2, 4, 3)), jnp.float32)
    at = lambda **kwargs: state_at(**kwargs, position=13, chunk_size=8)
    cut = lambda z, dynamics: linear_contraction(z[:, :13], dynamics, implementation="sequential")[1]
    assert_close(jitted_vjp(at, inputs, weights), jitted_vjp(cut, inputs, weights), 1e-5)


def test_a_not_a_number_reaches_no_earlier_chunk():
    """A NaN stays in its chunk and the later ones; inside the chunk it may spread, since 0 x NaN is NaN."""
    rng = np.random.default_rng(5)
    q, k, v = random_qkv(rng, 1, 24, 1, 1, 4, 4)
    dynamics = random_dynamics(rng, 1, 4)
    clean = interdomain_attention(q, k, v, dynamics, chunk_size=8, implementation="xla")[0]
    poisoned = [x.at[:, 17].set(jnp.nan) for x in (q, k, v)]
    out = interdomain_attention(*poisoned, dynamics, chunk_size=8, implementation="xla")[0]
    np.testing.assert_array_equal(out[:, :16], clean[:, :16])


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
        (dict(v=(1, 4, 2, 0)), "the heads and the width of v must be at least 1; got shape (1, 4, 2, 0)"),
        (dict(k=(1, 4, 1, 8), v=(1, 4, 1, 8)), "dynamics.log_decay must have shape (1, 4) for 1 states; got (2, 4)"),
        (dict(chunk_size=0), "chunk_size must lie between 1 and 4096; got 0"),
        (dict(chunk_size=5000), "chunk_size must lie between 1 and 4096; got 5000"),
        (dict(read="real"), "read must be one of ('bilinear', 'hermitian'); got 'real'"),
        (
            dict(implementation="pallas"),
            "implementation must be one of ('sequential', 'associative', 'fft', 'xla', 'pallas_tpu', "
            "'pallas_gpu') or None; got 'pallas'",
        ),
        (dict(initial_state=(1, 2, 2, 4, 15)), "initial_state must have shape [B, Hkv, 2, M, C] = (1, 2, 2, 4, 16)"),
        (dict(segment_ids=(1, 4)), "segment_ids must be whole numbers [B, T] = (1, 4); got shape (1, 4) of float32"),
        (
            dict(segment_ids=jnp.ones(4, jnp.int32)),
            "segment_ids must be whole numbers [B, T] = (1, 4); got shape (4,) of int32",
        ),
        (
            dict(q=(1, 0, 2, 8), k=(1, 0, 2, 8), v=(1, 0, 2, 8), segment_ids=np.ones((1, 4), np.int32)),
            "segment_ids must be whole numbers [B, T] = (1, 0); got shape (1, 4) of int32",
        ),
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
