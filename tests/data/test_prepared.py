"""One order of rows for any number of processes, and a position that is one number."""

import itertools
import threading

import numpy as np
import pytest

from interdomain_jax.data.prepared import PreparedBatches
from interdomain_jax.data.rows import ConcatenatedRows
from interdomain_jax.data.windows import Windows

T = 4


def corpus(first, count):
    """So many rows; the targets of row n are all `first + n`."""
    documents = [np.full(T, first + n, np.int32) for n in range(count)]
    return Windows(documents, ConcatenatedRows(np.full(count, T), sequence_length=T), sequence_length=T, eos_id=0)


def numbers(batches, count):
    return np.array([batch["targets"][:, 0] for batch in itertools.islice(batches, count)])


@pytest.fixture
def open_batches():
    opened = []

    def make(*arguments, **options):
        opened.append(PreparedBatches(*arguments, **options))
        return opened[-1]

    yield make
    for batches in opened:
        batches.close()


def test_each_epoch_has_every_row_once_in_a_fresh_order(open_batches):
    order = numbers(open_batches([corpus(1, 12)], batch_size=4, seed=0), 9).ravel()
    epochs = order.reshape(3, 12)
    for epoch in epochs:
        assert sorted(epoch) == list(range(1, 13))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = numbers(open_batches([corpus(1, 12)], batch_size=4, seed=1), 9).ravel()
    assert list(other) != list(order)


def test_batches_do_not_depend_on_the_number_of_processes(open_batches):
    whole = numbers(open_batches([corpus(1, 7)], batch_size=4, seed=3), 10)
    for parts in ([[0, 1], [2, 3]], [[0], [1], [2], [3]], [[0, 3], [1, 2]]):
        for rows in parts:
            own = numbers(open_batches([corpus(1, 7)], batch_size=4, seed=3, rows=rows), 10)
            np.testing.assert_array_equal(own, whole[:, rows])


def test_another_number_of_processes_goes_on(open_batches):
    whole = numbers(open_batches([corpus(1, 7)], batch_size=4, seed=3), 10)
    before = open_batches([corpus(1, 7)], batch_size=4, seed=3, rows=[0, 1])
    numbers(before, 6)
    assert before.get_state() == {"batches": 6}
    for rows in ([0], [1, 2, 3], None):
        after = open_batches([corpus(1, 7)], batch_size=4, seed=3, rows=rows)
        after.set_state(before.get_state())
        np.testing.assert_array_equal(numbers(after, 4), whole[6:][:, rows or slice(None)])
        assert after.get_state() == {"batches": 10}


def test_corpora_are_mixed_by_weight(open_batches):
    batches = open_batches([corpus(1, 5), corpus(101, 50)], weights=[3, 1], batch_size=8, seed=0)
    order = numbers(batches, 25).ravel()
    assert (order <= 100).sum() == 150
    # Evenly: in every stretch of eight rows six are of the first.
    assert set((order.reshape(-1, 8) <= 100).sum(axis=1)) == {6}
    assert sorted(order[order > 100]) == list(range(101, 151))


def test_no_thread_outlives_it():
    before = set(threading.enumerate())
    for _ in range(5):
        batches = PreparedBatches([corpus(1, 7)], batch_size=2, seed=0)
        next(batches)
        batches.set_state({"batches": 3})
        next(batches)
        batches.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize(
    ("corpora", "weights", "named"),
    [
        ([], None, "at least one row"),
        ([corpus(1, 0)], None, "at least one row"),
        ([corpus(1, 2)], [0.0], r"above 0, one for each of the 1 corpora; got \[0.0\]"),
        ([corpus(1, 2)], [1.0, 1.0], "one for each of the 1"),
    ],
)
def test_bad_input(corpora, weights, named):
    with pytest.raises(ValueError, match=named):
        PreparedBatches(corpora, weights=weights, batch_size=2, seed=0)
