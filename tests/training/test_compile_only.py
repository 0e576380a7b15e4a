"""A config's step, compiled for devices that are not there."""

import importlib

import jax
import pytest

from benchmarks.topology_rows import ROWS, config_of
from interdomain_jax.topologies import missing_compiler
from interdomain_jax.training import compile_only as compiling


class _Refused:
    """Stands for a lowered step, and says why it does not compile."""

    def __init__(self, message: str):
        self.message = message

    def compile(self, compiler_options):
        raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize(
    ("message", "figures"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.15G of 15.75G hbm.",
            "20.15GiB of 15.75GiB",
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (21.91G) "
            "exceeds available HBM (15.75G).",
            "21.91GiB of 15.75GiB",
        ),
    ],
)
def test_too_little_memory_is_one_sentence(message, figures):
    with pytest.raises(compiling.OutOfMemoryError, match=f"does not fit a device of v5e:2x2: it needs {figures};"):
        compiling._compile(_Refused(message), jax.devices()[0], "v5e:2x2", {})


def test_other_failures_of_the_compiler_stay_what_they_are():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compiling._compile(_Refused("INTERNAL: a fault"), jax.devices()[0], "v5e:2x2", {})


# The least effort: in a sixth of the time, a program that fuses less. `make scaling` compiles with all of it.
LEAST_EFFORT = {"exec_time_optimization_effort": -1.0}


def compiled(row):
    if package := missing_compiler(row.topology.split(":")[0]):
        pytest.skip(f"{package} is not installed")
    return compiling.compile_only(config_of(row), row.topology, row.num_slices, options=LEAST_EFFORT)


@pytest.mark.compiled
@pytest.mark.parametrize(("name", "gigabytes"), [("125m v5e:2x2", 16), ("1_3b v5e:16x16", 16), ("1_3b v5p:4x4x4", 95)])
def test_a_published_model_fits(name, gigabytes):
    """The paper's step of 524,288 tokens, compiled for the whole topology by its own compiler."""
    report = compiled(next(row for row in ROWS if row.name == name))
    assert report.memory_bytes < gigabytes * 1e9
    assert report.tokens == 524_288
    # Two moments for every parameter, split alike; but for counts of steps.
    assert 0 <= report.memory.optimizer - 2 * report.memory.parameters < 1000
    assert report.costs.loops_of_unknown_length == 0
    # Nothing is left out, and not everything is done twice.
    assert 0.95 < report.costs.flops * report.num_devices / report.model_flops < 2.0
    assert sum(costs.bytes for costs in report.costs.collectives.values()) >= report.memory.parameters


@pytest.mark.compiled
def test_a_million_tokens_fit_and_cost_no_more_communication_than_half_of_them():
    """Tokens split over 64 chips: what the chips send does not depend on the context."""
    row = next(row for row in ROWS if row.sequence_length == 2**20)
    million, half = (compiled(row._replace(sequence_length=length)) for length in (2**20, 2**19))
    assert million.memory_bytes < 95e9
    assert million.costs.collectives == half.costs.collectives
    # The states: of each layer, forward, again and backward, those of all other chips.
    states = 64 * 32 * 2 * 64 * 128 * 4
    assert million.link_bytes > 3 * 24 * states * 63 / 64
    assert million.costs.flops > 1.9 * half.costs.flops


@pytest.mark.compiled
def test_the_step_compiles_for_gpus():
    config = importlib.import_module("configs.tiny").get_config()
    config.mesh.update({"data": 1, "fsdp": 4})
    config.data.sequence_length, config.data.batch_size = 256, 8
    if package := missing_compiler("h100"):
        pytest.skip(f"{package} is not installed")
    report = compiling.compile_only(config, "h100:4")
    assert report.fits
    assert report.num_devices == 4
    assert 0.95 < report.costs.flops * report.num_devices / report.model_flops < 2.0
