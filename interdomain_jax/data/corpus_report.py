"""What there is to see of a prepared corpus: its manifests, the lengths of its documents, its documents and its rows.

The end of a document, shown as ⟨EOS⟩, is one of its tokens. A line end is shown as ↵, and what a terminal would obey or
leave out by its number.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
from etils import epath
from rich import box
from rich.bar import Bar
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from interdomain_jax.data import SPLITS
from interdomain_jax.data.rows import Rows
from interdomain_jax.data.token_files import MANIFEST, Manifest, read_manifest
from interdomain_jax.data.tokenizers import Tokenizer
from interdomain_jax.data.windows import TokenSequences, Windows

# Characters of the beginning, and as many of the end, that are shown of a piece.
_EXCERPT = 300
# Tokens that are shown of the beginning of a document.
_BEGINNING = 100
_BAR_WIDTH = 16


def read_manifests(directory: epath.Path) -> dict[epath.Path, Manifest]:
    """The manifests of a split, or of the splits of a corpus, by their directories.

    Raises:
        FileNotFoundError: the directory is neither.
        ValueError: a split is of another format.
    """
    below = [directory / split for split in SPLITS if (directory / split / MANIFEST).exists()]
    is_split = (directory / MANIFEST).exists() or not below
    return {split: read_manifest(split) for split in ([directory] if is_split else below)}


def manifest_table(manifests: Mapping[epath.Path, Manifest]) -> Table:
    """What the manifests say, a column for each."""
    headers = [Column(Text(manifest.split), overflow="fold") for manifest in manifests.values()]
    table = Table(Column("", style="bold", no_wrap=True), *headers, box=box.SIMPLE_HEAD)
    facts = [_facts(manifest) for manifest in manifests.values()]
    for name in facts[0]:
        table.add_row(name, *(visible(each[name]) for each in facts))
    return table


def length_histogram(lengths: np.ndarray) -> Table:
    """How many documents are how long, by powers of two.

    Args:
        lengths: int [documents], tokens of each, at least 1.
    """
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("tokens", "documents", "", "of all tokens", ""):
        table.add_column(header, justify="right", no_wrap=True, width=None if header else _BAR_WIDTH)
    # A length from 2^k to below 2^(k + 1) is a fraction times 2^(k + 1).
    powers = np.frexp(lengths)[1] - 1
    documents = np.bincount(powers)
    tokens = np.bincount(powers, weights=lengths)
    for power in range(powers.min(), len(documents)):
        table.add_row(
            f"{2**power:,} to {2 ** (power + 1) - 1:,}" if power else "1",
            f"{documents[power]:,}",
            _bar(documents[power] / documents.max()),
            f"{tokens[power] / tokens.sum():.1%}",
            _bar(tokens[power] / tokens.max()),
        )
    return table


def beginnings(documents: TokenSequences, tokenizer: Tokenizer, count: int) -> Iterator[Panel]:
    """How some documents begin, evenly spaced over the split."""
    count = min(count, len(documents.lengths))
    for document in (number * len(documents.lengths) // count for number in range(count)):
        length = int(documents.lengths[document])
        ids = documents.read(document, 0, min(length, _BEGINNING))
        title = f"document {document:,} · {length:,} tokens"
        yield _panel(title, "" if len(ids) == length else f"the first {len(ids)} tokens", _decoded(ids, tokenizer))


def row_panels(
    documents: TokenSequences, tokenizer: Tokenizer, rows: Rows, *, row: int, sequence_length: int
) -> Iterator[Panel]:
    """The pieces of a row, each in a frame, and its padding.

    Args:
        documents: of the split.
        tokenizer: of the split.
        rows: of these documents.
        row: which of them, below their number.
        sequence_length: of the rows.
    """
    window = Windows(documents, rows, sequence_length=sequence_length, eos_id=tokenizer.eos_id)[row]
    end = 0
    for number, piece in enumerate(rows[row], 1):
        ids = window["targets"][window["segment_ids"] == number]
        length = int(documents.lengths[piece.document])
        content = Text.assemble(
            ("⟨cut⟩" if piece.start else "", "yellow"),
            _decoded(ids, tokenizer),
            ("⟨cut⟩" if piece.stop < length else "", "yellow"),
        )
        title = f"document {piece.document:,} · tokens {piece.start:,} to {piece.stop:,} of {length:,}"
        begin, end = end, end + len(ids)
        yield _panel(title, f"{begin:,} to {end:,} of the row", content)
    if padding := int((window["segment_ids"] == 0).sum()):
        content = Text(f"tokens that are no targets: {padding:,}", "dim")
        yield _panel("padding", f"{end:,} to {sequence_length:,} of the row", content)


def visible(text: str) -> Text:
    """The text with nothing in it that a terminal obeys or leaves out."""
    shown = Text(overflow="fold")
    for character in text:
        if character == "\n":
            shown.append("↵\n", "dim")
        elif character.isprintable():
            shown.append(character)
        else:
            shown.append(character.encode("unicode_escape").decode(), "red")
    return shown


def _facts(manifest: Manifest) -> dict[str, str]:
    shards = manifest.shards
    documents = sum(shard.documents for shard in shards)
    tokens = sum(shard.tokens for shard in shards)
    size = sum(shard.bytes for shard in shards)
    skipped = sum((Counter(shard.skipped) for shard in shards), Counter[str]())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
    return {
        "corpus": manifest.corpus,
        "files": ", ".join(manifest.files) or "its own",
        "split rule": manifest.split_rule,
        "tokenizer": manifest.tokenizer,
        "fingerprint": manifest.fingerprint,
        "vocabulary": f"{manifest.vocab_size:,}, EOS {manifest.eos_id:,}",
        "format": f"{manifest.format}",
        "shards": f"{len(shards):,}",
        "documents": f"{documents:,}",
        "tokens": f"{tokens:,}",
        "bytes of text": f"{size:,}",
        "bytes per token": f"{size / max(tokens, 1):.2f}",
        "tokens per document": f"{tokens / max(documents, 1):,.1f}",
        "texts cut": f"{sum(shard.cut for shard in shards):,}",
        "texts skipped": f"{skipped.total():,}: {reasons}" if skipped else "0",
    }


def _decoded(ids: np.ndarray, tokenizer: Tokenizer) -> Text:
    is_end = bool(ids[-1] == tokenizer.eos_id)
    text = tokenizer.decode(ids)
    left_out = len(text) - 2 * _EXCERPT
    if left_out > 0:
        middle = (f"\n⟨{left_out:,} characters left out⟩\n", "yellow")
        shown = Text.assemble(visible(text[:_EXCERPT]), middle, visible(text[-_EXCERPT:]))
    else:
        shown = visible(text)
    return shown.append("⟨EOS⟩" if is_end else "", "bold magenta")


def _bar(share: float) -> Bar:
    return Bar(1, 0, share, width=_BAR_WIDTH, color="cyan")


def _panel(title: str, subtitle: str, content: Text) -> Panel:
    return Panel(
        content,
        title=Text(title, "bold"),
        title_align="left",
        subtitle=Text(subtitle, "dim") if subtitle else None,
        subtitle_align="right",
        box=box.ROUNDED,
    )
