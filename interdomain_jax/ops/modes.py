"""What a recurrence remembers, in numbers: its timescales, its angles, and the lag kernel that a query's read applies.

From a zero state the op (paper, section 2, steps 6-8) is exactly a sum over pairs of lags, with one fixed kernel a head
and the content in front:

    o_t = sum_{s, s' <= t} (q_t . k_s) W(t-s, t-s') v_{s'}        W(j, j') = P_j G P_j'^T

where P_j = b lambda^j is the response of the modes to an input j steps back, as 2M reals, and G is the matrix of the
read (`chunked.py`). The diagonal of W weighs a token's value by the match with its own key; the rest of it pairs the
key of one token with the value of another.
"""

import math
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from interdomain_jax.array_types import Modes
from interdomain_jax.ops.dynamics import MAX_LAG, Dynamics, Read, input_powers, lambda_powers, read_matrix


class ModeReport(NamedTuple):
    """The modes of Hkv states, and what they make of a lag.

    Attributes:
        timescales: [Hkv, M], steps until a mode has fallen to 1/e; inf for one that does not decay.
        angles: [Hkv, M], radians per step in (-pi, pi]. A discrete step cannot tell whole turns: an angle of 128 rad
            is the same recurrence as 128 - 20 (2 pi) = 2.34 rad, and is reported so.
        lag_kernel: [Hkv, J, J] for lags 0 to J - 1, W(lag of the key, lag of the value); symmetric.
    """

    timescales: Modes
    angles: Modes
    lag_kernel: Float[Array, "Hkv J J"]


def describe(dynamics: Dynamics, *, read: Read = "bilinear", max_lag: int = 127) -> ModeReport:
    """Describes the modes of every head, and the lag kernel of `interdomain_attention` with this `read`.

    Args:
        dynamics: of Hkv heads with M modes.
        read: as in `interdomain_attention`.
        max_lag: the longest lag J - 1 of the kernel, up to `dynamics.MAX_LAG`. The kernel grows with its square, so it
            is small if not given: a picture's worth.

    Returns:
        The `ModeReport`, in float32 (float64 if the dynamics are).

    Raises:
        ValueError: a read, a lag or a shape that does not fit, in one sentence.
    """
    if read not in get_args(Read):
        raise ValueError(f"read must be one of {get_args(Read)}; got {read!r}.")
    if not 0 <= max_lag <= MAX_LAG:
        raise ValueError(f"max_lag must lie between 0 and {MAX_LAG}; got {max_lag}.")
    if dynamics.log_decay.ndim != 2:
        raise ValueError(f"dynamics.log_decay must be [Hkv, M], one layer's; got shape {dynamics.log_decay.shape}.")
    dtype = jnp.promote_types(dynamics.log_decay.dtype, jnp.float32)
    dynamics = jax.tree.map(lambda leaf: leaf.astype(dtype), dynamics)
    responses = input_powers(dynamics, jnp.arange(max_lag + 1))
    responses = responses.reshape(*responses.shape[:2], -1)
    return ModeReport(
        jnp.where(dynamics.log_decay == 0, jnp.inf, -1 / dynamics.log_decay),
        _reduced(dynamics.angle),
        jnp.einsum("hjm,hmp,hlp->hjl", responses, read_matrix(dynamics, read), responses, precision="highest"),
    )


def _reduced(angle: Modes) -> Modes:
    """The angle in (-pi, pi], from the very cosine and sine that the op turns by."""
    turn = lambda_powers(jnp.zeros_like(angle), angle, jnp.ones(1, int))[:, 0]
    reduced = jnp.arctan2(turn[:, 1], turn[:, 0])
    return jnp.where(reduced <= -math.pi, math.pi, reduced)
