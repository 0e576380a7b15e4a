"""Any record as a table on the terminal."""

from rich.table import Table

from interdomain_jax.evaluation.records import Measurement, Record


def as_table(record: Record) -> Table:
    """Returns one row for each measurement, with the settings that are single values below."""
    model = record.model
    settings = [f"{name} {value}" for name, value in record.settings.items() if isinstance(value, int | float | str)]
    table = Table(
        title=f"{record.name}: {model['name']} ({', '.join(model['mixers'])}), step {model['step']:,}",
        caption=", ".join(settings),
    )
    has_sizes = any(each.at is not None for each in record.measurements)
    table.add_column("task")
    if has_sizes:
        table.add_column("at", justify="right")
    table.add_column("metric")
    for header in ("value", "standard error", "samples"):
        table.add_column(header, justify="right")
    for each in record.measurements:
        size = "" if each.at is None else f"{each.at:,}"
        table.add_row(each.task, *([size] if has_sizes else []), each.metric, *_numbers(each), f"{each.samples:,}")
    return table


def _numbers(measurement: Measurement) -> list[str]:
    return ["" if number is None else f"{number:.4f}" for number in (measurement.value, measurement.error)]
