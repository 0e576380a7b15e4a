"""The decode benchmark times the steps that it says, in a loop that does them all."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread

from benchmarks import cells, decode_loops, decode_report, decode_steps, tables
from benchmarks.cells import Cell, Grid
from benchmarks.compilers import missing_compiler
from benchmarks.decode_report import FIRST
from benchmarks.decode_steps import HEADS_FIRST, OURS, STEPS, Cache, Inputs, Layer, PaperState
from interdomain_jax.ops import interdomain_attention
from interdomain_jax.ops.decoding import DecodingState, end_decoding
from tests.numerics import assert_close, paper_attention, random_dynamics, random_qkv
from tests.quick import quick_environment, quick_jit

ROOT = Path(__file__).parents[1]
LAYER = Layer(heads=2, head_dim=4, state_dim=8)
FORMS = ("interdomain", "op", "paper", "s4d", "softmax", HEADS_FIRST, "copy")


def random_step():
    """A state that is not zero, and a token for each of three rows."""
    rng = np.random.default_rng(0)
    inputs = Inputs(*random_qkv(rng, 3, 1, 2, 2, 4, 4), random_dynamics(rng, 2, 8))
    return jnp.asarray(rng.normal(size=(3, 2, 2, 8, 8)), jnp.float32), inputs


def state_of(carry):
    """The state that a case carries, as the ops take it."""
    if isinstance(carry, DecodingState):
        return end_decoding(carry)
    return carry.state if isinstance(carry, PaperState) else carry


@pytest.mark.parametrize("name", ["interdomain", "op", "paper"])
def test_every_form_gives_the_papers_output(name):
    state, inputs = random_step()
    expected, last = paper_attention(*inputs, state, "bilinear")
    carry, out = quick_jit(STEPS[name])(decode_steps.carried(name, state, inputs.dynamics), inputs)
    assert_close((state_of(carry), out), (last, expected), 1e-5)


@pytest.mark.parametrize("name", ["softmax", HEADS_FIRST])
def test_softmax_sees_the_whole_cache_with_the_token_in_its_last_place(name):
    rng = np.random.default_rng(1)
    q, k, v = random_qkv(rng, 3, 6, 2, 2, 4, 4)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)[:, -1:]
    order = lambda x: x.swapaxes(1, 2).reshape(-1, 6, 4) if name == HEADS_FIRST else x
    stale = Cache(*(order(x.at[:, -1].set(jnp.nan)) for x in (k, v)))
    inputs = Inputs(q[:, -1:], k[:, -1:], v[:, -1:], random_dynamics(rng, 2, 8))
    assert_close(quick_jit(STEPS[name])(stale, inputs), (Cache(order(k), order(v)), expected), 1e-6)


def test_every_case_starts_from_the_same_tokens():
    size = (LAYER, 3, 6, jnp.float32)
    keys, values = decode_steps.start("softmax", *size)
    state = state_of(decode_steps.start(OURS, *size))
    dynamics = decode_steps.make_inputs(LAYER, 1, jnp.float32).dynamics
    _, expected = interdomain_attention(keys, keys, values, dynamics, implementation="sequential")
    assert_close(state, expected, 1e-5)
    by_head = decode_steps.start(HEADS_FIRST, *size)
    assert_close(by_head.keys.reshape(3, 2, 6, 4).swapaxes(1, 2), keys, 0.0)
    assert_close(by_head.values.reshape(3, 2, 6, 4).swapaxes(1, 2), values, 0.0)
    for name in FORMS:
        shape = decode_steps.carry_shape(name, *size)
        assert jax.tree.map(jnp.shape, decode_steps.start(name, *size)) == jax.tree.map(jnp.shape, shape)


def test_a_loop_runs_every_step_in_place():
    dtype = jnp.float32
    loop = decode_loops.compile_loop(OURS, LAYER, 2, 0, dtype)
    carry, inputs = decode_steps.start(OURS, LAYER, 2, 5, dtype), decode_steps.make_inputs(LAYER, 2, dtype)
    state = state_of(carry)
    q, k, v = (jnp.repeat(x, 3, axis=1) for x in inputs[:3])
    out, last = interdomain_attention(q, k, v, inputs.dynamics, initial_state=state, implementation="sequential")
    steps = decode_loops.Steps(loop, carry, inputs)
    steps()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(carry))
    steps.turns = 2
    assert_close(steps(), out[:, -1:], 1e-5)
    assert_close(state_of(steps._carry), last, 1e-5)


def test_only_the_op_works_its_tables_out_in_every_step():
    """What is in the loop's body is not ahead of it: the cosines of lambda."""
    # Computations stand before the entry, which is the last one.
    body, entry = decode_loops.compile_loop("op", LAYER, 2, 0, jnp.float32).run.as_text().split("\nENTRY ")
    assert "cosine" in body
    assert "cosine" not in entry
    assert "cosine" not in decode_loops.compile_loop(OURS, LAYER, 2, 0, jnp.float32).run.as_text()


def test_what_does_not_fit_is_marked_and_not_made(monkeypatch):
    names = ("interdomain", "softmax", "copy")
    plan = decode_loops.Plan(LAYER, names, first=4, dtype=jnp.float32, repeats=1, seconds=1e-3)
    bytes_of_cache = 2 * 4 * 2 * 4096 * 2 * 4
    monkeypatch.setattr(decode_loops, "free_memory", lambda: bytes_of_cache)
    cell = decode_loops.measure_cell(plan, 2, 4096)
    assert cell.memory["softmax"] > bytes_of_cache
    assert [name for name, seconds in cell.seconds.items() if math.isnan(seconds)] == ["softmax"]
    assert min(cell.seconds[name] for name in ("interdomain", "copy", FIRST)) > 0


def example_cells():
    """Two batches of two prefixes, with a case that did not fit and one that did not compile."""
    seconds = {OURS: 2e-3, "paper": 8e-3, "softmax": 4e-3, "copy": 1e-3, FIRST: 2e-3}
    examples = [
        Cell({"batch": batch, "prefix": prefix}, {name: batch * value for name, value in seconds.items()})
        for batch in (1, 8)
        for prefix in (512, 2048)
    ]
    examples[0].seconds[FIRST] = 1.9e-3
    examples[-1].seconds["softmax"] = math.nan
    del examples[-1].seconds["paper"]
    return examples


def test_the_tables_say_what_was_measured():
    grid = Grid("A token", OURS, ("copy", FIRST), "ms", example_cells())
    ratios = tables.ratio_table(grid)
    columns = dict(zip(ratios.headers, zip(*ratios.rows, strict=True), strict=True))
    assert list(columns) == ["batch", "prefix", "paper", "softmax", "interdomain / copy", f"interdomain / {FIRST}"]
    assert columns["batch"] == ("1", "1", "8", "8")
    assert columns["paper"] == ("4.00", "4.00", "4.00", "")
    assert columns["softmax"] == ("2.00", "2.00", "2.00", "")
    assert columns["interdomain / copy"] == ("2.00",) * 4
    assert columns[f"interdomain / {FIRST}"] == ("1.05", "1.00", "1.00", "1.00")
    times = tables.time_table(grid)
    columns = dict(zip(times.headers, zip(*times.rows, strict=True), strict=True))
    assert columns["softmax"] == ("4.000", "4.000", "32.0", "does not fit")
    assert columns["paper"][-1] == ""
    assert "within 5.3% of its time at the first prefix" in decode_report.flatness(grid.cells)
    assert "batch 1, prefix 512" in decode_report.flatness(grid.cells)


def test_the_figure_has_a_panel_for_each_batch(tmp_path):
    figure = decode_report.draw(example_cells(), [OURS, "paper", "softmax", "copy"], title="two batches")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["batch 1", "batch 8"]
    lines = {line.get_label(): line for line in figure.axes[1].lines}
    np.testing.assert_allclose(lines[OURS].get_ydata(), [16, 16])
    np.testing.assert_allclose(lines["softmax"].get_ydata(), [32, math.nan])
    crosses = [list(line.get_xdata()) for line in figure.axes[1].lines if line.get_marker() == "x"]
    assert crosses == [[], [], [2048], []]
    figure.savefig(tmp_path / "decode.png")
    assert imread(tmp_path / "decode.png").std() > 0.05


def run_benchmark(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.decode", *arguments],
        cwd=ROOT,
        env=quick_environment(),
        capture_output=True,
        text=True,
    )


def test_it_reports_every_case(tmp_path):
    finished = run_benchmark(
        "--model=tiny",
        "--batches=1,2",
        "--prefixes=8,16",
        "--repeats=1",
        "--timing_ms=1",
        "--nopeers",
        f"--json={tmp_path / 'decode.json'}",
        f"--figure={tmp_path / 'decode.png'}",
    )
    assert finished.returncode == 0, finished.stderr
    assert "tiny, 4 heads of 32, 32 modes, float32" in finished.stdout
    (grid,) = cells.load(tmp_path / "decode.json").grids
    assert [tuple(cell.at.values()) for cell in grid.cells] == [(1, 8), (1, 16), (2, 8), (2, 16)]
    for cell in grid.cells:
        assert set(cell.seconds) == {*FORMS, FIRST}
        assert min(cell.seconds.values()) > 0
    rows = [line.split("│")[1:-1] for line in finished.stdout.splitlines() if line.startswith("│")]
    ratio = {tuple(cell.strip() for cell in row[:2]): row[2:] for row in rows[:4]}
    assert float(ratio["2", "16"][1]) == pytest.approx(grid.cells[-1].ratio("paper", OURS), rel=0.01)
    assert imread(tmp_path / "decode.png").std() > 0.05


def test_an_unknown_case_is_refused():
    finished = run_benchmark("--model=tiny", "--cases=mamba2", "--nopeers")
    assert finished.returncode != 0
    said = finished.stdout + finished.stderr
    assert "--cases=mamba2: here there are interdomain, op, paper, s4d, softmax, softmax heads first, copy" in said


@pytest.mark.compiled
@pytest.mark.parametrize("topology", ["h100:1", "v5e:1x1"])
def test_steps_are_compiled_for_chips_that_are_not_there(topology, tmp_path):
    chip = topology.split(":")[0]
    if missing_compiler(chip):
        pytest.skip(f"{missing_compiler(chip)} is not installed")
    output = tmp_path / "decode.json"
    arguments = ["--model=125m", "--batches=8", "--prefixes=512,2048", f"--json={output}"]
    finished = run_benchmark("--compile_only", f"--topology={topology}", *arguments)
    assert finished.returncode == 0, finished.stderr
    programs = json.loads(output.read_text())["programs"]
    moved = {(each["case"], each["prefix"]): each["bytes_accessed"] for each in programs}
    state = 4 * 8 * 12 * 2 * 64 * 128
    assert moved["copy", 512] == pytest.approx(2 * state, rel=0.05)
    assert moved["interdomain", 512] > 2 * state
    # The cache is read: keys and values of two bytes.
    assert moved["softmax", 512] > 2 * 2 * 8 * 512 * 12 * 64
    assert moved["softmax", 2048] > 2 * moved["softmax", 512]
    flops = {each["case"]: each["flops"] for each in programs}
    assert flops["paper"] > 10 * flops["interdomain"] > 0
