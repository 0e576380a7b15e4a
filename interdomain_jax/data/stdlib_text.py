"""The default corpus: the text of the running Python's own standard library.

About 30 MB of source and documentation that every installation already has, so a first training run
needs no download. Rules:

* One document per file ending in .py, .txt, .rst or .md below the standard library, the `test`
  package included where it is installed; installed packages (`site-packages`, `dist-packages`) and
  caches are left out. Documents are stored in the order of their relative paths.
* A file belongs to the validation split if the SHA-256 hash of its relative path (POSIX form), its
  first 8 bytes read as a big-endian number, is a multiple of 50: about 2 % of the files.
* The text is the file's bytes decoded as UTF-8, line endings and all. Files that are not valid
  UTF-8 (tests of other encodings) and empty files are skipped, and counted in the log.
"""

import contextlib
import dataclasses
import hashlib
import io
import os
import platform
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import rich.console
import rich.progress
import tensorflow_datasets as tfds
from absl import logging

SUFFIXES = (".py", ".txt", ".rst", ".md")
SKIPPED_DIRECTORIES = ("site-packages", "dist-packages", "__pycache__")
VALIDATION_ONE_IN = 50


@dataclasses.dataclass(eq=False)
class StdlibTextConfig(tfds.core.BuilderConfig):
    """Names one tree of files.

    Attributes:
        root: the directory whose files are the documents.
    """

    root: str = ""


def text_files(root: str) -> list[str]:
    """Relative paths, in POSIX form and sorted, of the text files below `root`."""
    paths = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED_DIRECTORIES]
        files = [Path(directory, name) for name in names if name.endswith(SUFFIXES)]
        paths += [file.relative_to(root).as_posix() for file in files if file.is_file()]
    return sorted(paths)


def split_of(path: str) -> str:
    """The split, "train" or "validation", of the file with this relative path."""
    digest = hashlib.sha256(path.encode()).digest()
    number = int.from_bytes(digest[:8], byteorder="big")
    return "validation" if number % VALIDATION_ONE_IN == 0 else "train"


def config_for(root: str) -> StdlibTextConfig:
    """The builder configuration of the files below `root`, named after what distinguishes them.

    The name carries the Python version and a hash of the files' paths and sizes, because one
    version comes with more or fewer files from different distributors: two interpreters share a
    prepared corpus only if their libraries are the same.
    """
    listing = "\n".join(f"{path} {Path(root, path).stat().st_size}" for path in text_files(root))
    digest = hashlib.sha256(listing.encode()).hexdigest()
    version = f"{platform.python_implementation().lower()}-{platform.python_version()}"
    return StdlibTextConfig(name=f"{version}-{digest[:8]}", root=root)


class LocalInfo(tfds.core.DatasetInfo):
    """Dataset information that is never looked for on the network."""

    def initialize_from_bucket(self) -> None:
        """Does nothing: TFDS would ask its cloud bucket, which does not know this corpus."""


class StdlibText(tfds.core.GeneratorBasedBuilder):
    """TFDS builder of the corpus, with splits "train" and "validation"."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "One document per file, split by the hash of the path."}
    BUILDER_CONFIGS: ClassVar[list[StdlibTextConfig]] = [config_for(sysconfig.get_paths()["stdlib"])]

    def _info(self) -> tfds.core.DatasetInfo:
        return LocalInfo(
            builder=self,
            description="The text of the running Python's own standard library.",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text(), "path": tfds.features.Text()}),
            # Keeps the documents in the order of their paths; shuffling is the loader's work.
            disable_shuffling=True,
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
        del dl_manager  # Nothing is downloaded.
        paths = text_files(self.builder_config.root)
        splits = {split: [path for path in paths if split_of(path) == split] for split in ("train", "validation")}
        for split, members in splits.items():
            if not members:
                raise ValueError(
                    f"corpus root {self.builder_config.root} has no file for the {split} split: "
                    f"of its {len(paths)} text files, one in {VALIDATION_ONE_IN} is for validation"
                )
        return {split: self._generate_examples(split, members) for split, members in splits.items()}

    def _generate_examples(self, split: str, paths: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
        size, documents, empty, undecodable = 0, 0, 0, 0
        console = rich.console.Console(stderr=True)
        progress = rich.progress.track(
            paths,
            description=f"Preparing stdlib_text {split}",
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        for path in progress:
            content = Path(self.builder_config.root, path).read_bytes()
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                undecodable += 1
                continue
            if not text:
                empty += 1
                continue
            yield documents, {"text": text, "path": path}
            documents += 1
            size += len(content)
        logging.info(
            "Prepared stdlib_text %s: %d documents, %d bytes; skipped %d files that are not UTF-8 "
            "and %d that are empty.",
            split,
            documents,
            size,
            undecodable,
            empty,
        )


class TextDocuments:
    """Random access to the documents of one prepared split, as `{"text": str, "path": str}`."""

    def __init__(self, records: Sequence[Mapping[str, bytes]]):
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, str]:
        # TFDS returns text as UTF-8 bytes when no TensorFlow is involved.
        return {key: value.decode("utf-8") for key, value in self._records[index].items()}

    def __repr__(self) -> str:
        return f"TextDocuments({self._records!r})"


def prepare(data_dir: str, config: StdlibTextConfig | None = None) -> StdlibText:
    """The builder of the corpus, its files written under `data_dir` if they are not there yet.

    Needs no network. Several processes may prepare at once: each writes to a directory of its own
    and renames it at the end, so a reader never sees half a corpus; the first one wins, and the
    others drop their identical copies and read the winner's.

    Args:
        data_dir: directory of prepared corpora; created if missing.
        config: another tree of files (see `config_for`); the standard library if None.

    Raises:
        ValueError: the tree has no text files for one of the splits.
    """
    data_dir = os.path.expanduser(data_dir)
    config = config or StdlibText.BUILDER_CONFIGS[0]
    builder = StdlibText(data_dir=data_dir, config=config, file_format="array_record")
    destination = builder.data_path
    if destination.exists():
        return builder
    logging.info("Preparing corpus %s in %s.", builder.info.full_name, destination)
    # TFDS announces a download, which there is none of, and draws bars of its own.
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    except OSError:
        if not destination.exists():
            raise
        return StdlibText(data_dir=data_dir, config=config, file_format="array_record")
    finally:
        tfds.enable_progress_bar()
    return builder


def open_split(builder: StdlibText, split: str) -> TextDocuments:
    """Random access to one split of a prepared corpus.

    Raises:
        ValueError: there is no such split.
    """
    name = split.partition("[")[0]
    if name not in builder.info.splits:
        raise ValueError(f"split {split!r} does not exist: the splits are {', '.join(builder.info.splits)}")
    records: Any = builder.as_data_source(split=split)
    return TextDocuments(records)
