"""The matrix products of a function, taken from its trace, as a program that runs them and nothing else.

`extract` walks the jaxpr of a function through every call, loop and branch, and lists its products with the number of
times each runs. `bare_problem` makes a program of them on random operands: what the function would take if all that
lies between its products cost nothing.

Every product is brought to the form [batch, rows, inner] x [batch, inner, columns] that matrix libraries take, so that
the program transposes nothing. A product of a loop is run in a loop of the same length, and to keep the compiler from
doing less than is asked for, each step needs the one before it: one number of the smaller operand is overwritten, in
place, with one of the last result. So no product can be lifted out of the loop, and no step left out.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from benchmarks.timing import Problem

_MATRIX_PRODUCT = (((2,), (1,)), ((0,), (0,)))
# Loops whose number of steps the trace does not tell.
_UNCOUNTED = ("while", "pallas_call")


class Product(NamedTuple):
    """One matrix product, batched.

    Attributes:
        left: shape [batch, rows, inner] and dtype.
        right: shape [batch, inner, columns] and dtype.
        precision: of `jax.lax.dot_general`.
        accumulator: the dtype of the sums and the result, or None for the operands' own.
    """

    left: jax.ShapeDtypeStruct
    right: jax.ShapeDtypeStruct
    precision: Any
    accumulator: Any

    @property
    def flops(self) -> int:
        """Additions and multiplications of one run."""
        return 2 * math.prod(self.left.shape) * self.right.shape[2]

    def __call__(self, left: jax.Array, right: jax.Array) -> jax.Array:
        """The product of two operands, [batch, rows, columns]."""
        return jax.lax.dot_general(
            left, right, _MATRIX_PRODUCT, precision=self.precision, preferred_element_type=self.accumulator
        )


class Loop(NamedTuple):
    """Products that run together, `runs` times; those outside all loops run once."""

    runs: int
    products: tuple[Product, ...]


def extract(function: Callable[..., Any], *arguments: Any) -> list[Loop]:
    """The matrix products that the function runs for these arguments.

    A loop in a loop is listed by itself, with the product of both lengths. Products that no output needs are left out.

    Raises:
        ValueError: how often a product runs is not known from the shapes of the arguments.
    """
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    needed, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    found = _find(needed, 1)
    return [Loop(1, found.here), *found.loops] if found.here else found.loops


def count_flops(loops: Sequence[Loop]) -> int:
    """Additions and multiplications of all products, each as often as it runs."""
    return sum(loop.runs * product.flops for loop in loops for product in loop.products)


def bare_problem(loops: Sequence[Loop]) -> Problem:
    """The products, on standard normal operands; the outputs are the results of each loop's last step."""
    rng = np.random.default_rng(0)
    draw = lambda like: jnp.asarray(rng.standard_normal(like.shape, np.float32), like.dtype)
    operands = [[(draw(product.left), draw(product.right)) for product in loop.products] for loop in loops]
    return Problem(lambda operands: [_run(*pair) for pair in zip(loops, operands, strict=True)], (operands,))


class _Found(NamedTuple):
    here: tuple[Product, ...]
    loops: list[Loop]


def _find(jaxpr: Jaxpr, runs: int) -> _Found:
    """The products of a jaxpr that itself runs `runs` times: those outside of its loops, and its loops."""
    here: list[Product] = []
    loops: list[Loop] = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            here.append(_product(equation))
            continue
        inner_runs = runs * equation.params["length"] if name == "scan" else runs
        bodies = [_find(body, inner_runs) for body in jaxprs_in_params(equation.params)]
        if not any(body.here or body.loops for body in bodies):
            continue
        if name in _UNCOUNTED:
            raise ValueError(f"how often the products inside a '{name}' run is not known before it runs.")
        if name == "cond":
            if any(body != bodies[0] for body in bodies):
                raise ValueError("the branches of a 'cond' must run the same products, or their number is not known.")
            bodies = bodies[:1]
        for body in bodies:
            loops += body.loops
            if name != "scan":
                here += body.here
            elif body.here:
                loops.append(Loop(inner_runs, body.here))
    return _Found(tuple(here), loops)


def _product(equation: JaxprEqn) -> Product:
    operands: list[Any] = [variable.aval for variable in equation.invars]
    left, right = operands
    (left_inner, right_inner), (left_batch, right_batch) = equation.params["dimension_numbers"]
    size = lambda shape, axes: math.prod(shape[axis] for axis in axes)
    rest = lambda shape, *used: size(shape, set(range(len(shape))) - set(sum(used, ())))
    batch, inner = size(left.shape, left_batch), size(left.shape, left_inner)
    rows, columns = rest(left.shape, left_batch, left_inner), rest(right.shape, right_batch, right_inner)
    return Product(
        jax.ShapeDtypeStruct((batch, rows, inner), left.dtype),
        jax.ShapeDtypeStruct((batch, inner, columns), right.dtype),
        equation.params["precision"],
        equation.params["preferred_element_type"],
    )


Operands = tuple[jax.Array, jax.Array]


def _run(loop: Loop, operands: list[Operands]) -> list[jax.Array]:
    """The results of the last step."""
    multiply = lambda operands: [product(*pair) for product, pair in zip(loop.products, operands, strict=True)]
    if loop.runs == 1:
        return multiply(operands)

    def step(_: jax.Array, carry: tuple[list[Operands], list[jax.Array]]) -> tuple[list[Operands], list[jax.Array]]:
        operands = [_follow(pair, result) for pair, result in zip(*carry, strict=True)]
        return operands, multiply(operands)

    zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), jax.eval_shape(multiply, operands))
    return jax.lax.fori_loop(0, loop.runs, step, (operands, zeros))[1]


def _follow(pair: Operands, result: jax.Array) -> Operands:
    """The operands with the first number of the smaller one set to the result's first, within [-1, 1]."""
    left, right = pair
    number = jnp.clip(result[:1, :1, :1], -1, 1)
    put = lambda array: jax.lax.dynamic_update_slice(array, number.astype(array.dtype), (0, 0, 0))
    return (put(left), right) if left.size <= right.size else (left, put(right))
