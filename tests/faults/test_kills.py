"""kill -9 at random moments: nothing is lost, nothing is done twice, and nothing is different."""

import random

import pytest

from tests.faults.harness import Start, assert_same_run, finish, is_saving, joining, steps, wait_for_step

KILLS = 20


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


def test_a_run_killed_twenty_times_equals_one_that_was_not(tmp_path, cache):
    """Starting, training, validating or saving: 20 moments drawn at random over the run."""
    fields = {"num_steps": 48, "checkpoint_every": 3, "eval_every": 8, "optimizer.warmup_steps": 4}
    finish(tmp_path / "whole", fields, cache=cache)

    workdir = tmp_path / "killed"
    moments = random.Random(0)
    saving = 0
    for kill in range(KILLS):
        start = Start(workdir, fields, cache=cache)
        if kill % 4:
            # While it trains and saves; every fourth time while it starts.
            wait_for_step(workdir, max([0, *steps(workdir)]) + moments.randint(1, 4), [start])
            moments_from_here = 0.3
        else:
            moments_from_here = 3.0
        start.kill_after(moments.uniform(0.0, moments_from_here))
        saving += is_saving(workdir) if workdir.exists() else 0
    assert saving >= 2
    assert max(steps(workdir)) < 48

    finish(workdir, fields, cache=cache)
    assert_same_run(workdir, tmp_path / "whole")


def test_of_two_processes_one_is_killed(tmp_path, cache):
    """The other ends by itself; both are started again."""
    fields = {"num_steps": 16, "checkpoint_every": 3, "accumulation_steps": 1}

    def start_both(workdir):
        return [Start(workdir, fields, more_flags=flags, cache=cache) for flags in joining(2)]

    for start in start_both(tmp_path / "whole"):
        assert start.wait() == 0, start.output()

    workdir = tmp_path / "killed"
    moments = random.Random(1)
    for victim in (1, 0):
        starts = start_both(workdir)
        wait_for_step(workdir, max([0, *steps(workdir)]) + 4, starts)
        starts[victim].kill_after(moments.uniform(0.0, 0.3))
        code = starts[1 - victim].wait(60)
        assert code not in (0, None), starts[1 - victim].output()
    for start in start_both(workdir):
        assert start.wait() == 0, start.output()
    assert_same_run(workdir, tmp_path / "whole")
