"""Time spent training, without the pauses for validation and checkpoints."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator


class Stopwatch:
    """Runs from its creation; stands still inside `paused()`.

    Args:
        window: number of steps over which `rate` averages.
        clock: source of seconds.
    """

    def __init__(self, *, window: int, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._start = clock()
        self._paused = 0.0
        self._laps = collections.deque([(0.0, 0.0)], maxlen=window + 1)

    @property
    def seconds(self) -> float:
        """Seconds run."""
        return self._clock() - self._start - self._paused

    @property
    def paused_seconds(self) -> float:
        """Seconds spent in pauses."""
        return self._paused

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count the time spent inside."""
        before = self._clock()
        yield
        self._paused += self._clock() - before

    def lap(self, amount: float) -> None:
        """Notes that `amount` more units (tokens) are done."""
        done, _ = self._laps[-1]
        self._laps.append((done + amount, self.seconds))

    @property
    def rate(self) -> float:
        """Units per second over the window."""
        (done_before, before), (done, now) = self._laps[0], self._laps[-1]
        return (done - done_before) / (now - before)

    @property
    def mean_rate(self) -> float:
        """Units per second since the start."""
        done, now = self._laps[-1]
        return done / now
