"""Evaluates a checkpoint of a run, the latest unless told otherwise, on the validation split.

    python eval.py --workdir=runs/tiny

Prints a table, and writes `eval.json` and `eval.png` beside the checkpoint. The devices may be laid out in any mesh,
such as `--mesh.fsdp=8 --mesh.data=1`, whatever the run had. `--suite=commonsense8` asks a suite's questions instead,
and writes `evaluations/commonsense8.json`.
"""

import jax
from absl import app, flags
from etils import epath
from ml_collections import config_flags
from rich.console import Console

from interdomain_jax import cli, sharding
from interdomain_jax.evaluation import perplexity, report, suites
from interdomain_jax.evaluation.records import write_record
from interdomain_jax.preemption import Notice

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run to evaluate.", required=True)
_CHECKPOINT = flags.DEFINE_string("checkpoint", "latest", "'latest', 'best' (on validation), or the number of a step.")
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", None, "Tokens to score, from the start of the split; all of it if not given."
)
_SUITE = flags.DEFINE_list("suite", [], f"Benchmark suites, with commas between them: {', '.join(suites.SUITES)}.")
_SUITE_DATA = flags.DEFINE_string(
    "suite_data", None, "Where `interdomain_jax.evaluation.suite_data` put the suites' data; the hub if not given."
)
_LIMIT = flags.DEFINE_integer("limit", None, "Questions of each benchmark of a suite, for a trial; all if not given.")
_MAX_LENGTH = flags.DEFINE_integer(
    "max_length", None, "Most tokens that the model reads for a suite's question; the training context if not given."
)
_BATCH_SIZE = flags.DEFINE_string(
    "batch_size", "auto", "Questions of a suite at a time; 'auto' for as many tokens as a training step reads."
)
_MESH = config_flags.DEFINE_config_dict("mesh", sharding.mesh_config(), "The layout of the devices.")


def main(_: list[str]) -> None:
    notice = Notice()
    workdir = epath.Path(_WORKDIR.value)
    with cli.exit_on_bad_input():
        cli.join_processes(workdir, notice)
        if _SUITE.value:
            tasks = [_prepare_suite(name) for name in _SUITE.value]
        else:
            trained = perplexity.prepare(
                workdir, _MESH.value, checkpoint=_CHECKPOINT.value, max_tokens=_MAX_TOKENS.value
            )
    with cli.end_of_run(notice):
        if _SUITE.value:
            for task in tasks:
                record = suites.evaluate(task)
                write_record(workdir, record)
                Console().print(suites.as_table(record))
            return
        evaluation = perplexity.evaluate(trained)
        if jax.process_index() == 0:
            report.write(workdir, evaluation)


def _prepare_suite(name: str) -> suites.Task:
    return suites.prepare(
        _WORKDIR.value,
        _MESH.value,
        suite=name,
        checkpoint=_CHECKPOINT.value,
        batch_size=_BATCH_SIZE.value,
        limit=_LIMIT.value,
        max_length=_MAX_LENGTH.value,
        data=_SUITE_DATA.value,
    )


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
