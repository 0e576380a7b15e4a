"""The recurrence as the kernels compute it, from the same tables, in plain array code: what they are tested against.

Every table is gathered by lag, so that nothing here depends on how a kernel turns positions into lags; and every table
gets its own gradient.
"""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.tables import Rows, Tables


def attend(q: Array, k: Array, v: Array, state: Array, tables: Tables, rows: Rows) -> tuple[Array, Array]:
    """Attention through the state, in chunks of K tokens.

    Args:
        q: [B, T, H, R].
        k: [B, T, Hkv, R]; query head h reads state h // (H // Hkv).
        v: [B, T, Hkv, D].
        state: [B, Hkv, 2, M, R + D], before the first token.
        tables: of the state's dtype.
        rows: padding and documents.

    Returns:
        The output [B, T, H, D] in the dtype of v, zero at padding, and the state after each row's last token.
    """
    batch, length, heads, width = q.shape
    kv_heads, size, modes = k.shape[2], tables.chunk_size, tables.state_dim
    chunks = -(-length // size)
    padding = chunks * size - length
    split = lambda x: jnp.moveaxis(x.reshape(batch, chunks, size, *x.shape[2:]), 1, 0)
    pad = lambda x: jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
    document = jnp.zeros((batch, length), jnp.int32) if rows.document is None else rows.document[:, 0]
    document = split(pad(document))
    real = split(jnp.arange(chunks * size) < rows.lengths[:, None])
    tokens = [split(pad(x)).astype(state.dtype) for x in (q.reshape(batch, length, kv_heads, -1, width), k, v)]
    q_chunks, k_chunks, v_chunks = (jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 3)), x, 0) for x in tokens)

    lag = jnp.arange(size)[:, None] - jnp.arange(size)[None, :]
    responses = jnp.where((lag >= 0)[:, :, None], tables.responses[:, jnp.maximum(lag, 0)], 0)

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, real, document = chunk
        count = jnp.sum(real, axis=1)
        last = jnp.max(jnp.where(real, document, 0), axis=1, keepdims=True)
        same = (document[:, :, None] == document[:, None, :])[:, None, None]
        first = (document == 0)[:, None, None, :, None]
        width = q.shape[-1]

        scores = jnp.einsum("bthgr,bshr->bhgts", q, k, precision="highest")
        y = jnp.einsum("bhgts,htsm->bhgtm", jnp.where(same, scores, 0), responses, precision="highest")
        carried = jnp.einsum("bthgr,bhmr->bhgtm", q, state[..., :width], precision="highest")
        y += _turn(jnp.where(first, carried, 0), tables.decays[:, None])
        w = jnp.einsum("bhgtm,hmn->bhgtn", y, tables.matrix, precision="highest")
        weights = jnp.einsum("bhgtm,htsm->bhgts", w, responses, precision="highest")
        out = jnp.einsum("bhgts,bshd->bthgd", jnp.where(same, weights, 0), v, precision="highest")
        # w is a conjugate: it turns by the conjugate of lambda.
        turned = jnp.where(first, _turn(w, _conjugate(tables.decays)[:, None]), 0)
        out += jnp.einsum("bhgtm,bhmd->bthgd", turned, state[..., width:], precision="highest")

        # Row s of the reversed table, moved so that the chunk's last token meets lag 0.
        place = (jnp.arange(size) + size - count[:, None]) % size
        inputs = jnp.where((real & (document == last))[:, :, None, None], jnp.concatenate([k, v], -1), 0)
        added = jnp.einsum("hbsm,bshc->bhmc", tables.reversed[:, place], inputs, precision="highest")
        decay = jnp.moveaxis(tables.decays[:, count - 1], 1, 0)
        kept = jnp.where((last == 0)[..., None, None], _turn(state.swapaxes(2, 3), decay[:, :, None]).swapaxes(2, 3), 0)
        return jnp.where((count > 0)[:, None, None, None], kept + added, state), out

    flat = state.reshape(batch, kv_heads, 2 * modes, -1)
    flat, out = jax.lax.scan(step, flat, (q_chunks, k_chunks, v_chunks, real, document))
    out = jnp.moveaxis(out, 0, 1).reshape(batch, chunks * size, heads, -1)[:, :length]
    real = (jnp.arange(length) < rows.lengths[:, None])[:, :, None, None]
    return jnp.where(real, out, 0).astype(v.dtype), flat.reshape(state.shape)


def _turn(x: Array, decay: Array) -> Array:
    """The complex numbers of x [..., 2M] times those of decay."""
    (real, imag), (cos, sin) = jnp.split(x, 2, axis=-1), jnp.split(decay, 2, axis=-1)
    return jnp.concatenate([real * cos - imag * sin, imag * cos + real * sin], axis=-1)


def _conjugate(x: Array) -> Array:
    real, imag = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([real, -imag], axis=-1)
