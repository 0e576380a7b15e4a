"""Training, from a config to a trained checkpoint: `prepare`, then `train`."""

import collections
import contextlib
import functools
import math
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from ml_collections import ConfigDict

from interdomain_jax import checkpoints as storage
from interdomain_jax import sharding
from interdomain_jax import workdir as workdirs
from interdomain_jax.data.corpora import open_corpora
from interdomain_jax.data.loader import Batch, TrainBatches, evaluation_batches
from interdomain_jax.data.tokenizers import Tokenizer
from interdomain_jax.data.windows import TokenSequences
from interdomain_jax.errors import RunError, TrainingError
from interdomain_jax.experiment import build_experiment, check_batch, check_fields
from interdomain_jax.model_flops import train_step_flops
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.preemption import Agreement, Notice, Preempted, Wish
from interdomain_jax.scoring import ScoreFunction, make_score_function, score_batches
from interdomain_jax.training import checkpoints as checkpointing
from interdomain_jax.training.checkpoints import Start
from interdomain_jax.training.dump import dump_step
from interdomain_jax.training.loss_curve import draw_loss_curve
from interdomain_jax.training.metrics import MetricsWriter, read_metrics
from interdomain_jax.training.optimizer import Optimizer, make_optimizer
from interdomain_jax.training.progress import ProgressLine
from interdomain_jax.training.report import Report, skipped_update
from interdomain_jax.training.state import TrainState, abstract_state, init_state
from interdomain_jax.training.step import StepOutput, TrainMetrics, lower_train_step
from interdomain_jax.watchdog import Watchdog


class Run(NamedTuple):
    """A run whose inputs have been checked; nothing is compiled or written yet."""

    config: ConfigDict
    workdir: epath.Path
    mesh: Mesh
    model: Decoder
    tokenizer: Tokenizer
    optimizer: Optimizer
    abstract_state: TrainState
    train_corpora: Sequence[TokenSequences]
    validation_corpora: Sequence[TokenSequences]


def prepare(config: ConfigDict, workdir: epath.PathLike) -> Run:
    """Checks everything the user gave and builds what the run needs.

    The corpora come last, since the first use of the embedded one prepares it on disk.

    Raises:
        ValueError: a field is out of range, or `workdir` holds a run with another config.
        FileNotFoundError: a file that the config names does not exist.
    """
    check_fields(config)
    workdir = epath.Path(workdir)
    mesh = sharding.make_mesh(config.mesh)
    model, tokenizer = build_experiment(config)
    optimizer = make_optimizer(num_steps=config.num_steps, **config.optimizer)
    check_batch(config, mesh)
    abstract = abstract_state(model, optimizer, mesh)
    data = config.data
    workdirs.require_writable("workdir", workdir)
    workdirs.require_writable("data.directory", epath.Path(data.directory).expanduser())
    workdirs.check_config(workdir, config)
    return Run(
        config=config,
        workdir=workdir,
        mesh=mesh,
        model=model,
        tokenizer=tokenizer,
        optimizer=optimizer,
        abstract_state=abstract,
        train_corpora=open_corpora(data, "train", tokenizer),
        validation_corpora=open_corpora(data, "validation", tokenizer),
    )


def train(run: Run, *, notice: Notice | None = None, profiled_steps: range = range(0)) -> TrainState:
    """Trains to `config.num_steps`, from the latest checkpoint in the workdir if there is one.

    Writes `config.json`, `checkpoints/`, `metrics.jsonl`, `tensorboard/` and `loss_curve.png` into
    the workdir; the curve is drawn even when the run is interrupted. A run that is complete already
    is left as it is. Of several processes all write checkpoints, and the first one the rest.

    Args:
        run: from `prepare`.
        notice: once it is given, the run saves and returns early, and the same call goes on from there.
        profiled_steps: the steps during which the profiler writes to `<workdir>/profile`.

    Returns:
        The last state.

    Raises:
        Preempted: the notice came before the first step of this start; what there was to save is saved.
        CheckpointError: a checkpoint could not be written, none of those that are there can be read, or the latest is
            of another model.
        TrainingError: too many updates in a row were skipped, or the loss spiked again and again.
        RunError: the workdir cannot be written.
    """
    config = run.config
    notice = notice or Notice()
    programs = functools.cache(lambda: _compile(run))
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(
            Watchdog(
                run.workdir,
                limit=config.hang_seconds,
                limit_name="hang_seconds",
                process=str(jax.process_index()),
                processes=[str(process) for process in range(jax.process_count())],
            )
        )
        checkpoints = stack.enter_context(
            storage.open_checkpoints(
                run.workdir,
                keep=config.checkpoints_to_keep,
                keep_best=config.best_checkpoints_to_keep,
                removes_unfinished=True,
            )
        )
        rewinds: collections.Counter[int] = collections.Counter()
        position = None
        while True:
            watchdog.beat(0, "restoring")
            start = notice.wait_for(lambda: _start(run, checkpoints))
            if start.step == config.num_steps and start.validation_loss is not None:
                logging.info("%s is complete: all of its %d steps are done", run.workdir, start.step)
                return start.state
            if position is not None:
                start = start._replace(position=position)
            try:
                return _train_from(start, run, programs, checkpoints, watchdog, notice, profiled_steps)
            except _Rewind as rewind:
                position = rewind.position
                rewinds[start.step] += 1
                if rewinds[start.step] > config.max_skipped_in_a_row:
                    raise TrainingError(
                        f"the loss spiked after each of {rewinds[start.step]} starts from step {start.step}, whatever "
                        "the data (max_skipped_in_a_row)"
                    ) from None
                storage.wait_until_saved(checkpoints)


class _Rewind(Exception):
    """Training is to go on from the last checkpoint, with the data behind this position."""

    def __init__(self, position: Any):
        super().__init__()
        self.position = position


class _Programs(NamedTuple):
    """What is compiled, and the seconds it took."""

    step: Callable[[TrainState, Mapping[str, jax.Array]], StepOutput]
    score: ScoreFunction
    agreement: Agreement
    seconds: float


class _Flight(NamedTuple):
    """A step on its way through the device; its figures are fetched while the next one runs."""

    step: int
    metrics: TrainMetrics
    wish: jax.Array
    batch: Batch
    position: Any


def _train_from(
    start: Start,
    run: Run,
    programs: Callable[[], _Programs],
    checkpoints: ocp.CheckpointManager,
    watchdog: Watchdog,
    notice: Notice,
    profiled_steps: range,
) -> TrainState:
    config, mesh = run.config, run.mesh
    is_first_process, is_alone = jax.process_index() == 0, jax.process_count() == 1
    with contextlib.ExitStack() as stack:
        batches = train_batches(run)

        def stop_reading() -> None:
            # Which waits for a document that is being read; a process that was asked to end does not.
            if not notice.is_given:
                batches.close()

        stack.callback(stop_reading)
        if start.position is not None:
            batches.set_state(start.position)
        progress = stack.enter_context(
            ProgressLine(
                num_steps=config.num_steps,
                done_steps=start.step,
                log_every=config.log_every,
                silent=not is_first_process,
            )
        )
        writer = None
        if is_first_process:
            try:
                workdirs.save_config(run.workdir, config)
                stack.callback(_draw_loss_curve, run)
                writer = stack.enter_context(
                    MetricsWriter(run.workdir, resume_step=start.step, is_validated=start.validation_loss is not None)
                )
            # A full disk is an OSError; a bucket has exceptions of its own.
            except Exception as error:
                raise RunError(f"workdir {run.workdir} cannot be written: {storage.first_line(error)}") from error
        if start.step < config.num_steps:
            progress.message(_opening_line(run, start.step))

        state, position, loss = start.state, batches.get_state(), start.validation_loss
        watchdog.beat(start.step, "compiling")
        try:
            step_program, score, agreement, compile_seconds = notice.wait_for(programs)
        except Preempted:
            # A first state is worth nothing but the certainty that there is one. Several processes do not know of
            # each other here, and the seed gives it again.
            if is_alone and not checkpoints.all_steps():
                checkpointing.save(checkpoints, state, position, config)
            raise
        report = Report(
            mesh,
            flops_per_token=train_step_flops(run.model, tokens=1, context_length=config.data.sequence_length),
            num_steps=config.num_steps,
            window=config.log_every,
            writer=writer,
            progress=progress,
        )

        def fetch(flight: _Flight) -> tuple[Wish, int]:
            """Waits for a step, records it, and says what is wished and how many were skipped in a row.

            Raises:
                _Rewind: the loss is a spike from which training goes back.
                TrainingError: too many updates in a row were skipped.
            """
            metrics = jax.device_get(flight.metrics)
            report.update(flight.step, metrics)
            in_a_row = int(metrics.skipped_in_a_row)
            if in_a_row:
                progress.message(
                    f"skipped the update of {skipped_update(flight.step, metrics)}; {in_a_row} in a row, "
                    f"{metrics.skipped} in all"
                )
            if metrics.spike and config.spikes.action == "rewind":
                raise _Rewind(flight.position)
            if in_a_row >= config.max_skipped_in_a_row:
                told = (
                    f"{in_a_row} updates in a row were skipped, the last one that of "
                    f"{skipped_update(flight.step, metrics)}"
                )
                try:
                    dump = dump_step(run.workdir, config, state, flight.batch, _rows(run), flight.position)
                # The first error is the one to know of.
                except Exception as error:
                    raise TrainingError(f"{told}; it cannot be dumped: {storage.first_line(error)}") from error
                raise TrainingError(
                    f"{told}; to do it again: python -m interdomain_jax.training.reproduce --dump={dump}"
                )
            return Wish(int(flight.wish)), in_a_row

        answers: collections.deque[jax.Array] = collections.deque()

        def keep_going(step: int) -> None:
            """To be called between two pieces of work.

            Raises:
                Preempted: one of the processes is to stop; all raise it at the same call.
            """
            watchdog.beat(step, "validating")
            answers.append(agreement.ask(notice.wish))
            # That of the call before: it has come meanwhile, the newest would have to be waited for.
            if len(answers) > 1 and int(answers.popleft()) == Wish.STOP:
                raise Preempted

        # Figures of a step are fetched while the next one runs, so that the device never waits for the host. A pause,
        # and a step that would end the run if it were skipped too, fetch them first.
        flight: _Flight | None = None
        step, saved, saved_at = start.step, start.step if checkpoints.all_steps() else None, time.monotonic()
        wish, in_a_row = Wish.GO_ON, int(state.skipped_in_a_row)
        best = min(storage.validation_losses(checkpoints, skips_damaged=True).values(), default=math.inf)
        capture = stack.enter_context(contextlib.ExitStack())
        captured = range(max(start.step + 1, profiled_steps.start), min(config.num_steps + 1, profiled_steps.stop))
        while True:
            is_last = step == config.num_steps
            validates = loss is None and step > 0 and (is_last or step % config.eval_every == 0)
            saves = step != saved and step > 0 and (is_last or step % config.checkpoint_every == 0)
            ends_capture = step in captured and step == captured[-1]
            is_decisive = in_a_row + 1 >= config.max_skipped_in_a_row
            if is_alone:
                wish = max(wish, notice.wish)
            if flight and (validates or saves or ends_capture or is_decisive or wish):
                new_wish, in_a_row = fetch(flight)
                wish, flight = max(wish, new_wish), None
            with report.stopwatch.paused():
                if ends_capture:
                    progress.phase("saving the profile")
                    capture.close()
                if validates and wish < Wish.STOP:
                    progress.phase("validating")
                    try:
                        loss = _validation_loss(run, score, state.params, functools.partial(keep_going, step))
                    except Preempted:
                        wish = Wish.STOP
                    else:
                        report.validation(step, loss)
                        saves |= loss < best and config.best_checkpoints_to_keep > 0
                        best = min(best, loss)
                        if step == saved:
                            # Its validation had been interrupted.
                            storage.add_validation_loss(checkpoints, step, loss)
                if step != saved and (saves or wish):
                    progress.phase("saving")
                    watchdog.beat(step, "saving")
                    if writer is not None:
                        # Before the checkpoint is complete, so that none lacks its rows.
                        writer.publish()
                    checkpointing.save(checkpoints, state, position, config, validation_loss=loss)
                    saved, saved_at = step, time.monotonic()
            if is_last or wish == Wish.STOP:
                break

            watchdog.beat(step, "waiting for data")
            try:
                # Of several processes none may leave alone: the others have begun the step that needs this batch.
                with report.data_wait(), notice.interrupts() if is_alone else contextlib.nullcontext():
                    batch = next(batches)
            except Preempted:
                wish = Wish.STOP
                continue
            step, position, loss, wish = step + 1, batches.get_state(), None, Wish.GO_ON
            watchdog.beat(step, "training")
            if step in captured and step == captured[0]:
                capture.enter_context(_profile(run.workdir / "profile"))
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = step_program(state, sharding.place_batch(batch, mesh, config.data.batch_size))
            is_time_to_save = is_first_process and 0 < 60 * config.checkpoint_minutes < time.monotonic() - saved_at
            asked = agreement.ask(max(notice.wish, Wish.SAVE if is_time_to_save else Wish.GO_ON))
            previous, flight = flight, _Flight(step, metrics, asked, batch, position)
            if previous:
                wish, in_a_row = fetch(previous)
            storage.check_for_errors(checkpoints)

        watchdog.beat(step, "waiting for the last checkpoint")
        progress.phase("stopped" if step < config.num_steps else "done")
        if wish == Wish.STOP:
            progress.message(f"asked to stop: saved at step {step}; the same command goes on from there")
        elif step > start.step:
            progress.message(report.closing_line(compile_seconds))
    return state


def _start(run: Run, checkpoints: ocp.CheckpointManager) -> Start:
    _require_same_corpora(run)
    start = checkpointing.restore_latest(checkpoints, run.workdir, run.abstract_state)
    if start is not None:
        return start
    state = init_state(run.model, run.optimizer, seed=run.config.seed, mesh=run.mesh)
    return Start(0, jax.block_until_ready(state), None, None)


def _require_same_corpora(run: Run) -> None:
    """Checks that all processes read the same: they load different rows of one order.

    Raises:
        RunError: they do not.
    """
    digests = [corpus.digest for corpus in (*run.train_corpora, *run.validation_corpora)]
    number = np.uint32(zlib.crc32(repr(digests).encode()))
    if len(np.unique(multihost_utils.process_allgather(number))) > 1:
        raise RunError(
            f"the processes read different corpora, this one those with the digests {', '.join(digests)}: give all of "
            "them the same files (the embedded corpus is another one in every version of Python)"
        )


def _compile(run: Run) -> _Programs:
    config, mesh = run.config, run.mesh
    before = time.perf_counter()
    step = lower_train_step(config, run.model, run.optimizer, mesh).compile()
    score = make_score_function(run.model, mesh, vocab_chunks=config.vocab_chunks)
    rows = config.data.batch_size // config.accumulation_steps
    batch = sharding.abstract_batch(mesh, rows, config.data.sequence_length, reset=config.data.reset)
    compiled_score = score.lower(run.abstract_state.params, batch).compile()
    return _Programs(step, compiled_score, Agreement(mesh), time.perf_counter() - before)


def _rows(run: Run) -> list[int]:
    return sharding.process_rows(run.mesh, run.config.data.batch_size)


def train_batches(run: Run) -> TrainBatches:
    """This process's rows of the batches of a run, from the first one on; to be closed."""
    data = run.config.data
    return TrainBatches(
        run.train_corpora,
        weights=data.weights,
        sequence_length=data.sequence_length,
        batch_size=data.batch_size,
        packing=data.packing,
        reset=data.reset,
        eos_id=run.tokenizer.eos_id,
        seed=run.config.seed,
        rows=_rows(run),
    )


def _validation_loss(run: Run, score: ScoreFunction, params: Any, keep_going: Callable[[], None]) -> float:
    """In nats per token; batches have the size of a micro-batch, so that validation fits where training fits.

    Args:
        run: whose validation split it is.
        score: from `make_score_function`.
        params: on the mesh.
        keep_going: is called before each batch.
    """
    data = run.config.data
    batch_size = data.batch_size // run.config.accumulation_steps

    def batches() -> Iterator[Batch]:
        for batch in evaluation_batches(
            run.validation_corpora,
            sequence_length=data.sequence_length,
            batch_size=batch_size,
            reset=data.reset,
            eos_id=run.tokenizer.eos_id,
            max_tokens=run.config.eval_tokens,
            rows=sharding.process_rows(run.mesh, batch_size),
        ):
            keep_going()
            yield batch

    return score_batches(score, params, batches(), run.mesh, batch_size=batch_size).loss


@contextlib.contextmanager
def _profile(directory: epath.Path) -> Iterator[None]:
    """Captures what happens inside; for a bucket in a local directory, which is copied."""
    with contextlib.ExitStack() as stack:
        local = directory
        if workdirs.is_remote(directory):
            local = epath.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.callback(workdirs.copy_files, local, directory)
        with jax.profiler.trace(local):
            yield


def _draw_loss_curve(run: Run) -> None:
    try:
        draw_loss_curve(
            read_metrics(run.workdir),
            title=f"{run.config.name}: {', '.join(run.config.model.mixers)}",
            path=run.workdir / "loss_curve.png",
        )
    # Whatever its libraries raise, a picture is not worth the run.
    except Exception as error:
        logging.error("loss_curve.png cannot be written: %s", error)


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
