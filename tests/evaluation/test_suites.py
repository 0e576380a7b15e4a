"""Named suites: their metrics by hand, their data from local files, and each of them from end to end."""

import contextlib
import json
import math
import re
import socket
import subprocess
import sys
from pathlib import Path

import datasets
import jax
import pytest
from etils import epath
from lm_eval import evaluate
from lm_eval.api.model import LM

from interdomain_jax import cli
from interdomain_jax import workdir as workdirs
from interdomain_jax.evaluation import harness, likelihoods, suites
from interdomain_jax.evaluation.records import read_records
from tests.evaluation.suite_rows import ROWS, write_rows
from tests.evaluation.untrained import begin_run, save_params
from tests.network import network_raises
from tests.quick import quick_environment

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("quick_programs")

ONE = dict(data=1, fsdp=1, tensor=1, seq=1)
EOS = 256


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """The `datasets` library keeps what it has read here, and nothing is had from the network."""

    def refuse(*_, **__):
        raise AssertionError("the network was called")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    directory = epath.Path(tmp_path_factory.mktemp("run"))
    save_params(directory, 5, begin_run(directory))
    return directory


class Scripted(LM):
    """Says what it was told to: a text for each prompt, or a log-likelihood for each continuation."""

    def __init__(self, answers):
        super().__init__()
        self.answers = iter(answers)

    def _answer(self, requests):
        return [next(self.answers) for _ in requests]

    loglikelihood = loglikelihood_rolling = generate_until = _answer


def measured(name, data, answers):
    """What a benchmark measures of these answers to its rows, by metric."""
    (source,) = [each for suite in suites.SUITES for key, each in suites.sources(suite).items() if key == name][:1]
    task = suites.load_benchmark("test", name, source, data)
    results = evaluate(Scripted(answers), {"tasks": {task.config.task: task}}, bootstrap_iters=0)
    return {each.metric: each for each in suites.measure(name, results)}


def test_lambada_by_hand(data):
    """ " lamp", " dog" and " café" have 15 bytes; exact match means that all tokens are the greedy choice."""
    found = measured("lambada", data, [(-1.0, True), (-2.0, False), (-3.0, True)])
    assert found["accuracy"].value == pytest.approx(2 / 3)
    assert found["perplexity"].value == pytest.approx(math.exp(2))
    assert found["bits_per_byte"].value == pytest.approx(6 / math.log(2) / 15)
    # The log-likelihoods have the standard deviation 1.
    assert found["perplexity"].error == pytest.approx(math.exp(2) / math.sqrt(3))
    assert found["accuracy"].samples == 3


def test_hellaswag_by_hand(data):
    """The right endings are the first of 25 characters, and the third of 16; normalised, each counts by its length."""
    first = [(-5.0, False), (-4.5, False), (-9.0, False), (-9.0, False)]
    second = [(-9.0, False), (-9.0, False), (-3.0, False), (-8.0, False)]
    found = measured("hellaswag", data, first + second)
    # -5 / 25 beats -4.5 / 15; -4.5 beats -5.
    assert found["accuracy_norm"].value == 1
    assert found["accuracy"].value == 0.5
    assert next(iter(found)) == "accuracy_norm"


def test_wikitext_by_hand(data):
    """Perplexity by word and by byte of the page as it is on the hub, spaces at both ends and all."""
    pages = [row["page"] for row in ROWS["EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test"]]
    nats, words, size = 70.0, sum(len(page.split()) + 2 for page in pages), sum(len(page) for page in pages)
    found = measured("wikitext2", data, [-40.0, -30.0])
    assert found["perplexity"].value == pytest.approx(math.exp(nats / words))
    assert found["byte_perplexity"].value == pytest.approx(math.exp(nats / size))
    assert found["bits_per_byte"].value == pytest.approx(nats / math.log(2) / size)


@pytest.mark.parametrize(
    ("name", "answers", "value"),
    [
        # Contains, in upper or lower case; a parenthesis is no pattern.
        ("swde", [" INES molnar, 1988", " 1989"], 0.5),
        ("fda", ["EAR PROBE", "two (2)"], 1.0),
        ("squad", [" June"], 0.0),
        ("nq", [" the year 1869 of"], 1.0),
        ("triviaqa", [" the BALTIC."], 1.0),
        ("drop", [" three"], 0.0),
        # F1 of words without articles and points: 1 of 2 and 1 of 1; the best over the right answers.
        ("longbench_narrativeqa", ["A bronze bell."], 2 / 3),
        ("longbench_qasper", ["Twelve!"], 1.0),
        ("longbench_hotpotqa", ["in the boat"], 0.0),
        # ROUGE-L: "will cost nine" is the longest common subsequence, 3 of 4 words and 3 of 6.
        ("longbench_qmsum", ["will cost about nine"], 0.6),
        # One of two classes named, the right one; both named.
        ("longbench_trec", [" Place"], 1.0),
        ("longbench_trec", [" Person or Place"], 0.5),
        # The first line of code, comments passed over: 2 x 29 of 29 + 35 characters, in whole percents.
        ("longbench_repobench-p", ["# so\n    return volume(side, side)"], 0.91),
    ],
)
def test_answers_by_hand(data, name, answers, value):
    (found,) = measured(name, data, answers).values()
    assert found.value == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("name", ["swde", "fda", "squad"])
def test_recall_tasks_equal_the_harness_own(data, name):
    """Those that the harness has as programs, which can be pointed at no file: the same requests, the same scores."""
    from lm_eval.tasks.fda.task import FDA
    from lm_eval.tasks.squad_completion.task import SQUADCompletion
    from lm_eval.tasks.swde.task import SWDE

    theirs = {"swde": SWDE, "fda": FDA, "squad": SQUADCompletion}[name]
    source = suites.sources("based-recall")[name]
    assert source.dataset == theirs.DATASET_PATH
    rows = datasets.Dataset.from_list(ROWS[tuple(source)])

    class Local(theirs):
        def download(self, *_, **__):
            self.dataset = {"validation": rows}

    local, ours = Local(), suites.load_benchmark("based-recall", name, source, data)
    for task in (local, ours):
        task.build_all_requests(limit=None, rank=0, world_size=1)
    for here, there in zip(ours.instances, local.instances, strict=True):
        (prompt, settings), (their_prompt, their_settings) = here.arguments, there.arguments
        assert prompt == their_prompt
        assert (settings["until"], settings["max_gen_toks"]) == (["\n"], 48)
        if name != "squad":
            # There the harness's defaults for other tasks, 256 tokens and an empty line, come before the task's own.
            assert (their_settings["until"], their_settings["max_gen_toks"]) == (["\n"], 48)
        for answer in (here.doc["value"].upper(), "nothing"):
            assert ours.process_results(here.doc, [answer]) == local.process_results(there.doc, [answer])


def test_the_mean_of_a_suite():
    one, other = suites.Measurement("a", "accuracy", 0.2, 100, error=0.03), suites.Measurement("b", "score", 0.6, 3)
    assert suites.mean_of("both", [one, other]) == suites.Measurement("both", "mean", pytest.approx(0.4), 103)
    mean = suites.mean_of("both", [one, other._replace(error=0.04)])
    assert mean.error == pytest.approx(0.025)


def test_every_suite_from_end_to_end(workdir, data, tmp_path):
    """By the command line, with no network. lm-eval#1471, the prefix token is recorded; lm-eval#934, strict JSON."""
    names = list(suites.SUITES)
    arguments = [f"--workdir={workdir}", f"--suite={','.join(names)}", f"--suite_data={data}", "--limit=2"]
    arguments += ["--max_length=1024", f"--prefix_token={EOS - 1}"]
    program = (
        network_raises("AssertionError")
        + f"""
import runpy, sys
sys.argv = ["eval.py", *{arguments!r}]
runpy.run_path("eval.py", run_name="__main__")
"""
    )
    environment = quick_environment() | {"HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in names:
        path = workdir / "evaluations" / f"{name}.json"
        json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    found = {record.name: record for record in read_records(workdir)}
    assert set(found) == set(names)
    for name, record in found.items():
        assert record.kind == "suite"
        assert record.settings["prefix_token"] == EOS - 1
        assert (record.settings["limit"], record.settings["num_fewshot"]) == (2, 0)
        headlines = [
            next(each for each in record.measurements if (each.task, each.metric) == (task, facts["headline"]))
            for task, facts in record.settings["benchmarks"].items()
        ]
        assert [each.task for each in headlines] == list(suites.SUITES[name])
        if len(headlines) > 1:
            mean = record.measurements[-1]
            assert (mean.task, mean.metric) == (name, "mean")
            assert mean.value == pytest.approx(sum(each.value for each in headlines) / len(headlines))
            assert 0 <= mean.value <= 1
        assert f"{name}: tiny (interdomain), step 5" in done.stdout
    assert "commonsense8, 2 of 8: piqa" in done.stderr


def asking(run, data, stop_after=math.inf, **settings):
    """Runs a suite, and counts the questions that the model is asked; after so many of them it is interrupted."""
    asked = []

    def count(*args, **kwargs):
        for each in likelihoods.continuation_likelihoods(*args, **kwargs):
            if len(asked) == stop_after:
                raise KeyboardInterrupt
            asked.append(each)
            yield each

    record = None
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(harness, "continuation_likelihoods", count)
        record = suites.evaluate(suites.prepare(run, ONE, suite="commonsense", data=data, limit=2, **settings))
    return record, len(asked)


def test_an_interrupted_suite_goes_on(workdir, data, tmp_path):
    """In the middle of a benchmark; and another prefix token makes other questions (lm-eval#1471)."""
    run = epath.Path(tmp_path / "run")
    workdirs.copy_files(workdir, run)
    stopped, before = asking(run, data, stop_after=9)
    assert stopped is None
    record, after = asking(run, data)
    other, every = asking(run, data, prefix_token=10)
    assert (before, before + after) == (9, every)
    assert (record.settings["prefix_token"], other.settings["prefix_token"]) == (EOS, 10)
    again, repeated = asking(run, data, batch_size=2)
    assert repeated == 0
    assert again.measurements == record.measurements


def test_missing_data_gives_the_command(workdir, data, tmp_path, monkeypatch, capsys):
    command = r"python -m interdomain_jax\.evaluation\.suite_data --suite=wikitext2 --output="
    with pytest.raises(FileNotFoundError, match=rf"EleutherAI/wikitext_document_level.*{command}{tmp_path}$"):
        suites.prepare(workdir, ONE, suite="wikitext2", data=tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=rf"EleutherAI/wikitext_document_level.*{command}DIRECTORY$"):
        suites.prepare(workdir, ONE, suite="wikitext2")
    with pytest.raises(SystemExit) as end, cli.exit_on_bad_input():
        suites.write_rows("wikitext2", suites.sources("wikitext2")["wikitext2"], str(tmp_path))
    assert re.search(command, end.value.code)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(suite="commonsense9"), "suite 'commonsense9' is unknown; known: commonsense8"),
        (dict(suite="lambada", limit=0), "limit"),
        (dict(suite="lambada", batch_size=0), "batch_size"),
        (dict(suite="lambada", prefix_token=257), "prefix_token"),
        (dict(suite="longbench14"), "longbench_gov_report asks for answers of 512 tokens, and max_length is 512"),
    ],
)
def test_bad_input_is_refused(workdir, data, settings, message):
    with pytest.raises(ValueError, match=message):
        suites.prepare(workdir, ONE, data=data, **settings)


def test_several_processes_are_refused(workdir, data, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="suite lambada runs in one process, and this run has 2 of them"):
        suites.prepare(workdir, ONE, suite="lambada", data=data)


@pytest.mark.parametrize("content", ["", "{", '{"sentence": "no text"}\n'])
def test_files_that_hold_something_else_are_named(workdir, data, tmp_path, content):
    path = suites.sources("lambada")["lambada"].path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"{path} does not hold rows of EleutherAI/lambada_openai"):
        suites.prepare(workdir, ONE, suite="lambada", data=tmp_path)


def test_data_sets_are_got_once(tmp_path, monkeypatch):
    """A directory of the data set's name stands for it on the hub."""
    source = suites.sources("lambada")["lambada"]
    hub = tmp_path / source.dataset / "test.jsonl"
    hub.parent.mkdir(parents=True)
    hub.write_text('{"text": "one café"}\n{"text": "two \\"words\\""}\n')
    monkeypatch.chdir(tmp_path)
    from_hub = suites.load_benchmark("lambada", "lambada", source, None)
    suites.write_rows("lambada", source, "got")
    hub.unlink()
    suites.write_rows("lambada", source, "got")
    assert source.path("got").read_text(encoding="utf-8") == '{"text":"one café"}\n{"text":"two \\"words\\""}\n'
    from_files = suites.load_benchmark("lambada", "lambada", source, "got")
    assert list(from_hub.eval_docs) == list(from_files.eval_docs) == [{"text": "one café"}, {"text": 'two "words"'}]
