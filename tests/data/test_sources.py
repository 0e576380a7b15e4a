"""Sources against plain readings of the files that they are made of."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from absl.testing import flagsaver
from hypothesis import example, given
from hypothesis import strategies as st

from interdomain_jax.data import source_flags, text_files
from interdomain_jax.data.documents import documents_of
from interdomain_jax.data.sources import Text, TextSource, make_source


def source_of(files: str | Path | Sequence[str], **settings) -> TextSource:
    patterns = [str(files)] if isinstance(files, (str, Path)) else files
    return make_source("text_files", files=patterns, **{"data_dir": "unused", "validation_one_in": 3} | settings)


def all_texts(source: TextSource, part_bytes: int) -> list[Text]:
    """The texts of both splits, checked to share none, in the order of the parts."""
    found: list[Text] = []
    for part in source.parts(part_bytes):
        train, validation = (list(source.texts(part, split)) for split in ("train", "validation"))
        assert {expected_split(text) for text in train} <= {"train"}
        assert {expected_split(text) for text in validation} <= {"validation"}
        found += train + validation
    assert len({text.key for text in found}) == len(found)
    return found


def expected_split(text: Text, one_in: int = 3) -> str:
    content = text.key if text.content is None else text.content
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return "train" if int(hashlib.sha256(data).hexdigest()[:16], base=16) % one_in else "validation"


def number_of(text: Text) -> int:
    return int(text.key.rpartition(":")[2])


def contents(texts: Sequence[Text]) -> list[bytes | str | None]:
    return [text.content for text in sorted(texts, key=number_of)]


def written(directory: Path, name: str, data: bytes) -> str:
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(data)
    return str(directory / name)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Callable[[str, str, bytes], str]:
    """Puts a file on the disk or at a URL."""

    def put(where: str, name: str, data: bytes) -> str:
        if where == "disk":
            return written(directory, name, data)
        fsspec.filesystem("memory").pipe(f"/{directory.name}/{name}", data)
        return f"memory://{directory.name}/{name}"

    directory = tmp_path_factory.mktemp("files")
    return put


records = st.one_of(
    st.builds(lambda text, ascii: json.dumps({"id": 1, "text": text}, ensure_ascii=ascii), st.text(), st.booleans()),
    st.builds(lambda text: json.dumps({"text": text}), st.text(alphabet=["\ud800", "a", "\n"])),
    st.sampled_from(['{"text": null}', '{"text": 3}', '{"title": "a"}', '["text"]', '"text"', "null", "{", "a b"]),
    st.sampled_from(["", " ", "\t"]),
    st.builds(lambda length: json.dumps({"text": "x" * length}), st.integers(0, 500)),
)


@pytest.mark.parametrize("where", ["disk", "memory"])
@given(
    lines=st.lists(st.tuples(records, st.sampled_from(["\n", "\r\n"])), max_size=12),
    open_end=st.booleans(),
    part_bytes=st.integers(1, 300),
)
@example(lines=[('{"text": "a"}', "\n"), ('{"text": "b"}', "\n")], open_end=False, part_bytes=14)
@example(lines=[('{"text": "a"}', "\n"), ('{"text": "b"}', "\n")], open_end=False, part_bytes=13)
@example(lines=[('{"text": "a"}', "\n"), ('{"text": "b"}', "\n")], open_end=True, part_bytes=15)
def test_every_line_is_in_one_part_and_one_split(place, where, lines, open_end, part_bytes):
    data = "".join(line + end for line, end in lines).encode("utf-8")
    data = data.rstrip(b"\r\n") if open_end else data
    path = place(where, "a.jsonl", data)

    expected, position = [], 0
    for line in data.split(b"\n"):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            text = record.get("text") if isinstance(record, dict) else None
            expected.append((position, text if isinstance(text, str) else None))
        position += len(line) + 1

    texts = all_texts(source_of(path), part_bytes)
    assert sorted((number_of(text), text.content) for text in texts) == sorted(expected)


@pytest.mark.parametrize("where", ["disk", "memory"])
@pytest.mark.parametrize(
    "column",
    [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
@given(
    values=st.lists(st.one_of(st.none(), st.text(max_size=30)), max_size=20),
    group=st.integers(1, 7),
    part_bytes=st.integers(1, 1000),
)
def test_every_row_is_in_one_part_and_one_split(place, where, column, values, group, part_bytes):
    file = io.BytesIO()
    pq.write_table(
        pa.table({"n": range(len(values)), "text": pa.array(values).cast(column)}), file, row_group_size=group
    )
    path = place(where, "a.parquet", file.getvalue())

    texts = all_texts(source_of(path), part_bytes)
    assert contents(texts) == [None if value is None else value.encode() for value in values]
    assert sorted(map(number_of, texts)) == list(range(len(values)))


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=20), part_bytes=st.integers(1, 120))
def test_every_file_is_in_one_part_and_one_split(tmp_path_factory, sizes, part_bytes):
    directory = tmp_path_factory.mktemp("texts")
    files = {written(directory, f"{n:02}.txt", bytes([65 + n]) * size): size for n, size in enumerate(sizes)}
    source = source_of(directory)
    parts = source.parts(part_bytes)
    assert [path for part in parts for path in part.files] == sorted(files)
    for part in parts[:-1]:
        *head, last = (files[path] for path in part.files)
        assert sum(head) < part_bytes <= sum(head) + last
    texts = all_texts(source, part_bytes)
    assert {text.key: text.content for text in texts} == {path: Path(path).read_bytes() for path in files}


def test_parts_are_about_as_large_as_asked(tmp_path):
    written(tmp_path, "a.jsonl", b'{"text": "abc"}\n' * 100)
    lines = source_of(tmp_path / "a.jsonl").parts(500)
    assert [(part.start, part.stop) for part in lines] == [(0, 500), (500, 1000), (1000, 1500), (1500, 1600)]

    settings = {"use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"text": ["x" * 1000] * 10}), tmp_path / "b.parquet", row_group_size=1, **settings)
    rows = source_of(tmp_path / "b.parquet").parts(2500)
    assert [(part.start, part.stop) for part in rows] == [(0, 3), (3, 6), (6, 9), (9, 10)]


def zstd(data: bytes) -> bytes:
    return pa.compress(data, "zstd", asbytes=True)


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_files(tmp_path, ending):
    lines = [json.dumps({"text": f"text {n}"}) + "\n" for n in range(50)]
    # Two streams one behind the other, as tools that compress in parallel write them.
    streams = [COMPRESS[ending]("".join(half).encode()) for half in (lines[:20], lines[20:])]
    written(tmp_path, f"a.JSONL{ending}", b"".join(streams))
    written(tmp_path, f"b.md{ending}", COMPRESS[ending](b"# b\n"))
    source = source_of(tmp_path)
    assert len(source.parts(10)) == 2
    *records, text = sorted(all_texts(source, 10), key=lambda text: ("a.JSONL" not in text.key, text.key))
    assert contents(records) == [f"text {n}" for n in range(50)]
    assert (text.key, text.content) == (str(tmp_path / f"b.md{ending}"), b"# b\n")


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("damage", ["cut", "overwritten", "from the first byte", "other"])
def test_a_damaged_compressed_file_is_named(tmp_path, kind, ending, damage):
    data = COMPRESS[ending](b"".join(b'{"text": "%d"}\n' % n**9 for n in range(2000)))
    half = len(data) // 2
    damaged = {
        "cut": data[:half],
        "overwritten": data[:half] + bytes(half),
        # Behind the header of a gzip file.
        "from the first byte": data[:10] + b"\xff" * half,
        "other": b'{"text": "plain"}\n' * 9,
    }
    path = written(tmp_path, f"a.{kind}{ending}", damaged[damage])
    with pytest.raises(ValueError, match=f"^{path} cannot be read to its end: ."):
        all_texts(source_of(path), 10)


def test_a_damaged_parquet_file_is_named(tmp_path):
    pq.write_table(pa.table({"text": [str(n**9) for n in range(2000)]}), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    cut = written(tmp_path, "cut.parquet", data[: len(data) // 2])
    with pytest.raises(ValueError, match=f"^{cut} cannot be read to its end: ."):
        source_of(cut).parts(1)
    overwritten = written(tmp_path, "over.parquet", data[:4] + bytes(9000) + data[9004:])
    source = source_of(overwritten)
    with pytest.raises(ValueError, match=f"^{overwritten} cannot be read to its end: ."):
        list(source.texts(*source.parts(1), "train"))


def test_parquet_without_the_column(tmp_path):
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet has no column 'text': set text_field to one of body, id"):
        source_of(tmp_path / "a.parquet").parts(1)
    assert contents(all_texts(source_of(tmp_path / "a.parquet", text_field="body"), 1)) == [b"a"]
    assert contents(all_texts(source_of(tmp_path / "a.parquet", text_field="id"), 1)) == [None]


def test_bad_records_are_texts_without_content(tmp_path):
    lines = [
        b"\xef\xbb\xbf" + b'{"text": "after a byte order mark"}',
        b'{"text": "caf\xe9"}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"text": 1' + b"0" * 10_000 + b"}",
        b"\x00\x00",
        b'{"text": "last"}',
    ]
    path = written(tmp_path, "a.jsonl", b"\n".join(lines))
    texts = all_texts(source_of(path), 1000)
    assert contents(texts) == ["after a byte order mark", lines[1] + b"\n", "\ud800", None, None, None, "last"]
    reasons = [documents_of(content).skipped for content in contents(texts)]
    assert reasons == [None, "invalid utf-8", "invalid utf-8", "no text", "no text", "no text", None]


def test_invalid_utf_8_in_parquet_is_counted(tmp_path):
    # As a string, though it is none: pyarrow does not look.
    column = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"caf\xe9"]).buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    texts = all_texts(source_of(tmp_path / "a.parquet"), 1)
    assert [documents_of(content).skipped for content in contents(texts)] == [None, "invalid utf-8"]


def test_duplicates_fall_into_one_split(tmp_path):
    texts = [f"text {n}" for n in range(40)]
    written(tmp_path, "a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    pq.write_table(pa.table({"text": texts}), tmp_path / "b.parquet")
    for n, text in enumerate(texts):
        written(tmp_path, f"c/{n}.txt", text.encode())
    source = source_of(tmp_path)
    found = {
        split: [text.content for part in source.parts(100) for text in source.texts(part, split)]
        for split in ("train", "validation")
    }
    as_bytes = {split: {c if isinstance(c, bytes) else c.encode() for c in found[split]} for split in found}
    assert not as_bytes["train"] & as_bytes["validation"]
    assert len(found["train"]) + len(found["validation"]) == 120
    assert len(as_bytes["validation"]) * 3 == len(found["validation"]) > 0


def test_patterns_directories_and_links(tmp_path):
    for name in ("a.txt", "b.jsonl", "below/c.txt", "below/deeper/d.md"):
        written(tmp_path / "tree", name, b"{}")
    os.symlink(tmp_path / "tree/a.txt", tmp_path / "tree/below/link.txt")
    os.symlink(tmp_path / "gone", tmp_path / "tree/below/gone.txt")

    def names(*patterns: str) -> list[str]:
        found = text_files.listing([str(tmp_path / "tree" / pattern) for pattern in patterns])
        assert set(found.values()) == {2}
        return [str(Path(path).relative_to(tmp_path / "tree")) for path in found]

    everything = ["a.txt", "b.jsonl", "below/c.txt", "below/deeper/d.md", "below/link.txt"]
    assert names("") == names("*") == names("**") == names("", "a.txt", "below/*") == everything
    assert names("*.txt") == ["a.txt"]
    assert text_files.listing([f"file://{tmp_path}/tree/a.txt"]) == text_files.listing([f"{tmp_path}/tree/a.txt"])
    assert names("**/*.txt") == ["a.txt", "below/c.txt", "below/link.txt"]
    assert names("below/deeper", "b.jsonl") == ["b.jsonl", "below/deeper/d.md"]
    with pytest.raises(FileNotFoundError, match=r"files '.*/tree/\*.csv' match no file"):
        names("a.txt", "*.csv")
    (tmp_path / "tree/empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"files '.*/tree/empty' match no file"):
        names("empty")


def test_urls(place):
    place("memory", "urls/a.txt", b"a")
    url = place("memory", "urls/below/b.jsonl", b'{"text": "b"}').rpartition("/below")[0]
    texts = all_texts(source_of(url), 1)
    assert [(text.key, text.content) for text in texts] == [
        (f"memory:///{url.removeprefix('memory://')}/a.txt", b"a"),
        (f"memory:///{url.removeprefix('memory://')}/below/b.jsonl:0", "b"),
    ]


def test_a_source_goes_to_other_processes(tmp_path):
    written(tmp_path, "a.jsonl", b'{"text": "a"}\n{"text": "b"}\n')
    source = source_of(tmp_path / "a.jsonl")
    other = pickle.loads(pickle.dumps(source))
    assert other.parts(5) == source.parts(5)
    assert all_texts(other, 5) == all_texts(source, 5)
    assert other.info.full_name == source.info.full_name
    assert other.split_rule == source.split_rule


def test_the_name_tells_files_and_settings_apart(tmp_path):
    written(tmp_path, "a.txt", b"a")
    pattern = tmp_path / "*.txt"
    names = [source_of(pattern, **settings).info.full_name for settings in ({}, {"text_field": "b"})]
    names.append(source_of(pattern, validation_one_in=4).info.full_name)
    assert source_of(pattern).info.full_name == names[0]
    written(tmp_path, "a.txt", b"longer")
    names.append(source_of(pattern).info.full_name)
    assert len(set(names)) == 4


def test_texts_become_a_dataset_of_documents(tmp_path, caplog):
    caplog.set_level("INFO", logger="absl")
    lines = [json.dumps({"text": f" text {n}\r\n"}) for n in range(30)] + ["{", '{"text": ""}']
    written(tmp_path, "a.jsonl", "\n".join(lines).encode())
    source = source_of(tmp_path / "a.jsonl", data_dir=str(tmp_path / "corpora"))
    source.write_texts()
    skipped = {}
    for split in ("train", "validation"):
        texts = [text for part in source.parts(1 << 20) for text in source.texts(part, split)]
        expected = [
            {"text": document.encode(), "path": text.key.encode()}
            for text in texts
            for document in documents_of(text.content).texts
        ]
        assert list(source.as_data_source(split)) == expected
        skipped[split] = len(texts) - len(expected)
    assert sum(skipped.values()) == 2
    messages = [record.getMessage() for record in caplog.records]
    for split, count in skipped.items():
        (line,) = [message for message in messages if message.startswith(f"Wrote text_files {split}:")]
        assert f"skipped {count} texts" in line
    assert not any("custom data configuration" in message for message in messages)


def test_a_split_without_a_text(tmp_path):
    written(tmp_path, "a.txt", b"a")
    source = source_of(tmp_path / "a.txt", data_dir=str(tmp_path / "corpora"), validation_one_in=10**9)
    with pytest.raises(ValueError, match=r"has no text for the validation split\. A text is .* of 1000000000"):
        source.write_texts()
    assert not source.data_path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"corpus": "wikipedia"}, r"corpus 'wikipedia' is unknown: the corpora are 'stdlib_text', 'text_files' and"),
        ({"corpus": "text_files/a", "files": ["a"]}, r"corpus 'text_files/a' is unknown"),
        ({"corpus": "text_files"}, r"corpus text_files needs files"),
        ({"corpus": "stdlib_text", "files": ["a.txt"]}, r"files are given, 'a.txt' first, but stdlib_text has its own"),
        (
            {"corpus": "text_files", "files": ["zip://*.txt::/a.zip"]},
            r"files 'zip://.*' lie within another file",
        ),
        ({"corpus": "fineweb_edu/sample-1BT"}, r"no subset 'sample-1BT': give one of sample-10BT, .* default"),
        ({"corpus": "stdlib_text", "validation_one_in": 1}, r"validation_one_in is 1; it must be at least 2"),
    ],
)
def test_what_does_not_go_together(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_source(**arguments, data_dir="unused")


def test_the_source_of_the_flags(tmp_path):
    written(tmp_path, "a.txt", b"a")
    written(tmp_path, "b.jsonl", b'{"body": "b"}')
    flags = {
        "corpus": "text_files",
        "files": f"{tmp_path}/*.txt,{tmp_path}/b.jsonl",
        "text_field": "body",
        "validation_one_in": "4",
        "data_dir": str(tmp_path / "corpora"),
    }
    with flagsaver.as_parsed(**flags):
        source = source_flags.source_from_flags()
    assert [text.content for part in source.parts(100) for text in source.read(part)] == [b"a", "b"]
    assert "a multiple of 4." in source.split_rule
    assert str(source.data_path).startswith(str(tmp_path / "corpora"))


def test_the_home_directory_may_be_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert str(make_source("stdlib_text", data_dir="~/corpora").data_path).startswith(f"{tmp_path}/corpora/")
