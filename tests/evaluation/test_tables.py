"""The report over many runs: every table of the paper from records, and nothing that was measured left out."""

import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from interdomain_jax.evaluation import published, table_files, tables
from interdomain_jax.evaluation.records import FORMAT, Measurement, Record, write_record

REPOSITORY = Path(__file__).parents[2]
CORPORA = ("pg19", "codeparrot", "govreport", "qasper", "qmsum")
COMMONSENSE = {
    ("lambada", "accuracy"): 0.40,
    ("piqa", "accuracy"): 0.60,
    ("hellaswag", "accuracy_norm"): 0.30,
    ("winogrande", "accuracy"): 0.50,
    ("arc_easy", "accuracy"): 0.50,
    ("arc_challenge", "accuracy_norm"): 0.25,
    ("siqa", "accuracy"): 0.35,
    ("boolq", "accuracy"): 0.55,
}


def write(
    workdir,
    kind,
    name,
    measurements,
    *,
    mixers,
    settings=None,
    config="tiny",
    step=10,
    finished="2026-01-01",
    seed=0,
    read="bilinear",
):
    record = Record(
        format=FORMAT,
        kind=kind,
        name=name,
        model={
            "name": config,
            "mixers": list(mixers),
            "parameters": 1_000_000 + len(mixers[0]),
            "step": step,
            "tokens": 2048 * step,
        },
        command=f"python eval.py --workdir={workdir.name} --name={name}",
        finished=f"{finished}T00:00:00+00:00",
        machine="1 x a device",
        versions={"commit": "abc123"},
        config={
            "name": config,
            "model": {"read": read},
            "data": {"corpora": ["stdlib_text"], "sequence_length": 512},
            "seed": seed,
            "clip": float("inf"),
        },
        settings=settings or {},
        measurements=tuple(measurements),
    )
    return write_record(workdir, record)


def perplexities(corpora, losses):
    """What a record of perplexities has, with the same losses by context length for each corpus."""
    return [
        Measurement(corpus, metric, value, 1000, at=at)
        for corpus in corpora
        for at, loss in losses.items()
        for metric, value in (("loss", loss), ("perplexity", math.exp(loss)))
    ]


def line(report, number, mixer, origin="measured", block=0):
    """The numbers of a model's first line, by the label of the quantity."""
    (grids,) = [grids for table, grids in report.tables if table.number == number]
    found = next(each for each in grids[block].lines if (each.mixer, each.origin) == (mixer, origin))
    labels = [quantity.label for quantity in grids[block].quantities]
    return dict(zip(labels, found.cells, strict=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of interdomain, a softmax model that has all of the suites, and a hybrid with one task."""
    root = tmp_path_factory.mktemp("runs")
    windows = {"mode": "windows", "max_tokens": None}
    for seed, (name, loss) in enumerate((("first", 1.70), ("second", 1.80))):
        write(
            root / name,
            "perplexity",
            "perplexity",
            perplexities(["stdlib_text"], {512: loss, 1024: loss + 0.1}),
            mixers=["interdomain"],
            settings=windows,
            seed=seed,
        )
    softmax = root / "softmax"
    write(
        softmax,
        "perplexity",
        "perplexity",
        perplexities(["stdlib_text"], {512: 1.90}),
        mixers=["softmax"] * 2,
        settings=windows,
    )
    long = [
        Measurement(f"data/{corpus}", "perplexity", float(n), 1000, at=at)
        for n, corpus in enumerate(CORPORA, start=10)
        for at in (4096, 16_384)
    ]
    long += [Measurement("data/Gov_Report", "perplexity", 17.5, 1000, at=8192)]
    long += [Measurement("data/pg19", "loss_by_position", 3.25, 100, at=64)]
    write(softmax, "perplexity", "long", long, mixers=["softmax"] * 2, settings=windows)
    suites = [Measurement(*key, value, 100, error=0.05) for key, value in COMMONSENSE.items()]
    suites += [
        Measurement("lambada", "perplexity", float("nan"), 100),
        Measurement("lambada", "bits_per_byte", 1.25, 100),
        Measurement("wikitext2", "perplexity", 30.0, 100),
        Measurement("wikitext2", "bits_per_byte", 0.875, 100),
        Measurement("swde", "contains", 0.125, 80),
        Measurement("longbench14", "mean", 0.0625, 14),
        Measurement("mqar", "accuracy", np.float32(0.75), np.int64(64), at=256),
    ]
    write(softmax, "suite", "commonsense8", suites, mixers=["softmax"] * 2)
    recall = [
        Measurement("needle", "accuracy", 0.895, 200, at=1024),
        Measurement("phonebook", "accuracy", 0.5, 200, at=16),
    ]
    write(root / "hybrid", "recall", "recall", recall, mixers=["interdomain", "softmax"], config="125m")
    return [root / name for name in ("first", "second", "softmax", "hybrid")]


@pytest.fixture(scope="module")
def report(runs):
    return tables.gather(runs)


@pytest.fixture(scope="module")
def written(report, tmp_path_factory):
    directory = table_files.prepare(tmp_path_factory.mktemp("report") / "deep" / "er")
    table_files.write(directory, report)
    return directory


def test_published_means_are_those_of_the_published_parts():
    """Table 2 is the mean of Table 8, and Tables 7 and 9 have their means: each printed to two digits."""
    by_corpus = dict(zip(published.CORPORA, published.LENGTHS_BY_CORPUS.blocks, strict=True))
    for mixer, row in published.LENGTHS.blocks[0].published.items():
        for column, mean in enumerate(row):
            parts = [by_corpus[corpus].published[mixer][column] for corpus in CORPORA]
            assert statistics.fmean(parts) == pytest.approx(mean, abs=0.0101)
    for block in (published.COMMONSENSE.blocks[0], published.RECALL.blocks[2]):
        for *parts, mean in block.published.values():
            assert statistics.fmean(parts) == pytest.approx(mean, abs=0.0101)
    (cube,) = published.CUBE.blocks
    softmax = cube.published["softmax"][0]
    for loss, perplexity, against in cube.published.values():
        assert math.exp(loss) == pytest.approx(perplexity, abs=0.0051)
        if against is not None:
            assert 100 * math.expm1(loss - softmax) == pytest.approx(against, abs=0.011)
    for label, row in ((7, 0), (6, 2)):
        (table,) = [table for table in published.TABLES if table.number == label]
        assert [values[row] for values in table.blocks[0].published.values()] == [39.43, 44.36, 25.64]


def test_published_rows_fit_their_quantities():
    assert [table.number for table in published.TABLES] == [2, 3, 4, 6, 7, 8, 9, 10]
    for table in published.TABLES:
        for block in table.blocks:
            assert {len(row) for row in block.published.values()} == {len(block.quantities)}


def test_figure_2_has_the_printed_points():
    points = {(point.mixer, point.size): point for point in published.figure_2()}
    assert len(points) == 6
    # C = 6 x 1,352,406,784 x 26e9; the paper's perplexities of 1.3B are 8.63 and 7.98.
    assert points["interdomain", "1.3B"].compute == pytest.approx(2.1097546e20, rel=1e-6)
    assert round(points["interdomain", "1.3B"].perplexity, 2) == 7.98
    assert round(points["softmax", "1.3B"].perplexity, 2) == 8.63
    assert round(points["s4d", "125M"].perplexity, 2) == 19.22


def test_numbers_are_in_the_unit_of_the_paper(report):
    commonsense = line(report, 7, "softmax")
    assert commonsense["PIQA"] == tables.Cell((60.0,), (3,))
    assert commonsense["mean"].mean == pytest.approx(100 * 3.45 / 8)
    downstream = line(report, 6, "softmax")
    assert downstream["commonsense, mean of 8, %"].mean == pytest.approx(43.125)
    assert downstream["WikiText-2 bits per byte"].mean == 0.875
    assert math.isnan(downstream["LAMBADA perplexity"].mean)
    assert line(report, 9, "interdomain, softmax")["1K"].mean == pytest.approx(89.5)
    assert line(report, 9, "interdomain, softmax", block=1)["16"].mean == 50.0
    assert line(report, 9, "softmax", block=2)["SWDE"].mean == 12.5
    assert line(report, 9, "softmax", block=2)["mean"] is None
    assert line(report, 10, "softmax")["mean of 14 tasks"].mean == 0.0625


def test_seeds_are_gathered(report):
    loss = line(report, 4, "interdomain")["validation loss"]
    assert (loss.values, loss.sources) == ((1.70, 1.80), (1, 2))
    assert loss.mean == pytest.approx(1.75)
    assert loss.spread == pytest.approx(0.1 / math.sqrt(2))
    assert line(report, 4, "softmax")["validation loss"].spread is None
    against = line(report, 4, "interdomain")["perplexity against softmax, %"]
    assert against.values == pytest.approx([100 * math.expm1(-0.2), 100 * math.expm1(-0.1)])
    # The sources of the softmax run too.
    assert set(against.sources) == {1, 2, 5}
    assert line(report, 3, "interdomain")["tiny"].values == (1_000_011.0,)
    assert line(report, 3, "interdomain, softmax")["125M"].values == (1_000_011.0,)
    assert line(report, 3, "interdomain, softmax")["tiny"] is None
    # One that is not finite among them is told, and hides no other.
    assert math.isnan(tables.Cell((math.nan, 1.0)).spread)


def test_what_is_no_seed_has_a_line_of_its_own(tmp_path):
    """Checkpoints, other configs under one name, and counts that are the same when rounded."""
    needle = [Measurement("needle", "accuracy", 0.5, 200, at=1024)]
    for name, step in (("early", 100_000), ("late", 100_001)):
        write(tmp_path / "run", "recall", name, needle, mixers=["interdomain"], step=step)
    write(tmp_path / "hermitian", "recall", "early", needle, mixers=["interdomain"], step=100_000, read="hermitian")
    report = tables.gather([tmp_path / "run", tmp_path / "hermitian"])
    grids = next(grids for table, grids in report.tables if table.number == 9)
    lines = [each for each in grids[0].lines if (each.mixer, each.origin) == ("interdomain", "measured")]
    size = "tiny (1M), 205M tokens"
    assert [each.size for each in lines] == [
        f'{size}, tokens 204,800,000, model.read "bilinear"',
        f'{size}, tokens 204,802,048, model.read "bilinear"',
        f'{size}, tokens 204,800,000, model.read "hermitian"',
    ]
    assert [each.cells[0].sources for each in lines] == [(1,), (2,), (3,)]


def test_lengths_that_the_paper_has_not_join_its_columns(report):
    mean = line(report, 2, "softmax")
    assert list(mean) == ["4K", "8K", "14K", "16,384"]
    assert mean["4K"].mean == mean["16,384"].mean == 12.0
    # Of 8K there is one corpus of five.
    assert mean["8K"] is None
    assert line(report, 8, "softmax", block=2) | {"4K": None, "16,384": None} == {
        "4K": None,
        "8K": tables.Cell((17.5,), (4,)),
        "14K": None,
        "16,384": None,
    }
    blocks = next(grids for table, grids in report.tables if table.number == 8)
    assert blocks[6].label == "stdlib_text"
    assert [quantity.at for quantity in blocks[6].quantities] == [512, 1024]


def test_a_model_that_was_not_run_has_a_line(report):
    grids = next(grids for table, grids in report.tables if table.number == 2)
    (missing,) = [each for each in grids[0].lines if (each.mixer, each.origin) == ("s4d", "measured")]
    assert (missing.size, set(missing.cells)) == ("no run", {None})


def test_points_of_figure_2(report):
    first, _, softmax = report.measured_points
    assert first == published.Point("interdomain", "tiny", 6 * 1_000_011 * 20_480, pytest.approx(math.exp(1.7)))
    assert softmax.perplexity == pytest.approx(math.exp(1.9))


def test_what_no_table_has_is_listed(report):
    """Nothing that was measured is left out, and nothing is there twice."""
    others = [
        (Path(report.sources[found.source - 1].workdir).name, found.measurement.task, found.measurement.metric)
        for found in report.others
    ]
    assert sorted(others) == [
        ("first", "stdlib_text", "loss"),
        ("first", "stdlib_text", "loss"),
        ("second", "stdlib_text", "loss"),
        ("second", "stdlib_text", "loss"),
        ("softmax", "data/pg19", "loss_by_position"),
        ("softmax", "mqar", "accuracy"),
        ("softmax", "stdlib_text", "loss"),
    ]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (dict(settings={"mode": "windows"}), dict(settings={"mode": "strided"}, samples=2000, finished="2026-02-02")),
        (dict(samples=2000), dict(samples=1000, finished="2026-02-02")),
        (dict(finished="2026-02-02"), dict(finished="2026-02-01")),
    ],
    ids=["mode", "samples", "finished"],
)
def test_of_two_numbers_the_rule_chooses(tmp_path, better, worse):
    for name, value, keywords in (("a", 5.0, better), ("b", 6.0, worse)):
        samples = keywords.get("samples", 1000)
        rest = {key: each for key, each in keywords.items() if key != "samples"}
        measured = [Measurement("pg19", "perplexity", value, samples, at=4096)]
        write(tmp_path, "perplexity", name, measured, mixers=["s4d"], **rest)
    report = tables.gather([tmp_path])
    assert line(report, 8, "s4d")["4K"] == tables.Cell((5.0,), (1,))
    assert [found.measurement.value for found in report.others] == [6.0]


def test_the_markdown_has_every_table_and_source(report, written):
    text = (written / "report.md").read_text()
    for number in (2, 3, 4, 6, 7, 8, 9, 10):
        assert f"## Table {number}. " in text
    assert "| Softmax | 1.3B, 26B tokens | paper | 12.79 | 20.54 | 55.92 | — |" in text
    assert "| Softmax | tiny (1M), 20.5K tokens | measured | 12.00 [4] | — | — | 12.00 [4] |" in text
    assert "1.7500 ± 0.0707 (1.7000; 1.8000) [1, 2]" in text
    assert "not finite [3]" in text
    assert re.search(
        r"^5\. .*softmax, perplexity `perplexity`: `python eval.py .*commit abc123; 1 x a device", text, re.M
    )
    assert "mode windows" in text
    # Every row of a table has as many cells as its head.
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({row.count("|") for row in block.splitlines()}) == 1, block


def test_the_json_is_strict(report, written):
    """lm-eval#934: NumPy integers and NaN in results files."""
    content = json.loads(
        (written / "report.json").read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON")
    )
    assert [table["table"] for table in content["tables"]] == [2, 3, 4, 6, 7, 8, 9, 10]
    source = content["sources"][2]
    assert (source["number"], source["name"]) == (3, "commonsense8")
    assert {"command", "config", "machine", "versions", "settings"} <= set(source)
    assert source["config"]["clip"] is None
    (downstream,) = content["tables"][3]["blocks"]
    (cells,) = [
        each["cells"] for each in downstream["lines"] if (each["mixer"], each["origin"]) == ("softmax", "measured")
    ]
    assert cells[1] == {
        "value": pytest.approx(43.125),
        "spread": None,
        "values": [pytest.approx(43.125)],
        "sources": [3],
    }
    assert cells[3] == {"value": None, "spread": None, "values": [None], "sources": [3]}
    assert len(content["figure_2"]["measured"]) == 3


def test_the_figures_have_something_on_them(written):
    for name in (table_files.FIGURE_2, table_files.LENGTHS):
        image = matplotlib.image.imread(written / name)[..., :3]
        assert image.std() > 0.01, name


def test_bad_input_is_told_in_a_sentence(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty yet; `python eval\.py --workdir=.*empty` does it"):
        tables.gather([tmp_path / "empty"])
    with pytest.raises(FileNotFoundError, match="which is no directory"):
        tables.gather([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="more than once"):
        tables.gather([runs[0], f"{runs[0]}/"])
    with pytest.raises(ValueError, match="--runs is empty"):
        tables.gather([])
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="nothing can be written"):
        table_files.prepare(tmp_path / "file" / "report")


def test_the_command_line(runs, tmp_path):
    def run(*flags):
        return subprocess.run(
            [sys.executable, "eval.py", *flags], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )

    done = run(f"--report={tmp_path}/report", f"--runs={','.join(map(str, runs))}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report" / "report.md").exists()
    refused = run(f"--report={tmp_path}/report", "--workdir=runs/tiny")
    assert refused.returncode == 1
    assert refused.stderr.startswith("eval.py: give one of --workdir")
