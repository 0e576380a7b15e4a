"""What a kernel costs is counted from its grid, its blocks and its body; here against counts by hand."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from benchmarks.kernel_costs import KernelCosts, kernel_costs


def test_blocks_count_where_they_change_and_only_what_lies_inside():
    """A grid of 2 x 3 over [10, 8] in blocks of 4 rows: a table is fetched once a column, the last block has 2 rows."""

    def kernel(x_ref, table_ref, out_ref):
        out_ref[...] = jax.lax.fori_loop(0, 5, lambda _, x: x @ table_ref[...], x_ref[...])

    def run(x, tables):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((2, 10, 8), jnp.float32),
            grid=(2, 3),
            in_specs=[
                pl.BlockSpec((4, 8), lambda i, j: (j, 0)),
                pl.BlockSpec((None, 8, 8), lambda i, j: (i, 0, 0)),
            ],
            out_specs=pl.BlockSpec((None, 4, 8), lambda i, j: (i, j, 0)),
            name="by_hand",
        )(x, tables)

    jaxpr = jax.make_jaxpr(run)(jnp.zeros((10, 8)), jnp.zeros((2, 8, 8))).jaxpr
    flops = 6 * 5 * 2 * 4 * 8 * 8
    moved = 4 * (2 * 10 * 8 + 2 * 8 * 8 + 2 * 10 * 8)
    assert kernel_costs(jaxpr) == {"by_hand": KernelCosts(moved, flops, 6 * flops)}


def test_a_step_of_a_kernel_reads_and_writes_each_state_once():
    from benchmarks.kernel_report import KernelProblem

    problem = KernelProblem(batch=8, length=1, heads=2, kv_heads=2, width=64)
    run = lambda *arguments: problem.run("pallas_tpu", "forward", *arguments)
    cost = kernel_costs(jax.make_jaxpr(run)(*problem.arguments("forward")).jaxpr)["interdomain_step"]
    tokens, tables = 4 * problem.token_bytes, 4 * 2 * (3 * 128 + 128 * 128)
    # And the number of tokens of each row.
    assert cost.bytes == 2 * problem.state_bytes + tokens + tables + 4 * 8
