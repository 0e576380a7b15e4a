"""Flax Linen modules: the mixers, and the decoder built from them."""

from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.modules.layers import RMSNorm, ShortConvolution, SwiGLU
from interdomain_jax.modules.mixers import (
    MIXERS,
    InterdomainAttention,
    KeyValueCache,
    RecurrentCache,
    S4DMixer,
    SoftmaxAttention,
    layer_dynamics,
)

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
