"""The adapter for lm-evaluation-harness: the harness itself as the judge, and a plain scorer of one row at a time."""

import itertools
import json
import math
import socket
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import lm_eval
import numpy as np
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from interdomain_jax.data.tokenizers import load_tokenizer
from interdomain_jax.evaluation.harness import InterdomainLM, _encode_pair
from interdomain_jax.evaluation.likelihoods import Continuation, continuation_likelihoods
from interdomain_jax.trained import find_trained
from tests.evaluation.untrained import begin_run, save_params
from tests.network import network_raises
from tests.virtual_devices import run_on_eight_devices

pytestmark = pytest.mark.usefixtures("quick_programs")

ONE = dict(data=1, fsdp=1, tensor=1, seq=1)
WINDOW = 24
EOS = 256
MIXERS = ("interdomain", "softmax")


@pytest.fixture(scope="module", autouse=True)
def no_network():
    with pytest.MonkeyPatch.context() as patch:
        # So that they are put back.
        for owner, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket, "getaddrinfo")):
            patch.setattr(owner, name, getattr(owner, name))
        exec(network_raises("OSError"), {})
        yield


def untrained(directory, mixer):
    # The devices share the columns.
    fields = {"model.vocab_size": 264, "model.mlp_dim": 32, "model.init_std": 0.5, "data.sequence_length": WINDOW}
    params = begin_run(directory, mixer, fields)
    # What it generates is ASCII, so that every token is a character.
    params["unembed"]["kernel"] = params["unembed"]["kernel"].at[:, 128:].multiply(0.1)
    save_params(directory, 5, params)
    save_params(directory, 6, jax.tree.map(lambda leaf: 0.9 * leaf, params))
    return str(directory)


class Run:
    """A run, and a scorer of one row at a time: the logits of the whole row, and NumPy."""

    def __init__(self, workdir):
        self.workdir = workdir
        self.trained = find_trained(workdir, ONE, "5", jax.devices()[:1])
        self.params = self.trained.restore_params()
        self._forward = jax.jit(lambda params, tokens: self.trained.model.apply({"params": params}, tokens)[0])
        self._models = {}

    def model(self, batch_size, **settings):
        key = batch_size, *settings.items()
        if key not in self._models:
            self._models[key] = InterdomainLM.of(self.trained, self.params, batch_size=batch_size, **settings)
        return self._models[key]

    def log_probabilities(self, ids):
        """[T, V], after each of the ids, of which there are as many as the window has at most."""
        tokens = np.zeros((1, WINDOW), np.int32)
        tokens[0, : len(ids)] = ids
        logits = np.asarray(self._forward(self.params, tokens), np.float64)[0, : len(ids)]
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    def likelihood(self, context, tokens):
        ids = [*context, *tokens][-(WINDOW + 1) :]
        own = self.log_probabilities(ids[:-1])[len(ids) - 1 - len(tokens) :]
        return own[np.arange(len(tokens)), list(tokens)].sum(), own.argmax(axis=-1).tolist() == list(tokens)

    def greedy(self, prompt, count):
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.log_probabilities(ids)[-1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return {mixer: Run(untrained(tmp_path_factory.mktemp(mixer), mixer)) for mixer in MIXERS}


@pytest.fixture(params=MIXERS)
def run(runs, request):
    return runs[request.param]


def requests(kind, *arguments):
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def random_text(rng, length):
    return "".join(rng.choice(list("abcdefgh .\n"), size=length))


def pairs(run, count=21):
    """Of mixed lengths, to beyond the window; some continuations are what the model itself would go on with."""
    rng = np.random.default_rng(0)
    lengths = [(0, 1), (0, WINDOW), (3, 0), (WINDOW, 1), (3 * WINDOW, 5), (1, WINDOW - 1), (WINDOW, WINDOW)]
    lengths += [(rng.integers(0, 30), rng.integers(1, 12)) for _ in range(count - len(lengths))]
    made = [(random_text(rng, context).rstrip(), random_text(rng, length)) for context, length in lengths]
    is_plain = lambda token: 32 < token < 127
    likely = {
        start: bytes(itertools.takewhile(is_plain, run.greedy([EOS, *start.encode()], 6))).decode()
        for start in "abcdefgh"
    }
    start = max(likely, key=lambda start: len(likely[start]))
    return [*made, (start, likely[start]), (start, f"{likely[start]}?"), (start, likely[start][:1])]


def ids_of(text):
    return list(text.encode())


# All of them with the mixer that compiles fastest.
BATCH_SIZES = [
    pytest.param(mixer, size, marks=[] if mixer == "softmax" or size in (1, 3, 8) else [pytest.mark.slow])
    for mixer in MIXERS
    for size in range(1, 9)
]


@pytest.mark.parametrize(("mixer", "batch_size"), BATCH_SIZES)
def test_a_plain_scorer_agrees_at_every_batch_size(runs, mixer, batch_size):
    """lm-eval#704: scores changed with the batch."""
    run = runs[mixer]
    texts = pairs(run)
    expected = [run.likelihood([EOS, *ids_of(context)], ids_of(text)) for context, text in texts]
    assert {is_greedy for _, is_greedy in expected} == {True, False}
    model = run.model(batch_size)
    actual = model.loglikelihood(requests("loglikelihood", *texts), disable_tqdm=True)
    assert [is_greedy for _, is_greedy in actual] == [is_greedy for _, is_greedy in expected]
    np.testing.assert_allclose([each for each, _ in actual], [each for each, _ in expected], rtol=1e-5, atol=1e-5)
    # Rows of up to 16 tokens and of the whole window.
    assert model._score._cache_size() == 2


def rolling_by_hand(run, tokens):
    """Windows of the model, each with as many new tokens as fit."""
    if len(tokens) <= WINDOW:
        return run.likelihood([EOS], tokens)[0]
    total, start = run.likelihood([EOS], tokens[:WINDOW])[0], WINDOW
    while start < len(tokens):
        end = min(start + WINDOW, len(tokens))
        total += run.likelihood(tokens[end - WINDOW - 1 : start], tokens[start:end])[0]
        start = end
    return total


ROLLING_LENGTHS = (0, 1, WINDOW - 1, WINDOW, WINDOW + 1, int(3.7 * WINDOW))


def test_rolling_likelihood_scores_every_token_once(run):
    """lm-eval#339: sliding windows scored tokens twice or never."""
    rng = np.random.default_rng(1)
    texts = [random_text(rng, length) for length in ROLLING_LENGTHS]
    rolling = requests("loglikelihood_rolling", *[(text,) for text in texts])
    actual = run.model(3).loglikelihood_rolling(rolling, disable_tqdm=True)
    expected = [rolling_by_hand(run, ids_of(text)) if text else 0.0 for text in texts]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_knows_nothing_gives_each_token_the_same(runs):
    """lm-eval#339, lighteval#1252: counted by their likelihood, 1/264 each."""
    run = runs["interdomain"]
    params = run.params | {"unembed": jax.tree.map(jnp.zeros_like, run.params["unembed"])}
    model = InterdomainLM.of(run.trained, params, batch_size=3)
    each = -math.log(264)
    rolling = requests("loglikelihood_rolling", *[("a" * length,) for length in ROLLING_LENGTHS])
    counts = np.array(model.loglikelihood_rolling(rolling, disable_tqdm=True)) / each
    np.testing.assert_allclose(counts, ROLLING_LENGTHS, rtol=1e-6)
    long = requests("loglikelihood", ("ab", "c" * 60))
    assert model.loglikelihood(long, disable_tqdm=True)[0][0] == pytest.approx(60 * each, rel=1e-6)


MISTRAL = load_tokenizer("mistral")


@given(context=st.text("ab \nThe", max_size=12), continuation=st.text("ab \nThe", max_size=8))
@example("The cap", "ital")
@example("Question: ", " yes")
def test_pairs_are_cut_as_the_harness_cuts_them(context, continuation):
    """lm-eval#4055: a continuation that adds no token of its own is scored all the same."""
    (prefix, *before), tokens = _encode_pair(MISTRAL, 1, context, continuation)
    assert prefix == 1
    if context:
        plain = SimpleNamespace(backend="causal", tok_encode=lambda text: MISTRAL.encode(text).tolist())
        expected_before, expected = TemplateLM._encode_pair(plain, context, continuation)
        assert before == expected_before
        assert tokens == expected or not expected
    assert tokens or not (continuation or context != context.rstrip())


def test_a_continuation_within_the_last_token_of_its_context():
    """lm-eval#4055."""
    whole = MISTRAL.encode("capital").tolist()
    assert len(whole) == len(MISTRAL.encode("capit").tolist()) == 1
    assert _encode_pair(MISTRAL, 1, "capit", "al") == ([1, *MISTRAL.encode("capit")], MISTRAL.encode("al").tolist())


def test_the_prefix_token_is_explicit(runs):
    """lm-eval#1471: it changed results, and nobody could see it."""
    run = runs["softmax"]
    own, other = run.model(3), run.model(3, prefix_token=65)
    assert own.get_model_info()["prefix_token"] == EOS
    assert other.get_model_info()["prefix_token"] == 65
    json.dumps(other.get_model_info(), allow_nan=False)
    for model, prefix in ((own, EOS), (other, 65)):
        for context in ("", "ab"):
            ((actual, _),) = model.loglikelihood(requests("loglikelihood", (context, "cd")), disable_tqdm=True)
            expected, _ = run.likelihood([prefix, *ids_of(context)], ids_of("cd"))
            assert actual == pytest.approx(expected, abs=1e-5)


def test_generated_texts_are_the_greedy_ones(run):
    rng = np.random.default_rng(2)
    contexts = [random_text(rng, length) for length in (0, 1, 5, 9, 40, 3)]
    generate = requests("generate_until", *[(context, {"max_gen_toks": 10}) for context in contexts])
    actual = run.model(3).generate_until(generate, disable_tqdm=True)
    for context, text in zip(contexts, actual, strict=True):
        # Room for ten more, and cut from the left.
        expected = run.greedy([EOS, *ids_of(context)][-(WINDOW - 10) :], 10)
        expected = list(itertools.takewhile(lambda token: token != EOS, expected))
        assert text == run.trained.tokenizer.decode([token for token in expected if token < EOS])


def test_until(runs):
    """Wherever its tokens begin and end, and not beyond what was asked for."""
    model = runs["interdomain"].model(3)
    generate = lambda *until: model.generate_until(
        requests("generate_until", *[("ab", {"max_gen_toks": 12, "until": each}) for each in until]), disable_tqdm=True
    )
    (whole,) = generate([])
    assert len(whole) == 12
    stops = [whole[3:5], [whole[6:8], "never"], "", "never", whole[0]]
    assert generate(*stops) == [
        whole[: whole.find(whole[3:5])],
        whole[: whole.find(whole[6:8])],
        whole,
        whole,
        "",
    ]


def test_drawn_texts_do_not_depend_on_their_company(runs):
    run = runs["softmax"]
    drawn = {"max_gen_toks": 8, "do_sample": True, "temperature": 1.5}
    many = requests("generate_until", ("ab", drawn), ("cd", drawn), ("ab", drawn), ("ab", {"max_gen_toks": 3}))
    texts = run.model(3).generate_until(many, disable_tqdm=True)
    assert texts[0] != texts[2]
    alone = run.model(1).generate_until(many[1:3], disable_tqdm=True)
    assert alone == [texts[1], texts[0]]


def write_tasks(directory):
    """Three tasks in the harness's own form, with their data."""
    rng = np.random.default_rng(3)
    questions = [
        {"question": random_text(rng, length).strip(), "choices": [random_text(rng, n) for n in (1, 4, 9)], "answer": 1}
        for length in (2, 7, 15, 40)
    ]
    texts = [{"text": random_text(rng, length)} for length in ROLLING_LENGTHS[1:]]
    for name, rows in (("questions", questions), ("texts", texts)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = lambda name, data, **fields: {
        "task": f"local_{name}",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(directory / f"{data}.jsonl")},
            "cache_dir": str(directory / "cache"),
        },
        "test_split": "test",
        "output_type": name,
        **fields,
    }
    tasks = [
        task(
            "multiple_choice",
            "questions",
            doc_to_text="{{question}}",
            doc_to_choice="{{choices}}",
            doc_to_target="{{answer}}",
            metric_list=[{"metric": "acc"}],
        ),
        task("loglikelihood_rolling", "texts", doc_to_text="", doc_to_target="{{text}}"),
        task(
            "generate_until",
            "questions",
            doc_to_text="{{question}}",
            doc_to_target="{{choices[0]}}",
            generation_kwargs={"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
            metric_list=[{"metric": "exact_match"}],
        ),
    ]
    for each in tasks:
        (directory / f"{each['task']}.yaml").write_text(yaml.safe_dump(each))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Their directory."""
    directory = tmp_path_factory.mktemp("tasks")
    write_tasks(directory)
    return directory


TASKS = ["local_multiple_choice", "local_loglikelihood_rolling", "local_generate_until"]


def evaluate(model, tasks, names=TASKS, **settings):
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(model, tasks=names, task_manager=manager, bootstrap_iters=0, **settings)


def check_samples(run, samples):
    """The answers to the local tasks, against the plain scorer."""
    for sample in samples["local_multiple_choice"]:
        pairs = [ids_of(sample["doc"]["question"]), *(ids_of(f" {choice}") for choice in sample["doc"]["choices"])]
        expected = [run.likelihood([EOS, *pairs[0]], choice) for choice in pairs[1:]]
        actual = [(float(nats), str(is_greedy)) for ((nats, is_greedy),) in sample["resps"]]
        for (nats, is_greedy), (expected_nats, expected_greedy) in zip(actual, expected, strict=True):
            assert nats == pytest.approx(expected_nats, rel=1e-5, abs=1e-5)
            assert is_greedy == str(expected_greedy)
        assert sample["acc"] == (np.argmax([nats for nats, _ in actual]) == sample["doc"]["answer"])
    for sample in samples["local_loglikelihood_rolling"]:
        ((nats,),) = sample["resps"]
        assert float(nats) == pytest.approx(rolling_by_hand(run, ids_of(sample["doc"]["text"])), rel=1e-5, abs=1e-5)
    for sample in samples["local_generate_until"]:
        prompt = [EOS, *ids_of(sample["doc"]["question"])][-(WINDOW - 6) :]
        expected = list(itertools.takewhile(lambda token: token < EOS, run.greedy(prompt, 6)))
        assert sample["resps"] == [[bytes(expected).decode(errors="replace").partition("\n")[0]]]


def test_the_harness_runs_its_tasks(runs, tasks):
    run = runs["softmax"]
    arguments = {"workdir": run.workdir, "checkpoint": 5, "max_length": WINDOW, "data": -1}
    results = evaluate("interdomain", tasks, model_args=arguments, batch_size=3)
    check_samples(run, results["samples"])
    texts = [sample["doc"]["text"] for sample in results["samples"]["local_loglikelihood_rolling"]]
    nats = -sum(rolling_by_hand(run, ids_of(text)) for text in texts)
    measured = results["results"]["local_loglikelihood_rolling"]
    assert measured["bits_per_byte,none"] == pytest.approx(nats / sum(map(len, texts)) / math.log(2), rel=1e-5)
    config = results["config"]
    assert (config["model"], config["prefix_token"], config["max_length"], config["step"]) == (
        "interdomain",
        EOS,
        WINDOW,
        5,
    )


COMMAND = (
    network_raises("OSError")
    + """
import json, runpy, sys

workdir, pairs = sys.argv.pop(1), json.loads(sys.argv.pop(1))
runpy.run_module("interdomain_jax.evaluation.lm_eval", run_name="__main__")

from interdomain_jax.evaluation.harness import InterdomainLM
from tests.evaluation.test_harness import requests

model = InterdomainLM(workdir, "5", fsdp=2, seq=4)
print(json.dumps(model.loglikelihood(requests("loglikelihood", *map(tuple, pairs)), disable_tqdm=True)))
"""
)


def test_the_command_line_on_eight_devices(runs, tasks, tmp_path):
    """Without a network, and the numbers are those of one device."""
    run = runs["interdomain"]
    arguments = f"workdir={run.workdir},checkpoint=5,data=-1,fsdp=2,tensor=2"
    flags = ["--model", "interdomain", "--model_args", arguments, "--tasks", ",".join(TASKS), "--batch_size", "3"]
    flags += ["--include_path", str(tasks), "--output_path", str(tmp_path), "--log_samples"]
    texts = pairs(run)
    output = run_on_eight_devices(COMMAND, run.workdir, json.dumps(texts), *flags, quick=True)
    assert "local_multiple_choice" in output
    for (context, text), (nats, is_greedy) in zip(texts, json.loads(output.splitlines()[-1]), strict=True):
        expected, expected_greedy = run.likelihood([EOS, *ids_of(context)], ids_of(text))
        assert nats == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert is_greedy == expected_greedy
    samples = {}
    for name in TASKS:
        (path,) = tmp_path.rglob(f"samples_{name}_*")
        samples[name] = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(samples[name]) for name in TASKS] == [4, 5, 4]
    check_samples(run, samples)
    (path,) = tmp_path.rglob("results_*.json")
    config = json.loads(path.read_text())["config"]
    assert config["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2, "seq": 1}
    assert config["params_checksum"] == run.model(1).settings["params_checksum"]


class Interrupted(Exception):
    pass


def interrupted_after(score, count):
    """The scorer, which ends all so many batches later."""
    left = iter(range(count))

    def wrapped(*arguments):
        if next(left, None) is None:
            raise Interrupted
        return score(*arguments)

    return wrapped


def test_answers_are_cached_and_an_interrupted_evaluation_goes_on(runs, tasks, tmp_path):
    run = runs["softmax"]
    use_cache = str(tmp_path / "answers")

    def fresh(**settings):
        model = InterdomainLM.of(run.trained, run.params, batch_size=3, **settings)
        model._score, model._generator = run.model(3)._score, run.model(3)._generator
        return model

    expected = evaluate(run.model(3), tasks)["results"]
    model = fresh()
    model._score = interrupted_after(model._score, 2)
    with pytest.raises(Interrupted):
        evaluate(model, tasks, use_cache=use_cache)
    model = fresh()
    # The choices, 7 of them in long rows and 5 in short ones, are 5 batches; one of them had been scored and told.
    model._score = interrupted_after(model._score, 4)
    multiple_choice = TASKS[:1]
    assert evaluate(model, tasks, multiple_choice, use_cache=use_cache)["results"] == {
        name: pytest.approx(expected[name], nan_ok=True) for name in multiple_choice
    }
    evaluate(fresh(), tasks, use_cache=use_cache)
    # Nothing is left to do.
    model = fresh()
    model._score = model._generate = interrupted_after(None, 0)
    again = evaluate(model, tasks, use_cache=use_cache)["results"]
    for name in TASKS:
        for metric, value in expected[name].items():
            assert again[name][metric] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)
    for other in (
        fresh(prefix_token=65),
        fresh(max_length=WINDOW + 1),
        InterdomainLM(run.workdir, "6"),
    ):
        with pytest.raises(ValueError, match="holds answers of another checkpoint"):
            evaluate(other, tasks, use_cache=use_cache)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": "auto:4"}, "batch_size is 'auto:4'"),
        ({"max_length": 0}, "max_length is 0"),
        ({"prefix_token": 264}, "prefix_token is 264"),
        ({"checkpoint": "7"}, "7"),
        ({"tokens": 4}, "no argument 'tokens'"),
        ({"data": 3}, "mesh is data=3"),
    ],
)
def test_bad_arguments_are_refused(runs, arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        InterdomainLM(runs["softmax"].workdir, **arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_gen_toks": WINDOW}, f"max_gen_toks is {WINDOW}"),
        ({"max_gen_toks": 4, "num_beams": 2}, "setting num_beams"),
        ({"max_gen_toks": 4, "length_penalty": 2}, "setting length_penalty"),
    ],
)
def test_bad_generation_settings_are_refused(runs, settings, message):
    with pytest.raises(ValueError, match=message):
        runs["softmax"].model(3).generate_until(requests("generate_until", ("a", settings)))


def test_automatic_batches_have_the_tokens_of_a_training_step(runs):
    trained = runs["softmax"].trained
    rows = trained.config.data.batch_size
    assert InterdomainLM.of(trained, None, batch_size="auto").batch_size == rows
    assert InterdomainLM.of(trained, None, batch_size="auto", max_length=2 * WINDOW).batch_size == rows // 2
    assert InterdomainLM.of(trained, None, batch_size="5").batch_size == 5


@pytest.mark.parametrize(
    ("continuation", "message"),
    [
        (Continuation([], [1]), "continuation 1 has no context"),
        (Continuation([1] * 20, [1] * (WINDOW - 18)), f"20 tokens of context and {WINDOW - 18} of its own"),
    ],
)
def test_continuations_that_cannot_be_scored_are_refused(runs, continuation, message):
    mesh = runs["softmax"].trained.mesh
    both = [Continuation([1], [1]), continuation]
    with pytest.raises(ValueError, match=message):
        list(continuation_likelihoods(None, None, both, mesh, batch_size=1, max_length=WINDOW))
