"""Softmax attention, the canonical mixer that the others are compared with, and its cache of every token."""

from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from interdomain_jax.array_types import Activations, Positions, SegmentIds
from interdomain_jax.modules.layers import MATRIX_INIT, MIXER_INPUTS, ROPE_BASE, apply_rope, check_heads, project
from interdomain_jax.modules.placement import Progress, no_progress, place_tokens
from interdomain_jax.ops.shards import TOKEN_AXIS


class KeyValueCache(NamedTuple):
    """What softmax attention carries: keys and values of every token so far.

    Attributes:
        keys: [B, Hkv, L, D], rotated; L is the most tokens the cache can hold. Heads come first, as products read them.
        values: [B, Hkv, L, D].
        filled: [B] int32, tokens held, those of earlier documents too.
        progress: how far each row has come.
    """

    keys: Float[Array, "B Hkv L D"]
    values: Float[Array, "B Hkv L D"]
    filled: Int[Array, " B"]
    progress: Progress


class SoftmaxAttention(nn.Module):
    """Canonical causal multi-head attention with RoPE (paper, section 3).

    Attributes:
        num_heads, head_dim, num_kv_heads, rope_base: as in `InterdomainAttention`.
        kernel_init: initializer of every projection but W_O.
        output_init: initializer of W_O.
        dtype, param_dtype: of the computation and the parameters.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    rope_base: float = ROPE_BASE
    kernel_init: Initializer = MATRIX_INIT
    output_init: Initializer = MATRIX_INIT
    dtype: Dtype = jnp.float32
    param_dtype: Dtype = jnp.float32

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.head_dim, self.num_kv_heads)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: Activations,
        *,
        positions: Positions | None = None,
        segment_ids: SegmentIds | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Activations, KeyValueCache | None]:
        """Mixes x [B, T, d_model] as `InterdomainAttention` does; the tokens seen must fit the cache's length.

        Raises:
            ValueError: more tokens than the cache is long, or a mesh that splits rows.
        """
        require_whole_rows()
        batch, length, d_model = x.shape
        kv_heads = self.num_kv_heads or self.num_heads
        placement = place_tokens(None if cache is None else cache.progress, segment_ids, batch, length)
        positions = placement.positions if positions is None else placement.arrange(positions)
        x = placement.arrange_inputs(x)

        def projected(name: str, num_heads: int) -> Array:
            y = project(name, num_heads * self.head_dim, self.kernel_init, self.dtype, self.param_dtype)(x)
            y = checkpoint_name(y, MIXER_INPUTS)
            return y.reshape(batch, length, num_heads, self.head_dim)

        q = apply_rope(projected("query", self.num_heads), positions, self.rope_base)
        k = apply_rope(projected("key", kv_heads), positions, self.rope_base)
        v = projected("value", kv_heads)
        slots = jnp.broadcast_to(jnp.arange(length), (batch, length))
        if cache is not None:
            capacity = cache.keys.shape[2]
            if length > capacity:
                raise ValueError(f"{length} tokens do not fit a cache of length {capacity}.")
            slots = cache.filled[:, None] + slots
            # Padding lands behind the tokens, where the next call overwrites it, or beyond the end, where it is lost.
            rows = jnp.arange(batch)[:, None]
            insert = lambda held, new: held.at[rows, :, slots].set(new, mode="drop")
            cache = KeyValueCache(
                insert(cache.keys, k), insert(cache.values, v), cache.filled + placement.lengths, placement.progress
            )
        if cache is None and segment_ids is None:
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        else:
            # A token sees those before it as far back as its document goes.
            held = length if cache is None else cache.keys.shape[2]
            distance = slots[:, :, None] - jnp.arange(held)
            mask = (distance >= 0) & (distance <= placement.positions[:, :, None])
            if cache is None:
                out = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
            else:
                out = _attend_heads_first(q, cache.keys, cache.values, mask)
        out = project("output", d_model, self.output_init, self.dtype, self.param_dtype)(out.reshape(batch, length, -1))
        return placement.restore_outputs(out), cache

    @nn.nowrap
    def init_cache(self, batch_size: int, max_length: int) -> KeyValueCache:
        """An empty cache for at most `max_length` tokens."""
        shape = (batch_size, self.num_kv_heads or self.num_heads, max_length, self.head_dim)
        return KeyValueCache(
            jnp.zeros(shape, self.dtype),
            jnp.zeros(shape, self.dtype),
            jnp.zeros(batch_size, jnp.int32),
            no_progress(batch_size),
        )

    @nn.nowrap
    def begin_decoding(self, params: Mapping[str, Array], cache: KeyValueCache) -> KeyValueCache:
        """The cache as it is, which suits single tokens as well."""
        return cache

    @nn.nowrap
    def end_decoding(self, cache: KeyValueCache) -> KeyValueCache:
        """The cache as it is."""
        return cache


def require_whole_rows() -> None:
    """Checks that the mesh in use leaves the tokens of a row together.

    Raises:
        ValueError: it splits them, in one sentence.
    """
    parts = jax.sharding.get_abstract_mesh().shape.get(TOKEN_AXIS, 1)
    if parts > 1:
        raise ValueError(
            f"softmax attention sees all tokens of a row, which mesh.{TOKEN_AXIS}={parts} splits; "
            f"set mesh.{TOKEN_AXIS} to 1, or use a mixer with a recurrent state."
        )


def _attend_heads_first(q: Array, keys: Array, values: Array, mask: Array) -> Array:
    """`jax.nn.dot_product_attention` to a cache: q [B, T, H, D], keys and values [B, Hkv, L, D], mask [B, T, L].

    The function itself takes heads last, and would put the whole cache in order for every call.
    """
    batch, length, _, width = q.shape
    grouped = q.reshape(batch, length, keys.shape[1], -1, width)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bthgd,bhld->bhgtl", grouped, keys, preferred_element_type=wide) * width**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, jnp.finfo(wide).min)).astype(q.dtype)
    return jnp.einsum("bhgtl,bhld->bthgd", weights, values).reshape(q.shape)
