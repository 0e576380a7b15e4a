"""The benchmark of the mixer measures what it says."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks import mixer
from interdomain_jax.ops import interdomain_attention
from tests.numerics import assert_close, random_dynamics, random_qkv

ROOT = Path(__file__).parents[1]


def test_its_paper_form_is_the_op():
    rng = np.random.default_rng(0)
    q, k, v = random_qkv(rng, 2, 12, 2, 2, 4, 3)
    dynamics = random_dynamics(rng, 2, 8)
    expected, _ = interdomain_attention(q, k, v, dynamics, implementation="sequential")
    assert_close(mixer.paper_form(q, k, v, dynamics), expected, 1e-5)


def test_it_reports_every_case():
    finished = subprocess.run(
        [sys.executable, "benchmarks/mixer.py", "--lengths=32,64", "--repeats=1", "--head_dim=8", "--state_dim=8"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    for case in ("chunked", "sequential", "paper", "softmax"):
        assert finished.stdout.count(f"│ {case} ") == 4
    assert "chunked, forward: 64 tokens take" in finished.stdout
