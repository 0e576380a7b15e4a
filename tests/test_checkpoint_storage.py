"""Trees of arrays on disk: the dtypes they come back in, which checkpoints are kept, and several processes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from interdomain_jax import checkpoints as storage
from interdomain_jax import sharding
from interdomain_jax.errors import CheckpointError, MismatchError
from tests.processes import run_processes


@pytest.mark.parametrize("cast", [False, True])
def test_a_whole_number_is_not_restored_as_a_float(tmp_path, cast):
    """asi#2714: float32 has no 16,777,217."""
    mesh = sharding.make_mesh(dict(data=-1, fsdp=1, tensor=1, seq=1))
    as_float = {"counts": {"seen": jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding.replicated(mesh))}}
    with storage.open_checkpoints(epath.Path(tmp_path)) as checkpoints:
        storage.save(checkpoints, 1, {"counts": {"seen": jnp.int32(16_777_217)}}, {})
        checkpoints.wait_until_finished()
        with pytest.raises(MismatchError, match=r"counts/seen is int32 \(\) there and float32 \(\) here"):
            storage.restore(checkpoints, 1, as_float, cast=cast)


def test_no_checkpoint_is_deleted_for_one_that_could_not_be_written(tmp_path, file_size_limit):
    """Whoever hears of the error first: the thread that deletes old checkpoints hears of it too."""
    # Incompressible, and larger than the limit.
    table = jnp.asarray(np.random.default_rng(0).standard_normal((257, 64), np.float32))
    items = {"params": {"embed": {"embedding": table}}}

    def check_until_it_fails(checkpoints):
        while True:
            storage.check_for_errors(checkpoints)

    with storage.open_checkpoints(epath.Path(tmp_path), keep=1) as checkpoints:
        storage.save(checkpoints, 1, items, {})
        storage.wait_until_saved(checkpoints)
        file_size_limit(32_768)
        storage.save(checkpoints, 2, items, {})
        with pytest.raises(CheckpointError):
            check_until_it_fails(checkpoints)
    file_size_limit(-1)
    assert storage.find_step(tmp_path, "latest") == 1


LOSSES = {1: None, 2: 2.0, 3: 1.0, 4: math.nan, 5: 3.0, 6: None, 7: 1.5, 8: math.inf}
KEPT = [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [3, 5, 6], [3, 6, 7], [3, 7, 8]]


@pytest.mark.parametrize("opened_again", [False, True])
def test_the_best_checkpoint_is_kept_beside_the_latest(tmp_path, opened_again):
    workdir = epath.Path(tmp_path)
    items = {"params": {"norm": {"scale": jnp.arange(3.0)}}}
    for part in [[step] for step in LOSSES] if opened_again else [list(LOSSES)]:
        with storage.open_checkpoints(workdir, keep=2, keep_best=1) as checkpoints:
            for step in part:
                storage.save(checkpoints, step, items, {}, validation_loss=LOSSES[step])
                storage.wait_until_saved(checkpoints)
                assert list(checkpoints.all_steps()) == KEPT[step - 1]
                assert sorted(int(path.name) for path in (workdir / "checkpoints").iterdir()) == KEPT[step - 1]
    assert storage.find_step(workdir, "latest") == 8
    assert storage.find_step(workdir, "best") == 3
    assert storage.find_step(workdir, "7") == 7
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 4; there are \[3, 7, 8\]"):
        storage.find_step(workdir, "4")
    with pytest.raises(ValueError, match="'newest'"):
        storage.find_step(workdir, "newest")


TWO_PROCESSES = """
import sys
from pathlib import Path
import jax
import numpy as np
from absl import app
from etils import epath
from jax.experimental import multihost_utils
from interdomain_jax import checkpoints as storage
from interdomain_jax import cli, sharding
from interdomain_jax.errors import DamagedError
from interdomain_jax.preemption import Notice

def main(argv):
    workdir = epath.Path(argv[1])
    cli.join_processes(workdir, Notice())
    mesh = sharding.make_mesh(dict(data=1, fsdp=2, tensor=1, seq=1))
    table = np.random.default_rng(0).standard_normal((64, 256), np.float32)
    wanted = sharding.placed({"embed": {"embedding": jax.ShapeDtypeStruct(table.shape, table.dtype)}}, mesh)
    place = wanted["embed"]["embedding"].sharding
    table = jax.make_array_from_callback(table.shape, place, lambda index: table[index])
    with storage.open_checkpoints(workdir) as checkpoints:
        for step in (1, 2):
            storage.save(checkpoints, step, {"params": {"embed": {"embedding": table}}}, {})
        storage.wait_until_saved(checkpoints)
        if jax.process_index() == 0:
            of_other = Path(workdir / "checkpoints" / "2" / "params" / "ocdbt.process_1").rglob("d/*")
            largest = max(of_other, key=lambda path: path.stat().st_size)
            largest.write_bytes(largest.read_bytes()[:-1000])
        multihost_utils.sync_global_devices("damaged")
        try:
            storage.restore(checkpoints, 2, {"params": wanted})
        except DamagedError as error:
            print("damaged:", error, flush=True)
            print("moved to", storage.move_aside(workdir, 2), flush=True)
        params = storage.restore(checkpoints, 1, {"params": wanted}).items["params"]
        same = jax.jit(lambda x, y: (x == y).all(), out_shardings=sharding.replicated(mesh))
        print("the one before:", bool(same(params["embed"]["embedding"], table)), flush=True)

app.run(main, flags_parser=lambda argv: [argv[0], *cli.parse_flags([argv[0], *argv[2:]])[1:], argv[1]])
"""


def test_damage_that_one_process_sees_is_found_by_all(tmp_path):
    """Each reads its own half of the array, and the file with one of them is cut short."""
    outputs = run_processes(2, TWO_PROCESSES, str(tmp_path))
    for output in outputs:
        assert "damaged: checkpoint 2 is damaged: " in output, outputs
        assert f"moved to {tmp_path / 'damaged_checkpoint_2'}" in output
        assert "the one before: True" in output
    assert sum("another process cannot read its part" in output for output in outputs) == 1, outputs
    assert (tmp_path / "damaged_checkpoint_2" / "params").is_dir()
    assert not (tmp_path / "checkpoints" / "2").exists()
