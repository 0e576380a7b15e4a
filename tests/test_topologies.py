"""Devices that are not there: what names them, and what does not."""

import pytest

from interdomain_jax.topologies import absent_devices, compiler_options, missing_compiler


@pytest.mark.parametrize(
    ("topology", "num_slices", "sentence"),
    [
        ("v5e", 1, "topology is 'v5e'; it must be like 'v5e:16x16' or 'h100:8'"),
        ("v5e:2x0", 1, "topology is 'v5e:2x0'; it must be like"),
        ("v9:2x2", 1, "topology 'v9:2x2' names no known chip; known: v4, v5e, v5p, v6e, h100"),
        ("v5e:2x2", 0, "num_slices is 0; it must be at least 1"),
    ],
)
def test_bad_names_are_refused_with_or_without_a_compiler(topology, num_slices, sentence):
    with pytest.raises(ValueError, match=sentence):
        absent_devices(topology, num_slices)


@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:1"])
def test_a_missing_compiler_is_named(topology, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package (libtpu|jax-cuda12-plugin); `pip install"):
        absent_devices(topology)


@pytest.mark.compiled
@pytest.mark.skipif(missing_compiler("v5e") is not None, reason=f"{missing_compiler('v5e')} is not installed")
class TestTPU:
    @pytest.mark.parametrize(
        ("topology", "count"), [("v4:2x2x1", 4), ("v5e:16x16", 256), ("v5p:4x4x4", 64), ("v6e:8x8", 64), ("v5e:1x1", 1)]
    )
    def test_a_device_for_each_chip(self, topology, count):
        assert len(absent_devices(topology)) == count

    def test_slices(self):
        devices = absent_devices("v5e:2x2", 3)
        assert [device.slice_index for device in devices] == [0] * 4 + [1] * 4 + [2] * 4

    @pytest.mark.parametrize("topology", ["v5e:3x5", "v5e:2"])
    def test_what_the_compiler_refuses_is_one_sentence(self, topology):
        with pytest.raises(ValueError, match=f"^topology '{topology}' is refused by the TPU compiler: .*$"):
            absent_devices(topology)


@pytest.mark.compiled
@pytest.mark.skipif(missing_compiler("h100") is not None, reason=f"{missing_compiler('h100')} is not installed")
class TestGPU:
    def test_one_machine(self):
        devices = absent_devices("h100:8")
        assert len(devices) == 8
        assert compiler_options(devices[0])

    @pytest.mark.parametrize(("topology", "num_slices"), [("h100:16", 1), ("h100:2x4", 1), ("h100:8", 2)])
    def test_more_than_one_machine_is_refused(self, topology, num_slices):
        with pytest.raises(ValueError, match=f"topology '{topology}' with num_slices={num_slices} is not known here"):
            absent_devices(topology, num_slices)
