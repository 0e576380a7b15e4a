"""Evaluates a checkpoint of a run, the latest unless told otherwise.

    python eval.py --workdir=runs/tiny
    python eval.py --workdir=runs/125m --lengths=4096,8192,14336 --corpora=data/books,data/code
    python eval.py --workdir=runs/125m --suite=commonsense8,wikitext2
    python eval.py --workdir=runs/125m --recall=needle,phonebook
    python eval.py --report=reports/125m --runs=runs/125m,runs/125m_s4d

measure perplexity, the benchmarks of a suite, and recall. Each prints a table, and writes a record of its own into
`evaluations/` in the run's directory. `--report` evaluates nothing: it gathers the records of many runs into the
paper's tables and figures. The devices may be laid out in any mesh, such as `--mesh.fsdp=8 --mesh.data=1`, whatever the
run had. `docs/evaluation.md` says what is measured.
"""

import functools
from collections.abc import Callable
from typing import get_args

import jax
from absl import app, flags
from etils import epath
from ml_collections import config_flags
from rich.console import Console

from interdomain_jax import cli, sharding
from interdomain_jax.evaluation import perplexity, perplexity_report, suites, table_files, tables
from interdomain_jax.evaluation.recall import evaluate as recall
from interdomain_jax.evaluation.record_table import as_table
from interdomain_jax.evaluation.records import Record, write_record
from interdomain_jax.preemption import Notice

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run to evaluate.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "latest", "'latest', 'best' (on validation), or the number of a step.")
_MESH = config_flags.DEFINE_config_dict("mesh", sharding.mesh_config(), "The layout of the devices.")

_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", None, "Tokens to score, from the start of each split; all of it if not given."
)
_MODE = flags.DEFINE_string(
    "mode", "windows", f"What each token is predicted from: one of {', '.join(get_args(perplexity.Mode))}."
)
_STRIDE = flags.DEFINE_integer("stride", None, "Tokens that each window of the mode 'strided' scores.")
_LENGTHS = flags.DEFINE_list("lengths", None, "Context lengths; 1, 2 and 4 times that of training if not given.")
_CORPORA = flags.DEFINE_list("corpora", None, "Corpora, as data.corpora names them; those of the run if not given.")
_POSITIONS = flags.DEFINE_list(
    "positions", None, "Ends of the buckets of the loss by position; powers of two if not given."
)
_PIECE_TOKENS = flags.DEFINE_integer(
    "piece_tokens", None, "Most tokens of a context that are read at once; the micro-batch of training if not given."
)
_NAME = flags.DEFINE_string("name", None, "Of the record; one that tells what was asked for if not given.")

_SUITE = flags.DEFINE_list("suite", None, f"Benchmark suites, of {', '.join(suites.SUITES)}.")
_SUITE_DATA = flags.DEFINE_string(
    "suite_data", None, "Where `interdomain_jax.evaluation.suite_data` put the suites' data; the hub if not given."
)
_LIMIT = flags.DEFINE_integer("limit", None, "Questions of each benchmark of a suite, for a trial; all if not given.")
_MAX_LENGTH = flags.DEFINE_integer(
    "max_length", None, "Most tokens that the model reads for a suite's question; the training context if not given."
)
_PREFIX_TOKEN = flags.DEFINE_integer(
    "prefix_token", None, "Id of the token before every text of a suite; that of the end of a document if not given."
)

_RECALL = flags.DEFINE_list("recall", None, f"Recall tasks, of {', '.join(recall.TASKS)}.")
_RECALL_LENGTHS = flags.DEFINE_list(
    "recall_lengths", None, f"Lengths of {', '.join(recall.TASKS_OF_ANY_LENGTH)}; the usual ones if not given."
)
_RECALL_ENTRIES = flags.DEFINE_list("recall_entries", None, "Entries of the phonebooks; the paper's if not given.")
_RECALL_COUNT = flags.DEFINE_integer("recall_count", recall.COUNT, "Questions at each size.")

_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size",
    None,
    "Questions of --suite or --recall at a time: more need more memory, and change nothing else.",
    lower_bound=1,
)
_SEED = flags.DEFINE_integer("seed", 0, "Of all that --suite and --recall draw.", lower_bound=0)

_REPORT = flags.DEFINE_string("report", None, "Directory for the tables and figures of --runs, beside the paper's.")
_RUNS = flags.DEFINE_list("runs", None, "Directories of the runs that --report gathers, with commas between them.")

_PERPLEXITY = "perplexity"
_FLAGS = {
    _PERPLEXITY: (_MAX_TOKENS, _MODE, _STRIDE, _LENGTHS, _CORPORA, _POSITIONS, _PIECE_TOKENS, _NAME),
    "suite": (_SUITE, _SUITE_DATA, _LIMIT, _MAX_LENGTH, _PREFIX_TOKEN, _BATCH_SIZE, _SEED),
    "recall": (_RECALL, _RECALL_LENGTHS, _RECALL_ENTRIES, _RECALL_COUNT, _BATCH_SIZE, _SEED),
    "report": (_REPORT, _RUNS),
}
"""What is there to do, and the flags that only it takes."""


def chosen() -> str:
    """The one of `_FLAGS` that the flags ask for.

    Raises:
        ValueError: flags that do not go together.
    """
    kinds = [flag.name for flag in (_SUITE, _RECALL, _REPORT) if flag.value is not None] or [_PERPLEXITY]
    if len(kinds) > 1:
        raise ValueError(f"--{kinds[0]} and --{kinds[1]} are each done by itself; give one of them")
    (kind,) = kinds
    takers: dict[str, list[str]] = {}
    for taker, own in _FLAGS.items():
        for flag in own:
            if flag.present:
                takers.setdefault(flag.name, []).append(taker)
    for name, those in takers.items():
        if kind not in those:
            needed = " or ".join(each if each == _PERPLEXITY else f"--{each}" for each in those)
            remedy = "give that too" if kind == _PERPLEXITY else f"leave it out, or --{kind}"
            raise ValueError(f"--{name} is for {needed}; {remedy}")
    if (_WORKDIR.value is None) != (kind == "report"):
        raise ValueError("give one of --workdir, a run to evaluate, and --report with --runs, those to gather")
    return kind


def write_report() -> None:
    """Gathers the runs of the flags into the report's directory."""
    with cli.exit_on_bad_input():
        if _RUNS.value is None:
            raise ValueError("--report needs --runs, the directories of the runs to gather")
        gathered = tables.gather(_RUNS.value)
        directory = table_files.prepare(_REPORT.value)
    table_files.write(directory, gathered)
    print(f"wrote {directory / 'report.md'}")


def prepare(kind: str) -> list[Callable[[], Record]]:
    """Checks what the flags ask for, and returns the evaluations."""
    place = dict(workdir=_WORKDIR.value, mesh_sizes=_MESH.value, checkpoint=_CHECKPOINT.value)
    match kind:
        case "suite":
            prepared = [
                suites.prepare(
                    **place,
                    suite=name,
                    batch_size=_BATCH_SIZE.value or "auto",
                    limit=_LIMIT.value,
                    max_length=_MAX_LENGTH.value,
                    prefix_token=_PREFIX_TOKEN.value,
                    seed=_SEED.value,
                    data=_SUITE_DATA.value,
                )
                for name in _SUITE.value or ()
            ]
            return [functools.partial(suites.evaluate, task) for task in prepared]
        case "recall":
            questions = recall.prepare(
                **place,
                tasks=_RECALL.value or (),
                lengths=cli.as_integers(_RECALL_LENGTHS),
                entries=cli.as_integers(_RECALL_ENTRIES),
                count=_RECALL_COUNT.value,
                seed=_SEED.value,
                batch_size=_BATCH_SIZE.value or recall.BATCH_SIZE,
            )
            return [functools.partial(recall.evaluate, questions)]
        case _:
            texts = perplexity.prepare(
                **place,
                max_tokens=_MAX_TOKENS.value,
                mode=_MODE.value,
                stride=_STRIDE.value,
                lengths=cli.as_integers(_LENGTHS),
                corpora=_CORPORA.value,
                positions=cli.as_integers(_POSITIONS),
                piece_tokens=_PIECE_TOKENS.value,
                name=_NAME.value,
            )
            return [functools.partial(perplexity.evaluate, texts)]


def main(_: list[str]) -> None:
    notice = Notice()
    with cli.exit_on_bad_input():
        kind = chosen()
    if kind == "report":
        write_report()
        return
    with cli.exit_on_bad_input():
        cli.join_processes(epath.Path(_WORKDIR.value), notice)
        evaluations = prepare(kind)
    with cli.end_of_run(notice):
        for evaluate in evaluations:
            record = evaluate()
            if jax.process_index() > 0:
                continue
            path = write_record(_WORKDIR.value, record)
            if kind == _PERPLEXITY:
                perplexity_report.draw(record, path.with_suffix(".png"))
            Console().print(perplexity_report.as_table(record) if kind == _PERPLEXITY else as_table(record))


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
