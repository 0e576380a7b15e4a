"""The record of a run: one JSON object per line, and the same figures for TensorBoard."""

import collections
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import logging
from etils import epath
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from interdomain_jax import strict_json
from interdomain_jax.workdir import copy_files, is_remote

FILE_NAME = "metrics.jsonl"
_EVENTS = "tensorboard"


class MetricsWriter:
    """Appends rows to `<workdir>/metrics.jsonl` and `<workdir>/tensorboard`.

    A run that resumes from step s goes on after its row s: what an interrupted run wrote beyond its
    last checkpoint is dropped, and its steps are written again. Use it as a context manager.

    A row that cannot be written is lost, which is logged, and no reason to stop: the next one is tried again.
    Objects in a bucket cannot be appended to, so for a remote workdir the files are written to a local directory and
    copied by `publish`.

    Args:
        workdir: of the run.
        resume_step: the step the run starts from; 0 for a new run.
        is_validated: whether the row of its validation is to be kept too; if not, it is written again.

    Raises:
        OSError: the files cannot be opened.
    """

    def __init__(self, workdir: epath.Path, *, resume_step: int, is_validated: bool = True):
        self._workdir = workdir
        self._lost: collections.Counter[str] = collections.Counter()
        with contextlib.ExitStack() as stack:
            self._local = workdir
            if is_remote(workdir):
                self._local = epath.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            is_kept = lambda row: (
                row["step"] < resume_step or (row["step"] == resume_step and (is_validated or "train/loss" in row))
            )
            kept = [row for row in read_metrics(workdir) if is_kept(row)]
            rewritten = self._local / (FILE_NAME + ".tmp")
            rewritten.write_text("".join(strict_json.dumps(row) + "\n" for row in kept))
            rewritten.replace(self._local / FILE_NAME)
            self._rows = stack.enter_context(_LineFile(Path(self._local / FILE_NAME)))
            (self._local / _EVENTS).mkdir(exist_ok=True)
            self._events = EventsWriter(str(self._local / _EVENTS / "events"))
            # What TensorBoard has of the steps after the checkpoint is void.
            self._event(resume_step + 1, session_log=SessionLog(status=SessionLog.START))
            self._closing = stack.pop_all()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one row; names such as `train/loss` group the curves in TensorBoard."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._try(FILE_NAME, lambda: self._rows.write(strict_json.dumps({"step": step, **values})))
        self._try(_EVENTS, lambda: self._event(step, summary=summary))

    def publish(self) -> None:
        """Makes what was written so far visible in a remote workdir."""
        if self._local != self._workdir:
            self._try("the copy of all", lambda: copy_files(self._local, self._workdir))

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._try(_EVENTS, self._events.close)
        self.publish()
        self._closing.close()

    def _event(self, step: int, **content: Any) -> None:
        self._events.write_event(Event(wall_time=time.time(), step=step, **content))
        self._events.flush()

    def _try(self, sink: str, write: Callable[[], None]) -> None:
        """Writes, and reports the first failure of a sink and its recovery, not each failure in between."""
        try:
            write()
        # Whatever its library raises, a sink is not worth the run.
        except Exception as error:
            if not self._lost[sink]:
                logging.error("metrics: %s in %s cannot be written, training goes on: %s", sink, self._workdir, error)
            self._lost[sink] += 1
        else:
            if lost := self._lost.pop(sink, 0):
                logging.warning("metrics: %s can be written again; %d writes were lost", sink, lost)


def read_metrics(workdir: epath.Path) -> list[dict[str, Any]]:
    """Reads the rows of `<workdir>/metrics.jsonl`, in order; none if there is no file.

    Lines cut short, by a kill or a full disk, are left out.
    """
    path = epath.Path(workdir) / FILE_NAME
    if not path.exists():
        return []
    return list(_rows(path.read_text(encoding="utf-8")))


def _rows(text: str) -> Iterator[dict[str, Any]]:
    complete, _, _ = text.rpartition("\n")
    for line in complete.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


class _LineFile:
    """A file that lines are appended to at once; a line after one that was cut short starts on its own."""

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)
        self._is_torn = False

    def write(self, line: str) -> None:
        data = b"\n" * self._is_torn + line.encode() + b"\n"
        self._is_torn = True
        written = self._file.write(data)
        if written != len(data):
            raise OSError(f"{written} of {len(data)} bytes written")
        self._is_torn = False

    def __enter__(self) -> "_LineFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
