"""Trained tokenizers: every text comes back, the same texts give the same file, and what cannot be is said."""

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax.data import tokenizer_training
from interdomain_jax.data.sources import Part, Text
from interdomain_jax.data.tokenizer_training import bytes_per_token, sample_documents, train_model
from interdomain_jax.data.tokenizers import BytesTokenizer, SentencePieceTokenizer, fingerprint

CODE = Path(textwrap.__file__).read_text()
TEXTS = [CODE, "if x:\n\tif y:\n\t\treturn 1000 naïve\r\n" * 20]
SPECIAL = [" ", "   ", "\t", "\n", "\r", "\0", "\x1a", "def", "  return", "12", "é", "e\u0301", "日本", "\u2585", "😀"]
LOOKS_SPECIAL = ["</s>", "<unk>", "<s>", "<0x0A>", "\ufeff", "\ufffd"]
ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\u2581"), max_size=60) | st.lists(
    st.sampled_from(SPECIAL + LOOKS_SPECIAL), max_size=20
).map("".join)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def model(request) -> bytes:
    return train_model(TEXTS, vocab_size=500, model_type=request.param)


@pytest.fixture(scope="module")
def tokenizer(model, tmp_path_factory) -> SentencePieceTokenizer:
    return load(model, tmp_path_factory.mktemp("models"))


def load(model: bytes, directory: Path) -> SentencePieceTokenizer:
    path = directory / "pieces.model"
    path.write_bytes(model)
    return SentencePieceTokenizer(str(path))


class Parts:
    """A source of parts whose training texts are given."""

    def __init__(self, *parts: list[str]):
        self._parts = parts
        self.opened: list[int] = []

    def parts(self, part_bytes: int) -> list[Part]:
        return [Part((str(number),)) for number in range(len(self._parts))]

    def texts(self, part: Part, split: str) -> Iterator[Text]:
        assert split == "train"
        self.opened.append(int(part.files[0]))
        for number, content in enumerate(self._parts[int(part.files[0])]):
            yield Text(f"{part.files[0]}:{number}", content)


@given(text=ANY_TEXT)
def test_every_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    # Neither the unknown nor the end of a document.
    assert all(ids > 1)


def test_the_mark_of_a_space_comes_back_as_a_space(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\u2581b")) == "a b"


def test_ids(tokenizer):
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (500, 1)
    assert tokenizer.encode("\n\n").tolist() == [2 + 10, 2 + 10]
    assert tokenizer.encode("\U0001f600").tolist() == [2 + byte for byte in "\U0001f600".encode()]
    assert len(tokenizer.encode("1000")) == 4
    # Learned: a common word, and the indentation of code.
    assert len(tokenizer.encode("self")) == 1
    assert len(tokenizer.encode(" " * 8)) == 1


def test_the_same_texts_give_the_same_bytes(request, model):
    model_type = request.node.callspec.params["model"]
    again = train_model(iter(TEXTS), vocab_size=500, model_type=model_type)
    assert again == model
    assert train_model([CODE], vocab_size=500, model_type=model_type) != model


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_long_lines_and_long_words_are_trained_on(tmp_path, model_type):
    line = "x" * 70_000 + " zebra" * 100_000
    tokenizer = load(train_model([line], vocab_size=270, model_type=model_type), tmp_path)
    assert len(tokenizer.encode(" zebra")) == 1
    assert tokenizer.decode(tokenizer.encode(line)) == line


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        ([CODE], 100_000, r"vocab_size 100000 is too high for the text, in which there are \d+ pieces at most"),
        ([CODE], 270, r"vocab_size 270 is too low for the text: bytes and characters alone are \d+ pieces"),
        ([], 500, "there is no text to train on"),
        (["", "\n"], 500, "there is no text to train on"),
    ],
)
@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_what_cannot_be_trained(texts, vocab_size, message, model_type):
    with pytest.raises(ValueError, match=f"^{message}$"):
        train_model(texts, vocab_size=vocab_size, model_type=model_type)


@pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyboardInterrupt()])
def test_what_ends_the_texts_is_raised(error):
    def texts():
        yield CODE
        raise error

    with pytest.raises(type(error)) as caught:
        train_model(texts(), vocab_size=500)
    assert caught.value is error


@given(
    parts=st.lists(st.lists(st.text("aé ", min_size=1, max_size=9), max_size=5), max_size=6),
    max_bytes=st.integers(1, 120),
    opened=st.integers(1, 4),
)
def test_a_sample_has_all_that_fits(parts, max_bytes, opened):
    expected = [text.strip() for texts in parts for text in texts if text.strip()]
    size = sum(len(text.encode()) for text in expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_training, "_OPEN_PARTS", opened)
        sample = list(sample_documents(Parts(*parts), "train", part_bytes=1, max_bytes=max_bytes))
        again = list(sample_documents(Parts(*parts), "train", part_bytes=1, max_bytes=max_bytes))
    assert sample == again
    if size <= max_bytes:
        assert sorted(sample) == sorted(expected)
    else:
        # A character that is cut is left out.
        assert max_bytes - 1 <= sum(len(text.encode()) for text in sample) <= max_bytes


def test_a_sample_comes_from_all_parts_alike():
    source = Parts(*([f"{part}"] * 100 for part in "abcdefgh"))
    sample = list(sample_documents(source, "train", part_bytes=1, max_bytes=80))
    assert {part: sample.count(part) for part in sample} == dict.fromkeys("abcdefgh", 10)


def test_so_many_parts_are_open_and_no_more(monkeypatch):
    monkeypatch.setattr(tokenizer_training, "_OPEN_PARTS", 3)
    source = Parts(*([f"{part}"] * 100 for part in "abcdefgh"))
    sample = list(sample_documents(source, "train", part_bytes=1, max_bytes=80))
    assert len(set(sample)) == len(source.opened) == 3
    assert sorted(source.opened) != [0, 1, 2]


def test_bytes_per_token_by_hand():
    # Four bytes and an end, two bytes and an end.
    assert bytes_per_token(["aé\n", "bc"], BytesTokenizer()) == 6 / 8
    assert bytes_per_token([], BytesTokenizer()) is None


def run_main(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "interdomain_jax.data.train_tokenizer", *flags]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_writes_a_model(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{CODE}\n# {number}\n")
    output = tmp_path / "new" / "pieces.model"
    command = ["--corpus=text_files", f"--files={tmp_path}/texts", "--validation_one_in=4", "--vocab_size=500"]
    contents = []
    for _ in range(2):
        finished = run_main(*command, f"--output={output}")
        assert finished.returncode == 0, finished.stderr
        contents.append(output.read_bytes())
    assert contents[0] == contents[1]
    tokenizer = SentencePieceTokenizer(str(output))
    assert re.fullmatch(
        rf"{output}: 500 pieces from [\d,]+ bytes of text in [\d.]+ s; [\d.]+ bytes per token of the validation split\n"
        rf"fingerprint {fingerprint(tokenizer)}; to use it: --config\.data\.tokenizer={output}\n",
        finished.stdout,
    )
    # No line but our own: the trainer is quiet.
    assert [line for line in finished.stderr.splitlines() if "] Training on " not in line] == []
    assert [path.name for path in output.parent.iterdir()] == ["pieces.model"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--vocab_size=258", "--vocab_size is 258; it must be at least 259: 256 bytes, the unknown, the end of a"),
        ("--output=pieces.json", "--output is pieces.json; it must be a file whose name ends in .model"),
        (f"--output={__file__}/pieces.model", f"--output {__file__} cannot be a directory: {__file__} is a file"),
        ("--max_mib=0", "--max_mib=0"),
    ],
)
def test_bad_flags_end_the_command_in_one_sentence(tmp_path, flag, message):
    finished = run_main(f"--output={tmp_path}/pieces.model", flag)
    assert finished.returncode == 1
    assert message in finished.stderr
    assert finished.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
