"""Tokenizers against hand values and the libraries that own the file formats."""

import io
import shutil
import subprocess
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import strategies as st

from interdomain_jax.data.tokenizers import load_tokenizer

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)


@pytest.fixture(scope="module")
def hugging_face_path(tmp_path_factory) -> str:
    """A byte-level BPE whose last token has an id far above the number of tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the state of the state machine"] * 3, trainer)
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=4)
    path = tmp_path_factory.mktemp("hugging_face") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(params=["bytes", "mistral", "hugging_face"])
def tokenizer(request, hugging_face_path):
    return load_tokenizer(hugging_face_path if request.param == "hugging_face" else request.param)


def mistral_model_file() -> Path:
    package = Path(sentencepiece.__file__).parent.parent / "mistral_common"
    return package / "data" / "tokenizer.model.v1"


def test_bytes_by_hand():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    np.testing.assert_array_equal(tokenizer.encode("aé\n"), [97, 0xC3, 0xA9, 10])
    assert tokenizer.decode([97, 256, 0xC3, 0xA9, 0xFF]) == "aé\ufffd"


@hypothesis.settings(deadline=None)
@hypothesis.given(text=st.text(max_size=60))
def test_bytes_round_trip(text):
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(text=ANY_TEXT)
def test_any_text_encodes_below_the_vocabulary_size(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert np.all((ids >= 0) & (ids < tokenizer.vocab_size))
    assert tokenizer.eos_id not in ids
    assert tokenizer.eos_id < tokenizer.vocab_size


def test_lone_surrogates_become_question_marks(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_text_that_looks_like_a_special_token_stays_text(tokenizer):
    for text in ("x </s> y", "x <|endoftext|> y", "<s>x"):
        ids = tokenizer.encode(text)
        assert tokenizer.eos_id not in ids
        assert tokenizer.decode(ids) == text


def test_decode_leaves_the_end_of_a_document_out(tokenizer):
    ids = np.append(tokenizer.encode("the end"), tokenizer.eos_id)
    assert tokenizer.decode(ids) == "the end"


@pytest.mark.parametrize("offset", [0, 5])
def test_decode_refuses_ids_outside_the_vocabulary(tokenizer, offset):
    with pytest.raises(ValueError, match="is outside the vocabulary"):
        tokenizer.decode([tokenizer.vocab_size + offset])
    with pytest.raises(ValueError, match="token id -1 is outside"):
        tokenizer.decode([-1])


def test_mistral_is_the_model_file_that_mistral_common_carries(tmp_path):
    tokenizer = load_tokenizer("mistral")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (32_000, 2)
    copy = tmp_path / "copy.model"
    shutil.copy(mistral_model_file(), copy)
    text = "def f(x):\n    return  x  # déjà vu\n"
    expected = sentencepiece.SentencePieceProcessor(model_file=str(copy)).encode(text)
    np.testing.assert_array_equal(tokenizer.encode(text), expected)
    np.testing.assert_array_equal(load_tokenizer(str(copy)).encode(text), expected)
    assert tokenizer.decode(expected) == text


def test_mistral_is_found_without_importing_its_package():
    program = (
        "import sys; from interdomain_jax.data.tokenizers import load_tokenizer; "
        "load_tokenizer('mistral'); print('mistral_common' in sys.modules)"
    )
    output = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert output == "False\n"


def test_mistral_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "mistral_common", None)
    with pytest.raises(FileNotFoundError, match="needs the package mistral-common"):
        load_tokenizer("mistral")


def test_hugging_face_agrees_with_its_library(hugging_face_path):
    tokenizer = load_tokenizer(hugging_face_path)
    reference = tokenizers.Tokenizer.from_file(hugging_face_path)
    reference.no_truncation()
    reference.no_padding()
    text = "the state machine of états, longer than the file's own truncation"
    np.testing.assert_array_equal(tokenizer.encode(text), reference.encode(text).ids)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_id == reference.token_to_id("<|endoftext|>")
    assert tokenizer.vocab_size == reference.get_vocab_size()


def test_hugging_face_ids_with_holes(tmp_path):
    model = tokenizers.models.WordLevel({"a": 3, "[UNK]": 7, "</s>": 90}, unk_token="[UNK]")
    path = tmp_path / "holes.json"
    tokenizers.Tokenizer(model).save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (91, 90)


@pytest.mark.parametrize("spec", ["gpt2", "", "vocab.txt", "Bytes"])
def test_unknown_spec(spec):
    with pytest.raises(ValueError, match=r"is unknown: give 'bytes', 'mistral'.*\.model.*\.json"):
        load_tokenizer(spec)


@pytest.mark.parametrize("name", ["absent.model", "absent.json"])
def test_missing_file(tmp_path, name):
    path = str(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=f"^tokenizer file {path} does not exist$"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.model", "not a model", "is not a SentencePiece model"),
        ("bad.json", "{", "is not JSON"),
        ("other.json", "[1, 2]", "not a tokenizer.json"),
    ],
)
def test_file_of_another_kind(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(str(path))


def test_no_end_of_sequence_in_tokenizer_json(tmp_path):
    path = tmp_path / "no_end.json"
    model = tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(path))
    with pytest.raises(ValueError, match="no end-of-sequence token under any of the names </s>"):
        load_tokenizer(str(path))


def test_no_end_of_sequence_in_sentencepiece_model(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c", "b c d"]),
        model_writer=model,
        vocab_size=8,
        model_type="char",
        hard_vocab_limit=False,
        eos_id=-1,
        minloglevel=2,
    )
    path = tmp_path / "no_end.model"
    path.write_bytes(model.getvalue())
    with pytest.raises(ValueError, match="defines no end-of-sequence piece"):
        load_tokenizer(str(path))
