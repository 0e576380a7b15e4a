"""Flax Linen modules: the mixers, and the decoder built from them."""

from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.modules.layers import RMSNorm, ShortConvolution, SwiGLU
from interdomain_jax.modules.mixers import MIXERS, InterdomainAttention, RecurrentCache, S4DMixer, layer_dynamics
from interdomain_jax.modules.softmax import KeyValueCache, SoftmaxAttention

__all__ = [
    "MIXERS",
    "Decoder",
    "InterdomainAttention",
    "KeyValueCache",
    "RMSNorm",
    "RecurrentCache",
    "S4DMixer",
    "ShortConvolution",
    "SoftmaxAttention",
    "SwiGLU",
    "layer_dynamics",
]
