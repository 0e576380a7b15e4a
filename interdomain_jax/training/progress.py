"""What the person at the terminal sees of a run."""

from absl import logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class ProgressLine:
    """A live line (step, loss, tokens/s, time left), or plain log lines off a terminal.

    Use it as a context manager around the run.

    Args:
        num_steps: steps in the whole run.
        done_steps: steps done before this start.
        log_every: off a terminal, one line every so many steps.
        console: where to draw; stderr by default.
        silent: shows nothing, in all processes of a run but one.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        done_steps: int,
        log_every: int,
        console: Console | None = None,
        silent: bool = False,
    ):
        self._console = Console(stderr=True) if console is None else console
        self._silent = silent
        self._num_steps = num_steps
        self._log_every = log_every
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("[cyan]{task.fields[figures]}"),
            console=self._console,
            # A plain log takes the line's place.
            disable=silent or not self._console.is_terminal,
            expand=True,
        )
        self._task = self._bar.add_task("compiling", total=num_steps, completed=done_steps, figures="")

    def update(
        self, step: int, *, loss: float, tokens_per_second: float, seconds_left: float, mfu: float | None = None
    ) -> None:
        """Shows the figures of `step`: loss in nats per token, tokens/s without pauses, model flops utilisation."""
        utilisation = "" if mfu is None else f"  {mfu:.1%} MFU"
        figures = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s{utilisation}  {as_clock(seconds_left)} left"
        if self._silent:
            return
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, description="training", figures=figures)
        elif step % self._log_every == 0 or step == self._num_steps:
            logging.info("step %d/%d  %s", step, self._num_steps, figures)

    def phase(self, description: str) -> None:
        """Names what the run is doing now, on the live line alone."""
        self._bar.update(self._task, description=description)

    def message(self, text: str) -> None:
        """Says something once: above the live line, or as a log line."""
        if self._silent:
            return
        if self._console.is_terminal:
            self._console.print(text, highlight=False)
        else:
            logging.info("%s", text)

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def as_clock(seconds: float) -> str:
    """Formats a duration as h:mm:ss, or m:ss below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
