"""`generate.py`, as a user calls it, on a model that was not trained: its choices are as good as any for this."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from configs import tiny
from interdomain_jax import checkpoints
from interdomain_jax import workdir as workdirs
from interdomain_jax.experiment import build_experiment
from interdomain_jax.export.runs import export_run
from interdomain_jax.inference import Generator, Request
from interdomain_jax.inference.texts import TextStream, prompt_ids
from interdomain_jax.trained import find_trained
from tests.quick import quick_environment

ROOT = Path(__file__).parents[2]
ONE = dict(data=1, fsdp=1, tensor=1, seq=1)


def untrained(directory, mixer):
    config = tiny.get_config(mixer)
    config.update_from_flattened_dict(
        {"model.d_model": 16, "model.num_layers": 1, "model.num_heads": 2, "model.head_dim": 8, "model.init_std": 0.3}
    )
    workdirs.save_config(epath.Path(directory), config)
    model, _ = build_experiment(config)
    params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    with checkpoints.open_checkpoints(epath.Path(directory)) as opened:
        checkpoints.save(opened, 5, {checkpoints.PARAMS_ITEM: params}, {})
    return directory


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return untrained(tmp_path_factory.mktemp("run"), "interdomain")


@pytest.fixture(scope="module")
def softmax_workdir(tmp_path_factory):
    return untrained(tmp_path_factory.mktemp("softmax"), "softmax")


def generate(workdir, *flags, stdin=""):
    command = [sys.executable, "generate.py", *([f"--workdir={workdir}"] if workdir else []), *flags]
    return subprocess.run(command, cwd=ROOT, env=quick_environment(), input=stdin, capture_output=True, text=True)


def expected_text(workdir, prompt, count):
    """What the library makes of it."""
    trained = find_trained(workdir, ONE, "latest")
    own = Generator(trained.model, trained.restore_params(), trained.mesh, batch_size=1, max_length=200)
    ids = prompt_ids(trained.tokenizer, prompt)
    (completion,) = own.generate([Request(ids, count, stop=((256,),))])
    stream = TextStream(trained.tokenizer, ids)
    return stream.push(completion.tokens) + stream.finish()


def test_a_prompt(workdir):
    done = generate(workdir, "--prompt=def f", "--max_new_tokens=30")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"def f{expected_text(workdir, 'def f', 30)}\n"
    assert "tokens/s" in done.stderr
    assert "the first after" in done.stderr


def test_an_exported_model(workdir, tmp_path):
    export_run(workdir, str(tmp_path / "model"))
    done = generate(None, f"--input={tmp_path / 'model'}", "--tokenizer=bytes", "--prompt=def f", "--max_new_tokens=30")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"def f{expected_text(workdir, 'def f', 30)}\n"


def test_a_file_of_prompts_and_several_samples(workdir, tmp_path):
    prompts = ["a", "import os", "é"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    flags = [
        f"--prompts={tmp_path / 'prompts.jsonl'}",
        "--samples=2",
        "--temperature=1.0",
        "--max_new_tokens=10",
        f"--output={tmp_path / 'out.jsonl'}",
    ]
    done = generate(workdir, *flags)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [prompt for prompt in prompts for _ in range(2)]
    assert [row["seed"] for row in rows] == list(range(6))
    assert all(len(row["tokens"]) == len(row["log_probabilities"]) <= 10 for row in rows)
    assert rows[0]["tokens"] != rows[1]["tokens"]
    # In smaller batches, the same.
    again = generate(workdir, *flags, "--batch_size=4")
    assert again.returncode == 0, again.stderr
    assert [json.loads(line)["tokens"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        row["tokens"] for row in rows
    ]


def test_standard_input(softmax_workdir):
    done = generate(softmax_workdir, "--prompts=-", "--max_new_tokens=8", stdin="one\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"one{expected_text(softmax_workdir, 'one', 8)}\n\ntwo")


def test_lines_that_are_typed(workdir):
    done = generate(workdir, "--interactive", "--max_new_tokens=8", stdin="one\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert f"> {expected_text(workdir, 'one', 8)}\n" in done.stdout
    assert done.stderr.count("the state has") == 2


def test_a_conversation_behind_a_prompt(workdir):
    said = "one\ntwo\n"
    done = generate(workdir, "--interactive", "--prompt=one", "--max_new_tokens=8", stdin="two\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"> {expected_text(workdir, said, 8)}\n> \n"


def test_a_text_read_once(softmax_workdir, tmp_path):
    """And asked twice; the cache of the state has room for 16 tokens."""
    file = tmp_path / "text.state"
    done = generate(softmax_workdir, "--prompt=one", f"--save_state={file}", "--max_new_tokens=1")
    assert done.returncode == 0, done.stderr
    assert "4 tokens read; the state has 0." in done.stderr
    done = generate(softmax_workdir, f"--state={file}", "--prompt=two", "--prompt= more", "--max_new_tokens=40")
    assert done.returncode == 0, done.stderr
    texts = [f"{prompt}{expected_text(softmax_workdir, f'one{prompt}', 40)}\n\n" for prompt in ("two", " more")]
    assert done.stdout == "".join(texts)


BAD_INPUT = [
    (["--prompt=a", "--prompt=b", "--save_state=x"], "--save_state saves the state behind one --prompt"),
    (["--prompt=a", "--state=missing"], "missing does not exist"),
    (["--prompt=a", "--save_state=README.md/x"], "README.md is a file"),
    (["--prompt=a", "--output=README.md/out.jsonl"], "README.md is a file"),
    (["--prompt=a", "--save_state=x", "--output=y"], "--save_state generates nothing that --output could hold"),
    (["--prompt=a", "--state_storage=bfloat16"], "--state_storage says how --save_state writes; give that too"),
    (["--interactive", "--top_p=2"], "top_p is 2.0"),
    ([], "there is no prompt: give --prompt, --prompts or --interactive"),
    (["--prompt=a", "--temperature=-1"], "temperature is -1.0; it must be at least 0"),
    (["--prompt=a", "--chunk_size=100"], "chunk_size is 100; it must be a power of two"),
    (["--prompts=missing.jsonl"], "--prompts=missing.jsonl does not exist"),
    (["--interactive", "--prompt=a", "--prompt=b"], "--interactive goes on behind one --prompt at most"),
    (["--interactive", "--prompts=-"], "--interactive goes on behind one --prompt at most, and takes no --prompts"),
    (["--prompt=a", "--input=model"], "give one of --workdir, the directory of a run, and --input"),
    (["--prompt=a", "--tokenizer=bytes"], "--input and --tokenizer go together"),
    (["--prompt=a", "--checkpoint=7"], "holds no checkpoint of step 7"),
]
# Each would take a process seconds to start.
IN_ONE_PROCESS = """
import json, sys
from absl.testing import flagsaver
import generate
from interdomain_jax import cli

for arguments in json.loads(sys.argv[1]):
    with flagsaver.flagsaver():
        try:
            cli.parse_flags(["generate.py", *arguments])
            generate.main([])
        except SystemExit as refused:
            print(json.dumps(refused.code))
        else:
            print(json.dumps("nothing is refused"))
"""


def test_bad_input_is_one_sentence(workdir):
    arguments = [[f"--workdir={workdir}", *flags] for flags, _ in BAD_INPUT]
    command = [sys.executable, "-c", IN_ONE_PROCESS, json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, env=quick_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    for (_, named), sentence in zip(BAD_INPUT, said, strict=True):
        assert named in sentence
        assert "\n" not in sentence


def test_an_exported_model_has_no_checkpoints():
    done = generate(None, "--input=model", "--tokenizer=bytes", "--checkpoint=best", "--prompt=a")
    assert done.returncode == 1
    assert done.stderr == (
        "generate.py: --checkpoint chooses among those of a run; --input has one set of parameters\n"
    )


def test_a_completion_that_does_not_fit_is_refused(softmax_workdir):
    done = generate(softmax_workdir, "--prompt=abc", "--max_new_tokens=20", "--max_length=23")
    assert done.returncode == 1
    assert "request 0: 4 tokens and 20 to generate are 24; max_length is 23" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
