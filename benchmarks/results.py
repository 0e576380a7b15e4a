"""All benchmarks in turn, each in a process of its own; their figures go into `results.json` and `RESULTS.md`.

    python -m benchmarks.results
    python -m benchmarks.results --parts=mixer,decode
    python -m benchmarks.results --parts=trainer --trainer='--lengths=4096 --repeats=3'

A part that is measured takes the place of its old figures; the other parts stay as they are. So what was interrupted
goes on with the parts that are left. `RESULTS.md` is written from `results.json` alone; without parts, `--parts=`, only
that is done. The commit is the one that the command began with.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks.results_report import PARTS, markdown
from interdomain_jax import strict_json
from interdomain_jax.version import code_version

_PARTS = flags.DEFINE_list("parts", list(PARTS), f"What to measure: {', '.join(PARTS)}.")
_OUTPUT = flags.DEFINE_string("output", "benchmarks", "The directory of results.json and RESULTS.md.")
_FIGURE = flags.DEFINE_string("figure", "docs/images/decode.png", "The figure that the part decode draws.")
_OPTIONS = {part: flags.DEFINE_string(part, "", f"Options of benchmarks/{part}.py.") for part in PARTS}


def measure(part: str, options: list[str], commit: str | None) -> dict[str, Any]:
    """Runs the program of a part, and returns its record as JSON, with what is known of the run.

    Raises:
        RuntimeError: the program failed.
    """
    load, started = os.getloadavg()[0], time.monotonic()
    command = ["-m", f"benchmarks.{part}", *options]
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "record.json"
        code = subprocess.run([sys.executable, *command, f"--json={output}"], check=False).returncode
        if code:
            raise RuntimeError(f"the benchmark of {part} ended with exit code {code}; the parts before it are saved")
        measured = json.loads(output.read_text(encoding="utf-8"))
    # The figures of the parts before it have changed the checkout.
    measured["versions"]["commit"] = commit
    run = {"command": shlex.join(["python", *command]), "minutes": (time.monotonic() - started) / 60, "load": load}
    return {"run": run, "record": measured}


def main(_: list[str]) -> None:
    """Measures the parts, and writes the results after each."""
    if unknown := set(_PARTS.value) - set(PARTS):
        raise app.UsageError(f"--parts has {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    output = Path(_OUTPUT.value)
    saved = output / "results.json"
    results = json.loads(saved.read_text(encoding="utf-8")) if saved.exists() else {}
    commit = code_version()["commit"]
    for part in _PARTS.value:
        options = [*([f"--figure={_FIGURE.value}"] if part == "decode" else []), *shlex.split(_OPTIONS[part].value)]
        try:
            results[part] = measure(part, options, commit)
        except RuntimeError as error:
            sys.exit(str(error))
        strict_json.write(saved, {each: results[each] for each in PARTS if each in results})
        _write(output, results)
    _write(output, results)


def _write(output: Path, results: Mapping[str, Any]) -> None:
    (output / "RESULTS.md").write_text(markdown({each: results[each] for each in PARTS if each in results}), "utf-8")


if __name__ == "__main__":
    app.run(main)
