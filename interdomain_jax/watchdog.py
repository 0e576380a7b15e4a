"""Ends a run that has come to a halt, and says where each process was."""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import logging
from etils import epath

from interdomain_jax import strict_json

EXIT_CODE = 70
_DIRECTORY = "processes"
# Seconds to read what the other processes have written.
_PATIENCE = 10.0


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
                break
        else:
            return
        logging.error(
            "nothing has moved for %g s (%s): process %s on %s was %s at step %d; the process ends",
            *(self._limit, self._limit_name, self._process, socket.gethostname(), beat.doing, beat.step),
        )
        # What holds the run up may hold this up too: a file system, a bucket.
        others = threading.Thread(target=self._tell_of_others, daemon=True)
        others.start()
        others.join(_PATIENCE)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        self._exit_process(EXIT_CODE)

    def _tell_of_others(self) -> None:
        # Where it is not known how many there should be, those that have written anything lately.
        known = self._processes or sorted(path.stem for path in self._directory.glob("*.json"))
        for name in known:
            is_there, account = self._account_of(name)
            if name != self._process and (is_there or self._processes):
                logging.error("%s", account)

    def _account_of(self, name: str) -> tuple[bool, str]:
        """Whether the process is there, and what is known of it."""
        try:
            record = json.loads((self._directory / f"{name}.json").read_text())
        except (FileNotFoundError, ValueError):
            return False, f"process {name} is ABSENT: it was never heard of"
        silent = time.time() - record["time"]
        where = f"{record['doing']} at step {record['step']}"
        if silent < 3 * self._interval:
            return True, f"process {name} on {record['host']} is there: {where}, for {record['seconds']:.0f} s"
        return False, f"process {name} on {record['host']} is ABSENT: last heard of {silent:.0f} s ago, {where}"

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
            # Whatever the storage raises, the next report may be written.
            except Exception as error:
                logging.log_first_n(logging.ERROR, "%s cannot be written: %s", 1, path, error)
            if self._stopped.wait(self._interval):
                return
