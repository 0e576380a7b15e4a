"""Decoding in the turning frame, against the paper's own form in NumPy and the float64 sequential form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interdomain_jax.ops import interdomain_attention, linear_contraction
from interdomain_jax.ops.decoding import begin_interdomain, begin_linear, end_decoding, interdomain_step, linear_step
from interdomain_jax.ops.packing import find_documents
from tests.numerics import (
    assert_close,
    double_precision,
    jitted_vjp,
    paper_attention,
    random_dynamics,
    random_like,
    random_qkv,
    random_segment_ids,
    relative_rms,
    to_float64,
    to_numpy,
)
from tests.quick import quick_jit

GROUPED = dict(batch=3, length=24, heads=4, kv_heads=2, key_dim=3, value_dim=5)
MODES = 4


def in_turn(begin, step, tokens, dynamics, initial_state, segment_ids=None):
    """Every token by the step, and the state behind the last."""
    packing = None if segment_ids is None else find_documents(segment_ids)

    def one(decoding, now):
        token, packing = now
        masks = {} if packing is None else dict(real=packing.real, continues=~packing.starts)
        out, decoding = step(*(x[:, None] for x in token), decoding, **masks)
        return decoding, out[:, 0]

    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, packing))
    decoding, out = jax.lax.scan(one, begin(initial_state, dynamics), by_token)
    return jnp.moveaxis(out, 0, 1), end_decoding(decoding)


def attend_in_turn(q, k, v, dynamics, initial_state, segment_ids=None, read="bilinear"):
    begin = lambda state, dynamics: begin_interdomain(state, dynamics, k.shape[-1], read)
    return in_turn(begin, interdomain_step, (q, k, v), dynamics, initial_state, segment_ids)


def contract_in_turn(z, dynamics, initial_state, segment_ids=None):
    return in_turn(begin_linear, linear_step, (z,), dynamics, initial_state, segment_ids)


def inputs_of(rng, *, mode_weights=False):
    q, k, v = random_qkv(rng, **GROUPED)
    dynamics = random_dynamics(rng, GROUPED["kv_heads"], MODES, mode_weights=mode_weights)
    return dict(q=q, k=k, v=v, dynamics=dynamics, initial_state=random_states(rng, k.shape[-1] + v.shape[-1]))


def random_states(rng, channels):
    return jnp.asarray(rng.normal(size=(GROUPED["batch"], GROUPED["kv_heads"], 2, MODES, channels)), jnp.float32)


@pytest.mark.parametrize("read", ["bilinear", "hermitian"])
@pytest.mark.parametrize("mode_weights", [False, True])
def test_the_papers_form(read, mode_weights):
    inputs = inputs_of(np.random.default_rng(0), mode_weights=mode_weights)
    expected = paper_attention(*inputs.values(), read=read)
    with double_precision():
        got = to_numpy(jax.jit(attend_in_turn, static_argnames="read")(**to_float64(inputs), read=read))
    assert_close(got, expected, 1e-10)


def contraction_of(rng):
    z = jnp.concatenate(random_qkv(rng, **GROUPED)[1:], axis=-1)
    dynamics = random_dynamics(rng, GROUPED["kv_heads"], MODES, mode_weights=True)
    return dict(z=z, dynamics=dynamics, initial_state=random_states(rng, z.shape[-1]))


CASES = [
    pytest.param(attend_in_turn, interdomain_attention, inputs_of, id="interdomain"),
    pytest.param(contract_in_turn, linear_contraction, contraction_of, id="linear"),
]


@pytest.mark.parametrize(("ours", "op", "draw"), CASES)
def test_outputs_states_and_gradients_with_documents_and_padding(ours, op, draw):
    """Padding holds NaN. The gradients are those of every input, for random cotangents of both outputs."""
    rng = np.random.default_rng(1)
    inputs = draw(rng)
    ids = random_segment_ids(rng, GROUPED["batch"], GROUPED["length"])
    inputs = {
        name: jnp.where((ids == 0)[..., None, None], jnp.nan, x) if name in ("q", "k", "v", "z") else x
        for name, x in inputs.items()
    }
    theirs = lambda **inputs: op(**inputs, segment_ids=ids, implementation="sequential")
    cotangents = random_like(rng, jax.eval_shape(lambda: theirs(**inputs)))
    with jax.enable_x64(True):
        wide, cotangents = to_float64((inputs, cotangents))
        expected = to_numpy(jitted_vjp(theirs, wide, cotangents))
        got = to_numpy(jitted_vjp(lambda **inputs: ours(**inputs, segment_ids=ids), wide, cotangents))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected.outputs))
    assert_close(got, expected, 1e-10)


def test_rounding_does_not_grow_with_the_length():
    """The phase is a product of 20,000 factors; still the error is that of the form that turns the state itself."""
    rng = np.random.default_rng(2)
    q, k, v = random_qkv(rng, batch=1, length=20_000, heads=2, kv_heads=2, key_dim=4, value_dim=4)
    dynamics = random_dynamics(rng, 2, 8)
    inputs = dict(q=q, k=k, v=v, dynamics=dynamics, initial_state=jnp.zeros((1, 2, 2, 8, 8)))
    sequential = lambda **inputs: interdomain_attention(**inputs, implementation="sequential")
    got, plain = (jax.jit(function)(**inputs) for function in (attend_in_turn, sequential))
    with jax.enable_x64(True):
        expected = to_numpy(quick_jit(sequential)(**to_float64(inputs)))
    for ours, theirs, reference in zip(got, plain, expected, strict=True):
        late = (slice(None), slice(-1000, None)) if ours.ndim == 4 else ...
        error, usual = (relative_rms(x[late], reference[late]) for x in (ours, theirs))
        assert error < 1.1 * usual


def test_bfloat16_tokens_and_a_float32_state():
    inputs = inputs_of(np.random.default_rng(3))
    narrow = {name: x.astype(jnp.bfloat16) if name in ("q", "k", "v") else x for name, x in inputs.items()}
    out, state = jax.jit(attend_in_turn)(**narrow)
    expected = jax.jit(interdomain_attention, static_argnames="implementation")(**narrow, implementation="sequential")
    assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    assert_close((out, state), expected, 5e-3)


def test_the_state_is_written_where_it_lies():
    """A loop of steps needs little memory beside its state, which a copy of half of it would double."""
    rng = np.random.default_rng(4)
    q, k, v = random_qkv(rng, batch=8, length=20, heads=2, kv_heads=2, key_dim=32, value_dim=32)
    dynamics = random_dynamics(rng, 2, 32)
    begun = begin_interdomain(jnp.zeros((8, 2, 2, 32, 64)), dynamics, 32)

    def run(decoding, q, k, v):
        def one(n, carry):
            decoding, _ = carry
            token = (jax.lax.dynamic_slice_in_dim(x, n, 1, axis=1) for x in (q, k, v))
            out, decoding = interdomain_step(*token, decoding, real=n < jnp.arange(8) + 12)
            return decoding, out

        return jax.lax.fori_loop(0, 20, one, (decoding, v[:, :1]))

    analysis = jax.jit(run, donate_argnums=0).lower(begun, q, k, v).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < sum(part.nbytes for part in begun.parts) / 4
    assert analysis.alias_size_in_bytes >= sum(part.nbytes for part in begun.parts)
