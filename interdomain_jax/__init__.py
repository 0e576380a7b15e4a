"""Interdomain Attention in JAX: attention whose keys and values live in a fixed-size state."""

from interdomain_jax.array_types import Complex
from interdomain_jax.modules import (
    MIXERS,
    Decoder,
    InterdomainAttention,
    KeyValueCache,
    RecurrentCache,
    S4DMixer,
    SoftmaxAttention,
    layer_dynamics,
)
from interdomain_jax.ops import (
    Dynamics,
    ModeReport,
    describe,
    discretize,
    interdomain_attention,
    linear_contraction,
    s4d_inv,
    segment_ids_from_cu_seqlens,
    state_at,
)

__all__ = [
    "MIXERS",
    "Complex",
    "Decoder",
    "Dynamics",
    "InterdomainAttention",
    "KeyValueCache",
    "ModeReport",
    "RecurrentCache",
    "S4DMixer",
    "SoftmaxAttention",
    "describe",
    "discretize",
    "interdomain_attention",
    "layer_dynamics",
    "linear_contraction",
    "s4d_inv",
    "segment_ids_from_cu_seqlens",
    "state_at",
]
