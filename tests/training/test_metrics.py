"""The record of a run and what the terminal shows of it."""

import io
import json
import logging

import pytest
from rich.console import Console
from tensorboardX.event_file_writer import EventsWriter

from interdomain_jax.training.loss_curve import draw_loss_curve
from interdomain_jax.training.metrics import MetricsWriter, read_metrics
from interdomain_jax.training.progress import ProgressLine, as_clock
from interdomain_jax.training.stopwatch import Stopwatch


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_numbers_that_json_lacks_become_null(tmp_path):
    with MetricsWriter(tmp_path, resume_step=0) as writer:
        writer.write(1, {"train/loss": float("nan"), "train/grad_norm": float("inf")})
    line = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(line, parse_constant=refuse_constant)
    assert row == {"step": 1, "train/loss": None, "train/grad_norm": None}


def test_a_resumed_run_drops_what_it_will_write_again(tmp_path):
    with MetricsWriter(tmp_path, resume_step=0) as writer:
        for step in range(1, 6):
            writer.write(step, {"train/loss": 1.0 / step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/lo')
    with MetricsWriter(tmp_path, resume_step=3) as writer:
        writer.write(4, {"train/loss": 0.5})
    rows = [(row["step"], row["train/loss"]) for row in read_metrics(tmp_path)]
    assert rows == [(1, 1.0), (2, 1 / 2), (3, 1 / 3), (4, 0.5)]


def test_files_that_cannot_be_written_lose_rows_and_stop_nothing(tmp_path, caplog, file_size_limit):
    """Beyond the limit the first row is cut in the middle, and two are lost whole."""
    with MetricsWriter(tmp_path, resume_step=0) as writer:
        writer.write(1, {"train/loss": 1.0})
        size = (tmp_path / "metrics.jsonl").stat().st_size
        file_size_limit(size + 10)
        for step in (2, 3, 4):
            writer.write(step, {"train/loss": 1.0 / step})
        file_size_limit(-1)
        for step in (5, 6):
            writer.write(step, {"train/loss": 1.0 / step})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [line[:10] for line in lines] == ['{"step": 1', '{"step": 2', '{"step": 5', '{"step": 6']
    assert len(lines[1]) == 10
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 5, 6]
    for sink in ("metrics.jsonl", "tensorboard"):
        reports = [record.getMessage() for record in caplog.records if f"metrics: {sink}" in record.getMessage()]
        assert len(reports) == 2, reports
        assert f"in {tmp_path} cannot be written, training goes on: " in reports[0]
        assert reports[1].endswith("can be written again; 3 writes were lost")

    # A run that goes on drops the line that is no row.
    with MetricsWriter(tmp_path, resume_step=5):
        pass
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 5]


def test_a_sink_that_raises_whatever_it_likes_stops_nothing(tmp_path, caplog, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such luck")

    with MetricsWriter(tmp_path, resume_step=0) as writer:
        for name in ("write_event", "flush", "close"):
            monkeypatch.setattr(EventsWriter, name, fail)
        for step in (1, 2):
            writer.write(step, {"train/loss": 1.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        f"metrics: tensorboard in {tmp_path} cannot be written, training goes on: no such luck"
    ]


def test_the_curve_of_a_run_with_gaps(tmp_path):
    rows = [{"step": 1, "train/loss": None}, {"step": 2, "train/loss": 2.0}, {"step": 3}]
    for number, part in enumerate([[], rows, [*rows, {"step": 3, "validation/loss": 2.5}]]):
        path = tmp_path / f"{number}.png"
        draw_loss_curve(part, title="run", path=path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_live_line_shows_step_loss_and_speed():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with ProgressLine(num_steps=40, done_steps=10, log_every=5, console=console) as progress:
        progress.message("hello")
        progress.update(11, loss=1.25, tokens_per_second=1234.5, seconds_left=60.0)
    shown = screen.getvalue()
    assert "hello" in shown
    assert "11/40" in shown
    assert "loss 1.2500" in shown
    assert "1,234 tokens/s" in shown
    assert "1:00 left" in shown


def test_off_a_terminal_there_are_plain_lines(caplog):
    console = Console(file=io.StringIO(), force_terminal=False)
    with (
        caplog.at_level(logging.INFO, logger="absl"),
        ProgressLine(num_steps=12, done_steps=0, log_every=5, console=console) as progress,
    ):
        for step in range(1, 13):
            progress.update(step, loss=2.0, tokens_per_second=1e3, seconds_left=3700.0)
    assert [record.getMessage().split("  ")[0] for record in caplog.records] == [
        "step 5/12",
        "step 10/12",
        "step 12/12",
    ]
    assert caplog.records[0].getMessage().endswith("loss 2.0000  1,000 tokens/s  1:01:40 left")


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (90_061, "25:01:01")])
def test_durations(seconds, shown):
    assert as_clock(seconds) == shown


def test_speed_leaves_pauses_out():
    now = 100.0
    stopwatch = Stopwatch(window=2, clock=lambda: now)
    for seconds in (2.0, 1.0, 0.5):
        now += seconds
        stopwatch.lap(10)
    assert stopwatch.rate == pytest.approx(20 / 1.5)
    with stopwatch.paused():
        now += 1000.0
    now += 0.5
    stopwatch.lap(10)
    assert stopwatch.rate == pytest.approx(20 / 1.0)
    assert stopwatch.mean_rate == pytest.approx(40 / 4.0)
    assert (stopwatch.seconds, stopwatch.paused_seconds) == (4.0, 1000.0)
