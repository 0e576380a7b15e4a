"""What every implementation of the op must do; `test_implementations.py` runs it for each, kernels included."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interdomain_jax.ops import interdomain_attention, linear_contraction
from tests.numerics import (
    assert_close,
    jitted_vjp,
    paper_attention,
    random_dynamics,
    random_like,
    random_qkv,
    random_segment_ids,
    relative_rms,
    to_float64,
    to_numpy,
    vjp_program,
)
from tests.quick import quick_jit

READS = ("bilinear", "hermitian")
# One property test serves the classes of all implementations.
inherited = settings(suppress_health_check=[HealthCheck.differing_executors], max_examples=4)


@cache
def sequential_vjp(op, **options):
    """The sequential form with its gradients, compiled once for all implementations that are held against it."""
    return vjp_program(partial(op, implementation="sequential", **options))


@cache
def sequential():
    """The sequential form alone, compiled once too."""
    return quick_jit(partial(interdomain_attention, implementation="sequential"))


# Two packed rows of ids, and the places of each document's tokens; the first goes on from the initial state.
ROWS = (
    [0] * 2 + [1] * 9 + [2] * 8 + [0] * 3 + [2] * 4 + [5] * 14,
    [3] * 20 + [0] * 9 + [4] + [3] * 8 + [0] * 2,
)
DOCUMENTS = (
    [[*range(2, 11)], [*range(11, 19), *range(22, 26)], [*range(26, 40)]],
    [[*range(20)], [29], [*range(30, 38)]],
)


def separately(q, k, v, dynamics, initial_state):
    """Each of those documents alone, by the sequential form."""
    out, states = jnp.zeros((*q.shape[:3], v.shape[3]), v.dtype), []
    for row, places in enumerate(DOCUMENTS):
        state = initial_state[row : row + 1]
        for place in places:
            part = {name: x[row : row + 1, np.array(place)] for name, x in dict(q=q, k=k, v=v).items()}
            got, state = interdomain_attention(
                **part, dynamics=dynamics, initial_state=state, implementation="sequential"
            )
            out = out.at[row, np.array(place)].set(got[0])
            last, state = state, jnp.zeros_like(state)
        states.append(last)
    return out, jnp.concatenate(states)


@cache
def separate_vjp():
    return vjp_program(separately)


def sweep(*names, usual, slow):
    """Values that every run tries, and others for `make test-slow`; tuples of them for several names."""
    slow = [pytest.param(*(value if len(names) > 1 else (value,)), marks=pytest.mark.slow) for value in slow]
    return pytest.mark.parametrize(",".join(names), [*usual, *slow])


class ImplementationContract:
    """What a subclass sets. Programs are quick to compile; the tests elsewhere run fully optimised ones.

    Attributes:
        implementation: its name.
        packs: whether it takes segment ids.
        contracts: whether it serves `linear_contraction` too.
        chunked: whether the chunk size matters to it.
        leak: of a later token into a gradient, relative to the earlier ones; a transform rounds over all tokens.
        longest: tokens of the sequences that the property tests draw, for programs that compile in a time that grows.
        far: tokens of the longest sequence of all; interpreted kernels take their time for each.
    """

    implementation: str
    packs = True
    contracts = True
    chunked = False
    leak = 0.0
    longest = 200
    far = 2**16

    def attend(self, **inputs):
        return interdomain_attention(implementation=self.implementation, **inputs)

    def contract(self, **inputs):
        return linear_contraction(implementation=self.implementation, **inputs)

    def chunk_sizes(self, *sizes):
        return sizes if self.chunked else (None,)

    def inputs(self, rng, batch=2, length=20, heads=2, kv_heads=1, key_dim=4, value_dim=4, state_dim=4):
        """Random q, k, v, dynamics and initial state, float32."""
        q, k, v = random_qkv(rng, batch, length, heads, kv_heads, key_dim, value_dim)
        state = jnp.asarray(rng.normal(size=(batch, kv_heads, 2, state_dim, key_dim + value_dim)), jnp.float32)
        return dict(q=q, k=k, v=v, dynamics=random_dynamics(rng, kv_heads, state_dim), initial_state=state)

    def check(self, op, reference, inputs, rng, **fixed):
        """Outputs, state and every gradient in float64 to 1e-10, for random cotangents of both outputs."""
        ours, theirs = self.bound(op, reference, **fixed)
        cotangents = random_like(rng, jax.eval_shape(lambda kwargs: ours(**kwargs), inputs))
        with jax.enable_x64(True):
            inputs, cotangents = to_float64((inputs, cotangents))
            expected, got = to_numpy(theirs(inputs, cotangents)), to_numpy(jitted_vjp(ours, inputs, cotangents))
        assert_close(got, expected, 1e-10)

    def check_float32(self, op, reference, inputs, rng, **fixed):
        """Outputs and state in float32 to 1e-5, every gradient to 1e-4, against the reference in float64."""
        ours, theirs = self.bound(op, reference, **fixed)
        cotangents = random_like(rng, jax.eval_shape(lambda kwargs: ours(**kwargs), inputs))
        got = jitted_vjp(ours, inputs, cotangents)
        with jax.enable_x64(True):
            expected = to_numpy(theirs(*to_float64((inputs, cotangents))))
        assert_close(got.outputs, expected.outputs, 1e-5)
        assert_close(got.gradients, expected.gradients, 1e-4)

    def bound(self, op, reference, *, chunk_size, segment_ids=None, **options):
        """The op, and the program of its reference."""
        ours = partial(op, chunk_size=chunk_size, segment_ids=segment_ids, **options)
        return ours, partial(sequential_vjp(reference, **options), segment_ids=segment_ids)

    @inherited
    @given(
        length=st.integers(1, 200),
        chunk_size=st.integers(1, 100),
        kv_heads=st.integers(1, 3),
        groups=st.integers(1, 3),
        state_dim=st.integers(1, 17),
        key_dim=st.integers(1, 12),
        value_dim=st.integers(1, 12),
        read=st.sampled_from(READS),
        packed=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_parity(self, length, chunk_size, kv_heads, groups, state_dim, key_dim, value_dim, read, packed, seed):
        """Any shape and chunk, grouped heads, ragged lengths, packed documents with padding: the sequential form's."""
        rng, length = np.random.default_rng(seed), min(length, self.longest)
        inputs = self.inputs(rng, 2, length, kv_heads * groups, kv_heads, key_dim, value_dim, state_dim)
        ids = random_segment_ids(rng, 2, length) if packed and self.packs else None
        self.check(self.attend, interdomain_attention, inputs, rng, read=read, segment_ids=ids, chunk_size=chunk_size)

    @inherited
    @given(
        length=st.integers(1, 200),
        chunk_size=st.integers(1, 100),
        heads=st.integers(1, 4),
        state_dim=st.integers(1, 17),
        channels=st.integers(1, 12),
        packed=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_parity_of_the_linear_contraction(self, length, chunk_size, heads, state_dim, channels, packed, seed):
        if not self.contracts:
            return self.check_refuses_the_linear_contraction()
        rng, length = np.random.default_rng(seed), min(length, self.longest)
        inputs = dict(
            z=jnp.asarray(rng.normal(size=(2, length, heads, channels)), jnp.float32),
            dynamics=random_dynamics(rng, heads, state_dim, mode_weights=True),
            initial_state=jnp.asarray(rng.normal(size=(2, heads, 2, state_dim, channels)), jnp.float32),
        )
        ids = random_segment_ids(rng, 2, length) if packed and self.packs else None
        self.check(self.contract, linear_contraction, inputs, rng, segment_ids=ids, chunk_size=chunk_size)

    @pytest.mark.parametrize("read", READS)
    def test_float32(self, read):
        """Heads of the usual width, many chunks, packed documents where they are taken."""
        rng = np.random.default_rng(16)
        inputs = self.inputs(rng, 2, 300, 4, 2, 32, 32, 32)
        ids = random_segment_ids(rng, 2, 300) if self.packs else None
        self.check_float32(self.attend, interdomain_attention, inputs, rng, read=read, segment_ids=ids, chunk_size=64)

    def test_float32_of_the_linear_contraction(self):
        if not self.contracts:
            return self.check_refuses_the_linear_contraction()
        rng = np.random.default_rng(17)
        inputs = dict(
            z=jnp.asarray(rng.normal(size=(2, 300, 3, 64)), jnp.float32),
            dynamics=random_dynamics(rng, 3, 32, mode_weights=True),
            initial_state=jnp.asarray(rng.normal(size=(2, 3, 2, 32, 64)), jnp.float32),
        )
        ids = random_segment_ids(rng, 2, 300) if self.packs else None
        self.check_float32(self.contract, linear_contraction, inputs, rng, segment_ids=ids, chunk_size=64)

    @pytest.mark.parametrize("read", READS)
    @pytest.mark.parametrize("mode_weights", [False, True])
    def test_the_papers_form(self, read, mode_weights):
        """Against U and Gamma formed for every token in NumPy; grouped heads, a state in."""
        rng = np.random.default_rng(0)
        inputs = self.inputs(rng, 2, 20, 4, 2, 5, 3, 8)
        inputs["dynamics"] = random_dynamics(rng, 2, 8, mode_weights=mode_weights)
        expected = paper_attention(*to_numpy(tuple(inputs.values())), read)
        with jax.enable_x64(True):
            got = quick_jit(partial(self.attend, read=read, chunk_size=8))(**to_float64(inputs))
        assert_close(got, expected, 1e-12)

    def test_the_output_has_the_dtype_of_v(self):
        inputs = self.inputs(np.random.default_rng(18), 1, 5)
        inputs |= {name: inputs[name].astype(jnp.bfloat16) for name in ("q", "k")}
        out, state = jax.eval_shape(lambda kwargs: self.attend(**kwargs), inputs)
        assert (out.dtype, state.dtype) == (jnp.float32, jnp.float32)

    def test_causal_by_gradient(self):
        rng = np.random.default_rng(4)
        inputs = self.inputs(rng, 1, 21)

        @quick_jit
        @jax.grad
        def gradient(kv, t):
            out, _ = self.attend(**inputs | kv, chunk_size=8)
            return out[0, t].sum()

        for t in (0, 7, 8, 13, 19):
            for by in gradient({"k": inputs["k"], "v": inputs["v"]}, t).values():
                size = np.abs(by).max(axis=(0, 2, 3))
                assert (size[: t + 1] > 0).all()
                assert size[t + 1 :].max() <= self.leak * size[: t + 1].max()

    def test_the_state_carries_a_sequence_across_calls(self):
        """The gradient too: through the states between the calls it equals the gradient of the whole. One call ends
        where a chunk of the whole does, and one inside a chunk.
        """
        inputs = self.inputs(np.random.default_rng(3), 2, 50)

        def in_pieces(q, k, v, dynamics, initial_state):
            outputs, state = [], initial_state
            for at in (slice(16), slice(16, 23), slice(23, None)):
                piece = dict(q=q[:, at], k=k[:, at], v=v[:, at])
                out, state = self.attend(**piece, dynamics=dynamics, initial_state=state, chunk_size=16)
                outputs.append(out)
            return jnp.concatenate(outputs, axis=1), state

        whole = lambda **kwargs: self.attend(**kwargs, chunk_size=16)
        cotangents = random_like(np.random.default_rng(1), jax.eval_shape(lambda kwargs: whole(**kwargs), inputs))
        expected = jitted_vjp(whole, inputs, cotangents)
        assert_close(jitted_vjp(in_pieces, inputs, cotangents), expected, 1e-4)

    # The numbered cases are faults that published kernels of this family have had.

    @sweep("length", usual=(1, 2, 9, 16, 31), slow=(7, 8, 15, 29, 30, 64))
    def test_short_sequences_equal_the_step_loop(self, length):
        """fla#88: chunk mode failed for few tokens; mamba#683: step and forward drifted apart past 30."""
        inputs = self.inputs(np.random.default_rng(length), 2, length)
        state, outputs = inputs["initial_state"], []
        tokens = {name: np.asarray(inputs[name]) for name in ("q", "k", "v")}
        for t in range(length):
            token = {name: x[:, t : t + 1] for name, x in tokens.items()}
            out, state = sequential()(**token, dynamics=inputs["dynamics"], initial_state=state)
            outputs.append(out)
        for chunk_size in self.chunk_sizes(16, 64):
            got = quick_jit(partial(self.attend, chunk_size=chunk_size))(**inputs)
            assert_close(got, (np.concatenate(outputs, axis=1), state), 1e-5)

    @sweep("length", usual=(100,), slow=(63, 65, 127))
    def test_padding_of_not_a_numbers_is_never_read(self, length):
        """fla#1142: a ragged length read past the end and lost a gradient term."""
        if not self.packs:
            return self.check_refuses_segment_ids()
        inputs = self.inputs(np.random.default_rng(length), 2, length)
        attend = lambda **kwargs: self.attend(**kwargs, chunk_size=64)
        cotangents = random_like(np.random.default_rng(1), jax.eval_shape(lambda kwargs: attend(**kwargs), inputs))
        expected = jitted_vjp(attend, inputs, cotangents)

        fill = lambda x: jnp.pad(x, [(0, 0), (0, 128 - length), (0, 0), (0, 0)], constant_values=jnp.nan)
        ids = jnp.broadcast_to(jnp.arange(128) < length, (2, 128)).astype(jnp.int32)
        padded = inputs | {name: fill(inputs[name]) for name in ("q", "k", "v")}
        packed = lambda **kwargs: attend(**kwargs, segment_ids=ids)
        (out, state), gradients = jitted_vjp(packed, padded, (fill(cotangents[0]), cotangents[1]))
        np.testing.assert_array_equal(out[:, length:], 0)
        for name in ("q", "k", "v"):
            np.testing.assert_array_equal(gradients[name][:, length:], 0)
            gradients[name] = gradients[name][:, :length]
        assert_close(((out[:, :length], state), gradients), expected, 1e-5)

    def test_repeats_are_bitwise_equal(self):
        """jax#23819: partial blocks held arbitrary memory."""
        inputs = self.inputs(np.random.default_rng(5), 2, 77)
        run = quick_jit(lambda kwargs: self.attend(**kwargs, chunk_size=16))
        first = run(inputs)
        for _ in range(10):
            jax.tree.map(np.testing.assert_array_equal, run(inputs), first)

    def test_a_loss_on_the_final_state_alone_reaches_the_decay(self):
        """fla#459: the decay's gradient missed the final state's share; and fla#36: so did the initial state's."""
        inputs = self.inputs(np.random.default_rng(6), 2, 37)
        weights = jnp.asarray(np.random.default_rng(7).normal(size=inputs["initial_state"].shape), jnp.float32)

        def gradient(implementation, inputs, weights):
            loss = lambda kwargs: jnp.sum(
                weights * interdomain_attention(**kwargs, chunk_size=8, implementation=implementation)[1]
            )
            return quick_jit(jax.grad(loss))(inputs)

        with jax.enable_x64(True):
            expected = to_numpy(gradient("sequential", *to_float64((inputs, weights))))
        got = gradient(self.implementation, inputs, weights)
        assert np.abs(got["dynamics"].log_decay).max() > 0
        assert_close(got, expected, 1e-4)

    def test_initial_state_gradient_in_bfloat16(self):
        """fla#36: state gradients off by orders of magnitude."""
        inputs = self.inputs(np.random.default_rng(8), 2, 130, 4, 2, 16, 16, 16)
        half = inputs | {name: inputs[name].astype(jnp.bfloat16) for name in ("q", "k", "v")}
        attend = lambda **kwargs: self.attend(**kwargs, chunk_size=32)
        cotangents = random_like(np.random.default_rng(1), jax.eval_shape(lambda kwargs: attend(**kwargs), inputs))
        got = jitted_vjp(attend, half, (cotangents[0].astype(jnp.bfloat16), cotangents[1])).gradients
        with jax.enable_x64(True):
            expected = to_numpy(sequential_vjp(interdomain_attention)(*to_float64((half, cotangents)))).gradients
        assert relative_rms(got["initial_state"], expected["initial_state"]) <= 3e-2
        assert_close(got, expected, 5e-2)

    def test_extreme_decays(self):
        """fla#215: extreme gates gave NaN."""
        rng = np.random.default_rng(9)
        inputs = self.inputs(rng, 1, 4, 4, 4, 4, 4, 4)
        log_decay = -jnp.logspace(4, -6, 16).reshape(4, 4)
        inputs["dynamics"] = inputs["dynamics"]._replace(log_decay=log_decay)
        self.check_float32(self.attend, interdomain_attention, inputs, rng, chunk_size=2)
        with pytest.raises(ValueError, match="log_decay must be at most 0"):
            self.attend(**inputs | {"dynamics": inputs["dynamics"]._replace(log_decay=-log_decay)})

    @sweep(
        "heads",
        "chunk_sizes",
        usual=[(3, (16, 128))],
        slow=[(3, (1, 64)), *((heads, (1, 16, 64, 128)) for heads in (1, 5, 6, 7, 12))],
    )
    def test_any_number_of_heads_in_bfloat16(self, heads, chunk_sizes):
        """mamba#352: NaN in the first bfloat16 backward for some head counts."""
        inputs = self.inputs(np.random.default_rng(heads), 1, 150, heads, heads, 8, 8, 8)
        half = inputs | {name: inputs[name].astype(jnp.bfloat16) for name in ("q", "k", "v")}
        cotangents = random_like(np.random.default_rng(1), (inputs["v"], inputs["initial_state"]))
        with jax.enable_x64(True):
            expected = to_numpy(sequential_vjp(interdomain_attention)(*to_float64((half, cotangents))))
        for chunk_size in self.chunk_sizes(*chunk_sizes):
            attend = lambda chunk_size=chunk_size, **kwargs: self.attend(**kwargs, chunk_size=chunk_size)
            got = jitted_vjp(attend, half, (cotangents[0].astype(jnp.bfloat16), cotangents[1]))
            assert_close(got.outputs, expected.outputs, 1e-2)
            assert_close(got.gradients, expected.gradients, 5e-2)

    @sweep("width", usual=(63,), slow=(24, 40, 72, 80, 96))
    def test_odd_head_sizes_repeat_bitwise_in_bfloat16(self, width):
        """exllamav3#316: odd head sizes were nondeterministic."""
        inputs = self.inputs(np.random.default_rng(width), 1, 70, 1, 1, width, width, 8)
        half = inputs | {name: inputs[name].astype(jnp.bfloat16) for name in ("q", "k", "v")}
        run = quick_jit(lambda kwargs: self.attend(**kwargs, chunk_size=16))
        first = run(half)
        with jax.enable_x64(True):
            expected = to_numpy(sequential()(**to_float64(half)))
        assert_close(first, expected, 1e-2)
        for _ in range(3):
            jax.tree.map(np.testing.assert_array_equal, run(half), first)

    def test_bfloat16_far_on_at_128_radians_a_step(self):
        """Phases after many fast steps: relative RMS at most 1e-2, and the state stays float32."""
        rng = np.random.default_rng(10)
        inputs = self.inputs(rng, 1, self.far, 1, 1, 8, 8, 8)
        half = inputs | {name: inputs[name].astype(jnp.bfloat16) for name in ("q", "k", "v")}
        angles = jnp.asarray([[128.3, -128.3, 97.1, 41.7, 12.3, 3.0, 0.1, 0.0]], jnp.float32)
        decays = -jnp.asarray([[1e-4, 5e-2, 1e-3, 1e-2, 5e-4, 1e-4, 1e-3, 1e-5]], jnp.float32)
        half["dynamics"] = half["dynamics"]._replace(log_decay=decays, angle=angles)
        out, state = quick_jit(self.attend)(**half)
        assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
        with jax.enable_x64(True):
            expected = to_numpy(sequential()(**to_float64(half)))
        assert_close((out, state), expected, 1e-2)

    def test_packed_documents_equal_separate_runs(self):
        """Every output, final state and gradient: packed is the sum over the documents (fla#955), each run alone by
        the sequential form, which every other form equals for a document alone.
        """
        if not self.packs:
            return self.check_refuses_segment_ids()
        rng = np.random.default_rng(11)
        inputs = self.inputs(rng, 2, 40, 4, 2)
        ids = jnp.asarray(ROWS)
        together = lambda **kwargs: self.attend(**kwargs, segment_ids=ids, chunk_size=8)
        cotangents = random_like(rng, jax.eval_shape(lambda kwargs: together(**kwargs), inputs))
        with jax.enable_x64(True):
            inputs, cotangents = to_float64((inputs, cotangents))
            expected = to_numpy(separate_vjp()(inputs, cotangents))
            got = to_numpy(jitted_vjp(together, inputs, cotangents))
        assert_close(got, expected, 1e-10)

    def test_rows_of_padding_alone_keep_their_state(self):
        """FlashKDA#32: the final state of an empty document is the initial one."""
        if not self.packs:
            return self.check_refuses_segment_ids()
        inputs = self.inputs(np.random.default_rng(12), 2, 11)
        ids = jnp.asarray([[0] * 11, [1] * 11])
        attend = partial(self.attend, chunk_size=4)
        out, state = quick_jit(attend)(**inputs, segment_ids=ids)
        np.testing.assert_array_equal(out[0], 0)
        np.testing.assert_array_equal(state[0], inputs["initial_state"][0])
        assert_close((out[1:], state[1:]), tuple(x[1:] for x in quick_jit(attend)(**inputs)), 1e-6)

    @pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (0, 0)])
    def test_empty_shapes_and_their_gradients(self, batch, length):
        """FlashKDA#32: no rows or no tokens; the state passes through."""
        inputs = self.inputs(np.random.default_rng(13), batch, length)
        cotangents = random_like(np.random.default_rng(1), (inputs["q"], inputs["initial_state"]))
        (out, state), gradients = jitted_vjp(self.attend, inputs, cotangents)
        assert out.shape == (batch, length, 2, 4)
        np.testing.assert_array_equal(state, inputs["initial_state"])
        np.testing.assert_array_equal(gradients["initial_state"], cotangents[1])
        for leaf in jax.tree.leaves(gradients["dynamics"]):
            np.testing.assert_array_equal(leaf, 0)

    def test_products_name_their_precision(self):
        """jax#16349: a low default precision on accelerators made a slice differ from the whole."""
        inputs = self.inputs(np.random.default_rng(14), 1, 20)
        highest = (jax.lax.Precision.HIGHEST,) * 2

        def loss(kwargs):
            return sum(jnp.sum(x) for x in self.attend(**kwargs, chunk_size=8))

        precisions = [equation.params["precision"] for equation in dot_generals(jax.make_jaxpr(jax.grad(loss))(inputs))]
        assert precisions
        assert set(precisions) == {highest}

    def test_grouped_heads_share_a_state_in_memory(self):
        """No array of the program holds the states of the query heads; their sizes M and C are found nowhere else."""
        inputs = self.inputs(np.random.default_rng(15), 1, 24, 7, 1, 11, 8, 13)
        program = jax.make_jaxpr(lambda kwargs: self.attend(**kwargs, chunk_size=8))(inputs)
        of_states = [shape for shape in array_shapes(program) if 13 in shape[-2:] or 26 in shape[-2:]]
        of_states = [shape for shape in of_states if shape[-1] in (8, 11, 19)]
        assert of_states
        assert all(7 not in shape for shape in of_states), of_states

    def check_refuses_segment_ids(self):
        inputs = self.inputs(np.random.default_rng(0), 1, 5)
        with pytest.raises(ValueError, match="cannot take segment_ids"):
            self.attend(**inputs, segment_ids=jnp.ones((1, 5), jnp.int32))

    def check_refuses_the_linear_contraction(self):
        inputs = self.inputs(np.random.default_rng(0), 1, 5)
        with pytest.raises(ValueError, match="reads with a query"):
            self.contract(z=inputs["k"], dynamics=inputs["dynamics"])


def equations(program):
    """Every equation of a jaxpr, those of the programs inside it too."""
    for equation in program.eqns:
        yield equation
        for value in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def dot_generals(program):
    return [equation for equation in equations(program.jaxpr) if equation.primitive.name == "dot_general"]


def array_shapes(program):
    return {variable.aval.shape for equation in equations(program.jaxpr) for variable in equation.outvars}
