"""SIGTERM at any moment: a checkpoint is written, the exit code is 0, and the same command goes on exactly."""

import pytest

from tests.faults.harness import Signal, Start, assert_same_run, finish, joining, steps

FIELDS = {"num_steps": 12, "checkpoint_every": 5, "eval_every": 6, "eval_tokens": 1000}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """The workdir of the run that nobody interrupts."""
    workdir = tmp_path_factory.mktemp("notices") / "whole"
    finish(workdir, FIELDS, cache=cache)
    return workdir


@pytest.mark.parametrize(
    ("signal_in", "saved"),
    [
        (Signal("lower_train_step", 1, 0.3), 0),
        (Signal("score_batches", 1), 6),
        # The first checkpoint is being written in the background.
        (Signal("storage.check_for_errors", 6), 6),
        (Signal("sharding.place_batch", 3), 3),
    ],
    ids=["compiling", "validating", "saving", "training"],
)
def test_it_is_saved_and_goes_on(tmp_path, cache, whole, signal_in, saved):
    workdir = tmp_path / "run"
    # A compilation has to last until the signal.
    compiles = signal_in.function == "lower_train_step"
    start = Start(workdir, FIELDS, signal_in=signal_in, cache=None if compiles else cache)
    assert start.wait() == 0, start.output()
    assert "asked to stop" in start.output()
    assert max(steps(workdir)) == saved, start.output()
    assert "steps 1 to 12" in start.output()
    finish(workdir, FIELDS, cache=cache)
    assert_same_run(workdir, whole)


def test_while_it_waits_for_data(tmp_path, cache, whole):
    workdir = tmp_path / "run"
    # The figures are counted from right before the first batch is asked for, and that never comes.
    start = Start(workdir, FIELDS, cache=cache, hangs=True, signal_in=Signal("Report", 1, 1.0))
    assert start.wait() == 0, start.output()
    assert "asked to stop: saved at step 0" in start.output()
    finish(workdir, FIELDS, cache=cache)
    assert_same_run(workdir, whole)


@pytest.fixture(scope="module")
def whole_of_two(tmp_path_factory, cache):
    """The workdir of the run that two processes do and nobody interrupts."""
    workdir = tmp_path_factory.mktemp("notices") / "two"
    run_two(workdir, cache)
    return workdir


def run_two(workdir, cache, *, signal_in_second=None):
    """What the first of two processes prints; both must end well."""
    starts = [
        Start(workdir, FIELDS | {"accumulation_steps": 1}, more_flags=flags, cache=cache, signal_in=signal_in)
        for flags, signal_in in zip(joining(2), (None, signal_in_second), strict=True)
    ]
    for start in starts:
        assert start.wait() == 0, start.output()
    return starts[0].output()


@pytest.mark.parametrize("function", ["score_batches", "sharding.place_batch"], ids=["validating", "training"])
def test_one_of_two_processes_is_told(tmp_path, cache, whole_of_two, function):
    """Both save the same step, and end."""
    workdir = tmp_path / "told"
    assert "asked to stop: saved at step" in run_two(workdir, cache, signal_in_second=Signal(function, 1))
    assert max(steps(workdir)) < 12
    run_two(workdir, cache)
    assert_same_run(workdir, whole_of_two)


def test_one_of_two_processes_is_told_before_it_trains(tmp_path, cache):
    """It ends at once; the other misses it, and ends too."""
    told = Signal("lower_train_step", 1)
    first, second = (
        Start(tmp_path / "run", FIELDS | {"accumulation_steps": 1}, more_flags=flags, cache=cache, signal_in=signal_in)
        for flags, signal_in in zip(joining(2, peer_timeout=10), (None, told), strict=True)
    )
    assert second.wait() == 0, second.output()
    assert "nothing is lost" in second.output()
    assert first.wait() not in (0, None), first.output()
