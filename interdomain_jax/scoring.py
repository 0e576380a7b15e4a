"""Next-token scoring, shared by the training loss, validation and the evaluator."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from interdomain_jax import sharding


class LanguageModel(Protocol):
    """What scoring needs of a model: `modules.Decoder`, or any stand-in of the same shape."""

    def apply(self, variables: Any, tokens: jax.Array) -> Any:
        """Maps int tokens [B, T] to (logits [B, T, V], cache)."""


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


ScoreFunction = Callable[[Any, Mapping[str, jax.Array]], Score]


def next_token_score(logits: jax.Array, targets: jax.Array, loss_mask: jax.Array) -> Score:
    """Sums the negative log-likelihood of `targets` over the tokens where `loss_mask` is 1.

    The loader has shifted the targets: `logits[b, t]` predicts `targets[b, t]`.

    Args:
        logits: [B, T, V], any float dtype; the softmax is taken in float32.
        targets: int [B, T].
        loss_mask: [B, T], 1 for a scored token, 0 for padding.

    Returns:
        Float32 scalars.
    """
    nats = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    scored = loss_mask > 0
    return Score(
        nats=jnp.sum(jnp.where(scored, nats, 0.0)),
        tokens=jnp.sum(scored, dtype=jnp.float32),
    )


def make_score_function(model: LanguageModel, mesh: Mesh) -> ScoreFunction:
    """Returns the jitted evaluation step `(params, batch on the mesh) -> Score`."""

    def score(params: Any, batch: Mapping[str, jax.Array]) -> Score:
        logits, _ = model.apply({"params": params}, batch["inputs"])
        return next_token_score(logits, batch["targets"], batch["loss_mask"])

    copied = sharding.replicated(mesh)
    return jax.jit(
        sharding.on_mesh(score, mesh), in_shardings=(copied, sharding.batch_sharded(mesh)), out_shardings=copied
    )


def score_batches(score: ScoreFunction, params: Any, batches: Iterable[Mapping[str, np.ndarray]], mesh: Mesh) -> Score:
    """Scores every batch; dispatches all of them first, then adds up in float64 on the host.

    Returns:
        A Score of Python floats.

    Raises:
        ValueError: when the batches hold no token to score.
    """
    scores = [score(params, sharding.place_batch(batch, mesh)) for batch in batches]
    nats = sum(float(each.nats) for each in scores)
    tokens = sum(float(each.tokens) for each in scores)
    if tokens == 0:
        raise ValueError("there is no token to score: the evaluation text is empty")
    return Score(nats, tokens)
