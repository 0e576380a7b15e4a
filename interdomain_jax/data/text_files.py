"""Texts in files: parquet, JSON lines or plain text, compressed or not, on this machine or at a URL that fsspec reads.

What a file holds is told by its ending: a record to a line in .jsonl, .ndjson and .json, a record to a row in .parquet,
and one text in any other. All but parquet may be compressed: .gz, .bz2, .xz or .zst follows then.

A record that is not as it should be is a text without content. A file that cannot be read to its end is an error: a
part of a corpus would be missing.
"""

import bz2
import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import PurePosixPath
from typing import IO, Any, ClassVar, Literal

from interdomain_jax.data.sources import Part, SourceConfig, Text, TextSource, stretches, validates, whole_files
from interdomain_jax.errors import RunError

LINE_ENDINGS = (".jsonl", ".ndjson", ".json")
DECOMPRESSED: dict[str, Callable[[IO[bytes]], AbstractContextManager[Any]]] = {
    "": contextlib.nullcontext,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda file: _zstd(file),
}
FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"


@dataclasses.dataclass(eq=False)
class TextFilesConfig(SourceConfig):
    """Names files.

    Attributes:
        files: patterns, directories or URLs; a directory stands for all files below it.
        text_field: of a line of JSON, or the column of parquet.
    """

    files: tuple[str, ...] = ()
    text_field: str = "text"


@dataclasses.dataclass(eq=False)
class FineWebEduConfig(TextFilesConfig):
    """Names a subset of FineWeb-Edu.

    Attributes:
        subset: its name on the hub, from which it is downloaded if there are no files.
    """

    validation_one_in: int = 1000
    subset: str = "sample-10BT"


class TextFiles(TextSource):
    """TFDS builder of the texts in any files."""

    hashed = "its bytes (of its path and place, if it has none)"

    @property
    def files(self) -> tuple[str, ...]:
        """The paths and patterns of the configuration."""
        return self.builder_config.files

    def paths(self) -> dict[str, int]:
        """The files in the order of their names, and the size of each in bytes."""
        return listing(self.builder_config.files)

    def parts(self, part_bytes: int) -> list[Part]:
        """Row groups of parquet, stretches of JSON lines, and whole files of what cannot be cut."""
        sizes = self.paths()
        parts = whole_files({path: sizes[path] for path in sizes if _kind(path) == "text"}, part_bytes)
        for path, size in sizes.items():
            if _kind(path) == "parquet":
                parts += _row_group_parts(path, self.builder_config.text_field, part_bytes)
            elif _kind(path) == "lines" and _compression(path):
                parts.append(Part((path,)))
            elif _kind(path) == "lines":
                starts = range(0, size, part_bytes)
                parts += [Part((path,), start, min(start + part_bytes, size)) for start in starts]
        return parts

    def read(self, part: Part) -> Iterator[Text]:
        """A row of parquet, a line of JSON or a whole file of text is one text."""
        field = self.builder_config.text_field
        for path in part.files:
            with _open(path) as file:
                if _kind(path) == "parquet":
                    yield from _rows(file, path, field, part)
                elif _kind(path) == "lines":
                    yield from _lines(file, path, field, part)
                else:
                    yield Text(path, file.read())

    def split_of(self, text: Text) -> str:
        """The split that a text's bytes decide upon, or its key where it has none."""
        content = text.key if text.content is None else text.content
        # A JSON string may hold lone surrogates.
        data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        return "validation" if validates(data, self.builder_config.validation_one_in) else "train"


class FineWebEdu(TextFiles):
    """TFDS builder of FineWeb-Edu, from its parquet files or downloaded."""

    name = "fineweb_edu"
    BUILDER_CONFIGS: ClassVar[list[FineWebEduConfig]] = [
        FineWebEduConfig(name=subset, subset=subset)
        for subset in ("sample-10BT", "sample-100BT", "sample-350BT", "default")
    ]

    def paths(self) -> dict[str, int]:
        """The files in the order of their names, downloaded if none are given, and the size of each in bytes."""
        files = self.builder_config.files or downloaded(self.builder_config.subset)
        return listing(files)


def config_for(files: Sequence[str], *, text_field: str = "text", validation_one_in: int = 100) -> TextFilesConfig:
    """The configuration of files, named after what distinguishes them.

    Raises:
        FileNotFoundError: a pattern matches no file.
    """
    name = _digest(listing(files), text_field, validation_one_in)
    return TextFilesConfig(name=name, files=tuple(files), text_field=text_field, validation_one_in=validation_one_in)


def fineweb_edu_config(
    subset: str, *, files: Sequence[str] = (), text_field: str = "text", validation_one_in: int = 1000
) -> FineWebEduConfig:
    """The configuration of a subset of FineWeb-Edu; the first one for "".

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: there is no such subset.
    """
    known = {config.subset: config for config in FineWebEdu.BUILDER_CONFIGS}
    subset = subset or next(iter(known))
    if subset not in known:
        raise ValueError(f"FineWeb-Edu has no subset {subset!r}: give one of {', '.join(known)}")
    config = known[subset]
    if not files and (text_field, validation_one_in) == (config.text_field, config.validation_one_in):
        return config
    name = f"{subset}-{_digest(listing(files), text_field, validation_one_in)}"
    return FineWebEduConfig(
        name=name, files=tuple(files), text_field=text_field, validation_one_in=validation_one_in, subset=subset
    )


def downloaded(subset: str) -> list[str]:
    """The parquet files of a subset of FineWeb-Edu, downloaded to the cache of Hugging Face unless they are there.

    Raises:
        RunError: it cannot be reached.
    """
    try:
        import datasets

        files = datasets.load_dataset_builder(FINEWEB_EDU, subset).config.data_files
        return datasets.DownloadManager().download([url for urls in files.values() for url in urls])
    # What a network does, the hub's client tells in the errors of one HTTP library or the other; one answer fits all.
    except Exception as error:
        raise RunError(
            f"{FINEWEB_EDU} {subset} cannot be downloaded ({' '.join(str(error).split())}): give its parquet files, "
            "such as --files=/data/fineweb-edu/sample/10BT/*.parquet"
        ) from error


def listing(patterns: Iterable[str]) -> dict[str, int]:
    """The files that patterns match, in the order of their names, and the size of each in bytes.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: it is a URL within a URL.
    """
    sizes: dict[str, int] = {}
    for pattern in patterns:
        if "://" in pattern and "::" in pattern:
            raise ValueError(f"files {pattern!r} lie within another file: unpack that, and name what comes out")
        pattern = pattern.removeprefix("file://")
        system = _file_system(pattern)
        matches: dict[str, dict[str, Any]] = {}
        for path, info in system.glob(pattern, detail=True).items():
            matches |= system.find(path, detail=True) if info["type"] == "directory" else {path: info}
        # A link to a file is of type "other".
        files = {path: info for path, info in matches.items() if info["type"] == "file" or system.isfile(path)}
        if not files:
            raise FileNotFoundError(f"files {pattern!r} match no file: give a pattern, a directory or a URL of some")
        remote = "://" in pattern
        sizes |= {system.unstrip_protocol(path) if remote else path: info["size"] for path, info in files.items()}
    return dict(sorted(sizes.items()))


def _digest(sizes: dict[str, int], text_field: str, validation_one_in: int) -> str:
    listed = json.dumps([sizes, text_field, validation_one_in])
    return hashlib.sha256(listed.encode()).hexdigest()[:8]


def _file_system(url: str) -> Any:
    import fsspec

    return fsspec.url_to_fs(url)[0] if "://" in url else fsspec.filesystem("file")


def _kind(path: str) -> Literal["text", "lines", "parquet"]:
    name = PurePosixPath(path.lower())
    ending = PurePosixPath(name.stem).suffix if _compression(path) else name.suffix
    if ending == ".parquet":
        return "parquet"
    return "lines" if ending in LINE_ENDINGS else "text"


def _compression(path: str) -> str:
    ending = PurePosixPath(path.lower()).suffix
    return ending if ending in DECOMPRESSED else ""


@contextlib.contextmanager
def _open(path: str) -> Iterator[Any]:
    """A file as it is when decompressed.

    Raises:
        ValueError: it is damaged, as turns out meanwhile; it names the file.
    """
    import pyarrow

    try:
        with _stored(path) as stored, DECOMPRESSED[_compression(path)](stored) as file:
            yield file
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read to its end: {error}") from error


def _stored(path: str) -> IO[bytes]:
    if "://" not in path:
        return open(path, "rb")
    # fsspec's own files read a whole block for each line.
    return io.BufferedReader(_file_system(path).open(path), 1 << 20)


def _zstd(file: IO[bytes]) -> IO[bytes]:
    import pyarrow

    # It reads on in a file of several frames, and tells when one is cut off.
    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


def _lines(file: IO[bytes], path: str, field: str, part: Part) -> Iterator[Text]:
    """The records of the lines that begin in a part; what is blank is none."""
    position = 0
    if part.start:
        # The line that holds the byte before belongs to the part before, and may end there.
        position = file.seek(part.start - 1)
        position += len(file.readline())
    while (part.stop is None or position < part.stop) and (line := file.readline()):
        if line.strip():
            yield Text(f"{path}:{position}", _content(line, field))
        position += len(line)


def _content(line: bytes, field: str) -> bytes | str | None:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        # As it is, for it to be counted as what it is.
        return line
    try:
        record = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return None
    content = record.get(field) if isinstance(record, dict) else None
    return content if isinstance(content, str) else None


def _parquet(file: IO[bytes], path: str, field: str) -> Any:
    from pyarrow import parquet

    table = parquet.ParquetFile(file)
    names = table.schema_arrow.names
    if field not in names:
        raise ValueError(f"{path} has no column {field!r}: set text_field to one of {', '.join(names)}")
    return table


def _row_group_parts(path: str, field: str, part_bytes: int) -> list[Part]:
    with _open(path) as file:
        metadata = _parquet(file, path, field).metadata
        sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    return [Part((path,), groups.start, groups.stop) for groups in stretches(sizes, part_bytes)]


def _rows(file: IO[bytes], path: str, field: str, part: Part) -> Iterator[Text]:
    """The records of the row groups of a part, as bytes: pyarrow does not look whether they are UTF-8."""
    import pyarrow

    table = _parquet(file, path, field)
    groups = range(table.num_row_groups)[part.start : part.stop]
    row = sum(table.metadata.row_group(group).num_rows for group in range(part.start))
    for batch in table.iter_batches(batch_size=256, row_groups=groups, columns=[field], use_threads=False):
        column = batch.column(0)
        if pyarrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if column.type in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
            column = column.cast(pyarrow.large_binary())
        for value in column.to_pylist():
            yield Text(f"{path}:{row}", value if isinstance(value, bytes) else None)
            row += 1
