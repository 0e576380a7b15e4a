"""The chunked recurrence in one kernel: what the kernels of `pallas_kernels` need, made from the op's arguments.

Tables of lambda powers and the places of documents are worked out here, in plain array code, so that autodiff turns the
gradients of the tables into those of the dynamics. Under a mesh (`jax.set_mesh`) each device runs the kernel on its own
rows and heads.
"""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from interdomain_jax.array_types import Keys, Output, Queries, State, Values
from interdomain_jax.ops.chunked import lag_tables
from interdomain_jax.ops.dynamics import Dynamics, Read, read_matrix
from interdomain_jax.ops.packing import Packing
from pallas_kernels.block_sizes import block_sizes
from pallas_kernels.tables import Rows, Tables

# Mesh axes that rows and heads may lie on; a mesh may lack any of them, and others see whole arrays.
ROW_AXES = ("data", "fsdp")
HEAD_AXES = ("tensor",)


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

    def run(q: Array, k: Array, v: Array, state: Array, tables: Tables, rows: Rows) -> tuple[Array, Array]:
        return attend(q, k, v, state, tables, rows, sizes)

    rows = _rows(packing, batch, length, tables.chunk_size)
    out, state = _over_mesh(run)(q, k, v, state, tables, rows)
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


def _over_mesh(run: Callable[..., tuple[Array, Array]]) -> Callable[..., tuple[Array, Array]]:
    """`run` on each device's own rows and heads, under the mesh that is in use; as it is where there is none."""

    def sharded(q: Array, k: Array, v: Array, state: Array, tables: Tables, rows: Rows) -> tuple[Array, Array]:
        mesh = jax.sharding.get_abstract_mesh()
        free = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
        if not free:
            return run(q, k, v, state, tables, rows)
        on_rows = _axes(ROW_AXES, free, q.shape[0], mesh.shape)
        on_heads = _axes(HEAD_AXES, free, k.shape[2], mesh.shape)
        tokens, states = PartitionSpec(on_rows, None, on_heads), PartitionSpec(on_rows, on_heads)
        of_head, of_row = PartitionSpec(on_heads), PartitionSpec(on_rows)
        # The kernels' outputs do not say which axes they are equal over.
        return jax.shard_map(
            run, in_specs=(tokens, tokens, tokens, states, of_head, of_row), out_specs=(tokens, states), check_vma=False
        )(q, k, v, state, tables, rows)

    return sharded


def _axes(names: tuple[str, ...], free: set[str], size: int, extent: dict[str, int]) -> tuple[str, ...]:
    """The axes that an array axis of this size can be split over, in turn."""
    chosen: list[str] = []
    for name in names:
        if name in free and not size % extent[name]:
            chosen.append(name)
            size //= extent[name]
    return tuple(chosen)
