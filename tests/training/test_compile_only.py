"""A config's step, compiled for devices that are not there."""

import importlib

import jax
import pytest

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
        compiling._compile(_Refused(message), jax.devices()[0], "v5e:2x2")


def test_other_failures_of_the_compiler_stay_what_they_are():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compiling._compile(_Refused("INTERNAL: a fault"), jax.devices()[0], "v5e:2x2")


@pytest.mark.compiled
@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:4"])
def test_the_step_of_a_config(topology):
    if package := missing_compiler(topology.split(":")[0]):
        pytest.skip(f"{package} is not installed")
    config = importlib.import_module("configs.tiny").get_config()
    config.mesh = {"data": 1, "fsdp": 4, "tensor": 1, "seq": 1}
    config.data.sequence_length, config.data.batch_size = 256, 8
    report = compiling.compile_only(config, topology)
    assert report.fits
    assert report.num_devices == 4
    # Two moments for every parameter, split alike; but for counts of steps.
    assert 0 <= report.memory.optimizer - 2 * report.memory.parameters < 1000
    assert report.tokens == 8 * 256
    assert report.costs.loops_of_unknown_length == 0
    # Nothing is left out, and not everything is done twice.
    assert 0.95 < report.costs.flops * report.num_devices / report.model_flops < 2.0
    assert sum(costs.bytes for costs in report.costs.collectives.values()) >= report.memory.parameters
