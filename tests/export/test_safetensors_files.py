"""Exported models: what comes back is what was written, under names that others can rely on."""

import functools
import json
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from interdomain_jax.errors import RunError
from interdomain_jax.export.safetensors_files import load_model, save_model
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.modules.layer_layout import separate_layers
from interdomain_jax.modules.mixers import MIXERS
from tests.quick import compiler_options

TOKENS = jnp.arange(12).reshape(2, 6) % 11


def make_decoder(mixers: tuple[str, ...], **fields: Any) -> Decoder:
    sizes = dict(vocab_size=11, d_model=8, num_heads=2, head_dim=4, state_dim=3)
    return Decoder(**sizes | dict(mixers=mixers, num_layers=2 * len(mixers)) | fields)


def filled(model: Decoder) -> Any:
    """Numbers for every parameter, no two of them the same."""
    random = np.random.default_rng(0)
    abstract = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    return jax.tree.map(lambda leaf: jnp.asarray(random.uniform(0.1, 0.3, leaf.shape), leaf.dtype), abstract)


@functools.partial(jax.jit, static_argnums=0, compiler_options=compiler_options())
def logits(model: Decoder, params: Any) -> jax.Array:
    return model.apply({"params": params}, TOKENS)[0]


def header_of(path: Path) -> dict[str, Any]:
    """The header of a file, read as the format is specified: its length in eight bytes, then JSON."""
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


@pytest.fixture
def saved(tmp_path):
    """A file of a small model, and the model."""
    model = make_decoder(("softmax",), num_layers=1)
    save_model(tmp_path / "model.safetensors", model, filled(model))
    return tmp_path / "model.safetensors", model


def content_of(path: Path) -> dict[str, Any]:
    """What the metadata of a file say."""
    return json.loads(header_of(path)["__metadata__"]["interdomain_jax"])


def rewrite(path: Path, tensors: dict[str, np.ndarray], content: dict[str, Any]) -> None:
    """Writes the file once more with other tensors, or something else in its metadata."""
    save_file(tensors, path, {"interdomain_jax": json.dumps(content)})


DTYPES = pytest.mark.parametrize("dtype", [jnp.dtype("float32"), jnp.dtype("bfloat16")], ids=str)


@DTYPES
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_round_trip_gives_the_same_bits(mixer, dtype, tmp_path):
    """maxtext#551: layers scanned or not, when written and when read."""
    scanned, separate = (
        make_decoder((mixer,), scan_layers=scan_layers, dtype=dtype, param_dtype=dtype) for scan_layers in (True, False)
    )
    params = filled(scanned)
    save_model(tmp_path / "scanned", scanned, params)
    model, separate_params = load_model(tmp_path / "scanned")
    assert model == separate
    chex.assert_trees_all_equal(separate_params, separate_layers(jax.device_get(params)))
    save_model(tmp_path / "separate", separate, separate_params)
    assert (tmp_path / "separate").read_bytes() == (tmp_path / "scanned").read_bytes()
    model, scanned_params = load_model(tmp_path / "separate", scan_layers=True)
    assert model == scanned
    chex.assert_trees_all_equal_shapes_and_dtypes(scanned_params, params)
    chex.assert_trees_all_equal(scanned_params, params)


@DTYPES
def test_a_round_trip_gives_equal_logits(dtype, tmp_path):
    """Of a model with all mixers."""
    model = make_decoder(tuple(MIXERS), scan_layers=True, dtype=dtype, param_dtype=dtype)
    params = filled(model)
    expected = logits(model, params)
    assert np.ptp(expected) > 1e-2
    save_model(tmp_path / "model", model, params)
    np.testing.assert_array_equal(logits(*load_model(tmp_path / "model", scan_layers=True)), expected)
    if dtype == jnp.float32:
        np.testing.assert_allclose(logits(*load_model(tmp_path / "model")), expected, rtol=1e-5)


OUTSIDE_LAYERS = {"embed.embedding": [11, 8], "norm.scale": [8], "unembed.kernel": [8, 11]}
IN_EVERY_LAYER = {
    "mixer.key.kernel": [8, 8],
    "mixer.output.kernel": [8, 8],
    "mixer.query.kernel": [8, 8],
    "mixer.value.kernel": [8, 8],
    "mixer_norm.scale": [8],
    "mlp.w1.kernel": [8, 128],
    "mlp.w2.kernel": [128, 8],
    "mlp.w3.kernel": [8, 128],
    "mlp_norm.scale": [8],
}
WITH_A_STATE = {
    "mixer.a_imag": [2, 3],
    "mixer.channel_weights": [8],
    "mixer.gate.kernel": [8, 8],
    "mixer.key_bias": [2, 4],
    "mixer.key_convolution.kernel": [4, 8],
    "mixer.key_scale": [2, 4],
    "mixer.log_delta": [2],
    "mixer.log_neg_a_real": [2, 3],
    "mixer.query_convolution.kernel": [4, 8],
    "mixer.readout_imag": [2, 3, 3],
    "mixer.readout_real": [2, 3, 3],
    "mixer.value_bias": [2, 4],
    "mixer.value_scale": [2, 4],
}
WITH_A_SINGLE_INPUT = {"mixer.mode_weights": [2, 3], "mixer.value_convolution.kernel": [4, 8]}
LAYERS = [
    IN_EVERY_LAYER | WITH_A_STATE,
    IN_EVERY_LAYER | WITH_A_STATE | WITH_A_SINGLE_INPUT,
    IN_EVERY_LAYER,
]


@pytest.mark.fast
def test_the_names_on_disk(tmp_path):
    model = make_decoder(
        ("interdomain", "single_query", "softmax"), output_gate=True, scan_layers=True, param_dtype=jnp.bfloat16
    )
    save_model(tmp_path / "model.safetensors", model, filled(model))
    header = header_of(tmp_path / "model.safetensors")
    metadata = header.pop("__metadata__")
    numbered = [(f"layers.{number}.{name}", shape) for number in range(6) for name, shape in LAYERS[number % 3].items()]
    assert {name: entry["shape"] for name, entry in header.items()} == OUTSIDE_LAYERS | dict(numbered)
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert metadata.keys() == {"interdomain_jax"}
    content = json.loads(metadata["interdomain_jax"])
    assert content.keys() == {"format_version", "model"}
    assert content["format_version"] == 1
    assert content["model"] == {
        "vocab_size": 11,
        "d_model": 8,
        "num_layers": 6,
        "num_heads": 2,
        "head_dim": 4,
        "mixers": ["interdomain", "single_query", "softmax"],
        "num_kv_heads": None,
        "mlp_dim": None,
        "rope_base": 10_000.0,
        "state_dim": 3,
        "read": "bilinear",
        "output_gate": True,
        "norm_epsilon": 1e-5,
        "dtype": "float32",
        "param_dtype": "bfloat16",
    }


def test_layers_are_numbered_from_the_first_to_the_last(tmp_path):
    model = make_decoder(("softmax", "s4d"), num_layers=24, d_model=2, head_dim=2, scan_layers=True)
    params = filled(model)
    for block in range(2):
        scales = params["layers"][f"block_{block}"]["mlp_norm"]
        scales["scale"] = jnp.broadcast_to(2.0 * jnp.arange(12)[:, None] + block, (12, 2))
    save_model(tmp_path / "model.safetensors", model, params)
    tensors = load_file(tmp_path / "model.safetensors")
    assert [tensors[f"layers.{number}.mlp_norm.scale"].tolist() for number in range(24)] == [
        [number, number] for number in range(24)
    ]
    chex.assert_trees_all_equal(load_model(tmp_path / "model.safetensors", scan_layers=True).params, params)


def test_what_the_logits_do_not_depend_on_is_not_part_of_a_model(tmp_path):
    free = dict(implementation="sequential", chunk_size=7, remat="full", init_std=0.5)
    model = make_decoder(("interdomain",), num_kv_heads=1, **free)
    save_model(tmp_path / "model.safetensors", model, filled(model))
    loaded = load_model(tmp_path / "model.safetensors").model
    assert loaded == make_decoder(("interdomain",), num_kv_heads=1)


def test_other_tensors_are_refused(saved):
    path, _ = saved
    tensors = load_file(path)
    del tensors["layers.0.mlp.w2.kernel"]
    tensors["layers.1.mlp.w2.kernel"] = np.zeros((128, 8), np.float32)
    tensors["norm.scale"] = np.zeros(9, np.float32)
    tensors["embed.embedding"] = tensors["embed.embedding"].astype(np.float16)
    rewrite(path, tensors, content_of(path))
    with pytest.raises(ValueError, match="does not fit the model") as error:
        load_model(path)
    message = str(error.value)
    assert message.startswith(f"{path} ")
    for part in (
        "layers.0.mlp.w2.kernel is missing",
        "layers.1.mlp.w2.kernel is not expected",
        "norm.scale is float32 (9,) where float32 (8,) is expected",
        "embed.embedding is float16 (11, 8) where float32 (11, 8) is expected",
    ):
        assert part in message


def test_tensors_of_a_dtype_that_no_model_has_are_refused(saved):
    path, _ = saved
    rewrite(path, load_file(path) | {"norm.scale": np.zeros(8, np.int8)}, content_of(path))
    with pytest.raises(ValueError, match=r"has norm\.scale in I8; it must be one of \('F32', 'BF16', 'F16'\)"):
        load_model(path)


def test_of_many_differences_some_are_named(saved):
    path, _ = saved
    rewrite(path, {}, content_of(path))
    with pytest.raises(ValueError, match=r"embed\.embedding is missing; .* and 4 more$"):
        load_model(path)


def test_parameters_of_another_model_are_not_written(saved, tmp_path):
    _, model = saved
    with pytest.raises(ValueError, match=r"layers\.0\.mixer\.a_imag is missing"):
        save_model(tmp_path / "other", make_decoder(("s4d",), num_layers=1), filled(model))
    assert not (tmp_path / "other").exists()


def test_other_metadata_are_refused(saved):
    path, _ = saved
    tensors, content = load_file(path), content_of(path)
    rewrite(path, tensors, content | {"format_version": 2})
    with pytest.raises(ValueError, match=rf"{path} .* the format version is 2; this package reads 1"):
        load_model(path)
    for metadata in (None, {"format": "pt"}):
        save_file(tensors, path, metadata)
        with pytest.raises(ValueError, match=f"{path} was not written by this package"):
            load_model(path)
    for text in ("{", "[]", '{"format_version": 1}'):
        save_file(tensors, path, {"interdomain_jax": text})
        with pytest.raises(ValueError, match=f"the metadata of {path} describes no model that can be read"):
            load_model(path)


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("colour", "blue", "colour"),
        ("mixers", ["hyena"], "hyena"),
        ("dtype", "float17", "float17"),
        ("head_dim", 3, "head_dim"),
    ],
)
def test_a_model_that_there_is_not_is_refused(saved, field, value, word):
    path, _ = saved
    content = content_of(path)
    content["model"][field] = value
    rewrite(path, load_file(path), content)
    with pytest.raises(ValueError, match=f"the metadata of {path} describes no model that can be read: .*{word}"):
        load_model(path)


def test_files_of_before_a_field_was_there_mean_its_default(saved):
    path, model = saved
    content = content_of(path)
    del content["model"]["rope_base"], content["model"]["mlp_dim"]
    rewrite(path, load_file(path), content)
    assert load_model(path).model == model


def test_every_field_without_a_default_is_needed(saved):
    path, _ = saved
    content = content_of(path)
    del content["model"]["vocab_size"]
    rewrite(path, load_file(path), content)
    with pytest.raises(ValueError, match=r"describes no model that can be read: .*vocab_size"):
        load_model(path)


def test_files_that_are_damaged_missing_or_not_here(saved, tmp_path):
    path, model = saved
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file, or a damaged one"):
        load_model(path)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="gs://bucket/model is not on a local disk"):
        save_model("gs://bucket/model", model, filled(model))


def test_a_file_that_cannot_be_written_leaves_the_one_before(saved, file_size_limit):
    path, model = saved
    before = path.read_bytes()
    file_size_limit(len(before) // 2)
    try:
        with pytest.raises(RunError, match=r"model\.safetensors cannot be written"):
            save_model(path, model, filled(model))
    finally:
        file_size_limit(-1)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_who_may_read_a_file_is_for_the_user_to_say(saved):
    """By the umask, as for any file."""
    path, _ = saved
    (path.parent / "other").touch()
    assert path.stat().st_mode == (path.parent / "other").stat().st_mode
