"""What a compiled training step needs and at best takes, by device: memory, communication, the roofline."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from interdomain_jax.compiled_program import ProgramCosts, program_costs
from interdomain_jax.hardware import Chip

Resource = Literal["arithmetic", "memory", "links"]


class StepMemory(NamedTuple):
    """Bytes of one device, by what they hold.

    Attributes:
        parameters: the model's.
        optimizer: its moments and counts.
        batch: the tokens of the step.
        padding: what the compiler's layouts add to the arguments above.
        temporaries: activations, gradients and buffers, at their peak.
        outputs: results that do not take the place of an argument.
        code: the program itself.
    """

    parameters: int
    optimizer: int
    batch: int
    padding: int
    temporaries: int
    outputs: int
    code: int


class StepReport(NamedTuple):
    """A training step, compiled for a mesh of one kind of chip.

    Attributes:
        mesh: sizes of the mesh's axes.
        chip: what each device can do.
        memory: of one device.
        costs: what one device does in a step.
        tokens: in a step, over all devices.
        model_flops: of a step, over all devices, by the model's formula.
    """

    mesh: Mapping[str, int]
    chip: Chip
    num_devices: int
    memory: StepMemory
    costs: ProgramCosts
    tokens: int
    model_flops: float

    @property
    def memory_bytes(self) -> int:
        """What the step takes of one device's memory at its peak."""
        return sum(self.memory)

    @property
    def fits(self) -> bool:
        """Whether the chip has that much memory."""
        return self.memory_bytes <= self.chip.memory_bytes

    @property
    def link_bytes(self) -> int:
        """What one device sends over the chips' links; what goes to another slice takes another way."""
        return sum(costs.bytes for kind, costs in self.costs.collectives.items() if kind != "send")

    @property
    def seconds(self) -> dict[Resource, float]:
        """How long a step keeps each resource busy, were it used at its peak."""
        return {
            "arithmetic": self.costs.flops / self.chip.flops,
            "memory": self.costs.bytes_accessed / self.chip.memory_bandwidth,
            "links": self.link_bytes / self.chip.link_bandwidth,
        }

    @property
    def bound(self) -> Resource:
        """The resource that is busy longest."""
        return max(self.seconds, key=lambda resource: self.seconds[resource])

    @property
    def step_seconds(self) -> float:
        """The roofline: no step is shorter, as long as everything overlaps with everything else."""
        return max(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Over all devices, at the roofline."""
        return self.tokens / self.step_seconds

    @property
    def mfu_ceiling(self) -> float:
        """Model flops utilisation at the roofline: what recomputation and the other resources leave of it."""
        return self.model_flops / self.num_devices / self.chip.flops / self.step_seconds


def step_report(
    compiled: jax.stages.Compiled, *, mesh: jax.sharding.Mesh, chip: Chip, tokens: int, model_flops: float
) -> StepReport:
    """Reads a report off a compiled training step, which need not be able to run here.

    Args:
        compiled: `(state, batch) -> ...`, where the state has `params` and `opt_state`.
        mesh: the mesh that it was compiled for.
        chip: its devices' kind.
        tokens: in a step, over all devices.
        model_flops: of a step, over all devices.
    """
    (state, batch), _ = compiled.args_info
    (state_shardings, batch_shardings), _ = compiled.input_shardings
    parameters = shard_bytes(state.params, state_shardings.params)
    optimizer = shard_bytes(state.opt_state, state_shardings.opt_state)
    of_batch = shard_bytes(batch, batch_shardings)
    analysis: Any = compiled.memory_analysis()
    hlo_text = compiled.as_text()
    assert hlo_text is not None
    memory = StepMemory(
        parameters=parameters,
        optimizer=optimizer,
        batch=of_batch,
        padding=max(0, int(analysis.argument_size_in_bytes) - parameters - optimizer - of_batch),
        temporaries=int(analysis.temp_size_in_bytes),
        outputs=int(analysis.output_size_in_bytes) - int(analysis.alias_size_in_bytes),
        code=int(analysis.generated_code_size_in_bytes),
    )
    return StepReport(
        mesh=dict(mesh.shape),
        chip=chip,
        num_devices=mesh.size,
        memory=memory,
        costs=program_costs(hlo_text),
        tokens=tokens,
        model_flops=model_flops,
    )


def shard_bytes(arrays: Any, shardings: Any) -> int:
    """Bytes that one device holds of a pytree of arrays (or what has their shape and dtype) with these shardings."""

    def of_one(array: Any, sharding: Any) -> int:
        # An argument that the program does not look at is not passed to it, and lies nowhere.
        if sharding is None:
            return 0
        shard = jax.ShapeDtypeStruct(sharding.shard_shape(array.shape), array.dtype)
        return shard.size * shard.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(of_one, arrays, shardings)))


def print_report(report: StepReport, console: Console) -> None:
    """Prints the report as tables."""
    chip = report.chip
    axes = ", ".join(f"{axis} {size}" for axis, size in report.mesh.items())
    console.print(f"One step of {report.tokens:,} tokens on {report.num_devices} {chip.name}: {axes}", highlight=False)
    for table in (_memory_table(report), _collectives_table(report), _roofline_table(report)):
        console.print(table)
    lines = [
        f"At the roofline a step takes {report.step_seconds:.3g} s, bound by {report.bound}: "
        f"{report.tokens_per_second:,.0f} tokens/s, MFU {report.mfu_ceiling:.1%}."
    ]
    if loops := report.costs.loops_of_unknown_length:
        lines.append(f"{loops} loops of a length that depends on data are counted as one turn.")
    for line in lines:
        console.print(line, highlight=False)


def _memory_table(report: StepReport) -> Table:
    table = _table("Memory of a device", "MB", "of its memory")
    available = report.chip.memory_bytes
    for name, size in report.memory._asdict().items():
        table.add_row(name, _mega(size), f"{size / available:.1%}")
    table.add_section()
    table.add_row("total", _mega(report.memory_bytes), f"{report.memory_bytes / available:.1%}")
    verdict = "fits" if report.fits else "does not fit"
    table.add_row(f"{report.chip.name} has", _mega(available), verdict, style="green" if report.fits else "bold red")
    return table


def _collectives_table(report: StepReport) -> Table:
    table = _table("Communication of a device, a step", "times", "MB sent")
    for kind, costs in report.costs.collectives.items():
        name = "send, between slices" if kind == "send" else kind
        table.add_row(name, f"{costs.runs:,}", _mega(costs.bytes))
    return table


def _roofline_table(report: StepReport) -> Table:
    chip, costs = report.chip, report.costs
    table = _table("Roofline of a device, a step", "amount", "at most, in a second", "ms")
    rows: dict[Resource, tuple[str, str]] = {
        "arithmetic": (f"{costs.flops / 1e12:,.2f} Tflop", f"{chip.flops / 1e12:,.0f} Tflop"),
        "memory": (f"{costs.bytes_accessed / 1e9:,.2f} GB", f"{chip.memory_bandwidth / 1e9:,.0f} GB"),
        "links": (f"{report.link_bytes / 1e9:,.2f} GB", f"{chip.link_bandwidth / 1e9:,.0f} GB"),
    }
    for resource, cells in rows.items():
        style = "bold" if resource == report.bound else None
        table.add_row(resource, *cells, f"{1e3 * report.seconds[resource]:,.1f}", style=style)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", min_width=60)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _mega(size: int) -> str:
    return f"{size / 1e6:,.1f}"
