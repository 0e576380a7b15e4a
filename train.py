"""Trains a language model.

    python train.py --config=configs/tiny.py --workdir=runs/tiny

Any field of the config can be given as a flag, such as `--config.num_steps=1000`. The same command
line goes on where an interrupted run stopped.
"""

from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

from interdomain_jax import cli
from interdomain_jax.training import loop

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, path.py[:mixers].")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; created if missing.", required=True)
flags.mark_flag_as_required("config")


def main(_: list[str]) -> None:
    with cli.exit_on_bad_input():
        run = loop.prepare(_CONFIG.value, Path(_WORKDIR.value))
    loop.train(run)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
