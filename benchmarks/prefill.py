"""Memory and time of reading prompts, by their length: what a generator needs beside its parameters and programs.

    JAX_PLATFORMS=cpu python -m benchmarks.prefill
    JAX_PLATFORMS=cpu python -m benchmarks.prefill --model=125m --lengths=512,2048,8192 --mixers=interdomain

Each prompt is random tokens, read in chunks by a generator that has read one before; the peak is that of the process,
set back just before, so Linux alone can tell it. A softmax model's cache is as long as the prompt.
"""

import importlib
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from absl import app, flags
from rich.console import Console
from rich.table import Column, Table

from interdomain_jax import sharding
from interdomain_jax.inference import Generator
from interdomain_jax.modules.decoder import Decoder

_MODEL = flags.DEFINE_enum("model", "tiny", ["tiny", "125m", "350m", "760m", "1_3b"], "A file of configs/.")
_MIXERS = flags.DEFINE_list("mixers", ["interdomain", "softmax"], "Mixers of the model.")
_LENGTHS = flags.DEFINE_list("lengths", ["512", "2048", "8192", "32768"], "Tokens of the prompts.")
_CHUNK_SIZE = flags.DEFINE_integer("chunk_size", 512, "Tokens read at a time: a power of two.")

_PEAK = Path("/proc/self/clear_refs")


class Reading(NamedTuple):
    """What one prompt took: seconds, bytes at most beyond those before it, and the bytes of the state after it."""

    seconds: float
    peak: int
    state: int


def read_prompt(model: Decoder, length: int, chunk_size: int) -> Reading:
    """Reads a prompt of random tokens, all programs compiled before."""
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    mesh = sharding.make_mesh(sharding.mesh_config(), jax.devices()[:1])
    generator = Generator(model, params, mesh, batch_size=1, max_length=length, chunk_size=chunk_size)
    prompt = np.random.default_rng(0).integers(model.vocab_size, size=length).tolist()
    jax.block_until_ready(generator.read([prompt]))
    process = psutil.Process()
    _PEAK.write_text("5")
    before, start = process.memory_info().rss, time.perf_counter()
    state = jax.block_until_ready(generator.read([prompt]))
    return Reading(time.perf_counter() - start, _peak_bytes() - before, state.bytes)


def _peak_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def main(_: list[str]) -> None:
    if not _PEAK.exists():
        sys.exit(f"{_PEAK} does not exist; the peak of a process can be set back on Linux alone")
    config = importlib.import_module(f"configs.{_MODEL.value}").get_config()
    table = Table(
        "mixer", *(Column(each, justify="right") for each in ("tokens", "ms a token", "peak, MB", "state, MB"))
    )
    for mixer in _MIXERS.value:
        model = Decoder(**config.model.to_dict() | {"mixers": (mixer,)})
        for length in map(int, _LENGTHS.value):
            Console(stderr=True).print(f"{mixer}, {length:,} tokens", highlight=False)
            reading = read_prompt(model, length, _CHUNK_SIZE.value)
            table.add_row(
                mixer,
                f"{length:,}",
                f"{1e3 * reading.seconds / length:.3f}",
                f"{reading.peak / 1e6:,.1f}",
                f"{reading.state / 1e6:,.1f}",
            )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    app.run(main)
