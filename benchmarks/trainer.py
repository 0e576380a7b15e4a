"""Time of a whole training step (forward pass, backward pass and update) by mixer and context, in one run.

    python -m benchmarks.train_step
    python -m benchmarks.train_step --lengths=4096 --cases=interdomain,softmax --repeats=3

The step is the one that `train.py` runs with configs/tiny.py, on one device, at other lengths of a row: `--rows` of
them in an update, the same random tokens for every case. The cases are mixers of the model, and

    softmax blocks  softmax attention for 256 queries at a time, their scores worked out once more in the backward pass:
                    less memory traffic on a CPU, and it fits at lengths where the scores of whole rows do not

The cases are interleaved and medians reported, for a machine is rarely alone; the ratios are what to read. Model flops
are those of `interdomain_jax/model_flops.py`, which counts half of softmax's square and no recomputation; the peak that
they are a fraction of is that of a large square product in float32, timed among the cases. Memory is what the compiled
step allocates beside the state, which it updates in place; a case that needs more than half of the free memory is
marked, not run.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import psutil
from absl import app, flags
from ml_collections import ConfigDict, config_flags
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from benchmarks.softmax_blocks import attend_in_blocks
from benchmarks.timing import Case, Measurement, measure, peak_cases
from interdomain_jax import sharding
from interdomain_jax.model_flops import train_step_flops
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.training.optimizer import make_optimizer
from interdomain_jax.training.state import init_state
from interdomain_jax.training.step import StepOutput, lower_train_step

_OURS, _IN_BLOCKS = "interdomain", "softmax blocks"
# The fastest of 256 and 512 on two CPU cores, by a little.
_BLOCK_SIZE = 256

_CONFIG = config_flags.DEFINE_config_file("config", "configs/tiny.py", "The model; the cases replace its mixers.")
_CASES = flags.DEFINE_list(
    "cases", [_OURS, "s4d", "softmax", _IN_BLOCKS], f"Mixers, or {_IN_BLOCKS!r}; {_OURS} always."
)
_LENGTHS = flags.DEFINE_list("lengths", ["512", "4096", "16384"], "Tokens of a row.")
_ROWS = flags.DEFINE_integer("rows", 1, "Rows in an update.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed updates of each case.", lower_bound=1)


class Comparison(NamedTuple):
    """All cases at one length of a row.

    Attributes:
        tokens: in an update.
        model_flops: of an update, by case.
        peak: of the machine, flops a second.
    """

    length: int
    tokens: int
    measurements: dict[str, Measurement]
    model_flops: dict[str, float]
    peak: float

    def ratio(self, case: str) -> float:
        """How many times as long as ours the case takes; NaN if it did not fit."""
        return self.measurements[case].seconds / self.measurements[_OURS].seconds


def step_case(config: ConfigDict) -> Case:
    """Compiles a config's training step; each call is the update that follows the last one."""
    model = Decoder(**config.model)
    optimizer = make_optimizer(num_steps=config.num_steps, **config.optimizer)
    mesh = sharding.make_mesh(sharding.mesh_config(), jax.devices()[:1])
    compiled = lower_train_step(config, model, optimizer, mesh).compile()
    analysis: Any = compiled.memory_analysis()
    state = init_state(model, optimizer, seed=config.seed, mesh=mesh)
    batch = sharding.place_batch(_random_batch(config), mesh, config.data.batch_size)

    def update() -> StepOutput:
        nonlocal state
        output = compiled(state, batch)
        state = output.state
        return output

    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return Case(update, (), analysis.temp_size_in_bytes + outputs)


def compare(length: int) -> Comparison:
    """Times the cases in turn, and the peak among them."""
    cases: dict[str, Case] = {}
    model_flops = {}
    tokens = _ROWS.value * length
    names = dict.fromkeys([_OURS, *_CASES.value])
    for name in track(names, f"compiling for {length:,} tokens", console=Console(stderr=True)):
        config = _CONFIG.value.copy_and_resolve_references()
        config.model.mixers = ("softmax" if name == _IN_BLOCKS else name,)
        config.data.sequence_length, config.data.batch_size = length, _ROWS.value
        config.accumulation_steps = 1
        cases[name] = _step_in_blocks(config) if name == _IN_BLOCKS else step_case(config)
        model_flops[name] = train_step_flops(Decoder(**config.model), tokens=tokens, context_length=length)
    peaks = {str(size): case for size, case in peak_cases().items()}
    measured = measure(cases | peaks, _REPEATS.value)
    peak = max(2 * int(size) ** 3 / measured[size].seconds for size in peaks)
    return Comparison(length, tokens, {name: measured[name] for name in cases}, model_flops, peak)


def _step_in_blocks(config: ConfigDict) -> Case:
    whole = jax.nn.dot_product_attention

    def attend(*inputs: jax.Array, is_causal: bool = False, **options: Any) -> jax.Array:
        # The mixer's own call is the one without a mask; those of the blocks have one.
        return attend_in_blocks(*inputs, block_size=_BLOCK_SIZE) if is_causal else whole(*inputs, **options)

    with mock.patch.object(jax.nn, "dot_product_attention", attend):
        return step_case(config)


def _random_batch(config: ConfigDict) -> Mapping[str, np.ndarray]:
    shape = config.data.batch_size, config.data.sequence_length + 1
    tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
    inputs = tokens[:, :-1]
    return {"inputs": inputs, "targets": tokens[:, 1:], "loss_mask": np.ones(inputs.shape, np.float32)}


def table(comparisons: list[Comparison]) -> Table:
    """A line for each case and length."""
    headers = ("ms a step", "tokens/s", f"times {_OURS}", "model GFLOP", "of peak", "MB")
    result = Table(Column("tokens", justify="right"), "mixer", *(Column(each, justify="right") for each in headers))
    for comparison in comparisons:
        for name, (seconds, memory) in comparison.measurements.items():
            flops, fits = comparison.model_flops[name], not math.isnan(seconds)
            result.add_row(
                f"{comparison.length:,}",
                name,
                f"{1e3 * seconds:,.0f}" if fits else "does not fit",
                f"{comparison.tokens / seconds:,.0f}" if fits else "",
                f"{comparison.ratio(name):.2f}" if fits else "",
                f"{flops / 1e9:,.1f}",
                f"{flops / seconds / comparison.peak:.0%}" if fits else "",
                f"{memory / 1e6:,.0f}",
            )
        result.add_section()
    return result


def fastest_rival(comparison: Comparison) -> str:
    """In one line, how ours compares with the faster form of softmax attention that fits."""
    ratios = {
        name: ratio
        for name in comparison.measurements
        if name.startswith("softmax") and not math.isnan(ratio := comparison.ratio(name))
    }
    if not ratios:
        return f"{comparison.length:,} tokens: no softmax attention was timed"
    name = min(ratios, key=lambda name: ratios[name])
    return f"{comparison.length:,} tokens: {name} takes {ratios[name]:.2f} times as long as {_OURS}"


def main(_: list[str]) -> None:
    """Measures every case and prints the table, then what to read of it."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    config = _CONFIG.value
    console.print(
        f"{config.name}, {_ROWS.value} row(s) an update, {config.model.dtype}, "
        f"{psutil.cpu_count()} cores ({jax.devices()[0].device_kind}), jax {jax.__version__}",
        highlight=False,
    )
    comparisons = [compare(length) for length in map(int, _LENGTHS.value)]
    console.print(table(comparisons))
    for comparison in comparisons:
        console.print(fastest_rival(comparison), highlight=False)


if __name__ == "__main__":
    app.run(main)
