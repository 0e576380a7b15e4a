"""Perplexity of runs: the record, its table and figure, interruptions, and bad input."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from rich.console import Console

from configs import tiny
from interdomain_jax import Decoder, checkpoints, cli, sharding
from interdomain_jax import workdir as workdirs
from interdomain_jax.data.corpora import open_corpora
from interdomain_jax.evaluation import perplexity, perplexity_report
from interdomain_jax.evaluation.records import read_records, write_record
from tests.token_lists import tokenised
from tests.training.conftest import SMALL, compiled_once  # noqa: F401

# Most of the time here is compiling.
pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture
def save_run(tmp_path, monkeypatch):
    """Saves a run whose corpora, "one" and "two", are in memory, with overrides of its config; returns its workdir."""
    corpora = {"one": tokenised(["a text of its own", "and another"]), "two": tokenised(["x" * 150])}
    monkeypatch.setattr(
        perplexity, "open_corpora", lambda data, split, tokenizer: tuple(corpora[name] for name in data.corpora)
    )

    def save(**overrides):
        config = tiny.get_config()
        fields = {"data.corpora": ("one", "two"), "data.weights": (1, 1), "accumulation_steps": 1}
        config.update_from_flattened_dict(SMALL | fields | overrides)
        workdirs.save_config(tmp_path, config)
        model = Decoder(**config.model)
        rng = np.random.default_rng(0)
        params = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 4), jnp.int32))["params"]
        params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.1, leaf.shape), leaf.dtype), params)
        with checkpoints.open_checkpoints(tmp_path) as opened:
            checkpoints.save(opened, 5, {checkpoints.PARAMS_ITEM: params}, {})
        return tmp_path

    return save


def values_of(record):
    return {(each.task, each.metric, each.at): each.value for each in record.measurements}


def test_a_run_is_evaluated_and_goes_on_after_an_interruption(save_run, monkeypatch, capsys):
    workdir = save_run()
    arguments = dict(lengths=[64, 32], positions=[8, 16])
    task = perplexity.prepare(workdir, sharding.mesh_config(), **arguments)
    assert task.name == "perplexity-64-32"
    scored, score = [], perplexity.score_corpus

    def interrupted(scorer, params, documents, *rest, context_length, **options):
        if len(scored) == 3:
            scored.append("interrupted")
            raise KeyboardInterrupt
        scored.append((documents.text_bytes, context_length))
        return score(scorer, params, documents, *rest, context_length=context_length, **options)

    monkeypatch.setattr(perplexity, "score_corpus", interrupted)
    with pytest.raises(KeyboardInterrupt):
        perplexity.evaluate(task)
    assert read_records(workdir) == []
    record = perplexity.evaluate(perplexity.prepare(workdir, sharding.mesh_config(), **arguments))
    assert scored == [(28, 32), (28, 64), (150, 32), "interrupted", (150, 64)]
    path = write_record(workdir, record)
    perplexity_report.draw(record, path.with_suffix(".png"))
    whole = perplexity.evaluate(task)
    assert len(scored) == 9
    assert whole.measurements == record.measurements

    assert [path.name for path in sorted((workdir / "evaluations").iterdir())] == [
        "perplexity-64-32.json",
        "perplexity-64-32.png",
    ]
    assert (workdir / "evaluations" / "perplexity-64-32.png").read_bytes().startswith(b"\x89PNG")
    assert read_records(workdir) == [record]
    assert (record.kind, record.model["step"], record.settings["lengths"]) == ("perplexity", 5, [32, 64])
    values = values_of(record)
    for name, tokens, size in (("one", 30, 28), ("two", 151, 150)):
        for length in (32, 64):
            loss = values[name, "loss", length]
            assert values[name, "perplexity", length] == pytest.approx(math.exp(loss))
            assert values[name, "bits_per_byte", length] == pytest.approx(loss * tokens / (size * math.log(2)))
    for metric in ("loss", "perplexity", "bits_per_byte"):
        assert values["mean", metric, 64] == pytest.approx((values["one", metric, 64] + values["two", metric, 64]) / 2)
    by_position = [each for each in record.measurements if (each.task, each.metric) == ("two", "loss_by_position")]
    # 151 tokens in windows of 64.
    assert [(each.at, each.samples) for each in by_position] == [(8, 24), (16, 24), (64, 151 - 48)]
    mean = sum(each.value * each.samples for each in by_position) / 151
    assert mean == pytest.approx(values["two", "loss", 64], rel=1e-6)
    Console().print(perplexity_report.as_table(record))
    table = capsys.readouterr().out
    assert all(part in table for part in ("one", "two", "mean", "64", "2x", f"{values['mean', 'perplexity', 64]:.4f}"))


def test_the_whole_split_as_one_context(save_run, capsys):
    workdir = save_run(**{"data.corpora": ("two",), "data.weights": ()})
    task = perplexity.prepare(workdir, sharding.mesh_config(), mode="carried", max_tokens=140)
    assert (task.name, task.lengths, task.position_ends[-2:]) == ("perplexity-carried-first140", (None,), (128, 140))
    record = perplexity.evaluate(task)
    assert values_of(record)["two", "perplexity", None] > 1
    assert record.settings["bytes_per_token"] == "of the whole split"
    Console().print(perplexity_report.as_table(record))
    assert "whole split" in capsys.readouterr().out
    # A model that has diverged has a record and a figure too.
    lost = record._replace(measurements=[each._replace(value=math.nan) for each in record.measurements])
    path = write_record(workdir, lost)
    perplexity_report.draw(lost, path.with_suffix(".png"))
    assert [each.value for each in read_records(workdir)[0].measurements] == [None] * len(lost.measurements)


BAD = [
    (dict(mode="whole"), ("mode is 'whole'", "'carried'")),
    (dict(mode="strided"), ("stride is None", "'strided'")),
    (dict(stride=4), ("stride is 4", "'windows'")),
    (dict(mode="strided", stride=0), ("stride is 0", "at least 1")),
    (dict(mode="strided", stride=33), ("stride is 33", "shortest of the lengths, 32")),
    (dict(lengths=[0, 32]), ("lengths is '0,32'", "at least 1")),
    (dict(lengths=[]), ("lengths is ''", "at least 1")),
    (dict(mode="carried", lengths=[32]), ("lengths is '32'", "'carried'")),
    (dict(positions=[4, 4]), ("positions is '4,4'", "above the one before")),
    (dict(piece_tokens=0), ("piece_tokens is 0", "at least 1")),
    (dict(max_tokens=0), ("max_tokens is 0", "at least 1")),
    (dict(corpora=["one", "one"]), ("corpora is 'one,one'", "each once")),
    (dict(name="../up"), ("name is '../up'", "names a file")),
]


def refusal(workdir, **arguments):
    with pytest.raises(ValueError) as raised:
        perplexity.prepare(workdir, sharding.mesh_config(), **arguments)
    return str(raised.value)


def test_bad_input_is_one_sentence(save_run):
    workdir = save_run()
    for arguments, named in BAD:
        message = refusal(workdir, **arguments)
        assert all(part in message for part in named), message
        assert "\n" not in message
    assert not (workdir / "evaluations").exists()


def test_softmax_cannot_carry_a_whole_split(save_run):
    message = refusal(save_run(**{"model.mixers": ("softmax",)}), mode="carried")
    assert "softmax layers keep every token" in message


def test_a_corpus_that_is_not_there(save_run, monkeypatch):
    monkeypatch.setattr(perplexity, "open_corpora", open_corpora)
    with pytest.raises(FileNotFoundError, match="'no/such/corpus'"):
        perplexity.prepare(save_run(), sharding.mesh_config(), corpora=["no/such/corpus"])


def test_lists_of_numbers_as_flags():
    values = flags.FlagValues()
    lengths = flags.DEFINE_list("lengths", None, "", flag_values=values)
    for given, expected in (([], None), (["--lengths=4096,8192"], [4096, 8192]), (["--lengths="], [])):
        values.unparse_flags()
        values(["eval.py", *given])
        assert cli.as_integers(lengths) == expected
    values(["eval.py", "--lengths=4k,8192"])
    with pytest.raises(ValueError, match="--lengths is '4k,8192'"):
        cli.as_integers(lengths)
