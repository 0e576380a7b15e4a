"""The fastest chunk size of the op by shape, on this machine: what `interdomain_jax/ops/chunk_sizes.py` records.

    python -m benchmarks.chunk_sizes

Forward and backward together are timed, as in training, at every chunk size in turn.
"""

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from benchmarks.problems import chunked_problem, random_inputs
from benchmarks.timing import compile_case, gradient_problem, measure

_TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens of the sequence.")
_HEADS = flags.DEFINE_integer("heads", 4, "Heads.")
_HEAD_DIMS = flags.DEFINE_list("head_dims", ["32", "64", "128"], "Widths of queries, keys and values.")
_STATE_DIMS = flags.DEFINE_list("state_dims", ["16", "64", "128"], "Complex modes of a state.")
_CHUNK_SIZES = flags.DEFINE_list("chunk_sizes", ["16", "32", "64", "128", "256"], "Chunk sizes tried.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed calls of each.")


def main(_: list[str]) -> None:
    """Prints one row of times for each shape, the fastest marked."""
    sizes = [int(size) for size in _CHUNK_SIZES.value]
    table = Table("state_dim", "head_dim", *(Column(f"chunk {size}, ms", justify="right") for size in sizes))
    shapes = [(int(modes), int(width)) for modes in _STATE_DIMS.value for width in _HEAD_DIMS.value]
    for modes, width in track(shapes, description="shapes", transient=True):
        arguments = random_inputs(np.random.default_rng(0), _TOKENS.value, _HEADS.value, width, modes)
        cases = {size: compile_case(gradient_problem(chunked_problem(arguments, size))) for size in sizes}
        seconds = [measured.seconds for measured in measure(cases, _REPEATS.value).values()]
        times = [f"{'[bold]' if time == min(seconds) else ''}{time * 1e3:.1f}" for time in seconds]
        table.add_row(str(modes), str(width), *times)
    table.title = f"{_TOKENS.value} tokens, {_HEADS.value} heads, forward and backward, {jax.devices()[0].device_kind}"
    Console().print(table)


if __name__ == "__main__":
    app.run(main)
