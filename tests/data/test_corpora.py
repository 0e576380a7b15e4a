"""The corpora of a config, as `train.py` opens them: what is wrong with one is a sentence, before any compilation."""

import shutil

import pytest

from configs import tiny
from interdomain_jax import cli
from interdomain_jax.data import preparation
from interdomain_jax.data.corpora import open_corpora
from interdomain_jax.data.preparation import carry_out, plan, run_here
from interdomain_jax.data.sources import make_source
from interdomain_jax.data.tokenizers import BytesTokenizer
from interdomain_jax.training import loop

SMALL = {"model.d_model": 16, "model.num_layers": 1, "model.num_heads": 2, "model.head_dim": 8, "model.state_dim": 4}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A small corpus, prepared as bytes."""
    directory = tmp_path_factory.mktemp("corpora")
    for number in range(40):
        (directory / "texts").mkdir(exist_ok=True)
        (directory / "texts" / f"{number}.txt").write_text(f"text number {number}")
    source = make_source(
        "text_files",
        files=[str(directory / "texts")],
        validation_one_in=3,
        data_dir=str(directory / "tfds"),
    )
    carry_out(plan(source, directory / "corpus", "bytes"), run_here)
    return directory / "corpus"


def config_with(**data):
    config = tiny.get_config()
    config.update_from_flattened_dict(SMALL | {f"data.{name}": value for name, value in data.items()})
    return config


def test_the_corpora_of_a_config(prepared):
    data = config_with(corpora=(str(prepared), str(prepared)), weights=(2.0, 1.0)).data
    train, again = open_corpora(data, "train", BytesTokenizer())
    (validation, _) = open_corpora(data, "validation", BytesTokenizer())
    assert train.digest == again.digest != validation.digest
    assert len(train.lengths) + len(validation.lengths) == 40


def test_the_embedded_corpus_is_prepared_once(tmp_path, monkeypatch, prepared):
    """Another tokenizer has files of its own."""
    made = []

    def make(corpus, *, data_dir):
        made.append(corpus)
        return make_source(
            "text_files",
            files=[str(prepared.parent / "texts")],
            validation_one_in=3,
            data_dir=data_dir,
        )

    monkeypatch.setattr("interdomain_jax.data.sources.make_source", make)
    done = []
    monkeypatch.setattr(preparation, "run_here", lambda tasks: done.append(len(tasks)) or run_here(tasks))
    data = config_with(directory=str(tmp_path)).data
    (train,) = open_corpora(data, "train", BytesTokenizer())
    open_corpora(data, "validation", BytesTokenizer())
    assert made == ["stdlib_text"] * 2
    assert done == [2]
    next(tmp_path.rglob("*.array_record")).write_bytes(b"half")
    open_corpora(data, "train", BytesTokenizer())
    assert done == [2, 1]
    assert train.manifest.split == "train"


DAMAGES = [
    (lambda corpus: shutil.rmtree(corpus / "validation"), "validation holds no prepared split of a corpus"),
    (lambda corpus: (corpus / "train" / "manifest.json").write_text('{"format": 7}'), "is of format 7"),
    (lambda corpus: next(corpus.glob("train/*.array_record")).write_bytes(b""), "has 0 bytes and had"),
    (lambda corpus: next(corpus.glob("train/*.array_record")).unlink(), "is gone"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_a_damaged_corpus(prepared, tmp_path, damage, named):
    shutil.copytree(prepared, tmp_path / "corpus")
    damage(tmp_path / "corpus")
    assert named in sentence_of(config_with(corpora=(str(tmp_path / "corpus"),)), tmp_path / "run")


def test_a_corpus_of_another_tokenizer(prepared, tmp_path):
    """levanter#614: the wrong tokenizer's cache gave NaN."""
    config = config_with(corpora=(str(prepared),), tokenizer="mistral")
    config.model.vocab_size = 32_000
    sentence = sentence_of(config, tmp_path / "run")
    assert "was prepared with the tokenizer 'bytes', fingerprint " in sentence
    assert "give the same one, or prepare the corpus again" in sentence


def sentence_of(config, workdir):
    """What `train.py` ends with."""
    with pytest.raises(SystemExit) as raised, cli.exit_on_bad_input():
        loop.prepare(config, workdir)
    assert "\n" not in raised.value.code
    assert not workdir.exists()
    return raised.value.code
