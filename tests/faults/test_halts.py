"""A run that comes to a halt ends, and names who is missing."""

import os
import threading

from interdomain_jax import watchdog as watchdogs
from interdomain_jax.watchdog import EXIT_CODE, Watchdog
from tests.faults.harness import Start, joining, wait_for_step


def test_a_process_that_never_comes_is_named(tmp_path, cache):
    """marin#8538: one late host held all the others at a barrier, for hours."""
    first, _ = joining(2, peer_timeout=1)
    start = Start(tmp_path / "run", more_flags=first, cache=cache)
    assert start.wait(60) == EXIT_CODE, start.output()
    assert "(five times --peer_timeout): process 0" in start.output()
    assert "process 1 is ABSENT: it was never heard of" in start.output()


def test_a_process_that_stands_still_is_named(tmp_path, cache):
    fields = {"num_steps": 5000, "accumulation_steps": 1, "hang_seconds": 20.0}
    # So patient that JAX itself notices nothing.
    starts = [Start(tmp_path / "run", fields, more_flags=flags, cache=cache) for flags in joining(2, peer_timeout=600)]
    wait_for_step(tmp_path / "run", 3, starts)
    starts[1].suspend()
    assert starts[0].wait(90) == EXIT_CODE, starts[0].output()
    starts[1].kill()
    output = starts[0].output()
    assert "nothing has moved for 20 s (hang_seconds): process 0" in output
    assert "process 1 on " in output
    assert "is ABSENT: last heard of" in output
    assert "in _train_from" in output, "the stacks of all threads"


def test_one_process_alone(tmp_path, capfd):
    codes = []
    ended = threading.Event()

    def end(code):
        codes.append(code)
        ended.set()

    limits = {"limit": 0.3, "limit_name": "hang_seconds", "process": "0", "processes": ["0"]}
    with Watchdog(tmp_path, **limits, exit_process=end) as watchdog:
        for step in range(5):
            watchdog.beat(step, "training")
            assert not ended.wait(0.1)
        watchdog.beat(5, "waiting for data")
        assert ended.wait(30)
    assert codes == [EXIT_CODE]
    assert "Current thread" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_workdir_that_does_not_answer_holds_nothing_up(tmp_path, monkeypatch):
    """It may be why nothing moves."""
    monkeypatch.setattr(watchdogs, "_PATIENCE", 0.1)
    # Who opens a pipe waits until the other side does.
    (tmp_path / "processes").mkdir()
    os.mkfifo(tmp_path / "processes" / "1.json")
    ended = threading.Event()
    limits = {"limit": 0.2, "limit_name": "hang_seconds", "process": "0", "processes": ["0", "1"]}
    with Watchdog(tmp_path, **limits, exit_process=lambda code: ended.set()):
        assert ended.wait(10)
    with open(tmp_path / "processes" / "1.json", "w"):
        """What waits for it goes on, and ends."""
