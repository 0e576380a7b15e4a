"""What an evaluation measured, of which model, by which command and where: a JSON file for each in the run's directory.

    <workdir>/evaluations/<name>.json

All kinds of evaluation give the same form, so that one report can gather them (`report`).
"""

import datetime
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from etils import epath

from interdomain_jax import strict_json
from interdomain_jax.trained import Trained
from interdomain_jax.version import code_version

FORMAT = 1
DIRECTORY = "evaluations"
MEAN = "mean"
"""The task of the means over several corpora, and the metric of those over the benchmarks of a suite."""


class Measurement(NamedTuple):
    """A number that was measured.

    Attributes:
        task: what was scored: the name of a task or of a corpus.
        metric: "perplexity", "accuracy", "loss" (nats per token), "bits_per_byte" and so on; shares lie in [0, 1].
        value: the number; None where there is none, as NaN becomes in the file.
        samples: how many samples, or tokens, it is taken over.
        at: where a task is measured at several sizes, the size: tokens of context, entries of a phonebook.
        error: its standard error, where there is one.
    """

    task: str
    metric: str
    value: float | None
    samples: int
    at: int | None = None
    error: float | None = None


class Record(NamedTuple):
    """An evaluation.

    Attributes:
        format: of the file, `FORMAT`.
        kind: "perplexity", "suite" or "recall".
        name: of the file, without ".json".
        model: name, mixers, parameters, step, and the tokens that were trained on up to there.
        command: that made it, as typed.
        finished: the time, in UTC.
        machine: the devices, in words.
        versions: of the code and of what it stands on, with the commit.
        config: that the run saved.
        settings: of the evaluation: all that the numbers depend on.
        measurements: the numbers.
    """

    format: int
    kind: str
    name: str
    model: dict[str, Any]
    command: str
    finished: str
    machine: str
    versions: dict[str, Any]
    config: dict[str, Any]
    settings: dict[str, Any]
    measurements: tuple[Measurement, ...]


def make_record(
    kind: str, name: str, trained: Trained, settings: Mapping[str, Any], measurements: Sequence[Measurement]
) -> Record:
    """The record of an evaluation that this process has just made."""
    config = trained.config
    return Record(
        format=FORMAT,
        kind=kind,
        name=name,
        model={
            "name": config.name,
            "mixers": list(config.model.mixers),
            "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trained.abstract_params)),
            "step": trained.step,
            "tokens": trained.step * config.data.batch_size * config.data.sequence_length,
        },
        command=shlex.join(["python", *sys.argv]),
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=machine(),
        versions=code_version(),
        config=strict_json.plain(config.to_dict()),
        settings=strict_json.plain(settings),
        measurements=tuple(measurements),
    )


def record_path(workdir: epath.PathLike, name: str) -> epath.Path:
    """Where the record of this name lies in a run's directory."""
    return epath.Path(workdir) / DIRECTORY / f"{name}.json"


def write_record(workdir: epath.PathLike, record: Record) -> epath.Path:
    """Writes a record into a run's directory, over one of the same name, and returns where it lies."""
    path = record_path(workdir, record.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    measurements = [each._asdict() for each in record.measurements]
    strict_json.write(path, record._asdict() | {"measurements": measurements})
    return path


def read_records(workdir: epath.PathLike) -> list[Record]:
    """All records in a run's directory, by name; none if nothing was evaluated.

    Raises:
        ValueError: a file is no record of this format.
    """
    directory = epath.Path(workdir) / DIRECTORY
    if not directory.exists():
        return []
    paths = sorted(path for path in directory.iterdir() if path.suffix == ".json")
    return [_read(path) for path in paths]


def _read(path: epath.Path) -> Record:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is no record of an evaluation of format {FORMAT}")
    return Record(**content | {"measurements": tuple(Measurement(**each) for each in content["measurements"])})


def machine() -> str:
    """The devices and, of a CPU, the processor, in words."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return f"{len(devices)} CPU device(s), {os.cpu_count()} cores, {_processor()}"
    return f"{len(devices)} x {devices[0].device_kind}"


def _processor() -> str:
    """The name of the processor, as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
