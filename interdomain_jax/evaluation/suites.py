"""Named suites of benchmarks, run by lm-evaluation-harness: the paper's tasks by the paper's protocol, zero-shot.

    python eval.py --workdir=runs/1_3b --suite=commonsense8,wikitext2

Data sets come from the Hugging Face hub, or from a directory that `suite_data` filled:

    <directory>/<name on the hub, / as -->/<config, or default>/<split>.jsonl
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import logging as python_logging
import math
import random
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from etils import epath

from interdomain_jax import strict_json
from interdomain_jax.evaluation.records import DIRECTORY, MEAN, Measurement, Record, make_record
from interdomain_jax.experiment import require_positive
from interdomain_jax.trained import Trained, find_trained
from interdomain_jax.workdir import is_remote

OUR_TASKS = Path(__file__).parent / "tasks"
"""Tasks in the harness's own format: those that it does not have."""

_ACCURACY = (("acc", "accuracy"),)
_NORMALISED = (("acc_norm", "accuracy_norm"), ("acc", "accuracy"))
_NOT_NORMALISED = _NORMALISED[::-1]
_CONTAINS = (("contains", "contains"),)
_SCORE = (("score", "score"),)


class Benchmark(NamedTuple):
    """A task of the harness.

    Attributes:
        harness_task: its name there.
        folder: of its YAML file among the harness's tasks; empty for `OUR_TASKS`.
        metrics: the harness's names with ours; the first counts in the mean of a suite.
    """

    harness_task: str
    folder: str
    metrics: tuple[tuple[str, str], ...]


_LONGBENCH = (
    "narrativeqa",
    "qasper",
    "multifieldqa_en",
    "hotpotqa",
    "2wikimqa",
    "musique",
    "gov_report",
    "qmsum",
    "multi_news",
    "trec",
    "triviaqa",
    "samsum",
    "lcc",
    "repobench-p",
)

BENCHMARKS = {
    "lambada": Benchmark("lambada_openai", "lambada", (("acc", "accuracy"), ("perplexity", "perplexity"))),
    "piqa": Benchmark("piqa", "piqa", _NOT_NORMALISED),
    "hellaswag": Benchmark("hellaswag", "hellaswag", _NORMALISED),
    "winogrande": Benchmark("winogrande", "winogrande", _ACCURACY),
    "arc_easy": Benchmark("arc_easy", "arc", _NOT_NORMALISED),
    "arc_challenge": Benchmark("arc_challenge", "arc", _NORMALISED),
    "siqa": Benchmark("social_iqa", "siqa", _ACCURACY),
    "boolq": Benchmark("boolq", "super_glue/boolq", _ACCURACY),
    "wikitext2": Benchmark(
        "wikitext",
        "wikitext",
        (
            ("word_perplexity", "perplexity"),
            ("byte_perplexity", "byte_perplexity"),
            ("bits_per_byte", "bits_per_byte"),
        ),
    ),
    **{name: Benchmark(f"based_{name}", "", _CONTAINS) for name in ("swde", "fda", "squad", "nq", "triviaqa", "drop")},
    **{f"longbench_{name}": Benchmark(f"longbench_{name}", "longbench", _SCORE) for name in _LONGBENCH},
}
"""By our names, which records bear."""

SUITES = {
    "commonsense8": ("lambada", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "siqa", "boolq"),
    "lambada": ("lambada",),
    "wikitext2": ("wikitext2",),
    "based-recall": ("swde", "fda", "squad", "nq", "triviaqa", "drop"),
    "longbench14": tuple(f"longbench_{name}" for name in _LONGBENCH),
}
ALIASES = {"commonsense": "commonsense8"}


class Source(NamedTuple):
    """The rows that a benchmark asks about.

    Attributes:
        dataset: on the hub.
        config: "default" where the benchmark names none.
        split: that it is scored on.
    """

    dataset: str
    config: str
    split: str

    def __str__(self) -> str:
        return f"{self.dataset} ({self.config}, {self.split})"

    def path(self, directory: epath.PathLike) -> Path:
        """Where the rows lie below a directory of local data."""
        return Path(directory).expanduser() / self.dataset.replace("/", "--") / self.config / f"{self.split}.jsonl"


class Task(NamedTuple):
    """A suite to run on a checkpoint, its inputs checked and its questions read; nothing is compiled yet.

    Attributes:
        trained: the checkpoint.
        suite: its name.
        benchmarks: the harness's tasks, by our names.
        sources: where their questions come from.
        batch_size: requests that the model takes at a time, a number or "auto"; no result depends on it.
        limit: questions of each benchmark, from its first on; None for all.
        max_length, prefix_token: as `harness.InterdomainLM` takes them.
        seed: of every random choice.
        data: the directory of local data; None where it comes from the hub.
    """

    trained: Trained
    suite: str
    benchmarks: dict[str, Any]
    sources: dict[str, Source]
    batch_size: int | str
    limit: int | None
    max_length: int | None
    prefix_token: int | None
    seed: int
    data: str | None


def prepare(
    workdir: epath.PathLike,
    mesh_sizes: Mapping[str, int],
    *,
    suite: str,
    checkpoint: str = "latest",
    batch_size: int | str = "auto",
    limit: int | None = None,
    max_length: int | None = None,
    prefix_token: int | None = None,
    seed: int = 0,
    data: epath.PathLike | None = None,
) -> Task:
    """Checks that there is a checkpoint, and reads a suite's questions.

    Args:
        workdir: of the run.
        mesh_sizes: as `sharding.make_mesh` takes them; the run may have had others.
        suite: a name in `SUITES` or `ALIASES`.
        checkpoint: "latest", "best" or the number of a step, as `checkpoints.find_step` takes it.
        batch_size: requests at a time, or "auto" for as many tokens as a training step reads.
        limit: questions of each benchmark, for a trial; None for all.
        max_length: most tokens that the model reads for a question, and its answer; None for the training context.
        prefix_token: behind which every text begins, an id; None for that of the end of a document.
        seed: of every random choice.
        data: the directory of local data; None for the hub.

    Raises:
        FileNotFoundError: there is no run, no checkpoint, or a data set cannot be had.
        ValueError: an argument is out of range, the harness is not installed, or there are several processes.
    """
    name = suite_name(suite)
    if limit is not None:
        require_positive("limit", limit)
    if jax.process_count() > 1:
        raise ValueError(f"suite {name} runs in one process, and this run has {jax.process_count()} of them")
    found = sources(name)
    if data is not None:
        for source in found.values():
            path = source.path(data)
            if not path.is_file():
                raise FileNotFoundError(f"{_missing(name, source)}: {path} is not there; {_remedy(name, data)}")
    trained = find_trained(workdir, mesh_sizes, checkpoint)
    # Without parameters it can do no more than check its arguments.
    length = _model(trained, None, batch_size, max_length, prefix_token).max_length
    benchmarks = {each: load_benchmark(name, each, source, data) for each, source in found.items()}
    for each, benchmark in benchmarks.items():
        answer = (benchmark.config.generation_kwargs or {}).get("max_gen_toks", 0)
        if answer >= length:
            raise ValueError(
                f"benchmark {each} asks for answers of {answer} tokens, and max_length is {length}; give one that "
                "leaves room for the question"
            )
    return Task(
        trained=trained,
        suite=name,
        benchmarks=benchmarks,
        sources=found,
        batch_size=batch_size,
        limit=limit,
        max_length=max_length,
        prefix_token=prefix_token,
        seed=seed,
        data=None if data is None else str(data),
    )


def suite_name(name: str) -> str:
    """The suite that a name or alias means.

    Raises:
        ValueError: there is none.
    """
    known = ALIASES.get(name, name)
    if known not in SUITES:
        raise ValueError(f"suite {name!r} is unknown; known: {', '.join([*SUITES, *ALIASES])}")
    return known


def sources(suite: str) -> dict[str, Source]:
    """Where the questions of a suite's benchmarks come from, as the harness's YAML files say.

    Raises:
        ValueError: the harness is not installed.
    """
    index = _task_manager(SUITES[suite]).task_index
    configs = {name: index[BENCHMARKS[name].harness_task].cfg for name in SUITES[suite]}
    return {
        name: Source(
            config["dataset_path"],
            config.get("dataset_name") or "default",
            config.get("test_split") or config["validation_split"],
        )
        for name, config in configs.items()
    }


def load_benchmark(suite: str, name: str, source: Source, data: epath.PathLike | None) -> Any:
    """The harness's task, with its questions.

    Args:
        suite: for messages.
        name: of the benchmark, ours.
        source: of its questions.
        data: the directory of local data; None for the hub.

    Raises:
        FileNotFoundError: the hub does not give the data set.
        ValueError: the local file holds something else, or a package is missing.
    """
    task = BENCHMARKS[name].harness_task
    # Zero-shot: of the splits, only the one that is asked about is read.
    overrides: dict[str, Any] = {"task": task, "num_fewshot": 0, "fewshot_config": {"samples": []}}
    if data is not None:
        overrides |= {
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {source.split: str(source.path(data))}},
        }
    try:
        with _hushed():
            # The harness overrides fields of its tasks in groups alone.
            loaded = _task_manager([name]).load([{"group": suite, "task": [overrides]}])
    except ImportError as error:
        message = f"benchmark {name} needs more packages: pip install 'interdomain-jax[harness]' ({error})"
        raise ValueError(message) from error
    # What the hub, the files and the harness raise comes from many libraries.
    except Exception as error:
        if data is None:
            raise FileNotFoundError(_hub_lacks(suite, source, error)) from error
        message = f"{source.path(data)} does not hold rows of {source}: {_reason(error)}"
        raise ValueError(message) from error
    return loaded["tasks"][task]


def write_rows(suite: str, source: Source, directory: str) -> None:
    """Writes the rows of a source as JSON lines, unless they are there.

    Raises:
        FileNotFoundError: the hub does not give them.
    """
    import datasets

    path = source.path(directory)
    if path.exists():
        return
    config = None if source.config == "default" else source.config
    try:
        rows = datasets.load_dataset(source.dataset, config, split=source.split)
    # The hub and what is below it raise errors of many libraries.
    except Exception as error:
        raise FileNotFoundError(_hub_lacks(suite, source, error, directory)) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    rows.to_json(temporary, force_ascii=False)
    temporary.replace(path)
    logging.info("%s: %d rows", path, len(rows))


def evaluate(task: Task) -> Record:
    """Restores the parameters and asks the questions; what an interrupted run has answered is not asked again."""
    from lm_eval import evaluate as ask

    trained = task.trained
    model = _model(trained, trained.restore_params(), task.batch_size, task.max_length, task.prefix_token)
    settings = {
        "suite": task.suite,
        "benchmarks": {name: _description(task, name) for name in task.benchmarks},
        "num_fewshot": 0,
        "prefix_token": model.prefix_token,
        "max_length": model.max_length,
        "limit": task.limit,
        "seed": task.seed,
        "data": task.data or "hub",
        "harness": importlib.metadata.version("lm-eval"),
    }
    measurements: list[Measurement] = []
    headlines = []
    with _answers_kept(model, trained) as answering:
        for number, (name, benchmark) in enumerate(task.benchmarks.items(), 1):
            logging.info("%s, %d of %d: %s, %s", task.suite, number, len(task.benchmarks), name, task.sources[name])
            random.seed(task.seed)
            np.random.seed(task.seed)
            benchmark.set_fewshot_seed(task.seed)
            # No bootstrap: it would fork this process, and JAX has threads. `measure` has the errors in closed form.
            results = ask(
                answering,
                {"tasks": {benchmark.config.task: benchmark}},
                limit=task.limit,
                bootstrap_iters=0,
            )
            found = measure(name, results)
            measurements += found
            headlines.append(found[0])
            logging.info("%s: %s", name, ", ".join(f"{each.metric} {each.value:.4f}" for each in found))
    if len(headlines) > 1:
        measurements.append(mean_of(task.suite, headlines))
    return make_record("suite", task.suite, trained, settings, measurements)


def measure(name: str, results: Mapping[str, Any]) -> list[Measurement]:
    """What the harness found of a benchmark, in our terms; its headline first.

    Args:
        name: of the benchmark, ours.
        results: of `lm_eval.evaluate`, with the samples.

    Returns:
        A measurement for each of its metrics. LAMBADA's bits per byte, which the harness does not give, are the bits
        of all last words over their bytes in UTF-8, each with the space before it.
    """
    benchmark = BENCHMARKS[name]
    samples = results["samples"][benchmark.harness_task]
    values = results["results"][benchmark.harness_task]
    found = []
    for metric, ours in benchmark.metrics:
        value = float(values[f"{metric},none"])
        error = _standard_error([sample[metric] for sample in samples])
        if metric == "perplexity" and error is not None:
            # Samples have log-likelihoods; d exp(x) = exp(x) dx.
            error *= value
        found.append(Measurement(name, ours, value, len(samples), error=error))
    if name == "lambada":
        nats = -sum(sample["perplexity"] for sample in samples)
        size = sum(len(sample["arguments"][0][1].encode()) for sample in samples)
        found.append(Measurement(name, "bits_per_byte", nats / math.log(2) / size, len(samples)))
    return found


def mean_of(suite: str, headlines: Sequence[Measurement]) -> Measurement:
    """The mean over benchmarks, each counting the same, with its standard error as that of independent ones."""
    values = [each.value for each in headlines if each.value is not None]
    errors = [each.error for each in headlines if each.error is not None]
    error = math.hypot(*errors) / len(errors) if len(errors) == len(headlines) else None
    samples = sum(each.samples for each in headlines)
    return Measurement(suite, MEAN, statistics.fmean(values), samples, error=error)


def _hub_lacks(suite: str, source: Source, error: Exception, directory: epath.PathLike = "DIRECTORY") -> str:
    return (
        f"{_missing(suite, source)}, and the Hugging Face hub does not give it ({_reason(error)}); "
        f"{_remedy(suite, directory)}"
    )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _missing(suite: str, source: Source) -> str:
    return f"suite {suite} needs the data set {source}"


def _remedy(suite: str, directory: epath.PathLike) -> str:
    return (
        "where there is a network, this command gets it for --suite_data: "
        f"python -m interdomain_jax.evaluation.suite_data --suite={suite} --output={directory}"
    )


def _task_manager(names: Sequence[str]) -> Any:
    """The harness's tasks in these benchmarks' folders alone: to read all of its files takes ten seconds.

    Raises:
        ValueError: the harness is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm-evaluation-harness is not installed: pip install 'interdomain-jax[harness]'")
    from lm_eval import tasks

    root = Path(tasks.__file__).parent
    folders = {BENCHMARKS[name].folder for name in names}
    return tasks.TaskManager(
        include_defaults=False, include_path=[root / folder if folder else OUR_TASKS for folder in sorted(folders)]
    )


def _model(
    trained: Trained, params: Any, batch_size: int | str, max_length: int | None, prefix_token: int | None
) -> Any:
    from interdomain_jax.evaluation.harness import InterdomainLM

    return InterdomainLM.of(trained, params, batch_size=batch_size, max_length=max_length, prefix_token=prefix_token)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Without the harness's remarks on its own tasks, and one on a package that would count edits in another way."""
    logger = python_logging.getLogger("lm_eval.api.task")
    level = logger.level
    logger.setLevel(python_logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


@contextlib.contextmanager
def _answers_kept(model: Any, trained: Trained) -> Iterator[Any]:
    """The model, its answers kept in the run's directory; those that are there already are not asked for.

    In a bucket nothing is kept: a database needs a file system.
    """
    from lm_eval.api.model import CachingLM

    if is_remote(trained.workdir):
        logging.warning("the run is in a bucket: a suite that is interrupted begins anew")
        yield model
        return
    digest = hashlib.sha256(strict_json.dumps(model.settings).encode()).hexdigest()[:16]
    path = Path(trained.workdir) / DIRECTORY / "cache" / f"step_{trained.step}-{digest}.db"
    kept = CachingLM(model, str(path))
    with contextlib.closing(kept.dbdict):
        yield kept


def _description(task: Task, name: str) -> dict[str, Any]:
    source, benchmark = task.sources[name], task.benchmarks[name]
    return {
        "harness_task": BENCHMARKS[name].harness_task,
        "version": benchmark.VERSION,
        "headline": BENCHMARKS[name].metrics[0][1],
        **source._asdict(),
    }


def _standard_error(values: Sequence[Any]) -> float | None:
    """Of the mean; None for one value, and for weighted ones, which the harness gives as pairs."""
    if len(values) < 2 or isinstance(values[0], tuple):
        return None
    return statistics.stdev(map(float, values)) / math.sqrt(len(values))
