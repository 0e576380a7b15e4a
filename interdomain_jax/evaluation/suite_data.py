"""Gets the data sets of suites from the Hugging Face hub, for machines that have no network.

python -m interdomain_jax.evaluation.suite_data --suite=commonsense8 --output=/data/suites

Then `eval.py --suite=commonsense8 --suite_data=/data/suites` needs no network. What is there already is not got again.
"""

from pathlib import Path

from absl import app, flags

from interdomain_jax import cli
from interdomain_jax.evaluation import suites
from interdomain_jax.workdir import require_writable

_SUITE = flags.DEFINE_list("suite", None, f"Names with commas between them: {', '.join(suites.SUITES)}.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "The directory to fill.", required=True)


def main(_: list[str]) -> None:
    """Writes the rows of the suites that the flags name."""
    with cli.exit_on_bad_input():
        require_writable("--output", Path(_OUTPUT.value).expanduser())
        names = [suites.suite_name(name) for name in _SUITE.value]
        for name in names:
            for source in suites.sources(name).values():
                suites.write_rows(name, source, _OUTPUT.value)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
