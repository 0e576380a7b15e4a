"""What the benchmark prints: ratios first, then the times and the memory that they come from."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.table import Column, Table

from benchmarks.timing import Measurement

_RIVALS = ("softmax", "mamba2", "mlstm", "sequential", "paper")


class Result(NamedTuple):
    """What a case took, in chunks of how many tokens, and the flops of its matrix products where they are counted."""

    measurement: Measurement
    chunks: str
    flops: int | None


class Comparison(NamedTuple):
    """All cases of one sequence length and pass, with the peak of the machine in flops a second."""

    length: int
    direction: str
    peak: float
    results: dict[str, Result]

    def seconds(self, name: str) -> float:
        """The case's time; NaN if it did not fit or was not asked for."""
        return self.results[name].measurement.seconds if name in self.results else math.nan

    def of_peak(self, name: str) -> float:
        """The fraction of the peak that the case's products amount to; NaN if they are not counted."""
        flops = self.results[name].flops
        return math.nan if flops is None else flops / self.seconds(name) / self.peak


def ratios(comparisons: Sequence[Comparison]) -> Table:
    """How many times as long as `chunked` the others take, and how far it is from its products and from the peak."""
    headers = (*_RIVALS, "best chunk", "ours / bare", "of peak", "bare of peak")
    table = Table(
        Column("tokens", justify="right"),
        "pass",
        *(Column(header, justify="right") for header in headers),
        title="Times in units of ours, the chunked form; ours in units of its bare products; fractions of the peak",
    )
    for comparison in comparisons:
        ours = comparison.seconds("chunked")
        table.add_row(
            f"{comparison.length:,}",
            comparison.direction,
            *(_number(comparison.seconds(name) / ours) for name in _RIVALS),
            _number(comparison.seconds("best chunk") / ours) or "default",
            _number(ours / comparison.seconds("bare")),
            *(_percent(comparison.of_peak(name)) for name in ("chunked", "bare")),
        )
    return table


def times(comparisons: Sequence[Comparison]) -> Table:
    """Milliseconds and megabytes of every case, its chunk size, and its products a second."""
    headers = ("chunk", "ms", "MB", "GFLOP/s")
    table = Table(
        Column("tokens", justify="right"), "pass", "case", *(Column(header, justify="right") for header in headers)
    )
    for comparison in comparisons:
        for name, result in comparison.results.items():
            seconds, memory = result.measurement
            table.add_row(
                f"{comparison.length:,}",
                comparison.direction,
                name,
                result.chunks,
                "does not fit" if math.isnan(seconds) else f"{seconds * 1e3:,.1f}",
                f"{memory / 1e6:,.0f}",
                "" if result.flops is None else f"{result.flops / seconds / 1e9:,.1f}",
            )
        table.add_row(
            f"{comparison.length:,}", comparison.direction, "peak", "", "", "", f"{comparison.peak / 1e9:,.1f}"
        )
        table.add_section()
    return table


def growth(seconds: Mapping[str, Sequence[tuple[int, float]]]) -> Table:
    """The chunked form's time at each length, in all and for each token, by pass."""
    headers = [f"{direction}, {unit}" for direction in seconds for unit in ("ms", "us a token")]
    table = Table(
        Column("tokens", justify="right"), *(Column(header, justify="right") for header in headers), title="chunked"
    )
    for rows in zip(*seconds.values(), strict=True):
        cells = [cell for length, time in rows for cell in (f"{time * 1e3:,.1f}", f"{time * 1e6 / length:.2f}")]
        table.add_row(f"{rows[0][0]:,}", *cells)
    return table


def growth_lines(seconds: Mapping[str, Sequence[tuple[int, float]]], start: int) -> list[str]:
    """How many times as long the longest sequence takes as that of `start` tokens, or the shortest longer one."""
    lines = []
    for direction, points in seconds.items():
        (short, before), (long, after) = next((point for point in points if point[0] >= start), points[0]), points[-1]
        lines.append(
            f"chunked, {direction}: {long:,} tokens take {after / before:.1f} times as long as {short:,}, "
            f"for {long / short:g} times the tokens"
        )
    return lines


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.0f} %"
