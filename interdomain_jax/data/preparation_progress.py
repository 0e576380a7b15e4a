"""What the person who waits for a preparation sees: how many shards are complete, and how fast they come."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from absl import logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from interdomain_jax.data.preparation import Plan
from interdomain_jax.data.token_files import Shard
from interdomain_jax.workdir import is_remote

SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def show_progress(plans: Mapping[str, Plan]) -> Iterator[None]:
    """Shows how a preparation goes on while the context is open: a live line, or log lines off a terminal.

    Workers may be anywhere: what is seen is what they have written.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("[bold]preparing"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("[cyan]{task.fields[figures]}"),
        console=console,
        disable=not console.is_terminal,
        expand=True,
    )
    # A bucket is asked less often: each look is a list of its files.
    seconds_between_looks = 10.0 if any(is_remote(plan.directory) for plan in plans.values()) else 0.5
    found: dict[str, dict[str, Shard]] = {split: plan.shards({}) for split, plan in plans.items()}
    before = _totals(found)
    total = sum(len(plan.tasks) for plan in plans.values())
    shown = bar.add_task("", total=total, completed=before.shards, figures="")
    started = time.perf_counter()
    ended = threading.Event()

    def watch() -> None:
        said = started
        while not ended.wait(seconds_between_looks):
            found.update({split: plan.shards(found[split]) for split, plan in plans.items()})
            now, totals = time.perf_counter(), _totals(found)
            tokens, size = totals.tokens - before.tokens, totals.bytes - before.bytes
            figures = f"{tokens / (now - started):,.0f} tokens/s  {size / (now - started) / 1e6:.2f} MB/s"
            bar.update(shown, completed=totals.shards, figures=figures)
            if not console.is_terminal and now - said >= SECONDS_BETWEEN_LINES:
                said = now
                logging.info("%d/%d shards  %s", totals.shards, total, figures)

    thread = threading.Thread(target=watch, daemon=True)
    with bar:
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class _Totals(NamedTuple):
    """Of all shards that are complete."""

    shards: int
    tokens: int
    bytes: int


def _totals(found: Mapping[str, Mapping[str, Shard]]) -> _Totals:
    shards = [shard for each in found.values() for shard in each.values()]
    return _Totals(len(shards), sum(shard.tokens for shard in shards), sum(shard.bytes for shard in shards))
