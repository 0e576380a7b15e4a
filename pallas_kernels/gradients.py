"""How the kernels of a device are differentiated: attention by a backward kernel, a step by plain array code."""

from collections.abc import Callable
from functools import partial

import jax
from jax import Array

from pallas_kernels import reference
from pallas_kernels.block_sizes import BlockSizes
from pallas_kernels.tables import Rows, Tables

Kernel = Callable[[Array, Array, Array, Array, Tables, Rows, BlockSizes], tuple[Array, Array]]
Saved = tuple[Array, Array, Array, Array, Tables, Rows]
Gradients = tuple[Array, Array, Array, Array, Tables, None]


def attention(forward: Callable[..., tuple[Array, ...]], backward: Callable[..., tuple]) -> Kernel:
    """`reference.attend` by two kernels; arguments as there, and how to cut the work.

    The output, and the gradients of q, k and v, are not defined at padding. Gradients with respect to q, k, v, the
    state and every table.

    Args:
        forward: takes those arguments and `keep`; gives the output, the last state and, to `keep`, states.
        backward: takes q, k, v, the states kept, the tables, the rows, the cotangents of the output and of the last
            state, and the sizes; gives the gradients.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(6,))
    def attend(
        q: Array, k: Array, v: Array, state: Array, tables: Tables, rows: Rows, sizes: BlockSizes
    ) -> tuple[Array, Array]:
        out, last = forward(q, k, v, state, tables, rows, sizes, keep=False)
        return out, last

    def attend_forward(
        q: Array, k: Array, v: Array, state: Array, tables: Tables, rows: Rows, sizes: BlockSizes
    ) -> tuple[tuple[Array, Array], Saved]:
        out, last, states = forward(q, k, v, state, tables, rows, sizes, keep=True)
        return (out, last), (q, k, v, states, tables, rows)

    def attend_backward(sizes: BlockSizes, saved: Saved, cotangents: tuple[Array, Array]) -> Gradients:
        return *backward(*saved, *cotangents, sizes), None

    attend.defvjp(attend_forward, attend_backward)
    return attend


def single_step(kernel: Kernel) -> Kernel:
    """A kernel for one token a row, differentiable: one token has too little to do for a backward kernel."""
    step = jax.custom_vjp(kernel, nondiff_argnums=(6,))

    def step_forward(
        q: Array, k: Array, v: Array, state: Array, tables: Tables, rows: Rows, sizes: BlockSizes
    ) -> tuple[tuple[Array, Array], Saved]:
        return step(q, k, v, state, tables, rows, sizes), (q, k, v, state, tables, rows)

    def step_backward(_: BlockSizes, saved: Saved, cotangents: tuple[Array, Array]) -> Gradients:
        q, k, v, state, tables, rows = saved
        pull = jax.vjp(partial(reference.attend, rows=rows), q, k, v, state, tables)[1]
        return *pull(cotangents), None

    step.defvjp(step_forward, step_backward)
    return step
