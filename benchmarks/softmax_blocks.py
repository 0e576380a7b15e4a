"""Causal softmax attention that never holds more than a few rows of its scores."""

import math

import jax
import jax.numpy as jnp


def attend_in_blocks(q: jax.Array, k: jax.Array, v: jax.Array, *, block_size: int) -> jax.Array:
    """What `jax.nn.dot_product_attention(..., is_causal=True)` gives, some queries at a time.

    The backward pass works the scores of each block out once more, so that memory grows with T, not with its square.

    Args:
        q, k, v: [B, T, H, D].
        block_size: queries in a block, at most; the largest number that divides both it and T is taken.
    """
    batch, length, heads, width = q.shape
    size = math.gcd(block_size, length)

    @jax.checkpoint
    def attend(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        start, queries = block
        mask = (start + jnp.arange(size))[:, None] >= jnp.arange(length)
        return jax.nn.dot_product_attention(queries, k, v, mask=mask[None, None])

    blocks = q.reshape(batch, -1, size, heads, width).swapaxes(0, 1)
    out = jax.lax.map(attend, (jnp.arange(0, length, size), blocks))
    return out.swapaxes(0, 1).reshape(q.shape)
