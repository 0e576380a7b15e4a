"""The kernels on a mesh: every device runs its own rows and heads, and the result is that of one device."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import environment_with

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from interdomain_jax.ops import interdomain_attention
from tests.numerics import assert_close, jitted_vjp, random_dynamics, random_like, random_qkv, random_segment_ids

implementation = sys.argv[1]
rng = np.random.default_rng(0)
q, k, v = random_qkv(rng, 4, 21, 4, 2, 4, 4)
inputs = dict(q=q, k=k, v=v, dynamics=random_dynamics(rng, 2, 4))
inputs["initial_state"] = jnp.asarray(rng.normal(size=(4, 2, 2, 4, 8)), jnp.float32)
ids = random_segment_ids(rng, 4, 21)
fixed = dict(segment_ids=ids, chunk_size=8, implementation=implementation)
attend = lambda **kwargs: interdomain_attention(**kwargs, **fixed)
cotangents = random_like(rng, jax.eval_shape(lambda kwargs: attend(**kwargs), inputs))
alone = jitted_vjp(attend, inputs, cotangents)
mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
with jax.set_mesh(mesh):
    tokens = NamedSharding(mesh, P(("data", "fsdp"), None, "tensor"))
    placed = inputs | {name: jax.device_put(inputs[name], tokens) for name in "qkv"}
    together = jitted_vjp(attend, placed, cotangents)
    program = str(jax.make_jaxpr(lambda kwargs: attend(**kwargs))(placed))
assert_close(together, alone, 1e-5)
# Of 4 rows and 2 states, one each.
assert "shard_map" in program and "f32[1,21,4,4]" not in program and "f32[1,21,8]" in program, program
"""

# What training and evaluation jit: on eight devices no row goes to another.
SCORING = """
import sys
import jax, jax.numpy as jnp
from interdomain_jax import Decoder, sharding
from interdomain_jax.scoring import make_score_function

model = Decoder(vocab_size=7, d_model=8, num_layers=1, num_heads=2, head_dim=4, state_dim=4, implementation=sys.argv[1])
parameters = jax.jit(model.clone(implementation="xla").init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
batch = dict(inputs=jnp.ones((8, 20), jnp.int32), targets=jnp.ones((8, 20), jnp.int32), loss_mask=jnp.ones((8, 20)))
mesh = sharding.make_mesh(sharding.mesh_config())
place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
batch = {name: place(x, sharding.batch_sharding(mesh)) for name, x in batch.items()}
parameters = sharding.placed(parameters, mesh)
program = make_score_function(model, mesh, vocab_chunks=1).lower(parameters, batch).compile().as_text()
assert "all-reduce" in program and "all-gather" not in program, program
"""


@pytest.mark.parametrize(
    ("program", "implementation"),
    [
        (PROGRAM, "pallas_tpu"),
        (SCORING, "pallas_tpu"),
        # The same wrapper.
        pytest.param(PROGRAM, "pallas_gpu", marks=pytest.mark.slow),
    ],
)
def test_rows_and_heads_lie_on_devices(program, implementation):
    finished = subprocess.run(
        [sys.executable, "-c", program, implementation],
        cwd=ROOT,
        env=environment_with("--xla_force_host_platform_device_count=8") | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
