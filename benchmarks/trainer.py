"""Time of a whole training step (forward pass, backward pass and update) by mixer and context, in one run.

    python -m benchmarks.trainer
    python -m benchmarks.trainer --lengths=4096,16384 --cases=interdomain,softmax --repeats=3

The step is the one that `train.py` runs with configs/tiny.py, on one device, at other lengths of a row: `--rows` of
them in an update, the same random tokens for every case. `CASES` says what is timed: mixers of the model, and whole
models of other packages.

The cases are interleaved and medians reported, for a machine is rarely alone; the ratios are what to read. Model flops
are those of `interdomain_jax/model_flops.py`, which counts half of softmax's square and no recomputation; the peak that
they are a fraction of is that of a large square product in float32, timed among the cases. Memory is what the compiled
step allocates beside the state, which it updates in place; a case that needs more than half of the free memory is
marked, not run.
"""

import math
from typing import Any
from unittest import mock

import jax
import numpy as np
from absl import app, flags
from ml_collections import ConfigDict, config_flags
from rich.console import Console
from rich.progress import track

from benchmarks import cells, model_peers, peers, tables
from benchmarks.cells import Cell, Grid
from benchmarks.softmax_blocks import attend_in_blocks
from benchmarks.timing import Case, fastest, measure, peak_cases
from benchmarks.train_steps import peer_case, step_case
from interdomain_jax.model_flops import train_step_flops
from interdomain_jax.modules.decoder import Decoder

_OURS, _IN_BLOCKS = "interdomain", "softmax blocks"
# The fastest of 256 and 512 on two CPU cores, by a little.
_BLOCK_SIZE = 256

_CONFIG = config_flags.DEFINE_config_file("config", "configs/tiny.py", "The model; the cases replace its mixers.")
_CASES = flags.DEFINE_list(
    "cases", [_OURS, "s4d", "softmax", _IN_BLOCKS], f"Mixers, or {_IN_BLOCKS!r}; {_OURS} always."
)
_PEERS = flags.DEFINE_bool("peers", True, "Whether to time the other packages' models.")
_LENGTHS = flags.DEFINE_list("lengths", ["512", "4096"], "Tokens of a row.")
_ROWS = flags.DEFINE_integer("rows", 1, "Rows in an update.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed updates of each case.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "A file for the figures.")

CASES = {
    _OURS: "the paper's model",
    "s4d": "its control with a linear contraction, all else the same",
    "softmax": "its control with `jax.nn.dot_product_attention`, all else the same: a Llama",
    _IN_BLOCKS: "softmax attention for 256 queries at a time, their scores worked out once more in the backward pass: "
    "less memory traffic on a CPU, and it fits at lengths where the scores of whole rows do not",
    **model_peers.MODELS,
}


def compare(length: int) -> Cell:
    """Times the cases in turn, and the peak among them."""
    cases: dict[str, Case] = {}
    model_flops, labels = {}, {}
    tokens = _ROWS.value * length
    config = _CONFIG.value.copy_and_resolve_references()
    config.data.sequence_length, config.data.batch_size = length, _ROWS.value
    config.accumulation_steps = 1
    names = dict.fromkeys([_OURS, *_CASES.value])
    for name in track(names, f"compiling for {length:,} tokens", console=Console(stderr=True)):
        config.model.mixers = ("softmax" if name == _IN_BLOCKS else name,)
        cases[name] = _step_in_blocks(config) if name == _IN_BLOCKS else step_case(config)
        model_flops[name] = train_step_flops(Decoder(**config.model), tokens=tokens, context_length=length)
    if _PEERS.value:
        cases["penzai"] = peer_case(model_peers.penzai_llama(config.model), config)
        candidates = {
            str(size): peer_case(model_peers.mamba2(config.model, _parameters(config), size), config)
            for size in model_peers.MAMBA2_CHUNK_SIZES
        }
        size = fastest(candidates)
        cases["mamba2"], labels["mamba2"] = candidates[size], f"chunk {size}"
    peaks = {str(size): case for size, case in peak_cases().items()}
    measured = measure(cases | peaks, _REPEATS.value)
    peak = max(2 * int(size) ** 3 / measured[size].seconds for size in peaks)
    return Cell(
        {"tokens of a row": length, "rows": _ROWS.value},
        {name: measured[name].seconds for name in cases},
        {name: measured[name].memory for name in cases},
        labels,
        {name: flops / measured[name].seconds / peak for name, flops in model_flops.items()},
        tokens,
    )


def _parameters(config: ConfigDict) -> int:
    """Those of our model."""
    model = Decoder(**config.model.to_dict() | {"mixers": (_OURS,)})
    variables = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables))


def _step_in_blocks(config: ConfigDict) -> Case:
    whole = jax.nn.dot_product_attention

    def attend(*inputs: jax.Array, is_causal: bool = False, **options: Any) -> jax.Array:
        # The mixer's own call is the one without a mask; those of the blocks have one.
        return attend_in_blocks(*inputs, block_size=_BLOCK_SIZE) if is_causal else whole(*inputs, **options)

    with mock.patch.object(jax.nn, "dot_product_attention", attend):
        return step_case(config)


def fastest_rival(cell: Cell) -> str:
    """In one line, how ours compares with the faster form of softmax attention that fits."""
    length = cell.at["tokens of a row"]
    ratios = {
        name: ratio
        for name in cell.seconds
        if name.startswith("softmax") and not math.isnan(ratio := cell.ratio(name, _OURS))
    }
    if not ratios:
        return f"{length:,} tokens: no softmax attention was timed"
    name = min(ratios, key=lambda name: ratios[name])
    return f"{length:,} tokens: {name} takes {ratios[name]:.2f} times as long as {_OURS}"


def main(_: list[str]) -> None:
    """Measures every case, and prints the figures, then what to read of them."""
    if _PEERS.value:
        peers.exit_if_missing("mamba2-jax", "penzai")
    config = _CONFIG.value
    compared = [compare(length) for length in map(int, _LENGTHS.value)]
    grid = Grid("A training step", _OURS, (), "tokens/s", compared)
    setting = f"{config.name}, {config.model.dtype}; the peak is that of a large square product in float32"
    measured = cells.record(setting, CASES, [grid], map(fastest_rival, compared))
    tables.show(measured)
    if _JSON.value:
        cells.save(_JSON.value, measured)


if __name__ == "__main__":
    app.run(main)
