"""Evaluates the latest checkpoint of a run on the validation split.

    python eval.py --workdir=runs/tiny

Prints a table, and writes `eval.json` and `eval.png` beside the checkpoint.
"""

from pathlib import Path

from absl import app, flags

from interdomain_jax import cli
from interdomain_jax.evaluation import perplexity, report

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run to evaluate.", required=True)
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", None, "Tokens to score, from the start of the split; all of it if not given."
)


def main(_: list[str]) -> None:
    with cli.exit_on_bad_input():
        trained = perplexity.prepare(Path(_WORKDIR.value), max_tokens=_MAX_TOKENS.value)
    report.write(Path(_WORKDIR.value), perplexity.evaluate(trained))


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
