"""The programs that report on the kernels: from compilers alone, and on a GPU (here on a CPU, interpreted)."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kernel_report
from benchmarks.compilers import missing_compiler
from benchmarks.kernel_report import KernelProblem
from tests.quick import quick_environment

ROOT = Path(__file__).parents[2]


@pytest.mark.compiled
@pytest.mark.parametrize("device", ["v5e", "H100"])
def test_the_report_has_a_row_for_each_kernel(device, monkeypatch):
    if missing_compiler(device):
        pytest.skip(f"{missing_compiler(device)} is not installed")
    tiny = KernelProblem(batch=1, length=256, heads=2, kv_heads=2, width=64)
    monkeypatch.setattr(kernel_report, "SHAPES", (tiny, tiny._replace(length=1)))
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in kernel_report.report(device)]
    assert [row[:3] for row in rows] == [
        [device, "forward", "1 x 256 x 2 x 64"],
        [device, "fwd + bwd", "1 x 256 x 2 x 64"],
        [device, "step", "1 x 1 x 2 x 64"],
    ]
    assert all(len(row) == kernel_report.HEADER.strip().splitlines()[-2].count("|") - 1 for row in rows)


def test_the_gpu_benchmark_checks_and_times_every_case(tmp_path):
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            f"--output={tmp_path / 'report.md'}",
            "--tokens=32",
            "--lengths=32",
            "--heads=1",
            "--head_dim=8",
            "--repeats=1",
            "--peak_size=8",
            "--parity_length=20",
        ],
        cwd=ROOT,
        env=quick_environment(),
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    table = [line.split("|")[1:-1] for line in (tmp_path / "report.md").read_text().splitlines() if "|" in line]
    parity = {row[0].strip(): [float(cell) for cell in row[1:]] for row in table if row[0].strip() in DTYPES}
    assert max(parity["float32"]) < 1e-5
    assert max(parity["bfloat16"]) < 3e-2
    times = [row for row in table if row[0].strip() == "32"]
    assert [row[1].strip() for row in times] == ["forward", "fwd + bwd", "layer, fwd + bwd"]
    assert all(float(cell) > 0 for row in times for cell in row[2:7])


DTYPES = ("float32", "bfloat16")
