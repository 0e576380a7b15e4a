"""What the person at the terminal sees of a long evaluation."""

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator

import jax
from absl import logging
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 30.0

Advance = Callable[[str, int], None]


@contextlib.contextmanager
def show_progress(total: int, unit: str) -> Iterator[Advance]:
    """Shows how far an evaluation is while the context is open: a live line, or log lines off a terminal.

    Process 0 alone shows it.

    Args:
        total: how much there is to do.
        unit: of that, such as "tokens".

    Yields:
        A function that is told what is being done now, and how much more has been done.
    """
    console = Console(stderr=True)
    silent = jax.process_index() != 0
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("[cyan]{task.fields[figures]}"),
        TimeRemainingColumn(),
        console=console,
        disable=silent or not console.is_terminal,
        expand=True,
        # The bar shows what there was to show; the table comes in its place.
        transient=True,
    )
    shown = bar.add_task("compiling", total=total, figures="")
    started = said = time.perf_counter()
    done = 0

    def advance(description: str, more: int) -> None:
        nonlocal done, said
        done += more
        now = time.perf_counter()
        figures = f"{done / (now - started):,.0f} {unit}/s"
        bar.update(shown, completed=done, description=description, figures=figures)
        if not silent and not console.is_terminal and now - said >= SECONDS_BETWEEN_LINES:
            said = now
            left = datetime.timedelta(seconds=round((total - done) * (now - started) / max(done, 1)))
            logging.info("%s: %d/%d %s  %s  %s left", description, done, total, unit, figures, left)

    with bar:
        yield advance
