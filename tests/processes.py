"""Runs a program in several processes, joined over the loopback network as the hosts of a pod are."""

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.quick import quick_environment

ROOT = Path(__file__).parents[1]


def run_processes(
    count: int, program: str, *flags: str, devices: int = 1, cache: Path | None = None, timeout: float = 240.0
) -> list[str]:
    """What each process of the Python program prints; fails the test unless all of them end well and in time.

    What they compile is quick to compile, as in `tests.quick`.

    Args:
        count: of processes; each also gets the flags of `cli.join_processes`, unless it is alone.
        program: source text.
        flags: of its command line.
        devices: virtual devices of each process.
        cache: a directory of compiled programs; None to compile everything.
        timeout: seconds, after which, as after the first failure, those that still run are killed.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environment = quick_environment(f"--xla_force_host_platform_device_count={devices}")
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    if cache is not None:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    logs = [tempfile.TemporaryFile() for _ in range(count)]  # noqa: SIM115
    processes = []
    try:
        for number, log in enumerate(logs):
            join = (f"--coordinator_address={address}", f"--num_processes={count}", f"--process_id={number}")
            command = [sys.executable, "-c", program, *flags, *(join if count > 1 else ())]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        deadline = time.monotonic() + timeout
        codes: list[int | None] = [None] * count
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.1)
            codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outputs = []
    for log in logs:
        with log:
            log.seek(0)
            outputs.append(log.read().decode(errors="replace"))
    report = "\n".join(
        f"process {n} ended with {code}:\n{text}" for n, (code, text) in enumerate(zip(codes, outputs, strict=True))
    )
    assert codes == [0] * count, f"within {timeout} s, None for one that was still running:\n{report}"
    return outputs
