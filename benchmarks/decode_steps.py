"""A decode step of one layer's mixer: the forms that `benchmarks.decode` compares.

A form takes what it carries from token to token, and the query, key and value of one more token of each row. It gives
what it carries on, which takes the place of the former, and the output.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import peers
from benchmarks.problems import random_inputs
from interdomain_jax.array_types import State
from interdomain_jax.ops import Dynamics, interdomain_attention, state_at
from interdomain_jax.ops.decoding import DecodingState, begin_interdomain, begin_linear, interdomain_step, linear_step
from interdomain_jax.ops.dynamics import ReadFactors, complex_multiply, lambda_powers, read_factors
from interdomain_jax.ops.interdomain import Implementation

OURS = "interdomain"
HEADS_FIRST = "softmax heads first"


class Layer(NamedTuple):
    """A layer's mixer: its heads, each with a state of its own, the width of their keys and values, and their modes."""

    heads: int
    head_dim: int
    state_dim: int


class Inputs(NamedTuple):
    """Query, key and value of one token of each row, [B, 1, H, D], and the layer's dynamics."""

    q: Array
    k: Array
    v: Array
    dynamics: Dynamics


class Cache(NamedTuple):
    """Keys and values of all tokens, the present one in the last place: [B, L, H, D], or [B H, L, D]."""

    keys: Array
    values: Array


class PaperState(NamedTuple):
    """A state, and what its dynamics give: lambda and b [H, 2, M, 1], and the factors of the read."""

    state: State
    decay: Array
    weight: Array
    read: ReadFactors


Step = Callable[[Any, Any], tuple[Any, Array]]


def interdomain(decoding: DecodingState, inputs: Inputs) -> tuple[DecodingState, Array]:
    """The step of our generator."""
    out, decoding = interdomain_step(*inputs[:3], decoding)
    return decoding, out


def op(state: State, inputs: Inputs, implementation: Implementation | None = None) -> tuple[State, Array]:
    """The public op on one token, its state as all ops take it; what its dynamics give is worked out every time."""
    out, state = interdomain_attention(*inputs, initial_state=state, implementation=implementation)
    return state, out


def paper(carry: PaperState, inputs: Inputs) -> tuple[PaperState, Array]:
    """The same output as the paper computes it: U = C X_k and Gamma = C X_v are formed, in the dtype of the token."""
    q, k, v, _ = inputs
    width = k.shape[-1]
    z = jnp.concatenate([k, v], axis=-1).swapaxes(1, 2)[:, :, :, None]
    state = complex_multiply(carry.state, carry.decay, axis=-3) + carry.weight * z
    readout, scale = carry.read
    modes = state.reshape(*state.shape[:2], -1, state.shape[-1])
    product = partial(jnp.einsum, precision="highest", preferred_element_type=state.dtype)
    coefficients = product("hcm,bhmz->bhcz", readout.astype(k.dtype), modes.astype(k.dtype))
    u, gamma = coefficients[..., :width], coefficients[..., width:]
    weights = product("bthr,bhcr->bhtc", q.astype(state.dtype), u) * scale[:, None]
    return carry._replace(state=state), product("bhtc,bhcd->bthd", weights, gamma).astype(v.dtype)


def s4d(decoding: DecodingState, inputs: Inputs) -> tuple[DecodingState, Array]:
    """The control's contraction, of a state as large as ours; its output is twice as wide."""
    out, decoding = linear_step(jnp.concatenate([inputs.k, inputs.v], axis=-1), decoding)
    return decoding, out


def softmax(cache: Cache, inputs: Inputs, implementation: Any = None) -> tuple[Cache, Array]:
    """Softmax attention to all tokens of a full cache, the present one written into its last place."""
    q, k, v, _ = inputs
    last = cache.keys.shape[1] - 1
    write = lambda held, new: jax.lax.dynamic_update_slice_in_dim(held, new, last, axis=1)
    cache = Cache(write(cache.keys, k), write(cache.values, v))
    return cache, jax.nn.dot_product_attention(q, *cache, implementation=implementation)


def softmax_heads_first(cache: Cache, inputs: Inputs) -> tuple[Cache, Array]:
    """The same with a cache in the order that its products read it, as our decoder keeps it; the other one is put in
    order for every token."""
    merge = lambda x: x.reshape(-1, 1, x.shape[-1])
    q, k, v = (merge(x) for x in inputs[:3])
    last = cache.keys.shape[1] - 1
    write = lambda held, new: jax.lax.dynamic_update_slice_in_dim(held, new, last, axis=1)
    cache = Cache(write(cache.keys, k), write(cache.values, v))
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(product("nqd,nsd->nqs", q, cache.keys) * q.shape[-1] ** -0.5)
    out = product("nqs,nsd->nqd", weights.astype(v.dtype), cache.values)
    return cache, out.astype(v.dtype).reshape(inputs.v.shape)


def copy(state: State, inputs: Inputs) -> tuple[State, Array]:
    """Reads and writes each number of the state, no more: it turns the signs."""
    return -state, inputs.v


STEPS: dict[str, Step] = {
    OURS: interdomain,
    "op": op,
    "kernel (gpu)": partial(op, implementation="pallas_gpu"),
    "kernel (tpu)": partial(op, implementation="pallas_tpu"),
    "paper": paper,
    "s4d": s4d,
    "softmax": softmax,
    HEADS_FIRST: softmax_heads_first,
    "softmax (cudnn)": partial(softmax, implementation="cudnn"),
    "mamba2": peers.mamba2_step,
    "mlstm": peers.mlstm_step,
    "copy": copy,
}
"""By the names of the cases."""

PEERS = {"mamba2": peers.mamba2_arguments, "mlstm": peers.mlstm_arguments}
"""What draws the inputs of those that are other packages' steps."""


def keeps_tokens(name: str) -> bool:
    """Whether what the case carries grows with the prefix."""
    return name.startswith("softmax")


def carry_shape(name: str, layer: Layer, batch: int, prefix: int, dtype: Any) -> Any:
    """What the case carries, as shapes; caches in `dtype`, states in float32 always."""
    if keeps_tokens(name):
        shape: tuple[int, ...] = (batch, prefix, layer.heads, layer.head_dim)
        if name == HEADS_FIRST:
            shape = (batch * layer.heads, prefix, layer.head_dim)
        tokens = jax.ShapeDtypeStruct(shape, dtype)
        return Cache._make([tokens, tokens])
    state = jax.ShapeDtypeStruct((batch, layer.heads, 2, layer.state_dim, 2 * layer.head_dim), jnp.float32)
    return jax.eval_shape(partial(carried, name), state, make_inputs(layer, 1, dtype).dynamics)


def make_inputs(layer: Layer, batch: int, dtype: Any) -> Inputs:
    """A random token for each row, and the dynamics that a layer starts with."""
    *_, dynamics = random_inputs(np.random.default_rng(0), 1, *layer)
    token = lambda key: jax.random.normal(key, (batch, 1, layer.heads, layer.head_dim), dtype)
    q, k, v = map(token, jax.random.split(jax.random.key(0), 3))
    return Inputs(q, k, v, dynamics)


def inputs_of(name: str, layer: Layer, batch: int, dtype: Any) -> Any:
    """What the case takes for one token of each row: `make_inputs`, or what a peer takes in its place."""
    if name not in PEERS:
        return make_inputs(layer, batch, dtype)
    return PEERS[name](
        np.random.default_rng(0),
        peers.Sizes(1, layer.heads, layer.head_dim, state_size=4 * layer.state_dim, batch=batch),
        dtype,
    )


def start(name: str, layer: Layer, batch: int, prefix: int, dtype: Any) -> Any:
    """What the case carries after `prefix` random tokens, the same ones in every row and for every case."""
    every_row = lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:]))
    if not keeps_tokens(name):
        carry = lambda row, dynamics: carried(name, every_row(row), dynamics)
        return jax.jit(carry)(_state(layer, prefix, dtype), make_inputs(layer, 1, dtype).dynamics)
    row = _tokens(layer, prefix, dtype)
    if name == HEADS_FIRST:
        row = jax.tree.map(lambda x: x.swapaxes(1, 2), row)
    shapes = carry_shape(name, layer, batch, prefix, dtype)
    return jax.jit(lambda row: jax.tree.map(lambda x, to: every_row(x).reshape(to.shape), row, shapes))(row)


def carried(name: str, state: State, dynamics: Dynamics) -> Any:
    """What a case that keeps no tokens carries: this state, and what is worked out before the first token."""
    if name == OURS:
        return begin_interdomain(state, dynamics, state.shape[-1] // 2)
    if name == "s4d":
        return begin_linear(state, dynamics)
    if name in PEERS:
        # As many numbers, laid out as the peer has them.
        matrix = state.reshape(*state.shape[:2], -1, state.shape[-1] // 2)
        return matrix.swapaxes(2, 3) if name == "mamba2" else peers.mlstm_state(matrix)
    if name != "paper":
        return state
    decay = lambda_powers(dynamics.log_decay, dynamics.angle, jnp.ones(1, jnp.int32))[:, 0, :, :, None]
    weight = jnp.stack(dynamics.input_weight, axis=1)[..., None]
    return PaperState(state, decay, weight, read_factors(dynamics, "bilinear"))


def _tokens(layer: Layer, length: int, dtype: Any) -> Cache:
    keys = jax.random.split(jax.random.key(1))
    return Cache(*(jax.random.normal(key, (1, length, layer.heads, layer.head_dim), dtype) for key in keys))


@cache
def _state(layer: Layer, length: int, dtype: Any) -> State:
    tokens = jnp.concatenate(_tokens(layer, length, dtype), axis=-1)
    return jax.jit(state_at, static_argnums=2)(tokens, make_inputs(layer, 1, dtype).dynamics, length)


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays, or shapes, of a tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
