"""Scores of a corpus: of models whose perplexity is known by hand, and against plain loops over whole contexts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interdomain_jax import Decoder, scoring, sharding
from interdomain_jax.evaluation.corpus_scores import Reading, bucket_ends, make_scorer, score_corpus
from tests.token_lists import TokenLists, tokenised
from tests.training.conftest import SMALL, compiled_once  # noqa: F401
from tests.virtual_devices import run_on_eight_devices

EOS = 256
ONE_DEVICE = sharding.make_mesh(sharding.mesh_config(), jax.devices()[:1])
READINGS = {
    "windows": Reading(),
    "windows, reset": Reading(reset=True),
    "documents": Reading("documents", reset=True),
    "strided": Reading("strided", stride=3),
    "carried": Reading("carried"),
    "carried, reset": Reading("carried", reset=True),
}


# Most of the time here is compiling.
pytestmark = pytest.mark.usefixtures("compiled_once")


class Bigram:
    """A language model that looks one token back: its logits are rows of its kernel, log P[previous, next]."""

    def apply(self, variables, tokens, *, unembed, cache=None, **context):
        assert not unembed
        return jax.nn.one_hot(tokens, len(variables["params"]["unembed"]["kernel"])), cache

    def init_cache(self, batch_size, max_length):
        return ()


def bigram_params(log_probabilities):
    return {"unembed": {"kernel": jnp.asarray(log_probabilities, jnp.float32)}}


def length_of(reading, length):
    return None if reading.mode == "carried" else length


@functools.cache
def bigram_scorer(buckets):
    return make_scorer(Bigram(), ONE_DEVICE, vocab_chunks=3, buckets=buckets)


@pytest.mark.parametrize("piece_tokens", [3, 100])
@pytest.mark.parametrize("name", READINGS)
def test_a_cycle_of_known_probability_scores_exactly(name, piece_tokens):
    """lighteval#1252: unshifted logits. A model that gives each next token 1/4 has perplexity 4."""
    probabilities = np.full((257, 257), 0.75 / 256)
    for previous, following in [*zip(b"ab", b"bc", strict=True), (EOS, ord("a"))]:
        probabilities[previous, following] = 0.25
    # After "c" the text goes on or ends.
    probabilities[ord("c")] = 0.5 / 255
    probabilities[ord("c"), [ord("a"), EOS]] = 0.25
    corpus = tokenised(["abc" * 9, "abc", "abc" * 3])
    score = score_corpus(
        bigram_scorer(3),
        bigram_params(np.log(probabilities)),
        corpus,
        READINGS[name],
        context_length=length_of(READINGS[name], 7),
        position_ends=(1, 4, 7),
        piece_tokens=piece_tokens,
        tokens_per_batch=16,
        eos_id=EOS,
        mesh=ONE_DEVICE,
    )
    assert score.tokens.sum() == 42
    assert np.exp(score.nats / score.tokens) == pytest.approx(4.0, rel=1e-6)
    # Two bits for each of the 39 bytes and the three ends.
    assert score.nats.sum() / (math.log(2.0) * corpus.text_bytes) == pytest.approx(2 * 42 / 39, rel=1e-6)


def test_nothing_to_score_is_refused():
    score = scoring.make_score_function(Bigram(), ONE_DEVICE, vocab_chunks=1)
    with pytest.raises(ValueError, match="no token to score"):
        scoring.score_batches(score, bigram_params(np.zeros((257, 257))), [], ONE_DEVICE, batch_size=1)
    for name in ("windows", "documents", "carried"):
        with pytest.raises(ValueError, match="no token to score"):
            score_corpus(
                bigram_scorer(1),
                bigram_params(np.zeros((257, 257))),
                TokenLists([]),
                READINGS[name],
                context_length=length_of(READINGS[name], 7),
                position_ends=(7,),
                piece_tokens=7,
                tokens_per_batch=7,
                eos_id=EOS,
                mesh=ONE_DEVICE,
            )


VOCAB = 40
DOCUMENTS = TokenLists(
    [*np.random.default_rng(number).integers(0, VOCAB - 1, length), VOCAB - 1]
    for number, length in enumerate((3, 25, 0, 11, 40, 7))
)
SIZE, LENGTH = int(DOCUMENTS.lengths.sum()), 20
PATTERNS = {
    "interdomain": dict(mixers=("interdomain",), num_layers=2, scan_layers=True),
    "s4d": dict(mixers=("s4d",), num_layers=1),
    "softmax": dict(mixers=("softmax",), num_layers=1, num_kv_heads=1),
}


@functools.cache
def model_of(pattern):
    """A model with initial values large enough for its tokens to matter to each other, and its parameters."""
    model = Decoder(
        vocab_size=VOCAB,
        d_model=16,
        num_heads=2,
        head_dim=8,
        state_dim=4,
        init_std=0.3,
        chunk_size=8,
        **PATTERNS[pattern],
    )
    return model, jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]


@functools.cache
def scorer_of(pattern, buckets):
    return make_scorer(model_of(pattern)[0], ONE_DEVICE, vocab_chunks=3, buckets=buckets)


ENDS = (1, 2, 4, 8, 16, 32, SIZE)


def score_by(pattern, reading, *, piece_tokens, context_length=LENGTH, tokens_per_batch=2 * LENGTH, mesh=ONE_DEVICE):
    return score_corpus(
        scorer_of(pattern, len(ENDS)),
        model_of(pattern)[1],
        DOCUMENTS,
        reading,
        context_length=length_of(reading, context_length),
        position_ends=ENDS,
        piece_tokens=piece_tokens,
        tokens_per_batch=tokens_per_batch,
        eos_id=VOCAB - 1,
        mesh=mesh,
    )


@functools.cache
def whole_nats(pattern):
    """A function from up to `SIZE` (input, target) pairs to the nats of each target, all read at once."""
    model, params = model_of(pattern)
    logits_of = jax.jit(lambda tokens: model.apply({"params": params}, tokens)[0])

    def nats(pairs):
        inputs = np.zeros((1, SIZE), np.int32)
        inputs[0, : len(pairs)] = [given for given, _ in pairs]
        logits = np.asarray(logits_of(inputs)[0, : len(pairs)], np.float64)
        targets = logits[np.arange(len(pairs)), [target for _, target in pairs]]
        return np.log(np.exp(logits).sum(axis=-1)) - targets

    return nats


def by_loops(pattern, reading, context_length=LENGTH):
    """What `score_by` gives, from contexts that are cut out by hand and read one by one."""
    texts = [list(zip([VOCAB - 1, *ids[:-1].tolist()], ids.tolist(), strict=True)) for ids in DOCUMENTS.documents]
    stream = [pair for text in texts for pair in text]
    if reading.mode == "carried":
        context_length = SIZE
    contexts = []
    if reading.mode == "documents":
        contexts = [(text[i : i + context_length], 0) for text in texts for i in range(0, len(text), context_length)]
    elif reading.mode == "strided":
        contexts = [(stream[:context_length], 0)]
        for end in range(context_length, SIZE, reading.stride):
            begin = end + reading.stride - context_length
            contexts.append((stream[begin : end + reading.stride], context_length - reading.stride))
    else:
        numbers = [number for number, text in enumerate(texts) for _ in text]
        for i in range(0, SIZE, context_length):
            window = list(zip(numbers, stream, strict=True))[i : i + context_length]
            for number in sorted({number for number, _ in window}) if reading.reset else (None,):
                contexts.append(([pair for other, pair in window if number in (None, other)], 0))
    nats, tokens = np.zeros(len(ENDS)), np.zeros(len(ENDS), int)
    for pairs, first in contexts:
        for position, value in enumerate(whole_nats(pattern)(pairs)):
            if position >= first:
                bucket = next(number for number, end in enumerate(ENDS) if position < end)
                nats[bucket] += value
                tokens[bucket] += 1
    return nats, tokens


CASES = [
    *(("interdomain", name) for name in READINGS),
    ("s4d", "carried"),
    ("softmax", "windows"),
    ("softmax", "documents"),
]


@pytest.mark.parametrize(("pattern", "name"), CASES)
def test_every_mode_equals_a_plain_loop(pattern, name):
    """By position; contexts read whole, and in pieces that do not divide them."""
    reading = READINGS[name]
    nats, tokens = by_loops(pattern, reading)
    assert tokens.sum() == SIZE
    # Whole contexts lie two in a batch.
    for piece_tokens, tokens_per_batch in [(8, 8)] if reading.mode == "carried" else [(8, 8), (LENGTH, 2 * LENGTH)]:
        score = score_by(pattern, reading, piece_tokens=piece_tokens, tokens_per_batch=tokens_per_batch)
        assert score.tokens.tolist() == tokens.tolist()
        np.testing.assert_allclose(score.nats, nats, rtol=1e-5)


def test_the_batch_plays_no_part():
    """lm-eval#704: scores changed with the batch."""
    one, many = (score_by("interdomain", Reading(), piece_tokens=8, tokens_per_batch=tokens) for tokens in (8, 8 * 7))
    np.testing.assert_allclose(many.nats, one.nats, rtol=1e-5)


class Formula:
    """A document of so many tokens that lie nowhere: each is a function of its place."""

    def __init__(self, size):
        self.lengths = np.array([size])
        self.text_bytes = size
        self.digest = "formula"

    def read(self, document, start, stop):
        places = np.arange(start, stop, dtype=np.int64)
        return (places * places % 1009 % VOCAB).astype(np.int32)


def test_memory_does_not_grow_with_the_context():
    """mamba#614: scoring a very long text ran out of memory. One program and level memory, whatever the length."""
    model, params = model_of("interdomain")
    scorer = make_scorer(model, ONE_DEVICE, vocab_chunks=1, buckets=1)
    most = {}

    def score(size, piece_tokens, context_length=None):
        held = []
        total = score_corpus(
            scorer,
            params,
            Formula(size),
            Reading() if context_length else Reading("carried"),
            context_length=context_length,
            position_ends=(size,),
            piece_tokens=piece_tokens,
            tokens_per_batch=piece_tokens,
            eos_id=0,
            mesh=ONE_DEVICE,
            on_tokens=lambda _: held.append(sum(each.nbytes for each in jax.live_arrays())),
        )
        assert total.tokens.tolist() == [size]
        most[size] = max(held)
        return total.nats[0]

    nats = [score(size, 64) for size in (1024, 4096)]
    assert most[4096] == most[1024]
    assert score(4096, 64, context_length=4096) == nats[1]
    assert scorer.piece._cache_size() == 1
    assert score(4096, 320) == pytest.approx(nats[1], rel=1e-6)
    assert nats[1] > 3.5 * nats[0]


MILLION = """
import time
import jax, psutil, pytest
from interdomain_jax.evaluation.corpus_scores import Reading, make_scorer, score_corpus
from tests.evaluation.test_corpus_scores import ONE_DEVICE, Formula, model_of

model, params = model_of("interdomain")
scorer = make_scorer(model, ONE_DEVICE, vocab_chunks=1, buckets=1)

def score(size, piece_tokens):
    started, arrays, process = time.perf_counter(), [], []

    def look(_):
        arrays.append(sum(each.nbytes for each in jax.live_arrays()))
        process.append(psutil.Process().memory_info().rss)

    total = score_corpus(
        scorer, params, Formula(size), Reading("carried"), context_length=None, position_ends=(size,),
        piece_tokens=piece_tokens, tokens_per_batch=piece_tokens, eos_id=0, mesh=ONE_DEVICE, on_tokens=look,
    )
    assert total.tokens.tolist() == [size]
    nats, peaks = total.nats[0], (max(process), max(arrays))
    print(
        f"{size:,} tokens in pieces of {piece_tokens:,}: {nats:.6f} nats, process {peaks[0] / 2**20:.1f} MiB, arrays "
        f"{peaks[1]:,} bytes, {time.perf_counter() - started:.1f} s"
    )
    return nats, *peaks

# What compiling leaves behind is there before.
score(16_384, 2_048)
_, small, arrays = score(16_384, 2_048)
nats, *large = score(1_048_576, 2_048)
assert large[0] < 1.05 * small
assert large[1] == arrays
assert score(1_048_576, 1_000)[0] == pytest.approx(nats, rel=1e-6)
"""


@pytest.mark.slow
def test_a_million_tokens():
    """mamba#614. The memory of the process at 1,048,576 tokens is within 5 % of that at 16,384.

    And the total is the same in pieces of another size.
    """
    print(run_on_eight_devices(MILLION))


MESHES = """
import pathlib, tempfile
import jax, numpy as np, pytest
from interdomain_jax import sharding
from interdomain_jax.evaluation import corpus_scores, perplexity
from tests.evaluation import test_corpus_scores as tests
from tests.training.test_mesh_flags import save_run

jax.config.update("jax_disable_most_optimizations", True)
model, params = tests.model_of("interdomain")
for name, sizes, length, piece_tokens in (
    ("windows", (2, 2, 2, 1), 20, 8), ("documents", (1, 2, 1, 4), 20, 8)
):
    mesh = sharding.make_mesh(dict(zip(sharding.AXES, sizes, strict=True)))
    total = corpus_scores.score_corpus(
        corpus_scores.make_scorer(model, mesh, vocab_chunks=3, buckets=len(tests.ENDS)),
        jax.device_put(params, sharding.state_sharding(params, mesh)),
        tests.DOCUMENTS, tests.READINGS[name], context_length=length, position_ends=tests.ENDS,
        piece_tokens=piece_tokens, tokens_per_batch=40, eos_id=tests.VOCAB - 1, mesh=mesh,
    )
    nats, tokens = tests.by_loops("interdomain", tests.READINGS[name])
    assert total.tokens.tolist() == tokens.tolist(), name
    np.testing.assert_allclose(total.nats, nats, rtol=1e-5)

with tempfile.TemporaryDirectory() as name:
    workdir = pathlib.Path(name)
    save_run(workdir)
    for arguments in (dict(lengths=[8, 10]), dict(piece_tokens=10)):
        with pytest.raises(ValueError, match=r"(lengths|piece_tokens) has 10; mesh\\.seq=4 must divide it"):
            perplexity.prepare(workdir, dict(data=1, fsdp=2, tensor=1, seq=4), **arguments)
"""


def test_the_mesh_plays_no_part():
    """Nor may its `seq` axis leave a token over."""
    run_on_eight_devices(MESHES, quick=True)


def test_buckets():
    assert bucket_ends(1) == (1,)
    assert bucket_ends(16) == (1, 2, 4, 8, 16)
    assert bucket_ends(20) == (1, 2, 4, 8, 16, 20)
    assert bucket_ends(20, [5, 10, 30]) == (5, 10, 20)
