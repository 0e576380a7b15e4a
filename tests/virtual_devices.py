"""Runs a program on eight virtual devices, which only a fresh process can have."""

import subprocess
import sys
from pathlib import Path

from tests.quick import environment_with, quick_environment

ROOT = Path(__file__).parents[1]


def run_on_eight_devices(program: str, *arguments: str, quick: bool = False) -> str:
    """What the Python program prints; it fails the test with its errors if it does not end well.

    With `quick`, its programs are quick to compile, as in `tests.quick`.
    """
    flags = "--xla_force_host_platform_device_count=8"
    environment = quick_environment(flags) if quick else environment_with(flags)
    finished = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout
