"""Rows whose tokens are split over devices: outputs, states and all gradients are those of whole rows."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from interdomain_jax.ops.shards import gather_shards
from tests.virtual_devices import run_on_eight_devices

OP = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from interdomain_jax.ops import interdomain_attention, linear_contraction
from tests.numerics import assert_close, jitted_vjp, random_dynamics, random_like, random_qkv, random_segment_ids

implementation = sys.argv[1]
rng = np.random.default_rng(0)
# Of 24 tokens a shard has three, so that documents start and end in it, at its edges and shards away. The last row has
# one document whose padding fills whole shards.
ids = jnp.concatenate([random_segment_ids(rng, 3, 24), jnp.where(jnp.arange(24)[None] // 7 % 2 == 1, 0, 5)])
assert (ids[:, 2:-1:3] == ids[:, 3::3]).any() and (ids[:, 2:-1:3] != ids[:, 3::3]).any()
mesh = jax.make_mesh((1, 1, 1, 8), ("data", "fsdp", "tensor", "seq"), axis_types=(AxisType.Auto,) * 4)
for segment_ids in (None, ids):
    q, k, v = random_qkv(rng, 4, 24, 4, 2, 4, 4)
    dynamics = random_dynamics(rng, 2, 4, mode_weights=True)
    state = jnp.asarray(rng.normal(size=(4, 2, 2, 4, 8)), jnp.float32)
    fixed = dict(segment_ids=segment_ids, chunk_size=8, implementation=implementation)
    if implementation == "fft" and segment_ids is not None:
        continue
    ops = [(lambda **kwargs: interdomain_attention(**kwargs, **fixed), dict(q=q, k=k, v=v))]
    if not implementation.startswith("pallas"):
        ops.append((lambda **kwargs: linear_contraction(**kwargs, **fixed), dict(z=jnp.concatenate([k, v], -1))))
    for op, tokens in ops:
        inputs = tokens | dict(dynamics=dynamics, initial_state=state)
        cotangents = random_like(rng, jax.eval_shape(lambda kwargs: op(**kwargs), inputs))
        whole = jitted_vjp(op, inputs, cotangents)
        with jax.set_mesh(mesh):
            program = str(jax.make_jaxpr(lambda kwargs: op(**kwargs))(inputs))
            split = jitted_vjp(op, inputs, cotangents)
        assert "all_gather" in program and "f32[4,3,2,4]" in program or "f32[4,3,2,8]" in program, program
        assert_close(split, whole, 1e-5)
"""


@pytest.mark.parametrize(
    "implementation",
    ["xla", "pallas_tpu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("associative", "fft"))],
)
def test_the_ops(implementation):
    run_on_eight_devices(OP, implementation)


MIXER = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType
from interdomain_jax.modules.mixers import MIXERS
from tests.numerics import assert_close, jitted_vjp, random_like, random_segment_ids
from tests.quick import quick_jit

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(1)
mixer = MIXERS[sys.argv[1]](num_heads=2, head_dim=4, state_dim=4, dtype=jnp.float64, param_dtype=jnp.float64)
x = jnp.asarray(rng.normal(size=(4, 16, 6)), jnp.float64)
params = quick_jit(mixer.init)(jax.random.key(0), x[:, :1])["params"]
params = jax.tree.map(lambda leaf: leaf + 0.1 * jnp.asarray(rng.normal(size=leaf.shape), jnp.float64), params)
mesh = jax.make_mesh((2, 1, 1, 4), ("data", "fsdp", "tensor", "seq"), axis_types=(AxisType.Auto,) * 4)
# The row before leaves a cache in the middle of a document, which the first row of the ids goes on with.
before = jnp.asarray(rng.normal(size=(4, 5, 6)), jnp.float64)
ids = jnp.full((4, 5), 2)
_, cache = quick_jit(mixer.apply)({"params": params}, before, segment_ids=ids, cache=mixer.init_cache(4, 0))
ids = random_segment_ids(rng, 4, 16).at[0, :6].set(jnp.array([0, 0, 2, 2, 0, 2]))
for segment_ids in (None, ids):

    def mix(params, x, state, convolutions):
        held = cache._replace(state=state, convolutions=convolutions)
        y, after = mixer.apply({"params": params}, x, segment_ids=segment_ids, cache=held)
        return y, after.state, after.convolutions, jax.tree.map(jnp.float64, after.progress)

    inputs = dict(params=params, x=x, state=cache.state, convolutions=cache.convolutions)
    shapes = jax.eval_shape(lambda kwargs: mix(**kwargs), inputs)
    cotangents = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes)
    whole = jitted_vjp(mix, inputs, cotangents)
    with jax.set_mesh(mesh):
        split = jitted_vjp(mix, inputs, cotangents)
        program = str(jax.make_jaxpr(lambda kwargs: mix(**kwargs))(inputs))
    assert "all_gather" in program, program
    assert_close(split, whole, 1e-9)
"""


@pytest.mark.parametrize("mixer", ["interdomain", pytest.param("single_query", marks=pytest.mark.slow), "s4d"])
def test_the_mixers(mixer):
    """With short convolutions, RoPE and caches, and padding inside documents."""
    run_on_eight_devices(MIXER, mixer)


def test_a_row_longer_than_any_lag_is_refused():
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    gather = partial(gather_shards, None, 1, axis_name="seq")
    for length, refused in ((2**24 - 1, False), (2**24, True)):
        split = jax.shard_map(
            lambda x, length=length: gather(length).tokens + x,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
        )
        if refused:
            with pytest.raises(ValueError, match="may hold 16777215 tokens; got 1 x 16777216"):
                jax.eval_shape(split, jnp.zeros((), jnp.int32))
        else:
            jax.eval_shape(split, jnp.zeros((), jnp.int32))
