"""Batches: no token lost or repeated, the same after a restart, shared out over processes."""

import itertools
import json
import math
import threading

import chex
import grain
import hypothesis
import numpy as np
import orbax.checkpoint as ocp
import psutil
import pytest
from hypothesis import strategies as st

from interdomain_jax.data.loader import (
    corpus_counts,
    evaluation_batches,
    open_corpus,
    train_iterator,
)
from interdomain_jax.data.tokenizers import load_tokenizer

BYTES = load_tokenizer("bytes")
EOS = BYTES.eos_id
TEXTS = st.lists(st.text(max_size=15), min_size=1, max_size=10)
SIZES = {"sequence_length": st.integers(1, 25), "batch_size": st.integers(1, 4)}
# One document far longer than a window, one of a single window, one that is empty.
LONG_AND_SHORT = [{"text": "abcdefgh" * 20}, {"text": "x" * 7}, {"text": ""}, {"text": "short"}]


def source_of(texts):
    return [{"text": text} for text in texts]


def stream_of(texts):
    """The token stream of these documents: their bytes, each closed by 256."""
    return [token for text in texts for token in [*text.encode(), 256]]


def documents_in(stream):
    """The documents that the stream closes, decoded."""
    ends = np.flatnonzero(np.equal(stream, 256))
    starts = [0, *(ends + 1)]
    return [bytes(stream[start:end]).decode() for start, end in zip(starts, ends, strict=False)]


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


CUTS = st.lists(st.integers(1, 3), max_size=3)


@hypothesis.settings(deadline=None)
@hypothesis.given(texts=TEXTS, cuts=CUTS, max_tokens=st.none() | st.integers(1, 60), **SIZES)
def test_evaluation_scores_every_token_once(texts, sequence_length, batch_size, cuts, max_tokens):
    batches_of = [
        list(
            evaluation_batches(
                source_of(texts),
                BYTES,
                sequence_length=sequence_length,
                batch_size=batch_size,
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


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(texts=TEXTS, seed=st.integers(0, 9), **SIZES)
def test_training_follows_whole_documents_epoch_by_epoch(texts, sequence_length, batch_size, seed):
    epochs = 3
    iterator = train_iterator(
        source_of(texts), BYTES, sequence_length=sequence_length, batch_size=batch_size, seed=seed
    )
    targets, inputs = [], []
    while targets.count(EOS) < epochs * len(texts):
        batch = next(iterator)
        assert np.all(batch["loss_mask"] == 1)
        targets += batch["targets"].ravel().tolist()
        inputs += batch["inputs"].ravel().tolist()
    iterator.close()
    assert inputs == [EOS, *targets[:-1]]
    order = documents_in(targets)
    for epoch in range(epochs):
        visited = order[epoch * len(texts) : (epoch + 1) * len(texts)]
        assert sorted(visited) == sorted(texts)


@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(
    texts=TEXTS, cuts=CUTS, shuffle_buffer=st.integers(1, 5), seed=st.integers(0, 9), done=st.integers(0, 4), **SIZES
)
def test_batches_do_not_depend_on_the_processes(texts, cuts, shuffle_buffer, seed, done, sequence_length, batch_size):
    """Any split of the rows gives the batches of one process, also when each goes on from a saved state.

    The state is the same for all, so a run may go on with another number of processes.
    """

    def make(rows):
        return train_iterator(
            source_of(texts),
            BYTES,
            sequence_length=sequence_length,
            batch_size=batch_size,
            seed=seed,
            shuffle_buffer=shuffle_buffer,
            rows=rows,
        )

    def take(iterator, count):
        batches = [next(iterator) for _ in range(count)]
        state = json.dumps(iterator.get_state())
        iterator.close()
        return batches, state

    batches_of, states = zip(*(take(make(rows), done) for rows in shares(batch_size, cuts)), strict=True)
    assert len(set(states)) == 1
    for rows, batches in zip(shares(batch_size, cuts), batches_of, strict=True):
        resumed = make(rows)
        resumed.set_state(json.loads(states[0]))
        batches += take(resumed, 3)[0]
    chex.assert_trees_all_equal(joined(batches_of), take(make(None), done + 3)[0])


def order_of(seed, documents=40):
    """Order in which documents named by one byte each are visited."""
    source = source_of(chr(i) for i in range(documents))
    iterator = train_iterator(source, BYTES, sequence_length=2, batch_size=documents, seed=seed)
    with_next_epoch = [next(iterator)["targets"][:, 0].tolist() for _ in range(2)]
    iterator.close()
    return with_next_epoch


def test_order_depends_on_seed_and_epoch_alone():
    first, second = order_of(seed=1)
    assert (first, second) == tuple(order_of(seed=1))
    assert first != second
    assert order_of(seed=5)[0] not in (first, second, sorted(first))
    assert first != sorted(first)


def windows_of(count, shuffle_buffer, seed=7):
    iterator = train_iterator(
        LONG_AND_SHORT, BYTES, sequence_length=6, batch_size=1, seed=seed, shuffle_buffer=shuffle_buffer
    )
    windows = [tuple(next(iterator)["targets"][0].tolist()) for _ in range(count)]
    iterator.close()
    return windows


@pytest.mark.parametrize("shuffle_buffer", [1, 8, 20])
def test_windows_are_shuffled_within_their_buffers(shuffle_buffer):
    in_order, shuffled = windows_of(40, 1), windows_of(40, shuffle_buffer)
    for start in range(0, 40, shuffle_buffer):
        buffer = slice(start, start + shuffle_buffer)
        assert sorted(shuffled[buffer]) == sorted(in_order[buffer])
    assert (shuffled == in_order) == (shuffle_buffer == 1)
    assert shuffle_buffer == 1 or shuffled != windows_of(40, shuffle_buffer, seed=8)


@pytest.fixture(scope="module")
def training_run():
    """Sixty batches, about six epochs, and the state before each as a checkpoint stores it."""
    iterator = make_iterator()
    batches, states = [], []
    for _ in range(60):
        states.append(json.dumps(iterator.get_state()))
        batches.append(next(iterator))
    iterator.close()
    return batches, states


def make_iterator():
    return train_iterator(LONG_AND_SHORT, BYTES, sequence_length=6, batch_size=3, seed=7, shuffle_buffer=5)


def assert_continues(iterator, batches):
    for expected in batches:
        chex.assert_trees_all_equal(next(iterator), expected)


def test_a_fresh_iterator_continues_bitwise(training_run):
    """grain#1179: also from within a shuffled buffer."""
    batches, states = training_run
    buffers = [json.loads(state) for state in states]
    offsets = [buffer["parent_window_start_state"]["offset"] for buffer in buffers]
    assert max(offsets) > 100, "no buffer starts in the middle of the long document"
    assert {buffer["pos_in_window"] for buffer in buffers} == set(range(6)), "a place in a buffer was missed"
    for done in range(50):
        iterator = make_iterator()
        iterator.set_state(json.loads(states[done]))
        assert_continues(iterator, batches[done : done + 10])
        iterator.close()


def test_an_iterator_that_has_read_ahead_can_be_rewound(training_run):
    batches, states = training_run
    iterator = make_iterator()
    assert_continues(iterator, batches[:30])
    iterator.set_state(json.loads(states[4]))
    assert_continues(iterator, batches[4:40])
    iterator.close()


def test_state_goes_through_an_orbax_checkpoint(tmp_path, training_run):
    batches, _ = training_run
    iterator = make_iterator()
    assert_continues(iterator, batches[:17])
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(17, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))
    iterator.close()
    fresh = make_iterator()
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.restore(17, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(fresh)))
    assert_continues(fresh, batches[17:40])
    fresh.close()


def test_fifty_evaluations_leave_threads_and_memory_steady():
    """grain#1021. Each is left half-way; kept, its 200,000 tokens would be 800 kB."""
    process = psutil.Process()

    def evaluate():
        batches = evaluation_batches([{"text": "x" * 200_000}], BYTES, sequence_length=100, batch_size=2)
        assert len(list(itertools.islice(batches, 3))) == 3

    for _ in range(5):
        evaluate()
    threads, memory = set(threading.enumerate()), process.memory_info().rss
    for _ in range(50):
        evaluate()
    assert set(threading.enumerate()) <= threads
    assert process.memory_info().rss - memory < 10 * 800_000


def test_counts_by_hand():
    counts = corpus_counts(source_of(["ab", "", "é"]), BYTES)
    assert counts == (3, 2 + 0 + 2 + 3, 4)
    assert counts._fields == ("documents", "tokens", "bytes")


def test_counts_agree_with_one_pass_of_another_tokenizer():
    source = source_of(["def f():\n    return 1\n", "words and words"])
    tokenizer = load_tokenizer("mistral")
    counts = corpus_counts(source, tokenizer)
    passed = evaluation_batches(source, tokenizer, sequence_length=5, batch_size=2)
    assert counts.tokens == sum(batch["loss_mask"].sum() for batch in passed)
    assert counts.bytes == 22 + 15


ARGUMENTS = {"sequence_length": 4, "batch_size": 2}


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
        train_iterator(LONG_AND_SHORT, BYTES, seed=0, **arguments)
    with pytest.raises(ValueError, match=message):
        evaluation_batches(LONG_AND_SHORT, BYTES, **arguments)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range(seed):
    with pytest.raises(ValueError, match="seed must lie between"):
        train_iterator(LONG_AND_SHORT, BYTES, seed=seed, **ARGUMENTS)


def test_shuffle_buffer_out_of_range():
    with pytest.raises(ValueError, match="shuffle_buffer must be at least 1, got 0"):
        train_iterator(source_of(["a"]), BYTES, seed=0, shuffle_buffer=0, **ARGUMENTS)


def test_max_tokens_out_of_range():
    with pytest.raises(ValueError, match="max_tokens must be at least 1, or None for all, got 0"):
        evaluation_batches(LONG_AND_SHORT, BYTES, max_tokens=0, **ARGUMENTS)


def test_an_empty_corpus():
    for call in (
        lambda: train_iterator([], BYTES, seed=0, **ARGUMENTS),
        lambda: evaluation_batches([], BYTES, **ARGUMENTS),
        lambda: corpus_counts([], BYTES),
    ):
        with pytest.raises(ValueError, match="source holds no documents"):
            call()


def test_unknown_corpus(tmp_path):
    with pytest.raises(ValueError, match=r"corpus 'wikipedia' is unknown.*'stdlib_text'"):
        open_corpus("wikipedia", "train", str(tmp_path))
