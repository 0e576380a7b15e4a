"""Documents as ids on disk: what goes in comes out, and what is not what was written is named."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax.data import token_files
from interdomain_jax.data.documents import documents_of
from interdomain_jax.data.token_files import (
    TokenDocuments,
    read_manifest,
    read_shard,
    shard_name,
    write_manifest,
    write_shard,
)
from interdomain_jax.data.tokenizers import BytesTokenizer, load_tokenizer

BYTES = BytesTokenizer()
NAMES = dict(corpus="test", split="train", tokenizer_name="bytes")


def write(directory, shards, tokenizer=BYTES):
    directory.mkdir(exist_ok=True, parents=True)
    written = [write_shard(directory, shard_name(n, len(shards)), texts, tokenizer) for n, texts in enumerate(shards)]
    return write_manifest(directory, written, tokenizer, **NAMES)


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
    assert [list(documents[n]) for n in range(len(documents))] == [[*text.encode(), 256] for text in expected]
    np.testing.assert_array_equal(documents.lengths, [len(text.encode()) + 1 for text in expected])
    assert read_manifest(directory) == manifest


def test_the_same_texts_give_the_same_bytes(tmp_path):
    for name in ("one", "other"):
        write(tmp_path / name, [["a", "b" * 1000], ["c"]])
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "other")]
    assert files[0] == files[1]
    assert not [name for name in files[0] if name.endswith(".tmp")]


def test_a_shard_is_complete_when_its_counts_are_written(tmp_path):
    assert read_shard(tmp_path, "tokens") is None
    assert write_shard(tmp_path, "tokens", [b"a", b"", b"\xff"], BYTES) == read_shard(tmp_path, "tokens")
    assert read_shard(tmp_path, "tokens").skipped == {"empty": 1, "invalid utf-8": 1}


def test_a_long_text_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "documents_of", lambda content: documents_of(content, max_bytes=4))
    shard = write_shard(tmp_path, "tokens", ["abcdef", "abc"], BYTES)
    assert (shard.documents, shard.cut, shard.tokens, shard.bytes) == (3, 1, 12, 9)


def test_another_tokenizer_is_refused(tmp_path):
    write(tmp_path, [["text"]])
    with pytest.raises(ValueError, match=r"prepared with the tokenizer 'bytes', fingerprint .*; data.tokenizer has"):
        TokenDocuments(tmp_path, load_tokenizer("mistral"))


def test_a_large_vocabulary(tmp_path):
    class Large(BytesTokenizer):
        vocab_size = 1 << 17
        eos_id = (1 << 17) - 1

    write(tmp_path, [["ab"]], Large())
    assert list(TokenDocuments(tmp_path, Large())[0]) == [97, 98, (1 << 17) - 1]


@pytest.mark.parametrize(
    ("damage", "error", "named"),
    [
        (lambda directory: (directory / "manifest.json").unlink(), FileNotFoundError, "holds no prepared corpus"),
        (lambda directory: (directory / "tokens-00000-of-00001.array_record").unlink(), FileNotFoundError, "is gone"),
        (
            lambda directory: (directory / "tokens-00000-of-00001.array_record").write_bytes(b"half"),
            ValueError,
            "has 4 bytes and had",
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
