"""Flax Linen modules: the mixers, and the decoder built from them."""

from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.modules.layers import RMSNorm, ShortConvolution, SwiGLU
from interdomain_jax.modules.mixers import MIXERS, InterdomainAttention, S4DMixer, SoftmaxAttention

__all__ = [
    "MIXERS",
    "Decoder",
    "InterdomainAttention",
    "RMSNorm",
    "S4DMixer",
    "ShortConvolution",
    "SoftmaxAttention",
    "SwiGLU",
]
