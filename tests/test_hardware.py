"""The chips' figures: found by what JAX calls the devices, and none made up for what is not known."""

import jax
import pytest

from benchmarks.compilers import DEVICES, absent_mesh, missing_compiler
from interdomain_jax.hardware import CHIPS, chip


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
    ],
)
def test_a_chip_is_found_by_the_kind_of_its_device(kind, name):
    assert chip(kind) is CHIPS[name]


@pytest.mark.compiled
@pytest.mark.parametrize("device", DEVICES)
def test_the_compilers_call_their_devices_by_known_names(device):
    if missing_compiler(device):
        pytest.skip(f"{missing_compiler(device)} is not installed")
    assert chip(absent_mesh(device).devices.item(0).device_kind) is CHIPS[device]


@pytest.mark.parametrize("kind", ["cpu", "", "TPU v4 lite", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090"])
def test_no_figures_are_made_up(kind):
    assert chip(kind) is None


def test_this_machine_has_no_known_chip():
    assert chip(jax.devices("cpu")[0].device_kind) is None


def test_the_figures_are_in_their_units():
    """Between a fifth and five times an A100's: a slip of a unit is at least a factor of 8."""
    for known in CHIPS.values():
        for figure, typical in zip(known[1:], (312e12, 40 * 2**30, 1.555e12, 300e9), strict=True):
            assert typical / 5 < figure < typical * 5, known
