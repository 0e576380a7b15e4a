"""The benchmark of the training step runs, and says what it measured."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import cells
from benchmarks.softmax_blocks import attend_in_blocks
from tests.numerics import assert_close
from tests.quick import quick_environment

ROOT = Path(__file__).parents[1]
SMALL = {"d_model": 16, "num_layers": 1, "num_heads": 2, "head_dim": 8, "state_dim": 4}


def test_attention_in_blocks_is_attention():
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.normal(size=(3, 2, 12, 2, 8)), jnp.float32)
    cotangent = jnp.asarray(rng.normal(size=(2, 12, 2, 8)), jnp.float32)
    whole = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    expected, pull_back = jax.vjp(whole, *inputs)
    # In three blocks of four.
    actual, pull_back_blocks = jax.vjp(lambda *inputs: attend_in_blocks(*inputs, block_size=8), *inputs)
    assert_close(actual, expected, 1e-6)
    assert_close(pull_back_blocks(cotangent), pull_back(cotangent), 1e-6)


def test_it_reports_every_case(tmp_path):
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.trainer",
            *(f"--config.model.{field}={value}" for field, value in SMALL.items()),
            "--cases=softmax,softmax blocks",
            "--lengths=512",
            "--rows=2",
            "--repeats=1",
            "--nopeers",
            f"--json={tmp_path / 'trainer.json'}",
        ],
        cwd=ROOT,
        env=quick_environment(),
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    (grid,) = cells.load(tmp_path / "trainer.json").grids
    (cell,) = grid.cells
    assert cell.at == {"tokens of a row": 512, "rows": 2}
    assert cell.tokens == 2 * 512
    assert grid.cases == ["interdomain", "softmax", "softmax blocks"]
    assert min(cell.seconds.values()) > 0
    # The blocks are in the program: they hold half of the [2, 2, 512, 512] scores at a time.
    assert cell.memory["softmax blocks"] < 0.8 * cell.memory["softmax"]
    assert "512 tokens: softmax" in finished.stdout
