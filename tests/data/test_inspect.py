"""What is shown of a prepared corpus: its figures by hand, its rows piece by piece, and nothing a terminal obeys."""

import io
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from interdomain_jax.data.corpus_report import beginnings, length_histogram, manifest_table, row_panels, visible
from interdomain_jax.data.documents import documents_of
from interdomain_jax.data.rows import BestFitRows, ConcatenatedRows
from interdomain_jax.data.token_files import FORMAT, Manifest, Shard, shard_name, write_manifest, write_shard
from interdomain_jax.data.tokenizers import BytesTokenizer, fingerprint
from tests.token_lists import tokenised

BYTES = BytesTokenizer()


def manifest(split: str, *shards: Shard) -> Manifest:
    return Manifest(
        format=FORMAT,
        corpus="test/[bold]1.0",
        files=("some/*.txt", "others"),
        split=split,
        split_rule="by the length",
        tokenizer="bytes",
        fingerprint=fingerprint(BYTES),
        vocab_size=257,
        eos_id=256,
        shards=shards,
    )


def write(directory, split: str, contents) -> None:
    directory.mkdir(parents=True)
    shard = write_shard(directory, shard_name(0, 1), map(documents_of, contents), BYTES)
    write_manifest(directory, manifest(split, shard))


def printed(*renderables, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(*renderables)
    return console.file.getvalue()


def cells(text: str) -> list[list[str]]:
    """The columns of each line, which lie two spaces apart, without bars."""
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return [[cell for cell in line if cell[0] not in "─█▉▊▋▌▍▎▏"] for line in lines if line]


def test_the_figures_of_a_manifest_by_hand():
    shards = [
        Shard("a", 10, 0, documents=3, tokens=1000, bytes=3000, cut=1, skipped={"empty": 2}),
        Shard("b", 10, 0, documents=1, tokens=500, bytes=1500, cut=0, skipped={"empty": 1, "no text": 1000}),
    ]
    table = manifest_table({"train": manifest("train", *shards), "validation": manifest("validation")})
    rows = {row[0]: row[1:] for row in cells(printed(table)) if len(row) > 2}
    assert rows == {
        "corpus": ["test/[bold]1.0"] * 2,
        "files": ["some/*.txt, others"] * 2,
        "split rule": ["by the length"] * 2,
        "tokenizer": ["bytes"] * 2,
        "fingerprint": [fingerprint(BYTES)] * 2,
        "vocabulary": ["257, EOS 256"] * 2,
        "format": ["1"] * 2,
        "shards": ["2", "0"],
        "documents": ["4", "0"],
        "tokens": ["1,500", "0"],
        "bytes of text": ["4,500", "0"],
        "bytes per token": ["3.00", "0.00"],
        "tokens per document": ["375.0", "0.0"],
        "texts cut": ["1", "0"],
        "texts skipped": ["1,003: 3 empty, 1,000 no text", "0"],
    }


def test_a_histogram_by_hand():
    rows = cells(printed(length_histogram(np.array([1, 2, 3, 3, 8, 15, 68], np.int32))))
    assert [row for row in rows if row] == [
        ["tokens", "documents", "of all tokens"],
        ["1", "1", "1.0%"],
        ["2 to 3", "3", "8.0%"],
        ["4 to 7", "0", "0.0%"],
        ["8 to 15", "2", "23.0%"],
        ["16 to 31", "0", "0.0%"],
        ["32 to 63", "0", "0.0%"],
        ["64 to 127", "1", "68.0%"],
    ]


@given(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=30))
def test_every_document_is_counted_once(lengths):
    rows = [row for row in cells(printed(length_histogram(np.array(lengths, np.int32)))) if len(row) == 3][1:]
    counts = {int(label.split(" to ")[0].replace(",", "")): int(count) for label, count, _ in rows}
    assert {least: count for least, count in counts.items() if count} == {
        2**power: sum(length.bit_length() == power + 1 for length in lengths)
        for power in {length.bit_length() - 1 for length in lengths}
    }


def test_the_bars_are_as_long_as_their_shares():
    lines = printed(length_histogram(np.array([1] * 8 + [2] * 4, np.int32))).splitlines()
    assert [line.count("█") for line in lines if "%" in line] == [16 + 16, 8 + 16]


def test_the_pieces_of_a_row():
    documents = tokenised(["abcdef", "gh", "ijklmnop"])
    rows = ConcatenatedRows(documents.lengths, sequence_length=8)
    shown = [printed(*row_panels(documents, BYTES, rows, row=row, sequence_length=8), width=60) for row in range(3)]
    assert [[line.strip("│╭╮╰╯─ ") for line in each.splitlines()] for each in shown] == [
        [
            "document 0 · tokens 0 to 7 of 7",
            "abcdef⟨EOS⟩",
            "0 to 7 of the row",
            "document 1 · tokens 0 to 1 of 3",
            "g⟨cut⟩",
            "7 to 8 of the row",
        ],
        [
            "document 1 · tokens 1 to 3 of 3",
            "⟨cut⟩h⟨EOS⟩",
            "0 to 2 of the row",
            "document 2 · tokens 0 to 6 of 9",
            "ijklmn⟨cut⟩",
            "2 to 8 of the row",
        ],
        [
            "document 2 · tokens 6 to 9 of 9",
            "⟨cut⟩op⟨EOS⟩",
            "0 to 3 of the row",
            "padding",
            "tokens that are no targets: 5",
            "3 to 8 of the row",
        ],
    ]


def test_the_pieces_of_a_row_of_best_fit():
    documents = tokenised(["abc", "d", "efghi"])
    rows = BestFitRows(documents.lengths, sequence_length=6)
    shown = printed(*row_panels(documents, BYTES, rows, row=1, sequence_length=6))
    assert [word for word in ("abc⟨EOS⟩", "d⟨EOS⟩", "efghi⟨EOS⟩", "padding") if word in shown] == ["abc⟨EOS⟩", "d⟨EOS⟩"]


def test_of_a_long_piece_the_middle_is_left_out():
    documents = tokenised(["a" * 300 + "b" * 500 + "c" * 300])
    rows = ConcatenatedRows(documents.lengths, sequence_length=1101)
    shown = printed(*row_panels(documents, BYTES, rows, row=0, sequence_length=1101))
    before, after = shown.split("⟨500 characters left out⟩")
    assert (before.count("a"), before.count("b"), after.count("b"), after.count("c")) == (300, 0, 0, 300)


def test_the_beginnings_are_evenly_spaced():
    documents = tokenised([letter * 200 for letter in "pqrst"])
    titles = [panel.title.plain for panel in beginnings(documents, BYTES, 2)]
    assert titles == ["document 0 · 201 tokens", "document 2 · 201 tokens"]
    assert [panel.renderable.plain for panel in beginnings(documents, BYTES, 9)] == [letter * 100 for letter in "pqrst"]


@given(st.text(max_size=50) | st.text("\x1b\x07\x9b\u202e\u200b\r\t[/bold]\\", max_size=20))
def test_nothing_is_shown_that_a_terminal_obeys(text):
    shown = visible(text).plain
    assert shown.replace("\n", "").isprintable()
    assert shown.count("\n") == text.count("\n")
    if text.isprintable():
        assert shown == text


def test_controls_by_hand():
    assert visible("a\x1b[31mb\tc\u202ed\n").plain == "a\\x1b[31mb\\tc\\u202ed↵\n"
    assert "[bold]x[/bold]\\x1b" in printed(visible("[bold]x[/bold]\x1b"))


def run_main(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "interdomain_jax.data.inspect", *flags]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_shows_a_corpus(tmp_path):
    write(tmp_path / "train", "train", ["a first text\x1b[31m", "", b"\xff", "x" * 40])
    write(tmp_path / "validation", "validation", ["another"])
    finished = run_main(
        f"--directory={tmp_path}", "--documents=1", "--row=1", "--sequence_length=24", "--packing=best_fit"
    )
    assert finished.returncode == 0, finished.stderr
    shown = finished.stdout
    for expected in (
        "2: 1 empty, 1 invalid utf-8",
        "rows of 24 tokens, best_fit: 3; padding: 18.06%",
        "rows of 24 tokens, best_fit: 1; padding: 66.67%",
        "train: row 1 of 3, best_fit at 24 tokens",
        "a first text\\x1b[31m",
    ):
        assert expected in shown
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    # Of one split the same, but for the other.
    alone = run_main(f"--directory={tmp_path}/validation", "--sequence_length=24")
    assert "another⟨EOS⟩" in alone.stdout
    assert "train" not in alone.stdout


@pytest.mark.parametrize(
    ("tokenizer", "flags", "message"),
    [
        ("bytes", ["--row=3", "--sequence_length=4"], "--row is 3; at --sequence_length=4 the rows are 0 to 1"),
        ("bytes", ["--tokenizer=mistral"], "was prepared with the tokenizer 'bytes'"),
        (
            "gone.model",
            [],
            "file gone.model does not exist: give the tokenizer of the corpus with --tokenizer",
        ),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_sentence(tmp_path, tokenizer, flags, message):
    directory = tmp_path / "train"
    write(directory, "train", ["a text"])
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"bytes",', f'"{tokenizer}",'))
    finished = run_main(f"--directory={directory}", *flags)
    assert finished.returncode == 1
    assert message in finished.stderr
    assert finished.stderr.count("\n") == 1


def test_a_directory_without_a_corpus(tmp_path):
    finished = run_main(f"--directory={tmp_path}")
    assert finished.returncode == 1
    assert f"{tmp_path} holds no prepared split" in finished.stderr
    assert finished.stderr.count("\n") == 1
