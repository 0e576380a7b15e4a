"""Time of one layer's mixer in a decode step, by batch and by the tokens before it, in one run.

    python -m benchmarks.decode
    python -m benchmarks.decode --prefixes=512,4096 --batches=1,8 --repeats=3 --figure=docs/images/decode.png
    python -m benchmarks.decode --platform=gpu --model=1_3b --budget_seconds=240 --json=decode.json
    JAX_PLATFORMS=cpu python -m benchmarks.decode --compile_only --topology=h100:1

`CASES` says what is timed, each on one token for every row of a batch.

A timing is a compiled loop of many steps, each of which updates in place what the last one left, as a decoder's own
loop does; starting the loop is timed by one of no steps. What the dynamics give is worked out before the loop, but for
the op and the kernels. The cases of a cell are interleaved and medians reported, for a machine is rarely alone; the
ratios are what to read. A case whose program wants more than half of the free memory is marked, not run.
Most of the time goes into softmax attention.

With `--compile_only` the step is compiled for a chip that is not there, and its arithmetic and memory traffic are
counted in the program; no time is.
"""

import importlib
import itertools
import sys
import time

import jax
import jax.numpy as jnp
from absl import app, flags
from rich.console import Console

from benchmarks import cells, peers, tables
from benchmarks import decode_report as report
from benchmarks.cells import Grid
from benchmarks.compilers import compile_for
from benchmarks.decode_loops import Plan, measure_cell, measure_machine
from benchmarks.decode_report import COPY, FIRST, Program
from benchmarks.decode_steps import (
    HEADS_FIRST,
    OURS,
    PEERS,
    STEPS,
    Layer,
    carry_shape,
    inputs_of,
    keeps_tokens,
    num_bytes,
)
from interdomain_jax import hardware, strict_json
from interdomain_jax.compiled_program import program_costs
from interdomain_jax.topologies import absent_devices

_MODEL = flags.DEFINE_enum("model", "125m", ["tiny", "125m", "350m", "760m", "1_3b"], "Whose layer; of configs/.")
_BATCHES = flags.DEFINE_list("batches", ["1", "8", "32"], "Rows of a step.")
_PREFIXES = flags.DEFINE_list("prefixes", ["512", "2048", "4096", "16384", "65536"], "Tokens of a row so far.")
_CASES = flags.DEFINE_list("cases", None, f"Cases; {OURS} always; by default those that suit the platform.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timings of each case.", lower_bound=1)
_MILLISECONDS = flags.DEFINE_integer("timing_ms", 50, "About how long a timing takes, or one step.", lower_bound=1)
_BUDGET = flags.DEFINE_integer("budget_seconds", None, "No cell is begun after as many seconds.", lower_bound=1)
_PLATFORM = flags.DEFINE_enum("platform", None, ["cpu", "gpu", "tpu"], "Where to run; jax's choice if not given.")
_DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Of tokens and caches; float32 on a CPU alone.")
_JSON = flags.DEFINE_string("json", None, "A file for the figures, written anew after each cell.")
_FIGURE = flags.DEFINE_string("figure", None, "A PNG of the times.")
_PEERS = flags.DEFINE_bool("peers", True, "Whether to time the other packages' steps.")
_COMPILE_ONLY = flags.DEFINE_bool("compile_only", False, "Whether to compile for --topology instead.")
_TOPOLOGY = flags.DEFINE_string("topology", "h100:1", "A chip that is not there: h100:1, v5e:1x1.")

CASES = {
    OURS: "the step of our generator, its state that of `prefix` tokens",
    "op": "the same token by `interdomain_attention`, called once for each",
    "kernel (gpu)": "the same by the Pallas kernel for GPUs",
    "kernel (tpu)": "the same by the Pallas kernel for TPUs",
    "paper": "the same output as the paper computes it: U = C X_k and Gamma = C X_v formed",
    "s4d": "the control's linear contraction, of a state as large",
    "softmax": "`jax.nn.dot_product_attention` with a cache of `prefix` keys and values",
    HEADS_FIRST: "the same, its cache in the order that its products read, as our decoder keeps it; XLA on a CPU puts "
    "the other in order for every token",
    "softmax (cudnn)": "`softmax` by cuDNN",
    "mamba2": "mamba2-jax, `ssd_forward` on one token in a chunk of one, with a state as large as ours; its model "
    "decodes with the same function; no projections, convolution or norm",
    "mlstm": "mlstm-kernels, `mlstm_recurrent_step__native`, its step in plain JAX, with a state as large as ours and "
    "its normalizer besides",
    COPY: "reads and writes the state where it lies, no more: the lower bound",
    FIRST: f"{OURS} once more, its state that of the first prefix: what `flat` is measured by",
}


def compile_step(name: str, layer: Layer, batch: int, prefix: int, chip: str) -> Program:
    """Compiles one step for a chip that is not there, and counts what it does."""
    carry, inputs = carry_shape(name, layer, batch, prefix, jnp.bfloat16), inputs_of(name, layer, batch, jnp.bfloat16)
    try:
        compiled = compile_for(chip, STEPS[name], carry, inputs, donate=(0,))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Program(name, batch, prefix, num_bytes(carry), None)
    text = compiled.as_text()
    assert text is not None
    return Program(name, batch, prefix, num_bytes(carry), program_costs(text))


def cases_for(platform: str, *, runs: bool) -> list[str]:
    """The cases that suit a platform; cuDNN's compiler needs a device. Only what runs is compared with the peers."""
    left_out = () if runs and _PEERS.value else PEERS
    names = [name for name in STEPS if name not in left_out and ("(" not in name or name == f"kernel ({platform})")]
    return [*names, "softmax (cudnn)"] if platform == "gpu" and runs else names


def time_cells(layer_name: str, layer: Layer) -> None:
    """Measures every cell that the budget reaches, and prints the ratios, then the times."""
    began = time.monotonic()
    platform = jax.default_backend()
    names = _chosen(cases_for(platform, runs=True))
    if set(names) & set(PEERS):
        peers.exit_if_missing("mamba2-jax", "mlstm-kernels")
    dtype = jnp.dtype(_DTYPE.value or ("float32" if platform == "cpu" else "bfloat16"))
    prefixes = [int(prefix) for prefix in _PREFIXES.value]
    plan = Plan(layer, names, prefixes[0], dtype, _REPEATS.value, _MILLISECONDS.value / 1e3)
    machine = measure_machine(plan)
    grid = Grid("One token of each row", OURS, (COPY, FIRST), "ms", [])
    measured = cells.record(f"{layer_name}, {dtype.name}; {machine.summary}", CASES, [grid])
    for batch, prefix in itertools.product(map(int, _BATCHES.value), prefixes):
        spent = time.monotonic() - began
        if _BUDGET.value and spent > _BUDGET.value:
            break
        _say(f"{spent:.0f} s: batch {batch}, prefix {prefix:,}")
        grid.cells.append(measure_cell(plan, batch, prefix))
        measured = cells.record(measured.setting, CASES, [grid], [report.flatness(grid.cells)])
        if _JSON.value:
            cells.save(_JSON.value, measured)
    tables.show(measured)
    if _FIGURE.value:
        figure = report.draw(grid.cells, names, title=f"Decoding, one layer's mixer: {layer_name}")
        figure.savefig(_FIGURE.value)


def compile_cells(model: str, layer: Layer, console: Console) -> None:
    """Compiles every case at every batch, those with a cache at every prefix, and prints their costs."""
    device = absent_devices(_TOPOLOGY.value)[0]
    chip = hardware.chip(device.device_kind)
    assert chip is not None, f"{device.device_kind} has no figures in hardware.py"
    names = _chosen(cases_for("tpu" if device.platform == "tpu" else "gpu", runs=False))
    console.print(f"{model}, bfloat16, float32 states; compiled for one {chip.name}, not run", highlight=False)
    programs = []
    for batch, name in itertools.product(map(int, _BATCHES.value), names):
        for prefix in map(int, _PREFIXES.value if keeps_tokens(name) else _PREFIXES.value[:1]):
            _say(f"batch {batch}, {name}, prefix {prefix:,}")
            programs.append(compile_step(name, layer, batch, prefix, chip.name))
    console.print(report.program_table(programs))
    if _JSON.value:
        strict_json.write(_JSON.value, report.programs_as_json(model, chip.name, programs))


def main(_: list[str]) -> None:
    """Times the cells, or counts what the compiled steps do."""
    model = importlib.import_module(f"configs.{_MODEL.value}").get_config().model
    layer = Layer(model.num_heads, model.head_dim, model.state_dim)
    name = f"{_MODEL.value}, {layer.heads} heads of {layer.head_dim}, {layer.state_dim} modes"
    if _COMPILE_ONLY.value:
        compile_cells(name, layer, Console(width=None if sys.stdout.isatty() else 140))
        return
    if _PLATFORM.value:
        jax.config.update("jax_platforms", _PLATFORM.value)
    time_cells(name, layer)


def _say(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, markup=False)


def _chosen(suited: list[str]) -> list[str]:
    if unknown := set(_CASES.value or ()) - set(suited):
        raise app.UsageError(f"--cases={','.join(sorted(unknown))}: here there are {', '.join(suited)}")
    return [name for name in suited if name == OURS or _CASES.value is None or name in _CASES.value]


if __name__ == "__main__":
    app.run(main)
