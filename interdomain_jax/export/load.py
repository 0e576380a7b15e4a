"""Makes a model that was exported, or a Hugging Face Llama, a run that can be evaluated, and trained on.

python -m interdomain_jax.export.load --input=tiny.safetensors --config=configs/tiny.py --workdir=runs/loaded

The fields of the model come from the input; data, tokenizer, optimizer and how the model is computed from the config.
"""

from absl import app, flags
from ml_collections import config_flags

from interdomain_jax import cli
from interdomain_jax.export.runs import load_run

_INPUT = flags.DEFINE_string("input", None, "An exported file, or the directory of a Llama.", required=True)
_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, path.py[:mixers].")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run to make.", required=True)
flags.mark_flag_as_required("config")


def main(_: list[str]) -> None:
    """Makes a run from the exported model that the flags name."""
    with cli.exit_on_bad_input():
        summary = load_run(_INPUT.value, _CONFIG.value, _WORKDIR.value)
    print(f"{_WORKDIR.value}: a run of no steps yet, with {summary.parameters:,} parameters")


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
