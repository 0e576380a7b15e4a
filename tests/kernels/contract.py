"""What the kernels of every platform must do, against `pallas_kernels.reference`; interpreted, in float64."""

import re
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.block_sizes import BlockSizes
from pallas_kernels.tables import Rows, Tables
from tests.numerics import assert_close, jitted_vjp, random_like, to_float64, to_numpy
from tests.quick import quick_jit

TOKENS = ("q", "k", "v")


class Problem(NamedTuple):
    """Arguments of a kernel, random, every table a table of its own."""

    inputs: dict
    rows: Rows
    cotangents: tuple

    @property
    def real(self):
        return (jnp.arange(self.inputs["q"].shape[1]) < self.rows.lengths[:, None])[:, :, None, None]


def random_problem(
    *,
    batch=2,
    length=37,
    heads=2,
    kv_heads=1,
    key_dim=8,
    value_dim=6,
    modes=4,
    chunk=8,
    counts=None,
    documents=False,
):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    decays = jnp.asarray(rng.uniform(-1, 1, size=(kv_heads, chunk, 2 * modes)), jnp.float32)
    responses = normal(kv_heads, chunk, 2 * modes)
    # Of a chunk of one token the two orders are one.
    reversed = responses if chunk == 1 else normal(kv_heads, chunk, 2 * modes)
    tables = Tables(responses, reversed, decays, normal(kv_heads, 2 * modes, 2 * modes) / modes)
    inputs = dict(
        q=normal(batch, length, heads, key_dim),
        k=normal(batch, length, kv_heads, key_dim),
        v=normal(batch, length, kv_heads, value_dim),
        state=normal(batch, kv_heads, 2, modes, key_dim + value_dim),
        tables=tables,
    )
    counts = np.full(batch, length) if counts is None else np.array(counts)
    document = None
    if documents:
        starts = rng.uniform(size=(batch, length)) < 0.15
        starts = np.pad(starts & (np.arange(length) < counts[:, None]), [(0, 0), (0, -length % chunk)])
        document = np.cumsum(starts.reshape(batch, -1, chunk), axis=-1).reshape(batch, 1, -1)[:, :, :length]
        document = jnp.asarray(document, jnp.int32)
    cotangents = (normal(batch, length, heads, value_dim), random_like(rng, inputs["state"]))
    return Problem(inputs, Rows(jnp.asarray(counts, jnp.int32), document), cotangents)


def copies(program):
    """The bytes of each array that a compiled program copies or transposes by itself."""
    sizes = {"f32": 4, "s32": 4, "bf16": 2, "pred": 1}
    found = re.findall(r"= (\w+)\[([\d,]*)\]\S* (?:copy|transpose)\(", program.as_text())
    return [sizes[dtype] * int(np.prod([int(n) for n in shape.split(",") if n])) for dtype, shape in found]


class KernelContract:
    """What a subclass sets: the module of its kernels, and the sizes they are cut in."""

    kernels: ModuleType

    def check(self, problem, sizes, tolerance=1e-12, *, kernel="attend", double=True):
        """Outputs, the last state and every gradient; whatever stands in the padding is never read."""
        real = problem.real
        fill = lambda tokens, value: {name: jnp.where(real, tokens[name], value) for name in TOKENS}

        def expected(**inputs):
            out, state = reference.attend(**inputs | fill(inputs, 0), rows=problem.rows)
            return jnp.where(real, out, 0), state

        def ours(q, k, v, state, tables):
            tokens = fill(dict(q=q, k=k, v=v), jnp.nan)
            out, state = getattr(self.kernels, kernel)(*tokens.values(), state, tables, problem.rows, sizes)
            return jnp.where(real, out, 0), state

        with jax.enable_x64(double):
            arguments = (problem.inputs, problem.cotangents)
            arguments = to_float64(arguments) if double else arguments
            assert_close(to_numpy(jitted_vjp(ours, *arguments)), to_numpy(jitted_vjp(expected, *arguments)), tolerance)

    def test_several_programs_on_every_axis(self):
        """jax#31395: interpreters failed at three and more blocks."""
        shape = dict(batch=4, heads=4, kv_heads=4, key_dim=128, value_dim=128)
        self.check(random_problem(**shape), BlockSizes(chunk_size=8, chunks=1, strided_roll=False))

    @pytest.mark.parametrize("length", [1, 31, 33, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 32))])
    def test_ragged_lengths(self, length):
        self.check(random_problem(length=length), BlockSizes(chunk_size=8, chunks=2, strided_roll=False))

    @pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3)])
    def test_grouped_heads(self, heads, kv_heads):
        problem = random_problem(heads=heads, kv_heads=kv_heads)
        self.check(problem, BlockSizes(chunk_size=8, chunks=2, strided_roll=False))

    @pytest.mark.parametrize("width", [24, 96])
    def test_widths_that_are_no_power_of_two(self, width):
        problem = random_problem(key_dim=width, value_dim=width // 3)
        self.check(problem, BlockSizes(chunk_size=8, chunks=2, strided_roll=False))

    def test_documents_and_rows_of_padding(self):
        problem = random_problem(batch=3, heads=4, kv_heads=2, counts=[37, 20, 0], documents=True)
        self.check(problem, BlockSizes(chunk_size=8, chunks=2, strided_roll=False))

    @pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 2)])
    def test_a_step(self, heads, kv_heads):
        shape = dict(batch=11, length=1, heads=heads, kv_heads=kv_heads, chunk=1, counts=[1, 0, *[1] * 9])
        self.check(random_problem(**shape), BlockSizes(chunk_size=1), kernel="step")

    def test_repeats_are_bitwise_equal(self):
        """jax#23819: partial blocks held arbitrary memory."""
        inputs, rows, _ = random_problem(batch=1, counts=[29])
        sizes = BlockSizes(chunk_size=8, chunks=2, strided_roll=False)
        run = quick_jit(lambda q, k, v, state, tables: self.kernels.attend(q, k, v, state, tables, rows, sizes))
        first, *others = (run(**inputs) for _ in range(10))
        for other in others:
            np.testing.assert_array_equal(other[0][:, :29], first[0][:, :29])
            np.testing.assert_array_equal(other[1], first[1])
