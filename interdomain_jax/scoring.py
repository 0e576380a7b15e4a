"""Next-token scoring, shared by the training loss, validation and the evaluator."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from interdomain_jax import sharding
from interdomain_jax.data.windows import CONTEXT


class LanguageModel(Protocol):
    """What scoring needs of a model: `modules.Decoder`, or any stand-in of the same shape.

    `variables["params"]["unembed"]["kernel"]` [d_model, V] maps its hidden states to logits.
    """

    def apply(self, variables: Any, tokens: Array, *, unembed: bool, **context: Any) -> Any:
        """Maps int tokens [B, T], with `unembed=False`, to (hidden states [B, T, d_model], cache).

        Where each document is a context of its own, it also takes `segment_ids` and `positions`, int [B, T]; and to go
        on behind other tokens `cache`, the one that it returned for them.
        """


class Score(NamedTuple):
    """A sum over scored tokens; arrays on the device, Python numbers once fetched.

    Attributes:
        nats: summed negative log-likelihood, in nats.
        tokens: number of tokens it is summed over.
    """

    nats: Any
    tokens: Any

    @property
    def loss(self) -> Any:
        """Mean negative log-likelihood, in nats per token."""
        return self.nats / self.tokens


class TokenScores(NamedTuple):
    """The score of each token of a batch, [B, T].

    Attributes:
        nats: negative log-likelihood, float32 at least; 0 where nothing is scored.
        is_greedy: whether no other id is more likely; where nothing is scored, anything.
    """

    nats: Array
    is_greedy: Array


class LogitSummary(NamedTuple):
    """What the negative log-likelihood needs of a token's logits, of those seen so far; each [B, T].

    Attributes:
        maximum: the largest.
        total: the sum of exp(logit - maximum).
        target: the target's logit, 0 where it has not been seen.
    """

    maximum: Array
    total: Array
    target: Array


ScoreFunction = Callable[[Any, Mapping[str, Array]], Score]


def next_token_scores(
    hidden: Array, kernel: Array, targets: Array, loss_mask: Array, *, vocab_chunks: int
) -> TokenScores:
    """The negative log-likelihood of each of `targets` where `loss_mask` is 1.

    The loader has shifted the targets: the logits `hidden[b, t] @ kernel` predict `targets[b, t]`. They are products of
    operands in the dtype of `hidden`, summed in float32, and so is everything after them.

    Chunk c of C holds the ids c, c + C, c + 2 C, ...: where devices share the columns of the kernel, each has its part
    of every chunk.

    Args:
        hidden: [B, T, d_model], any float dtype.
        kernel: [d_model, V], any float dtype, which is that of its gradient.
        targets: int [B, T], below V; where the mask is 0, anything.
        loss_mask: [B, T], 1 for a scored token, 0 for padding.
        vocab_chunks: number of chunks C in which the vocabulary is worked through. More than one never hold more than
            B T V / C logits, and compute them once more in the backward pass.
    """
    dtype, wide = hidden.dtype, jnp.promote_types(hidden.dtype, jnp.float32)
    scored = loss_mask > 0
    # Wide here, so that the chunks' gradients are added up wide. Padding is zeros before any product, for a NaN in it
    # would go through the products of the backward pass into the kernel's gradient.
    hidden = jnp.where(scored[..., None], hidden, 0).astype(wide)

    def summarize(summary: LogitSummary, chunk: tuple[Array, Array]) -> tuple[LogitSummary, None]:
        ids, columns = chunk
        logits = _product(hidden.astype(dtype), columns.astype(dtype))
        logits = jnp.where(ids < vocab_size, logits, -jnp.inf)
        maximum = jax.lax.stop_gradient(jnp.maximum(summary.maximum, logits.max(axis=-1)))
        total = summary.total * jnp.exp(summary.maximum - maximum) + jnp.exp(logits - maximum[..., None]).sum(axis=-1)
        # Compared rather than indexed: where devices share the columns, each looks through its own.
        target = summary.target + jnp.where(ids == targets[..., None], logits, 0).sum(axis=-1)
        return LogitSummary(maximum, total, target), None

    d_model, vocab_size = kernel.shape
    columns = -(-vocab_size // vocab_chunks)
    kernel = jnp.pad(kernel, [(0, 0), (0, columns * vocab_chunks - vocab_size)])
    kernel = jnp.moveaxis(kernel.reshape(d_model, columns, vocab_chunks), -1, 0)
    ids = jnp.arange(columns * vocab_chunks).reshape(columns, vocab_chunks).T
    zeros = jnp.zeros(targets.shape, wide)
    summary = LogitSummary(maximum=jnp.full_like(zeros, -jnp.inf), total=zeros, target=zeros)
    # With one chunk the compiler leaves neither the loop nor the second computation.
    summary, _ = jax.lax.scan(jax.checkpoint(summarize, prevent_cse=False), summary, (ids, kernel))
    # The difference of two logits first: they may be so large that a float32 near them has no room for the logarithm.
    nats = (summary.maximum - summary.target) + jnp.log(summary.total)
    return TokenScores(jnp.where(scored, nats, 0.0), summary.target >= summary.maximum)


@jax.custom_vjp
def _product(hidden: Array, columns: Array) -> Array:
    """`hidden` [B, T, d_model] @ `columns` [d_model, V], summed in float32 at least."""
    return jnp.matmul(hidden, columns, preferred_element_type=jnp.promote_types(hidden.dtype, jnp.float32))


def _product_forward(hidden: Array, columns: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(hidden, columns), (hidden, columns)


def _product_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    # Autodiff would write the second product the other way around, for which a CPU first transposes all the logits'.
    hidden, columns = saved
    to_hidden = jnp.matmul(cotangent, columns.T, preferred_element_type=cotangent.dtype)
    to_columns = jnp.einsum("btd,btv->dv", hidden, cotangent, preferred_element_type=cotangent.dtype)
    return to_hidden.astype(hidden.dtype), to_columns.astype(columns.dtype)


_product.defvjp(_product_forward, _product_backward)


def next_token_score(hidden: Array, kernel: Array, targets: Array, loss_mask: Array, *, vocab_chunks: int) -> Score:
    """Sums `next_token_scores`, of the same arguments, over the tokens where `loss_mask` is 1.

    Returns:
        Scalars, float32 at least.
    """
    return total(next_token_scores(hidden, kernel, targets, loss_mask, vocab_chunks=vocab_chunks), loss_mask)


def total(scores: TokenScores, loss_mask: Array) -> Score:
    """Sums the scores of the tokens where `loss_mask` is 1."""
    return Score(nats=jnp.sum(scores.nats), tokens=jnp.sum(loss_mask > 0, dtype=jnp.float32))


def model_token_scores(
    model: LanguageModel, params: Any, batch: Mapping[str, Array], *, vocab_chunks: int
) -> TokenScores:
    """Scores each target of a batch.

    Args:
        model: maps tokens [B, T] to hidden states.
        params: its parameters.
        batch: `inputs`, `targets` int [B, T] and `loss_mask` [B, T]; where each document is a context of its own, also
            `segment_ids` and `positions` int [B, T].
        vocab_chunks: as in `next_token_scores`.
    """
    context = {name: batch[name] for name in CONTEXT if name in batch}
    hidden, _ = model.apply({"params": params}, batch["inputs"], unembed=False, **context)
    kernel = params["unembed"]["kernel"]
    return next_token_scores(hidden, kernel, batch["targets"], batch["loss_mask"], vocab_chunks=vocab_chunks)


def model_score(model: LanguageModel, params: Any, batch: Mapping[str, Array], *, vocab_chunks: int) -> Score:
    """Sums `model_token_scores`, of the same arguments, over a batch."""
    return total(model_token_scores(model, params, batch, vocab_chunks=vocab_chunks), batch["loss_mask"])


def make_score_function(model: LanguageModel, mesh: Mesh, *, vocab_chunks: int) -> jax.stages.Wrapped:
    """Returns the jitted evaluation step `(params, batch) -> Score`, both on the mesh."""
    return _on_mesh(functools.partial(model_score, model, vocab_chunks=vocab_chunks), mesh)


def make_token_score_function(model: LanguageModel, mesh: Mesh, *, vocab_chunks: int) -> jax.stages.Wrapped:
    """Returns the jitted `(params, batch) -> TokenScores`, every process with the scores of all rows."""
    return _on_mesh(functools.partial(model_token_scores, model, vocab_chunks=vocab_chunks), mesh)


def _on_mesh(score: Callable[..., Any], mesh: Mesh) -> jax.stages.Wrapped:
    return jax.jit(sharding.on_mesh(score, mesh), out_shardings=sharding.replicated(mesh))


def score_batches(
    score: ScoreFunction, params: Any, batches: Iterable[Mapping[str, np.ndarray]], mesh: Mesh, *, batch_size: int
) -> Score:
    """Scores every batch; dispatches all of them first, then adds up in float64 on the host.

    Args:
        score: from `make_score_function`.
        params: on the mesh.
        batches: this process's rows of each, see `sharding.process_rows`.
        mesh: from `sharding.make_mesh`.
        batch_size: rows of a batch, over all processes.

    Returns:
        A Score of Python floats.

    Raises:
        ValueError: when the batches hold no token to score.
    """
    scores = [score(params, sharding.place_batch(batch, mesh, batch_size)) for batch in batches]
    nats = sum(float(each.nats) for each in scores)
    tokens = sum(float(each.tokens) for each in scores)
    if tokens == 0:
        raise ValueError("there is no token to score: the evaluation text is empty")
    return Score(nats, tokens)
