"""The products that the benchmark takes from a trace are those that run, as often as they run."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.bare_matmuls import Loop, Product, bare_problem, count_flops, extract
from benchmarks.timing import with_gradients
from interdomain_jax.ops import interdomain_attention
from tests.numerics import random_dynamics, random_qkv


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def product(batch, rows, inner, columns):
    return Product(array(batch, rows, inner), array(batch, inner, columns), None, jnp.dtype(jnp.float32))


def shapes(loops):
    return [(loop.runs, [(each.left.shape, each.right.shape) for each in loop.products]) for loop in loops]


def test_any_order_of_axes_is_one_batched_product():
    loops = extract(lambda a, b: jnp.einsum("xiby,jyb->bxij", a, b), array(3, 5, 2, 7), array(4, 7, 2))
    (((runs, products)),) = shapes(loops)
    assert (runs, products) in [(1, [((2, 15, 7), (2, 7, 4))]), (1, [((2, 4, 7), (2, 7, 15))])]
    assert count_flops(loops) == 2 * 2 * 15 * 7 * 4


def test_it_keeps_dtypes_and_precision():
    def function(a, b):
        return jnp.matmul(a, b, precision="highest", preferred_element_type=jnp.float32)

    ((runs, (found,)),) = extract(function, array(3, 4, dtype=jnp.bfloat16), array(4, 5, dtype=jnp.bfloat16))
    assert (runs, found.left.dtype, found.right.dtype) == (1, jnp.bfloat16, jnp.bfloat16)
    assert found.accumulator == jnp.float32
    assert found.precision == (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


def test_it_counts_the_steps_of_loops_inside_calls_and_loops():
    @jax.custom_vjp
    def opaque(x, a):
        return x @ a

    opaque.defvjp(lambda x, a: (x @ a, (x, a)), lambda saved, bar: (bar @ saved[1].T, saved[0].T @ bar))

    @jax.jit
    def function(x, a):
        def outer(x, _):
            x, _ = jax.lax.scan(lambda x, _: (jax.checkpoint(jnp.matmul)(x, a), None), x, length=5)
            return jax.lax.cond(x[0, 0] > 0, lambda x: opaque(x, a), lambda x: jnp.sin(x) @ a, x), None

        return jax.lax.scan(outer, x @ a, length=7)[0]

    once = ((1, 2, 3), (1, 3, 3))
    found = shapes(extract(function, array(2, 3), array(3, 3)))
    assert found == [(1, [once]), (35, [once]), (7, [once])]


def test_it_leaves_out_what_no_output_needs():
    def function(a):
        return (a @ a, a @ a.T)[0]

    assert shapes(extract(function, array(3, 3))) == [(1, [((1, 3, 3), (1, 3, 3))])]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda a: jax.lax.while_loop(lambda a: a[0, 0] < 9, lambda a: a @ a, a), "'while'"),
        (lambda a: jax.lax.cond(a[0, 0] < 9, lambda a: a @ a, jnp.sin, a), "'cond'"),
    ],
)
def test_it_refuses_products_that_run_it_knows_not_how_often(function, sentence):
    with pytest.raises(ValueError) as error:
        extract(function, array(3, 3))
    assert sentence in str(error.value)


def test_the_op_runs_the_products_of_the_formula():
    """2K(R+D+4M) + 8M^2 + 8M(R+D) flops a token forward; with gradients twice more, and once more for recomputation."""
    length, heads, key_dim, value_dim, modes, chunk = 2048, 2, 12, 20, 8, 32
    rng = np.random.default_rng(0)
    inputs = (*random_qkv(rng, 1, length, heads, heads, key_dim, value_dim), random_dynamics(rng, heads, modes))

    def function(*inputs):
        return interdomain_attention(*inputs, chunk_size=chunk, implementation="xla")

    channels = key_dim + value_dim
    token = 2 * chunk * (channels + 4 * modes) + 8 * modes**2 + 8 * modes * channels
    forward = count_flops(extract(function, *inputs))
    assert forward == pytest.approx(length * heads * token, rel=0.02)
    cotangents = jax.eval_shape(function, *inputs)
    both = count_flops(extract(with_gradients(function), inputs, cotangents))
    assert 3 * forward < both < 4 * forward


def test_the_bare_program_multiplies_its_operands():
    """In a loop, the first number of the smaller operand is the result's of the step before; zero in the first."""
    function, (operands,) = bare_problem([Loop(1, (product(2, 3, 4, 5),)), Loop(3, (product(1, 6, 4, 5),))])
    (once,), (last,) = jax.jit(function)(operands)
    ((a, b),), ((c, d),) = jax.tree.map(np.array, operands)
    np.testing.assert_allclose(once, np.matmul(a, b), rtol=1e-5)
    d[0, 0, 0] = 0
    for _ in range(2):
        d[0, 0, 0] = np.clip(np.matmul(c, d)[0, 0, 0], -1, 1)
    np.testing.assert_allclose(last, np.matmul(c, d), rtol=1e-5)


@pytest.mark.parametrize("runs", [2, 3, 4])
def test_short_loops_stay_loops(runs):
    """Unrolled, the products of all steps but the last could be left out, or taken in part."""
    function, arguments = bare_problem([Loop(runs, (product(1, 64, 64, 64), product(2, 64, 64, 64)))])
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text.count(" while(") == 1
    assert text.count(" dot(") == 2


def test_every_step_of_the_bare_program_runs():
    """A compiler that lifted the product out of the loop would make 64 steps take as long as 2."""

    def seconds(runs):
        function, arguments = bare_problem([Loop(runs, (product(1, 384, 384, 384),))])
        compiled = jax.jit(function).lower(*arguments).compile()
        times = []
        for _ in range(4):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(64) > 8 * seconds(2)
