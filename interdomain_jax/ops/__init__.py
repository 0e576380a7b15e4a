"""Pure functions on arrays: the mixer's mathematics, with no Flax, configuration or mesh."""

from interdomain_jax.ops.dynamics import Dynamics, discretize, s4d_inv
from interdomain_jax.ops.interdomain import interdomain_attention, linear_contraction
from interdomain_jax.ops.modes import ModeReport, describe

__all__ = ["Dynamics", "ModeReport", "describe", "discretize", "interdomain_attention", "linear_contraction", "s4d_inv"]
