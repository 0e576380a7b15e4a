"""Batches that are not finite, and loss spikes: the update is skipped, or the run goes back; it never goes wrong."""

import json
import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from interdomain_jax import checkpoints as storage
from interdomain_jax.checksums import checksum
from interdomain_jax.data.loader import TrainBatches
from interdomain_jax.errors import TrainingError
from interdomain_jax.training import checkpoints as checkpointing
from interdomain_jax.training import loop, spikes
from interdomain_jax.training.dump import load_batch
from interdomain_jax.training.metrics import read_metrics
from interdomain_jax.training.reproduce import reproduce
from interdomain_jax.training.spikes import LossTrend
from tests.training.conftest import CORPUS, without_speed

FIELDS = {
    "num_steps": 10,
    "eval_every": 10,
    "checkpoint_every": 3,
    "accumulation_steps": 1,
    "max_skipped_in_a_row": 3,
    "spikes.threshold": 1.5,
}
ONE_DEVICE = {"data": 1, "fsdp": 1, "tensor": 1, "seq": 1}


def with_unknown_token(batch):
    """The batch with a token that the vocabulary lacks: its embedding is NaN."""
    inputs = batch["inputs"].copy()
    inputs[1, 5] = 300
    return batch | {"inputs": inputs}


def with_surprises(batch):
    """The batch with targets that never occur."""
    return batch | {"targets": np.zeros_like(batch["targets"])}


class Spoiled:
    """Training batches, some of which are changed; told by the checksums of their inputs."""

    def __init__(self, batches, changes):
        self._batches = batches
        self._changes = changes

    def __next__(self):
        batch = next(self._batches)
        return self._changes.get(identity(batch), lambda batch: batch)(batch)

    def __getattr__(self, name):
        return getattr(self._batches, name)


def identity(batch) -> int:
    return int(checksum(jnp.asarray(batch["inputs"])))


@pytest.fixture(scope="module")
def batch_identities(make_config) -> list[int]:
    """The checksums of the batches of all runs here, in their order."""
    config = make_config(FIELDS)
    batches = TrainBatches(
        [CORPUS],
        sequence_length=config.data.sequence_length,
        batch_size=config.data.batch_size,
        eos_id=loop.build_experiment(config).tokenizer.eos_id,
        seed=config.seed,
    )
    identities = [identity(next(batches)) for _ in range(40)]
    batches.close()
    return identities


@pytest.fixture
def start(make_config, batch_identities, small_corpus, compiled_once, monkeypatch):
    """Starts a run in a directory, with changes to batches by their number, from 1; returns its last state."""

    def run(workdir, changes, **overrides):
        by_identity = {batch_identities[number - 1]: change for number, change in changes.items()}
        with monkeypatch.context() as patch:
            patch.setattr(loop, "TrainBatches", lambda *args, **kw: Spoiled(TrainBatches(*args, **kw), by_identity))
            fields = {name.replace("__", "."): value for name, value in overrides.items()}
            return loop.train(loop.prepare(make_config(FIELDS | fields), workdir))

    return run


def states(run_config, workdir) -> dict[int, checkpointing.TrainState]:
    abstract = loop.prepare(run_config, workdir).abstract_state
    with storage.open_checkpoints(epath.Path(workdir)) as checkpoints:
        return {step: checkpointing.restore(checkpoints, step, abstract).state for step in checkpoints.all_steps()}


def is_finite(tree) -> bool:
    return all(np.isfinite(leaf).all() for leaf in jax.device_get(jax.tree.leaves(tree)))


def train_rows(workdir) -> list[dict[str, float]]:
    return [row for row in read_metrics(workdir) if "train/loss" in row]


def test_an_update_that_is_not_finite_is_skipped(start, make_config, tmp_path):
    every = {"checkpoint_every": 1, "checkpoints_to_keep": 20}
    bad = dict.fromkeys((5, 7, 8), with_unknown_token)
    state = start(tmp_path, bad, **every)
    saved = states(make_config(FIELDS | every), tmp_path)
    assert list(saved) == list(range(1, 11))
    assert all(is_finite(each) for each in saved.values())
    for skipped, before in ((5, 4), (7, 6), (8, 6)):
        chex.assert_trees_all_equal(saved[skipped].params, saved[before].params)
        chex.assert_trees_all_equal(saved[skipped].opt_state, saved[before].opt_state)
        chex.assert_trees_all_equal(saved[skipped].trend, saved[before].trend)
    assert not np.array_equal(saved[6].params["norm"]["scale"], saved[5].params["norm"]["scale"])

    rows = train_rows(tmp_path)
    assert [row["train/skipped"] for row in rows] == [0, 0, 0, 0, 1, 1, 2, 3, 3, 3]
    assert [row["train/loss"] is None for row in rows] == [step in (5, 7, 8) for step in range(1, 11)]
    # The schedule counts the updates that were made: a skipped one leaves its rate to the next.
    rates = [row["train/learning_rate"] for row in rows]
    made = [rate for rate, row in zip(rates, rows, strict=True) if row["train/loss"] is not None]
    schedule = loop.prepare(make_config(FIELDS), tmp_path / "other").optimizer.learning_rate
    np.testing.assert_allclose(made, [schedule(number) for number in range(7)], rtol=1e-6)
    assert rates[4] == rates[5]
    assert int(state.skipped) == 3
    assert int(state.skipped_in_a_row) == 0
    assert (tmp_path / "metrics.jsonl").read_text().count("NaN") == 0

    # A run that goes on from the middle of it ends the same.
    for step in range(8, 11):
        epath.Path(tmp_path / "checkpoints" / str(step)).rmtree()
    again = start(tmp_path, bad, **every)
    chex.assert_trees_all_equal(again, state)
    assert without_speed(train_rows(tmp_path)) == without_speed(rows)


def test_too_many_in_a_row_end_the_run_with_what_reproduces_the_last(start, make_config, batch_identities, tmp_path):
    bad = dict.fromkeys((5, 6, 7), with_unknown_token)
    with pytest.raises(TrainingError) as raised:
        start(tmp_path, bad)
    dump = tmp_path / "nonfinite" / "7"
    message = str(raised.value)
    assert "3 updates in a row were skipped, the last one that of step 7" in message
    assert f"--dump={dump}" in message
    assert "\n" not in message
    assert [row["step"] for row in train_rows(tmp_path)] == list(range(1, 8))

    # The dump: parameters from before the step, and its batch as it was given to the model.
    saved, dumped = states(make_config(FIELDS), tmp_path), states(make_config(FIELDS), dump)
    assert all(is_finite(state) for state in (*saved.values(), *dumped.values()))
    assert list(dumped) == [7]
    chex.assert_trees_all_equal(dumped[7].params, saved[6].params)
    batch = load_batch(epath.Path(dump))
    assert f"batch {identity(batch):#010x}" in message
    assert batch["inputs"][1, 5] == 300
    batch["inputs"][1, 5] = batch["targets"][1, 4]
    assert identity(batch) == batch_identities[6]
    reproduced = reproduce(epath.Path(dump), ONE_DEVICE)
    assert np.isnan(reproduced.loss)
    assert reproduced.bad_parameters == []
    assert "unembed/kernel" in reproduced.bad_gradients

    # It ends in the same way again, and goes on where the data are good, or it may skip more.
    with pytest.raises(TrainingError, match="step 7"):
        start(tmp_path, bad)
    state = start(tmp_path, bad, max_skipped_in_a_row=4)
    assert int(state.step) == 10
    assert int(state.skipped) == 3
    assert is_finite(state)


def test_one_is_too_many_if_so_configured(start, tmp_path):
    with pytest.raises(TrainingError, match="1 updates in a row were skipped, the last one that of step 2"):
        start(tmp_path, {2: with_unknown_token}, max_skipped_in_a_row=1)
    assert [row["step"] for row in train_rows(tmp_path)] == [1, 2]


def test_the_dump_of_a_batch_that_lacks_rows_is_refused(tmp_path):
    np.savez(tmp_path / "batch_0.npz", rows=[0, 2], inputs=np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"rows \[0, 2\]"):
        load_batch(epath.Path(tmp_path))


def test_the_trend_is_a_mean_first_and_forgets_later(monkeypatch):
    monkeypatch.setattr(spikes, "MEMORY", 5)
    losses = np.random.default_rng(0).normal(3.0, 0.5, 12)
    trend, mean, variance = LossTrend.empty(), None, None
    for number, loss in enumerate(losses, start=1):
        trend = trend.plus(jnp.float32(loss))
        if number <= 5:
            mean, variance = losses[:number].mean(), losses[:number].var()
        else:
            # Of two groups, the old losses with weight 4/5 and the new one with 1/5.
            mean, variance = mean * 4 / 5 + loss / 5, variance * 4 / 5 + (loss - mean) ** 2 * 4 / 25
        np.testing.assert_allclose([trend.mean, trend.variance], [mean, variance], rtol=1e-5, atol=1e-6)
        deviation = np.sqrt(variance)
        for loss_now, is_spike in ((mean + 3.1 * deviation, True), (mean + 2.9 * deviation, False), (-1e9, False)):
            assert bool(trend.is_spike(jnp.float32(loss_now), 3.0)) == (is_spike and number >= 5)
        assert not trend.is_spike(jnp.float32(np.nan), 3.0)
    assert int(trend.number) == 12


@pytest.fixture
def short_memory(monkeypatch):
    """Spikes are told from the fourth step on."""
    monkeypatch.setattr(spikes, "MEMORY", 3)


@pytest.mark.usefixtures("short_memory")
def test_the_update_of_a_spike_can_be_skipped(start, make_config, tmp_path, caplog):
    fields = {"checkpoint_every": 1, "checkpoints_to_keep": 20, "spikes.action": "skip"}
    caplog.set_level(logging.INFO, logger="absl")
    start(tmp_path, {7: with_surprises}, checkpoint_every=1, checkpoints_to_keep=20, spikes__action="skip")
    saved = states(make_config(FIELDS | fields), tmp_path)
    chex.assert_trees_all_equal(saved[7].params, saved[6].params)
    chex.assert_trees_all_equal(saved[7].trend, saved[6].trend)
    rows = train_rows(tmp_path)
    assert [row["train/skipped"] for row in rows] == [0] * 6 + [1] * 4
    assert rows[6]["train/loss"] > max(row["train/loss"] for row in rows[3:6])
    assert "skipped the update of step 7, a spike" in caplog.text


@pytest.mark.usefixtures("short_memory")
def test_a_spike_can_send_the_run_back_to_other_data(start, make_config, batch_identities, tmp_path, monkeypatch):
    """Batch 8 is a spike: from the checkpoint of step 6 the run goes on with batch 9, in each of three runs."""

    class Killed(BaseException):
        pass

    rewind = {"spikes__action": "rewind"}
    expected = start(tmp_path / "0", {8: with_surprises}, **rewind)
    rows = train_rows(tmp_path / "0")
    assert [row["step"] for row in rows] == list(range(1, 11))
    numbers = [batch_identities.index(row["train/batch_checksum"]) + 1 for row in rows]
    assert numbers == [1, 2, 3, 4, 5, 6, 9, 10, 11, 12]
    assert rows[-1]["train/skipped"] == 0
    assert sorted(states(make_config(FIELDS | {"spikes.action": "rewind"}), tmp_path / "0")) == [9, 10]

    write = loop.MetricsWriter.write
    written = []

    def write_until_killed(self, step, values):
        write(self, step, values)
        written.append(step)
        # The second time, and so after the run was sent back.
        if written.count(8) == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(loop.MetricsWriter, "write", write_until_killed)
        with pytest.raises(Killed):
            start(tmp_path / "1", {8: with_surprises}, **rewind)
    actual = start(tmp_path / "1", {8: with_surprises}, **rewind)
    chex.assert_trees_all_equal(actual, expected)
    assert without_speed(train_rows(tmp_path / "1")) == without_speed(rows)


@pytest.mark.usefixtures("short_memory")
def test_a_run_that_spikes_whatever_the_data_ends(start, tmp_path):
    with pytest.raises(TrainingError) as raised:
        start(tmp_path, dict.fromkeys(range(8, 41), with_surprises), spikes__action="rewind")
    assert "the loss spiked after each of 4 starts from step 6" in str(raised.value)
    assert storage.find_step(tmp_path, "latest") == 6
    assert json.loads((tmp_path / "config.json").read_text())["spikes"]["action"] == "rewind"
