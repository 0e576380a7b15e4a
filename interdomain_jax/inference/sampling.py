"""From logits to the next token of each row, by settings of its own."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


class Sampling(NamedTuple):
    """How tokens are drawn: numbers for one request, arrays [B] for a batch.

    The filters apply in this order: repetition penalty, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token, and no other filter but the penalty matters.
        top_k: keeps the k most likely tokens; 0 for all.
        top_p: keeps the most likely tokens that together have this probability, at least one; 1 for all.
        min_p: keeps tokens at least so likely, as a share of the most likely one; 0 for all.
        repetition_penalty: divides the positive logits of tokens that have been seen, in the prompt too, and multiplies
            the negative ones; 1 for none (Keskar et al. 2019, arXiv:1909.05858, section 4.1).
    """

    temperature: Any = 0.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    repetition_penalty: Any = 1.0

    def check(self) -> None:
        """Checks the settings of a request.

        Raises:
            ValueError: one is out of its range; it names the setting.
        """
        for name, is_right, range_ in (
            ("temperature", 0 <= self.temperature < float("inf"), "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0, 0 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0, 1 for none"),
        ):
            if not is_right:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {range_}")


def next_tokens(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], sampling: Sampling, keys: Array
) -> Int[Array, " B"]:
    """Draws the next token of each row, which depends on nothing but its own row of the arguments.

    Args:
        logits: of the next token, float32.
        seen: the tokens that the repetition penalty falls on.
        sampling: arrays [B].
        keys: [B], a random key for each row, of this token alone.
    """
    penalty = sampling.repetition_penalty[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    draws = sampling.temperature > 0
    drawn = jax.lax.cond(
        jnp.any(draws), lambda: _draw(logits, sampling, keys), lambda: jnp.zeros_like(draws, jnp.int32)
    )
    return jnp.where(draws, drawn, jnp.argmax(logits, axis=-1).astype(jnp.int32))


def _draw(logits: Array, sampling: Sampling, keys: Array) -> Array:
    logits = logits / jnp.where(sampling.temperature > 0, sampling.temperature, 1)[:, None]
    filters = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    logits = jax.lax.cond(jnp.any(filters), lambda: _filtered(logits, sampling), lambda: logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _filtered(logits: Array, sampling: Sampling) -> Array:
    """The logits, -inf where a filter drops the token; tokens as likely as the last one kept are kept too."""
    vocab_size = logits.shape[-1]
    ordered = jnp.sort(logits, axis=-1, descending=True)
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, vocab_size)[:, None]
    kept = jnp.arange(vocab_size) < top_k
    probabilities = jax.nn.softmax(jnp.where(kept, ordered, -jnp.inf), axis=-1)
    # What is more likely has less than top_p in all: the token that reaches it is the last one.
    kept &= jnp.cumsum(probabilities, axis=-1) - probabilities < sampling.top_p[:, None]
    kept &= probabilities >= sampling.min_p[:, None] * probabilities[:, :1]
    kept |= jnp.arange(vocab_size) == 0
    last = jnp.take_along_axis(ordered, jnp.sum(kept, axis=-1, keepdims=True) - 1, axis=-1)
    return jnp.where(logits >= last, logits, -jnp.inf)
