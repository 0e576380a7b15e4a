"""The table of block sizes, and which device it is read for."""

import math

import pytest

from pallas_kernels import block_sizes
from pallas_kernels.block_sizes import BLOCK_SIZES, interpreted


@pytest.fixture
def on_device(monkeypatch):
    return lambda kind: monkeypatch.setattr(block_sizes, "device_kind", lambda: kind)


def test_every_state_has_sizes_on_every_device():
    for buckets in BLOCK_SIZES.values():
        limits = [bucket.reals for bucket in buckets]
        assert limits == sorted(set(limits))
        assert limits[-1] == math.inf


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5"),
        ("TPU v5p", "TPU v5"),
        ("TPU v6 lite", "TPU v6"),
        ("TPU7x", "TPU"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA"),
        ("cpu", "cpu"),
    ],
)
def test_the_longest_name_that_fits_is_taken(on_device, kind, row):
    on_device(kind)
    assert block_sizes.block_sizes(64, 128) == BLOCK_SIZES[row][0].sizes


def test_unknown_devices_are_refused(on_device):
    on_device("Abacus 9")
    with pytest.raises(ValueError, match="there are no block sizes for device kind 'Abacus 9'; known are TPU v4, "):
        block_sizes.block_sizes(64, 128)


def test_a_kernel_runs_on_its_device_and_is_interpreted_on_a_cpu(on_device):
    assert interpreted("TPU")
    on_device("TPU v5 lite")
    assert not interpreted("TPU")
    with pytest.raises(ValueError, match="kind 'NVIDIA', or a CPU that interprets it; got 'TPU v5 lite'"):
        interpreted("NVIDIA")
