"""Batches: no token lost or repeated, the same after a restart, shared out over processes, mixed by weight."""

import itertools
import json
import math
import subprocess
import sys
import threading

import chex
import hypothesis
import numpy as np
import psutil
import pytest
from hypothesis import strategies as st

from interdomain_jax.data.loader import TrainBatches, corpus_counts, evaluation_batches
from interdomain_jax.data.tokenizers import load_tokenizer
from interdomain_jax.errors import MismatchError
from tests.token_lists import TokenLists, tokenised

EOS = 256
TEXTS = st.lists(st.text(max_size=15), min_size=1, max_size=10)
SIZES = {"sequence_length": st.integers(1, 25), "batch_size": st.integers(1, 4)}
CUTS = st.lists(st.integers(1, 3), max_size=3)
PACKINGS = st.sampled_from(["concatenate", "best_fit"])
# One document far longer than a row, one of a single row, one that is empty.
LONG_AND_SHORT = tokenised(["abcdefgh" * 20, "x" * 7, "", "short"])


@pytest.fixture
def open_batches():
    opened = []

    def make(*corpora, **options):
        opened.append(TrainBatches(corpora, **{"eos_id": EOS, "seed": 0, **options}))
        return opened[-1]

    yield make
    for batches in opened:
        batches.close()


def stream_of(texts):
    """The tokens of these documents: their bytes, each closed by 256."""
    return [token for text in texts for token in [*text.encode(), 256]]


def row_major(batches, key):
    return np.concatenate([batch[key].ravel() for batch in batches])


def shares(batch_size, cuts):
    """The rows of a batch, cut into neighbours at these places."""
    bounds = sorted({0, batch_size, *(cut for cut in cuts if cut < batch_size)})
    return [list(range(start, stop)) for start, stop in itertools.pairwise(bounds)]


def joined(batches_of):
    """The global batches, of each process's own."""
    return [
        {key: np.concatenate([batch[key] for batch in group]) for key in group[0]}
        for group in zip(*batches_of, strict=True)
    ]


@hypothesis.settings(deadline=None)
@hypothesis.given(texts=TEXTS, cuts=CUTS, max_tokens=st.none() | st.integers(1, 60), **SIZES)
def test_evaluation_scores_every_token_once(texts, sequence_length, batch_size, cuts, max_tokens):
    batches_of = [
        list(
            evaluation_batches(
                [tokenised(texts)],
                sequence_length=sequence_length,
                batch_size=batch_size,
                eos_id=EOS,
                max_tokens=max_tokens,
                rows=rows,
            )
        )
        for rows in (None, *shares(batch_size, cuts))
    ]
    stream = stream_of(texts)[:max_tokens]

    expected = math.ceil(len(stream) / (sequence_length * batch_size))
    assert [len(batches) for batches in batches_of] == [expected] * len(batches_of)
    whole, *parts = batches_of
    chex.assert_trees_all_equal(joined(parts), whole)
    for batch in whole:
        for key, dtype in (("inputs", np.int32), ("targets", np.int32), ("loss_mask", np.float32)):
            chex.assert_shape(batch[key], (batch_size, sequence_length))
            assert batch[key].dtype == dtype
    mask = row_major(whole, "loss_mask")
    assert set(mask) <= {0.0, 1.0}
    assert row_major(whole, "targets")[mask == 1].tolist() == stream
    assert row_major(whole, "inputs")[mask == 1].tolist() == [EOS, *stream[:-1]]
    assert row_major(whole, "targets").max() <= 256


def test_a_process_reads_no_rows_but_its_own(monkeypatch):
    corpus = tokenised(["abc"] * 20)
    read = []
    monkeypatch.setattr(corpus, "read", lambda *piece: read.append(piece[0]) or TokenLists.read(corpus, *piece))
    assert len(list(evaluation_batches([corpus], sequence_length=4, batch_size=5, eos_id=EOS, rows=[1]))) == 4
    assert read == [1, 6, 11, 16]


def test_evaluation_goes_through_one_corpus_after_the_other():
    """Each begins a row of its own; documents may be contexts of their own."""
    corpora = [tokenised(["ab", "c"]), tokenised(["de"])]
    batch, *more = evaluation_batches(corpora, sequence_length=4, batch_size=3, reset=True, eos_id=EOS)
    assert not more
    assert {name: rows.tolist() for name, rows in batch.items()} == {
        "inputs": [[EOS, 97, 98, EOS], [99, EOS, EOS, EOS], [EOS, 100, 101, EOS]],
        "targets": [[97, 98, EOS, 99], [EOS, EOS, EOS, EOS], [100, 101, EOS, EOS]],
        "loss_mask": [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]],
        "segment_ids": [[1, 1, 1, 2], [1, 0, 0, 0], [1, 1, 1, 0]],
        "positions": [[0, 1, 2, 0], [0, 0, 0, 0], [0, 1, 2, 0]],
    }


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(texts=TEXTS, seed=st.integers(0, 9), packing=PACKINGS, **SIZES)
def test_an_epoch_has_every_token_once(texts, sequence_length, batch_size, seed, packing):
    """As pairs of a token and the one before it in its document, the closing EOS of each counted."""
    options = dict(sequence_length=sequence_length, batch_size=batch_size, packing=packing, eos_id=EOS, seed=seed)
    batches = TrainBatches([tokenised(texts)], **options)
    expected = sorted(pair for text in texts for pair in itertools.pairwise([EOS, *text.encode(), EOS]))
    found, rows = [], 0
    while len(found) < 2 * len(expected):
        for inputs, targets, mask in zip(*map(next(batches).get, ("inputs", "targets", "loss_mask")), strict=True):
            found += [pair for pair, scored in zip(zip(inputs, targets, strict=True), mask, strict=True) if scored]
            rows += 1
    batches.close()
    assert sorted(found[: len(expected)]) == expected
    assert sorted(found[len(expected) : 2 * len(expected)]) == expected


@pytest.mark.parametrize("reset", [False, True])
def test_documents_are_contexts_of_their_own_if_so_wished(open_batches, reset):
    batch = next(open_batches(tokenised(["ab", "cd"]), sequence_length=6, batch_size=1, reset=reset))
    assert set(batch) == {"inputs", "targets", "loss_mask", *(["segment_ids", "positions"] * reset)}
    if reset:
        assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 2]]
        assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 2]]


T = 4


def corpus(first, count):
    """So many rows; the targets of row n are all `first + n`."""
    return TokenLists(np.full(T, first + n) for n in range(count))


def numbers(batches, count):
    return np.array([batch["targets"][:, 0] for batch in itertools.islice(batches, count)])


def test_each_epoch_has_every_row_once_in_a_fresh_order(open_batches):
    order = numbers(open_batches(corpus(1, 12), sequence_length=T, batch_size=4, seed=0), 9).ravel()
    epochs = order.reshape(3, 12)
    for epoch in epochs:
        assert sorted(epoch) == list(range(1, 13))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = numbers(open_batches(corpus(1, 12), sequence_length=T, batch_size=4, seed=1), 9).ravel()
    assert list(other) != list(order)


def test_no_two_orders_are_alike(open_batches):
    """Of two corpora, two epochs or two seeds, next to each other."""
    orders = []
    for seed in (0, 1):
        batches = open_batches(
            corpus(1, 12), corpus(101, 12), sequence_length=T, weights=[1, 1], batch_size=4, seed=seed
        )
        order = numbers(batches, 12).ravel()
        for own in (order[order < 100], order[order > 100] - 100):
            orders += [tuple(epoch) for epoch in own.reshape(2, 12)]
    assert len(set(orders)) == 8


def test_batches_do_not_depend_on_the_number_of_processes(open_batches):
    whole = numbers(open_batches(corpus(1, 7), sequence_length=T, batch_size=4, seed=3), 10)
    for parts in ([[0, 1], [2, 3]], [[0], [1], [2], [3]], [[0, 3], [1, 2]]):
        for rows in parts:
            own = numbers(open_batches(corpus(1, 7), sequence_length=T, batch_size=4, seed=3, rows=rows), 10)
            np.testing.assert_array_equal(own, whole[:, rows])


def test_another_number_of_processes_goes_on(open_batches):
    whole = numbers(open_batches(corpus(1, 7), sequence_length=T, batch_size=4, seed=3), 10)
    before = open_batches(corpus(1, 7), sequence_length=T, batch_size=4, seed=3, rows=[0, 1])
    numbers(before, 6)
    assert before.get_state()["batches"] == 6
    for rows in ([0], [1, 2, 3], None):
        after = open_batches(corpus(1, 7), sequence_length=T, batch_size=4, seed=3, rows=rows)
        after.set_state(before.get_state())
        np.testing.assert_array_equal(numbers(after, 4), whole[6:][:, rows or slice(None)])
        assert after.get_state()["batches"] == 10


def test_corpora_are_mixed_by_weight(open_batches):
    batches = open_batches(corpus(1, 5), corpus(101, 50), sequence_length=T, weights=[3, 1], batch_size=8, seed=0)
    order = numbers(batches, 25).ravel()
    assert (order <= 100).sum() == 150
    # Evenly: in every stretch of eight rows six are of the first.
    assert set((order.reshape(-1, 8) <= 100).sum(axis=1)) == {6}
    assert sorted(order[order > 100]) == list(range(101, 151))


def test_no_thread_outlives_it():
    before = set(threading.enumerate())
    for _ in range(5):
        batches = TrainBatches([corpus(1, 7)], sequence_length=T, batch_size=2, eos_id=0, seed=0)
        next(batches)
        batches.set_state(batches.get_state() | {"batches": 3})
        next(batches)
        batches.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread


# Restored in a process that has read nothing: prints the digest of the next batches.
RESTORED = """
import json, sys
from tests.data.test_loader import LONG_AND_SHORT, TrainBatches, fingerprints, EOS
batches = TrainBatches([LONG_AND_SHORT], sequence_length=6, batch_size=3, eos_id=EOS, seed=7)
batches.set_state(json.loads(sys.argv[1]))
print(json.dumps(fingerprints(batches, 8)))
batches.close()
"""


def fingerprints(batches, count):
    return [[batch["inputs"].tolist(), batch["targets"].tolist()] for batch in itertools.islice(batches, count)]


def test_a_new_process_goes_on_in_the_middle_of_an_epoch(open_batches):
    """grain#1179: a shuffle restored in a fresh iterator began anew."""
    options = dict(sequence_length=6, batch_size=3, seed=7)
    whole = fingerprints(open_batches(LONG_AND_SHORT, **options), 30)
    before = open_batches(LONG_AND_SHORT, **options)
    # An epoch has 30 rows.
    assert -(-LONG_AND_SHORT.lengths.sum() // 6) == 30
    for done in (4, 13):
        fingerprints(before, done - before.get_state()["batches"])
        state = json.dumps(before.get_state())
        again = subprocess.run([sys.executable, "-c", RESTORED, state], capture_output=True, text=True, check=True)
        assert json.loads(again.stdout) == whole[done : done + 8]


def test_a_position_in_other_corpora_is_refused(open_batches):
    options = dict(sequence_length=6, batch_size=3)
    state = json.loads(json.dumps(open_batches(LONG_AND_SHORT, **options).get_state()))
    other = open_batches(tokenised(["other"]), **options)
    with pytest.raises(
        MismatchError, match=r"the run was trained on corpora with the digests .*, and those of data.cor"
    ):
        other.set_state(state)
    next(other)


def test_fifty_evaluations_leave_threads_and_memory_steady():
    """grain#1021. Each is left half-way; kept, its 200,000 tokens would be 800 kB."""
    process = psutil.Process()
    long = tokenised(["x" * 200_000])

    def evaluate():
        batches = evaluation_batches([long], sequence_length=100, batch_size=2, eos_id=EOS)
        assert len(list(itertools.islice(batches, 3))) == 3

    for _ in range(5):
        evaluate()
    threads, memory = set(threading.enumerate()), process.memory_info().rss
    for _ in range(50):
        evaluate()
    assert set(threading.enumerate()) <= threads
    assert process.memory_info().rss - memory < 10 * 800_000


def test_counts_by_hand():
    counts = corpus_counts([tokenised(["ab", ""]), tokenised(["é"])])
    assert counts == (3, 2 + 0 + 2 + 3, 4)
    assert counts._fields == ("documents", "tokens", "bytes")


def test_counts_agree_with_one_pass_of_another_tokenizer():
    corpora = [tokenised(["def f():\n    return 1\n", "words and words"], load_tokenizer("mistral"))]
    counts = corpus_counts(corpora)
    passed = evaluation_batches(corpora, sequence_length=5, batch_size=2, eos_id=2)
    assert counts.tokens == sum(batch["loss_mask"].sum() for batch in passed)
    assert counts.bytes == 22 + 15


ARGUMENTS = {"sequence_length": 4, "batch_size": 2, "eos_id": EOS}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sequence_length": 0}, "sequence_length must be at least 1, got 0"),
        ({"sequence_length": -3}, "sequence_length must be at least 1, got -3"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"rows": [1, 2]}, r"rows must be some of a batch of 2, in rising order, got \[1, 2\]"),
        ({"rows": [-1]}, "rows must be some"),
        ({"rows": []}, "rows must be some"),
        ({"rows": [1, 0]}, "rows must be some"),
        ({"rows": [0, 0]}, "rows must be some"),
    ],
)
def test_arguments_out_of_range(changed, message):
    arguments = ARGUMENTS | changed
    with pytest.raises(ValueError, match=message):
        TrainBatches([LONG_AND_SHORT], seed=0, **arguments)
    with pytest.raises(ValueError, match=message):
        evaluation_batches([LONG_AND_SHORT], **arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": -1}, "seed must lie between"),
        ({"seed": 2**32}, "seed must lie between"),
        ({"packing": "loose"}, "packing is 'loose'; it must be one of"),
        ({"weights": [0.0]}, r"weights is \[0.0\]; all of them must be numbers above 0"),
        ({"weights": [1.0, 1.0]}, "one number for each of the corpora, 1"),
    ],
)
def test_training_arguments_out_of_range(changed, message):
    with pytest.raises(ValueError, match=message):
        TrainBatches([LONG_AND_SHORT], **({"seed": 0} | ARGUMENTS | changed))


def test_max_tokens_out_of_range():
    with pytest.raises(ValueError, match="max_tokens must be at least 1, or None for all, got 0"):
        evaluation_batches([LONG_AND_SHORT], max_tokens=0, **ARGUMENTS)


@pytest.mark.parametrize("corpora", [[], [tokenised([])], [LONG_AND_SHORT, tokenised([])]])
def test_an_empty_corpus(corpora):
    for call in (lambda: TrainBatches(corpora, seed=0, **ARGUMENTS), lambda: evaluation_batches(corpora, **ARGUMENTS)):
        with pytest.raises(ValueError, match="corpora must each have at least one document"):
            call()
