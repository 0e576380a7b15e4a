"""Evaluates a checkpoint of a run, the latest unless told otherwise, on the validation split.

    python eval.py --workdir=runs/tiny
    python eval.py --workdir=runs/tiny --recall=needle,phonebook
    python eval.py --report=reports/tiny --runs=runs/tiny,runs/tiny_s4d

Prints a table, and writes `eval.json` and `eval.png` beside the checkpoint; with `--recall` it asks recall tasks
instead, and writes a record into `evaluations/`. The devices may be laid out in any mesh, such as `--mesh.fsdp=8
--mesh.data=1`, whatever the run had. `--report` gathers what was evaluated in many runs into the paper's tables and
figures; it evaluates nothing.
"""

from collections.abc import Sequence

import jax
from absl import app, flags
from etils import epath
from ml_collections import config_flags

from interdomain_jax import cli, sharding
from interdomain_jax.evaluation import perplexity, report, table_files, tables
from interdomain_jax.evaluation.recall import evaluate as recall
from interdomain_jax.evaluation.records import write_record
from interdomain_jax.preemption import Notice

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run to evaluate.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "latest", "'latest', 'best' (on validation), or the number of a step.")
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", None, "Tokens to score, from the start of the split; all of it if not given."
)
_RECALL = flags.DEFINE_list("recall", None, f"Recall tasks, of {', '.join(recall.TASKS)}.")
_RECALL_LENGTHS = flags.DEFINE_list(
    "recall_lengths", None, f"Lengths of {', '.join(recall.TASKS_OF_ANY_LENGTH)}; the usual ones if not given."
)
_RECALL_ENTRIES = flags.DEFINE_list("recall_entries", None, "Entries of the phonebooks; the paper's if not given.")
_RECALL_COUNT = flags.DEFINE_integer("recall_count", recall.COUNT, "Questions at each size.")
_RECALL_SEED = flags.DEFINE_integer("recall_seed", 0, "Of the questions.")
_RECALL_BATCH_SIZE = flags.DEFINE_integer("recall_batch_size", 16, "Questions at a time; more need more memory.")
_REPORT = flags.DEFINE_string(
    "report", None, "Directory for the tables and figures of --runs, beside the paper's; evaluates nothing."
)
_RUNS = flags.DEFINE_list("runs", None, "Directories of the runs that --report gathers, with commas between them.")
_MESH = config_flags.DEFINE_config_dict("mesh", sharding.mesh_config(), "The layout of the devices.")


def write_report() -> None:
    """Gathers the runs of the flags into the report's directory."""
    with cli.exit_on_bad_input():
        if _WORKDIR.value is not None:
            raise ValueError(
                "give one of --workdir, a run to evaluate, and --report, to gather --runs that were evaluated"
            )
        if _REPORT.value is None or _RUNS.value is None:
            raise ValueError("--report, a directory, and --runs go together; give both or none")
        gathered = tables.gather(_RUNS.value)
        directory = table_files.prepare(_REPORT.value)
    table_files.write(directory, gathered)
    print(f"wrote {directory / 'report.md'}")


def evaluate_recall(notice: Notice) -> None:
    """Asks the recall tasks of the flags, and writes the record."""
    with cli.exit_on_bad_input():
        if _MAX_TOKENS.value is not None:
            raise ValueError("--max_tokens is of no use with --recall")
        task = recall.prepare(
            _WORKDIR.value,
            _MESH.value,
            tasks=_RECALL.value or (),
            checkpoint=_CHECKPOINT.value,
            lengths=_whole_numbers(_RECALL_LENGTHS),
            entries=_whole_numbers(_RECALL_ENTRIES),
            count=_RECALL_COUNT.value,
            seed=_RECALL_SEED.value,
            batch_size=_RECALL_BATCH_SIZE.value,
        )
    with cli.end_of_run(notice):
        record = recall.evaluate(task)
        if jax.process_index() == 0:
            print(f"wrote {write_record(_WORKDIR.value, record)}")


def _whole_numbers(flag: flags.FlagHolder) -> list[int] | None:
    """The numbers of a list; raises ValueError if one of them is none."""
    values: Sequence[str] | None = flag.value
    try:
        return None if values is None else [int(value) for value in values]
    except ValueError:
        raise ValueError(f"--{flag.name}={','.join(values or ())}; it must be whole numbers with commas") from None


def main(_: list[str]) -> None:
    if _REPORT.value is not None or _RUNS.value is not None:
        write_report()
        return
    notice = Notice()
    with cli.exit_on_bad_input():
        if _WORKDIR.value is None:
            raise ValueError("give --workdir, the directory of a run, or --report and --runs")
        own = (_RECALL_LENGTHS, _RECALL_ENTRIES, _RECALL_COUNT, _RECALL_SEED, _RECALL_BATCH_SIZE)
        for flag in own if _RECALL.value is None else ():
            if flag.present:
                raise ValueError(f"--{flag.name} is of no use without --recall")
        cli.join_processes(epath.Path(_WORKDIR.value), notice)
    if _RECALL.value is not None:
        evaluate_recall(notice)
        return
    with cli.exit_on_bad_input():
        trained = perplexity.prepare(
            _WORKDIR.value, _MESH.value, checkpoint=_CHECKPOINT.value, max_tokens=_MAX_TOKENS.value
        )
    with cli.end_of_run(notice):
        evaluation = perplexity.evaluate(trained)
        if jax.process_index() == 0:
            report.write(epath.Path(_WORKDIR.value), evaluation)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
