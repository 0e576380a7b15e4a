"""The chunked recurrence in one kernel: what the kernels of `pallas_kernels` need, made from the op's arguments.

Tables of lambda powers and the places of documents are worked out here, in plain array code, so that autodiff turns the
gradients of the tables into those of the dynamics.
"""

from dataclasses import replace
from types import ModuleType

import jax
import jax.numpy as jnp

from interdomain_jax.array_types import Keys, Output, Queries, State, Values
from interdomain_jax.ops.chunked import lag_tables
from interdomain_jax.ops.dynamics import Dynamics, Read, read_matrix
from interdomain_jax.ops.packing import Packing
from pallas_kernels.block_sizes import block_sizes
from pallas_kernels.tables import Rows, Tables


def interdomain_fused(
    q: Queries,
    k: Keys,
    v: Values,
    dynamics: Dynamics,
    initial_state: State,
    packing: Packing | None,
    read: Read,
    chunk_size: int | None,
    kernels: ModuleType,
) -> tuple[Output, State]:
    """`interdomain_attention` by the kernels of a platform; arguments already validated, padding last.

    Args:
        q: [B, T, H, R].
        k: [B, T, Hkv, R].
        v: [B, T, Hkv, D].
        dynamics: of the Hkv states.
        initial_state: [B, Hkv, 2, M, R + D].
        packing: of the rows, or None for one document each.
        read: "bilinear" or "hermitian".
        chunk_size: tokens in a chunk, or None for what `pallas_kernels/block_sizes.py` says.
        kernels: `pallas_kernels.tpu` or `pallas_kernels.gpu`.

    Raises:
        ValueError: a chunk size that the device cannot take.
    """
    batch, length = q.shape[:2]
    modes, channels = initial_state.shape[3:]
    sizes = block_sizes(modes, channels)
    if chunk_size is not None:
        kernels.check_chunk_size(chunk_size)
        sizes = replace(sizes, chunk_size=chunk_size)
    one_step = length == 1
    attend = kernels.step if one_step else kernels.attend

    # Modes that are never written and never read fill up what the device wants whole.
    missing = kernels.padded_modes(modes) - modes
    grown = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), *[(0, missing)] * (x.ndim - 1)]), dynamics)
    state = jnp.pad(initial_state, [(0, 0)] * 3 + [(0, missing), (0, 0)])
    tables = _tables(grown, read, 1 if one_step else sizes.chunk_size)
    rows = _rows(packing, batch, length, tables.chunk_size)
    out, state = attend(q, k, v, state, tables, rows, sizes)
    return out, state[:, :, :, :modes]


def _tables(dynamics: Dynamics, read: Read, chunk_size: int) -> Tables:
    backwards, decays = (x.reshape(*x.shape[:2], -1) for x in lag_tables(dynamics, chunk_size))
    return Tables(jnp.flip(backwards, axis=1), backwards, decays, read_matrix(dynamics, read))


def _rows(packing: Packing | None, batch: int, length: int, chunk_size: int) -> Rows:
    if packing is None:
        return Rows(jnp.full(batch, length, jnp.int32), None)
    starts = jnp.pad(packing.starts, [(0, 0), (0, -length % chunk_size)]).reshape(batch, -1, chunk_size)
    document = jnp.cumsum(starts, axis=-1, dtype=jnp.int32).reshape(batch, 1, -1)[:, :, :length]
    return Rows(jnp.sum(packing.real, axis=1, dtype=jnp.int32), document)
