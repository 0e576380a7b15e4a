"""The benchmark of the mixer measures what it says."""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cells, mixer, peers
from interdomain_jax.ops import interdomain_attention
from tests.numerics import assert_close, random_dynamics, random_qkv
from tests.quick import quick_environment

ROOT = Path(__file__).parents[1]
TINY = (
    "--compared_lengths=32",
    "--lengths=32,64",
    "--compiled_length=4",
    "--chunk_sizes=8",
    "--repeats=1",
    "--heads=2",
    "--head_dim=8",
    "--state_dim=8",
)


def test_its_paper_form_is_the_op():
    rng = np.random.default_rng(0)
    q, k, v = random_qkv(rng, 2, 12, 2, 2, 4, 3)
    dynamics = random_dynamics(rng, 2, 8)
    expected, _ = interdomain_attention(q, k, v, dynamics, implementation="sequential")
    assert_close(mixer.paper_form(q, k, v, dynamics), expected, 1e-5)


def test_it_reports_every_case(tmp_path):
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.mixer", "--nopeers", f"--json={tmp_path / 'mixer.json'}", *TINY],
        cwd=ROOT,
        env=quick_environment(),
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    measured = cells.load(tmp_path / "mixer.json")
    compared, growth = measured.grids
    assert [cell.at for cell in compared.cells] == [{"tokens": 32, "pass": each} for each in mixer.PASSES]
    assert compared.cases == ["chunked", "bare", "sequential", "paper", "softmax", "best chunk"]
    assert list(measured.cases) == ["chunked", "bare", "sequential", "paper", "softmax", "best chunk"]
    assert [cell.at["tokens"] for cell in growth.cells] == [32, 64]
    assert all(0 < cell.of_peak["chunked"] < 1 for cell in compared.cells)
    for direction in ("forward", "fwd + bwd"):
        assert f"chunked, {direction}: 64 tokens take" in finished.stdout
        assert f"associative, {direction}: 4 x 32 compiles in" in finished.stdout


def test_it_says_which_peers_are_missing(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    mixer.flags.FLAGS.mark_as_parsed()
    with pytest.raises(SystemExit) as error:
        mixer.main([])
    assert "mamba2-jax, mlstm-kernels must be installed" in str(error.value)


def test_mlstm_by_segments_is_one_call():
    """On linear attention in place of the package's mixer: the state that one call returns starts the next."""

    def linear_attention(q, k, v, i, f, memory, count, level, *, chunk_size, return_last_states):
        assert return_last_states
        assert q.shape[2] % chunk_size == 0
        memories = memory[:, :, None] + jnp.cumsum(k[..., :, None] * v[..., None, :], axis=2)
        counts = count[:, :, None] + jnp.cumsum(k * i[..., None], axis=2)
        levels = level[:, :, None] + jnp.cumsum(f, axis=2)
        return jnp.einsum("bhtk,bhtkv->bhtv", q, memories), (memories[:, :, -1], counts[:, :, -1], levels[:, :, -1])

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 2, 32, width)), jnp.float32) for width in (5, 5, 3))
    gates = jnp.asarray(rng.normal(size=(2, 1, 2, 32)), jnp.float32)
    start = (jnp.zeros((1, 2, 5, 3)), jnp.zeros((1, 2, 5)), jnp.zeros((1, 2)))
    expected = linear_attention(q, k, v, *gates, *start, chunk_size=2, return_last_states=True)
    assert_close(peers.mlstm_by_segments(linear_attention, 2, q, k, v, *gates), expected, 1e-5)


def test_the_chunk_sizes_are_timed_and_the_fastest_marked():
    shapes = "--tokens=64 --heads=1 --head_dims=4 --state_dims=4,8"
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.chunk_sizes", *shapes.split(), "--chunk_sizes=16,32", "--repeats=1"],
        cwd=ROOT,
        env=quick_environment(),
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    rows = [line for line in finished.stdout.splitlines() if line.startswith("│")]
    assert [line.split()[1] for line in rows] == ["4", "8"]
    assert "chunk 16, ms" in finished.stdout
