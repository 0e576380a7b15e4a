"""Evaluates a checkpoint of a run, the latest unless told otherwise, on the validation split.

    python eval.py --workdir=runs/tiny
    python eval.py --workdir=runs/tiny --recall=needle,phonebook

The first prints a table, and writes `eval.json` and `eval.png` beside the checkpoint; the second asks recall tasks
instead, and writes a record into `evaluations/`. The devices may be laid out in any mesh, such as `--mesh.fsdp=8
--mesh.data=1`, whatever the run had.
"""

from collections.abc import Sequence

import jax
from absl import app, flags
from etils import epath
from ml_collections import config_flags

from interdomain_jax import cli, sharding
from interdomain_jax.evaluation import perplexity, report
from interdomain_jax.evaluation.recall import evaluate as recall
from interdomain_jax.evaluation.records import write_record
from interdomain_jax.preemption import Notice

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run to evaluate.", required=True)
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
_MESH = config_flags.DEFINE_config_dict("mesh", sharding.mesh_config(), "The layout of the devices.")


def main(_: list[str]) -> None:
    notice = Notice()
    workdir = epath.Path(_WORKDIR.value)
    with cli.exit_on_bad_input():
        _check_flags()
        cli.join_processes(workdir, notice)
        if _RECALL.value is None:
            task = perplexity.prepare(workdir, _MESH.value, checkpoint=_CHECKPOINT.value, max_tokens=_MAX_TOKENS.value)
        else:
            recall_task = recall.prepare(
                workdir,
                _MESH.value,
                tasks=_RECALL.value,
                checkpoint=_CHECKPOINT.value,
                lengths=_whole_numbers("recall_lengths", _RECALL_LENGTHS.value),
                entries=_whole_numbers("recall_entries", _RECALL_ENTRIES.value),
                count=_RECALL_COUNT.value,
                seed=_RECALL_SEED.value,
                batch_size=_RECALL_BATCH_SIZE.value,
            )
    with cli.end_of_run(notice):
        if _RECALL.value is None:
            evaluation = perplexity.evaluate(task)
            if jax.process_index() == 0:
                report.write(workdir, evaluation)
        else:
            record = recall.evaluate(recall_task)
            if jax.process_index() == 0:
                print(f"{write_record(workdir, record)} is written")


def _check_flags() -> None:
    """Raises ValueError if a flag is given that would be of no use."""
    own = ("recall_lengths", "recall_entries", "recall_count", "recall_seed", "recall_batch_size")
    for name in own if _RECALL.value is None else ("max_tokens",):
        if flags.FLAGS[name].present:
            raise ValueError(f"--{name} {'goes only with' if name in own else 'is of no use with'} --recall")


def _whole_numbers(flag: str, values: Sequence[str] | None) -> list[int] | None:
    """The numbers of a list; raises ValueError if one of them is none."""
    try:
        return None if values is None else [int(value) for value in values]
    except ValueError:
        raise ValueError(f"--{flag}={','.join(values or ())}; it must be whole numbers with commas between") from None


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
