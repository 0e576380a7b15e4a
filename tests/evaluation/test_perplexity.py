"""The evaluator against models whose perplexity is known by hand."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interdomain_jax import scoring, sharding
from interdomain_jax.evaluation import report
from interdomain_jax.evaluation.perplexity import ContextResult, Evaluation, context_results
from tests.token_lists import tokenised

EOS = 256


class Bigram:
    """A language model that looks one token back: its logits are rows of its kernel, log P[previous, next]."""

    def apply(self, variables, tokens, *, unembed):
        assert not unembed
        return jax.nn.one_hot(tokens, len(variables["params"]["unembed"]["kernel"])), None


def bigram_params(log_probabilities):
    return {"unembed": {"kernel": jnp.asarray(log_probabilities, jnp.float32)}}


def score_texts(log_probabilities, texts, *, context_lengths, max_tokens=None):
    size = sum(len(text.encode()) for text in texts)
    return context_results(
        Bigram(),
        bigram_params(log_probabilities),
        [tokenised(texts)],
        context_lengths=context_lengths,
        tokens_per_batch=16,
        vocab_chunks=3,
        bytes_per_token=size / (size + len(texts)),
        max_tokens=max_tokens,
        reset=False,
        eos_id=EOS,
        mesh=sharding.make_mesh(sharding.mesh_config(), jax.devices()[:1]),
    )


def test_a_cycle_of_known_probability_scores_exactly():
    """lighteval#1252: unshifted logits. A model that gives each next token 1/4 has perplexity 4."""
    text = "abc" * 20
    probabilities = np.full((257, 257), 0.75 / 256)
    for previous, following in [*zip(b"abc", b"bca", strict=True), (EOS, ord("a"))]:
        probabilities[previous, following] = 0.25
    (result,) = score_texts(np.log(probabilities), [text], context_lengths=[7], max_tokens=len(text))
    assert result.tokens == 60
    assert result.perplexity == pytest.approx(4.0, rel=1e-6)
    # One byte a token but for the closing EOS: 2 bits x 61 tokens / 60 bytes.
    assert result.bits_per_byte == pytest.approx(2 * 61 / 60, rel=1e-6)


def test_the_same_tokens_at_every_context_length():
    texts = ["one", "", "and two", "é" * 9]
    rng = np.random.default_rng(0)
    log_probabilities = np.log(rng.dirichlet(np.ones(257), size=257))
    stream = [EOS, *(token for text in texts for token in [*text.encode(), EOS])]
    nats = -sum(log_probabilities[pair] for pair in itertools.pairwise(stream))
    tokens, size = len(stream) - 1, 3 + 7 + 18
    results = score_texts(log_probabilities, texts, context_lengths=[1, 5, 8, 64])
    for result, context_length in zip(results, [1, 5, 8, 64], strict=True):
        assert result.context_length == context_length
        assert result.tokens == tokens
        assert result.loss == pytest.approx(nats / tokens, rel=1e-6)
        assert result.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-5)
        assert result.bits_per_byte == pytest.approx(nats / (math.log(2) * size), rel=1e-6)


def test_nothing_to_score_is_refused():
    mesh = sharding.make_mesh(sharding.mesh_config(), jax.devices()[:1])
    score = scoring.make_score_function(Bigram(), mesh, vocab_chunks=1)
    with pytest.raises(ValueError, match="no token to score"):
        scoring.score_batches(score, bigram_params(np.zeros((257, 257))), [], mesh, batch_size=1)


def test_the_report(tmp_path, capsys):
    """lm-eval#934: NumPy integers and NaN in results files. The file is strict JSON."""
    evaluation = Evaluation(
        name="tiny",
        mixers=("interdomain",),
        parameters=np.int64(10),
        step=400,
        corpora=("stdlib_text",),
        split="validation",
        documents=3,
        split_tokens=100,
        split_bytes=97,
        results=(
            ContextResult(512, 100, np.float32(1.5), 4.4817, 2.1),
            ContextResult(1024, 100, 1.25, 3.4903, float("inf")),
        ),
    )
    report.write(tmp_path, evaluation)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    saved = json.loads((tmp_path / "eval.json").read_text(), parse_constant=refuse)
    assert saved["parameters"] == 10
    assert saved["mixers"] == ["interdomain"]
    assert saved["results"][0]["loss"] == 1.5
    assert saved["results"][1]["bits_per_byte"] is None
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    assert "1,024" in table
    assert "2x" in table
    assert "3.4903" in table
