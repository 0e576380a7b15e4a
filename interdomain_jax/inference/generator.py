"""Generation: prompts are read in chunks, and tokens decoded in one compiled loop, for a batch of requests at once.

The batch has a fixed number of rows. A request's tokens depend on its own settings and seed, and not on what the other
rows do, nor on which row it has. All devices belong to one process.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from interdomain_jax import sharding
from interdomain_jax.inference import decode
from interdomain_jax.inference.sampling import Sampling
from interdomain_jax.inference.states import State, empty_state, take_rows, with_room
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.modules.layer_layout import separate_layers

# The shortest chunk of a prompt, and the fewest tokens, that a program is compiled for; others are powers of two of it.
_SHORTEST = 16


class Request(NamedTuple):
    """What to generate.

    Attributes:
        prompt: token ids; none only behind a state that has read something.
        max_new_tokens: at most so many, at least 1.
        sampling: how they are drawn.
        seed: of the drawing, 0 to 2^32 - 1.
        stop: token sequences, such as that of EOS alone; the first one ends the text, and is left out of it.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    seed: int = 0
    stop: tuple[tuple[int, ...], ...] = ()


class Completion(NamedTuple):
    """What was generated.

    Attributes:
        tokens: ids, without the stop sequence.
        log_probabilities: of each of them, in nats, under the model itself: before any filter or temperature.
        finish_reason: "stop" if a stop sequence came or `on_tokens` ended it, "length" if not.
    """

    tokens: list[int]
    log_probabilities: list[float]
    finish_reason: Literal["stop", "length"]


class Generator:
    """Generates for batches of requests with one set of compiled programs.

    Args:
        model: the language model.
        params: its parameters, on the mesh. Those of scanned layers are copied: drop them if memory is short.
        mesh: from `sharding.make_mesh`.
        batch_size: rows; a multiple of `sharding.row_parts(mesh)`.
        max_length: most tokens of a prompt and its completion together, in models with softmax layers, which reserve
            the room for it; others have no such bound, and ignore it.
        chunk_size: tokens of the prompts that are read at once: it bounds the memory.
    """

    def __init__(
        self, model: Decoder, params: Any, mesh: Mesh, *, batch_size: int, max_length: int, chunk_size: int = 512
    ):
        parts = sharding.row_parts(mesh)
        if batch_size < 1 or batch_size % parts:
            raise ValueError(f"batch_size is {batch_size}; it must be a multiple of mesh.data times mesh.fsdp, {parts}")
        if mesh.shape["seq"] > 1:
            raise ValueError(
                f"mesh.seq is {mesh.shape['seq']}; tokens that come one by one cannot be split: set it to 1"
            )
        if chunk_size < _SHORTEST or chunk_size & (chunk_size - 1):
            raise ValueError(f"chunk_size is {chunk_size}; it must be a power of two and at least {_SHORTEST}")
        # States of stacked layers would be taken out and put back for every token.
        if model.scan_layers:
            places = sharding.state_sharding(jax.eval_shape(separate_layers, params), mesh)
            model, params = model.clone(scan_layers=False), jax.jit(separate_layers, out_shardings=places)(params)
        self._model = model
        self._params = params
        self._batch_size = batch_size
        self._max_length = max_length if "softmax" in model.mixers else None
        self._chunk_size = chunk_size
        jit = lambda function, **options: jax.jit(sharding.on_mesh(function, mesh), **options)
        # A prompt is filled up to a power of two, which the cache must hold.
        self._room = _bucket(max_length)
        empty = functools.partial(empty_state, model, batch_size, self._room)
        begin = functools.partial(decode.begin, model)
        limits = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
        state = jax.eval_shape(empty)
        decoding, _ = jax.eval_shape(functools.partial(begin, length=_SHORTEST), params, state, limits)
        # Everything goes out as it came in: placed in another way it would be another program.
        self._places = decode.placement(state, mesh)
        decoding_places = decode.placement(decoding, mesh), sharding.replicated(mesh)
        self._empty = jit(empty, out_shardings=self._places)
        self._read = jit(functools.partial(decode.read, model), donate_argnums=1, out_shardings=self._places)
        self._begin = jit(begin, static_argnums=3, out_shardings=decoding_places)
        self._decode = jit(
            functools.partial(decode.decode, model), donate_argnums=(1, 3), out_shardings=decoding_places
        )
        self._end = jit(functools.partial(decode.end, model), out_shardings=self._places)
        self._take = jit(take_rows)

    def read(self, prompts: Sequence[Sequence[int]], state: State | None = None) -> State:
        """Reads a prompt in each row, behind what it has read; a row without a prompt stays as it is.

        Args:
            prompts: token ids, of `batch_size` rows at most.
            state: of `batch_size` rows; nothing read if None. It is used up.

        Raises:
            ValueError: an id is not in the vocabulary, a row would be longer than `max_length`, or the state has
                another number of rows.
        """
        self._check_rows(len(prompts))
        state = self._empty() if state is None else self._fitting(state)
        for row, (prompt, length) in enumerate(zip(prompts, np.asarray(state.length), strict=False)):
            try:
                self._check_tokens(prompt)
                self._check_length(int(length) + len(prompt), 0)
            except ValueError as error:
                raise ValueError(f"row {row}: {error}") from None
        longest = max(map(len, prompts), default=0)
        for start in range(0, longest, self._chunk_size):
            length = min(self._chunk_size, _bucket(longest - start))
            tokens = np.zeros((self._batch_size, length), np.int32)
            is_token = np.zeros((self._batch_size, length), np.int32)
            for row, prompt in enumerate(prompts):
                piece = prompt[start : start + length]
                tokens[row, : len(piece)], is_token[row, : len(piece)] = piece, 1
            state = self._read(self._params, state, tokens, is_token)
        return state

    def fork(self, state: State, rows: Sequence[int]) -> State:
        """A state whose rows are copies of these rows, filled up with the last; `state` stays as it is.

        Args:
            state: from here or elsewhere, of any number of rows.
            rows: at least one, and `batch_size` at most.

        Raises:
            ValueError: there are none, more, or others than the state has, or one is longer than `max_length`.
        """
        self._check_rows(len(rows))
        count = len(state.length)
        if not rows or not all(0 <= row < count for row in rows):
            raise ValueError(f"rows are {list(rows)}; they must be among the {count} of the state, counted from 0")
        rows = [*rows, *[rows[-1]] * (self._batch_size - len(rows))]
        return self._fitting(self._take(state, np.array(rows, np.int32)))

    def generate(
        self,
        requests: Sequence[Request],
        *,
        behind: State | None = None,
        on_tokens: Callable[[int, list[int]], bool | None] | None = None,
        stream_every: int = 8,
    ) -> list[Completion]:
        """Generates for any number of requests, `batch_size` at a time.

        Args:
            requests: in any number.
            behind: a state; every prompt goes on behind what its first row has read, and may be empty. It stays as it
                is.
            on_tokens: is given the number of a request and its next tokens, as soon as no stop sequence can take them
                back; where it returns True, that is enough of them, and the request has stopped.
            stream_every: tokens between two calls of it, in each row.

        Raises:
            ValueError: a request is out of its range, or does not fit `max_length`; nothing is generated.
        """
        self.check(requests, behind)
        completions = []
        for first in range(0, len(requests), self._batch_size):
            group = requests[first : first + self._batch_size]
            emit = None if on_tokens is None else lambda row, tokens, first=first: on_tokens(first + row, tokens)
            start = None if behind is None else self.fork(behind, [0])
            # Not by a name: it would keep the state alive beside the one that decodes.
            completed, _ = self.go_on(self.read([each.prompt for each in group], start), group, emit, stream_every)
            completions += completed
        return completions

    def check(self, requests: Sequence[Request], behind: State | None = None) -> None:
        """Checks that `generate` can serve the requests.

        Raises:
            ValueError: it cannot serve one of them; it names the request.
        """
        length = 0 if behind is None else int(behind.length[0])
        for number, request in enumerate(requests):
            try:
                if not length and not len(request.prompt):
                    raise ValueError("prompt is empty; give at least one token, such as that of the start of a text")
                self._check_request(request, length, request.prompt)
            except ValueError as error:
                raise ValueError(f"request {number}: {error}") from None

    def go_on(
        self,
        state: State,
        requests: Sequence[Request],
        on_tokens: Callable[[int, list[int]], bool | None] | None = None,
        stream_every: int = 8,
    ) -> tuple[list[Completion], State]:
        """Generates behind what each row has read, the prompts of the requests, and returns the state after it.

        The state has then read every token that was drawn, a stop sequence too. Arguments as for `generate`; a row that
        has read nothing begins with logits of zero. `state` is used up.

        Raises:
            ValueError: a request, their number, the state's rows or `stream_every` is out of range.
        """
        self._check_rows(len(requests))
        if stream_every < 1:
            raise ValueError(f"stream_every is {stream_every}; it must be at least 1")
        state = self._fitting(state)
        for row, (request, length) in enumerate(zip(requests, np.asarray(state.length), strict=False)):
            try:
                self._check_request(request, int(length), ())
            except ValueError as error:
                raise ValueError(f"row {row}: {error}") from None
        settings = self._settings(requests)
        most = max((request.max_new_tokens for request in requests), default=1)
        state, written = self._begin(self._params, state, settings.limits, _bucket(most))
        held_back = [max(map(len, request.stop), default=1) - 1 for request in requests]
        emitted = [0] * len(requests)
        # By what it was told of its tokens.
        ended = np.zeros(self._batch_size, bool)
        # Of a stream the first token at once: it is waited for.
        steps = most if on_tokens is None else 1
        while not np.all(written.done):
            state, written = self._decode(self._params, state, settings, written, steps)
            if on_tokens is None:
                continue
            steps = stream_every
            host = jax.device_get(written)
            for row, held in enumerate(held_back):
                # What may still turn out to be a stop sequence waits.
                end = int(host.counts[row] - host.stopped[row]) if host.done[row] else int(host.counts[row]) - held
                if end > emitted[row] and not ended[row]:
                    ended[row] = bool(on_tokens(row, host.tokens[row, emitted[row] : end].tolist()))
                    emitted[row] = end
            if np.any(ended & ~host.done):
                done = jax.device_put(ended | host.done, written.done.sharding)
                written = written._replace(done=done)
        state = self._end(state)
        host = jax.device_get(written)
        completions = []
        for row in range(len(requests)):
            end = int(host.counts[row] - host.stopped[row])
            completions.append(
                Completion(
                    host.tokens[row, :end].tolist(),
                    host.log_probabilities[row, :end].tolist(),
                    "stop" if host.stopped[row] or ended[row] else "length",
                )
            )
        return completions, state

    def _settings(self, requests: Sequence[Request]) -> decode.Settings:
        """Rows without a request end at once."""
        rows = [*requests, *[Request((), 0)] * (self._batch_size - len(requests))]
        count = _bucket(max(len(request.stop) for request in rows), shortest=1)
        length = _bucket(max((len(stop) for request in rows for stop in request.stop), default=1), shortest=1)
        stops = np.full((self._batch_size, count, length), -1, np.int32)
        for row, request in enumerate(rows):
            for number, stop in enumerate(request.stop):
                stops[row, number, length - len(stop) :] = stop
        values = Sampling(*zip(*(request.sampling for request in rows), strict=True))
        sampling = Sampling(*(np.array(each, np.float32) for each in values))._replace(
            top_k=np.array(values.top_k, np.int32)
        )
        keys = jax.vmap(jax.random.key)(np.array([request.seed for request in rows], np.uint32))
        limits = jnp.array([request.max_new_tokens for request in rows], jnp.int32)
        return decode.Settings(sampling, keys, limits, jnp.asarray(stops))

    def _check_rows(self, count: int) -> None:
        if count > self._batch_size:
            raise ValueError(f"{count} rows are given; the batch has {self._batch_size}")

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self._model.vocab_size:
                raise ValueError(f"token {token} is not in the vocabulary of {self._model.vocab_size} ids")

    def _check_length(self, length: int, more: int) -> None:
        if self._max_length is not None and length + more > self._max_length:
            raise ValueError(
                f"{length} tokens and {more} to generate are {length + more}; max_length is {self._max_length}, for "
                "which softmax layers hold keys and values"
            )

    def _fitting(self, state: State) -> State:
        """The state, which may come from elsewhere, in the shapes of those made here.

        Raises:
            ValueError: it has another number of rows, or a row is too long.
        """
        if len(state.length) != self._batch_size:
            raise ValueError(f"the state has {len(state.length)} rows; the batch has {self._batch_size}: fork it")
        # Without such a bound there is nothing to fetch from the device, and nothing to make room in.
        if self._max_length is not None:
            self._check_length(int(state.length.max()), 0)
            state = with_room(state, self._room)
        return jax.device_put(state, self._places)

    def _check_request(self, request: Request, length: int, prompt: Sequence[int]) -> None:
        """Checks a request that comes with this prompt behind so many tokens.

        Raises:
            ValueError: a setting is out of its range.
        """
        request.sampling.check()
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {request.max_new_tokens}; it must be at least 1")
        if not 0 <= request.seed < 2**32:
            raise ValueError(f"seed is {request.seed}; it must be at least 0 and below 2**32")
        if any(not stop for stop in request.stop):
            raise ValueError("stop has an empty sequence; it would end the text before its first token")
        self._check_tokens([*prompt, *itertools.chain(*request.stop)])
        self._check_length(length + len(prompt), request.max_new_tokens)


def _bucket(length: int, shortest: int = _SHORTEST) -> int:
    """The power of two that a length is rounded up to, so that few programs serve all lengths."""
    return max(shortest, 1 << (length - 1).bit_length() if length > 1 else 1)
