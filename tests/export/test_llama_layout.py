"""The layout of Llama, against what Hugging Face's own forward pass gave; `make_llama_fixture.py` wrote it."""

import json
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from interdomain_jax.errors import RunError
from interdomain_jax.export.llama_layout import read_llama, write_llama
from interdomain_jax.export.safetensors_files import load_model, save_model
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.modules.layer_layout import separate_layers

pytestmark = pytest.mark.fast

FIXTURE = Path(__file__).parent / "llama_fixture"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def copied(tmp_path):
    """A copy of the fixture, to be changed."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "llama"))


def change_config(directory: Path, **fields: Any) -> None:
    config = json.loads((directory / "config.json").read_text()) | fields
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_the_logits_of_hugging_face(scan_layers):
    expected = load_file(FIXTURE / "expected.safetensors")
    model, params = read_llama(FIXTURE, scan_layers=scan_layers)
    logits, _ = jax.jit(model.apply)({"params": params}, expected["ids"])
    assert np.ptp(expected["logits"]) > 1
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-5)


def test_there_and_back_again_bit_for_bit(tmp_path):
    model, params = read_llama(FIXTURE, scan_layers=True)
    write_llama(tmp_path / "llama", model, params, max_length=64, eos_id=60)
    written, wanted = (load_file(directory / WEIGHTS) for directory in (tmp_path / "llama", FIXTURE))
    assert written.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert written[name].dtype == tensor.dtype
        np.testing.assert_array_equal(written[name], tensor)
    again, params_again = read_llama(tmp_path / "llama")
    assert again == model.clone(scan_layers=False)
    chex.assert_trees_all_equal(params_again, separate_layers(params))


def test_the_config(tmp_path):
    model, params = read_llama(FIXTURE)
    write_llama(tmp_path / "llama", model, params, max_length=64, eos_id=60)
    written, wanted = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "llama", FIXTURE))
    # Hugging Face writes these three under new names since its version 5, and reads both.
    assert written.pop("rope_theta") == wanted["rope_parameters"]["rope_theta"]
    assert written.pop("rope_scaling") is None
    assert wanted["rope_parameters"]["rope_type"] == "default"
    assert written.pop("torch_dtype") == wanted["dtype"]
    assert written == {field: wanted[field] for field in written}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500_000.0},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": 500_000.0},
        {"rope_parameters": None, "rope_scaling": {"type": "default"}, "rope_theta": 500_000.0},
    ],
)
def test_where_configs_keep_the_base_of_the_rotations(copied, fields):
    change_config(copied, **fields)
    assert read_llama(copied).model == read_llama(FIXTURE).model.clone(rope_base=5e5)


def test_the_width_of_this_package_is_left_to_it(tmp_path):
    """So that the configs of training, which leave it open, go with a model that has come back."""
    model = Decoder(vocab_size=5, d_model=6, num_layers=1, num_heads=3, head_dim=2, mixers=("softmax",))
    params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    write_llama(tmp_path / "llama", model, params, max_length=8)
    assert json.loads((tmp_path / "llama" / "config.json").read_text())["intermediate_size"] == 128
    assert read_llama(tmp_path / "llama").model == model


def test_bfloat16(tmp_path):
    model, params = read_llama(FIXTURE)
    narrow = model.clone(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    narrow_params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    write_llama(tmp_path / "llama", narrow, narrow_params, max_length=64)
    assert load_file(tmp_path / "llama" / WEIGHTS)["lm_head.weight"].dtype == jnp.bfloat16
    assert json.loads((tmp_path / "llama" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    loaded = read_llama(tmp_path / "llama")
    assert loaded.model == narrow
    chex.assert_trees_all_equal(loaded.params, narrow_params)
    save_model(tmp_path / WEIGHTS, *loaded)
    chex.assert_trees_all_equal(load_model(tmp_path / WEIGHTS).params, narrow_params)


def split(directory: Path) -> dict[str, str]:
    """Lays the weights out in two files with an index, and returns its map."""
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    files = {name: f"model-{1 + number % 2:05}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(part, directory / file, {"format": "pt"})
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": files}))
    return files


def test_several_files_with_an_index(copied):
    files = split(copied)
    chex.assert_trees_all_equal(read_llama(copied).params, read_llama(FIXTURE).params)
    lost = copied / files["model.norm.weight"]
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=f"there is no file {lost}"):
        read_llama(copied)
    (copied / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        read_llama(copied)


def test_tied_embeddings_become_two_copies(copied):
    tensors = load_file(copied / WEIGHTS)
    del tensors["lm_head.weight"]
    save_file(tensors, copied / WEIGHTS)
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing"):
        read_llama(copied)
    change_config(copied, tie_word_embeddings=True)
    params = read_llama(copied).params
    np.testing.assert_array_equal(params["unembed"]["kernel"], tensors["model.embed_tokens.weight"].T)
    np.testing.assert_array_equal(params["embed"]["embedding"], tensors["model.embed_tokens.weight"])


def test_frequencies_in_old_checkpoints_are_passed_over(copied):
    tensors = load_file(copied / WEIGHTS)
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    save_file(tensors, copied / WEIGHTS)
    chex.assert_trees_all_equal(read_llama(copied).params, read_llama(FIXTURE).params)


OTHERS = [
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "rope_scaling 'llama3'"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling 'linear'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling 'yarn'"),
    ({"rope_parameters": None, "rope_theta": None}, "rope_theta None; it must be a number above 0"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": -5}}, "rope_theta -5; it must be a number above 0"),
    ({"model_type": "mistral"}, "model_type 'mistral'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"attention_bias": True}, "attention_bias True"),
    ({"mlp_bias": True}, "mlp_bias True"),
    ({"intermediate_size": 0}, "intermediate_size 0; it must be a whole number of at least 1"),
    ({"num_attention_heads": 0}, "num_attention_heads 0; it must be a whole number of at least 1"),
    ({"hidden_size": None}, "hidden_size None; it must be a whole number of at least 1"),
]


@pytest.mark.parametrize(("fields", "sentence"), OTHERS, ids=[sentence.split(";")[0] for _, sentence in OTHERS])
def test_what_this_model_cannot_express_is_refused(copied, fields, sentence):
    change_config(copied, **fields)
    with pytest.raises(ValueError, match=r"config\.json has") as error:
        read_llama(copied)
    assert sentence in str(error.value)


def test_the_defaults_of_old_configs(copied):
    config = json.loads((copied / "config.json").read_text())
    for field in ("rope_parameters", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings", "rms_norm_eps"):
        config.pop(field)
    (copied / "config.json").write_text(json.dumps(config))
    assert read_llama(copied).model == read_llama(FIXTURE).model.clone(norm_epsilon=1e-6, rope_base=1e4)
    # Of hidden_size / num_attention_heads each, where nothing is said: other shapes than these.
    change_config(copied, head_dim=None, num_key_value_heads=None)
    with pytest.raises(ValueError, match=r"q_proj\.weight is float32 \(32, 16\) where float32 \(16, 16\)"):
        read_llama(copied)


def test_other_tensors_are_refused_under_the_names_of_the_layout(copied):
    tensors = load_file(copied / WEIGHTS)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((16, 32), np.float32)
    save_file(tensors, copied / WEIGHTS)
    with pytest.raises(ValueError, match=r"q_proj\.bias is not expected") as error:
        read_llama(copied)
    assert "q_proj.weight is float32 (16, 32) where float32 (32, 16) is expected" in str(error.value)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float16)
    save_file(tensors, copied / WEIGHTS)
    with pytest.raises(ValueError, match="has tensors of float16, float32; it must be one of"):
        read_llama(copied)


def test_files_that_are_missing_or_no_json(copied):
    (copied / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=r"has neither model\.safetensors nor"):
        read_llama(copied)
    (copied / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_llama(copied)
    (copied / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json holds no JSON object"):
        read_llama(copied)
    (copied / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no file .*config\.json"):
        read_llama(copied)


def test_models_that_llama_cannot_express_are_refused(tmp_path):
    sizes = dict(vocab_size=5, d_model=6, num_layers=2, num_heads=4, head_dim=2)
    with pytest.raises(ValueError, match=r"softmax attention alone; the mixers of the model are \('softmax', 's4d'\)"):
        write_llama(tmp_path / "llama", Decoder(**sizes, mixers=("softmax", "s4d")), {}, max_length=8)
    with pytest.raises(ValueError, match="d_model to be a multiple of num_heads; they are 6 and 4"):
        write_llama(tmp_path / "llama", Decoder(**sizes, mixers=("softmax",)), {}, max_length=8)
    assert not (tmp_path / "llama").exists()


def test_a_directory_is_written_whole_or_not_at_all(tmp_path, file_size_limit):
    model, params = read_llama(FIXTURE)
    with pytest.raises(ValueError, match="llama_fixture exists already"):
        write_llama(FIXTURE, model, params, max_length=64)
    directory = tmp_path / "llama"
    directory.mkdir()
    file_size_limit(1000)
    try:
        with pytest.raises(RunError, match="cannot be written"):
            write_llama(directory, model, params, max_length=64)
    finally:
        file_size_limit(-1)
    assert not list(directory.iterdir())
    # What it left behind is in nobody's way, and neither is a directory that is empty.
    write_llama(directory, model, params, max_length=64)
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", WEIGHTS]
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]
