"""What the person who watches a run is told: figures from the metrics of each update, on file and on the terminal."""

import collections
import contextlib
import time
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from interdomain_jax.hardware import chip
from interdomain_jax.training.metrics import MetricsWriter
from interdomain_jax.training.progress import ProgressLine, as_clock
from interdomain_jax.training.step import TrainMetrics
from interdomain_jax.training.stopwatch import Stopwatch

FIGURES = ("loss", "grad_norm", "param_norm", "learning_rate", "ssm_learning_rate")
COUNTS = ("tokens", "tokens_seen", "batch_checksum", "skipped")


class Report:
    """Writes a row for each update, and shows it.

    Rates are averages over the last steps, pauses left out. Model flops are those of `model_flops.py`; MFU is their
    share of the device's peak, and is left out, as the memory in use is, where the device does not tell.

    Args:
        mesh: the devices.
        flops_per_token: model flops of training on one token.
        num_steps: steps in the whole run.
        window: steps that a rate is averaged over.
        writer: takes the rows; None in a process that writes none.
        progress: shows them.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        flops_per_token: float,
        num_steps: int,
        window: int,
        writer: MetricsWriter | None,
        progress: ProgressLine,
    ):
        self.stopwatch = Stopwatch(window=window)
        self._flops_per_token = flops_per_token / mesh.size
        self._chip = chip(mesh.devices.flat[0].device_kind)
        self._num_steps = num_steps
        self._writer = writer
        self._progress = progress
        # Of the steps that have begun and are not recorded: the next one begins before a step's metrics are there.
        self._waits: collections.deque[float] = collections.deque()
        self._waited_in_all = 0.0

    @contextlib.contextmanager
    def data_wait(self) -> Iterator[None]:
        """Counts the time spent inside as the wait for data of the next step; once for each step."""
        start = time.perf_counter()
        yield
        self._waits.append(time.perf_counter() - start)

    def update(self, step: int, metrics: TrainMetrics) -> None:
        """Records the metrics of `step`, fetched from the device, and shows them."""
        waited = self._waits.popleft()
        self._waited_in_all += waited
        tokens = int(metrics.tokens)
        self.stopwatch.lap(tokens)
        rate = self.stopwatch.rate
        flops = rate * self._flops_per_token
        values: dict[str, float] = {name: float(getattr(metrics, name)) for name in FIGURES} | {
            name: int(getattr(metrics, name)) for name in COUNTS
        }
        values |= {
            "tokens_per_second": rate,
            "model_tflops_per_device": flops / 1e12,
            "data_wait_seconds": waited,
        }
        if self._chip is not None:
            values["mfu"] = flops / self._chip.flops
        values |= _memory_in_use()
        if self._writer is not None:
            self._writer.write(step, {f"train/{name}": value for name, value in values.items()})
        self._progress.update(
            step,
            loss=values["loss"],
            tokens_per_second=rate,
            mfu=values.get("mfu"),
            seconds_left=(self._num_steps - step) * tokens / rate,
        )

    def validation(self, step: int, loss: float) -> None:
        """Records and shows a validation loss, in nats per token."""
        if self._writer is not None:
            self._writer.write(step, {"validation/loss": loss, "validation/perplexity": float(np.exp(loss))})
        self._progress.message(f"step {step}: validation loss {loss:.4f} nats per token")

    def closing_line(self, compile_seconds: float) -> str:
        """Where the time of the run went."""
        watch = self.stopwatch
        return (
            f"trained for {as_clock(watch.seconds)} at {watch.mean_rate:,.0f} tokens/s, "
            f"{self._waited_in_all / watch.seconds:.1%} of it waiting for data; "
            f"beside that, {compile_seconds:.1f} s of compilation and {watch.paused_seconds:.1f} s of pauses to "
            "validate and save"
        )


def skipped_update(step: int, metrics: TrainMetrics) -> str:
    """Which update was skipped, and why; `metrics` as fetched."""
    why = "a spike" if metrics.spike else "not finite"
    return (
        f"step {step}, {why}: loss {metrics.loss}, gradient norm {metrics.grad_norm}, "
        f"batch {int(metrics.batch_checksum):#010x}"
    )


def _memory_in_use() -> dict[str, float]:
    """The most that any device of this process has in use, and had at its peak, in GiB; nothing if they do not tell."""
    stats = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    names = {"memory_gib": "bytes_in_use", "peak_memory_gib": "peak_bytes_in_use"}
    return {
        name: max(s[key] for s in stats) / 2**30
        for name, key in names.items()
        if all(key in s for s in stats) and stats
    }
