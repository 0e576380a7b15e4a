"""Checksums of arrays, computed where the arrays lie."""

import math
from typing import Any

import jax
import jax.numpy as jnp

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def checksum(array: jax.Array) -> jax.Array:
    """A uint32 scalar that depends on every bit of the array, and not on how it is laid out over devices.

    The bits of each entry are scrambled together with its place, and everything is added modulo 2^32. Scrambling maps
    no two numbers to the same one, so every change of a single entry is seen; other changes escape with a chance of
    about 2^-32.

    Args:
        array: of a real dtype of at most 32 bits.
    """
    bits = array if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else _bits(array)
    place = jnp.zeros(array.shape, jnp.uint32)
    for axis in range(array.ndim):
        along = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        place += along * jnp.uint32(math.prod(array.shape[axis + 1 :]) % 2**32)
    return jnp.sum(_scrambled(_scrambled(place) ^ bits.astype(jnp.uint32)), dtype=jnp.uint32)


@jax.jit
def checksums(tree: Any) -> Any:
    """The tree with the `checksum` of each leaf in its place: one program, for many that run side by side may wait for
    each other where devices exchange their parts.
    """
    return jax.tree.map(checksum, tree)


def _bits(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, _UNSIGNED[array.dtype.itemsize])


def _scrambled(number: jax.Array) -> jax.Array:
    """One to one on uint32, each bit of the result depending on all bits of the number: MurmurHash3's last step."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        number = (number ^ (number >> shift)) * jnp.uint32(factor)
    return number ^ (number >> 16)
