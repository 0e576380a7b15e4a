"""What a model knows of the texts that it has read, as a value: to keep, copy, save and go on from.

The state of a recurrent mixer has a fixed size, however long the text was; that of softmax attention holds keys and
values of every token, up to a length that is fixed beforehand.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.flax import load_file

from interdomain_jax.modules.decoder import Cache, Decoder
from interdomain_jax.modules.softmax import KeyValueCache
from interdomain_jax.tensor_files import write_tensors

FORMAT = "2"

Storage = Literal["float32", "bfloat16"]


class State(NamedTuple):
    """What B rows have read.

    Attributes:
        cache: of the model's layers, each apart whether the model scans them or not; rows are the first axis.
        logits: [B, V] float32, of the next token; zeros before the first.
        seen: [B, V], the tokens that were read, for the repetition penalty.
        length: [B] int32, how many were read.
    """

    cache: Cache
    logits: Float[Array, "B V"]
    seen: Bool[Array, "B V"]
    length: Int[Array, " B"]

    @property
    def bytes(self) -> int:
        """The size of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def empty_state(model: Decoder, batch_size: int, max_length: int) -> State:
    """The state before the first token; `max_length` bounds what softmax layers can hold."""
    return State(
        model.clone(scan_layers=False).init_cache(batch_size, max_length),
        jnp.zeros((batch_size, model.vocab_size), jnp.float32),
        jnp.zeros((batch_size, model.vocab_size), bool),
        jnp.zeros(batch_size, jnp.int32),
    )


def take_rows(state: State, rows: Sequence[int] | Array) -> State:
    """The state of these rows, in this order; a row may be taken several times: that forks it."""
    rows = jnp.asarray(rows)
    return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0), state)


def save_state(path: Path, model: Decoder, state: State, *, storage: Storage = "float32") -> None:
    """Writes a state as a safetensors file, all or nothing.

    Args:
        path: of the file.
        model: that has read the texts.
        state: of any number of rows.
        storage: "float32" loses nothing. "bfloat16" halves the file, and rounds to 8 bits what the mixers carry.

    Raises:
        RunError: it cannot be written.
    """
    rounds = lambda name, leaf: storage == "bfloat16" and leaf.dtype == jnp.float32 and name != "logits"
    arrays = {
        name: np.asarray(leaf.astype(jnp.bfloat16) if rounds(name, leaf) else leaf)
        for name, leaf in _named(state).items()
    }
    write_tensors(path, arrays, {"format": FORMAT, "model": json.dumps(_fields(model))})


def load_state(path: Path, model: Decoder) -> State:
    """Reads a state that `save_state` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no state, or one of another model.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, "flax") as file:
            metadata = file.metadata() or {}
        arrays = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error
    if metadata.get("format") != FORMAT or "model" not in metadata:
        raise ValueError(f"{path} holds no state of format {FORMAT}")
    there, here = json.loads(metadata["model"]), json.loads(json.dumps(_fields(model)))
    differences = [
        f"{name} is {there.get(name, 'absent')} there and {here[name]} here"
        for name in here
        if there.get(name, "absent") != here[name]
    ]
    if differences:
        raise ValueError(f"{path} holds a state of another model: {'; '.join(differences)}")
    batch_size = arrays["length"].shape[0]
    longest = max((leaf.shape[-2] for name, leaf in arrays.items() if name.endswith("/keys")), default=0)
    abstract = jax.eval_shape(lambda: empty_state(model, batch_size, longest))
    return jax.tree_util.tree_map_with_path(lambda path, leaf: arrays[_name(path)].astype(leaf.dtype), abstract)


def with_room(state: State, max_length: int) -> State:
    """The state with room for so many tokens in softmax layers; others need none, and share their arrays with it.

    Raises:
        ValueError: it holds more.
    """
    layers = itertools.chain(*state.cache)
    longest = int(state.length.max())
    if longest > max_length and any(isinstance(layer, KeyValueCache) for layer in layers):
        raise ValueError(f"max_length is {max_length}; the state holds {longest} tokens")

    def resize(tokens: Array) -> Array:
        if tokens.shape[2] == max_length:
            return tokens
        more = max(max_length - tokens.shape[2], 0)
        return jnp.pad(tokens, [(0, 0), (0, 0), (0, more), (0, 0)])[:, :, :max_length]

    def resized(layer: Any) -> Any:
        if not isinstance(layer, KeyValueCache):
            return layer
        return layer._replace(keys=resize(layer.keys), values=resize(layer.values))

    return state._replace(cache=tuple(tuple(map(resized, pattern)) for pattern in state.cache))


def _named(state: State) -> dict[str, Array]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _fields(model: Decoder) -> dict[str, Any]:
    """What a state depends on."""
    names = ["vocab_size", "d_model", "num_layers", "num_heads", "head_dim", "mixers", "num_kv_heads", "state_dim"]
    names += ["mlp_dim", "rope_base", "read", "dtype"]
    values = {name: getattr(model, name) for name in names}
    return values | {"dtype": jnp.dtype(model.dtype).name}
