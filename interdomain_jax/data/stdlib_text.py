"""The default corpus: the text of the running Python's own standard library.

About 30 MB of source and documentation that every installation already has, so a first training run needs no download.
A text is a file ending in .py, .txt, .rst or .md below the standard library, the `test` package included where it is
installed; installed packages (`site-packages`, `dist-packages`) and caches are left out. A file's split depends on its
relative path (POSIX form): about 2 % of the files are for validation.
"""

import dataclasses
import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from interdomain_jax.data.sources import Part, SourceConfig, Text, TextSource, validates, whole_files

SUFFIXES = (".py", ".txt", ".rst", ".md")
SKIPPED_DIRECTORIES = ("site-packages", "dist-packages", "__pycache__")
VALIDATION_ONE_IN = 50


@dataclasses.dataclass(eq=False)
class StdlibTextConfig(SourceConfig):
    """Names one tree of files.

    Attributes:
        root: the directory whose files are the texts.
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


def config_for(root: str, *, validation_one_in: int = VALIDATION_ONE_IN) -> StdlibTextConfig:
    """The builder configuration of the files below `root`, named after what distinguishes them.

    The name carries the Python version and a hash of the files' paths and sizes, because one
    version comes with more or fewer files from different distributors: two interpreters share a
    dataset only if their libraries are the same.
    """
    listing = "\n".join(f"{path} {Path(root, path).stat().st_size}" for path in text_files(root))
    digest = hashlib.sha256(f"{validation_one_in}\n{listing}".encode()).hexdigest()
    version = f"{platform.python_implementation().lower()}-{platform.python_version()}"
    return StdlibTextConfig(name=f"{version}-{digest[:8]}", root=root, validation_one_in=validation_one_in)


class StdlibText(TextSource):
    """TFDS builder of the corpus; it needs a configuration, see `config_for`."""

    hashed = "its path"
    # Eight parts, for as many workers.
    part_bytes = 4 << 20

    def parts(self, part_bytes: int) -> list[Part]:
        """Whole files of the library, in the order of their paths."""
        root = self.builder_config.root
        return whole_files({path: Path(root, path).stat().st_size for path in text_files(root)}, part_bytes)

    def read(self, part: Part) -> Iterator[Text]:
        """Each file of a part is one text, its path the key."""
        return (Text(path, Path(self.builder_config.root, path).read_bytes()) for path in part.files)

    def split_of(self, text: Text) -> str:
        """The split that a file's path decides upon."""
        return "validation" if validates(text.key.encode(), self.builder_config.validation_one_in) else "train"
