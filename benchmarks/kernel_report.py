"""What the kernels move, compute and keep at the published shapes, from the real compilers, with no accelerator.

    python -m benchmarks.kernel_report

For each device, kernel and shape: the bytes between memory and chip, the XLA form's beside it, the arithmetic, the
temporary memory of the compiled program, and the time that the device's published peaks would allow (the roofline). No
time here is measured. `make kernel-report` writes docs/kernel_report.md.
"""

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags
from rich.console import Console
from rich.progress import track

from benchmarks.compilers import DEVICES, compile_for, missing_compiler, trace_for
from benchmarks.kernel_costs import KernelCosts, kernel_costs
from interdomain_jax import Decoder
from interdomain_jax.array_types import Complex
from interdomain_jax.hardware import CHIPS
from interdomain_jax.ops import Dynamics
from interdomain_jax.ops.interdomain import Implementation, interdomain_attention

Direction = Literal["forward", "backward"]


class KernelProblem(NamedTuple):
    """One call of the op, with R = D = `width`; with `documents`, of a hundred tokens each, the last with padding."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    width: int
    state_dim: int = 64
    chunk_size: int | None = None
    dtype: Any = jnp.bfloat16
    documents: bool = False

    @property
    def token_bytes(self) -> int:
        """Of one array like q."""
        return jnp.dtype(self.dtype).itemsize * self.batch * self.length * self.heads * self.width

    @property
    def state_bytes(self) -> int:
        """Of the states."""
        return 4 * self.batch * self.kv_heads * 2 * self.state_dim * 2 * self.width

    def arguments(self, direction: Direction) -> tuple:
        """q, k, v, the state, the dynamics, and for the backward pass the cotangents, as shapes; heads joined."""
        array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        tokens = lambda heads: jax.ShapeDtypeStruct((self.batch, self.length, heads * self.width), self.dtype)
        modes = array(self.kv_heads, self.state_dim)
        square = array(self.kv_heads, self.state_dim, self.state_dim)
        state = array(self.batch, self.kv_heads, 2, self.state_dim, 2 * self.width)
        # Shapes in the place of arrays.
        dynamics = Dynamics(modes, modes, Complex(modes, modes), Complex(square, square))  # type: ignore[arg-type]
        forward = (tokens(self.heads), tokens(self.kv_heads), tokens(self.kv_heads), state, dynamics)
        return forward if direction == "forward" else (*forward, tokens(self.heads), state)

    def run(self, implementation: Implementation, direction: Direction, *arguments):  # type: ignore[no-untyped-def]
        """The op on arrays whose heads are joined, as a model's projections make them; or all its gradients."""
        split = lambda x, heads: x.reshape(*x.shape[:2], heads, self.width)
        place = jnp.arange(self.length)
        ids = jnp.where(place < self.length - 10, place // 100 + 1, 0)
        segment_ids = jnp.broadcast_to(ids, (self.batch, self.length)) if self.documents else None

        def forward(q, k, v, state, dynamics):  # type: ignore[no-untyped-def]
            out, state = interdomain_attention(
                split(q, self.heads),
                split(k, self.kv_heads),
                split(v, self.kv_heads),
                dynamics,
                initial_state=state,
                segment_ids=segment_ids,
                padding_is_last=True,
                chunk_size=self.chunk_size,
                implementation=implementation,
            )
            return out.reshape(q.shape), state

        if direction == "forward":
            return forward(*arguments)
        *inputs, out_bar, state_bar = arguments
        return jax.vjp(forward, *inputs)[1]((out_bar, state_bar))


def compile_kernel(
    device: str, implementation: Implementation, problem: KernelProblem, direction: Direction
) -> jax.stages.Compiled:
    """The program that runs the op, or all its gradients, on a device of `benchmarks.compilers.DEVICES`."""
    run = lambda *arguments: problem.run(implementation, direction, *arguments)
    # A decode step writes the state where it lies.
    donate = (3,) if problem.length == 1 else ()
    return compile_for(device, run, *problem.arguments(direction), donate=donate)


def costs(
    device: str, implementation: Implementation, problem: KernelProblem, direction: Direction
) -> dict[str, KernelCosts]:
    """What each kernel of that program costs, by its name."""
    run = lambda *arguments: problem.run(implementation, direction, *arguments)
    return kernel_costs(trace_for(device, run, *problem.arguments(direction)))


def compile_layer(device: str, implementation: Implementation, batch: int, length: int) -> jax.stages.Compiled:
    """One layer of the 1.3B model, forward and backward, with hardly any vocabulary around it."""
    model = Decoder(
        vocab_size=128,
        d_model=2048,
        num_layers=1,
        num_heads=32,
        head_dim=64,
        dtype=jnp.bfloat16,
        implementation=implementation,
    )
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    # Shapes do not depend on the implementation, and a device that is not there cannot make parameters.
    shapes = jax.eval_shape(model.clone(implementation="xla").init, jax.random.key(0), tokens)

    def gradient(parameters, tokens):  # type: ignore[no-untyped-def]
        return jax.grad(lambda parameters: jnp.mean(model.apply(parameters, tokens)[0]))(parameters)

    return compile_for(device, gradient, shapes, tokens)


SHAPES = (
    KernelProblem(batch=2, length=4096, heads=32, kv_heads=32, width=64),
    KernelProblem(batch=2, length=4096, heads=16, kv_heads=16, width=96),
    KernelProblem(batch=2, length=16_384, heads=32, kv_heads=32, width=64),
    KernelProblem(batch=16, length=1, heads=32, kv_heads=32, width=64),
)
_LAYER = (4, 4096)
_DEVICES = flags.DEFINE_list(
    "devices", list(DEVICES), "The devices to compile for; those without a compiler are left out."
)
_OUTPUT = flags.DEFINE_string("output", "docs/kernel_report.md", "The file to write.")


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """What a program allocates besides its arguments and results."""
    analysis = program.memory_analysis()
    assert analysis is not None
    return int(analysis.temp_size_in_bytes)


def bytes_accessed(program: jax.stages.Compiled) -> float:
    """What a program's compiler counts, of a loop one turn; NaN from compilers that do not say."""
    analysis = program.cost_analysis()
    return math.nan if analysis is None else float(analysis["bytes accessed"])


def _kernel(device: str) -> Implementation:
    return "pallas_gpu" if device == "H100" else "pallas_tpu"


def report(device: str) -> list[str]:
    """The rows of one device."""
    implementation, chip, rows = _kernel(device), CHIPS[device], []
    for problem in SHAPES:
        directions: tuple[Direction, ...] = ("forward",) if problem.length == 1 else ("forward", "backward")
        for direction in directions:
            whole = costs(device, implementation, problem, direction)
            total = KernelCosts(*(sum(values) for values in zip(*whole.values(), strict=True)))
            ours = compile_kernel(device, implementation, problem, direction)
            xla = compile_kernel(device, "xla", problem, direction)
            # Of XLA's loops the analysis counts one turn: the figure is a lower bound.
            xla_bytes = bytes_accessed(xla)
            temporary = [temporary_bytes(program) for program in (ours, xla)]
            arithmetic, memory = total.passes / chip.flops, total.bytes / chip.memory_bandwidth
            bound = "arithmetic" if arithmetic > memory else "memory"
            name = "step" if problem.length == 1 else {"forward": "forward", "backward": "fwd + bwd"}[direction]
            cells = (
                device,
                name,
                f"{problem.batch} x {problem.length:,} x {problem.heads} x {problem.width}",
                f"{total.bytes / 1e6:,.0f}",
                f"{xla_bytes / 1e6:,.0f}",
                f"{xla_bytes / total.bytes:.1f}",
                f"{total.flops / 1e9:,.1f}",
                f"{total.flops / total.bytes:,.0f}",
                f"{temporary[0] / 1e6:,.1f}",
                f"{temporary[1] / 1e6:,.1f}",
                f"{max(arithmetic, memory) * 1e6:,.0f}",
                bound,
            )
            rows.append("| " + " | ".join("" if cell == "nan" else cell for cell in cells) + " |")
    return rows


def layer_row(device: str) -> str:
    """The temporary memory of a whole layer."""
    implementations: tuple[Implementation, ...] = (_kernel(device), "xla")
    ours, xla = (temporary_bytes(compile_layer(device, name, *_LAYER)) for name in implementations)
    return f"| {device} | {ours / 1e6:,.0f} | {xla / 1e6:,.0f} | {ours / xla:.2f} |"


HEADER = """# Kernel report

Written by `make kernel-report`; nothing here was timed. Shapes are batch x tokens x heads x width (R = D), M = 64,
bfloat16. "MB" is what crosses between memory and chip: a TPU kernel's counted from its grid and blocks; a GPU kernel's,
which loads as it goes, as every array once, its own scratch tiles included; the XLA form's from the compiler's cost
analysis, which counts one turn of a loop (a lower bound; a GPU's compiler gives none). "fwd + bwd" is the forward pass
that training runs, with its saved states, and the backward pass. Flops are those of the matrix products, the exchanges
that turn positions into lags included; a step on a GPU has none. The roofline takes a float32 product for six bfloat16
ones and the maker's peaks.

| device | kernel | shape | MB | XLA MB | ratio | GFLOP | flop / byte | temp MB | XLA temp MB | roofline us | bound by |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""
_LAYER_HEADER = f"""
One layer of the 1.3B model, forward and backward, {_LAYER[0]} x {_LAYER[1]:,} tokens: temporary memory.

| device | kernel MB | XLA MB | ratio |
|---|---|---|---|
"""


def main(_: list[str]) -> None:
    devices = [device for device in _DEVICES.value if not missing_compiler(device)]
    if not devices:
        raise app.UsageError(
            "no compiler for an accelerator is installed; `pip install -e '.[compilers]'` brings them."
        )
    console = Console(stderr=True)
    tables = [report(device) for device in track(devices, "compiling the kernels", console=console)]
    layers = [layer_row(device) for device in track(devices, "compiling a layer", console=console)]
    lines = [row for rows in tables for row in rows]
    Path(_OUTPUT.value).write_text(HEADER + "\n".join(lines) + "\n" + _LAYER_HEADER + "\n".join(layers) + "\n")
    print(f"wrote {_OUTPUT.value}")


if __name__ == "__main__":
    app.run(main)
