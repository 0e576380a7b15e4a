"""The report on the small language models, from the records among the results: tables in Markdown."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from configs import small
from experiments import text_charts, text_lags
from experiments.text_runs import ONE_TURN, SCALED, usual_read
from interdomain_jax import markdown
from interdomain_jax.evaluation import published
from interdomain_jax.evaluation.records import Record, read_records
from interdomain_jax.modules.mixers import DELTA_RANGE, MIXERS

MARKDOWN = "README.md"
WITHOUT = (
    ("the query projection", "interdomain", "dual_linear"),
    ("the query projection, with a single input and RoPE", "single_query", "s4d_rope"),
    ("the dual input", "interdomain", "single_query"),
    ("RoPE", "interdomain", "interdomain_no_rope"),
)
"""What one cell of the cube has and another one lacks, all else equal."""


class Model(NamedTuple):
    """A model of the experiments, trained with several seeds.

    Attributes:
        mixer: of its layers.
        read: "bilinear" or "hermitian".
        d_model: its width.
        delta_range: of its first step lengths.
        rope_base: of its rotations.
        parameters: number of them.
        tokens: that each run was trained on.
        seeds: of the runs, rising.
        lengths: contexts of the evaluation, tokens, rising; the first is that of training.
        losses: [seeds, lengths], nats per token of the whole validation split.
        position_ends: ends of the buckets of positions in the longest context, tokens, rising.
        position_losses: [seeds, buckets], the loss of the tokens in each.
    """

    mixer: str
    read: str
    d_model: int
    delta_range: tuple[float, float]
    rope_base: float
    parameters: int
    tokens: int
    seeds: tuple[int, ...]
    lengths: tuple[int, ...]
    losses: np.ndarray
    position_ends: tuple[int, ...]
    position_losses: np.ndarray

    @property
    def loss(self) -> float:
        """At the training context, the mean over the seeds."""
        return float(self.losses[:, 0].mean())

    @property
    def compute(self) -> float:
        """C = 6 N D, in flops, as in the paper's Figure 2."""
        return published.compute(self.parameters, self.tokens)

    @property
    def label(self) -> str:
        """What tables and figures call it."""
        return published.LABELS[self.mixer] + ("" if self.read == usual_read(self.mixer) else f", {self.read} read")

    @property
    def is_usual(self) -> bool:
        """Whether it is a cell of the cube."""
        usual = small.get_config(self.mixer).model
        wanted = (usual_read(self.mixer), usual.d_model, tuple(usual.delta_range), usual.rope_base)
        return (self.read, self.d_model, self.delta_range, self.rope_base) == wanted


def read_models(output: epath.Path) -> list[Model]:
    """The models among the results: by width, then in the order of the cube."""
    groups: dict[tuple[int, int, str, tuple[float, float], float], list[Record]] = defaultdict(list)
    for directory in sorted(path for path in output.iterdir() if path.is_dir()):
        for record in read_records(directory):
            (mixer,), model = record.model["mixers"], record.config["model"]
            delta_range, place = tuple(model["delta_range"]), [*MIXERS].index(mixer)
            groups[model["d_model"], place, model["read"], delta_range, model["rope_base"]].append(record)
    return [_model(sorted(group, key=_seed)) for _, group in sorted(groups.items())]


def _model(records: Sequence[Record]) -> Model:
    lengths, losses = _curves(records, "loss")
    ends, by_position = _curves(records, "loss_by_position")
    first = records[0]
    return Model(
        mixer=first.model["mixers"][0],
        read=first.config["model"]["read"],
        d_model=first.config["model"]["d_model"],
        delta_range=tuple(first.config["model"]["delta_range"]),
        rope_base=first.config["model"]["rope_base"],
        parameters=first.model["parameters"],
        tokens=first.model["tokens"],
        seeds=tuple(map(_seed, records)),
        lengths=lengths,
        losses=losses,
        position_ends=ends,
        position_losses=by_position,
    )


def _seed(record: Record) -> int:
    return int(record.config["seed"])


def _curves(records: Sequence[Record], metric: str) -> tuple[tuple[int, ...], np.ndarray]:
    """Sizes, and values [records, sizes] of a metric."""
    rows = [{each.at: each.value for each in record.measurements if each.metric == metric} for record in records]
    sizes = tuple(size for size in rows[0] if size is not None)
    return sizes, np.array([[row[size] for size in sizes] for row in rows], float)


def write(output: epath.Path) -> None:
    """Writes the Markdown and the figures beside the records; of a part without any run nothing."""
    models = read_models(output)
    records = [record for path in sorted(output.iterdir()) if path.is_dir() for record in read_records(path)]
    cube = [model for model in models if model.is_usual]
    usual = small.get_config().model
    others = [model for model in models if model.d_model == usual.d_model and not model.is_usual]
    scaled = [model for model in models if model.mixer in SCALED and (model.is_usual or model.d_model != usual.d_model)]
    parts = [_head(), *_cube(cube), *_lengths(cube), *_context(cube, others), *_reads(cube, others), *_scaling(scaled)]
    if cube:
        text_charts.draw_cube(cube, output / text_charts.CUBE)
        text_charts.draw_lengths(cube, output / text_charts.LENGTHS)
    if scaled:
        text_charts.draw_scaling(scaled, output / text_charts.SCALING)
    if (output / text_lags.KERNELS).exists():
        text_lags.draw_kernels(output)
        parts += ["## What the heads remember", "", f"![Lag kernels before and after training]({text_lags.FIGURE})", ""]
    (output / MARKDOWN).write_text("\n".join([*parts, *_sources(records)]) + "\n")


def _head() -> str:
    config = small.get_config()
    return f"""# Small models on the text of Python's standard library

The configs are `configs/small.py` but for what is named: {config.model.num_layers} layers, a context of
{config.data.sequence_length} tokens, {config.data.batch_size * config.data.sequence_length:,} tokens an update, a
trained tokenizer of {config.model.vocab_size:,} pieces. Losses are in nats per token, over the whole validation split;
a mean over seeds has the standard deviation between them behind it, as of a sample, and their number.
`python -m experiments.text --report_only` writes this file and its figures from the records beside it.
"""


PAPER = {mixer: float(numbers[0] or np.nan) for mixer, numbers in published.CUBE.blocks[0].published.items()}
"""Validation losses of the paper's cube, at 125M."""


def _cube(cube: Sequence[Model]) -> list[str]:
    """The cells beside the paper's, and what each axis is worth."""
    if not cube:
        return []
    ours = {model.mixer: model for model in cube}
    rows = [
        [
            model.label,
            f"{model.parameters:,}",
            number(model.losses[:, 0]),
            f"{np.exp(model.losses[:, 0]).mean():.2f}",
            difference(model, ours.get("interdomain")),
            f"{PAPER[model.mixer]:.4f}",
            f"{PAPER[model.mixer] - PAPER['interdomain']:+.4f}",
        ]
        for model in cube
    ]
    heads = ["cell", "parameters", "loss", "perplexity", "above interdomain", "paper, 125M", "above interdomain, paper"]
    axes = [
        [what, difference(ours[without], ours[full]), f"{PAPER[without] - PAPER[full]:+.4f}"]
        for what, full, without in WITHOUT
        if {full, without} <= {*ours}
    ]
    return [
        "## The mechanism cube",
        "",
        f"{cube[0].tokens:,} tokens a run.",
        "",
        *markdown.table(heads, rows),
        "",
        f"![Losses of the cells, and the paper's]({text_charts.CUBE})",
        "",
        *(["What it costs to leave out:", "", *markdown.table(["", "loss", "paper, 125M"], axes), ""] if axes else []),
    ]


def _lengths(cube: Sequence[Model]) -> list[str]:
    if not cube:
        return []
    lengths = cube[0].lengths
    rows = [[model.label, *_perplexities(model)] for model in cube]
    heads = ["cell", *_length_heads(cube[0])]
    return [
        "## Length extrapolation",
        "",
        f"Perplexity by the length of the context, in tokens, over the same text; trained on {lengths[0]:,}.",
        "",
        *markdown.table(heads, rows),
        "",
        f"![Perplexity by context length, and loss by position]({text_charts.LENGTHS})",
        "",
    ]


def _length_heads(model: Model) -> list[str]:
    lengths = model.lengths
    return [*(f"{length:,}" for length in lengths), f"{lengths[-1] // lengths[0]}x against 1x"]


def _perplexities(model: Model) -> list[str]:
    """By length, and how far that of the longest lies above that of the training context."""
    growth = np.exp(model.losses[:, -1] - model.losses[:, 0]).mean() - 1
    return [*(f"{perplexity:.2f}" for perplexity in np.exp(model.losses).mean(axis=0)), f"{100 * growth:+.1f} %"]


def _context(cube: Sequence[Model], others: Sequence[Model]) -> list[str]:
    """Models that begin with the paper's step lengths, or turn otherwise, beside those of the cube, at every length."""
    changed = [model for model in others if model.delta_range == DELTA_RANGE or model.rope_base == ONE_TURN]
    if not changed:
        return []
    mixers = dict.fromkeys(model.mixer for model in changed)
    rows = [
        [
            model.label,
            f"{model.delta_range[0]:g} to {model.delta_range[1]:g}" if model.mixer != "softmax" else "",
            f"{model.rope_base:g}" if model.mixer != "s4d" else "",
            *_perplexities(model),
        ]
        for mixer in mixers
        for model in (*cube, *changed)
        if model.mixer == mixer
    ]
    heads = ["cell", "first step lengths", "base of RoPE", *_length_heads(changed[0])]
    return ["## What lengths depend on", "", *markdown.table(heads, rows, left=3), ""]


def _reads(cube: Sequence[Model], others: Sequence[Model]) -> list[str]:
    """Interdomain with either read."""
    hermitian = [model for model in cube if model.mixer == "interdomain"]
    bilinear = [model for model in others if (model.mixer, model.read) == ("interdomain", "bilinear")]
    if not (bilinear and hermitian):
        return []
    rows = [
        [model.read, number(model.losses[:, 0]), f"{np.exp(model.loss):.2f}", difference(model, bilinear[0])]
        for model in (*bilinear, *hermitian)
    ]
    return ["## The two reads", "", *markdown.table(["read", "loss", "perplexity", "above bilinear"], rows), ""]


def _scaling(scaled: Sequence[Model]) -> list[str]:
    if len({model.d_model for model in scaled}) < 2:
        return []
    rows = [
        [
            model.label,
            f"{model.d_model}",
            f"{model.parameters:,}",
            f"{model.tokens:,}",
            f"{model.compute:.2e}",
            number(model.losses[:, 0]),
            f"{np.exp(model.loss):.2f}",
        ]
        for model in scaled
    ]
    heads = ["mixer", "width", "parameters", "tokens", "C = 6 N D", "loss", "perplexity"]
    return [
        "## Perplexity by compute",
        "",
        *markdown.table(heads, rows),
        "",
        f"![Perplexity by compute]({text_charts.SCALING})",
        "",
    ]


def _sources(records: Sequence[Record]) -> list[str]:
    """Where the numbers are from: commits and machines, and the seeds of each model in the records."""
    commits = sorted({str(record.versions["commit"]) for record in records})
    machines = sorted({record.machine for record in records})
    return ["## Sources", "", f"Commits {', '.join(commits)}; {'; '.join(machines)}. Each record has its own."]


def number(values: np.ndarray) -> str:
    """The mean, and the spread where there is one."""
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{values.mean():.4f} ± {values.std(ddof=1):.4f} ({len(values)})"


def difference(model: Model, other: Model | None) -> str:
    """How far a loss lies above another one, seed by seed."""
    if other is None:
        return ""
    common = [seed for seed in model.seeds if seed in other.seeds]
    if not common:
        return ""
    differences = np.array(
        [model.losses[model.seeds.index(seed), 0] - other.losses[other.seeds.index(seed), 0] for seed in common]
    )
    if len(common) == 1:
        return f"{differences[0]:+.4f}"
    return f"{differences.mean():+.4f} ± {differences.std(ddof=1):.4f}"
