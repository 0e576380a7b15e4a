"""Training, from a config to a trained checkpoint: `prepare`, then `train`."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from interdomain_jax import sharding
from interdomain_jax import workdir as workdirs
from interdomain_jax.data.loader import (
    Batch,
    DocumentSource,
    evaluation_batches,
    open_corpus,
    train_iterator,
)
from interdomain_jax.data.tokenizers import Tokenizer
from interdomain_jax.experiment import build_experiment, require_positive
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.scoring import make_score_function, score_batches
from interdomain_jax.training import checkpoints as checkpointing
from interdomain_jax.training.loss_curve import draw_loss_curve
from interdomain_jax.training.metrics import MetricsWriter, read_metrics
from interdomain_jax.training.optimizer import Optimizer, make_optimizer
from interdomain_jax.training.progress import ProgressLine, as_clock
from interdomain_jax.training.state import TrainState, abstract_state, init_state
from interdomain_jax.training.step import TrainMetrics, make_train_step
from interdomain_jax.training.stopwatch import Stopwatch

POSITIVE_FIELDS = (
    "num_steps",
    "accumulation_steps",
    "eval_every",
    "eval_tokens",
    "checkpoint_every",
    "checkpoints_to_keep",
    "log_every",
)


class Run(NamedTuple):
    """A run whose inputs have been checked; nothing is compiled or written yet."""

    config: ConfigDict
    workdir: Path
    mesh: Mesh
    model: Decoder
    tokenizer: Tokenizer
    optimizer: Optimizer
    train_source: DocumentSource
    validation_source: DocumentSource


def prepare(config: ConfigDict, workdir: Path) -> Run:
    """Checks everything the user gave and builds what the run needs.

    The corpus comes last, since its first use prepares it on disk.

    Raises:
        ValueError: a field is out of range, or `workdir` holds a run with another config.
        FileNotFoundError: a file that the config names does not exist.
    """
    mesh = sharding.data_mesh()
    for field in POSITIVE_FIELDS:
        require_positive(field, config[field])
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"seed is {config.seed}; it must be at least 0 and below 2**32")
    require_positive("data.shuffle_buffer", config.data.shuffle_buffer)
    _check_batch_size(config, num_devices=mesh.size)
    model, tokenizer = build_experiment(config)
    optimizer = make_optimizer(num_steps=config.num_steps, **config.optimizer)
    data = config.data
    workdirs.require_writable("workdir", workdir)
    workdirs.require_writable("data.directory", Path(data.directory).expanduser())
    workdirs.check_config(workdir, config)
    return Run(
        config=config,
        workdir=workdir,
        mesh=mesh,
        model=model,
        tokenizer=tokenizer,
        optimizer=optimizer,
        train_source=open_corpus(data.corpus, "train", data.directory),
        validation_source=open_corpus(data.corpus, "validation", data.directory),
    )


def train(run: Run) -> TrainState:
    """Trains to `config.num_steps`, from the latest checkpoint in the workdir if there is one.

    Writes `config.json`, `checkpoints/`, `metrics.jsonl`, `tensorboard/` and `loss_curve.png` into
    the workdir; the curve is drawn even when the run is interrupted. A run that is complete already
    is left as it is.

    Returns:
        The final state.
    """
    config, mesh = run.config, run.mesh
    train_step = make_train_step(run.model, run.optimizer, accumulation_steps=config.accumulation_steps, mesh=mesh)
    score = make_score_function(run.model, mesh)

    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(contextlib.closing(_train_batches(run)))
        checkpoints = stack.enter_context(workdirs.open_checkpoints(run.workdir, keep=config.checkpoints_to_keep))
        start = checkpoints.latest_step() or 0
        if start:
            abstract = abstract_state(run.model, run.optimizer)
            state = checkpointing.restore(checkpoints, start, abstract, batches, mesh)
        else:
            state = init_state(run.model, run.optimizer, seed=config.seed, mesh=mesh)
        if start == config.num_steps:
            logging.info("%s is complete: all of its %d steps are done", run.workdir, start)
            return state
        workdirs.save_config(run.workdir, config)
        stack.callback(_draw_loss_curve, run)
        writer = stack.enter_context(MetricsWriter(run.workdir, resume_step=start))
        progress = stack.enter_context(
            ProgressLine(num_steps=config.num_steps, done_steps=start, log_every=config.log_every)
        )
        progress.message(_opening_line(run, state))

        compile_start = time.perf_counter()
        compiled_step = train_step.lower(state, _abstract_batch(config)).compile()
        compile_seconds = time.perf_counter() - compile_start
        stopwatch = Stopwatch(window=config.log_every)

        # The metrics of a step are fetched while the next one runs, so that the device never waits
        # for the host; a pause for validation or a checkpoint fetches them first.
        running: tuple[int, TrainMetrics] | None = None
        for step in range(start + 1, config.num_steps + 1):
            batch = sharding.place_batch(next(batches), mesh)
            state, metrics = compiled_step(state, batch)
            if running:
                _report(*running, config.num_steps, stopwatch, writer, progress)
            running = step, metrics

            is_last = step == config.num_steps
            validates = is_last or step % config.eval_every == 0
            saves = is_last or step % config.checkpoint_every == 0
            if validates or saves:
                _report(*running, config.num_steps, stopwatch, writer, progress)
                running = None
            with stopwatch.paused():
                if validates:
                    progress.phase("validating")
                    loss = score_batches(score, state.params, _validation_batches(run), mesh).loss
                    perplexity = float(np.exp(loss))
                    writer.write(step, {"validation/loss": loss, "validation/perplexity": perplexity})
                    progress.message(f"step {step}: validation loss {loss:.4f} nats per token")
                if saves:
                    progress.phase("saving")
                    checkpointing.save(checkpoints, state, batches)

        progress.phase("done")
        progress.message(_closing_line(stopwatch, compile_seconds))
    return state


def _check_batch_size(config: ConfigDict, *, num_devices: int) -> None:
    batch_size, accumulation_steps = config.data.batch_size, config.accumulation_steps
    require_positive("data.batch_size", batch_size)
    if batch_size % (accumulation_steps * num_devices):
        raise ValueError(
            f"data.batch_size is {batch_size}; it must be a multiple of accumulation_steps times "
            f"the number of devices, {accumulation_steps} x {num_devices}"
        )


def _train_batches(run: Run) -> grain.DatasetIterator[Batch]:
    return train_iterator(
        run.train_source,
        run.tokenizer,
        sequence_length=run.config.data.sequence_length,
        batch_size=run.config.data.batch_size // jax.process_count(),
        seed=run.config.seed,
        shuffle_buffer=run.config.data.shuffle_buffer,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )


def _validation_batches(run: Run) -> Iterator[Batch]:
    """Batches of the size of a micro-batch, so that validation fits where training fits."""
    data = run.config.data
    micro_batch_size = data.batch_size // run.config.accumulation_steps
    return evaluation_batches(
        run.validation_source,
        run.tokenizer,
        sequence_length=data.sequence_length,
        batch_size=micro_batch_size // jax.process_count(),
        max_tokens=run.config.eval_tokens,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )


def _abstract_batch(config: ConfigDict) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (config.data.batch_size, config.data.sequence_length)
    return {
        "inputs": jax.ShapeDtypeStruct(shape, jnp.int32),
        "targets": jax.ShapeDtypeStruct(shape, jnp.int32),
        "loss_mask": jax.ShapeDtypeStruct(shape, jnp.float32),
    }


def _report(
    step: int,
    metrics: TrainMetrics,
    num_steps: int,
    stopwatch: Stopwatch,
    writer: MetricsWriter,
    progress: ProgressLine,
) -> None:
    """Waits for the metrics of `step`, records them and shows them."""
    values = {name: float(x) for name, x in jax.device_get(metrics)._asdict().items()}
    stopwatch.lap(values["tokens"])
    writer.write(
        step,
        {f"train/{name}": value for name, value in values.items()} | {"train/tokens_per_second": stopwatch.rate},
    )
    progress.update(
        step,
        loss=values["loss"],
        tokens_per_second=stopwatch.rate,
        seconds_left=(num_steps - step) * values["tokens"] / stopwatch.rate,
    )


def _draw_loss_curve(run: Run) -> None:
    draw_loss_curve(
        read_metrics(run.workdir),
        title=f"{run.config.name}: {', '.join(run.config.model.mixers)}",
        path=run.workdir / "loss_curve.png",
    )


def _opening_line(run: Run, state: TrainState) -> str:
    config = run.config
    num_params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    tokens = config.data.batch_size * config.data.sequence_length
    return (
        f"{config.name}: {num_params:,} parameters, {', '.join(config.model.mixers)}, on "
        f"{run.mesh.size} x {jax.devices()[0].device_kind}; "
        f"steps {int(state.step) + 1:,} to {config.num_steps:,}, {tokens:,} tokens each"
    )


def _closing_line(stopwatch: Stopwatch, compile_seconds: float) -> str:
    return (
        f"trained for {as_clock(stopwatch.seconds)} at {stopwatch.mean_rate:,.0f} tokens/s; beside "
        f"that, {compile_seconds:.1f} s of compilation and {stopwatch.paused_seconds:.1f} s of "
        "validation and saving"
    )
