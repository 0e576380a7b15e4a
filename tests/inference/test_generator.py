"""Generation, against whole-sequence forward passes and against itself in other company."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from interdomain_jax import sharding
from interdomain_jax.inference import Generator, Request, Sampling
from interdomain_jax.modules import Decoder
from interdomain_jax.modules.layer_layout import separate_layers
from interdomain_jax.modules.mixers import MIXERS
from tests.quick import quick_jit

VOCAB_SIZE = 40
CHUNK = 16
ROWS = 4


@functools.cache
def trained(mixers, scan_layers=True):
    """A model whose parameters are large enough for its choices to be clear."""
    model = Decoder(
        vocab_size=VOCAB_SIZE,
        d_model=16,
        num_layers=2,
        num_heads=2,
        head_dim=8,
        state_dim=4,
        mixers=mixers,
        scan_layers=scan_layers,
        init_std=0.3,
    )
    if not scan_layers:
        return model, separate_layers(trained(mixers)[1])
    params = quick_jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    return model, params


@functools.cache
def generator(mixers=("interdomain",), scan_layers=True):
    model, params = trained(mixers, scan_layers)
    mesh = sharding.make_mesh(sharding.mesh_config(), jax.devices()[:1])
    return Generator(model, params, mesh, batch_size=ROWS, max_length=300, chunk_size=CHUNK)


@functools.cache
def whole_forward(mixers):
    model, _ = trained(mixers)
    return quick_jit(lambda params, tokens, is_token: model.apply({"params": params}, tokens, segment_ids=is_token)[0])


def logits_of(mixers, sequences, length=256):
    """The logits of whole sequences, [rows, length, V], in one forward pass."""
    tokens, is_token = np.zeros((2, len(sequences), length), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)], is_token[row, : len(sequence)] = sequence, 1
    return np.asarray(whole_forward(mixers)(trained(mixers)[1], tokens, is_token))


def prompts_of(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(VOCAB_SIZE, size=length).tolist() for length in lengths]


# The other cells differ from these in what comes before the state.
OFTEN = ("interdomain", "s4d", "softmax")
EVERY = [pytest.param((name,), marks=[] if name in OFTEN else [pytest.mark.slow], id=name) for name in MIXERS]


@pytest.mark.parametrize("mixers", [*EVERY, pytest.param(("interdomain", "softmax"), id="hybrid")])
def test_greedy_tokens_are_the_most_likely_of_whole_forward_passes(mixers):
    """200 of them, behind prompts of a token, and of a chunk and less, more and several (mlxcel#1749)."""
    prompts = prompts_of(1, CHUNK - 1, CHUNK + 1, 5 * CHUNK // 2)
    completions = generator(mixers).generate([Request(prompt, 200) for prompt in prompts])
    sequences = [prompt + completion.tokens for prompt, completion in zip(prompts, completions, strict=True)]
    logits = logits_of(mixers, sequences)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        # What precedes a token is the same in the pass over the whole as in one over what there was by then.
        own = logits[row, len(prompt) - 1 : len(prompt) + 199]
        assert completion.tokens == own.argmax(axis=-1).tolist()
        assert completion.finish_reason == "length"
        expected = np.max(jax.nn.log_softmax(own), axis=-1)
        np.testing.assert_allclose(completion.log_probabilities, expected, rtol=1e-4, atol=1e-4)


def test_layers_that_are_not_scanned_generate_the_same():
    prompts = prompts_of(3, 20)
    requests = [Request(prompt, 30) for prompt in prompts]
    apart = generator(scan_layers=False).generate(requests)
    assert [each.tokens for each in apart] == [each.tokens for each in generator().generate(requests)]


def random_requests(count, seed=0):
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        sampling = Sampling(
            temperature=float(rng.choice([0.0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 3, 10])),
            top_p=float(rng.choice([1.0, 0.8])),
            min_p=float(rng.choice([0.0, 0.05])),
            repetition_penalty=float(rng.choice([1.0, 1.2])),
        )
        prompt = rng.integers(VOCAB_SIZE, size=rng.integers(1, 40)).tolist()
        lengths = rng.integers(1, 3, size=rng.integers(0, 3))
        stop = tuple(tuple(rng.integers(VOCAB_SIZE, size=length).tolist()) for length in lengths)
        requests.append(Request(prompt, int(rng.integers(1, 30)), sampling, number, stop))
    return requests


@pytest.mark.parametrize("mixers", [("interdomain",), ("softmax",)], ids="-".join)
def test_company_changes_nothing(mixers):
    """tpu-inference#2752: padding a batch corrupted the last row. 200 requests, in groups of any size and alone."""
    requests = random_requests(200)
    own = generator(mixers)
    alone = [own.generate([request])[0] for request in requests]
    programs = own._decode._cache_size(), own._read._cache_size()
    rng = np.random.default_rng(1)
    order = rng.permutation(len(requests))
    start, held = 0, len(jax.live_arrays())
    while start < len(order):
        group = order[start : start + rng.integers(1, ROWS + 1)]
        for number, completion in zip(group, own.generate([requests[n] for n in group]), strict=True):
            expected = alone[number]
            assert completion.tokens == expected.tokens, number
            assert completion.finish_reason == expected.finish_reason
            np.testing.assert_allclose(completion.log_probabilities, expected.log_probabilities, rtol=1e-4, atol=1e-4)
        start += len(group)
    assert len(jax.live_arrays()) <= held
    assert {completion.finish_reason for completion in alone} == {"stop", "length"}
    # Buckets of lengths: of prompts 1 to 40 tokens, completions of 1 to 29, stop sequences of none to two.
    assert max(own._read._cache_size(), programs[1]) <= 3
    assert own._decode._cache_size() <= 2 * 2 * 2 * 2


@pytest.mark.parametrize("mixers", [("interdomain",), ("softmax",)], ids="-".join)
def test_a_request_ends_when_enough_is_told(mixers):
    """The others go on as if nothing had been."""
    requests = [Request(prompt, 40, seed=number) for number, prompt in enumerate(prompts_of(3, 5, 9))]
    whole = generator(mixers).generate(requests)
    told = {number: [] for number in range(len(requests))}

    def on_tokens(number, tokens):
        told[number] += tokens
        return number == 1 and len(told[1]) >= 10

    ended = generator(mixers).generate(requests, on_tokens=on_tokens, stream_every=4)
    assert [each.finish_reason for each in ended] == ["length", "stop", "length"]
    # One token, and then four at a time.
    assert ended[1].tokens == told[1] == whole[1].tokens[:13]
    assert [ended[0], ended[2]] == [whole[0], whole[2]]
    assert (told[0], told[2]) == (whole[0].tokens, whole[2].tokens)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_sequence_ends_the_text_where_it_first_occurs(length):
    (prompt,) = prompts_of(7)
    sampling = Sampling(temperature=1.5)
    (whole,) = generator().generate([Request(prompt, 60, sampling)])
    stop = tuple(whole.tokens[20 : 20 + length])
    first = next(n for n in range(60) if tuple(whole.tokens[n : n + length]) == stop)
    (stopped,) = generator().generate([Request(prompt, 60, sampling, stop=(stop, (VOCAB_SIZE - 1,) * 3))])
    assert stopped.tokens == whole.tokens[:first]
    assert stopped.log_probabilities == whole.log_probabilities[:first]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("stream_every", [1, 5, 64])
def test_what_is_streamed_is_what_is_returned(stream_every):
    """No token is taken back: those that may begin a stop sequence wait."""
    prompts = prompts_of(5, 9, 30)
    (plain,) = generator().generate([Request(prompts[0], 40, Sampling(temperature=1.5), seed=3)])
    stop = tuple(plain.tokens[30:33])
    requests = [Request(prompt, 40, Sampling(temperature=1.5), seed=3, stop=(stop,)) for prompt in prompts]
    expected = generator().generate(requests)
    programs = generator()._decode._cache_size()
    streamed = {row: [] for row in range(3)}
    calls = []

    def on_tokens(row, tokens):
        assert tokens
        calls.append(row)
        streamed[row] += tokens

    completions = generator().generate(requests, on_tokens=on_tokens, stream_every=stream_every)
    assert [streamed[row] for row in range(3)] == [completion.tokens for completion in completions]
    assert completions == expected
    # One program, into however many calls its steps are cut.
    assert generator()._decode._cache_size() == programs
    assert completions[0].finish_reason == "stop"
    assert len(calls) >= (3 if stream_every == 64 else 40 // stream_every)


@pytest.mark.parametrize("mixers", [("interdomain",), ("s4d",), ("softmax",)], ids="-".join)
def test_a_text_read_once_is_asked_many_times(mixers):
    """Forked and gone on from, it gives what whole prompts give."""
    text, *questions = prompts_of(50, 3, 5, 17, 1)
    own = generator(mixers)
    requests = [Request(text + question, 20, Sampling(temperature=1.0), seed=n) for n, question in enumerate(questions)]
    expected = own.generate(requests)
    read = own.read([text])
    for _ in range(2):
        forked = own.read(questions, own.fork(read, [0, 0, 0, 0]))
        completions, after = own.go_on(forked, requests)
        assert [completion.tokens for completion in completions] == [completion.tokens for completion in expected]
    assert after.length.tolist() == [50 + len(question) + 20 for question in questions]
    # And behind what was generated.
    more, _ = own.go_on(after, [request._replace(max_new_tokens=5, seed=9) for request in requests])
    again = own.generate(
        [
            Request(text + question + completion.tokens, 5, Sampling(temperature=1.0), seed=9)
            for question, completion in zip(questions, expected, strict=True)
        ]
    )
    assert [completion.tokens for completion in more] == [completion.tokens for completion in again]


def test_a_recurrent_state_has_one_size_and_takes_any_length():
    own = generator()
    short, long = own.read(prompts_of(3)), own.read(prompts_of(1000))
    assert short.bytes == long.bytes
    (completion,) = own.generate([Request(prompts_of(1000)[0], 400)])
    assert len(completion.tokens) == 400


BAD = [
    (Request([1, 2], 0), "request 1: max_new_tokens is 0; it must be at least 1"),
    (Request([], 3), "request 1: prompt is empty"),
    (Request([40], 3), "request 1: token 40 is not in the vocabulary of 40 ids"),
    (Request([1], 3, stop=((),)), "request 1: stop has an empty sequence"),
    (Request([1], 3, stop=((-1,),)), "request 1: token -1 is not in the vocabulary"),
    (Request([1], 3, seed=-1), "request 1: seed is -1"),
    (Request([1], 3, Sampling(top_p=2.0)), "request 1: top_p is 2.0"),
    (Request([1] * 290, 11), "request 1: 290 tokens and 11 to generate are 301; max_length is 300"),
]


@pytest.mark.parametrize(("request_", "named"), BAD)
def test_a_request_that_cannot_be_served_is_refused_before_any_work(request_, named, monkeypatch):
    own = generator(("softmax",))
    monkeypatch.setattr(own, "_read", None)
    with pytest.raises(ValueError) as raised:
        own.generate([Request([1], 3), request_])
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


def test_bad_settings_of_a_generator():
    model, params = trained(("interdomain",))
    mesh = sharding.make_mesh(sharding.mesh_config(), jax.devices()[:1])
    for options, named in (
        (dict(batch_size=0, max_length=10), "batch_size is 0"),
        (dict(batch_size=1, max_length=10, chunk_size=24), "chunk_size is 24; it must be a power of two"),
    ):
        with pytest.raises(ValueError, match=named):
            Generator(model, params, mesh, **options)
    with pytest.raises(ValueError, match=r"mesh.seq is 2; tokens that come one by one cannot be split"):
        Generator(model, params, AbstractMesh((1, 1, 1, 2), sharding.AXES), batch_size=1, max_length=10)
    with pytest.raises(ValueError, match="5 rows are given; the batch has 4"):
        generator().read(prompts_of(1, 1, 1, 1, 1))


def test_states_that_do_not_fit_are_refused():
    own = generator()
    state = own.read(prompts_of(3))
    for rows, said in (([4], r"rows are \[4\]"), ([-1], r"rows are \[-1\]"), ([], r"rows are \[\]")):
        with pytest.raises(ValueError, match=f"{said}; they must be among the 4 of the state, counted from 0"):
            own.fork(state, rows)
    one = jax.tree.map(lambda leaf: leaf[:1], state)
    with pytest.raises(ValueError, match="the state has 1 rows; the batch has 4: fork it"):
        own.read(prompts_of(2), one)
    with pytest.raises(ValueError, match="the state has 1 rows"):
        own.go_on(one, [Request((), 3)])
    with pytest.raises(ValueError, match="stream_every is 0; it must be at least 1"):
        own.go_on(state, [Request((), 3)], stream_every=0)
    long = generator(("softmax",)).read(prompts_of(10))._replace(length=np.array([301, 0, 0, 0]))
    with pytest.raises(ValueError, match="max_length is 300"):
        generator(("softmax",)).fork(long, [0])
