"""What is saved comes back as it was, onto other layers and dtypes too; what is damaged is never taken for whole."""

import math
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest
from etils import epath

from interdomain_jax import checkpoints as storage
from interdomain_jax.errors import CheckpointError, DamagedError, MismatchError
from interdomain_jax.modules.layer_layout import separate_layers, stack_layers
from interdomain_jax.training import checkpoints as checkpointing
from interdomain_jax.training import loop
from interdomain_jax.training.metrics import read_metrics
from interdomain_jax.version import code_version
from tests.training.conftest import SMALL, open_corpora, without_speed

# Of a read that failed orbax leaves coroutines behind.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

FIELDS = {"model.num_layers": 2, "num_steps": 8, "eval_every": 4, "checkpoint_every": 3, "accumulation_steps": 1}
LAST, BEFORE = 8, 6


@pytest.fixture(scope="module")
def prepared(make_config, compiled_once):
    """Prepares runs of one config on the small corpus; keyword arguments as for `make_config`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "open_corpora", open_corpora)
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
    tokens = sum(row["train/tokens"] for row in rows.values())
    assert int(start.state.tokens_seen) == rows[LAST]["train/tokens_seen"] == tokens > (LAST - 1) * 4 * 32
    # The position is that behind the batches that were trained on.
    batches = loop.train_batches(run)
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
            assert f"moved to {copied / f'damaged_checkpoint_{LAST}'}" in caplog.text, name
            assert not directory.exists(), name
            assert (copied / f"damaged_checkpoint_{LAST}").is_dir(), name
            shutil.copytree(spare, directory)
        elif not directory.exists():
            raise AssertionError(f"{name}: a checkpoint that was used is gone")
        else:
            (directory / name).write_bytes(content)
    # The arrays, their index, and the plain JSON at the least.
    assert used[BEFORE] >= 8


def test_where_one_is_damaged_the_best_cannot_be_told(whole, copied):
    assert storage.find_step(copied, "best") == LAST
    (copied / "checkpoints" / str(BEFORE) / "run" / "metadata").write_text("{}")
    with pytest.raises(DamagedError, match=f"checkpoint {BEFORE} is damaged"):
        storage.find_step(copied, "best")
    assert storage.find_step(copied, "latest") == LAST


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(whole, prepared, copied, caplog):
    run, expected = whole
    data = Path(copied / "checkpoints" / str(LAST) / "params").rglob("d/*")
    largest = max(data, key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(damaged(content, "flip", 4 * len(content)))
    actual = loop.train(prepared(copied))
    chex.assert_trees_all_equal(actual, expected)
    assert without_speed(read_metrics(copied)) == without_speed(read_metrics(run.workdir))
    assert f"checkpoint {LAST} is damaged" in caplog.text
    assert (copied / f"damaged_checkpoint_{LAST}" / "params").is_dir()
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
    file_size_limit(-1)
    assert f"could not be written to {tmp_path / 'checkpoints'}" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert read_metrics(tmp_path)[-1]["step"] <= 6
    assert storage.find_step(tmp_path, "latest") == 3
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("4")] != ["4"]

    chex.assert_trees_all_equal(loop.train(prepared(tmp_path)), expected)
    assert without_speed(read_metrics(tmp_path)) == without_speed(read_metrics(run.workdir))
    # What the failed save left behind is gone.
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {str(BEFORE), str(LAST)}


PROGRAM = """
import jax
import train
from absl import app
from interdomain_jax import cli
from interdomain_jax.training import loop
from tests.training.conftest import open_corpora
jax.config.update("jax_disable_most_optimizations", True)
loop.open_corpora = open_corpora
app.run(train.main, flags_parser=cli.parse_flags)
"""

# On a file system of its own, too small at first; where none can be mounted, with a limit on the size of files.
TWO_STARTS = """
workdir=$1 size=$2 result=$3
shift 3
if mount -t tmpfs -o size="$size" tmpfs "$workdir" 2>/dev/null; then
    "$@"; echo "exit code $?, saved:" $(ls "$workdir/checkpoints")
    trap 'umount "$workdir"' EXIT
    mount -o remount,size=64m "$workdir"
else
    (ulimit -f 32; "$@"); echo "exit code $?, no small disk"
fi
"$@"; echo "exit code $?"
cp -r "$workdir/." "$result"
"""


def test_a_full_disk_ends_the_run_and_more_room_resumes_it(whole, compiled_once, tmp_path):
    run, expected = whole
    files = files_in(run.workdir / "checkpoints" / str(LAST)).values()
    # Room for one checkpoint and a half, and for the small files.
    size = int(1.5 * sum(4096 * math.ceil(len(content) / 4096) for content in files)) + 200_000
    small, result = tmp_path / "small", tmp_path / "result"
    small.mkdir()
    result.mkdir()
    may_mount = shutil.which("unshare") and subprocess.run(["unshare", "-rm", "true"]).returncode == 0
    finished = subprocess.run(
        [
            *(["unshare", "-rm"] if may_mount else []),
            *("sh", "-c", TWO_STARTS, "sh", small, str(size), result),
            *(sys.executable, "-c", PROGRAM, "--config=configs/tiny.py", f"--workdir={small}"),
            *(f"--config.{name}={value}" for name, value in (SMALL | FIELDS).items()),
        ],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(compiled_once)},
        capture_output=True,
        text=True,
    )
    first, second = finished.stdout.splitlines()
    assert second == "exit code 0", finished.stderr
    assert first.startswith("exit code 1"), finished.stderr
    sentences = [line for line in finished.stderr.splitlines() if line.startswith("-c: ")]
    assert len(sentences) == 1, finished.stderr
    assert f"checkpoints could not be written to {small / 'checkpoints'}" in sentences[0]
    if "no small disk" not in first:
        saved = first.partition("saved:")[2].split()
        # Which of the later ones had no room is not certain: how many files a checkpoint has differs from save to save.
        assert "3" in saved
        assert str(LAST) not in saved
        assert "No space left on device" in sentences[0]
    chex.assert_trees_all_equal(restored(result, run).state, expected)
    assert without_speed(read_metrics(result)) == without_speed(read_metrics(run.workdir))


def test_a_read_only_workdir_is_refused_before_anything_is_compiled(prepared, tmp_path):
    """Root is asked as nobody, for it may write everywhere: permissions are checked for the real user."""
    tmp_path.chmod(0o500)
    user = os.getuid()
    if user == 0:
        os.setresuid(65534, 0, 0)
    try:
        with pytest.raises(ValueError) as raised:
            prepared(tmp_path / "run")
    finally:
        os.setresuid(user, user, user)
        tmp_path.chmod(0o700)
    assert str(raised.value) == f"workdir {tmp_path / 'run'} cannot be written: no permission for {tmp_path}"
    assert list(tmp_path.iterdir()) == []


def test_a_validation_loss_that_is_no_number_is_never_the_best(prepared, tmp_path, monkeypatch):
    losses = iter([math.nan, 3.0, 2.0, 2.5])
    monkeypatch.setattr(loop, "_validation_loss", lambda run, score, params, keep_going: next(losses))
    loop.train(prepared(tmp_path, {"eval_every": 2, "checkpoint_every": 5, "checkpoints_to_keep": 1}))
    assert storage.find_step(tmp_path, "best") == 6
    assert storage.find_step(tmp_path, "latest") == LAST


def test_checkpoints_by_the_clock(prepared, whole, tmp_path):
    """The first process's clock asks for them, and they change nothing."""
    run = prepared(tmp_path, {"checkpoint_every": 100, "checkpoint_minutes": 1e-9, "checkpoints_to_keep": 8})
    state = loop.train(run)
    # Asked for beside a step, known when its figures are fetched, which is while the next step runs.
    steps = sorted(int(path.name) for path in (tmp_path / storage.DIRECTORY).iterdir())
    assert len(steps) >= 4
    assert steps[-1] == LAST
    chex.assert_trees_all_equal(state, whole[1])
