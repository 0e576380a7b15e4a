"""The TPU kernels: interpreted against the reference, and compiled by the TPU's own compiler, which needs no TPU."""

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from benchmarks.compilers import TPU_TOPOLOGIES, missing_compiler
from benchmarks.kernel_report import KernelProblem, compile_kernel, costs
from pallas_kernels import tpu
from pallas_kernels.block_sizes import BlockSizes
from tests.kernels.contract import KernelContract, copies, random_problem


class TestTPUKernels(KernelContract):
    kernels = tpu

    def test_rolls_by_the_row_index(self):
        self.check(random_problem(), BlockSizes(chunk_size=8, chunks=2, strided_roll=True))

    def test_more_heads_on_a_state_than_are_worked_on_at_once(self):
        problem = random_problem(batch=1, length=130, heads=12, key_dim=4, value_dim=4, chunk=64)
        self.check(problem, BlockSizes(chunk_size=64, chunks=2, strided_roll=False))

    @pytest.mark.parametrize("kernel", ["attend", "step"])
    def test_memory_that_starts_as_not_a_number(self, kernel):
        """The interpreter of TPU memory: what a kernel does not write before it reads would show."""
        length, chunk = (1, 1) if kernel == "step" else (37, 8)
        counts = [length, length // 2, 0, length]
        problem = random_problem(
            batch=4, length=length, heads=4, kv_heads=2, chunk=chunk, counts=counts, documents=kernel == "attend"
        )
        sizes = BlockSizes(chunk_size=chunk, chunks=2, strided_roll=False)
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
            self.check(problem, sizes, 1e-5, kernel=kernel, double=False)


SHAPES = [(64, 32), (96, 16)]


@pytest.mark.compiled
@pytest.mark.parametrize("device", TPU_TOPOLOGIES)
@pytest.mark.parametrize(("width", "heads"), SHAPES)
class TestCompiledForTPU:
    """At the published shapes, bfloat16."""

    @pytest.fixture(autouse=True)
    def compiler(self, device):
        if missing_compiler(device):
            pytest.skip(f"{missing_compiler(device)} is not installed")

    @pytest.mark.parametrize("length", [4096, 16_384])
    def test_attention(self, device, width, heads, length):
        problem = KernelProblem(batch=4, length=length, heads=heads, kv_heads=heads, width=width)
        forward, training = (compile_kernel(device, "pallas_tpu", problem, way) for way in ("forward", "backward"))
        # Tables are made and turned around, but nothing with tokens.
        assert max(copies(forward) + copies(training), default=0) < problem.token_bytes / 8
        of_forward, of_training = (costs(device, "pallas_tpu", problem, way) for way in ("forward", "backward"))
        read_and_written = 4 * problem.token_bytes + 2 * problem.state_bytes
        assert of_forward["interdomain_forward"].bytes <= 1.25 * read_and_written
        read_and_written = 7 * problem.token_bytes + 2 * problem.state_bytes
        assert of_training["interdomain_backward"].bytes <= 1.5 * read_and_written
        # What the forward pass leaves for the backward pass: the state before each block.
        kept = of_training["interdomain_forward"].bytes - of_forward["interdomain_forward"].bytes
        tables = 2**24
        assert forward.memory_analysis().temp_size_in_bytes <= tables
        # Here nobody takes the outputs of the forward pass, so they count as temporary.
        outputs = problem.token_bytes + problem.state_bytes
        assert training.memory_analysis().temp_size_in_bytes <= kept + outputs + 2 * tables

    def test_a_step(self, device, width, heads):
        problem = KernelProblem(batch=16, length=1, heads=heads, kv_heads=heads, width=width)
        program = compile_kernel(device, "pallas_tpu", problem, "forward")
        assert max(copies(program), default=0) < problem.state_bytes / 8
        memory = program.memory_analysis()
        assert memory.temp_size_in_bytes < 2**22
        assert memory.alias_size_in_bytes >= problem.state_bytes
        of_step = costs(device, "pallas_tpu", problem, "forward")["interdomain_step"]
        assert of_step.bytes <= 1.25 * 2 * problem.state_bytes


@pytest.mark.compiled
@pytest.mark.parametrize("device", ["v4", "v5e"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_any_shape_compiles(device, dtype):
    """Grouped heads, documents, lengths, widths and modes that fill no tile; v4 has its own skew."""
    if missing_compiler(device):
        pytest.skip(f"{missing_compiler(device)} is not installed")
    problem = KernelProblem(
        batch=3, length=1000, heads=6, kv_heads=2, width=40, state_dim=24, dtype=dtype, documents=True
    )
    compile_kernel(device, "pallas_tpu", problem, "backward")
    compile_kernel(device, "pallas_tpu", problem._replace(length=1, batch=11, documents=False), "forward")


@pytest.mark.compiled
def test_what_does_not_fit_the_chip_is_refused():
    if missing_compiler("v4"):
        pytest.skip(f"{missing_compiler('v4')} is not installed")
    problem = KernelProblem(batch=1, length=512, heads=16, kv_heads=4, width=96, dtype=jnp.float32)
    with pytest.raises(ValueError, match="a chunk of 128 tokens with 4 states of 4 heads, 96 and 96 wide, in float32"):
        compile_kernel("v4", "pallas_tpu", problem, "forward")


@pytest.mark.compiled
def test_chunks_that_a_tpu_cannot_take_are_refused():
    device = next(iter(TPU_TOPOLOGIES))
    if missing_compiler(device):
        pytest.skip(f"{missing_compiler(device)} is not installed")
    problem = KernelProblem(batch=1, length=512, heads=2, kv_heads=2, width=64, chunk_size=64)
    with pytest.raises(ValueError, match="chunk_size must be a multiple of 128"):
        compile_kernel(device, "pallas_tpu", problem, "forward")
