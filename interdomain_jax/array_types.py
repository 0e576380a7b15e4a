"""One legend of axis letters for the whole project, and the array aliases built from it.

    B   batch                       T   tokens
    H   query heads                 G   query heads that share one state (H = Hkv * G)
    Hkv key/value heads (states)    E   d_model, the residual width
    R   key/query feature width     D   value width (head_dim)
    C   channels of one state: R + D for the mixer
    M   modes of the state (state_dim), complex
    N   chunks                      K   chunk_size, tokens in a chunk
    V   vocabulary

A complex number is kept as two reals on an axis of length 2, (real, imaginary), wherever it is stored, sharded or
handed to a kernel; `Complex` is the same pair as a pytree of two arrays.
"""

from typing import NamedTuple

from jax import Array
from jaxtyping import Float, Int

Queries = Float[Array, "B T H R"]
Keys = Float[Array, "B T Hkv R"]
Values = Float[Array, "B T Hkv D"]
Output = Float[Array, "B T H D"]
Channels = Float[Array, "B T H C"]
State = Float[Array, "B Hkv 2 M C"]
Modes = Float[Array, "Hkv M"]
Tokens = Int[Array, "B T"]
Positions = Int[Array, "B T"]
SegmentIds = Int[Array, "B T"]
Activations = Float[Array, "B T E"]
Logits = Float[Array, "B T V"]


class Complex(NamedTuple):
    """A complex array as two real leaves, so that optimizers, masks and checkpoints only ever see reals.

    Attributes:
        real: [...], of any shape.
        imag: [...], of the same shape and dtype.
    """

    real: Array
    imag: Array
