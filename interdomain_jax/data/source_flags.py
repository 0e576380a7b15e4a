"""Flags that name a source of texts, shared by the command lines that read one."""

from absl import flags

from interdomain_jax.data.sources import TextSource, make_source

_CORPUS = flags.DEFINE_string(
    "corpus",
    "stdlib_text",
    "Source of the texts: 'stdlib_text', the text of Python's standard library; 'text_files', what --files name; or "
    "'fineweb_edu/sample-10BT', also sample-100BT, sample-350BT and default, of parquet files or downloaded.",
)
_FILES = flags.DEFINE_list(
    "files",
    [],
    "Patterns, directories or URLs, with commas between them: parquet, JSON lines (.jsonl, .ndjson, .json), any other "
    "file as text; compressed too, as .gz, .bz2, .xz or .zst (parquet is already).",
)
_TEXT_FIELD = flags.DEFINE_string("text_field", "text", "Field of JSON lines, or column of parquet, with the text.")
_VALIDATION_ONE_IN = flags.DEFINE_integer(
    "validation_one_in",
    None,
    "Of how many texts one is for validation; by default the source's own number: 50, 100 and 1000 of the three.",
    lower_bound=2,
)
_DATA_DIR = flags.DEFINE_string("data_dir", "~/tensorflow_datasets", "Where TFDS keeps datasets.")


def source_from_flags() -> TextSource:
    """The source that the flags name.

    Raises:
        ValueError: the corpus is unknown, or the flags do not go together.
        FileNotFoundError: a pattern matches no file.
    """
    return make_source(
        _CORPUS.value,
        files=_FILES.value,
        text_field=_TEXT_FIELD.value,
        validation_one_in=_VALIDATION_ONE_IN.value,
        data_dir=_DATA_DIR.value,
    )
