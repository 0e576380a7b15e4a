"""The GPU kernels on a GPU: parity, then times of the op and of a 1.3B layer, beside cuDNN's attention and XLA's form.

    python -m benchmarks.gpu --output=docs/gpu_report.md

Made to end within four minutes on a datacentre GPU: once the budget is spent, no further case is compiled, and its
cell stays empty. Everything is bfloat16 at B T = 65,536 tokens, 32 heads of 64, unless flags say otherwise.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console

from benchmarks.problems import forward_flops, random_inputs
from benchmarks.timing import Measurement, Problem, compile_case, gradient_problem, measure
from interdomain_jax import Decoder
from interdomain_jax.ops.interdomain import Implementation, interdomain_attention
from pallas_kernels.block_sizes import block_sizes

_OUTPUT = flags.DEFINE_string("output", None, "A Markdown file for the report; None prints it.")
_KERNEL = flags.DEFINE_enum("kernel", "pallas_gpu", ["pallas_gpu", "pallas_tpu"], "The implementation under test.")
_BUDGET = flags.DEFINE_integer("budget_seconds", 240, "No case is compiled after this many seconds.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 65_536, "Tokens of a batch, in rows of each length.", lower_bound=1)
_LENGTHS = flags.DEFINE_list("lengths", ["4096", "16384", "65536"], "Tokens of a row.")
_HEADS = flags.DEFINE_integer("heads", 32, "Heads.", lower_bound=1)
_HEAD_DIM = flags.DEFINE_integer("head_dim", 64, "Width of a head; R = D.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed calls of each case.", lower_bound=1)
_PEAK_SIZE = flags.DEFINE_integer("peak_size", 8192, "Rows of the square product that stands for the peak.")
_PARITY_LENGTH = flags.DEFINE_integer("parity_length", 1000, "Tokens of the parity check.", lower_bound=1)

_STATE_DIM = 64


def _kernel() -> Implementation:
    return cast(Implementation, _KERNEL.value)


def inputs(batch: int, length: int, dtype: Any) -> tuple[Any, ...]:
    """q, k, v [B, T, H, R] and a layer's first dynamics."""
    *_, dynamics = random_inputs(np.random.default_rng(0), 1, _HEADS.value, _HEAD_DIM.value, _STATE_DIM)
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (batch, length, _HEADS.value, _HEAD_DIM.value)
    return *(jax.random.normal(key, shape, dtype) for key in keys), dynamics


def parity() -> list[str]:
    """Relative RMS differences from the token-by-token form in float32: outputs, and the worst of all gradients."""
    ids = jnp.arange(_PARITY_LENGTH.value)[None] // max(_PARITY_LENGTH.value // 3, 1) + 1
    rows = []
    for dtype in (jnp.float32, jnp.bfloat16):
        arguments = inputs(1, _PARITY_LENGTH.value, dtype)
        wide = (*(x.astype(jnp.float32) for x in arguments[:3]), arguments[3])

        def results(implementation: Implementation, arguments: tuple[Any, ...]) -> Any:
            attend = partial(interdomain_attention, segment_ids=ids, implementation=implementation)
            problem = gradient_problem(Problem(attend, arguments))
            return jax.jit(problem.function)(*problem.arguments)

        differences = jax.tree.map(_relative_rms, results(_kernel(), arguments), results("sequential", wide))
        outputs, gradients = (max(jax.tree.leaves(part)) for part in differences)
        rows.append(f"| {jnp.dtype(dtype).name} | {outputs:.1e} | {gradients:.1e} |")
    return rows


def _relative_rms(value: jax.Array, reference: jax.Array) -> float:
    got, expected = (np.asarray(x, np.float64) for x in (value, reference))
    return float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))


def attention_problems(length: int) -> dict[str, Problem]:
    """The op by its kernel and by XLA, and softmax attention, on the same q, k and v."""
    arguments = inputs(max(_TOKENS.value // length, 1), length, jnp.bfloat16)
    fused = "cudnn" if jax.default_backend() == "gpu" else None
    softmax = partial(jax.nn.dot_product_attention, is_causal=True, implementation=fused)
    op = lambda name: Problem(partial(interdomain_attention, implementation=name), arguments)
    return {"kernel": op(_kernel()), "xla": op("xla"), "softmax": Problem(softmax, arguments[:3])}


def layer_problems(length: int) -> dict[str, Problem]:
    """One layer as wide as the heads, forward and backward."""
    tokens = jnp.zeros((max(_TOKENS.value // length, 1), length), jnp.int32)
    problems = {}
    layers: list[tuple[str, str, Implementation | None]] = [
        ("kernel", "interdomain", _kernel()),
        ("xla", "interdomain", "xla"),
        ("softmax", "softmax", None),
    ]
    for name, mixer, implementation in layers:
        model = Decoder(
            vocab_size=128,
            d_model=_HEADS.value * _HEAD_DIM.value,
            num_layers=1,
            num_heads=_HEADS.value,
            head_dim=_HEAD_DIM.value,
            mixers=(mixer,),
            dtype=jnp.bfloat16,
            implementation=implementation,
        )
        parameters = jax.jit(model.clone(implementation="xla").init)(jax.random.key(0), tokens[:1, :1])
        loss = lambda parameters, tokens, model=model: jnp.mean(model.apply(parameters, tokens)[0])
        problems[name] = Problem(jax.grad(loss), (parameters, tokens))
    return problems


def timed(problems: dict[str, Problem], deadline: float) -> dict[str, Measurement | None]:
    """Each problem's time beside the others'; None for those that the budget did not reach or that failed."""
    cases, results = {}, dict.fromkeys(problems)
    for name, problem in problems.items():
        if time.monotonic() < deadline:
            try:
                cases[name] = compile_case(problem)
            except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
                # A rival may lack what this device needs; the kernel may not.
                if name == "kernel":
                    raise
                Console(stderr=True).print(f"{name} does not compile: {str(error)[:300]}", markup=False)
    return results | measure(cases, _REPEATS.value)


def row(label: str, what: str, results: dict[str, Measurement | None], flops: float, peak: float) -> str:
    """One line of the report: milliseconds, ratios to the kernel's, and the part of the peak that its products use."""
    seconds = {name: result.seconds if result else float("nan") for name, result in results.items()}
    ours = seconds["kernel"]
    cells = [f"{1e3 * value:,.2f}" for value in seconds.values()]
    cells += [f"{seconds[name] / ours:.2f}" for name in ("xla", "softmax")] + [f"{100 * flops / ours / peak:.0f} %"]
    return "| " + " | ".join([label, what, *("" if "nan" in cell else cell for cell in cells)]) + " |"


def main(_: list[str]) -> None:
    start = time.monotonic()
    deadline = start + _BUDGET.value
    say = Console(stderr=True).print
    say(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: parity")
    lines = [
        "# The kernels on a GPU",
        "",
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}; written by `python -m benchmarks.gpu`.",
        "",
        "Relative RMS difference from the token-by-token form in float32, packed documents:",
        "",
        "| inputs | outputs and state | worst gradient |",
        "|---|---|---|",
        *parity(),
    ]
    size = _PEAK_SIZE.value
    square = jnp.ones((size, size), jnp.bfloat16)
    peak_case = compile_case(Problem(jnp.matmul, (square, square)))
    peak = 2 * size**3 / measure({"peak": peak_case}, _REPEATS.value)["peak"].seconds
    lines += [
        "",
        f"Milliseconds, medians of {_REPEATS.value} calls, {_TOKENS.value:,} tokens, {_HEADS.value} heads of "
        f"{_HEAD_DIM.value}, bfloat16; the peak is that of a product of {size} rows here, {peak / 1e12:,.0f} TFLOP/s.",
        "",
        "| tokens of a row | pass | kernel | xla | softmax | xla / kernel | softmax / kernel | kernel of peak |",
        "|---|---|---|---|---|---|---|---|",
    ]
    passes: dict[str, tuple[Callable[[Problem], Problem], int]] = {
        "forward": (lambda problem: problem, 1),
        "fwd + bwd": (gradient_problem, 3),
    }
    chunk_size = block_sizes(_STATE_DIM, 2 * _HEAD_DIM.value).chunk_size
    flops = forward_flops(_TOKENS.value, _HEADS.value, _HEAD_DIM.value, _STATE_DIM, chunk_size)
    for length in map(int, _LENGTHS.value):
        for what, (prepare, times) in passes.items():
            say(f"{length:,} tokens, {what}: {time.monotonic() - start:.0f} s of {_BUDGET.value}")
            problems = {name: prepare(problem) for name, problem in attention_problems(length).items()}
            lines.append(row(f"{length:,}", what, timed(problems, deadline), times * flops, peak))
    length = int(_LENGTHS.value[0])
    say(f"a layer: {time.monotonic() - start:.0f} s of {_BUDGET.value}")
    lines.append(row(f"{length:,}", "layer, fwd + bwd", timed(layer_problems(length), deadline), float("nan"), peak))
    text = "\n".join(lines) + "\n"
    if _OUTPUT.value:
        Path(_OUTPUT.value).write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    app.run(main)
