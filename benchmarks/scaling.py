"""What a training step of every published model needs on pods, from the real compilers, with no accelerator.

    JAX_PLATFORMS=cpu python -m benchmarks.scaling [--rows='1_3b v5e'] [--output=docs/scaling.md]

Each row is a config compiled for a topology: memory, communication and the roofline. No time here is measured.
`make scaling` writes docs/scaling.md.
"""

import importlib
from pathlib import Path

from absl import app, flags
from rich.console import Console
from rich.progress import track

from benchmarks.topology_rows import ROWS, Row, config_of
from interdomain_jax.topologies import missing_compiler
from interdomain_jax.training.compile_only import OutOfMemoryError, compile_only
from interdomain_jax.training.step_report import StepReport

_COLUMNS = (
    "model",
    "mixer",
    "topology",
    "mesh",
    "context",
    "tokens / step",
    "accumulation",
    "memory, GB",
    "sent, GB",
    "between slices, GB",
    "roofline, s",
    "bound by",
    "MFU",
    "days",
)
HEADER = f"""# Scaling

Written by `make scaling`; nothing here was timed. Each row is the training step of a config, compiled by the device's
own compiler for a whole topology. "XLA" is the mixer's default form, "pallas_tpu" the kernels, whose traffic and
arithmetic are as they state them to the compiler. "Memory" is what one device holds at its peak, and of how much;
"sent" is what it sends in a step over the links between chips, and between slices over the data centre's network. The
roofline is the longest of the arithmetic, the memory traffic and the links' traffic, each at the maker's peak and all
at once: no step is shorter. "MFU" is the model flops utilisation that such a step would have; "days" is how long the
paper's tokens would take. The traffic between slices is not in the roofline.

| {" | ".join(_COLUMNS)} |
|{"---|" * len(_COLUMNS)}
"""

_OUTPUT = flags.DEFINE_string("output", "docs/scaling.md", "The file to write.")
_ROWS = flags.DEFINE_string("rows", "", "Words of the rows to compile, such as '1_3b v5e:16x16'; all if empty.")


def table_row(row: Row) -> str:
    """Compiles a row, and writes it as a line of the table."""
    published = importlib.import_module(f"configs.{row.config}").get_config()
    config = config_of(row)
    tokens = config.data.batch_size * config.data.sequence_length
    cells = [
        row.config,
        row.implementation or "XLA",
        f"{row.num_slices} x {row.topology}" if row.num_slices > 1 else row.topology,
        ", ".join(f"{axis} {size}" for axis, size in row.mesh.items()),
        f"{config.data.sequence_length:,}",
        f"{tokens:,}",
        f"{row.accumulation_steps}",
    ]
    try:
        report = compile_only(config, row.topology, row.num_slices)
    except OutOfMemoryError:
        cells += ["does not fit", *[""] * (len(_COLUMNS) - len(cells) - 1)]
    else:
        budget = published.num_steps * published.data.batch_size * published.data.sequence_length
        cells += _figures(report, budget)
    return "| " + " | ".join(cells) + " |"


def _figures(report: StepReport, budget: int) -> list[str]:
    memory = f"{report.memory_bytes / 1e9:,.1f} of {report.chip.memory_bytes / 1e9:,.1f}"
    sends = report.costs.collectives.get("send")
    return [
        memory if report.fits else f"does not fit: {memory}",
        f"{report.link_bytes / 1e9:,.2f}",
        f"{sends.bytes / 1e9:,.2f}" if sends else "",
        f"{report.step_seconds:.3f}",
        report.bound,
        f"{report.mfu_ceiling:.0%}",
        f"{budget / report.tokens_per_second / 86_400:.2f}",
    ]


def main(_: list[str]) -> None:
    wanted = [row for row in ROWS if all(word in row.name.split() for word in _ROWS.value.split())]
    rows = [row for row in wanted if not missing_compiler(row.topology.split(":")[0])]
    if not rows:
        reason = "no compiler for them is installed" if wanted else "none is called so"
        raise app.UsageError(f"--rows={_ROWS.value}: {reason}; rows: {', '.join(row.name for row in ROWS)}")
    lines = [table_row(row) for row in track(rows, "compiling", console=Console(stderr=True))]
    Path(_OUTPUT.value).write_text(HEADER + "\n".join(lines) + "\n")
    print(f"wrote {_OUTPUT.value}")


if __name__ == "__main__":
    app.run(main)
