"""Meshes and processes that cannot be: one sentence that names the flag and its value, and nothing is done."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from absl import flags
from absl.testing import flagsaver

from configs import tiny
from interdomain_jax import checkpoints, cli, sharding
from interdomain_jax import workdir as workdirs
from interdomain_jax.evaluation import perplexity
from interdomain_jax.preemption import Notice
from interdomain_jax.training import compile_only as compiling
from interdomain_jax.training import loop
from tests.virtual_devices import run_on_eight_devices

ROOT = Path(__file__).parents[2]


def forbid_work(patch):
    """From here on, compiling, opening a corpus or joining other processes is an error that no user would see."""

    def refuse(*arguments, **options):
        raise AssertionError("the input was not checked first")

    for owner, name in (
        (jax.stages.Lowered, "compile"),
        (jax.distributed, "initialize"),
        (loop, "open_corpora"),
        (perplexity, "open_corpora"),
    ):
        patch.setattr(owner, name, refuse)


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    forbid_work(monkeypatch)


def config_with(overrides):
    config = tiny.get_config()
    config.update_from_flattened_dict({"data.batch_size": 8} | overrides)
    return config


def save_run(workdir):
    """A run with a checkpoint of no use."""
    workdirs.save_config(workdir, config_with({}))
    with checkpoints.open_checkpoints(workdir) as opened:
        checkpoints.save(opened, 3, {"params": {"scale": jnp.zeros(1)}}, run={})


def sentence_of(function, *arguments):
    """What the program would end with."""
    with pytest.raises(SystemExit) as raised, cli.exit_on_bad_input():
        function(*arguments)
    message = raised.value.code
    assert isinstance(message, str)
    assert "\n" not in message
    return message


# For the one device of this process.
SIZES = [
    ({"data": 2}, ("mesh is data=2, fsdp=1", "multiply to the number of devices, 1")),
    ({"fsdp": 3}, ("mesh is data=-1, fsdp=3", "divide the number of devices, 1")),
    ({"fsdp": -1}, ("data=-1, fsdp=-1", "one of them may be -1")),
    ({"tensor": 0}, ("tensor=0", "at least 1")),
    ({"seq": -2}, ("seq=-2", "at least 1")),
]


@pytest.mark.parametrize(("sizes", "named"), SIZES)
def test_sizes_that_no_mesh_has(tmp_path, sizes, named):
    config = config_with({f"mesh.{axis}": size for axis, size in sizes.items()})
    trained = sentence_of(loop.prepare, config, tmp_path / "run")
    assert all(part in trained for part in named), trained
    assert list(tmp_path.iterdir()) == []

    # Nor can a run be evaluated on it.
    save_run(tmp_path)
    evaluated = sentence_of(perplexity.prepare, tmp_path, {**sharding.mesh_config(), **sizes})
    assert evaluated == trained


# For eight.
SHARED = [
    ({"mesh.data": 3, "mesh.fsdp": 2}, ("data=3, fsdp=2", "multiply to the number of devices, 8")),
    ({"mesh.fsdp": 3}, ("data=-1, fsdp=3", "divide the number of devices, 8")),
    ({"mesh.tensor": 2}, ("embed/embedding", "257", "'vocab'", "mesh.tensor=2")),
    ({"mesh.tensor": 8, "model.vocab_size": 264}, ("'heads'", "mesh.tensor=8")),
    ({"mesh.seq": 8, "model.d_model": 100}, ("100", "'embed'", "mesh.seq=8")),
    ({"mesh.seq": 8, "model.mixers": ("softmax",)}, ("softmax attention", "mesh.seq=8")),
    ({"mesh.seq": 8, "model.mixers": ("interdomain", "softmax")}, ("softmax attention", "mesh.seq=8")),
    ({"mesh.seq": 8, "data.sequence_length": 36}, ("data.sequence_length is 36", "mesh.seq=8")),
    ({"data.batch_size": 12}, ("data.batch_size is 12", "mesh.data", "1 x 8")),
    ({"accumulation_steps": 2}, ("data.batch_size is 8", "accumulation_steps", "2 x 8")),
]

PROGRAM = """
import pathlib, tempfile
import pytest
from tests.training import test_mesh_flags as flags

with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
    flags.forbid_work(patch)
    workdir = pathlib.Path(name) / "run"
    for overrides, named in flags.SHARED:
        message = flags.sentence_of(flags.loop.prepare, flags.config_with(overrides), workdir)
        assert all(part in message for part in named), message
        assert not workdir.exists()
"""


def test_what_eight_devices_cannot_share():
    run_on_eight_devices(PROGRAM)


TOPOLOGIES = [
    ("v5e", 1, ("topology is 'v5e'", "v5e:16x16")),
    ("v9:2x2", 1, ("'v9:2x2'", "v4, v5e, v5p, v6e, h100")),
    ("v5e:2x2", 0, ("num_slices is 0",)),
]


@pytest.mark.parametrize(("topology", "num_slices", "named"), TOPOLOGIES)
def test_topologies_that_are_none(topology, num_slices, named):
    message = sentence_of(compiling.compile_only, config_with({}), topology, num_slices)
    assert all(part in message for part in named), message


COMPILED = [
    ({"accumulation_steps": 0}, ("accumulation_steps is 0",)),
    ({"mesh.data": 3}, ("mesh is data=3", "number of devices, 1")),
    ({"data.batch_size": 6, "accumulation_steps": 4}, ("data.batch_size is 6", "4 x 1")),
]


@pytest.mark.parametrize(("overrides", "named"), COMPILED)
def test_what_is_compiled_only_is_checked_too(monkeypatch, overrides, named):
    """On the device of this process, in place of one that is not there."""
    monkeypatch.setattr(compiling, "absent_devices", lambda topology, num_slices: jax.devices())
    monkeypatch.setattr(compiling, "chip", lambda kind: "a chip")
    message = sentence_of(compiling.compile_only, config_with(overrides), "v5e:1x1")
    assert all(part in message for part in named), message


PROCESSES = [
    ({"coordinator_address": "localhost:1234"}, ("--coordinator_address", "go together")),
    ({"num_processes": 2, "process_id": 0}, ("--coordinator_address", "go together")),
    ({"coordinator_address": "localhost:1234", "num_processes": 2, "process_id": 2}, ("--process_id is 2", "below")),
    (
        {"coordinator_address": "localhost:1234", "num_processes": 2, "process_id": -1},
        ("--process_id is -1", "least 0"),
    ),
]


@pytest.mark.parametrize(("given", "named"), PROCESSES)
def test_processes_that_do_not_go_together(tmp_path, given, named):
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(**given):
        message = sentence_of(cli.join_processes, tmp_path, Notice())
    assert all(part in message for part in named), message


COMMANDS = [
    (["train.py", "--config=configs/tiny.py", "--workdir=WORKDIR", "--config.mesh.tensor=2"], "mesh.tensor=2 must"),
    (["train.py", "--config=configs/tiny.py", "--compile_only"], "--topology=v5e:16x16"),
    (["eval.py", "--workdir=WORKDIR", "--mesh.fsdp=3"], "mesh is data=-1, fsdp=3"),
]


@pytest.mark.parametrize(("command", "named"), COMMANDS)
def test_a_command_line_ends_with_one_sentence(tmp_path, command, named):
    workdir = tmp_path / "run"
    if command[0] == "eval.py":
        save_run(workdir)
    before = sorted(tmp_path.rglob("*"))
    finished = subprocess.run(
        [sys.executable, *(part.replace("WORKDIR", str(workdir)) for part in command)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 1
    assert finished.stderr.startswith(f"{command[0]}: ")
    assert finished.stderr.count("\n") == 1
    assert named in finished.stderr
    assert finished.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before
