"""The Llama-style pre-norm decoder: embedding, blocks of mixer and SwiGLU, untied output (paper, section 2)."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype

from interdomain_jax.array_types import Activations, Logits, Positions, SegmentIds, Tokens
from interdomain_jax.modules.layers import MATRIX_INIT_STD, MIXER_INPUTS, ROPE_BASE, RMSNorm, SwiGLU, check_heads
from interdomain_jax.modules.mixers import DELTA_RANGE, MIXERS, RecurrentCache
from interdomain_jax.modules.softmax import KeyValueCache
from interdomain_jax.ops.dynamics import Read
from interdomain_jax.ops.interdomain import MAX_CHUNK_SIZE, Implementation
from interdomain_jax.ops.shards import constrain

LayerCache = RecurrentCache | KeyValueCache
Cache = tuple
"""A tree of layer caches; with scanned layers each leaf has a leading axis over the repeats of the pattern."""

MakeModule = Callable[..., nn.Module]

Remat = Literal["none", "dots", "mixer_inputs", "full"]

KEPT: dict[str, Callable[..., Any]] = {
    # Products with weights have no batch dimension. Those inside a mixer have the batch's: cheap to repeat, and their
    # results, token by token or state by state, too large to keep.
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "mixer_inputs": jax.checkpoint_policies.save_only_these_names(MIXER_INPUTS),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What each way of rematerialization keeps of a block beside its input."""


class Decoder(nn.Module):
    """A decoder-only language model whose token mixers follow a repeating pattern.

    Attributes:
        vocab_size: rows of the embedding, V.
        d_model: width of the residual stream.
        num_layers: blocks; a multiple of the pattern's length.
        num_heads: query heads of every mixer.
        head_dim: width of a head.
        mixers: the pattern, names from `MIXERS`: ("interdomain",) for the paper's model, or for a hybrid
            ("interdomain", "interdomain", "interdomain", "softmax").
        num_kv_heads: key/value heads; None for one each. Mixers with a linear contraction share nothing and ignore it.
        mlp_dim: hidden width of the SwiGLU layers; None for the paper's, `swiglu_hidden_dim(d_model)`.
        rope_base: of the rotations in every mixer that rotates, see `apply_rope`.
        state_dim: modes M of a recurrent mixer.
        delta_range: of the first step lengths of a recurrent mixer, see `InterdomainAttention`.
        read: "bilinear" or "hermitian", see `interdomain_attention`.
        output_gate: the optional SiLU gate on a recurrent mixer's output; softmax has none.
        chunk_size: tokens in a chunk; None for the default.
        implementation: of the op; None for the best on this platform.
        scan_layers: one compiled pattern, scanned over stacked parameters; the same function, compiled faster.
        remat: what a block keeps for the backward pass, which computes the rest once more: "none" recomputes nothing;
            "dots" keeps the products with weight matrices; "mixer_inputs" the queries, keys and values as projected;
            "full" the block's input alone.
        init_std: standard deviation of the matrices' first entries; residual outputs divide it by sqrt(2 layers).
        norm_epsilon: of every RMSNorm (Llama 2's value; the paper gives none).
        dtype: of the computation. Logits and recurrent states are float32 whatever it is.
        param_dtype: of the parameters.

    Raises:
        ValueError: a field out of its range, in one sentence, when the module is built.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    head_dim: int
    mixers: tuple[str, ...] = ("interdomain",)
    num_kv_heads: int | None = None
    mlp_dim: int | None = None
    rope_base: float = ROPE_BASE
    state_dim: int = 64
    delta_range: tuple[float, float] = DELTA_RANGE
    read: Read = "bilinear"
    output_gate: bool = False
    chunk_size: int | None = None
    implementation: Implementation | None = None
    scan_layers: bool = False
    remat: Remat = "none"
    init_std: float = MATRIX_INIT_STD
    norm_epsilon: float = 1e-5
    dtype: Dtype = jnp.float32
    param_dtype: Dtype = jnp.float32

    def __post_init__(self) -> None:
        self._check()
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        tokens: Tokens,
        *,
        positions: Positions | None = None,
        segment_ids: SegmentIds | None = None,
        cache: Cache | None = None,
        unembed: bool = True,
    ) -> tuple[Logits | Activations, Cache | None]:
        """The logits of every token, from those of its document up to it.

        Args:
            tokens: [B, T] whole numbers below `vocab_size`.
            positions: [B, T], for RoPE; by default those of the tokens in their documents, behind the cache's.
            segment_ids: [B, T], the document of each token; 0 is padding, which may lie anywhere and changes nothing.
                None goes on with the document of the cache.
            cache: of the tokens before, as the last call or `init_cache` returned it; None for training.
            unembed: False for the hidden states that the logits are products of, in place of the logits.

        Returns:
            Logits [B, T, V] float32, or hidden states [B, T, d_model] in the compute dtype; and the cache after the
            last token that is not padding, or None if none was given.
        """
        embedding = nn.Embed(
            self.vocab_size,
            self.d_model,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            embedding_init=self._kernel_init,
            name="embed",
        )
        # Looked up in rows that are whole: parts of them would have to be exchanged for rows of the batch afterwards.
        table = constrain(embedding.embedding.astype(self.dtype), "V E")
        x = constrain(jnp.take(table, tokens, axis=0), "B T E")
        if segment_ids is not None:
            x = jnp.where((segment_ids != 0)[..., None], x, 0)
        block = Block
        if self.remat != "none":
            block = nn.remat(Block, prevent_cse=not self.scan_layers, policy=KEPT[self.remat])
        blocks = tuple(self._make_block(block, name) for name in self.mixers)
        if self.scan_layers:
            scanned = nn.scan(
                Pattern,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(0, nn.broadcast, nn.broadcast),
                length=self._repeats,
            )
            x, cache = scanned(blocks, name="layers")(x, cache, positions, segment_ids)
        else:
            caches = []
            for i in range(self._repeats):
                pattern = Pattern(blocks, name=f"layers_{i}")
                x, after = pattern(x, None if cache is None else cache[i], positions, segment_ids)
                caches.append(after)
            cache = None if cache is None else tuple(caches)
        x = RMSNorm(self.norm_epsilon, self.dtype, self.param_dtype, name="norm")(x)
        if not unembed and not self.is_initializing():
            return x, cache
        logits = nn.Dense(
            self.vocab_size,
            use_bias=False,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self._kernel_init,
            # Operands in the compute dtype, sums kept in float32: the loss never sees a rounded logit.
            dot_general=partial(jax.lax.dot_general, preferred_element_type=jnp.float32),
            name="unembed",
        )(x)
        return logits, cache

    @nn.nowrap
    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """The cache before the first token; `max_length` bounds the tokens that softmax layers can hold."""
        pattern = tuple(self._make_mixer(name)().init_cache(batch_size, max_length) for name in self.mixers)
        if self.scan_layers:
            return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self._repeats, *leaf.shape)), pattern)
        return (pattern,) * self._repeats

    @nn.nowrap
    def begin_decoding(self, params: Mapping[str, Any], cache: Cache) -> Cache:
        """The cache in a form in which single tokens are read fastest, until `end_decoding`.

        Args:
            params: of the model; what they give the tokens is worked out once, here.
            cache: as a call or `init_cache` returned it.

        Raises:
            ValueError: the model scans its layers, which would copy the states and all that was worked out.
        """
        if self.scan_layers:
            raise ValueError("scan_layers is True; decode with separate layers, see `modules/layer_layout.py`.")
        return tuple(
            tuple(
                self._make_mixer(name)().begin_decoding(params[f"layers_{i}"][f"block_{j}"]["mixer"], layer)
                for j, (name, layer) in enumerate(zip(self.mixers, pattern, strict=True))
            )
            for i, pattern in enumerate(cache)
        )

    @nn.nowrap
    def end_decoding(self, cache: Cache) -> Cache:
        """Undoes `begin_decoding`."""
        return tuple(
            tuple(
                self._make_mixer(name)().end_decoding(layer) for name, layer in zip(self.mixers, pattern, strict=True)
            )
            for pattern in cache
        )

    @property
    def _repeats(self) -> int:
        return self.num_layers // len(self.mixers)

    @nn.nowrap
    def _make_mixer(self, name: str) -> MakeModule:
        make = partial(
            MIXERS[name],
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_kv_heads=self.num_kv_heads,
            rope_base=self.rope_base,
            kernel_init=self._kernel_init,
            output_init=self._output_init,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
        )
        if name == "softmax":
            return make
        return partial(
            make,
            state_dim=self.state_dim,
            delta_range=self.delta_range,
            read=self.read,
            output_gate=self.output_gate,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
            norm_epsilon=self.norm_epsilon,
        )

    def _make_block(self, block: MakeModule, mixer: str) -> MakeModule:
        return partial(
            block,
            self._make_mixer(mixer),
            partial(
                SwiGLU,
                hidden_dim=self.mlp_dim,
                kernel_init=self._kernel_init,
                output_init=self._output_init,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
            ),
            partial(RMSNorm, epsilon=self.norm_epsilon, dtype=self.dtype, param_dtype=self.param_dtype),
        )

    @property
    def _kernel_init(self) -> nn.initializers.Initializer:
        return nn.initializers.normal(self.init_std)

    @property
    def _output_init(self) -> nn.initializers.Initializer:
        """Residual output projections start smaller by sqrt(2 layers) (paper, section 5)."""
        return nn.initializers.normal(self.init_std / (2 * self.num_layers) ** 0.5)

    def _check(self) -> None:
        for field in ("vocab_size", "d_model", "num_layers", "state_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1; got {getattr(self, field)}.")
        unknown = [name for name in self.mixers if name not in MIXERS]
        if unknown or not self.mixers:
            raise ValueError(f"mixers must be names from {tuple(MIXERS)}; got {tuple(self.mixers)}.")
        if self.mlp_dim is not None and self.mlp_dim < 1:
            raise ValueError(f"mlp_dim must be at least 1; got {self.mlp_dim}.")
        for field in ("init_std", "rope_base"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be above 0; got {getattr(self, field)}.")
        low, high = self.delta_range
        if not 0 < low <= high:
            raise ValueError(f"delta_range must be two numbers above 0, the smaller first; got {self.delta_range}.")
        if self.num_layers % len(self.mixers):
            raise ValueError(
                f"num_layers must be a multiple of the {len(self.mixers)} mixers of the pattern; got {self.num_layers}."
            )
        check_heads(self.num_heads, self.head_dim, self.num_kv_heads)
        if self.chunk_size is not None and not 1 <= self.chunk_size <= MAX_CHUNK_SIZE:
            raise ValueError(f"chunk_size must lie between 1 and {MAX_CHUNK_SIZE}; got {self.chunk_size}.")
        for field, choices in (
            ("read", get_args(Read)),
            ("implementation", (None, *get_args(Implementation))),
            ("remat", get_args(Remat)),
        ):
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} must be one of {choices}; got {getattr(self, field)!r}.")


class Pattern(nn.Module):
    """One repeat of the pattern of mixers: a block for each.

    Attributes:
        blocks: for each block, a function that builds its module.
    """

    blocks: tuple[MakeModule, ...]

    @nn.compact
    def __call__(
        self, x: Activations, cache: Cache | None, positions: Positions | None, segment_ids: SegmentIds | None
    ) -> tuple[Activations, Cache | None]:
        """x [B, T, d_model] after the blocks, and their caches, or None without any; the rest as the mixers take it."""
        after = []
        for i, make in enumerate(self.blocks):
            block = make(name=f"block_{i}")
            x, layer_cache = block(x, None if cache is None else cache[i], positions, segment_ids)
            after.append(layer_cache)
        return x, None if cache is None else tuple(after)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); each part built by the function given for it."""

    make_mixer: MakeModule
    make_mlp: MakeModule
    make_norm: MakeModule

    @nn.compact
    def __call__(
        self, x: Activations, cache: LayerCache | None, positions: Positions | None, segment_ids: SegmentIds | None
    ) -> tuple[Activations, LayerCache | None]:
        """x [B, T, d_model] after the block, and the mixer's cache; the rest as the mixer takes it."""
        normed = self.make_norm(name="mixer_norm")(x)
        mixed, cache = self.make_mixer(name="mixer")(normed, positions=positions, segment_ids=segment_ids, cache=cache)
        x = constrain(x + mixed, "B T E")
        return constrain(x + self.make_mlp(name="mlp")(self.make_norm(name="mlp_norm")(x)), "B T E"), cache
