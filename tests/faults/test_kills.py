"""kill -9 at random moments: nothing is lost, nothing is done twice, and nothing is different."""

import random
import signal

from tests.faults.harness import Signal, Start, assert_same_run, finish, is_saving, joining

KILLS = 20
# What a run does, as its loop calls it, and for how long after the call the kill may come.
MOMENTS = {
    "_start": 0.5,
    "_compile": 0.5,
    "sharding.place_batch": 0.05,
    "MetricsWriter.write": 0.05,
    "_validation_loss": 0.02,
    "checkpointing.save": 0.1,
    "storage.check_for_errors": 0.05,
}


def test_a_run_killed_twenty_times_equals_one_that_was_not(tmp_path, cache):
    """Starting, compiling, training, validating or saving: each time in the middle of one of them."""
    fields = {"num_steps": 60, "checkpoint_every": 3, "eval_every": 5, "optimizer.warmup_steps": 4}
    finish(tmp_path / "whole", fields, cache=cache)

    workdir = tmp_path / "killed"
    choose = random.Random(0)
    saving = 0
    for kill in range(KILLS):
        function = list(MOMENTS)[kill % len(MOMENTS)]
        call = 1 if MOMENTS[function] > 0.1 else choose.randint(1, 3)
        moment = Signal(function, call, choose.uniform(0.001, MOMENTS[function]), signal.SIGKILL)
        start = Start(workdir, fields, cache=cache, signal_in=moment)
        assert start.wait() == -signal.SIGKILL, f"{moment}:\n{start.output()}"
        saving += function == "checkpointing.save" and is_saving(workdir)
    assert saving > 0

    finish(workdir, fields, cache=cache)
    assert_same_run(workdir, tmp_path / "whole")


def test_of_two_processes_one_is_killed(tmp_path, cache):
    """The other ends by itself; both are started again."""
    fields = {"num_steps": 16, "checkpoint_every": 3, "accumulation_steps": 1}

    def start_both(workdir, signals=(None, None)):
        return [
            Start(workdir, fields, more_flags=flags, cache=cache, signal_in=signal_in)
            # Who is left soon misses the other.
            for flags, signal_in in zip(joining(2, peer_timeout=10), signals, strict=True)
        ]

    for start in start_both(tmp_path / "whole"):
        assert start.wait() == 0, start.output()

    workdir = tmp_path / "killed"
    moment = Signal("sharding.place_batch", 5, 0.0, signal.SIGKILL)
    for signals in ((None, moment), (moment, None)):
        for start, signal_in in zip(start_both(workdir, signals), signals, strict=True):
            code = start.wait()
            assert code == -signal.SIGKILL if signal_in else code not in (0, None), start.output()
    for start in start_both(workdir):
        assert start.wait() == 0, start.output()
    assert_same_run(workdir, tmp_path / "whole")
