"""What is saved comes back as it was, onto other layers and dtypes too; what is damaged is never taken for whole."""

import math
import random
import resource
import shutil
import time
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from interdomain_jax import checkpoints as storage
from interdomain_jax import sharding
from interdomain_jax.errors import CheckpointError, DamagedError, MismatchError
from interdomain_jax.modules.layer_layout import separate_layers, stack_layers
from interdomain_jax.training import checkpoints as checkpointing
from interdomain_jax.training import loop
from interdomain_jax.training.metrics import read_metrics
from interdomain_jax.version import code_version
from tests.training.conftest import DOCUMENTS

# Of a read that failed orbax leaves coroutines behind.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

FIELDS = {"model.num_layers": 2, "num_steps": 8, "eval_every": 4, "checkpoint_every": 3, "accumulation_steps": 1}
LAST, BEFORE = 8, 6


@pytest.fixture(scope="module")
def prepared(make_config, compiled_once):
    """Prepares runs of one config on the small corpus; keyword arguments as for `make_config`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "open_corpus", lambda name, split, directory: DOCUMENTS)
        yield lambda workdir, overrides=None: loop.prepare(make_config(FIELDS | (overrides or {})), workdir)


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory):
    """An uninterrupted run and its last state."""
    run = prepared(tmp_path_factory.mktemp("whole"))
    return run, loop.train(run)


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of the uninterrupted run's directory, to be damaged."""
    return epath.Path(shutil.copytree(whole[0].workdir, tmp_path / "copied"))


def restored(workdir, run, step=LAST):
    with storage.open_checkpoints(epath.Path(workdir)) as checkpoints:
        return checkpointing.restore(checkpoints, step, run.abstract_state)


def restored_latest(workdir, run):
    with storage.open_checkpoints(workdir) as checkpoints:
        return checkpointing.restore_latest(checkpoints, workdir, run.abstract_state)


jitted_stack = jax.jit(stack_layers)


def files_in(directory) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()
    }


def rows_without_speed(workdir) -> list[dict[str, float]]:
    speeds = ("train/tokens_per_second", "train/model_tflops_per_device", "train/data_wait_seconds")
    return [{name: value for name, value in row.items() if name not in speeds} for row in read_metrics(workdir)]


def test_a_checkpoint_holds_all_that_a_run_needs(whole):
    run, state = whole
    with storage.open_checkpoints(run.workdir) as checkpoints:
        assert list(checkpoints.all_steps()) == [BEFORE, LAST]
        content = storage.restore(checkpoints, LAST, {"params": run.abstract_state.params}).run
    assert content["config"]["optimizer"] == run.config.optimizer.to_dict()
    assert content["config"]["seed"] == run.config.seed
    assert content["code"] == code_version()
    start = restored(run.workdir, run)
    chex.assert_trees_all_equal(start.state, state)
    assert start.step == LAST
    assert start.validation_loss == read_metrics(run.workdir)[-1]["validation/loss"]
    assert restored(run.workdir, run, BEFORE).validation_loss is None
    rows = {row["step"]: row for row in read_metrics(run.workdir) if "train/loss" in row}
    assert int(start.state.tokens_seen) == rows[LAST]["train/tokens_seen"] == LAST * 4 * 32
    # The position is that behind the batches that were trained on.
    batches = loop._train_batches(run)
    batches.set_state(restored(run.workdir, run, BEFORE).position)
    for step in (7, 8):
        assert int(loop_checksum(next(batches))) == rows[step]["train/batch_checksum"]
    assert batches.get_state() == start.position


def loop_checksum(batch):
    return storage.checksums(jnp.asarray(batch["inputs"]))


def test_layers_may_be_scanned_where_they_were_not(whole, prepared, copied, tmp_path):
    run, state = whole
    scanned_run = prepared(copied, {"model.scan_layers": True})
    scanned = restored(copied, scanned_run).state
    chex.assert_trees_all_equal(scanned, jitted_stack(state))

    with storage.open_checkpoints(epath.Path(tmp_path / "scanned")) as checkpoints:
        checkpointing.save(checkpoints, scanned, {}, scanned_run.config)
    chex.assert_trees_all_equal(restored(tmp_path / "scanned", scanned_run).state, scanned)
    chex.assert_trees_all_equal(restored(tmp_path / "scanned", run).state, state)

    shutil.rmtree(copied / "checkpoints" / str(LAST))
    ended = loop.train(scanned_run)
    chex.assert_trees_all_close(jax.jit(separate_layers)(ended.params), state.params, rtol=1e-3, atol=1e-5)
    assert int(ended.step) == LAST


def test_parameters_may_be_cast_for_inference(whole):
    run, state = whole
    bfloat16 = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding), run.abstract_state.params
    )
    params = storage.restore_params(run.workdir, LAST, bfloat16, cast=True)
    chex.assert_trees_all_equal(params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params))
    with pytest.raises(MismatchError, match=r"params/embed/embedding is float32 \(257, 16\) there and bfloat16"):
        storage.restore_params(run.workdir, LAST, bfloat16)


OTHER_MODELS = [
    (
        {"model.num_layers": 3},
        "params/layers_2/block_0/mixer/a_imag is missing",
        "params/layers/block_0/mixer/a_imag is float32 (2, 2, 4) there and float32 (3, 2, 4) here",
    ),
    (
        {"model.d_model": 8},
        "params/embed/embedding is float32 (257, 16) there and float32 (257, 8) here",
        "params/embed/embedding is float32 (257, 16) there and float32 (257, 8) here",
    ),
    (
        {"model.mixers": ("softmax",)},
        "params/layers_0/block_0/mixer/a_imag is not expected",
        "params/layers/block_0/mixer/a_imag is not expected",
    ),
    (
        {"optimizer.moment_dtype": "bfloat16", "optimizer.beta2": 0.9},
        "optimizer/opt_state/1/mu/embed/embedding is float32 (257, 16) there and bfloat16 (257, 16) here",
        "optimizer/opt_state/1/mu/embed/embedding is float32 (257, 16) there and bfloat16 (257, 16) here",
    ),
]


@pytest.mark.parametrize("saved_scanned", [False, True])
@pytest.mark.parametrize("wanted_scanned", [False, True])
@pytest.mark.parametrize(("overrides", "separate_leaf", "stacked_leaf"), OTHER_MODELS)
def test_another_model_is_refused_and_its_leaves_named(
    whole, prepared, tmp_path, saved_scanned, wanted_scanned, overrides, separate_leaf, stacked_leaf
):
    """orbax#2972, asi#2714: nothing is loaded, moved or changed."""
    run, state = whole
    if saved_scanned:
        state = jitted_stack(state)
    workdir = epath.Path(tmp_path / "run")
    with storage.open_checkpoints(workdir) as checkpoints:
        checkpointing.save(checkpoints, state, {}, run.config)
    before, leaf = files_in(workdir), stacked_leaf if saved_scanned else separate_leaf
    other = prepared(tmp_path / "other", overrides | {"model.scan_layers": wanted_scanned})
    with pytest.raises(MismatchError) as whole_state:
        restored_latest(workdir, other)
    messages = [str(whole_state.value)]
    if leaf.startswith("params"):
        with pytest.raises(MismatchError) as params_alone:
            storage.restore_params(workdir, LAST, other.abstract_state.params)
        messages.append(str(params_alone.value))
    assert leaf in messages[-1]
    for message in messages:
        assert message.startswith(f"checkpoint {LAST} is of another model: ")
        assert "\n" not in message
    assert files_in(workdir) == before


@pytest.mark.parametrize("cast", [False, True])
def test_a_whole_number_is_not_restored_as_a_float(tmp_path, cast):
    """asi#2714: float32 has no 16,777,217."""
    mesh = sharding.make_mesh(dict(data=-1, fsdp=1, tensor=1, seq=1))
    as_float = {"counts": {"seen": jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding.replicated(mesh))}}
    with storage.open_checkpoints(epath.Path(tmp_path)) as checkpoints:
        storage.save(checkpoints, 1, {"counts": {"seen": jnp.int32(16_777_217)}}, {})
        checkpoints.wait_until_finished()
        with pytest.raises(MismatchError, match=r"counts/seen is int32 \(\) there and float32 \(\) here"):
            storage.restore(checkpoints, 1, as_float, cast=cast)


def damaged(content: bytes, kind: str, bit: int) -> bytes:
    if kind == "half":
        return content[: len(content) // 2]
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << (bit % 8)
    return bytes(flipped)


@pytest.mark.parametrize("kind", ["flip", "half", "missing"])
def test_damage_to_any_file_is_found_or_changes_nothing(whole, copied, caplog, kind):
    run, _ = whole
    expected = {step: restored(run.workdir, run, step) for step in (BEFORE, LAST)}
    directory = copied / "checkpoints" / str(LAST)
    spare = copied / "spare"
    shutil.copytree(directory, spare)
    names = sorted(name for name, content in files_in(directory).items() if content)
    used = {BEFORE: 0, LAST: 0}
    bits = random.Random(0)
    for name in names:
        content = (directory / name).read_bytes()
        if kind == "missing":
            (directory / name).unlink()
        else:
            (directory / name).write_bytes(damaged(content, kind, bits.randrange(8 * len(content))))
        caplog.clear()
        start = restored_latest(copied, run)
        chex.assert_trees_all_equal(start.state, expected[start.step].state)
        assert start == expected[start.step]._replace(state=start.state), name
        used[start.step] += 1
        if start.step == BEFORE:
            assert f"checkpoint {LAST} is damaged" in caplog.text, name
            assert f"moved to {copied / 'damaged_checkpoints' / str(LAST)}" in caplog.text, name
            assert not directory.exists(), name
            assert (copied / "damaged_checkpoints" / str(LAST)).is_dir(), name
            shutil.copytree(spare, directory)
        elif not directory.exists():
            raise AssertionError(f"{name}: a checkpoint that was used is gone")
        else:
            (directory / name).write_bytes(content)
    # The arrays, their index, and the plain JSON at the least.
    assert used[BEFORE] >= 8


def test_a_damaged_checkpoint_is_not_the_best(whole, copied):
    assert storage.find_step(copied, "best") == LAST
    (copied / "checkpoints" / str(LAST) / "run" / "metadata").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no checkpoint that was validated"):
        storage.find_step(copied, "best")


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(whole, prepared, copied, caplog):
    run, expected = whole
    data = Path(copied / "checkpoints" / str(LAST) / "params").rglob("d/*")
    largest = max(data, key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(damaged(content, "flip", 4 * len(content)))
    actual = loop.train(prepared(copied))
    chex.assert_trees_all_equal(actual, expected)
    assert rows_without_speed(copied) == rows_without_speed(run.workdir)
    assert f"checkpoint {LAST} is damaged" in caplog.text
    assert (copied / "damaged_checkpoints" / str(LAST) / "params").is_dir()
    assert storage.find_step(copied, "latest") == LAST


def test_where_all_are_damaged_nothing_is_touched(whole, prepared, copied):
    for step in (BEFORE, LAST):
        (copied / "checkpoints" / str(step) / "optimizer" / "manifest.ocdbt").unlink()
    before = files_in(copied)
    with pytest.raises(DamagedError) as raised:
        loop.train(prepared(copied))
    assert f"checkpoint {LAST} is damaged" in str(raised.value)
    assert f"checkpoint {BEFORE} is damaged" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert files_in(copied) == before


@pytest.fixture
def file_size_limit():
    """Sets the largest size of a file in bytes: what lies beyond cannot be written, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_surfaces_and_leaves_the_older_checkpoint(
    whole, prepared, tmp_path, monkeypatch, file_size_limit
):
    """orbax#605: in the background, at step 4; the rows of the steps tell how long it took."""
    run, expected = whole
    write = loop.MetricsWriter.write

    def write_until_step_4(self, step, values):
        write(self, step, values)
        if step == 4:
            while not (tmp_path / "checkpoints" / "3").is_dir():
                time.sleep(0.01)
            file_size_limit(16_384)

    with monkeypatch.context() as patch:
        patch.setattr(loop.MetricsWriter, "write", write_until_step_4)
        with pytest.raises(CheckpointError) as raised:
            loop.train(prepared(tmp_path))
    file_size_limit(None)
    assert f"could not be written to {tmp_path / 'checkpoints'}" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert read_metrics(tmp_path)[-1]["step"] <= 6
    assert storage.find_step(tmp_path, "latest") == 3
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("4")] != ["4"]

    chex.assert_trees_all_equal(loop.train(prepared(tmp_path)), expected)
    assert rows_without_speed(tmp_path) == rows_without_speed(run.workdir)
    # What the failed save left behind is gone.
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {str(BEFORE), str(LAST)}


def test_no_checkpoint_is_deleted_for_one_that_could_not_be_written(tmp_path, file_size_limit):
    """Whoever hears of the error first: the thread that deletes old checkpoints hears of it too."""
    # Incompressible, and larger than the limit.
    table = jnp.asarray(np.random.default_rng(0).standard_normal((257, 64), np.float32))
    items = {"params": {"embed": {"embedding": table}}}

    def check_until_it_fails(checkpoints):
        while True:
            storage.check_for_errors(checkpoints)

    with storage.open_checkpoints(epath.Path(tmp_path), keep=1) as checkpoints:
        storage.save(checkpoints, 1, items, {})
        storage.wait_until_saved(checkpoints)
        file_size_limit(32_768)
        storage.save(checkpoints, 2, items, {})
        with pytest.raises(CheckpointError):
            check_until_it_fails(checkpoints)
    file_size_limit(None)
    assert storage.find_step(tmp_path, "latest") == 1


LOSSES = {1: None, 2: 2.0, 3: 1.0, 4: math.nan, 5: 3.0, 6: None, 7: 1.5, 8: math.inf}
KEPT = [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [3, 5, 6], [3, 6, 7], [3, 7, 8]]


@pytest.mark.parametrize("opened_again", [False, True])
def test_the_best_checkpoint_is_kept_beside_the_latest(tmp_path, opened_again):
    workdir = epath.Path(tmp_path)
    items = {"params": {"norm": {"scale": jnp.arange(3.0)}}}
    for part in [[step] for step in LOSSES] if opened_again else [list(LOSSES)]:
        with storage.open_checkpoints(workdir, keep=2, keep_best=1) as checkpoints:
            for step in part:
                storage.save(checkpoints, step, items, {}, validation_loss=LOSSES[step])
                storage.wait_until_saved(checkpoints)
                assert list(checkpoints.all_steps()) == KEPT[step - 1]
                assert sorted(int(path.name) for path in (workdir / "checkpoints").iterdir()) == KEPT[step - 1]
    assert storage.find_step(workdir, "latest") == 8
    assert storage.find_step(workdir, "best") == 3
    assert storage.find_step(workdir, "7") == 7
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 4; there are \[3, 7, 8\]"):
        storage.find_step(workdir, "4")
    with pytest.raises(ValueError, match="'newest'"):
        storage.find_step(workdir, "newest")


def test_a_validation_loss_that_is_no_number_is_never_the_best(prepared, tmp_path, monkeypatch):
    losses = {2: math.nan, 4: 3.0, 6: 2.0, 8: 2.5}
    monkeypatch.setattr(loop, "_validation_loss", lambda run, score, params, step, *rest: losses[step])
    loop.train(prepared(tmp_path, {"eval_every": 2, "checkpoint_every": 5, "checkpoints_to_keep": 1}))
    assert storage.find_step(tmp_path, "best") == 6
    assert storage.find_step(tmp_path, "latest") == LAST
