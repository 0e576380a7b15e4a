"""Training, from a config to a trained checkpoint: `prepare`, then `train`."""

import contextlib
import time
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
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
from interdomain_jax.experiment import build_experiment, check_batch, check_fields
from interdomain_jax.model_flops import train_step_flops
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.scoring import ScoreFunction, make_score_function, score_batches
from interdomain_jax.training import checkpoints as checkpointing
from interdomain_jax.training.loss_curve import draw_loss_curve
from interdomain_jax.training.metrics import MetricsWriter, read_metrics
from interdomain_jax.training.optimizer import Optimizer, make_optimizer
from interdomain_jax.training.progress import ProgressLine
from interdomain_jax.training.report import Report
from interdomain_jax.training.state import TrainState, abstract_state, init_state
from interdomain_jax.training.step import TrainMetrics, lower_train_step


class Run(NamedTuple):
    """A run whose inputs have been checked; nothing is compiled or written yet."""

    config: ConfigDict
    workdir: Path
    mesh: Mesh
    model: Decoder
    tokenizer: Tokenizer
    optimizer: Optimizer
    abstract_state: TrainState
    train_source: DocumentSource
    validation_source: DocumentSource


def prepare(config: ConfigDict, workdir: Path) -> Run:
    """Checks everything the user gave and builds what the run needs.

    The corpus comes last, since its first use prepares it on disk.

    Raises:
        ValueError: a field is out of range, or `workdir` holds a run with another config.
        FileNotFoundError: a file that the config names does not exist.
    """
    check_fields(config)
    mesh = sharding.make_mesh(config.mesh)
    model, tokenizer = build_experiment(config)
    optimizer = make_optimizer(num_steps=config.num_steps, **config.optimizer)
    check_batch(config, mesh)
    abstract = abstract_state(model, optimizer, mesh)
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
        abstract_state=abstract,
        train_source=open_corpus(data.corpus, "train", data.directory),
        validation_source=open_corpus(data.corpus, "validation", data.directory),
    )


def train(run: Run, *, profiled_steps: range = range(0)) -> TrainState:
    """Trains to `config.num_steps`, from the latest checkpoint in the workdir if there is one.

    Writes `config.json`, `checkpoints/`, `metrics.jsonl`, `tensorboard/` and `loss_curve.png` into
    the workdir; the curve is drawn even when the run is interrupted. A run that is complete already
    is left as it is. Of several processes all write checkpoints, and the first one the rest.

    Args:
        run: from `prepare`.
        profiled_steps: the steps during which the profiler writes to `<workdir>/profile`.

    Returns:
        The final state.
    """
    config, mesh = run.config, run.mesh
    score = make_score_function(run.model, mesh, vocab_chunks=config.vocab_chunks)
    is_first_process = jax.process_index() == 0

    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(contextlib.closing(_train_batches(run)))
        checkpoints = stack.enter_context(workdirs.open_checkpoints(run.workdir, keep=config.checkpoints_to_keep))
        start = checkpoints.latest_step() or 0
        if start:
            state = checkpointing.restore(checkpoints, start, run.abstract_state, batches)
        else:
            state = init_state(run.model, run.optimizer, seed=config.seed, mesh=mesh)
        if start == config.num_steps:
            logging.info("%s is complete: all of its %d steps are done", run.workdir, start)
            return state
        progress = stack.enter_context(
            ProgressLine(
                num_steps=config.num_steps, done_steps=start, log_every=config.log_every, silent=not is_first_process
            )
        )
        writer = None
        if is_first_process:
            workdirs.save_config(run.workdir, config)
            stack.callback(_draw_loss_curve, run)
            writer = stack.enter_context(MetricsWriter(run.workdir, resume_step=start))
        progress.message(_opening_line(run, start))

        compile_start = time.perf_counter()
        compiled_step = lower_train_step(config, run.model, run.optimizer, mesh).compile()
        compile_seconds = time.perf_counter() - compile_start
        report = Report(
            mesh,
            flops_per_token=train_step_flops(run.model, tokens=1, context_length=config.data.sequence_length),
            num_steps=config.num_steps,
            window=config.log_every,
            writer=writer,
            progress=progress,
        )

        # The metrics of a step are fetched while the next one runs, so that the device never waits
        # for the host; a pause for validation, a checkpoint or the profiler fetches them first.
        running: tuple[int, TrainMetrics] | None = None
        captured = range(max(start + 1, profiled_steps.start), min(config.num_steps + 1, profiled_steps.stop))
        for step in range(start + 1, config.num_steps + 1):
            if step in captured and step == captured[0]:
                jax.profiler.start_trace(run.workdir / "profile")
            with report.data_wait():
                batch = next(batches)
            batch = sharding.place_batch(batch, mesh, config.data.batch_size)
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = compiled_step(state, batch)
            if running:
                report.update(*running)
            running = step, metrics

            is_last = step == config.num_steps
            validates = is_last or step % config.eval_every == 0
            saves = is_last or step % config.checkpoint_every == 0
            ends_capture = step in captured and step == captured[-1]
            if validates or saves or ends_capture:
                report.update(*running)
                running = None
            with report.stopwatch.paused():
                if ends_capture:
                    progress.phase("saving the profile")
                    jax.profiler.stop_trace()
                if validates:
                    progress.phase("validating")
                    report.validation(step, _validation_loss(run, score, state.params))
                if saves:
                    progress.phase("saving")
                    checkpointing.save(checkpoints, state, batches)

        progress.phase("done")
        progress.message(report.closing_line(compile_seconds))
    return state


def _train_batches(run: Run) -> grain.DatasetIterator[Batch]:
    data = run.config.data
    return train_iterator(
        run.train_source,
        run.tokenizer,
        sequence_length=data.sequence_length,
        batch_size=data.batch_size,
        seed=run.config.seed,
        shuffle_buffer=data.shuffle_buffer,
        rows=sharding.process_rows(run.mesh, data.batch_size),
    )


def _validation_loss(run: Run, score: ScoreFunction, params: Any) -> float:
    """In nats per token; batches have the size of a micro-batch, so that validation fits where training fits."""
    data = run.config.data
    batch_size = data.batch_size // run.config.accumulation_steps
    batches = evaluation_batches(
        run.validation_source,
        run.tokenizer,
        sequence_length=data.sequence_length,
        batch_size=batch_size,
        max_tokens=run.config.eval_tokens,
        rows=sharding.process_rows(run.mesh, batch_size),
    )
    return score_batches(score, params, batches, run.mesh, batch_size=batch_size).loss


def _draw_loss_curve(run: Run) -> None:
    draw_loss_curve(
        read_metrics(run.workdir),
        title=f"{run.config.name}: {', '.join(run.config.model.mixers)}",
        path=run.workdir / "loss_curve.png",
    )


def _opening_line(run: Run, start: int) -> str:
    config, mesh = run.config, run.mesh
    num_params = sum(leaf.size for leaf in jax.tree.leaves(run.abstract_state.params))
    tokens = config.data.batch_size * config.data.sequence_length
    axes = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
    layout = f" ({', '.join(axes)})" if axes else ""
    return (
        f"{config.name}: {num_params:,} parameters, {', '.join(config.model.mixers)}, on "
        f"{mesh.size} x {mesh.devices.flat[0].device_kind}{layout}; "
        f"steps {start + 1:,} to {config.num_steps:,}, {tokens:,} tokens each"
    )
