"""From texts to rows: every token once, whatever the parts, the workers and the interruptions."""

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent import futures
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax.data import preparation, token_files
from interdomain_jax.data.documents import documents_of
from interdomain_jax.data.loader import TrainBatches, evaluation_batches
from interdomain_jax.data.preparation import carry_out, plan, run_here
from interdomain_jax.data.sources import make_source
from interdomain_jax.data.token_files import TokenDocuments, read_manifest
from interdomain_jax.data.tokenizer_training import train_model
from interdomain_jax.data.tokenizers import BytesTokenizer
from interdomain_jax.modules import Decoder
from interdomain_jax.training.step import loss_and_gradient
from tests.quick import quick_jit

BYTES = BytesTokenizer()
TEXTS = st.lists(st.text(max_size=40), min_size=4, max_size=30)


def write_jsonl(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def source_of(directory, texts, *, validation_one_in=2):
    write_jsonl(directory / "texts.jsonl", texts)
    return make_source(
        "text_files",
        files=[str(directory / "texts.jsonl")],
        validation_one_in=validation_one_in,
        data_dir=str(directory / "tfds"),
    )


def files_in(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@given(
    texts=TEXTS,
    part_bytes=st.integers(1, 300),
    sequence_length=st.integers(1, 60),
    packing=st.sampled_from(["concatenate", "best_fit"]),
)
def test_tokens_in_are_tokens_out(tmp_path_factory, texts, part_bytes, sequence_length, packing):
    """As pairs of a token and the one before it, from the texts to the rows of one epoch and of one evaluation."""
    directory = tmp_path_factory.mktemp("corpus")
    # One more for each split, so that none is empty.
    texts = [*texts, *map(str, range(20))]
    source = source_of(directory, texts)
    manifests = carry_out(plan(source, directory / "out", "bytes", part_bytes=part_bytes), run_here)
    expected = sorted(
        pair
        for text in texts
        for document in documents_of(text).texts
        for pair in itertools.pairwise([256, *document.encode(), 256])
    )
    assert sum(shard.tokens for manifest in manifests.values() for shard in manifest.shards) == len(expected)
    corpora = [TokenDocuments(directory / "out" / split, BYTES) for split in ("train", "validation")]
    trained = []
    for corpus in corpora:
        tokens = int(corpus.lengths.sum())
        batches = TrainBatches(
            [corpus], sequence_length=sequence_length, batch_size=1, packing=packing, eos_id=256, seed=0
        )
        epoch = []
        while len(epoch) < tokens:
            epoch += pairs_of(next(batches))
        batches.close()
        trained += epoch
    assert sorted(trained) == expected
    passed = evaluation_batches(corpora, sequence_length=sequence_length, batch_size=3, eos_id=256)
    assert sorted(pair for batch in passed for pair in pairs_of(batch)) == expected


def pairs_of(batch):
    scored = batch["loss_mask"] == 1
    return list(zip(batch["inputs"][scored].tolist(), batch["targets"][scored].tolist(), strict=True))


BAD = [b'{"text": ""}', b'{"text": "  \\n "}', b"not json", b'{"text": null}', b'{"other": "x"}', b'{"text": "\xff"}']


def test_bad_records_are_counted_and_stop_nothing(tmp_path):
    """dolma#245, tokenizers#86: one bad document ended the job, a huge word held it up."""
    word = "x" * (10 << 20)
    lines = [*BAD, json.dumps({"text": word}).encode(), *(json.dumps({"text": str(n)}).encode() for n in range(40))]
    (tmp_path / "texts.jsonl").write_bytes(b"\n".join(lines))
    source = make_source(
        "text_files",
        files=[str(tmp_path / "texts.jsonl")],
        validation_one_in=3,
        data_dir=str(tmp_path / "tfds"),
    )
    manifests = carry_out(plan(source, tmp_path / "out", "mistral"), run_here)
    shards = [shard for manifest in manifests.values() for shard in manifest.shards]
    assert sum(shard.documents for shard in shards) == 40 + 1
    assert sum(shard.bytes for shard in shards) == 10 * 1 + 30 * 2 + len(word)
    skipped = sum((Counter(shard.skipped) for shard in shards), Counter())
    assert skipped == {"empty": 2, "no text": 3, "invalid utf-8": 1}


def test_what_is_complete_is_not_done_again(tmp_path, monkeypatch):
    source = source_of(tmp_path, [f"text number {n}" for n in range(50)])
    make = functools.partial(plan, source, part_bytes=200)
    carry_out(make(tmp_path / "whole", "bytes"), run_here)
    assert len(read_manifest(tmp_path / "whole" / "train").shards) > 3

    def run_three(tasks):
        run_here(tasks[:3])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(make(tmp_path / "again", "bytes"), run_three)
    done = []
    write_shard = token_files.write_shard
    monkeypatch.setattr(preparation, "write_shard", lambda *args: done.append(args[1]) or write_shard(*args))
    plans = make(tmp_path / "again", "bytes")
    carry_out(plans, run_here)
    assert len(done) == sum(len(planned.tasks) for planned in plans.values()) - 3
    assert files_in(tmp_path / "again") == files_in(tmp_path / "whole")
    done.clear()
    carry_out(make(tmp_path / "again", "bytes"), run_here)
    assert done == []


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"half")])
def test_a_shard_that_was_damaged_is_made_again(tmp_path, damage):
    """As training advises where it finds one."""
    source = source_of(tmp_path, [f"text number {n}" for n in range(50)])
    carry_out(plan(source, tmp_path / "out", "bytes"), run_here)
    before = files_in(tmp_path / "out")
    for suffix in ("array_record", "npy"):
        if suffix == "npy" and damage is not Path.unlink:
            continue
        damage(next((tmp_path / "out" / "train").glob(f"*.{suffix}")))
        with pytest.raises((FileNotFoundError, ValueError), match="prepare the corpus again, with the same command"):
            TokenDocuments(tmp_path / "out" / "train", BYTES)
        carry_out(plan(source, tmp_path / "out", "bytes"), run_here)
        assert files_in(tmp_path / "out") == before


def test_processes_may_plan_at_once(tmp_path):
    source = source_of(tmp_path, map(str, range(20)))
    start = threading.Barrier(3)

    def plan_together(directory):
        start.wait()
        return plan(source, directory, "bytes")

    with futures.ThreadPoolExecutor(3) as threads:
        for number in range(50):
            for planned in threads.map(plan_together, [tmp_path / f"out{number}"] * 3):
                assert len(planned["train"].tasks) == 1


def test_a_tokenizer_may_be_named_in_another_way(tmp_path):
    """It is known by what it does; the manifest has its first name."""
    trained = train_model(["some text to train on"] * 20, vocab_size=270)
    for name in ("one.model", "other.model"):
        (tmp_path / name).write_bytes(trained)
    source = source_of(tmp_path, map(str, range(20)))
    carry_out(plan(source, tmp_path / "out", str(tmp_path / "one.model")), run_here)
    before = files_in(tmp_path / "out")
    again = carry_out(plan(source, tmp_path / "out", str(tmp_path / "other.model")), run_here)
    assert again["train"].tokenizer == str(tmp_path / "one.model")
    assert files_in(tmp_path / "out") == before


def test_an_attempt_that_succeeds_leaves_no_word_of_those_before(tmp_path):
    """Runners make several."""
    plans = plan(source_of(tmp_path, map(str, range(20))), tmp_path / "out", "bytes")
    task = plans["train"].tasks[0]
    (task.directory / f"{task.name}.error").write_text("a disk was full")
    carry_out(plans, run_here)
    assert not list((tmp_path / "out").rglob("*.error"))


def test_another_preparation_in_the_same_directory_is_refused(tmp_path):
    carry_out(plan(source_of(tmp_path / "a", map(str, range(20))), tmp_path / "out", "bytes"), run_here)
    before = files_in(tmp_path / "out")
    other = source_of(tmp_path / "b", map(str, range(20)), validation_one_in=3)
    with pytest.raises(ValueError, match=r"holds another preparation: .*split_rule is .* there and .* here"):
        plan(other, tmp_path / "out", "bytes")
    with pytest.raises(ValueError, match="vocab_size is 257 there and 32000 here"):
        plan(source_of(tmp_path / "a", map(str, range(20))), tmp_path / "out", "mistral")
    assert files_in(tmp_path / "out") == before
    (tmp_path / "mine" / "train").mkdir(parents=True)
    (tmp_path / "mine" / "train" / "precious.json").write_text("{}")
    with pytest.raises(ValueError, match="holds other files: give an empty directory"):
        plan(other, tmp_path / "mine", "bytes")


def test_an_empty_split_is_refused(tmp_path):
    source = source_of(tmp_path, ["a", "b"], validation_one_in=1 << 60)
    with pytest.raises(ValueError, match="has no document for the validation split, 0 texts skipped; the rule is:"):
        carry_out(plan(source, tmp_path / "out", "bytes"), run_here)


def test_what_is_wrong_on_a_worker_is_one_sentence(tmp_path):
    """Whatever the runner makes of the exception."""
    source = source_of(tmp_path, map(str, range(20)))
    plans = plan(source, tmp_path / "out", "bytes")
    (tmp_path / "texts.jsonl").unlink()

    def run(tasks):
        try:
            run_here(tasks)
        except Exception as error:
            raise RuntimeError("the pipeline failed:\n  a page of it") from error

    with pytest.raises(ValueError, match=r"texts.jsonl") as raised:
        carry_out(plans, run)
    assert "\n" not in str(raised.value)
    write_jsonl(tmp_path / "texts.jsonl", map(str, range(20)))
    carry_out(plan(source, tmp_path / "out", "bytes"), run_here)
    assert not list((tmp_path / "out").rglob("*.error"))


def test_a_worker_with_another_tokenizer_is_refused(tmp_path):
    plans = plan(source_of(tmp_path, map(str, range(20))), tmp_path / "out", "bytes")
    with pytest.raises(ValueError, match=r"the tokenizer 'bytes' has fingerprint \w+ on a worker and other where"):
        carry_out(plans, lambda tasks: run_here([task._replace(fingerprint="other") for task in tasks]))


@pytest.mark.parametrize("mixers", [("interdomain",), ("softmax",)])
def test_packed_with_reset_trains_as_separate_documents(tmp_path, mixers):
    """The gradients of one epoch, from the files of a corpus on."""
    length = 24
    texts = ["a" * 5, "bc" * 6, "def", "g" * 23, "hi" * 4, "j", "klm" * 5, "no" * 3, "pqrst" * 2, "u" * 8]
    source = source_of(tmp_path, [*texts, *map(str, range(10))])
    carry_out(plan(source, tmp_path / "out", "bytes"), run_here)
    corpus = TokenDocuments(tmp_path / "out" / "train", BYTES)
    packed = TrainBatches(
        [corpus], sequence_length=length, batch_size=1, packing="best_fit", reset=True, eos_id=256, seed=0
    )
    tokens, rows = 0, []
    while tokens < corpus.lengths.sum():
        rows.append(next(packed))
        tokens += rows[-1]["loss_mask"].sum()
    packed.close()
    together = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    assert together["segment_ids"].max() > 1
    apart = {name: np.zeros((len(corpus.lengths), length), np.int32) for name in ("inputs", "targets", "loss_mask")}
    for row, count in enumerate(corpus.lengths):
        ids = corpus.read(row, 0, count)
        apart["inputs"][row, :count] = [256, *ids[:-1]]
        apart["targets"][row, :count] = ids
        apart["loss_mask"][row, :count] = 1
    model = Decoder(
        vocab_size=257, d_model=16, num_layers=1, num_heads=2, head_dim=8, state_dim=4, mixers=mixers, init_std=0.2
    )
    params = quick_jit(model.init)(jax.random.key(0), apart["inputs"])["params"]
    compute = quick_jit(functools.partial(loss_and_gradient, model, accumulation_steps=1, vocab_chunks=1))
    packed_result, expected = compute(params, together), compute(params, apart)
    assert packed_result.tokens == expected.tokens == corpus.lengths.sum()
    np.testing.assert_allclose(packed_result.loss, expected.loss, rtol=1e-6)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected.gradient))
    for actual, wanted in zip(jax.tree.leaves(packed_result.gradient), jax.tree.leaves(expected.gradient), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-6 * scale)


PREPARE = [sys.executable, "-m", "interdomain_jax.data.prepare"]


def prepare_command(output, *more):
    return [
        *PREPARE,
        "--corpus=stdlib_text",
        "--tokenizer=bytes",
        "--shard_mib=2",
        f"--data_dir={output.parent / 'tfds'}",
        f"--output={output}",
        *more,
    ]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The embedded corpus as one worker prepares it, and what the command says."""
    output = tmp_path_factory.mktemp("prepared") / "corpus"
    finished = subprocess.run(prepare_command(output), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return output, finished


def test_the_command_says_what_it_made(prepared):
    output, finished = prepared
    train, validation, hint = finished.stdout.splitlines()
    manifest = read_manifest(output / "train")
    assert train.startswith(f"train: {sum(s.documents for s in manifest.shards):,} documents, ")
    assert f"{sum(s.tokens for s in manifest.shards):,} tokens" in train
    assert validation.startswith("validation: ")
    assert hint == f"train on it with --config.data.corpora=\"('{output}',)\" --config.data.tokenizer=bytes"
    assert "Traceback" not in finished.stderr
    assert len(manifest.shards) > 8
    TokenDocuments(output / "train", BYTES)


def test_two_workers_write_the_same_bytes(prepared, tmp_path):
    finished = subprocess.run(prepare_command(tmp_path / "corpus", "--num_workers=2"), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert files_in(tmp_path / "corpus") == files_in(prepared[0])


def test_killed_and_started_again_it_writes_the_same_bytes(prepared, tmp_path):
    output = tmp_path / "corpus"
    for shards in (1, 5):
        with subprocess.Popen(
            prepare_command(output, "--num_workers=2"), stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            deadline = time.monotonic() + 60
            while len(list(output.glob("train/tokens-*.json"))) < shards and time.monotonic() < deadline:
                time.sleep(0.005)
            # The workers too.
            os.killpg(process.pid, signal.SIGKILL)
        assert not (output / "train" / "manifest.json").exists()
    finished = subprocess.run(prepare_command(output), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert files_in(output) == files_in(prepared[0])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--tokenizer=missing.model"], "tokenizer file missing.model does not exist"),
        (["--corpus=wikipedia"], "wikipedia"),
        (["--corpus=text_files", "--files=/nowhere/*.jsonl"], "/nowhere/*.jsonl"),
    ],
)
def test_bad_input_of_the_command(tmp_path, flags, named):
    finished = subprocess.run(prepare_command(tmp_path / "out", *flags), capture_output=True, text=True)
    assert finished.returncode == 1
    assert named in finished.stderr.splitlines()[-1]
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "out").exists()
