"""What a Pallas kernel costs, from its grid, its blocks and its body: a compiler's cost analysis does not look inside.

Between the device's memory and the chip, an input block is fetched where its index differs from that of the program
before, an output block is written where the next one's differs, and of a block at an edge only what lies inside.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

# A float32 product at the highest precision is worked out from bfloat16 parts, in six products.
_PASSES = {"float32": 6, "bfloat16": 1}


class KernelCosts(NamedTuple):
    """What a kernel does in all its programs.

    Attributes:
        bytes: moved between the device's memory and the chip.
        flops: additions and multiplications of its matrix products.
        passes: the same, with each product counted as often as a bfloat16 matrix unit has to run for it.
    """

    bytes: int
    flops: int
    passes: int


def kernel_costs(jaxpr: Jaxpr) -> dict[str, KernelCosts]:
    """The costs of each kernel of a program, by the kernel's name."""
    return {str(kernel.params["name"]): _costs(kernel) for kernel in _equations(jaxpr, "pallas_call")}


def _equations(jaxpr: Jaxpr, primitive: str) -> Iterator[JaxprEqn]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            yield equation
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from _equations(inner, primitive)


def _costs(kernel: JaxprEqn) -> KernelCosts:
    programs = math.prod(kernel.params["grid_mapping"].grid)
    flops, passes = _flops(kernel.params["jaxpr"])
    return KernelCosts(_bytes(kernel), programs * flops, programs * passes)


def _bytes(kernel: JaxprEqn) -> int:
    mapping = kernel.params["grid_mapping"]
    # The last axis of the grid runs fastest.
    programs = np.indices(mapping.grid).reshape(len(mapping.grid), -1)
    total = 0
    for block in mapping.block_mappings:
        array = block.array_aval
        # A squeezed axis has blocks of one.
        shape = np.array([getattr(size, "block_size", 1) for size in block.block_shape])
        index = _indices(block.index_map_jaxpr, programs)
        changes = np.ones(index.shape[1], bool)
        changes[1:] = (index[:, 1:] != index[:, :-1]).any(axis=0)
        starts = index[:, changes] * shape[:, None]
        inside = np.minimum(shape[:, None], np.array(array.shape)[:, None] - starts)
        total += int(inside.prod(axis=0).sum()) * jnp.dtype(array.dtype).itemsize
    known_before: list[Any] = [variable.aval for variable in kernel.invars[: mapping.num_index_operands]]
    return total + sum(math.prod(x.shape) * x.dtype.itemsize for x in known_before)


def _indices(index_map: Any, programs: np.ndarray) -> np.ndarray:
    """The block index [axes, programs] of every program; maps do not look at what is known before the kernel starts."""
    unused = [None] * (len(index_map.jaxpr.invars) - len(programs))
    evaluate = lambda program: jax.core.eval_jaxpr(index_map.jaxpr, index_map.consts, *program, *unused)
    return np.stack([np.broadcast_to(x, programs.shape[1]) for x in jax.vmap(evaluate)(tuple(jnp.asarray(programs)))])


def _flops(jaxpr: Jaxpr) -> tuple[int, int]:
    """Flops and passes of one program's matrix products. What depends on a condition is counted as if it held."""
    flops = passes = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            left: Any = equation.invars[0].aval
            out: Any = equation.outvars[0].aval
            ((axes, _), _) = equation.params["dimension_numbers"]
            inner = math.prod(left.shape[axis] for axis in axes)
            here = 2 * math.prod(out.shape) * inner
            flops += here
            passes += here * _PASSES[str(left.dtype)]
            continue
        runs = equation.params["length"] if equation.primitive.name == "scan" else 1
        bodies = [_flops(inner) for inner in jaxprs_in_params(equation.params)]
        if equation.primitive.name == "while" and any(flops for flops, _ in bodies):
            raise ValueError("how often the products inside a 'while' run is not known before it runs.")
        if equation.primitive.name == "cond":
            bodies = [max(bodies)]
        flops += runs * sum(body[0] for body in bodies)
        passes += runs * sum(body[1] for body in bodies)
    return flops, passes
