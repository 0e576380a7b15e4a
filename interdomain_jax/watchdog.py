"""Ends a run that has come to a halt, and says where each process was."""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from absl import logging
from etils import epath

from interdomain_jax import strict_json

EXIT_CODE = 70
_DIRECTORY = "processes"


class _Beat(NamedTuple):
    """The last sign of life of the run: when, on the monotonic clock, at which step and before doing what."""

    time: float
    step: int
    doing: str


class Watchdog:
    """Ends the process, with the stacks of all threads, when nothing has moved for too long.

    Processes that run together stand still together, so each writes what it is doing into the workdir, every quarter of
    the limit, at most half a minute: those of which nothing more was heard are named as absent. Use it as a context
    manager.

    Args:
        workdir: of the run, the same in all processes.
        limit: seconds between two `beat`s after which the process is ended.
        limit_name: what the user calls the limit.
        process: the name of this process among those of the run.
        processes: the names of all of them; empty where they are not known.
        exit_process: takes the exit code and does not return.
    """

    def __init__(
        self,
        workdir: epath.Path,
        *,
        limit: float,
        limit_name: str,
        process: str,
        processes: Sequence[str],
        exit_process: Callable[[int], Any] = os._exit,
    ):
        self._directory = workdir / _DIRECTORY
        self._limit = limit
        self._limit_name = limit_name
        self._process = process
        self._processes = processes
        self._interval = min(limit / 4, 30.0)
        self._exit_process = exit_process
        self._beat = _Beat(time.monotonic(), 0, "starting")
        self._stopped = threading.Event()

    def beat(self, step: int, doing: str) -> None:
        """Notes that the run moves: it is at `step` and about to be `doing` something."""
        self._beat = _Beat(time.monotonic(), step, doing)

    def __enter__(self) -> "Watchdog":
        threading.Thread(target=self._watch, daemon=True).start()
        if list(self._processes) != [self._process]:
            # Apart from the other, for a file system out of reach may hold it up.
            threading.Thread(target=self._report_often, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self._beat.time + self._limit - time.monotonic()):
            beat = self._beat
            if time.monotonic() - beat.time >= self._limit:
                logging.error("%s", "\n".join(self._account(beat)))
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                self._exit_process(EXIT_CODE)
                return

    def _account(self, beat: _Beat) -> Iterator[str]:
        yield (
            f"nothing has moved for {self._limit:g} s ({self._limit_name}): process {self._process} on "
            f"{socket.gethostname()} was {beat.doing} at step {beat.step}; the process ends"
        )
        names = self._processes
        with contextlib.suppress(OSError):
            names = names or sorted(path.stem for path in self._directory.glob("*.json"))
        for name in names:
            if name != self._process:
                yield self._account_of(name)

    def _account_of(self, name: str) -> str:
        with contextlib.suppress(OSError, ValueError):
            record = json.loads((self._directory / f"{name}.json").read_text())
            silent = time.time() - record["time"]
            where = f"{record['doing']} at step {record['step']}"
            if silent < 3 * self._interval:
                return f"process {name} on {record['host']} is there: {where}, for {record['seconds']:.0f} s"
            return f"process {name} on {record['host']} is ABSENT: last heard of {silent:.0f} s ago, {where}"
        return f"process {name} is ABSENT: it was never heard of"

    def _report_often(self) -> None:
        path = self._directory / f"{self._process}.json"
        while True:
            beat = self._beat
            record = {
                "host": socket.gethostname(),
                "step": beat.step,
                "doing": beat.doing,
                "seconds": time.monotonic() - beat.time,
                "time": time.time(),
            }
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                strict_json.write(path, record)
            except OSError as error:
                logging.log_first_n(logging.ERROR, "%s cannot be written: %s", 1, path, error)
            if self._stopped.wait(self._interval):
                return
