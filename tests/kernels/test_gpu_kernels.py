"""The GPU kernels: interpreted against the reference, and compiled by the GPU's own compiler, which needs no GPU."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.compilers import missing_compiler
from benchmarks.kernel_report import KernelProblem, compile_kernel, costs
from pallas_kernels import gpu, reference
from pallas_kernels.block_sizes import BlockSizes
from tests.kernels.contract import TOKENS, KernelContract, copies, random_problem
from tests.numerics import assert_close, relative_rms, to_float64, to_numpy
from tests.quick import quick_jit


class TestGPUKernels(KernelContract):
    kernels = gpu

    def test_several_chunks_in_several_blocks(self):
        """jax#31395: interpreters failed at three and more blocks."""
        problem = random_problem(length=125, kv_heads=2, counts=[125, 71], documents=True)
        self.check(problem, BlockSizes(chunk_size=8, chunks=4))

    def test_modes_that_are_no_power_of_two(self):
        self.check(random_problem(modes=6), BlockSizes(chunk_size=8, chunks=2))

    def test_whole_tiles(self):
        problem = random_problem(length=40, heads=1, key_dim=16, value_dim=16, modes=16, chunk=16)
        self.check(problem, BlockSizes(chunk_size=16, chunks=2))

    @pytest.mark.parametrize("kernel", ["attend", "step"])
    def test_single_precision(self, kernel):
        length, chunk = (1, 1) if kernel == "step" else (37, 8)
        problem = random_problem(length=length, chunk=chunk, documents=kernel == "attend")
        self.check(problem, BlockSizes(chunk_size=chunk, chunks=2), 1e-5, kernel=kernel, double=False)

    def test_cotangents_of_padding_are_never_read(self):
        """fla#1142: what stood past the end came into gradients."""
        problem = random_problem(batch=3, counts=[37, 20, 0])

        def gradients(attend, filler):
            inputs, (out_bar, state_bar) = to_float64((problem.inputs, problem.cotangents))
            out_bar = jnp.where(problem.real, out_bar, filler)
            bars = quick_jit(lambda inputs, bars: jax.vjp(lambda x: attend(**x), inputs)[1](bars)[0])
            bars = bars(inputs, (out_bar, state_bar))
            return to_numpy(bars | {name: jnp.where(problem.real, bars[name], 0) for name in TOKENS})

        with jax.enable_x64(True):
            sizes = BlockSizes(chunk_size=8, chunks=2)
            ours = gradients(lambda **x: gpu.attend(**x, rows=problem.rows, sizes=sizes), jnp.nan)
            assert_close(ours, gradients(lambda **x: reference.attend(**x, rows=problem.rows), 0), 1e-12)


@pytest.mark.parametrize(
    ("dtype", "exact", "tolerance"), [("float32", False, 1e-6), ("bfloat16", True, 5e-5), ("bfloat16", False, 1e-2)]
)
def test_products_on_a_matrix_unit(dtype, exact, tolerance):
    """Compiled, products of float32 numbers are sums of products of short ones; here one operation at a time."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(64, 64)).astype(np.float32) for _ in range(2))
    program = SimpleNamespace(operands=jnp.dtype(dtype), accumulator=jnp.dtype("float32"), interpret=False)
    ours = gpu._Program.dot(program, jnp.asarray(a), jnp.asarray(b), ((1,), (0,)), exact=exact)
    assert relative_rms(ours, a.astype(np.float64) @ b.astype(np.float64)) <= tolerance


@pytest.mark.compiled
@pytest.mark.skipif(missing_compiler("H100") is not None, reason=f"{missing_compiler('H100')} is not installed")
class TestCompiledForGPU:
    """At the published shapes, bfloat16."""

    @pytest.mark.parametrize(("width", "heads", "length"), [(64, 32, 4096), (96, 16, 4096), (64, 32, 16_384)])
    def test_attention(self, width, heads, length):
        problem = KernelProblem(batch=2, length=length, heads=heads, kv_heads=heads, width=width)
        forward, training = (compile_kernel("H100", "pallas_gpu", problem, way) for way in ("forward", "backward"))
        assert "interdomain_forward" in forward.as_text()
        assert "interdomain_backward" in training.as_text()
        # Tables are made and turned around, but nothing with tokens.
        assert max(copies(forward) + copies(training), default=0) < problem.token_bytes / 8
        # What the forward pass leaves for the backward pass: the state before each block of four chunks of 64.
        kept = problem.state_bytes * length // 256
        # Tables, gradients of tables and tiles to work in, for each program.
        tables = problem.batch * heads * 2**20
        assert forward.memory_analysis().temp_size_in_bytes <= tables
        assert training.memory_analysis().temp_size_in_bytes <= kept + tables
        of_forward, of_training = (costs("H100", "pallas_gpu", problem, way) for way in ("forward", "backward"))
        read_and_written = 4 * problem.token_bytes + 2 * problem.state_bytes
        assert of_forward["interdomain_forward"].bytes <= 1.25 * read_and_written
        read_and_written = 7 * problem.token_bytes + 2 * problem.state_bytes
        assert of_training["interdomain_backward"].bytes <= 1.5 * read_and_written

    @pytest.mark.parametrize(("width", "heads"), [(64, 32), (96, 16)])
    def test_a_step(self, width, heads):
        problem = KernelProblem(batch=16, length=1, heads=heads, kv_heads=heads, width=width)
        program = compile_kernel("H100", "pallas_gpu", problem, "forward")
        assert max(copies(program), default=0) < problem.state_bytes / 8
        memory = program.memory_analysis()
        # The matrices of the read, and what they are made from.
        assert memory.temp_size_in_bytes <= 3 * 4 * heads * (2 * problem.state_dim) ** 2
        assert memory.alias_size_in_bytes == problem.state_bytes
        assert (
            costs("H100", "pallas_gpu", problem, "forward")["interdomain_step"].bytes <= 1.25 * 2 * problem.state_bytes
        )

    def test_grouped_heads_and_odd_sizes(self):
        """Loops over the queries of a state, and widths and modes that fill no tile."""
        problem = KernelProblem(batch=1, length=100, heads=2, kv_heads=1, width=24, state_dim=12, chunk_size=16)
        for way in ("forward", "backward"):
            compile_kernel("H100", "pallas_gpu", problem, way)

    def test_chunks_that_a_gpu_cannot_take_are_refused(self):
        problem = KernelProblem(batch=1, length=512, heads=2, kv_heads=2, width=64, chunk_size=48)
        with pytest.raises(ValueError, match="chunk_size must be a power of two"):
            compile_kernel("H100", "pallas_gpu", problem, "forward")
