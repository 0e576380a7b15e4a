"""Where texts come from: TFDS builders that can also be read part by part, as many workers do.

A source knows from the listing of its files alone how it falls into parts, and each part can be read by itself, so that
a pipeline needs no more than `parts` and `texts`. The same texts come from `download_and_prepare` as a dataset of
ArrayRecord files; TensorFlow and the network have no part in either, unless the files are remote.
"""

import abc
import contextlib
import dataclasses
import hashlib
import io
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import rich.console
import rich.progress
import tensorflow_datasets as tfds
from absl import logging

from interdomain_jax.data import SPLITS
from interdomain_jax.data.documents import documents_of

DATASET_PART_BYTES = 1 << 24


class Part(NamedTuple):
    """A stretch of a source that one worker reads by itself.

    Attributes:
        files: whole files of text, or one file of records.
        start: where it begins in a file that can be cut: a byte of uncompressed JSONL, a row group of parquet.
        stop: where it ends, exclusive; None for the end of the file.
    """

    files: tuple[str, ...]
    start: int = 0
    stop: int | None = None


class Text(NamedTuple):
    """A text as it lies in the source.

    Attributes:
        key: unique in the source, "<path>" or "<path>:<number of the row, or byte at which the line begins>".
        content: the text or its bytes, valid or not; None if the record is none, or holds no text.
    """

    key: str
    content: bytes | str | None


@dataclasses.dataclass(eq=False)
class SourceConfig(tfds.core.BuilderConfig):
    """What every source is told.

    Attributes:
        validation_one_in: of how many texts one is for validation, at least 2.
    """

    validation_one_in: int = 100

    def __post_init__(self) -> None:
        if self.validation_one_in < 2:
            raise ValueError(
                f"validation_one_in is {self.validation_one_in}; it must be at least 2: one text in so many is for "
                "validation, and the others are for training"
            )


class TextSource(tfds.core.GeneratorBasedBuilder):
    """A builder with the splits "train" and "validation"; subclasses say where its texts are."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "The documents of each text, in the order of the source."}
    hashed: ClassVar[str]
    """What of a text decides upon its split, to be read in `split_rule`."""
    part_bytes: ClassVar[int] = 64 << 20
    """Of a part where nothing is said: a minute of work to lose, and two thousand shards for the paper's corpus."""

    def __init__(
        self,
        *,
        config: SourceConfig | str,
        data_dir: str | None = None,
        version: str | None = None,
        file_format: str = "array_record",
    ):
        data_dir = None if data_dir is None else os.path.expanduser(data_dir)
        super().__init__(config=config, data_dir=data_dir, version=version, file_format=file_format)

    @property
    def files(self) -> tuple[str, ...]:
        """Where the texts are, as the user named it; nothing where the source knows."""
        return ()

    @property
    def split_rule(self) -> str:
        """Which texts are for validation, in a sentence."""
        return (
            f"A text is for validation if the SHA-256 of {self.hashed}, its first 8 bytes as a big-endian number, "
            f"is a multiple of {self.builder_config.validation_one_in}."
        )

    @abc.abstractmethod
    def parts(self, part_bytes: int) -> list[Part]:
        """The parts of the source, in a fixed order that depends on its files alone.

        Args:
            part_bytes: about how many bytes of input a part has; it is more where a file cannot be cut.
        """

    @abc.abstractmethod
    def read(self, part: Part) -> Iterator[Text]:
        """All texts of a part, of both splits, in order."""

    @abc.abstractmethod
    def split_of(self, text: Text) -> str:
        """The split, "train" or "validation", that a text belongs to."""

    def texts(self, part: Part, split: str) -> Iterator[Text]:
        """The texts of a part that belong to a split, in order."""
        return (text for text in self.read(part) if self.split_of(text) == split)

    def write_texts(self) -> None:
        """Writes the dataset of documents below `data_dir`, unless it is there.

        Several processes may do so at once: each writes to a directory of its own and renames it at the end, so a
        reader never sees half a dataset; the first one wins, and the others drop their identical copies.

        Raises:
            ValueError: a split has no text, or a file is not what its name says.
            OSError: a file cannot be read or written.
        """
        if self.data_path.exists():
            return
        logging.info("Writing the texts of %s to %s.", self.info.full_name, self.data_path)
        # TFDS announces a download, which there is none of, and draws bars of its own.
        tfds.disable_progress_bar()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self.download_and_prepare()
        except OSError:
            # If it is there now, another process was first, and has written the same.
            if not self.data_path.exists():
                raise
        finally:
            tfds.enable_progress_bar()

    def _create_builder_config(self, builder_config: Any, version: Any) -> Any:
        # TFDS warns of every configuration that is not in its list, and ours are made to order.
        if isinstance(builder_config, SourceConfig):
            return builder_config
        return super()._create_builder_config(builder_config, version)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.split_rule,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text(), "path": tfds.features.Text()}),
            # Keeps the documents in the order of the source; shuffling is the loader's work.
            disable_shuffling=True,
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
        del dl_manager  # Sources find their files themselves.
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, str]]]:
        count, size, skipped = 0, 0, Counter[str]()
        console = rich.console.Console(stderr=True)
        progress = rich.progress.track(
            self.parts(DATASET_PART_BYTES),
            description=f"Writing {self.name} {split}",
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        for part in progress:
            for text in self.texts(part, split):
                documents = documents_of(text.content)
                if documents.skipped:
                    skipped[documents.skipped] += 1
                for document in documents.texts:
                    yield count, {"text": document, "path": text.key}
                    count += 1
                    size += len(document.encode())
        if not count:
            raise ValueError(f"{self.info.full_name} has no text for the {split} split. {self.split_rule}")
        logging.info(
            "Wrote %s %s: %d documents, %d bytes; skipped %d texts%s.",
            self.name,
            split,
            count,
            size,
            skipped.total(),
            "".join(f", {number} {reason}" for reason, number in sorted(skipped.items())),
        )


def make_source(
    corpus: str,
    *,
    files: Sequence[str] = (),
    text_field: str = "text",
    validation_one_in: int | None = None,
    data_dir: str,
) -> TextSource:
    """The source that a corpus's name and its files stand for.

    Args:
        corpus: "stdlib_text", "text_files", or "fineweb_edu/sample-10BT" and the like.
        files: patterns, directories or URLs of the files; none for the standard library, and for FineWeb-Edu if it is
            to be downloaded.
        text_field: of JSONL, or the column of parquet.
        validation_one_in: of how many texts one is for validation; the source's own number if None.
        data_dir: where TFDS keeps datasets; nothing is written there before `write_texts`.

    Raises:
        ValueError: the corpus is unknown, or what is given does not go with it.
        FileNotFoundError: a pattern matches no file.
    """
    # Imported here, for they are built upon this module.
    from interdomain_jax.data import stdlib_text, text_files

    name, _, subset = corpus.partition("/")
    given = {} if validation_one_in is None else {"validation_one_in": validation_one_in}
    if name == "stdlib_text" and not subset:
        if files:
            raise ValueError(
                f"files are given, {files[0]!r} first, but stdlib_text has its own: give corpus text_files"
            )
        config = stdlib_text.config_for(sysconfig.get_paths()["stdlib"], **given)
        return stdlib_text.StdlibText(config=config, data_dir=data_dir)
    if name == "text_files" and not subset:
        if not files:
            raise ValueError("corpus text_files needs files: patterns, directories or URLs of text, JSONL or parquet")
        config = text_files.config_for(files, text_field=text_field, **given)
        return text_files.TextFiles(config=config, data_dir=data_dir)
    if name == "fineweb_edu":
        config = text_files.fineweb_edu_config(subset, files=files, text_field=text_field, **given)
        return text_files.FineWebEdu(config=config, data_dir=data_dir)
    raise ValueError(
        f"corpus {corpus!r} is unknown: the corpora are 'stdlib_text', 'text_files' and 'fineweb_edu/sample-10BT'"
    )


def validates(data: bytes, one_in: int) -> bool:
    """Whether what decides upon the split of a text, `data`, puts it into validation."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], byteorder="big") % one_in == 0


def stretches(sizes: Sequence[int], part_bytes: int) -> list[range]:
    """Cuts a sequence of things, such as files, into stretches, each closed when it has at least `part_bytes`.

    Args:
        sizes: of the things, in bytes.
        part_bytes: at least 1.
    """
    found, start, size = [], 0, 0
    for number, own in enumerate(sizes, 1):
        size += own
        if size >= part_bytes or number == len(sizes):
            found.append(range(start, number))
            start, size = number, 0
    return found


def whole_files(sizes: Mapping[str, int], part_bytes: int) -> list[Part]:
    """Parts of whole files, in order.

    Args:
        sizes: of the files, in bytes, by their names.
        part_bytes: at least 1.
    """
    names = list(sizes)
    return [Part(tuple(names[i] for i in stretch)) for stretch in stretches(list(sizes.values()), part_bytes)]
