"""Documents as ids on disk: what goes in comes out, and what is not what was written is named."""

import json
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interdomain_jax.data.documents import documents_of
from interdomain_jax.data.token_files import (
    FORMAT,
    RECORD_TOKENS,
    Manifest,
    TokenDocuments,
    read_manifest,
    read_shard,
    shard_name,
    write_manifest,
    write_shard,
)
from interdomain_jax.data.tokenizers import BytesTokenizer, fingerprint, load_tokenizer

BYTES = BytesTokenizer()


def write(directory, shards, tokenizer=BYTES):
    directory.mkdir(exist_ok=True, parents=True)
    written = [
        write_shard(directory, shard_name(n, len(shards)), map(documents_of, texts), tokenizer)
        for n, texts in enumerate(shards)
    ]
    manifest = Manifest(
        format=FORMAT,
        corpus="test",
        files=("texts",),
        split="train",
        split_rule="all of it",
        tokenizer="bytes",
        fingerprint=fingerprint(tokenizer),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        shards=tuple(written),
    )
    write_manifest(directory, manifest)
    return manifest


def ids_of(documents):
    return [list(documents.read(n, 0, length)) for n, length in enumerate(documents.lengths)]


@given(st.lists(st.lists(st.text() | st.binary(max_size=20), max_size=8), min_size=1, max_size=4))
def test_tokens_in_are_tokens_out(tmp_path_factory, shards):
    directory = tmp_path_factory.mktemp("corpus")
    manifest = write(directory, shards)
    expected = [text for texts in shards for content in texts for text in documents_of(content).texts]
    assert sum(shard.documents for shard in manifest.shards) == len(expected)
    assert sum(shard.bytes for shard in manifest.shards) == sum(len(text.encode()) for text in expected)
    skipped = sum(sum(shard.skipped.values()) for shard in manifest.shards)
    assert skipped == sum(bool(documents_of(content).skipped) for texts in shards for content in texts)
    if not expected:
        with pytest.raises(ValueError, match="holds no document"):
            TokenDocuments(directory, BYTES)
        return
    documents = TokenDocuments(directory, BYTES)
    assert ids_of(documents) == [[*text.encode(), 256] for text in expected]
    np.testing.assert_array_equal(documents.lengths, [len(text.encode()) + 1 for text in expected])
    assert documents.text_bytes == sum(len(text.encode()) for text in expected)
    assert read_manifest(directory) == manifest


def test_the_same_texts_give_the_same_bytes(tmp_path):
    for name in ("one", "other"):
        write(tmp_path / name, [["a", "b" * 1000], ["c"]])
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "other")]
    assert files[0] == files[1]
    assert not [name for name in files[0] if name.endswith(".tmp")]


def test_a_shard_is_complete_when_its_counts_are_written(tmp_path):
    assert read_shard(tmp_path, "tokens") is None
    texts = map(documents_of, [b"a", b"", b"\xff", None, None])
    assert write_shard(tmp_path, "tokens", texts, BYTES) == read_shard(tmp_path, "tokens")
    assert read_shard(tmp_path, "tokens").skipped == {"empty": 1, "invalid utf-8": 1, "no text": 2}


def test_a_long_text_is_counted(tmp_path):
    texts = [documents_of(text, max_bytes=4) for text in ("abcdef", "abc")]
    shard = write_shard(tmp_path, "tokens", texts, BYTES)
    assert (shard.documents, shard.cut, shard.tokens, shard.bytes) == (3, 1, 12, 9)


@given(
    before=st.integers(0, 5),
    length=st.integers(0, 3 * RECORD_TOKENS),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@settings(max_examples=20)
def test_any_stretch_of_a_long_document_can_be_read(tmp_path_factory, before, length, bounds):
    """Of several records, the documents before it of one each."""
    directory = tmp_path_factory.mktemp("corpus")
    text = "".join(chr(33 + n % 91) for n in range(length)) + "."
    write(directory, [["short"] * before + [text]])
    documents = TokenDocuments(directory, BYTES)
    start, stop = sorted(round(bound * len(text)) for bound in bounds)
    stop += 1
    assert list(documents.read(before, start, stop)) == [*text.encode(), 256][start:stop]


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
    class Damaged(BytesTokenizer):
        vocab_size = 100
        eos_id = 99

    with pytest.raises(ValueError, match="gives the id 122 and says that it has 100 ids"):
        write(tmp_path, [["z"]], Damaged())
    assert not list(tmp_path.iterdir())


def test_a_bucket_is_refused_for_reading():
    with pytest.raises(ValueError, match=r"gs://bucket/corpus/train is a bucket.*mount it"):
        TokenDocuments("gs://bucket/corpus/train", BYTES)


def test_more_files_than_a_process_may_open(tmp_path, monkeypatch):
    """Each stays open: some two thousand of a corpus of the paper's size."""
    write(tmp_path, [["a"], ["b"], ["c"]])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        TokenDocuments(tmp_path, BYTES)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 200))
    with pytest.raises(ValueError, match=r"the corpus has 3 files, .* and a process may open 200 \(ulimit -Hn\)"):
        TokenDocuments(tmp_path, BYTES)


def test_the_digest_is_that_of_the_files(tmp_path):
    for name, texts in (("one", ["a"]), ("same", ["a"]), ("other", ["b"])):
        write(tmp_path / name, [texts])
    one, same, other = (TokenDocuments(tmp_path / name, BYTES).digest for name in ("one", "same", "other"))
    assert one == same != other


def test_another_tokenizer_is_refused(tmp_path):
    write(tmp_path, [["text"]])
    with pytest.raises(ValueError, match=r"prepared with the tokenizer 'bytes', fingerprint .*; data.tokenizer has"):
        TokenDocuments(tmp_path, load_tokenizer("mistral"))


def test_a_large_vocabulary(tmp_path):
    class Large(BytesTokenizer):
        vocab_size = 1 << 17
        eos_id = (1 << 17) - 1

    write(tmp_path, [["ab"]], Large())
    assert ids_of(TokenDocuments(tmp_path, Large())) == [[97, 98, (1 << 17) - 1]]


@pytest.mark.parametrize(
    ("damage", "error", "named"),
    [
        (
            lambda directory: (directory / "manifest.json").unlink(),
            FileNotFoundError,
            "holds no prepared split of a corpus",
        ),
        (lambda directory: (directory / "tokens-00000-of-00001.array_record").unlink(), FileNotFoundError, "is gone"),
        (
            lambda directory: (directory / "tokens-00000-of-00001.array_record").write_bytes(b"half"),
            ValueError,
            "has 4 bytes and had",
        ),
        (lambda directory: (directory / "tokens-00000-of-00001.npy").unlink(), FileNotFoundError, "npy is gone"),
        (
            lambda directory: (directory / "tokens-00000-of-00001.npy").write_bytes(b""),
            ValueError,
            "npy is not what was written: delete it, and prepare the corpus again",
        ),
        (
            lambda directory: np.save(directory / "tokens-00000-of-00001.npy", np.array([2, 3], np.int32)),
            ValueError,
            "npy is not what was written",
        ),
        (
            lambda directory: (directory / "manifest.json").write_text('{"format": 1, '),
            ValueError,
            "manifest.json is damaged: .*; delete it and prepare the corpus again",
        ),
        (
            lambda directory: (directory / "manifest.json").write_text(json.dumps({"format": 99})),
            ValueError,
            "is of format 99; this version reads format 1",
        ),
    ],
)
def test_what_is_not_as_it_was_is_named(tmp_path, damage, error, named):
    write(tmp_path, [["text"]])
    damage(tmp_path)
    with pytest.raises(error, match=named):
        TokenDocuments(tmp_path, BYTES)
