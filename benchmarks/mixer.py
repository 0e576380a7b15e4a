"""Time and memory of the op against softmax attention, other mixers and its own matrix products, in one run.

    python -m benchmarks.mixer
    python -m benchmarks.mixer --compared_lengths=4096 --lengths=4096,8192 --repeats=3 --nopeers

`CASES` says what is timed: forward, and forward with the gradients of every input for random cotangents. The cases are
interleaved and medians reported, for a machine is rarely alone; the ratios are what to read. The peak is that of a
large square product of the same dtype, timed among the cases; the fraction of it counts the products of the op, forward
by the formula of its cost, with gradients as traced, recomputation included. Memory is what the compiled program
allocates: its temporaries and its outputs.

Then the chunked form alone, over lengths that go up fourfold, and the time that XLA takes to compile the associative
form.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.progress import track

from benchmarks import cells, peers, tables
from benchmarks.bare_matmuls import bare_problem, count_flops, extract
from benchmarks.cells import Cell, Grid
from benchmarks.problems import chunked_problem, forward_flops, random_inputs
from benchmarks.timing import Case, Problem, compile_case, fastest, gradient_problem, measure, peak_cases
from interdomain_jax.ops import Dynamics, interdomain_attention
from interdomain_jax.ops.chunk_sizes import default_chunk_size

_COMPARED = flags.DEFINE_list("compared_lengths", ["1024", "4096", "16384"], "Tokens at which all cases are compared.")
_LENGTHS = flags.DEFINE_list(
    "lengths", [str(4**n) for n in range(5, 10)], "Tokens at which the chunked form alone is timed."
)
_HEADS = flags.DEFINE_integer("heads", 4, "Heads.")
_HEAD_DIM = flags.DEFINE_integer("head_dim", 64, "Width of a head's queries, keys and values.")
_STATE_DIM = flags.DEFINE_integer("state_dim", 64, "Complex modes of a state.")
_CHUNK_SIZE = flags.DEFINE_integer("chunk_size", None, "Tokens in a chunk; the op's default if not given.")
_CHUNK_SIZES = flags.DEFINE_list("chunk_sizes", ["32", "64", "128", "256"], "Chunk sizes tried for the best ones.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed calls of each case.")
_PEERS = flags.DEFINE_bool("peers", True, "Whether to time the other mixers.")
_TOKENWISE_UP_TO = flags.DEFINE_integer("tokenwise_up_to", 4096, "Tokens up to which `sequential` and `paper` run.")
_SOFTMAX_UP_TO = flags.DEFINE_integer("softmax_up_to", 16384, "Tokens up to which `softmax` runs.")
_COMPILED_LENGTH = flags.DEFINE_integer("compiled_length", 50_000, "Tokens for which the associative form is compiled.")
_JSON = flags.DEFINE_string("json", None, "A file for the figures.")

CASES = {
    "chunked": "`interdomain_attention`, the chunked form in plain XLA (the default), at its default chunk size",
    "bare": "the matrix products of `chunked`, in its loops, and nothing else",
    "sequential": "`interdomain_attention` token by token, U and Gamma never formed",
    "paper": "token by token as the paper writes it: U = C X_k and Gamma = C X_v formed for every token",
    "softmax": "`jax.nn.dot_product_attention`, causal",
    "best chunk": "`chunked` at the fastest of several chunk sizes, if that is another one",
    **peers.MIXERS,
}

# An associative scan over 50,000 x 32 complex numbers, with its gradient, once took 24 s to compile:
# https://github.com/jax-ml/jax/issues/18221.
_COMPILED_MODES = 32
_COMPILE_BOUND_SECONDS = 24.0

# From here on the work of a call is large against the cost of starting it.
_GROWTH_FROM = 4096

PASSES: dict[str, Callable[[Problem], Problem]] = {"forward": lambda problem: problem, "fwd + bwd": gradient_problem}


def paper_form(q: jax.Array, k: jax.Array, v: jax.Array, dynamics: Dynamics) -> jax.Array:
    """The op as written in the paper: U and Gamma of every token, then Re(q^T U^T Gamma), [B, T, H, D]."""
    decay = jnp.exp(jax.lax.complex(dynamics.log_decay, dynamics.angle))[..., None]
    weight, readout = (jax.lax.complex(*pair) for pair in (dynamics.input_weight, dynamics.readout))
    width = k.shape[-1]

    def step(state: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        query, z = token
        state = decay * state + weight[..., None] * z[:, :, None]
        coefficients = jnp.einsum("hcm,bhmz->bhcz", readout, state)
        u, gamma = coefficients[..., :width], coefficients[..., width:]
        return state, jnp.einsum("bhr,bhmr,bhmd->bhd", query, u, gamma).real

    z = jnp.concatenate([k, v], axis=-1)
    start = jnp.zeros((k.shape[0], *weight.shape, z.shape[-1]), weight.dtype)
    _, out = jax.lax.scan(step, start, (q.swapaxes(0, 1), z.swapaxes(0, 1)))
    return out.swapaxes(0, 1)


def plain_problems(inputs: tuple[Any, ...]) -> dict[str, Problem]:
    """The cases without chunks that this length is not too long for."""
    length = inputs[0].shape[1]
    problems = {}
    if length <= _TOKENWISE_UP_TO.value:
        problems["sequential"] = Problem(
            lambda *inputs: interdomain_attention(*inputs, implementation="sequential"), inputs
        )
        problems["paper"] = Problem(paper_form, inputs)
    if length <= _SOFTMAX_UP_TO.value:
        problems["softmax"] = Problem(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), inputs[:3])
    return problems


def compare(length: int, peaks: Mapping[int, Case]) -> list[Cell]:
    """All cases at one sequence length, in every pass."""
    rng = np.random.default_rng(0)
    inputs = random_inputs(rng, length, _HEADS.value, _HEAD_DIM.value, _STATE_DIM.value)
    sizes = sorted({min(int(size), length) for size in _CHUNK_SIZES.value})
    swept = {"best chunk": {str(size): chunked_problem(inputs, size) for size in sizes}}
    if _PEERS.value:
        peer_sizes = peers.Sizes(length, _HEADS.value, _HEAD_DIM.value, state_size=4 * _STATE_DIM.value)
        swept["mamba2"] = peers.mamba2_problems(rng, peer_sizes, sizes)
        swept["mlstm"] = peers.mlstm_problems(rng, peer_sizes, sizes)
    swept = {name: problems for name, problems in swept.items() if problems}
    return [compare_pass(direction, inputs, swept, peaks) for direction in PASSES]


def compare_pass(
    direction: str, inputs: tuple[Any, ...], swept: Mapping[str, Mapping[str, Problem]], peaks: Mapping[int, Case]
) -> Cell:
    """All cases in one pass; of each of the `swept` ones, the fastest."""
    prepare, length = PASSES[direction], inputs[0].shape[1]
    chunked = prepare(chunked_problem(inputs, _CHUNK_SIZE.value))
    chunks = {
        "chunked": str(min(_CHUNK_SIZE.value or default_chunk_size(_STATE_DIM.value, 2 * _HEAD_DIM.value), length))
    }
    loops = extract(chunked.function, *chunked.arguments)

    cases = {"chunked": compile_case(chunked), "bare": compile_case(bare_problem(loops))}
    for name, problem in plain_problems(inputs).items():
        cases[name] = compile_case(prepare(problem))
    for name, problems in swept.items():
        candidates = {label: compile_case(prepare(problem)) for label, problem in problems.items()}
        chunks[name] = fastest(candidates)
        cases[name] = candidates[chunks[name]]
    if chunks["best chunk"] == chunks["chunked"]:
        del cases["best chunk"]

    measured = measure(cases | {str(size): case for size, case in peaks.items()}, _REPEATS.value)
    peak = max(2 * size**3 / measured[str(size)].seconds for size in peaks)
    flops = {"bare": count_flops(loops), "chunked": count_flops(loops)}
    if direction == "forward":
        shape = length, _HEADS.value, _HEAD_DIM.value, _STATE_DIM.value
        flops |= {name: forward_flops(*shape, int(chunks[name])) for name in ("chunked", "best chunk")}
    return Cell(
        {"tokens": length, "pass": direction},
        {name: measured[name].seconds for name in cases},
        {name: measured[name].memory for name in cases},
        {name: f"chunk {size}" for name, size in chunks.items() if name in cases},
        {name: count / measured[name].seconds / peak for name, count in flops.items() if name in cases},
    )


def measure_growth() -> list[Cell]:
    """The chunked form's passes at each of the lengths."""
    rng = np.random.default_rng(0)
    cases = {}
    lengths = [int(length) for length in _LENGTHS.value]
    for length in lengths:
        inputs = random_inputs(rng, length, _HEADS.value, _HEAD_DIM.value, _STATE_DIM.value)
        for direction, prepare in PASSES.items():
            cases[direction, length] = compile_case(prepare(chunked_problem(inputs, _CHUNK_SIZE.value)))
    results = measure(cases, _REPEATS.value)
    return [
        Cell({"tokens": length}, {direction: results[direction, length].seconds for direction in PASSES})
        for length in lengths
    ]


def growth_remarks(growth: Sequence[Cell], start: int) -> list[str]:
    """How many times as long the longest sequence takes as that of `start` tokens, or the shortest longer one."""
    first = next((cell for cell in growth if cell.at["tokens"] >= start), growth[0])
    short, long = (cell.at["tokens"] for cell in (first, growth[-1]))
    return [
        f"chunked, {direction}: {long:,} tokens take {growth[-1].seconds[direction] / first.seconds[direction]:.1f} "
        f"times as long as {short:,}, for {long / short:g} times the tokens"
        for direction in PASSES
    ]


def associative_compile_seconds() -> dict[str, float]:
    """What tracing and compiling the associative form takes, by pass, for one channel of keys and one of values."""
    inputs = random_inputs(np.random.default_rng(0), _COMPILED_LENGTH.value, 1, 1, _COMPILED_MODES)
    problem = Problem(lambda *inputs: interdomain_attention(*inputs, implementation="associative"), inputs)
    seconds = {}
    for direction, prepare in PASSES.items():
        start = time.perf_counter()
        compile_case(prepare(problem))
        seconds[direction] = time.perf_counter() - start
    return seconds


def main(_: list[str]) -> None:
    """Measures everything, and prints it."""
    if _PEERS.value:
        peers.exit_if_missing("mamba2-jax", "mlstm-kernels")
    jax.config.update("jax_default_matmul_precision", "highest")  # as the op's own products, on any device
    peaks = peak_cases()
    lengths = track(_COMPARED.value, "comparing", console=Console(stderr=True))
    compared = [cell for length in map(int, lengths) for cell in compare(length, peaks)]
    growth = measure_growth()
    remarks = growth_remarks(growth, _GROWTH_FROM)
    for direction, seconds in associative_compile_seconds().items():
        verdict = "below" if seconds < _COMPILE_BOUND_SECONDS else "ABOVE"
        remarks.append(
            f"associative, {direction}: {_COMPILED_LENGTH.value:,} x {_COMPILED_MODES} compiles in {seconds:.1f} s, "
            f"{verdict} the bound of {_COMPILE_BOUND_SECONDS:.0f} s"
        )
    setting = f"{_HEADS.value} heads of {_HEAD_DIM.value}, {_STATE_DIM.value} modes, float32"
    grids = [
        Grid("One call", "chunked", ("bare",), "ms", compared),
        Grid("Growth with the length", "forward", (), "ms", growth),
    ]
    measured = cells.record(setting, CASES, grids, remarks)
    tables.show(measured)
    if _JSON.value:
        cells.save(_JSON.value, measured)


if __name__ == "__main__":
    app.run(main)
