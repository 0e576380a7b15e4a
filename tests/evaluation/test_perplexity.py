"""The evaluator against models whose perplexity is known by hand, and against plain loops over whole contexts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from rich.console import Console

from configs import tiny
from interdomain_jax import Decoder, checkpoints, cli, scoring, sharding
from interdomain_jax import workdir as workdirs
from interdomain_jax.data.corpora import open_corpora
from interdomain_jax.evaluation import perplexity, perplexity_report
from interdomain_jax.evaluation.corpus_scores import Reading, bucket_ends, make_scorer, score_corpus
from interdomain_jax.evaluation.records import read_records, write_record
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
from tests.evaluation.test_perplexity import ONE_DEVICE, Formula, model_of

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
from tests.evaluation import test_perplexity as tests
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
