"""From a run to an exported model and back to a run."""

import subprocess
import sys
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from configs import tiny
from interdomain_jax import checkpoints, sharding
from interdomain_jax import workdir as workdirs
from interdomain_jax.experiment import build_experiment
from interdomain_jax.export.llama_layout import write_llama
from interdomain_jax.export.runs import export_run, load_run
from interdomain_jax.export.safetensors_files import load_model, save_model
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.training import checkpoints as training_checkpoints
from interdomain_jax.training.optimizer import make_optimizer
from interdomain_jax.training.state import abstract_state
from tests.quick import quick_environment

FIELDS = dict(vocab_size=259, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, state_dim=4)


def make_model(*mixers: str) -> tuple[Decoder, Any]:
    model = Decoder(**FIELDS, mixers=mixers, norm_epsilon=1e-3)
    random = np.random.default_rng(0)
    abstract = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    return model, jax.tree.map(lambda leaf: jnp.asarray(random.standard_normal(leaf.shape), leaf.dtype), abstract)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """An exported file of a model, and the workdir of the run made of it."""
    directory = tmp_path_factory.mktemp("loaded")
    model, params = make_model("interdomain", "softmax")
    save_model(directory / "model.safetensors", model, params)
    config = tiny.get_config("s4d")
    config.model.scan_layers = True
    config.model.chunk_size = 32
    summary = load_run(str(directory / "model.safetensors"), config.lock(), directory / "run")
    assert summary == (0, sum(leaf.size for leaf in jax.tree.leaves(params)))
    return directory / "model.safetensors", directory / "run"


def test_a_loaded_model_is_a_run_of_no_steps_yet(loaded):
    """What train.py goes on from."""
    file, workdir = loaded
    config = workdirs.load_config(workdir)
    assert {field: config.model[field] for field in FIELDS} == FIELDS
    assert (config.model.mixers, config.model.norm_epsilon) == (("interdomain", "softmax"), 1e-3)
    assert (config.model.scan_layers, config.model.chunk_size) == (True, 32)
    assert config.data == tiny.get_config().data

    model = build_experiment(config).model
    optimizer = make_optimizer(num_steps=config.num_steps, **config.optimizer)
    abstract = abstract_state(model, optimizer, sharding.make_mesh(config.mesh))
    with checkpoints.open_checkpoints(workdir) as opened:
        start = training_checkpoints.restore_latest(opened, workdir, abstract)
    assert (start.step, start.position, start.validation_loss) == (0, None, None)
    assert int(start.state.step) == 0
    chex.assert_trees_all_equal(start.state.params, load_model(file, scan_layers=True).params)
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(start.state.opt_state))


def test_a_run_is_exported_as_the_file_that_it_was_loaded_from(loaded, tmp_path):
    file, workdir = loaded
    command = [sys.executable, "-m", "interdomain_jax.export", f"--workdir={workdir}", f"--output={tmp_path / 'again'}"]
    finished = subprocess.run(command, env=quick_environment(), capture_output=True, text=True, check=True)
    assert (tmp_path / "again").read_bytes() == file.read_bytes()
    parameters = sum(tensor.size for tensor in load_file(file).values())
    assert finished.stdout == f"{tmp_path / 'again'}: {parameters:,} parameters of step 0\n"


def test_a_llama_as_a_run_and_back(tmp_path):
    model, params = make_model("softmax")
    # The run's context, and the end of a document of bytes.
    write_llama(tmp_path / "llama", model, params, max_length=512, eos_id=256)
    config = tiny.get_config()
    load_run(str(tmp_path / "llama"), config, tmp_path / "run")
    # The config that was given is not changed.
    assert config.model.mixers == ("interdomain",)
    config = workdirs.load_config(tmp_path / "run")
    assert (config.model.mixers, config.model.num_kv_heads, config.model.norm_epsilon) == (("softmax",), 1, 1e-3)
    # What the layout knows nothing of, and needs not.
    assert (config.model.init_std, config.model.state_dim) == (0.05, 32)

    export_run(tmp_path / "run", str(tmp_path / "again"), layout="llama")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "llama" / file).read_bytes()


@pytest.mark.parametrize(
    ("output", "checkpoint", "error", "sentence"),
    [
        ("gs://bucket/model", "latest", ValueError, "gs://bucket/model is not on a local disk"),
        ("{file}/model", "latest", ValueError, "cannot be a directory: {file} is a file"),
        ("{file}", "7", FileNotFoundError, "holds no checkpoint of step 7"),
        ("{file}", "best", FileNotFoundError, "holds no checkpoint that was validated"),
    ],
)
def test_what_cannot_be_exported(loaded, output, checkpoint, error, sentence):
    file, workdir = loaded
    with pytest.raises(error) as caught:
        export_run(workdir, output.format(file=file), checkpoint=checkpoint)
    assert sentence.format(file=file) in str(caught.value)


def test_a_run_that_is_no_llama(loaded, tmp_path):
    _, workdir = loaded
    with pytest.raises(ValueError, match="the layout of Llama has softmax attention alone"):
        export_run(workdir, str(tmp_path / "llama"), layout="llama")
    with pytest.raises(ValueError, match="layout is 'gpt'; it must be one of"):
        export_run(workdir, str(tmp_path / "llama"), layout="gpt")


def test_what_cannot_be_loaded(loaded, tmp_path):
    file, workdir = loaded
    config = tiny.get_config()
    with pytest.raises(ValueError, match=f"workdir {workdir} is not empty"):
        load_run(str(file), config, workdir)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_run(str(tmp_path / "nowhere"), config, tmp_path / "run")
    config.data.tokenizer = "mistral"
    with pytest.raises(ValueError, match="vocab_size is 259, but the tokenizer 'mistral' has 32000 ids"):
        load_run(str(file), config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
