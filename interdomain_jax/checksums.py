"""Checksums of arrays, computed where the arrays lie."""

import math

import jax
import jax.numpy as jnp

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@jax.jit
def checksum(array: jax.Array) -> jax.Array:
    """A uint32 scalar that depends on every bit of the array, and not on how it is laid out over devices.

    Entry i of the flattened array, its bits read as a whole number, counts 2 i + 1 times, and everything is added
    modulo 2^32. Odd weights make every change of a single entry visible; other changes escape with a chance of 2^-32.

    Args:
        array: of a real dtype of at most 32 bits.
    """
    bits = array if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else _bits(array)
    weights = jnp.ones(array.shape, jnp.uint32)
    for axis in range(array.ndim):
        places = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        weights += places * jnp.uint32(2 * math.prod(array.shape[axis + 1 :]) % 2**32)
    return jnp.sum(bits.astype(jnp.uint32) * weights, dtype=jnp.uint32)


def _bits(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, _UNSIGNED[array.dtype.itemsize])
