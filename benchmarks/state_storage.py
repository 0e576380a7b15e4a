"""What storing states in bfloat16 does to the predictions behind them.

    python -m benchmarks.state_storage --workdir=runs/tiny

Stretches of real text are read, their states saved, as they are and in bfloat16, and loaded, and the text behind them
is read on. The error is that of the stored state alone; it fades as the state takes in what is exact.
"""

import argparse
import inspect
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import Array
from rich.console import Console
from rich.table import Column, Table

from interdomain_jax import cli, sharding
from interdomain_jax.inference import Generator
from interdomain_jax.inference.states import Storage, load_state, save_state
from interdomain_jax.inference.texts import prompt_ids
from interdomain_jax.modules.layer_layout import separate_layers
from interdomain_jax.trained import find_trained

_WORKDIR = flags.DEFINE_string("workdir", "runs/tiny", "Directory of the run.")
_FILE = flags.DEFINE_string("file", inspect.getfile(argparse), "A text, by default of Python's own library.")
_LENGTH = flags.DEFINE_integer("length", 2048, "Tokens read before the state is stored.", lower_bound=1)
_MORE = flags.DEFINE_integer("more", 512, "Tokens read behind it.", lower_bound=16)
_ROWS = flags.DEFINE_integer("rows", 16, "Stretches of the text.", lower_bound=1)


def main(_: list[str]) -> None:
    with cli.exit_on_bad_input():
        trained = find_trained(_WORKDIR.value, sharding.mesh_config(), "latest")
        tokens = prompt_ids(trained.tokenizer, Path(_FILE.value).read_text())
        length, more, rows = _LENGTH.value, _MORE.value, _ROWS.value
        if len(tokens) < length + more:
            raise ValueError(f"--file has {len(tokens)} tokens; --length and --more ask for {length + more}")
        params = trained.restore_params()
        generator = Generator(trained.model, params, trained.mesh, batch_size=rows, max_length=length + more)
    starts = np.linspace(0, len(tokens) - length - more, rows, dtype=int)
    texts = np.array([tokens[start : start + length + more] for start in starts])
    state = generator.read(texts[:, :length].tolist())
    # The layers of a state are apart.
    if trained.model.scan_layers:
        params = separate_layers(params)
    forward = jax.jit(trained.model.clone(scan_layers=False).apply)

    def predictions(storage: Storage) -> Array:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "state"
            save_state(path, trained.model, state, storage=storage)
            stored = load_state(path, trained.model)
        return jax.nn.log_softmax(forward({"params": params}, texts[:, length:], cache=stored.cache)[0])

    table = Table(
        "tokens behind the state", *(Column(each, justify="right") for each in ("KL, nats", "largest change"))
    )
    exact, rounded = predictions("float32"), predictions("bfloat16")
    divergence = jnp.sum(jnp.exp(exact) * (exact - rounded), axis=-1)
    change = jnp.max(jnp.abs(exact - rounded), axis=-1)
    for end in (1, 16, more):
        table.add_row(f"1 to {end}", f"{divergence[:, :end].mean():.1e}", f"{change[:, :end].max():.4f}")
    Console().print(table)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
