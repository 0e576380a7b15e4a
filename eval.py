"""Evaluates a checkpoint of a run, the latest unless told otherwise, on the validation split.

    python eval.py --workdir=runs/tiny

Prints a table, and writes `eval.json` and `eval.png` beside the checkpoint. The devices may be laid out in any mesh,
such as `--mesh.fsdp=8 --mesh.data=1`, whatever the run had.
"""

import jax
from absl import app, flags
from etils import epath
from ml_collections import config_flags

from interdomain_jax import cli, sharding
from interdomain_jax.evaluation import perplexity, report
from interdomain_jax.preemption import Notice

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run to evaluate.", required=True)
_CHECKPOINT = flags.DEFINE_string("checkpoint", "latest", "'latest', 'best' (on validation), or the number of a step.")
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", None, "Tokens to score, from the start of the split; all of it if not given."
)
_MESH = config_flags.DEFINE_config_dict("mesh", sharding.mesh_config(), "The layout of the devices.")


def main(_: list[str]) -> None:
    notice = Notice()
    with cli.exit_on_bad_input():
        cli.join_processes(epath.Path(_WORKDIR.value), notice)
        trained = perplexity.prepare(
            _WORKDIR.value, _MESH.value, checkpoint=_CHECKPOINT.value, max_tokens=_MAX_TOKENS.value
        )
    with cli.end_of_run(notice):
        evaluation = perplexity.evaluate(trained)
        if jax.process_index() == 0:
            report.write(epath.Path(_WORKDIR.value), evaluation)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
