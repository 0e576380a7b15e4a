"""The benchmark of the training step runs, and says what it measured."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

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


def test_it_reports_every_case():
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.train_step",
            *(f"--config.model.{field}={value}" for field, value in SMALL.items()),
            "--cases=softmax,softmax blocks",
            "--lengths=512",
            "--rows=2",
            "--repeats=1",
        ],
        cwd=ROOT,
        env=quick_environment(),
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    rows = [line.split("│")[1:-1] for line in finished.stdout.splitlines() if line.startswith("│")]
    cells = [[cell.strip().replace(",", "") for cell in row] for row in rows]
    assert [row[:2] for row in cells] == [["512", case] for case in ("interdomain", "softmax", "softmax blocks")]
    for _, case, milliseconds, rate, ratio, *_ in cells:
        # Printed in whole milliseconds.
        assert abs(2 * 512 / float(rate) - float(milliseconds) / 1e3) < 1e-3
        assert case != "interdomain" or ratio == "1.00"
    memory = {row[1]: float(row[-1]) for row in cells}
    # The blocks are in the program: they hold half of the [2, 2, 512, 512] scores at a time.
    assert memory["softmax blocks"] < 0.8 * memory["softmax"]
    assert "512 tokens: softmax" in finished.stdout
