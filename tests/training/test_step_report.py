"""What a compiled step needs, by hand, on one CPU device with the figures of an invented chip."""

import io
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from rich.console import Console

from interdomain_jax.hardware import Chip
from interdomain_jax.training.step_report import StepReport, print_report, shard_bytes, step_report

WIDTH, ROWS, LAYERS = 32, 16, 3
CHIP = Chip("invented", flops=1e6, memory_bytes=200_000, memory_bandwidth=1e12, link_bandwidth=1e9)


class State(NamedTuple):
    step: Any
    params: Any
    opt_state: Any


@pytest.fixture(scope="module")
def compiled() -> tuple[jax.stages.Compiled, jax.sharding.Mesh]:
    """Adam on a scan of products: one forward, two backward."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    adam = optax.adam(1e-3)

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0])

    def step(state, batch):
        gradient = jax.grad(loss)(state.params, batch["x"])
        updates, opt_state = adam.update(gradient, state.opt_state)
        return State(state.step + 1, optax.apply_updates(state.params, updates), opt_state)

    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    state = jax.eval_shape(lambda weights: State(jnp.int32(0), weights, adam.init(weights)), weights)
    batch = {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)}
    placed = NamedSharding(mesh, PartitionSpec())
    lowered = jax.jit(step, in_shardings=placed, out_shardings=placed, donate_argnums=0).lower(state, batch)
    return lowered.compile(), mesh


def report_of(compiled, chip: Chip = CHIP) -> StepReport:
    program, mesh = compiled
    return step_report(program, mesh=mesh, chip=chip, tokens=ROWS, model_flops=3 * LAYERS * 2 * ROWS * WIDTH**2)


def test_memory_by_what_it_holds(compiled):
    memory = report_of(compiled).memory
    weights = 4 * LAYERS * WIDTH**2
    assert memory.parameters == weights
    assert memory.optimizer == 2 * weights + 4
    assert memory.batch == 4 * ROWS * WIDTH
    # Activations of every layer at least.
    assert memory.temporaries >= LAYERS * 4 * ROWS * WIDTH
    analysis = compiled[0].memory_analysis()
    assert report_of(compiled).memory_bytes == (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.generated_code_size_in_bytes
    )


def test_memory_is_held_against_the_chips(compiled):
    needed = report_of(compiled).memory_bytes
    assert report_of(compiled, CHIP._replace(memory_bytes=needed)).fits
    assert not report_of(compiled, CHIP._replace(memory_bytes=needed - 1)).fits


def test_the_roofline_is_the_busiest_resource(compiled):
    report = report_of(compiled)
    product = 2 * ROWS * WIDTH**2
    assert report.costs.flops == 3 * LAYERS * product
    assert report.bound == "arithmetic"
    assert report.step_seconds == pytest.approx(3 * LAYERS * product / 1e6)
    assert report.tokens_per_second == pytest.approx(ROWS / report.step_seconds)
    assert report.mfu_ceiling == pytest.approx(1.0)
    slow_memory = report_of(compiled, CHIP._replace(memory_bandwidth=1e3))
    assert slow_memory.bound == "memory"
    assert slow_memory.mfu_ceiling == pytest.approx(report.step_seconds / slow_memory.step_seconds)


def test_a_device_holds_its_shard():
    mesh = AbstractMesh((2, 4), ("data", "fsdp"))
    arrays = {"a": jax.ShapeDtypeStruct((8, 16), jnp.bfloat16), "b": jax.ShapeDtypeStruct((6,), jnp.float32)}
    shardings = {
        "a": NamedSharding(mesh, PartitionSpec("data", "fsdp")),
        "b": NamedSharding(mesh, PartitionSpec()),
    }
    assert shard_bytes(arrays, shardings) == 2 * 4 * 4 + 4 * 6


@pytest.mark.parametrize(("memory", "verdict"), [(10**9, "fits"), (10**3, "does not fit")])
def test_the_printed_report_says_whether_it_fits(compiled, memory, verdict):
    out = io.StringIO()
    print_report(report_of(compiled, CHIP._replace(memory_bytes=memory)), Console(file=out, width=100))
    text = out.getvalue()
    assert f" {verdict} " in text
    assert "One step of 16 tokens on 1 invented: data 1" in text
    assert "bound by arithmetic" in text
