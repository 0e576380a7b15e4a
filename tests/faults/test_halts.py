"""A run that comes to a halt ends, and names who is missing."""

import pytest

from interdomain_jax.watchdog import EXIT_CODE
from tests.faults.harness import Start, joining, wait_for_step


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


def test_a_process_that_never_comes_is_named(tmp_path, cache):
    """marin#8538: one late host held all the others at a barrier, for hours."""
    first, _ = joining(2, peer_timeout=1)
    start = Start(tmp_path / "run", more_flags=first, cache=cache)
    assert start.wait(60) == EXIT_CODE, start.output()
    assert "(five times --peer_timeout): process 0" in start.output()
    assert "process 1 is ABSENT: it was never heard of" in start.output()


def test_a_process_that_stands_still_is_named(tmp_path, cache):
    fields = {"num_steps": 5000, "accumulation_steps": 1, "hang_seconds": 30.0}
    # So patient that JAX itself notices nothing.
    starts = [Start(tmp_path / "run", fields, more_flags=flags, cache=cache) for flags in joining(2, peer_timeout=600)]
    wait_for_step(tmp_path / "run", 3, starts)
    starts[1].suspend()
    assert starts[0].wait(90) == EXIT_CODE, starts[0].output()
    starts[1].kill()
    output = starts[0].output()
    assert "nothing has moved for 30 s (hang_seconds): process 0" in output
    assert "process 1 on " in output
    assert "is ABSENT: last heard of" in output
    assert "in _train_from" in output, "the stacks of all threads"


def test_data_that_never_comes(tmp_path, cache):
    start = Start(tmp_path / "run", {"hang_seconds": 20.0}, cache=cache, hang_at=3)
    assert start.wait(90) == EXIT_CODE, start.output()
    assert "was waiting for data at step 0" in start.output()
