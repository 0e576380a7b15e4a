"""Evaluates a checkpoint of a run, the latest unless told otherwise, on the validation split.

    python eval.py --workdir=runs/tiny
    python eval.py --workdir=runs/125m --lengths=4096,8192,14336 --corpora=data/books,data/code
    python eval.py --report=reports/tiny --runs=runs/tiny,runs/tiny_s4d

Prints a table, and writes `evaluations/perplexity.json` and `.png` into the run's directory, under another name if the
flags ask for something else. The devices may be laid out in any mesh, such as `--mesh.fsdp=8 --mesh.data=1`, whatever
the run had. `--report` gathers what was evaluated in many runs into the paper's tables and figures; it evaluates
nothing. `docs/evaluation.md` says what is measured.
"""

from typing import get_args

import jax
from absl import app, flags
from etils import epath
from ml_collections import config_flags

from interdomain_jax import cli, sharding
from interdomain_jax.evaluation import perplexity, report, table_files, tables
from interdomain_jax.preemption import Notice

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run to evaluate.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "latest", "'latest', 'best' (on validation), or the number of a step.")
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


def main(_: list[str]) -> None:
    if _REPORT.value is not None or _RUNS.value is not None:
        write_report()
        return
    notice = Notice()
    with cli.exit_on_bad_input():
        if _WORKDIR.value is None:
            raise ValueError("give --workdir, the directory of a run, or --report and --runs")
        cli.join_processes(epath.Path(_WORKDIR.value), notice)
        task = perplexity.prepare(
            _WORKDIR.value,
            _MESH.value,
            checkpoint=_CHECKPOINT.value,
            max_tokens=_MAX_TOKENS.value,
            mode=_MODE.value,
            stride=_STRIDE.value,
            lengths=cli.as_integers(_LENGTHS),
            corpora=_CORPORA.value,
            positions=cli.as_integers(_POSITIONS),
            piece_tokens=_PIECE_TOKENS.value,
            name=_NAME.value,
        )
    with cli.end_of_run(notice):
        record = perplexity.evaluate(task)
        if jax.process_index() == 0:
            report.write(epath.Path(_WORKDIR.value), record)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
