"""Packing against a one-line oracle: the concatenated stream, reshaped."""

import json

import chex
import grain
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from interdomain_jax.data.packing import PackedWindows

EOS = 9
LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=12)


def documents_of(lengths):
    """Documents of these many tokens, each with its closing EOS, no two tokens alike."""
    ends = np.cumsum(lengths)
    return [
        np.append(np.arange(100 + end - n, 100 + end), EOS).astype(np.int32)
        for n, end in zip(lengths, ends, strict=True)
    ]


def windows_over(documents, sequence_length):
    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset = grain.MapDataset.source(documents).to_iter_dataset(read)
    return PackedWindows(dataset, sequence_length=sequence_length, eos_id=EOS)


@hypothesis.settings(deadline=None)
@hypothesis.given(lengths=LENGTHS, sequence_length=st.integers(1, 25))
def test_windows_are_the_stream_cut_up(lengths, sequence_length):
    documents = documents_of(lengths)
    stream = np.concatenate(documents)
    padding = -len(stream) % sequence_length
    targets = np.append(stream, [EOS] * padding).reshape(-1, sequence_length)
    inputs = np.append([EOS], targets.ravel()[:-1]).reshape(-1, sequence_length)
    mask = (np.arange(targets.size) < len(stream)).reshape(-1, sequence_length)

    windows = list(windows_over(documents, sequence_length))

    assert len(windows) == len(targets)
    for i, window in enumerate(windows):
        np.testing.assert_array_equal(window["inputs"], inputs[i])
        np.testing.assert_array_equal(window["targets"], targets[i])
        np.testing.assert_array_equal(window["loss_mask"], mask[i])
        assert [window[key].dtype for key in ("inputs", "targets", "loss_mask")] == [
            np.int32,
            np.int32,
            np.float32,
        ]


@hypothesis.settings(deadline=None)
@hypothesis.given(lengths=LENGTHS, sequence_length=st.integers(1, 25), where=st.floats(0, 1))
def test_a_fresh_iterator_continues_from_any_state(lengths, sequence_length, where):
    dataset = windows_over(documents_of(lengths), sequence_length)
    iterator = iter(dataset)
    states = [json.dumps(iterator.get_state())]
    windows = []
    for window in iterator:
        windows.append(window)
        states.append(json.dumps(iterator.get_state()))
    done = round(where * len(windows))
    fresh = iter(dataset)
    fresh.set_state(json.loads(states[done]))
    rest = list(fresh)
    assert len(rest) == len(windows) - done
    for actual, expected in zip(rest, windows[done:], strict=True):
        chex.assert_trees_all_equal(actual, expected)


def test_the_state_survives_restoring_unchanged():
    dataset = windows_over(documents_of([3, 30, 2]), sequence_length=4)
    iterator = iter(dataset)
    for _ in range(5):
        next(iterator)
    state = iterator.get_state()
    fresh = iter(dataset)
    fresh.set_state(state)
    assert fresh.get_state() == state
    # Document 1 begins after 4 tokens, and 20 have been targets.
    assert state == {"document": {"next_index": 1}, "offset": 16}


def test_a_used_iterator_can_be_rewound():
    iterator = iter(windows_over(documents_of([5, 8, 1]), sequence_length=3))
    start = iterator.get_state()
    first = list(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    iterator.set_state(start)
    second = list(iterator)
    assert len(first) == len(second) == 6
    for actual, expected in zip(second, first, strict=True):
        chex.assert_trees_all_equal(actual, expected)
