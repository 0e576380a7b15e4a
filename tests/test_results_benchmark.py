"""The benchmarks' results are gathered, kept and shown; their peers do what they say; the gate tells what is slow."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cells, data_peers, gate, peers, results_report, tables
from benchmarks.cells import Cell, Grid
from benchmarks.gate import RATIOS
from interdomain_jax.data.tokenizers import BytesTokenizer
from tests.quick import quick_environment

ROOT = Path(__file__).parents[1]
MIXER = "--compared_lengths=16 --lengths=16,32 --compiled_length=4 --chunk_sizes=8 --repeats=1"
SMALL = "--heads=1 --head_dim=4 --state_dim=4 --nopeers"


def example_record():
    work = [
        Cell({"tokens": 1024, "pass": each}, {"ours": 1e-3, "rival": rival, "bound": 5e-4}, {"ours": 2_000_000})
        for each, rival in (("forward", 4e-3), ("fwd + bwd", math.nan))
    ]
    reading = Cell({"rows": "packed"}, {"ours": 0.5}, labels={"ours": "chunk 8"}, of_peak={"ours": 0.25}, tokens=1000)
    grids = [Grid("A call", "ours", ("bound",), "ms", work), Grid("Reading", "ours", (), "tokens/s", [reading])]
    return cells.record("two heads", {"ours": "our form", "other": "not timed"}, grids, ["a remark"])


def test_a_record_is_read_as_it_was_written(tmp_path):
    written = example_record()
    assert written.cases == {"ours": "our form"}
    cells.save(tmp_path / "record.json", written)
    read = cells.load(tmp_path / "record.json")
    assert math.isnan(read.grids[0].cells[1].seconds["rival"])
    # NaN is equal to nothing.
    assert repr(read) == repr(written)


def test_the_markdown_has_ratios_first():
    record = json.loads(json.dumps(example_record()._asdict() | {"grids": []}))
    record["grids"] = [grid._asdict() | {"cells": [c._asdict() for c in grid.cells]} for grid in example_record().grids]
    run = {"command": "python -m benchmarks.mixer", "minutes": 1.5, "load": 0.2}
    text = results_report.markdown({"mixer": {"run": run, "record": record}})
    assert "| tokens | pass | rival | ours / bound |\n| ---: | --- | ---: | ---: |" in text
    assert "| 1,024 | forward | 4.00 | 2.00 |" in text
    assert "| 1,024 | fwd + bwd | 1.000 | does not fit | 0.500 |" in text
    assert "| packed | 25% |" in text
    assert "| packed | 2,000 (chunk 8) |" in text
    assert "`python -m benchmarks.mixer`, commit " in text
    assert text.index("4.00 | 2.00") < text.index("* **ours**: our form") < text.index("does not fit")


def test_the_committed_results_are_those_of_the_data():
    saved = ROOT / "benchmarks" / "results.json"
    if not saved.exists():
        pytest.skip("there are no results in this checkout")
    assert results_report.markdown(json.loads(saved.read_text())) == (ROOT / "benchmarks" / "RESULTS.md").read_text()


def run_results(tmp_path, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.results", f"--output={tmp_path}", *arguments],
        cwd=ROOT,
        env=quick_environment(),
        capture_output=True,
        text=True,
    )


def test_a_part_is_replaced_and_the_others_are_kept(tmp_path):
    kept = {"run": {"command": "c", "minutes": 1.0, "load": 0.0}, "record": example_record()._asdict() | {"grids": []}}
    (tmp_path / "results.json").write_text(json.dumps({"decode": kept}))
    finished = run_results(tmp_path, "--parts=mixer", f"--mixer={MIXER} {SMALL}")
    assert finished.returncode == 0, finished.stderr
    saved = json.loads((tmp_path / "results.json").read_text())
    assert list(saved) == ["mixer", "decode"]
    assert saved["decode"] == json.loads(json.dumps(kept))
    assert MIXER in saved["mixer"]["run"]["command"]
    assert (tmp_path / "RESULTS.md").read_text() == results_report.markdown(saved)
    finished = run_results(tmp_path, "--parts=mixer", "--mixer=--heads=none")
    assert finished.returncode != 0
    assert "the benchmark of mixer ended with exit code" in finished.stderr
    assert json.loads((tmp_path / "results.json").read_text()) == saved


def test_an_unknown_part_is_refused(tmp_path):
    finished = run_results(tmp_path, "--parts=mixer,speed")
    assert finished.returncode != 0
    assert "--parts has speed; there are mixer, decode, data, trainer" in finished.stdout + finished.stderr
    assert not os.listdir(tmp_path)


class Documents:
    """Seven documents of rising length, their ids all different."""

    lengths = np.arange(3, 10, dtype=np.int32)

    def read(self, document, start, stop):
        first = int(self.lengths[:document].sum())
        return np.arange(first + start, first + stop, dtype=np.int32)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_grain_lays_the_same_documents_into_rows(packing):
    batches = data_peers.grain_batches(Documents(), sequence_length=6, batch_size=2, packing=packing)
    # Grain fills 64 rows at a time, and gives them in any order.
    rows = [row for _ in range(64) for row in next(batches)["ids"]]
    batches.close()
    assert {row.shape for row in rows} == {(6,)}
    assert {int(each) for row in rows for each in row} == set(range(Documents.lengths.sum()))


def test_datasets_reads_whole_rows_of_ids(tmp_path):
    rows = data_peers.dataset_rows(Documents(), 6, tmp_path)
    batches = data_peers.dataset_batches(rows, 3)
    ids = np.concatenate([next(batches)["ids"] for _ in range(len(rows) // 3)])
    assert ids.shape[1] == 6
    assert len({*ids.reshape(-1)}) == ids.size
    assert int(ids.max()) < Documents.lengths.sum()


def test_datasets_prepares_the_same_ids(tmp_path):
    tokenizer = BytesTokenizer()
    data_peers.prepare(["one", "other"], tokenizer, tmp_path / "corpus.arrow")
    from datasets import Dataset

    rows = Dataset.from_file(str(tmp_path / "corpus.arrow"))["ids"]
    assert [list(row) for row in rows] == [[*tokenizer.encode(text), tokenizer.eos_id] for text in ("one", "other")]


def test_a_state_of_mlstm_is_as_large_as_ours():
    memory, normalizer, level = peers.mlstm_state(jnp.ones((2, 3, 8, 4)))
    assert (memory.shape, normalizer.shape, level.shape) == ((2, 3, 8, 4), (2, 3, 8), (2, 3, 1))


def test_columns_of_numbers_are_set_to_the_right():
    lines = tables.as_markdown(tables.Table("title", ["what", "ms"], [["a", "1.0"], ["b", ""]]))
    assert lines == ["title", "", "| what | ms |", "| --- | ---: |", "| a | 1.0 |", "| b |  |"]


BOUNDS = {ratio.name: 2.0 for ratio in RATIOS}


def test_the_gate_passes_what_is_within_its_bound_once():
    slow = RATIOS[1]
    answers = iter([{ratio: 3.0 if ratio == slow else 1.0 for ratio in RATIOS}, {slow: 1.5}])
    tries = gate.judge(BOUNDS, lambda ratios: next(answers))
    assert tries.pop(slow) == [3.0, 1.5]
    assert all(values == [1.0] for values in tries.values())


def test_the_gate_fails_what_is_above_its_bound_every_time():
    asked = []

    def measure(ratios):
        asked.append(list(ratios))
        return {ratio: 3.0 if ratio == RATIOS[0] else 1.0 for ratio in ratios}

    assert gate.judge(BOUNDS, measure)[RATIOS[0]] == [3.0, 3.0, 3.0]
    assert asked == [list(RATIOS), [RATIOS[0]], [RATIOS[0]]]


def test_the_gate_has_a_bound_for_every_ratio():
    ratios = json.loads((ROOT / "benchmarks" / "gate.json").read_text())["ratios"]
    assert list(ratios) == [ratio.name for ratio in RATIOS]
    assert all(each["least"] <= each["median"] < each["bound"] for each in ratios.values())
