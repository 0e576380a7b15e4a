"""The parts every decoder of the Llama family has, and the short convolution of the linear-attention family."""

from functools import reduce
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer
from jax import Array
from jaxtyping import Float

from interdomain_jax.array_types import Activations, Positions
from interdomain_jax.modules.placement import Placement

CONVOLUTION_WIDTH = 4
"""Taps of the short convolution (paper, section 2, step 2)."""

MATRIX_INIT_STD = 0.02
"""Standard deviation of a matrix's first entries; those that write into the residual stream divide it by
sqrt(2 layers) (paper, section 5, which gives the latter and so implies the former)."""

MIXER_INPUTS = "mixer_inputs"
"""The name by which remat policies know what the mixers project from the residual stream: queries, keys and values."""

ROPE_BASE = 10_000.0
"""Base of the rotations, Llama 2's."""

Taps = Float[Array, "4 E"]

MATRIX_INIT = nn.initializers.normal(MATRIX_INIT_STD)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis, computed in float32 (Zhang and Sennrich, 2019)."""

    epsilon: float = 1e-5
    dtype: Dtype = jnp.float32
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """x [..., E], normalised over E, in `dtype`."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        return (normalize_rms(x, self.epsilon) * scale).astype(self.dtype)


def normalize_rms(x: Array, epsilon: float) -> Array:
    """x divided by its root mean square over the last axis, in float32 at least."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


def normalize_l2(x: Array, epsilon: float = 1e-6) -> Array:
    """x divided by its Euclidean norm over the last axis, in float32 at least."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + epsilon)


def apply_rope(x: Float[Array, "B T H R"], positions: Positions, base: float = ROPE_BASE) -> Float[Array, "B T H R"]:
    """Rotary position embedding: channel pairs (i, i + R/2) turned by positions * base^(-2i/R), in float32.

    From Su et al. (2021), with the pairs as Llama has them.

    Args:
        x: [B, T, H, R], R even.
        positions: [B, T] whole token positions.
        base: the larger, the slower the later pairs turn.

    Returns:
        [B, T, H, R] in the dtype of x.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half) / half)
    angles = positions[:, :, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1).astype(x.dtype)


class ShortConvolution(nn.Module):
    """The taps of a causal depthwise convolution over tokens, without bias (paper, section 2, step 2).

    `convolve` applies them.
    """

    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, width: int) -> Taps:
        """The taps [4, E] for E = `width` channels, in `param_dtype`; the last is that of the present token."""
        bound = CONVOLUTION_WIDTH**-0.5
        return self.param(
            "kernel",
            lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound),
            (CONVOLUTION_WIDTH, width),
            self.param_dtype,
        )


class Convolved(NamedTuple):
    """The output [B, T, E] of a convolution, and what to pass as `previous` to the next call, [B, 3, E]."""

    output: Activations
    previous: Activations


def convolve(x: Activations, taps: Taps, placement: Placement, previous: Activations | None = None) -> Convolved:
    """y_t = sum_i taps_i x_{t-3+i}, each document by itself.

    Args:
        x: [B, T, E].
        taps: [4, E], of a `ShortConvolution`.
        placement: of the tokens, padding last.
        previous: [B, 3, E], the last inputs of the document that the call before left off in; zeros if None.
    """
    batch, length, width = x.shape
    taps = taps.astype(x.dtype)
    if previous is None:
        previous = jnp.zeros((batch, CONVOLUTION_WIDTH - 1, width), x.dtype)
    previous = previous.astype(x.dtype)
    after = None
    if placement.edges is not None:
        own = _latest(jnp.concatenate([jnp.zeros_like(previous), x], axis=1), placement)
        previous, after = placement.edges.exchange_tails(previous, own)
    x = jnp.concatenate([previous, x], axis=1)
    shifted = [x[:, i : i + length] for i in range(CONVOLUTION_WIDTH)]
    if placement.document is not None:
        document = jnp.pad(placement.document, [(0, 0), (CONVOLUTION_WIDTH - 1, 0)])
        same = [document[:, i : i + length] == placement.document for i in range(CONVOLUTION_WIDTH)]
        shifted = [jnp.where(seen[..., None], part, 0) for seen, part in zip(same, shifted, strict=True)]
    output = reduce(jnp.add, (tap * part for tap, part in zip(taps, shifted, strict=True)))
    return Convolved(output, _latest(x, placement) if after is None else after)


def _latest(x: Activations, placement: Placement) -> Activations:
    """The last inputs of the present document, from x [B, 3 + T, E], the call's own behind those before it."""
    if placement.document is None:
        return x[:, 1 - CONVOLUTION_WIDTH :]
    document = jnp.pad(placement.document, [(0, 0), (CONVOLUTION_WIDTH - 1, 0)])
    last = placement.lengths[:, None] + jnp.arange(CONVOLUTION_WIDTH - 1)
    document = jnp.take_along_axis(document, last, axis=1)
    return jnp.where((document == document[:, -1:])[..., None], jnp.take_along_axis(x, last[..., None], axis=1), 0)


class SwiGLU(nn.Module):
    """W2 (SiLU(W1 x) * W3 x) (Shazeer, 2020).

    Its hidden width is the paper's, `swiglu_hidden_dim(d_model)`, where none is given.
    """

    hidden_dim: int | None = None
    kernel_init: Initializer = MATRIX_INIT
    output_init: Initializer = MATRIX_INIT
    dtype: Dtype = jnp.float32
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Activations) -> Activations:
        """[B, T, d_model] from x [B, T, d_model], computed in `dtype`."""
        d_model = x.shape[-1]
        hidden = self.hidden_dim or swiglu_hidden_dim(d_model)
        gate = project("w1", hidden, self.kernel_init, self.dtype, self.param_dtype)(x)
        value = project("w3", hidden, self.kernel_init, self.dtype, self.param_dtype)(x)
        return project("w2", d_model, self.output_init, self.dtype, self.param_dtype)(nn.silu(gate) * value)


def swiglu_hidden_dim(d_model: int) -> int:
    """(2/3)(4 d_model) rounded up to a multiple of 128 (paper, section 2)."""
    return -(-8 * d_model // (3 * 128)) * 128


def project(name: str, features: int, kernel_init: Initializer, dtype: Dtype, param_dtype: Dtype) -> nn.Dense:
    """A linear map with no bias, as every one in the paper."""
    return nn.Dense(features, use_bias=False, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, name=name)


def check_heads(num_heads: int, head_dim: int, num_kv_heads: int | None) -> None:
    """Checks head counts and a width.

    Raises:
        ValueError: no mixer can have them, in one sentence.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1; got {num_heads}.")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even, for RoPE turns pairs of channels; got {head_dim}.")
    if num_kv_heads is not None and (num_kv_heads < 1 or num_heads % num_kv_heads):
        raise ValueError(f"num_kv_heads must divide num_heads = {num_heads}; got {num_kv_heads}.")
