"""What the libraries do with `gs://` paths: epath's operations, and orbax's checkpoints."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http import HTTPStatus
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from etils import epath
from orbax.checkpoint import checkpoint_managers

from tests.processes import run_processes
from tests.storage.bucket import Bucket, local_bucket


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with local_bucket() as running:
        yield running


def test_files_of_a_directory(bucket):
    directory = epath.Path(bucket.url) / "run" / "logs"
    assert not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "a.txt").write_text("first")
    (directory / "b.bin").write_bytes(bytes(range(256)) * 30_000)
    assert (directory / "a.txt").read_text() == "first"
    assert (directory / "b.bin").read_bytes() == bytes(range(256)) * 30_000
    assert directory.is_dir()
    assert sorted(path.name for path in directory.iterdir()) == ["a.txt", "b.bin"]
    (directory / "a.txt").rename(directory / "c.txt")
    (directory / "d.txt").write_text("second")
    (directory / "d.txt").replace(directory / "c.txt")
    assert sorted(path.name for path in directory.iterdir()) == ["b.bin", "c.txt"]
    assert (directory / "c.txt").read_text() == "second"
    directory.rename(directory.parent / "old")
    assert not directory.exists()
    assert (directory.parent / "old" / "c.txt").read_text() == "second"
    with pytest.raises(FileNotFoundError):
        (directory / "c.txt").read_text()
    directory.parent.rmtree()
    assert not directory.parent.exists()


def test_another_process_finds_the_bucket(bucket):
    path = epath.Path(bucket.url) / "note"
    program = f"from etils import epath; epath.Path({str(path)!r}).write_text('from the other process')"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert path.read_text() == "from the other process"


def test_it_keeps_its_files_while_it_is_stopped(bucket):
    path = epath.Path(bucket.url) / "note"
    path.write_text("kept")
    address = urlsplit(bucket.environment["STORAGE_EMULATOR_HOST"])
    bucket.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname, address.port))
    bucket.start()
    assert path.read_text() == "kept"


def test_a_write_that_came_too_late_fails(bucket):
    store = tensorstore.KvStore.open(bucket.url + "/").result()
    store.write(b"key", b"one").result()
    read = store.read(b"key").result()
    assert read.value == b"one"
    store.write(b"key", b"two", if_equal=read.stamp.generation).result()
    late = store.write(b"key", b"three", if_equal=read.stamp.generation).result()
    assert not late.generation
    assert store.read(b"key").result().value == b"two"


def test_an_upload_that_broke_off_leaves_nothing(bucket):
    address = urlsplit(bucket.environment["STORAGE_EMULATOR_HOST"])
    target = f"/upload/storage/v1/b/{urlsplit(bucket.url).netloc}/o?uploadType=media&name="
    for name, content in (("whole", b"12345"), ("half", b"123")):
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(f"POST {target}{name} HTTP/1.1\r\nContent-Length: 5\r\n\r\n".encode() + content)
            connection.shutdown(socket.SHUT_WR)
            connection.makefile("rb").read()
    assert [path.name for path in epath.Path(bucket.url).iterdir()] == ["whole"]


def _manager(bucket, timeout=600):
    options = ocp.CheckpointManagerOptions(
        preservation_policy=checkpoint_managers.LatestN(2),
        async_options=ocp.AsyncOptions(timeout_secs=timeout),
    )
    return ocp.CheckpointManager(epath.Path(bucket.url) / "run" / "checkpoints", options=options)


def _state(step):
    return {"weights": jax.random.normal(jax.random.key(step), (64, 32)), "scale": jnp.full(3, step, jnp.bfloat16)}


def _save(checkpoints, step):
    items = {"state": ocp.args.StandardSave(_state(step)), "position": ocp.args.JsonSave({"step": step})}
    checkpoints.save(step, args=ocp.args.Composite(**items))


def test_checkpoints_come_back_and_the_oldest_go(bucket):
    checkpoints = _manager(bucket)
    for step in range(1, 5):
        _save(checkpoints, step)
    checkpoints.close()
    fresh = _manager(bucket)
    assert fresh.latest_step() == 4
    assert list(fresh.all_steps()) == [3, 4]
    assert sorted(path.name for path in fresh.directory.iterdir()) == ["3", "4"]
    for step in (3, 4):
        abstract = ocp.args.StandardRestore(jax.eval_shape(_state, step))
        restored = fresh.restore(step, args=ocp.args.Composite(state=abstract, position=ocp.args.JsonRestore()))
        assert restored["position"] == {"step": step}
        jax.tree.map(np.testing.assert_array_equal, restored["state"], _state(step))
    fresh.close()


def test_a_refused_write_is_raised_at_once(bucket):
    checkpoints = _manager(bucket)
    _save(checkpoints, 1)
    checkpoints.wait_until_finished()
    bucket.refusal = HTTPStatus.FORBIDDEN
    started = time.monotonic()
    with pytest.raises(OSError, match="Forbidden"):
        _save(checkpoints, 2)
    assert time.monotonic() - started < 5
    bucket.refusal = None
    assert _manager(bucket).latest_step() == 1


_UNAVAILABLE = """
import os, time
from http import HTTPStatus
from tests.processes import run_processes
from tests.storage.bucket import local_bucket
from tests.processes import run_processes
from tests.storage.test_bucket import _manager, _save

with local_bucket() as bucket:
    checkpoints = _manager(bucket, timeout=2)
    _save(checkpoints, 1)
    checkpoints.wait_until_finished()
    bucket.refusal, bucket.refused = HTTPStatus.SERVICE_UNAVAILABLE, "manifest.ocdbt"
    _save(checkpoints, 2)
    started = time.monotonic()
    try:
        checkpoints.wait_until_finished()
    except TimeoutError as error:
        print(error, time.monotonic() - started < 10)
    bucket.refusal = None
    print("latest step", _manager(bucket).latest_step(), flush=True)
    os._exit(0)
"""


def test_arrays_that_cannot_be_written_are_raised_after_the_timeout():
    # In a process of its own, left by `_exit`: the threads of the save go on trying, for minutes if need be, and no
    # process ends of itself before they do.
    (output,) = run_processes(1, _UNAVAILABLE, timeout=120)
    assert "timed out after 2.00 seconds. True\n" in output
    assert "latest step 1\n" in output
