"""The paper's tables, published and measured side by side, from the records of many runs.

    python eval.py --report=reports/tiny --runs=runs/tiny,runs/tiny_s4d,runs/tiny_softmax

What is read and laid here, `table_files` writes as Markdown, JSON and figures.
"""

import collections
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from interdomain_jax import strict_json
from interdomain_jax.evaluation import published
from interdomain_jax.evaluation.published import Block, Point, Quantity, Table
from interdomain_jax.evaluation.records import MEAN, Measurement, Record, read_records
from interdomain_jax.workdir import FREE_ON_RESUME

MODES = ("windows", "strided", "documents", "carried")
"""Of perplexities that differ in the mode alone, the one of the first of these is shown."""

Key = tuple[str, str, int | None]
"""Task, metric and size, as in a `Measurement`."""

# Fields of a config that results do not depend on, or by their rounding alone; and the seed.
_NO_RECIPE = ({*FREE_ON_RESUME} - {"data.corpora"}) | {"seed", "eval_every", "eval_tokens", "best_checkpoints_to_keep"}

_LOSS: Key = (published.VALIDATION, "loss", None)
_PERPLEXITY: Key = (published.VALIDATION, "perplexity", None)
_AGAINST_SOFTMAX: Key = (published.VALIDATION, published.AGAINST_SOFTMAX, None)


class Source(NamedTuple):
    """A record that numbers come from; the report calls it by its number."""

    number: int
    workdir: str
    record: Record


class Found(NamedTuple):
    """A measurement, and the number of its source."""

    source: int
    measurement: Measurement


class Number(NamedTuple):
    """What one run measured, in the unit of records, NaN if it is not finite; and the numbers of its sources."""

    value: float
    sources: tuple[int, ...]


class Run(NamedTuple):
    """A checkpoint of a run, and all its numbers.

    Attributes:
        workdir: of the run.
        mixer: the name of the mixer, or of a hybrid's mixers, ", " between them.
        name: of the config.
        parameters: number of trained parameters.
        tokens: that it was trained on.
        recipe: all fields of the config that results depend on, but for the seed.
        numbers: by task, metric and size.
    """

    workdir: str
    mixer: str
    name: str
    parameters: int
    tokens: int
    recipe: dict[str, str]
    numbers: dict[Key, Number]


class Cell(NamedTuple):
    """A number of a table, in the table's unit.

    Attributes:
        values: one for each run that measured it; the only one if it is published.
        sources: numbers of sources; none if it is published.
    """

    values: tuple[float, ...]
    sources: tuple[int, ...] = ()

    @property
    def mean(self) -> float:
        """Over the runs."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """The standard deviation between runs, as of a sample; None for one run."""
        # Unlike that of the module statistics, NumPy's takes NaN.
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None


class Line(NamedTuple):
    """The numbers of a model, None where there is none.

    Attributes:
        mixer: as of a `Run`.
        size: of the model, and its training, in words.
        origin: "paper" or "measured".
        cells: one for each quantity.
    """

    mixer: str
    size: str
    origin: str
    cells: tuple[Cell | None, ...]


class Grid(NamedTuple):
    """A block of a table, filled."""

    label: str
    quantities: tuple[Quantity, ...]
    lines: tuple[Line, ...]


class Report(NamedTuple):
    """Everything that the files show.

    Attributes:
        sources: by number, from 1.
        runs: in the order in which they were given, each with its checkpoints in theirs.
        tables: each with its blocks, filled.
        published_points, measured_points: of Figure 2; the latter one for each run with a validation loss.
        others: the measurements that no table shows.
    """

    sources: tuple[Source, ...]
    runs: tuple[Run, ...]
    tables: tuple[tuple[Table, tuple[Grid, ...]], ...]
    published_points: tuple[Point, ...]
    measured_points: tuple[Point, ...]
    others: tuple[Found, ...]


def gather(workdirs: Sequence[epath.PathLike]) -> Report:
    """Reads the records of runs and lays them beside the published numbers.

    Of several numbers of a checkpoint for the same task, metric and size, that one counts whose mode comes first in
    `MODES`; then that over the most samples; then that which was finished last.

    Args:
        workdirs: of the runs.

    Raises:
        FileNotFoundError: a directory is not there, or nothing was evaluated in it.
        ValueError: there are none, one comes twice, or a file is no record.
    """
    paths = [str(path).rstrip("/") for path in workdirs]
    if not paths:
        raise ValueError("--runs is empty; it takes the directories of runs, with commas between them")
    if repeated := [path for path in paths if paths.count(path) > 1]:
        raise ValueError(f"--runs names {repeated[0]} more than once")
    sources: list[Source] = []
    runs: list[Run] = []
    chosen: list[tuple[Key, Found]] = []
    others: list[Found] = []
    for path in paths:
        own = [Source(len(sources) + n, path, record) for n, record in enumerate(_read(path), start=1)]
        sources += own
        for step in sorted({source.record.model["step"] for source in own}):
            of_step = [source for source in own if source.record.model["step"] == step]
            winners, rest = _choose(of_step)
            runs.append(_run(of_step, winners))
            chosen += winners.items()
            others += rest
    runs = [_against_softmax(run, runs) for run in runs]
    tables = tuple(
        (table, tuple(_fill(table, block, runs) for block in _blocks(table, runs))) for table in published.TABLES
    )
    shown = {
        (task, metric, quantity.at)
        for _, grids in tables
        for grid in grids
        for quantity in grid.quantities
        for task, metric in quantity.parts
    }
    return Report(
        sources=tuple(sources),
        runs=tuple(runs),
        tables=tables,
        published_points=tuple(published.figure_2()),
        measured_points=tuple(
            Point(run.mixer, run.name, published.compute(run.parameters, run.tokens), run.numbers[_PERPLEXITY].value)
            for run in runs
            if _PERPLEXITY in run.numbers
        ),
        others=tuple([found for key, found in chosen if key not in shown] + others),
    )


def _read(path: str) -> list[Record]:
    if not epath.Path(path).is_dir():
        raise FileNotFoundError(f"--runs names {path!r}, which is no directory")
    records = read_records(path)
    if not records:
        raise FileNotFoundError(f"nothing was evaluated in {path} yet; `python eval.py --workdir={path}` does it")
    return records


def _choose(sources: Sequence[Source]) -> tuple[dict[Key, Found], list[Found]]:
    """Of each task, metric and size of one checkpoint the measurement that counts, and all the others."""
    candidates = collections.defaultdict(list)
    for number, _, record in sources:
        mode = record.settings.get("mode")
        rank = -MODES.index(mode) if mode in MODES else -len(MODES)
        for measurement in record.measurements:
            order = (rank, measurement.samples, record.finished, number)
            task = _corpus(measurement.task) if record.kind == "perplexity" else measurement.task
            candidates[task, measurement.metric, measurement.at].append((order, Found(number, measurement)))
    winners, rest = {}, []
    for key, found in candidates.items():
        *losers, (_, winners[key]) = sorted(found, key=lambda pair: pair[0])
        rest += [loser for _, loser in losers]
    return winners, rest


def _corpus(task: str) -> str:
    """A corpus by its name in `published.CORPORA`, whatever its directory: "data/gov_report" is "govreport"."""
    name = epath.Path(task).name
    plain = "".join(filter(str.isalnum, name.lower()))
    return plain if plain in published.CORPORA else name


def _run(sources: Sequence[Source], winners: Mapping[Key, Found]) -> Run:
    number, workdir, record = sources[-1]
    model = record.model
    numbers = {
        key: Number(math.nan if found.measurement.value is None else found.measurement.value, (found.source,))
        for key, found in winners.items()
    }
    numbers[model["name"], published.PARAMETERS, None] = Number(model["parameters"], (number,))
    return Run(
        workdir=workdir,
        mixer=model["mixers"][0] if len({*model["mixers"]}) == 1 else ", ".join(model["mixers"]),
        name=model["name"],
        parameters=model["parameters"],
        tokens=model["tokens"],
        recipe={field: value for field, value in _fields(record.config).items() if field not in _NO_RECIPE},
        numbers=numbers | _validation(record.config["data"], winners),
    )


def _fields(config: Mapping[str, Any]) -> dict[str, str]:
    """The values of a config's fields as JSON, by their names with dots."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{below}": text for below, text in _fields(value).items()}
        else:
            found[name] = strict_json.dumps(value)
    return found


def _validation(data: Mapping[str, Any], winners: Mapping[Key, Found]) -> dict[Key, Number]:
    """Loss and perplexity on the run's own corpora at the training context, if all of them were scored."""
    keys = [(_corpus(name), "loss", data["sequence_length"]) for name in data["corpora"]]
    if any(key not in winners for key in keys):
        return {}
    found = [winners[key] for key in keys]
    # By tokens, as in training.
    nats = sum(math.nan if m.value is None else m.value * m.samples for _, m in found)
    loss = nats / sum(m.samples for _, m in found)
    sources = tuple(sorted({source for source, _ in found}))
    return {_LOSS: Number(loss, sources), _PERPLEXITY: Number(float(np.exp(loss)), sources)}


def _against_softmax(run: Run, runs: Sequence[Run]) -> Run:
    """Adds how far the run's validation perplexity lies above that of the softmax runs of its size and recipe."""
    rivals = [
        each.numbers[_LOSS]
        for each in runs
        if each.mixer == "softmax" and _LOSS in each.numbers and _are_alike(run, each)
    ]
    if run.mixer == "softmax" or not rivals or _LOSS not in run.numbers:
        return run
    loss = run.numbers[_LOSS]
    ratio = float(np.exp(loss.value - statistics.fmean(each.value for each in rivals)))
    sources = (*loss.sources, *(number for each in rivals for number in each.sources))
    return run._replace(numbers=run.numbers | {_AGAINST_SOFTMAX: Number(ratio - 1, sources)})


def _are_alike(run: Run, other: Run) -> bool:
    """Whether two runs differ in nothing but the model, and its size has the same name."""
    recipe, rivals = (
        {field: value for field, value in each.recipe.items() if not field.startswith("model.")}
        for each in (run, other)
    )
    return (run.name, run.tokens, recipe) == (other.name, other.tokens, rivals)


def _blocks(table: Table, runs: Sequence[Run]) -> list[Block]:
    """The blocks of a table, with the sizes, model sizes (Table 3) and corpora (Table 8) that only the runs have."""
    keys = dict.fromkeys(key for run in runs for key in run.numbers)
    blocks = list(table.blocks)
    if table is published.PARAMETER_COUNTS:
        (block,) = blocks
        names = [task for task, metric, _ in keys if metric == published.PARAMETERS and task not in published.SIZES]
        more = tuple(Quantity(name, ((name, published.PARAMETERS),), digits=0) for name in names)
        rows = {mixer: row + (None,) * len(more) for mixer, row in block.published.items()}
        blocks = [Block(block.label, block.quantities + more, rows)]
    if table is published.LENGTHS_BY_CORPUS:
        tasks = dict.fromkeys(task for task, metric, at in keys if metric == "perplexity" and at is not None)
        for task in tasks:
            if task not in (*published.CORPORA, MEAN):
                quantity = Quantity("", ((task, "perplexity"),))
                blocks.append(Block(task, _at(quantity, _measured_sizes(quantity, runs)), {}))
    return [_with_measured_sizes(block, runs) for block in blocks]


def _with_measured_sizes(block: Block, runs: Sequence[Run]) -> Block:
    """A block whose quantities differ in size alone, with those sizes too that a run has."""
    first = block.quantities[0]
    known = [each.at for each in block.quantities]
    if first.at is None:
        return block
    more = _at(first, _measured_sizes(first, runs) - {*known})
    quantities = sorted((*block.quantities, *more), key=lambda each: each.at or 0)
    rows = {
        mixer: tuple(row[known.index(each.at)] if each.at in known else None for each in quantities)
        for mixer, row in block.published.items()
    }
    return Block(block.label, tuple(quantities), rows)


def _measured_sizes(quantity: Quantity, runs: Sequence[Run]) -> set[int]:
    """The sizes at which a run has all parts of a quantity."""
    return {
        at
        for run in runs
        for _, _, at in run.numbers
        if at is not None and all((task, metric, at) in run.numbers for task, metric in quantity.parts)
    }


def _at(quantity: Quantity, sizes: set[int]) -> tuple[Quantity, ...]:
    return tuple(quantity._replace(label=f"{at:,}", at=at) for at in sorted(sizes))


def _fill(table: Table, block: Block, runs: Sequence[Run]) -> Grid:
    """The published mixers in the paper's order, each with the models that were measured; then all other models."""
    models = _models_of_all_sizes(runs) if table.size is None else _models(runs)
    lines = []
    for mixer in dict.fromkeys([*block.published, *(mixer for mixer, _, _ in models)]):
        if mixer in block.published:
            cells = tuple(None if value is None else Cell((value,)) for value in block.published[mixer])
            lines.append(Line(mixer, _published_size(table), "paper", cells))
        measured = [(size, found) for other, size, found in models if other == mixer]
        for size, found in measured or [("no run", [])]:
            cells = tuple(_cell(quantity, found) for quantity in block.quantities)
            lines.append(Line(mixer, size, "measured", cells))
    return Grid(block.label, block.quantities, tuple(lines))


def _models(runs: Sequence[Run]) -> list[tuple[str, str, list[Run]]]:
    """Mixer, size in words, and the runs that differ in the seed alone; of namesakes the words say what differs."""
    seeds = collections.defaultdict(list)
    for run in runs:
        seeds[run.mixer, run.name, *_facts(run).items()].append(run)
    namesakes = collections.defaultdict(list)
    for found in seeds.values():
        run = found[0]
        namesakes[run.mixer, f"{run.name} ({short(run.parameters)}), {short(run.tokens)} tokens"].append(found)
    models = []
    for (mixer, size), groups in namesakes.items():
        facts = [_facts(found[0]) for found in groups]
        for own, found in zip(facts, groups, strict=True):
            differences = [
                f"{field} {value}" for field, value in own.items() if any(other.get(field) != value for other in facts)
            ]
            models.append((mixer, ", ".join([size, *differences]), found))
    return models


def _facts(run: Run) -> dict[str, str]:
    return {"parameters": f"{run.parameters:,}", "tokens": f"{run.tokens:,}"} | run.recipe


def _models_of_all_sizes(runs: Sequence[Run]) -> list[tuple[str, str, list[Run]]]:
    """Mixer, no size, and one run of each size; seeds have the same number of parameters."""
    models = collections.defaultdict(list)
    for run in {(run.mixer, run.name, run.parameters): run for run in runs}.values():
        models[run.mixer].append(run)
    return [(mixer, "", found) for mixer, found in models.items()]


def _published_size(table: Table) -> str:
    if table.size is None:
        return ""
    size = published.SIZES[table.size]
    return f"{size.label}, {short(size.tokens)} tokens"


def _cell(quantity: Quantity, runs: Sequence[Run]) -> Cell | None:
    """What those runs have for a quantity that have all of its parts."""
    keys = [(task, metric, quantity.at) for task, metric in quantity.parts]
    rows = [[run.numbers[key] for key in keys] for run in runs if all(key in run.numbers for key in keys)]
    if not rows:
        return None
    return Cell(
        tuple(quantity.scale * statistics.fmean(number.value for number in row) for row in rows),
        tuple(sorted({source for row in rows for number in row for source in number.sources})),
    )


def short(number: float) -> str:
    """A count with three digits: 1.35B, 819K."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"
