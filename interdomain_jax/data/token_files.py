"""A prepared split on disk: its documents as token ids, in files of records, and a manifest that says what they are.

    <directory>/tokens-00003-of-00016.array_record   the ids of its documents, the closing EOS of each among them
    <directory>/tokens-00003-of-00016.npy            int32, the number of ids of each document
    <directory>/tokens-00003-of-00016.json           the counts of the shard, written last: it is complete
    <directory>/manifest.json                        all of them, and the tokenizer, written when all are complete

A record holds `RECORD_TOKENS` ids of a document, its last record what is left: little-endian uint16 if the vocabulary
fits, else uint32. Nothing says how long a row will be, or how documents are packed into it: that is for the loader.
"""

import hashlib
import io
import json
import resource
import tempfile
import uuid
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath

from interdomain_jax import strict_json
from interdomain_jax.data.documents import Documents
from interdomain_jax.data.tokenizers import Tokenizer, fingerprint
from interdomain_jax.workdir import is_remote

FORMAT = 1
MANIFEST = "manifest.json"
# That a process has open besides.
_OTHER_FILES = 256
RECORD_TOKENS = 1 << 14
"""Ids in a record: a row out of the middle of a book reads no more than a record or two that it does not need."""


class Shard(NamedTuple):
    """What a file of records holds.

    Attributes:
        name: of the file, without what follows the dot.
        size: of the file of records, in bytes.
        crc32: of that file.
        documents: number of them.
        tokens: ids in them, the closing EOS of each among them.
        bytes: UTF-8 bytes of their texts.
        cut: texts that became several documents, for they were too long.
        skipped: texts that became none, by reason.
    """

    name: str
    size: int
    crc32: int
    documents: int
    tokens: int
    bytes: int
    cut: int
    skipped: dict[str, int]


class Manifest(NamedTuple):
    """What a prepared split is.

    Attributes:
        format: of the files, `FORMAT`.
        corpus: the source of the texts, by its full name.
        files: of the source, as the user named them.
        split: which part of them this is.
        split_rule: how the parts are told apart.
        tokenizer: as the user named it.
        fingerprint: of the tokenizer, see `tokenizers.fingerprint`.
        vocab_size: of the tokenizer.
        eos_id: of the tokenizer.
        shards: the files.
    """

    format: int
    corpus: str
    files: tuple[str, ...]
    split: str
    split_rule: str
    tokenizer: str
    fingerprint: str
    vocab_size: int
    eos_id: int
    shards: tuple[Shard, ...]


def shard_name(index: int, count: int) -> str:
    """The name of shard `index` of `count`, without the endings of its files."""
    return f"tokens-{index:05d}-of-{count:05d}"


def write_shard(directory: epath.PathLike, name: str, texts: Iterable[Documents], tokenizer: Tokenizer) -> Shard:
    """Writes one shard, all or nothing; the same texts give the same bytes.

    Several workers may write the same shard at once.

    Args:
        directory: that exists.
        name: from `shard_name`.
        texts: what became of each text, in the order in which the documents are stored.
        tokenizer: makes them ids.

    Raises:
        ValueError: the tokenizer gives an id that is not in its vocabulary.
    """
    directory = epath.Path(directory)
    dtype = _dtype(tokenizer.vocab_size)
    skipped: Counter[str] = Counter()
    lengths: list[int] = []
    size, cut = 0, 0
    with tempfile.TemporaryDirectory() as local:
        # The format has no writer for buckets.
        unfinished = Path(local, name)
        # A group is what a read decompresses.
        writer = ArrayRecordWriter(str(unfinished), "group_size:1")
        for documents in texts:
            if documents.skipped:
                skipped[documents.skipped] += 1
            cut += len(documents.texts) > 1
            for text in documents.texts:
                ids = np.append(tokenizer.encode(text), np.int32(tokenizer.eos_id))
                if ids.max() >= tokenizer.vocab_size:
                    raise ValueError(
                        f"the tokenizer gives the id {ids.max()} and says that it has {tokenizer.vocab_size} ids: "
                        "its file is damaged"
                    )
                for start in range(0, len(ids), RECORD_TOKENS):
                    writer.write(ids[start : start + RECORD_TOKENS].astype(dtype).tobytes())
                lengths.append(len(ids))
                size += len(text.encode())
        writer.close()
        records = unfinished.read_bytes()
    _write_whole(directory / f"{name}.array_record", records)
    file = io.BytesIO()
    np.save(file, np.array(lengths, np.int32))
    _write_whole(directory / f"{name}.npy", file.getvalue())
    shard = Shard(
        name=name,
        size=len(records),
        crc32=zlib.crc32(records),
        documents=len(lengths),
        tokens=sum(lengths),
        bytes=size,
        cut=cut,
        skipped=dict(sorted(skipped.items())),
    )
    write_json(directory / f"{name}.json", shard._asdict())
    return shard


def read_shard(directory: epath.PathLike, name: str) -> Shard | None:
    """What is known of a shard that is complete; None if it is not, or a file of it is gone or cut off."""
    directory = epath.Path(directory)
    try:
        shard = Shard(**json.loads((directory / f"{name}.json").read_text()))
        is_whole = (directory / f"{name}.array_record").stat().length == shard.size
        return shard if is_whole and (directory / f"{name}.npy").exists() else None
    except FileNotFoundError:
        return None


def write_manifest(directory: epath.PathLike, manifest: Manifest) -> None:
    """Says that a split is complete."""
    content = manifest._asdict() | {"shards": [shard._asdict() for shard in manifest.shards]}
    write_json(epath.Path(directory) / MANIFEST, content)


def read_manifest(directory: epath.PathLike) -> Manifest:
    """Reads what a prepared split is.

    Raises:
        FileNotFoundError: the directory holds none that is complete.
        ValueError: it is of another format.
    """
    path = epath.Path(directory) / MANIFEST
    if not path.exists():
        raise FileNotFoundError(
            f"{directory} holds no prepared split of a corpus: there is no {MANIFEST}; "
            "python -m interdomain_jax.data.prepare makes it"
        )
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; delete it and prepare the corpus again") from error
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path} is of format {content.get('format')}; this version reads format {FORMAT}: prepare the corpus again"
        )
    shards = tuple(Shard(**shard) for shard in content["shards"])
    return Manifest(**content | {"shards": shards, "files": tuple(content["files"])})


def _write_whole(path: epath.Path, content: bytes) -> None:
    """Writes a file that is there as a whole or not at all, whoever else writes the same."""
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def write_json(path: epath.Path, content: Any) -> None:
    """Writes JSON, all or nothing, whoever else writes the same."""
    _write_whole(path, (strict_json.dumps(content, indent=2) + "\n").encode())


class TokenDocuments:
    """The documents of a prepared split, as ids.

    Args:
        directory: of the split, on a disk or mounted as one.
        tokenizer: that the model will be trained with.

    Raises:
        FileNotFoundError: the directory holds no complete split, or a file of it is gone.
        ValueError: it was made with another tokenizer, a file is not what was written, it holds no document, or it has
            more files than a process may open.
    """

    def __init__(self, directory: epath.PathLike, tokenizer: Tokenizer):
        directory = epath.Path(directory)
        if is_remote(directory):
            raise ValueError(
                f"{directory} is a bucket, out of which records cannot be read at random: mount it, with Cloud Storage "
                "FUSE for one, and give the directory"
            )
        self.manifest = read_manifest(directory)
        if self.manifest.fingerprint != fingerprint(tokenizer):
            raise ValueError(
                f"{directory} was prepared with the tokenizer {self.manifest.tokenizer!r}, fingerprint "
                f"{self.manifest.fingerprint}; data.tokenizer has fingerprint {fingerprint(tokenizer)}: give the same "
                "one, or prepare the corpus again"
            )
        files = [directory / f"{shard.name}.array_record" for shard in self.manifest.shards]
        lengths = [_lengths(directory, shard) for shard in self.manifest.shards]
        self.lengths = np.concatenate([np.zeros(0, np.int32), *lengths])
        """int32 [documents], the number of ids of each, its EOS among them."""
        self.text_bytes = sum(shard.bytes for shard in self.manifest.shards)
        """UTF-8 bytes of their texts."""
        self.digest = hashlib.sha256(repr(self.manifest.shards).encode()).hexdigest()[:16]
        """Tells these files from others, wherever they lie."""
        if not len(self.lengths):
            raise ValueError(f"{directory} holds no document: give a corpus with at least one")
        self._first_record = np.cumsum(-(-self.lengths // RECORD_TOKENS), dtype=np.int64)
        self._first_record = np.append(0, self._first_record[:-1])
        self._dtype = _dtype(self.manifest.vocab_size)
        _allow_open_files(len(files))
        self._records = grain.sources.ArrayRecordDataSource([str(path) for path in files])

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """The ids `start` to `stop` of a document, exclusive and above `start`, int32 [stop - start]."""
        first = int(self._first_record[document])
        records = range(start // RECORD_TOKENS, -(-stop // RECORD_TOKENS))
        ids = [np.frombuffer(self._records[first + record], self._dtype) for record in records]
        skipped = records.start * RECORD_TOKENS
        return np.concatenate(ids)[start - skipped : stop - skipped].astype(np.int32)


def _lengths(directory: epath.Path, shard: Shard) -> np.ndarray:
    """The lengths of the documents of a shard, whose files are all there and as long as they were.

    Raises:
        FileNotFoundError: a file is gone.
        ValueError: a file is not what was written.
    """
    again = "prepare the corpus again, with the same command"
    records, path = (directory / f"{shard.name}{suffix}" for suffix in (".array_record", ".npy"))
    for file in (records, path):
        if not file.exists():
            raise FileNotFoundError(f"{file} is gone, though {directory / MANIFEST} names it: {again}")
    if records.stat().length != shard.size:
        raise ValueError(
            f"{records} has {records.stat().length} bytes and had {shard.size} when it was written: {again}"
        )
    try:
        lengths = np.load(path)
    except (ValueError, EOFError):
        lengths = np.zeros(0, np.int32)
    if (len(lengths), lengths.sum()) != (shard.documents, shard.tokens):
        raise ValueError(f"{path} is not what was written: delete it, and {again}")
    return lengths


def _allow_open_files(count: int) -> None:
    """Lets the process open so many files: each stays open once a record of it is read.

    Raises:
        ValueError: a process may not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    # To the limit, for there may be other corpora.
    most = needed if hard == resource.RLIM_INFINITY else hard
    if needed > most:
        raise ValueError(
            f"the corpus has {count} files, which are all open at once, and a process may open {hard} (ulimit -Hn): "
            "raise that, or prepare the corpus with larger shards"
        )
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
