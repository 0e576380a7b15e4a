"""The compiled parts of generation: reading a piece of the prompts, and the loop that draws and reads tokens."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int

from interdomain_jax.inference.sampling import Sampling, next_tokens
from interdomain_jax.inference.states import State
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.ops.decoding import DecodingState
from interdomain_jax.ops.shards import HEAD_AXES, ROW_AXES


class Settings(NamedTuple):
    """Those of the requests, as arrays.

    Attributes:
        sampling: [B] each.
        keys: [B] random keys.
        limits: [B], most tokens.
        stops: [B, S, L] ids, aligned to the right; -1 before them.
    """

    sampling: Sampling
    keys: Array
    limits: Int[Array, " B"]
    stops: Int[Array, "B S L"]


class Written(NamedTuple):
    """What the loop has written.

    Attributes:
        tokens: [B, N].
        log_probabilities: [B, N].
        counts: [B], tokens of each row.
        done: [B], whether a row has ended.
        stopped: [B], length of the stop sequence that ended it; 0 if none did.
    """

    tokens: Int[Array, "B N"]
    log_probabilities: Float[Array, "B N"]
    counts: Int[Array, " B"]
    done: Bool[Array, " B"]
    stopped: Int[Array, " B"]


def placement(state: State, mesh: Mesh) -> Any:
    """Where a state lies, decoding or not: rows and heads on the devices that work on them.

    Args:
        state: or its shapes.
        mesh: from `sharding.make_mesh`.
    """

    def heads(count: int) -> tuple[str, ...] | None:
        return None if count % math.prod(mesh.shape[axis] for axis in HEAD_AXES) else HEAD_AXES

    def place(leaf: Array) -> PartitionSpec:
        # Heads are an axis of states and of keys and values alone.
        return PartitionSpec(ROW_AXES, heads(leaf.shape[1])) if leaf.ndim >= 4 else PartitionSpec(ROW_AXES)

    def place_layer(layer: Any) -> Any:
        if not isinstance(layer, DecodingState):
            return place(layer)
        tables = jax.tree.map(lambda leaf: PartitionSpec(heads(leaf.shape[0])), layer)
        return tables._replace(parts=jax.tree.map(place, layer.parts), phase=place(layer.phase))

    specs = jax.tree.map(place_layer, state, is_leaf=lambda node: isinstance(node, DecodingState))
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def read(model: Decoder, params: Any, state: State, tokens: Array, is_token: Array) -> State:
    """Reads [B, T] tokens, those that are none behind the others."""
    result: Any = model.apply({"params": params}, tokens, segment_ids=is_token, cache=state.cache, unembed=False)
    hidden, cache = result
    count = jnp.sum(is_token, axis=1)
    last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    rows = jnp.arange(len(tokens))[:, None]
    return State(
        cache,
        jnp.where(count[:, None] > 0, _logits(params, last), state.logits),
        state.seen.at[rows, tokens].max(is_token > 0),
        state.length + count,
    )


def _logits(params: Any, hidden: Array) -> Array:
    kernel = params["unembed"]["kernel"].astype(hidden.dtype)
    return jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)


def begin(model: Decoder, params: Any, state: State, limits: Array, length: int) -> tuple[State, Written]:
    """The state in the form that decodes, and room for so many tokens of each row."""
    batch_size = len(limits)
    written = Written(
        jnp.zeros((batch_size, length), jnp.int32),
        jnp.zeros((batch_size, length), jnp.float32),
        jnp.zeros(batch_size, jnp.int32),
        limits == 0,
        jnp.zeros(batch_size, jnp.int32),
    )
    return state._replace(cache=model.begin_decoding(params, state.cache)), written


def end(model: Decoder, state: State) -> State:
    """The state in its usual form."""
    return state._replace(cache=model.end_decoding(state.cache))


def decode(
    model: Decoder, params: Any, state: State, settings: Settings, written: Written, steps: Array
) -> tuple[State, Written]:
    """Draws and reads tokens until all rows are done, at most `steps` of each."""

    def goes_on(carry: tuple[State, Written, Array]) -> Array:
        _, written, step = carry
        return (step < steps) & ~jnp.all(written.done)

    def body(carry: tuple[State, Written, Array]) -> tuple[State, Written, Array]:
        state, written, step = carry
        # A row's own number of the token, so that its draws do not depend on the others.
        keys = jax.vmap(jax.random.fold_in)(settings.keys, written.counts)
        tokens = next_tokens(state.logits, state.seen, settings.sampling, keys)
        written = _write(written, tokens, jax.nn.log_softmax(state.logits), settings)
        is_token = ~carry[1].done[:, None]
        return read(model, params, state, tokens[:, None], is_token.astype(jnp.int32)), written, step + 1

    state, written, _ = jax.lax.while_loop(goes_on, body, (state, written, jnp.zeros((), jnp.int32)))
    return state, written


def _write(written: Written, tokens: Array, log_probabilities: Array, settings: Settings) -> Written:
    """Appends a token to each row that is not done, and finds those that are done then."""
    rows = jnp.arange(len(tokens))
    goes_on = ~written.done
    # Rows that are done write beyond the end, where it is lost.
    place = jnp.where(goes_on, written.counts, written.tokens.shape[1])
    written_tokens = written.tokens.at[rows, place].set(tokens, mode="drop")
    chosen = jnp.take_along_axis(log_probabilities, tokens[:, None], axis=1)[:, 0]
    count = written.counts + goes_on
    # The last tokens of each row, as many as a stop sequence may have; -2 where there are none.
    length = settings.stops.shape[2]
    places = count[:, None] - length + jnp.arange(length)
    tail = jnp.where(places >= 0, jnp.take_along_axis(written_tokens, jnp.maximum(places, 0), axis=1), -2)
    is_wanted = settings.stops >= 0
    matches = jnp.all((settings.stops == tail[:, None]) | ~is_wanted, axis=2) & jnp.any(is_wanted, axis=2)
    # Of several that end here the longest.
    stopped = jnp.max(jnp.where(matches, jnp.sum(is_wanted, axis=2), 0), axis=1)
    stopped = jnp.where(goes_on, stopped, written.stopped).astype(jnp.int32)
    return Written(
        written_tokens,
        written.log_probabilities.at[rows, place].set(chosen, mode="drop"),
        count,
        written.done | (stopped > 0) | (count >= settings.limits),
        stopped,
    )
