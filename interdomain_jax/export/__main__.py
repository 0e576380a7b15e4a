"""Writes the model of a run for others: one file, or the directory of a Hugging Face Llama.

python -m interdomain_jax.export --workdir=runs/tiny --output=tiny.safetensors
python -m interdomain_jax.export --workdir=runs/tiny_softmax --output=tiny_llama --layout=llama --checkpoint=best

The parameters must fit on one device; JAX_PLATFORMS=cpu makes that the memory of the machine.
"""

from absl import app, flags

from interdomain_jax import cli
from interdomain_jax.export.runs import LAYOUTS, export_run

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.", required=True)
_CHECKPOINT = flags.DEFINE_string("checkpoint", "latest", "'latest', 'best' (on validation), or the number of a step.")
_OUTPUT = flags.DEFINE_string("output", None, "The file to write; with --layout=llama, a directory.", required=True)
_LAYOUT = flags.DEFINE_enum("layout", "safetensors", LAYOUTS, "What to write; see docs/export.md.")


def main(_: list[str]) -> None:
    """Exports the checkpoint that the flags name."""
    with cli.exit_on_bad_input():
        summary = export_run(_WORKDIR.value, _OUTPUT.value, checkpoint=_CHECKPOINT.value, layout=_LAYOUT.value)
    print(f"{_OUTPUT.value}: {summary.parameters:,} parameters of step {summary.step}")


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
