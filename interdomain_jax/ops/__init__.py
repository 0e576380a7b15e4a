"""Pure functions on arrays: the mixer's mathematics, with no Flax, configuration or mesh."""

from interdomain_jax.ops.dynamics import Dynamics, discretize, s4d_inv
from interdomain_jax.ops.interdomain import interdomain_attention, linear_contraction, state_at
from interdomain_jax.ops.modes import ModeReport, describe
from interdomain_jax.ops.packing import segment_ids_from_cu_seqlens

__all__ = [
    "Dynamics",
    "ModeReport",
    "describe",
    "discretize",
    "interdomain_attention",
    "linear_contraction",
    "s4d_inv",
    "segment_ids_from_cu_seqlens",
    "state_at",
]
