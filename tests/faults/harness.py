"""Starts train.py as often as a test likes, kills it, and compares what two runs left behind.

The processes are forked from a server that has imported everything already, and share compiled programs through JAX's
cache on disk: a start takes a second or two.
"""

import functools
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags

import train
from interdomain_jax import cli
from interdomain_jax.training import loop
from interdomain_jax.training.metrics import read_metrics
from tests.quick import quick_environment
from tests.token_lists import TokenLists
from tests.training.conftest import CORPUS, SMALL, open_corpora, without_speed

CONFIG = SMALL | {"accumulation_steps": 2, "checkpoint_minutes": 0.0}

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.faults.harness"])


class Signal(NamedTuple):
    """A signal that the process sends to itself in the middle of something.

    Attributes:
        function: that does it, as the training loop calls it.
        call: the number of the call, from 1.
        delay: seconds after it has begun.
        number: of the signal.
    """

    function: str
    call: int
    delay: float = 0.0
    number: int = signal.SIGTERM


class Start:
    """One start of train.py.

    Args:
        workdir: of the run; the log goes beside it.
        fields: of the config, over those of `CONFIG`.
        more_flags: of the command line.
        signal_in: where to send one.
        cache: the directory of compiled programs; None to compile everything.
        hangs: whether reading the first training data never ends.
    """

    def __init__(
        self,
        workdir: Path,
        fields: dict[str, Any] | None = None,
        *,
        more_flags: Sequence[str] = (),
        signal_in: Signal | None = None,
        cache: Path | None = None,
        hangs: bool = False,
    ):
        config = [f"--config.{field}={value}" for field, value in (CONFIG | (fields or {})).items()]
        command = ["train.py", "--config=configs/tiny.py", *config, f"--workdir={workdir}", *more_flags]
        number = len(list(workdir.parent.glob(f"{workdir.name}.log*")))
        self.log = workdir.with_name(f"{workdir.name}.log{number}")
        self.log.touch()
        xla_flags = quick_environment()["XLA_FLAGS"]
        self._process = _SERVER.Process(target=_main, args=(command, self.log, signal_in, cache, hangs, xla_flags))
        self._process.start()

    def kill(self) -> None:
        """kill -9, unless it has ended."""
        self._process.kill()
        self._process.join()

    def suspend(self) -> None:
        """SIGSTOP: it is there and does nothing."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def is_running(self) -> bool:
        return self._process.is_alive()

    def wait(self, seconds: float = 120.0) -> int | None:
        """The exit code; None, and killed, if it has not ended by itself within the time."""
        self._process.join(seconds)
        code = self._process.exitcode
        self.kill()
        return code

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def finish(workdir: Path, fields: dict[str, Any] | None = None, **options: Any) -> str:
    """Starts the run and waits until it has ended well; returns its output."""
    start = Start(workdir, fields, **options)
    code = start.wait()
    assert code == 0, f"exit code {code}:\n{start.output()}"
    return start.output()


def wait_for_step(workdir: Path, step: int, starts: Sequence[Start], seconds: float = 60.0) -> None:
    """Returns when the row of `step` is written; fails if one of the starts ends before."""
    deadline = time.monotonic() + seconds
    while not any(row["step"] >= step for row in read_metrics(workdir)):
        assert time.monotonic() < deadline, [start.output() for start in starts]
        assert all(start.is_running() for start in starts), [start.output() for start in starts]
        time.sleep(0.005)


def assert_same_run(actual: Path, expected: Path) -> None:
    """The same figures in all rows but for the speed, the batches' checksums among them, and the same final arrays."""
    assert without_speed(read_metrics(actual)) == without_speed(read_metrics(expected))
    arrays, expected_arrays = final_arrays(actual), final_arrays(expected)
    assert arrays.keys() == expected_arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected_arrays[name], err_msg=name)


def final_arrays(workdir: Path) -> dict[str, np.ndarray]:
    """The arrays of the latest checkpoint, by name, as NumPy reads them."""
    checkpoint = workdir / "checkpoints" / str(max(steps(workdir)))
    arrays = {}
    with ocp.PyTreeCheckpointer() as reader:
        for item in ("params", "optimizer"):
            saved = reader.metadata(checkpoint / item).item_metadata.tree
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
            restored = reader.restore(checkpoint / item, restore_args=as_numpy)
            for names, leaf in jax.tree_util.tree_leaves_with_path(restored):
                arrays[f"{checkpoint.name}/{item}/{jax.tree_util.keystr(names)}"] = leaf
    return arrays


def steps(workdir: Path) -> list[int]:
    """The steps of the checkpoints that look complete."""
    return sorted(int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdecimal())


def is_saving(workdir: Path) -> bool:
    """Whether a checkpoint has been begun and not completed."""
    return any(not path.name.isdecimal() for path in (workdir / "checkpoints").glob("*"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def joining(count: int, *, peer_timeout: int = 30) -> list[list[str]]:
    """The flags of each of so many processes of one run."""
    address = f"--coordinator_address=localhost:{free_port()}"
    shared = [address, f"--num_processes={count}", f"--peer_timeout={peer_timeout}"]
    return [[*shared, f"--process_id={number}"] for number in range(count)]


class _Hanging(TokenLists):
    """The tests' documents, whose reading never ends."""

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        time.sleep(3600)
        return super().read(document, start, stop)


def _main(
    command: list[str], log: Path, signal_in: Signal | None, cache: Path | None, hangs: bool, xla_flags: str
) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["XLA_FLAGS"] = xla_flags
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", True)
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    loop.open_corpora = open_corpora
    if hangs:
        loop.open_corpora = lambda data, split, tokenizer: (_Hanging(CORPUS.documents),)
    if signal_in is not None:
        _send_signal_in(signal_in)
    sys.argv = command
    flags.FLAGS.unparse_flags()
    app.run(train.main, argv=command, flags_parser=cli.parse_flags)


def _send_signal_in(where: Signal) -> None:
    *path, name = where.function.split(".")
    module = functools.reduce(getattr, path, loop)
    original = getattr(module, name)
    calls = iter(range(1, 1_000_000))

    def wrapper(*arguments: Any, **options: Any) -> Any:
        if next(calls) == where.call:
            send = functools.partial(os.kill, os.getpid(), where.number)
            threading.Timer(where.delay, send).start() if where.delay else send()
        return original(*arguments, **options)

    setattr(module, name, wrapper)
