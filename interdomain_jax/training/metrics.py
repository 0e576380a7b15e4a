"""The record of a run: one JSON object per line, and the same figures for TensorBoard."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorboardX

from interdomain_jax import strict_json

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends rows to `<workdir>/metrics.jsonl` and `<workdir>/tensorboard`.

    A run that resumes from step s goes on after its row s: what an interrupted run wrote beyond its
    last checkpoint is dropped, and its steps are written again. Use it as a context manager.

    Args:
        workdir: existing directory of the run.
        resume_step: the step the run starts from; 0 for a new run.
    """

    def __init__(self, workdir: Path, *, resume_step: int):
        path = workdir / FILE_NAME
        kept = [row for row in read_metrics(workdir) if row["step"] <= resume_step]
        rewritten = path.with_name(FILE_NAME + ".tmp")
        rewritten.write_text("".join(strict_json.dumps(row) + "\n" for row in kept))
        os.replace(rewritten, path)
        # One write per line, so that what is on disk lags by no more than the row being written.
        self._rows = path.open("a", encoding="utf-8", buffering=1)
        self._events = tensorboardX.SummaryWriter(
            str(workdir / "tensorboard"), purge_step=resume_step + 1, flush_secs=10
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one row; names such as `train/loss` group the curves in TensorBoard."""
        self._rows.write(strict_json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()
        self._events.close()


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """Reads the rows of `<workdir>/metrics.jsonl`, in order; none if there is no file.

    A last line cut short by a kill is left out.
    """
    path = workdir / FILE_NAME
    if not path.exists():
        return []
    complete, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]
