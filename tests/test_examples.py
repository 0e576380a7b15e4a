"""The examples run as printed in them, and what they learn is learned."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def numbers_printed_by(example):
    """The numbers in the last line that the example prints."""
    finished = subprocess.run([sys.executable, f"examples/{example}"], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", finished.stdout.splitlines()[-1])]


def test_the_linen_encoder_learns():
    before, after, _ = numbers_printed_by("linen_encoder.py")
    assert after < before / 3


@pytest.mark.fast
def test_the_nnx_model_learns_and_decodes():
    before, after, _, percent_right = numbers_printed_by("nnx_model.py")
    assert after < before / 3
    assert percent_right > 75  # one in eight by chance


def test_the_bare_op_answers_from_the_state_it_was_given():
    first, *later = numbers_printed_by("bare_op.py")
    assert len(later) == 9
    assert first < min(later)  # the first window asks for entries that no one has written yet
    assert min(later) > 75  # one in eight by chance
