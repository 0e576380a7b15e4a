"""What the kernels share: tables of lambda powers, where the documents of a row lie, and what their work amounts to.

Letters as in `interdomain_jax/array_types.py`; 2M stands for the M real parts, then the M imaginary ones.
"""

from typing import NamedTuple

from jax import Array
from jaxtyping import Float, Int


class Tables(NamedTuple):
    """The recurrence and the read of each state, for chunks of K tokens. A kernel returns the gradient of each table.

    Attributes:
        responses: [Hkv, K, 2M], b lambda^j for j = 0 to K-1: what is left of an input after j steps.
        reversed: [Hkv, K, 2M], the same rows, last first.
        decays: [Hkv, K, 2M], lambda^{j+1} for j = 0 to K-1.
        matrix: [Hkv, 2M, 2M], the read: w = y @ matrix, with w = (Re w, -Im w).
    """

    responses: Float[Array, "Hkv K 2M"]
    reversed: Float[Array, "Hkv K 2M"]
    decays: Float[Array, "Hkv K 2M"]
    matrix: Float[Array, "Hkv 2M 2M"]

    @property
    def chunk_size(self) -> int:
        """K, tokens in a chunk."""
        return self.decays.shape[1]

    @property
    def state_dim(self) -> int:
        """M, modes of the state."""
        return self.decays.shape[2] // 2


class Rows(NamedTuple):
    """Where the tokens and the documents of each row lie; padding stands behind the tokens.

    Attributes:
        lengths: [B] int32, tokens of the row; what follows them is padding and may hold anything.
        document: [B, 1, T] int32, how many documents have started in the token's chunk up to it, or None where no row
            has a second document. The state is zeroed before a token that starts one.
    """

    lengths: Int[Array, " B"]
    document: Int[Array, "B 1 T"] | None


def joined(x: Array) -> Array:
    """Heads and their widths as one axis: [B, T, H R]."""
    return x.reshape(*x.shape[:2], -1)


def token_flops(*, heads: int, kv_heads: int, key_dim: int, value_dim: int, state_dim: int, chunk_size: int) -> int:
    """Of the chunked form's matrix products, forward, for one token and all its heads.

    2K(R+D+4M) + 8M^2 + 4M(R+D) for each of the heads of queries, inside the chunk and on reading the state, and
    4M(R+D) for each of the key/value heads, whose state they write.
    """
    channels = key_dim + value_dim
    query = 2 * chunk_size * (channels + 4 * state_dim) + 8 * state_dim**2 + 4 * state_dim * channels
    return heads * query + kv_heads * 4 * state_dim * channels


def forward_flops(q: Array, v: Array, tables: Tables) -> int:
    """Of the matrix products of the forward pass, without those that turn positions into lags.

    Args:
        q: [B, T, H, R].
        v: [B, T, Hkv, D].
        tables: for chunks of K tokens and M modes.
    """
    batch, length, heads, key_dim = q.shape
    kv_heads, value_dim = v.shape[2:]
    token = token_flops(
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        state_dim=tables.state_dim,
        chunk_size=tables.chunk_size,
    )
    return batch * length * token
