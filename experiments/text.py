"""The paper's claims at a size for two CPU cores, on the text of Python's standard library.

    python -m experiments.text
    python -m experiments.text --experiments=cube --seeds=42
    python -m experiments.text --report_only

Trains and evaluates whatever the results do not have yet, several runs at a time, and writes the report after each:
the mechanism cube, the two reads, perplexity by context length and by compute, and what heads remember. Five hours
on two cores, in pieces: the same command goes on where it was interrupted. `docs/experiments.md` says what came out.
"""

import ast
import operator
import os
from typing import Any

from absl import app, flags
from etils import epath
from rich.console import Console

from configs import small
from experiments import text_lags, text_report, text_runs
from experiments.text_runs import EXPERIMENTS, WITH_ONE_SEED, TextRun
from interdomain_jax import cli
from interdomain_jax import workdir as workdirs
from interdomain_jax.errors import RunError

_EXPERIMENTS = flags.DEFINE_list("experiments", [*EXPERIMENTS], f"Which runs to make, of {', '.join(EXPERIMENTS)}.")
_SEEDS = flags.DEFINE_list("seeds", ["42", "43", "44"], f"The first one alone for {' and '.join(WITH_ONE_SEED)}.")
_FIELDS = flags.DEFINE_multi_string("field", [], "A field of every config, for a trial: --field=num_steps=10.")
_JOBS = flags.DEFINE_integer("jobs", os.cpu_count() or 1, "Runs at a time.", lower_bound=1)
_WORKDIRS = flags.DEFINE_string("workdirs", "runs/text", "Where the runs have their checkpoints and logs.")
_OUTPUT = flags.DEFINE_string("output", "experiments/results/text", "Directory of the results.")
_REPORT_ONLY = flags.DEFINE_bool("report_only", False, "Makes no run, only the report from the results that are there.")


def planned_runs() -> list[TextRun]:
    """The runs that the flags ask for.

    Raises:
        ValueError: an experiment, a seed or a field that is none.
    """
    if not _EXPERIMENTS.value or not {*_EXPERIMENTS.value} <= {*EXPERIMENTS}:
        raise ValueError(f"--experiments={','.join(_EXPERIMENTS.value)}; they must be some of {', '.join(EXPERIMENTS)}")
    seeds = cli.as_integers(_SEEDS) or []
    if not seeds:
        raise ValueError("--seeds is empty; it must name at least one")
    fields = dict(map(_field, _FIELDS.value))
    runs = [
        run._replace(fields={**run.fields, **fields})
        for name in _EXPERIMENTS.value
        for run in EXPERIMENTS[name](seeds[:1] if name in WITH_ONE_SEED else seeds)
    ]
    for run in runs:
        try:
            _ = run.config
        except TypeError as error:
            raise ValueError(f"--field: {error.args[0]}") from error
    return runs


def _field(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--field is {text!r}; it must be a name, '=' and a value, such as num_steps=10")
    try:
        operator.attrgetter(name)(small.get_config())
    except AttributeError as error:
        raise ValueError(f"--field is {text!r}; configs/small.py has no field {name!r}") from error
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def main(_: list[str]) -> None:
    with cli.exit_on_bad_input():
        runs = planned_runs()
        output, below = epath.Path(_OUTPUT.value).absolute(), epath.Path(_WORKDIRS.value).absolute()
        workdirs.require_writable("--output", output)
        workdirs.require_writable("--workdirs", below)
    console = Console(stderr=True)
    if not _REPORT_ONLY.value:
        missing = [run for run in runs if not text_runs.is_done(run, output)]
        console.print(f"{len(runs) - len(missing)} of {len(runs)} runs are done")
        try:
            for run in text_runs.carry_out(missing, workdirs=below, results=output, jobs=_JOBS.value):
                console.print(f"{run.name} is done")
                if run.name == text_lags.RUN:
                    text_lags.write_kernels(below / run.name, output)
                text_report.write(output)
        except RunError as error:
            raise SystemExit(f"error: {error}") from None
    text_report.write(output)
    console.print(f"wrote {output / text_report.MARKDOWN}")


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
