"""Shows what a prepared corpus holds: its manifest, how long its documents are, and what a row of it looks like.

python -m interdomain_jax.data.inspect --directory=/data/stdlib --sequence_length=2048 --packing=best_fit --row=7

The directory is a prepared corpus or one of its splits; of a corpus, the documents and the row are those for training.
"""

import numpy as np
from absl import app, flags
from etils import epath
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from interdomain_jax import cli
from interdomain_jax.data.corpus_report import beginnings, length_histogram, manifest_table, read_manifests, row_panels
from interdomain_jax.data.loader import PACKERS
from interdomain_jax.data.token_files import Manifest, TokenDocuments
from interdomain_jax.data.tokenizers import Tokenizer, load_tokenizer

_DIRECTORY = flags.DEFINE_string("directory", None, "A prepared corpus, or one of its splits.", required=True)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "As data.tokenizer; by default the one that the manifest names.")
_DOCUMENTS = flags.DEFINE_integer("documents", 3, "How many documents to show, evenly spaced.", lower_bound=0)
_ROW = flags.DEFINE_integer("row", 0, "The row to show.", lower_bound=0)
_SEQUENCE_LENGTH = flags.DEFINE_integer("sequence_length", 512, "Tokens of a row.", lower_bound=1)
_PACKING = flags.DEFINE_enum("packing", "concatenate", list(PACKERS), "How documents are laid into rows.")


def _load_tokenizer(manifest: Manifest) -> Tokenizer:
    try:
        return load_tokenizer(_TOKENIZER.value or manifest.tokenizer)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}: give the tokenizer of the corpus with --tokenizer") from error


def main(_: list[str]) -> None:
    """Prints the corpus that the flags name."""  # noqa: DOC501 (bad input ends the program)
    console = Console(highlight=False)
    length, number, packing = _SEQUENCE_LENGTH.value, _ROW.value, _PACKING.value
    with cli.exit_on_bad_input():
        manifests = read_manifests(epath.Path(_DIRECTORY.value).expanduser())
    console.print(manifest_table(manifests))
    with cli.exit_on_bad_input():
        tokenizer = _load_tokenizer(next(iter(manifests.values())))
        splits = [TokenDocuments(directory, tokenizer) for directory in manifests]
        packed = [PACKERS[packing](documents.lengths, sequence_length=length) for documents in splits]
        if number >= len(packed[0]):
            raise ValueError(f"--row is {number}; at --sequence_length={length} the rows are 0 to {len(packed[0]) - 1}")
    for documents, rows in zip(splits, packed, strict=True):
        padding = 1 - documents.lengths.sum(dtype=np.int64) / (len(rows) * length)
        console.print(Rule(Text(f"{documents.manifest.split}: lengths of the documents", "bold")))
        console.print(length_histogram(documents.lengths))
        console.print(f"rows of {length:,} tokens, {packing}: {len(rows):,}; padding: {padding:.2%}\n")
    if _DOCUMENTS.value:
        console.print(Rule(Text(f"{splits[0].manifest.split}: documents", "bold")))
    for panel in beginnings(splits[0], tokenizer, _DOCUMENTS.value):
        console.print(panel)
    title = f"{splits[0].manifest.split}: row {number:,} of {len(packed[0]):,}, {packing} at {length:,} tokens"
    console.print(Rule(Text(title, "bold")))
    for panel in row_panels(splits[0], tokenizer, packed[0], row=number, sequence_length=length):
        console.print(panel)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
