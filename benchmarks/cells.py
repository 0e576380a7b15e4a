"""What a benchmark gives: cells, in each of which several cases did the same work in turn."""

import importlib.metadata
import importlib.util
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from interdomain_jax import strict_json
from interdomain_jax.evaluation.records import machine
from interdomain_jax.version import code_version

PEERS = {"datasets": "datasets", "mamba2-jax": "mamba2_jax", "mlstm-kernels": "mlstm_kernels", "penzai": "penzai"}
"""The packages that benchmarks time beside this one, and what they are imported as."""


class Cell(NamedTuple):
    """One piece of work, done by several cases.

    Attributes:
        at: what the work is, such as {"tokens": 4096, "pass": "forward"}.
        seconds: that each case took, a median; NaN for one that did not fit the memory.
        memory: bytes that each case allocates, where it is known.
        labels: how a case was run, where there was a choice, such as the size of its chunks.
        of_peak: the fraction of the machine's peak that a case's matrix products amount to, where they are counted.
        tokens: that the work goes through; None where the unit of the times is not tokens a second.
    """

    at: dict[str, Any]
    seconds: dict[str, float]
    memory: dict[str, int] = {}
    labels: dict[str, str] = {}
    of_peak: dict[str, float] = {}
    tokens: int | None = None

    def ratio(self, case: str, unit: str) -> float:
        """How many times as long as the case `unit` another one takes; NaN if one of them was not timed."""
        return self.seconds.get(case, math.nan) / self.seconds.get(unit, math.nan)


class Grid(NamedTuple):
    """Cells with the same cases.

    Attributes:
        title: what was timed.
        ours: the case that the others are measured by.
        bounds: cases that ours is measured by: lower bounds of its time.
        unit: of the times as they are shown.
        cells: in order.
    """

    title: str
    ours: str
    bounds: tuple[str, ...]
    unit: Literal["ms", "tokens/s"]
    cells: list[Cell]

    @property
    def cases(self) -> list[str]:
        """The names of all cases, in order."""
        return list(dict.fromkeys(name for cell in self.cells for name in cell.seconds))


class Record(NamedTuple):
    """What one benchmark measured.

    Attributes:
        setting: what was measured on what, in a line.
        cases: what each case is, by its name.
        grids: the figures.
        remarks: what else was found, a line each.
        machine: where it ran.
        versions: of this package, its commit, and the packages that the figures depend on.
    """

    setting: str
    cases: dict[str, str]
    grids: list[Grid]
    remarks: list[str]
    machine: str
    versions: dict[str, str | None]


def record(setting: str, cases: Mapping[str, str], grids: list[Grid], remarks: Iterable[str] = ()) -> Record:
    """The record of what this process measured; of `cases`, those that occur in the grids."""
    timed = {name for grid in grids for name in grid.cases}
    packages = [package for package, module in PEERS.items() if importlib.util.find_spec(module)]
    versions = code_version() | {package: importlib.metadata.version(package) for package in packages}
    named = {name: text for name, text in cases.items() if name in timed}
    return Record(setting, named, grids, list(remarks), machine(), versions)


def save(path: str | Path, measured: Record) -> None:
    """Writes a record as JSON."""
    grids = [grid._asdict() | {"cells": [cell._asdict() for cell in grid.cells]} for grid in measured.grids]
    strict_json.write(path, measured._asdict() | {"grids": grids})


def load(path: str | Path) -> Record:
    """Reads what `save` wrote."""
    return from_json(json.loads(Path(path).read_text(encoding="utf-8")))


def from_json(value: dict[str, Any]) -> Record:
    """The record that `save` writes as this value."""
    return Record(**value | {"grids": [_grid(**grid) for grid in value["grids"]]})


def _grid(*, bounds: list[str], cells: list[dict[str, Any]], **rest: Any) -> Grid:
    return Grid(bounds=tuple(bounds), cells=[_cell(**cell) for cell in cells], **rest)


def _cell(*, seconds: dict[str, float | None], of_peak: dict[str, float | None], **rest: Any) -> Cell:
    numbers = lambda values: {name: math.nan if value is None else value for name, value in values.items()}
    return Cell(seconds=numbers(seconds), of_peak=numbers(of_peak), **rest)
