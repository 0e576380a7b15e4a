"""`RESULTS.md` from the results of all parts: ratios first, then times, and where and by what they were measured."""

from collections.abc import Mapping
from typing import Any

from benchmarks import cells
from benchmarks.cells import Record
from benchmarks.tables import as_markdown, tables

PARTS = {
    "mixer": "One call of the op beside other mixers",
    "decode": "One more token in one layer's mixer",
    "data": "Corpora prepared and read",
    "trainer": "A whole training step beside other models",
}
"""The programs, and what each one times."""

_INTRODUCTION = """\
Written by `make bench` from `results.json`. The cases of a table ran in turn in one process, and their medians are
compared; the ratios are what to read, for they hold on other machines better than times do. A ratio of 2 is twice the
time of ours, so above 1 ours is the faster one; a column `ours / other` is our time in units of a lower bound.
`make bench PARTS=mixer` measures one part anew."""


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """`RESULTS.md`, of the parts that there are."""
    records = {part: cells.from_json(result["record"]) for part, result in results.items()}
    lines = [
        "# Benchmarks",
        "",
        _INTRODUCTION,
    ]
    for part, record in records.items():
        lines += ["", f"## {PARTS[part]}", "", f"{record.setting}."]
        for table in tables(record.grids)[0]:
            lines += ["", *as_markdown(table)]
        lines += ["", *(f"* {remark}" for remark in record.remarks)]
    lines += ["", "## What the cases are"]
    for part, record in records.items():
        lines += ["", f"### {part}", "", *(f"* **{name}**: {text}" for name, text in record.cases.items())]
    lines += ["", "## Times and memory"]
    for part, record in records.items():
        lines += ["", f"### {part}"]
        for table in tables(record.grids)[1]:
            lines += ["", *as_markdown(table)]
    lines += ["", "## Where the figures are from"]
    for part, record in records.items():
        lines += ["", *_source(part, record, results[part]["run"])]
    return "\n".join(lines) + "\n"


def _source(part: str, record: Record, run: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items() if name != "commit")
    return [
        f"### {part}",
        "",
        f"`{run['command']}`, commit {record.versions['commit']}; {record.machine}; {run['minutes']:.1f} minutes, "
        f"behind a load of {run['load']:.1f}; {versions}.",
    ]
