"""The examples run as printed in them, and what they learn is learned."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.quick import quick_environment

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "walkthrough.ipynb"


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


def read_notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def run_notebook(directory, environment, **parameters):
    """Runs the notebook with these values in its cell of parameters, and its home in the directory."""
    notebook = read_notebook()
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    for name, value in {"WORKDIR": f"{directory}/run", **parameters}.items():
        cell.source, count = re.subn(rf"^{name} = .*", f"{name} = {value!r}", cell.source, flags=re.MULTILINE)
        assert count == 1, name
    client = NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute(env=environment | {"HOME": str(directory)})
    return notebook


def shown_by(notebook):
    """What its cells print, and the pictures that they show."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    return text, [output.data["image/png"] for output in outputs if "image/png" in output.get("data", ())]


def require_whole(notebook):
    """Everything ran in order, and showed what there is to see."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    text, pictures = shown_by(notebook)
    assert len(pictures) == 3
    assert text.count("class Test(unittest.TestCase):") == 3
    assert len({*re.findall(r"a state behind .* bytes of text: (.*) bytes", text)}) == 1


def test_the_notebook_runs(tmp_path):
    notebook = run_notebook(tmp_path, quick_environment(), NUM_STEPS=2, NUM_LAYERS=1, MAX_TOKENS=4096, NEW_TOKENS=8)
    require_whole(notebook)
    assert (tmp_path / "run" / "checkpoints" / "2").exists()


def test_the_notebook_that_is_kept_is_whole_and_small():
    require_whole(read_notebook())
    assert last_validation_loss(read_notebook()) < 2.0
    content = NOTEBOOK.read_text()
    assert len(content) < 300_000
    assert str(Path.home()) not in content
    assert str(ROOT) not in content


def last_validation_loss(notebook):
    text, _ = shown_by(notebook)
    return float(re.findall(r"validation loss ([\d.]+) nats", text)[-1])


@pytest.mark.slow
def test_the_notebook_shows_what_it_shows_again(tmp_path):
    """Minutes. Another version of Python has another library, and so another text."""
    notebook = run_notebook(tmp_path, dict(os.environ))
    require_whole(notebook)
    assert last_validation_loss(notebook) == pytest.approx(last_validation_loss(read_notebook()), abs=0.1)
