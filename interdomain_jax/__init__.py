"""Interdomain Attention in JAX: attention whose keys and values live in a fixed-size state."""

from interdomain_jax.modules import MIXERS, Decoder, InterdomainAttention, S4DMixer, SoftmaxAttention
from interdomain_jax.ops import Dynamics, discretize, interdomain_attention, linear_contraction, s4d_inv

__all__ = [
    "MIXERS",
    "Decoder",
    "Dynamics",
    "InterdomainAttention",
    "S4DMixer",
    "SoftmaxAttention",
    "discretize",
    "interdomain_attention",
    "linear_contraction",
    "s4d_inv",
]
