"""The paper's Tables 2, 3, 4, 6, 7, 8, 9 and 10 as data: what each number measures, and the numbers as printed.

Source: arXiv:2605.24330v1. Of Figure 2 only those points are here whose losses the paper prints (Tables 4 and 6): those
of 350M and 760M are drawn and not printed. A quantity is known by the tasks and metrics that records have for it.
"""

import math
from typing import NamedTuple

SOURCE = "arXiv:2605.24330v1"

LABELS = {
    "softmax": "Softmax",
    "interdomain": "Interdomain",
    "s4d": "S4D-only",
    "interdomain_no_rope": "Interdomain, no RoPE",
    "single_query": "Single input + query projection",
    "s4d_rope": "S4D-only + RoPE",
    "dual_linear": "Dual input + linear projection",
}
"""What the tables call a mixer."""


class Size(NamedTuple):
    """A model size of the paper: its label, and the tokens it was trained on."""

    label: str
    tokens: float


SIZES = {
    "125m": Size("125M", 2.5e9),
    "350m": Size("350M", 7e9),
    "760m": Size("760M", 15e9),
    "1_3b": Size("1.3B", 26e9),
}
"""By the name of the config."""

CORPORA = {
    "pg19": "PG19",
    "codeparrot": "CodeParrot",
    "govreport": "GovReport",
    "narrativeqa": "NarrativeQA",
    "qasper": "Qasper",
    "qmsum": "QMSum",
}
"""What Table 8 calls a corpus; Table 2 has the mean over all but NarrativeQA."""

PARAMETERS = "parameters"
VALIDATION = "validation"
AGAINST_SOFTMAX = "against_softmax"
"""Not in records: the report derives these from a run's model, and from its own validation split."""


class Quantity(NamedTuple):
    """A number that a table has for each of its models.

    Attributes:
        label: what the table calls it.
        parts: the tasks and metrics, as in `records.Measurement`, of which it is the mean.
        at: of all of them.
        scale: from the unit of records to that of the table.
        digits: behind the point.
    """

    label: str
    parts: tuple[tuple[str, str], ...]
    at: int | None = None
    scale: float = 1.0
    digits: int = 2


class Block(NamedTuple):
    """A part of a table that has its own head.

    Attributes:
        label: empty if it is the whole table.
        quantities: in the table's order. Where they differ in `at` alone, other sizes that were measured join them.
        published: by mixer, for each quantity the number as printed, None where the table has none.
    """

    label: str
    quantities: tuple[Quantity, ...]
    published: dict[str, tuple[float | None, ...]]


class Table(NamedTuple):
    """A table of the paper.

    Attributes:
        number: in the paper.
        title: in our words.
        size: of its models, a key of `SIZES`; None where each column is a size.
        blocks: one or more.
        across: whether the models stand side by side, and not one below the other.
    """

    number: int
    title: str
    size: str | None
    blocks: tuple[Block, ...]
    across: bool = False


class Point(NamedTuple):
    """A model in Figure 2: the training compute C = 6 N D in flops, and the validation perplexity."""

    mixer: str
    size: str
    compute: float
    perplexity: float


def compute(parameters: float, tokens: float) -> float:
    """C = 6 N D: the flops of training, by the rule of Figure 2."""
    return 6 * parameters * tokens


def _percent(label: str, task: str, metric: str, at: int | None = None) -> Quantity:
    return Quantity(label, ((task, metric),), at, scale=100)


def _contexts(*tasks: str) -> tuple[Quantity, ...]:
    """The mean perplexity at 4K, 8K and 14K tokens."""
    parts = tuple((task, "perplexity") for task in tasks)
    return tuple(Quantity(f"{n}K", parts, 1024 * n) for n in (4, 8, 14))


def _mean(label: str, quantities: tuple[Quantity, ...]) -> Quantity:
    return Quantity(label, tuple(part for each in quantities for part in each.parts), scale=100)


def _by_model(
    softmax: tuple[float, ...], interdomain: tuple[float, ...], s4d: tuple[float, ...]
) -> dict[str, tuple[float | None, ...]]:
    return {"softmax": softmax, "interdomain": interdomain, "s4d": s4d}


_COMMONSENSE = (
    _percent("LAMBADA", "lambada", "accuracy"),
    _percent("PIQA", "piqa", "accuracy"),
    _percent("HellaSwag (normalised)", "hellaswag", "accuracy_norm"),
    _percent("WinoGrande", "winogrande", "accuracy"),
    _percent("ARC-easy", "arc_easy", "accuracy"),
    _percent("ARC-challenge (normalised)", "arc_challenge", "accuracy_norm"),
    _percent("SIQA", "siqa", "accuracy"),
    _percent("BoolQ", "boolq", "accuracy"),
)
_RECALL = (
    _percent("SWDE", "swde", "contains"),
    _percent("FDA", "fda", "contains"),
    _percent("SQuAD", "squad", "contains"),
    _percent("NQ", "nq", "contains"),
    _percent("TriviaQA", "triviaqa", "contains"),
    _percent("DROP", "drop", "contains"),
)
_VALIDATION_LOSS = Quantity("validation loss", ((VALIDATION, "loss"),), digits=4)
_FIVE_CORPORA = tuple(name for name in CORPORA if name != "narrativeqa")

LENGTHS = Table(
    2,
    "Length extrapolation: perplexity by context length, the mean over five corpora",
    "1_3b",
    (
        Block(
            "",
            _contexts(*_FIVE_CORPORA),
            _by_model((12.79, 20.54, 55.92), (14.36, 14.14, 14.26), (27.24, 26.89, 26.75)),
        ),
    ),
)
PARAMETER_COUNTS = Table(
    3,
    "Trained parameters",
    None,
    (
        Block(
            "",
            tuple(Quantity(size.label, ((name, PARAMETERS),), digits=0) for name, size in SIZES.items()),
            _by_model(
                (134_105_856, 373_867_520, 777_856_512, 1_345_423_360),
                (135_416_208, 377_360_768, 781_498_752, 1_352_406_784),
                (135_425_424, 377_385_344, 781_523_328, 1_352_455_936),
            ),
        ),
    ),
)
CUBE = Table(
    4,
    "The mechanism cube",
    "125m",
    (
        Block(
            "",
            (
                _VALIDATION_LOSS,
                Quantity("validation perplexity", ((VALIDATION, "perplexity"),)),
                _percent("perplexity against softmax, %", VALIDATION, AGAINST_SOFTMAX),
            ),
            {
                "interdomain": (2.8020, 16.48, -1.02),
                "interdomain_no_rope": (2.8038, 16.51, -0.84),
                "softmax": (2.8122, 16.65, None),
                "single_query": (2.8298, 16.94, 1.78),
                "s4d": (2.9561, 19.22, 15.48),
                "s4d_rope": (2.9844, 19.77, 18.79),
                "dual_linear": (3.0048, 20.18, 21.23),
            },
        ),
    ),
)
DOWNSTREAM = Table(
    6,
    "Validation loss and downstream tasks",
    "1_3b",
    (
        Block(
            "",
            (
                _VALIDATION_LOSS._replace(digits=3),
                _mean("commonsense, mean of 8, %", _COMMONSENSE),
                _percent("LAMBADA accuracy, %", "lambada", "accuracy"),
                Quantity("LAMBADA perplexity", (("lambada", "perplexity"),)),
                Quantity("LAMBADA bits per byte", (("lambada", "bits_per_byte"),), digits=4),
                Quantity("WikiText-2 perplexity", (("wikitext2", "perplexity"),)),
                Quantity("WikiText-2 bits per byte", (("wikitext2", "bits_per_byte"),), digits=4),
            ),
            _by_model(
                (2.155, 51.51, 39.43, 21.03, 1.1244, 20.55, 0.8156),
                (2.077, 54.54, 44.36, 14.76, 0.9937, 19.77, 0.8051),
                (2.212, 49.44, 25.64, 41.02, 1.3712, 25.27, 0.8713),
            ),
        ),
    ),
    across=True,
)
COMMONSENSE = Table(
    7,
    "Commonsense suite, zero-shot, accuracy in %",
    "1_3b",
    (
        Block(
            "",
            (*_COMMONSENSE, _mean("mean", _COMMONSENSE)),
            _by_model(
                (39.43, 69.42, 48.53, 54.22, 65.87, 33.02, 40.28, 61.28, 51.51),
                (44.36, 71.38, 54.27, 57.85, 69.91, 37.46, 41.45, 59.63, 54.54),
                (25.64, 71.00, 49.34, 53.83, 60.86, 33.36, 41.10, 60.37, 49.44),
            ),
        ),
    ),
    across=True,
)
_PERPLEXITIES = {
    "pg19": _by_model((16.34, 26.78, 70.95), (15.86, 15.73, 15.94), (19.96, 19.75, 19.66)),
    "codeparrot": _by_model((12.13, 22.23, 74.85), (17.62, 17.31, 17.48), (53.10, 52.44, 52.16)),
    "govreport": _by_model((7.33, 12.20, 31.76), (7.36, 7.27, 7.29), (9.19, 9.07, 9.01)),
    "narrativeqa": _by_model((21.28, 34.36, 92.75), (22.85, 22.67, 22.99), (36.83, 36.42, 36.26)),
    "qasper": _by_model((14.43, 22.94, 60.08), (15.75, 15.52, 15.63), (23.53, 23.22, 23.13)),
    "qmsum": _by_model((13.74, 18.57, 41.96), (15.20, 14.88, 14.94), (30.44, 29.97, 29.80)),
}
LENGTHS_BY_CORPUS = Table(
    8,
    "Length extrapolation: perplexity by context length, corpus by corpus",
    "1_3b",
    tuple(Block(CORPORA[name], _contexts(name), published) for name, published in _PERPLEXITIES.items()),
)
RECALL = Table(
    9,
    "Recall, accuracy in %",
    "1_3b",
    (
        Block(
            "RULER S-NIAH-1, by context length",
            tuple(_percent(f"{n}K", "needle", "accuracy", 1024 * n) for n in (1, 2, 4, 8)),
            _by_model((99.5, 100.0, 89.0, 0.0), (65.5, 28.0, 9.5, 3.5), (0.0, 0.0, 0.0, 0.0)),
        ),
        Block(
            "Phonebook, by entries",
            tuple(_percent(f"{n}", "phonebook", "accuracy", n) for n in (16, 32, 64, 128)),
            _by_model((54.5, 52.0, 45.5, 24.0), (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)),
        ),
        Block(
            "Based recall, zero-shot; the answer contains the right one, in upper or lower case",
            (*_RECALL, _mean("mean", _RECALL)),
            _by_model(
                (60.58, 50.45, 11.33, 16.44, 56.93, 23.47, 36.53),
                (17.46, 9.53, 33.78, 11.43, 54.27, 21.31, 24.63),
                (6.57, 0.36, 14.91, 7.95, 42.83, 14.04, 14.44),
            ),
        ),
    ),
)
LONGBENCH = Table(
    10,
    "LongBench, in [0, 1]",
    "1_3b",
    (
        Block(
            "",
            (Quantity("mean of 14 tasks", (("longbench14", "mean"),), digits=4),),
            _by_model((0.1240,), (0.1229,), (0.0857,)),
        ),
    ),
)
TABLES = (LENGTHS, PARAMETER_COUNTS, CUBE, DOWNSTREAM, COMMONSENSE, LENGTHS_BY_CORPUS, RECALL, LONGBENCH)


def figure_2() -> list[Point]:
    """The points of Figure 2 whose losses are printed: exp(loss) at the sizes of Tables 4 and 6."""
    (counts,) = PARAMETER_COUNTS.blocks
    points = []
    for name, table in (("125m", CUBE), ("1_3b", DOWNSTREAM)):
        (block,) = table.blocks
        column = list(SIZES).index(name)
        for mixer, row in counts.published.items():
            # The loss is the first quantity of both tables.
            parameters, loss = row[column], block.published[mixer][0]
            if parameters and loss:
                points.append(Point(mixer, SIZES[name].label, compute(parameters, SIZES[name].tokens), math.exp(loss)))
    return points
