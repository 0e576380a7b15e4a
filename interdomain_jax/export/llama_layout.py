"""The softmax model as a Hugging Face Llama: a directory with `config.json` and `model.safetensors`.

The two are the same function. Both rotate the channel pairs (i, i + R/2), share each key/value head among query heads
that follow each other, and multiply SiLU(gate) by up; so tensors are renamed, kernels are transposed to [outputs,
inputs], and nothing else is done to them.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from interdomain_jax import strict_json
from interdomain_jax.errors import RunError
from interdomain_jax.export.safetensors_files import Loaded, load_model
from interdomain_jax.export.tensor_names import Index, require_same, tensor_shapes, to_params, to_tensors
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.modules.layers import swiglu_hidden_dim
from interdomain_jax.tensor_files import StoredTensor, local_path, stored_tensors, write_tensors

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

_EMBEDDING, _UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"
_OUTSIDE_LAYERS = {"embed.embedding": _EMBEDDING, "norm.scale": "model.norm.weight", "unembed.kernel": _UNEMBEDDING}
_IN_LAYERS = {
    "mixer_norm.scale": "input_layernorm.weight",
    "mixer.query.kernel": "self_attn.q_proj.weight",
    "mixer.key.kernel": "self_attn.k_proj.weight",
    "mixer.value.kernel": "self_attn.v_proj.weight",
    "mixer.output.kernel": "self_attn.o_proj.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "mlp.w1.kernel": "mlp.gate_proj.weight",
    "mlp.w3.kernel": "mlp.up_proj.weight",
    "mlp.w2.kernel": "mlp.down_proj.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
# Old checkpoints hold the frequencies of the rotations too.
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")

_DTYPES = ("float32", "bfloat16", "float16")


def write_llama(
    directory: str | os.PathLike[str], model: Decoder, params: Any, *, max_length: int, eos_id: int | None = None
) -> None:
    """Writes the directory of a Hugging Face Llama, whole or not at all.

    Args:
        directory: that does not exist yet, or is empty.
        model: the module, softmax in all its layers.
        params: its parameters, with scanned layers or without.
        max_length: what `config.json` gives as the most positions, such as the context the model was trained at.
        eos_id: the token that ends a document, and which the model saw before each.

    Raises:
        ValueError: Llama cannot express the model, the parameters are of another one, or the directory is not empty.
        RunError: the directory cannot be written.
    """
    directory = local_path(directory)
    _require_expressible(model)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists already; give a directory that is not there yet, or an empty one")
    tensors = {_llama_name(name): _turned(name, tensor) for name, tensor in to_tensors(model, params).items()}
    temporary = directory.with_name(directory.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        # Readers of the layout ask for this text; it means that the tensors lie as PyTorch's do.
        write_tensors(temporary / _WEIGHTS, tensors, {"format": "pt"})
        strict_json.write(temporary / _CONFIG, _llama_config(model, max_length, eos_id))
        temporary.replace(directory)
    except OSError as error:
        raise RunError(f"{directory} cannot be written: {error}") from error


def read_llama(directory: str | os.PathLike[str], *, scan_layers: bool = False, mesh: Mesh | None = None) -> Loaded:
    """Reads the directory of a Hugging Face Llama, its tensors in one file or in several with an index.

    The model computes in the dtype of its parameters. Tied embeddings become two copies, which training would take
    apart.

    Args:
        directory: with `config.json`.
        scan_layers: as `load_model` takes it.
        mesh: as `load_model` takes it.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, the directory holds a model that is no such Llama, or other tensors than it has;
            or the mesh does not divide a parameter.
    """
    directory = local_path(directory)
    config = _read_json(directory / _CONFIG)
    fields = _model_fields(config, source=directory / _CONFIG)
    tensors = {name: tensor for name, tensor in _stored_weights(directory).items() if not _IGNORED.fullmatch(name)}
    if config.get("tie_word_embeddings") and _EMBEDDING in tensors:
        tensors[_UNEMBEDDING] = tensors[_EMBEDDING]
    dtypes = {jnp.dtype(tensor.dtype).name for tensor in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
        raise ValueError(f"{directory} has tensors of {', '.join(sorted(dtypes))}; it must be one of {_DTYPES} for all")
    dtype = jnp.dtype(dtypes.pop())
    model = Decoder(**fields, dtype=dtype, param_dtype=dtype, scan_layers=scan_layers)
    shapes = tensor_shapes(model)
    wanted = {
        _llama_name(name): jax.ShapeDtypeStruct(leaf.shape[::-1] if _is_turned(name) else leaf.shape, leaf.dtype)
        for name, leaf in shapes.items()
    }
    require_same(wanted, tensors, source=f"{directory}")

    def read(name: str, index: Index) -> np.ndarray:
        parts = tensors[_llama_name(name)].parts
        return _turned(name, parts[index[::-1] if _is_turned(name) else index])

    return Loaded(model, to_params(model, read, mesh))


def read_exported(source: str | os.PathLike[str], *, scan_layers: bool = False, mesh: Mesh | None = None) -> Loaded:
    """Reads a file as `load_model` does, or a directory as `read_llama` does."""
    read = read_llama if local_path(source).is_dir() else load_model
    return read(source, scan_layers=scan_layers, mesh=mesh)


def _llama_name(name: str) -> str:
    """The name of a tensor in the layout, from that in `tensor_names`."""
    if match := _LAYER.fullmatch(name):
        return f"model.layers.{match[1]}.{_IN_LAYERS[match[2]]}"
    return _OUTSIDE_LAYERS[name]


def _is_turned(name: str) -> bool:
    return name.endswith(".kernel")


def _turned(name: str, tensor: np.ndarray) -> np.ndarray:
    """A kernel [inputs, outputs] as [outputs, inputs] or back; other tensors as they are."""
    return tensor.T if _is_turned(name) else tensor


def _require_expressible(model: Decoder) -> None:
    if set(model.mixers) != {"softmax"}:
        raise ValueError(f"the layout of Llama has softmax attention alone; the mixers of the model are {model.mixers}")
    if model.d_model % model.num_heads:
        raise ValueError(
            f"the layout of Llama needs d_model to be a multiple of num_heads; they are {model.d_model} and "
            f"{model.num_heads}"
        )


def _llama_config(model: Decoder, max_length: int, eos_id: int | None) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.mlp_dim or swiglu_hidden_dim(model.d_model),
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads or model.num_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_base,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        # A document begins behind the end of another one, in training and evaluation.
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "torch_dtype": jnp.dtype(model.param_dtype).name,
    }


def _model_fields(config: Mapping[str, Any], *, source: Path) -> dict[str, Any]:
    """The fields of the `Decoder` that a `config.json` describes.

    Raises:
        ValueError: the `Decoder` cannot express it.
    """
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for field in sizes:
        if not isinstance(config.get(field), int) or config[field] < 1:
            raise ValueError(f"{source} has {field} {config.get(field)!r}; it must be a whole number of at least 1")
    # Older versions of `transformers` keep the base beside `rope_scaling`, newer ones all in `rope_parameters`; those
    # read both, in this order.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope_theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    if not isinstance(rope_theta, int | float) or not rope_theta > 0:
        raise ValueError(f"{source} has rope_theta {rope_theta!r}; it must be a number above 0")
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    # Where a field is absent, its default in the layout.
    found_and_wanted = {
        "model_type": (config.get("model_type"), "llama"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "rope_scaling": (rope.get("rope_type", rope.get("type", "default")), "default"),
    }
    for field, (found, wanted) in found_and_wanted.items():
        if found != wanted:
            raise ValueError(f"{source} has {field} {found!r}; this package's softmax model has {wanted!r} alone")
    num_kv_heads, mlp_dim = config.get("num_key_value_heads") or num_heads, config["intermediate_size"]
    return dict(
        vocab_size=config["vocab_size"],
        d_model=hidden_size,
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        mixers=("softmax",),
        num_kv_heads=None if num_kv_heads == num_heads else num_kv_heads,
        mlp_dim=None if mlp_dim == swiglu_hidden_dim(hidden_size) else mlp_dim,
        rope_base=float(rope_theta),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
    )


def _stored_weights(directory: Path) -> dict[str, StoredTensor]:
    if (directory / _WEIGHTS).is_file():
        return stored_tensors(directory / _WEIGHTS)
    if not (directory / _INDEX).is_file():
        raise FileNotFoundError(f"{directory} has neither {_WEIGHTS} nor {_INDEX}; other files of weights are not read")
    weight_map = _read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{directory / _INDEX} has no weight_map from tensors to files")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        tensors |= stored_tensors(directory / file)
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content
