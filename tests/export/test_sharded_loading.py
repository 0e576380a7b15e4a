"""Exported models on a mesh: the same numbers, each part read where it lies."""

from tests.virtual_devices import run_on_eight_devices

PROGRAM = """
import math, sys
from pathlib import Path
import chex, jax, jax.numpy as jnp, numpy as np
from safetensors.numpy import load_file
from interdomain_jax import sharding
from interdomain_jax.export import load_model, read_llama, save_model
from interdomain_jax.export.tensor_names import to_params, to_tensors
from interdomain_jax.modules import Decoder

def mesh_of(*sizes):
    return sharding.make_mesh(dict(zip(sharding.AXES, sizes, strict=True)))

def require_placed(params, expected, mesh):
    chex.assert_trees_all_equal(params, expected)
    places = jax.tree.map(lambda leaf: leaf.sharding, params)
    assert places == sharding.state_sharding(expected, mesh)

path = Path(sys.argv[1]) / "model.safetensors"
for param_dtype in (jnp.float32, jnp.bfloat16):
    model = Decoder(
        vocab_size=40, d_model=16, num_layers=4, num_heads=4, head_dim=4, state_dim=4, num_kv_heads=2,
        mixers=("interdomain", "softmax"), scan_layers=True, param_dtype=param_dtype,
    )
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    params = jax.tree.map(lambda leaf: jnp.asarray(random.standard_normal(leaf.shape), leaf.dtype), shapes)
    save_model(path, model, params)
    for scan_layers in (True, False):
        expected = load_model(path, scan_layers=scan_layers).params
        for mesh in (mesh_of(2, 2, 2, 1), mesh_of(1, 1, 2, 4)):
            require_placed(load_model(path, scan_layers=scan_layers, mesh=mesh).params, expected, mesh)

# What is asked of the file: an eighth for each device, and all of what every device holds once.
tensors, asked = to_tensors(model, params), {}

def read(name, index):
    asked.setdefault(name, []).append(tensors[name][index].size)
    return tensors[name][index]

to_params(model, read, mesh_of(1, 4, 2, 1))
assert asked["layers.3.mlp.w1.kernel"] == [16 * 128 // 8] * 8, asked
assert asked["embed.embedding"] == [40 * 16 // 8] * 8, asked
assert asked["layers.2.mixer_norm.scale"] == [16], asked
assert asked.keys() == tensors.keys()

try:
    load_model(path, mesh=mesh_of(1, 1, 8, 1))
except ValueError as error:
    print(error)

# A Llama gives the logits of Hugging Face there too.
llama = Path("tests/export/llama_fixture")
mesh = mesh_of(2, 4, 1, 1)
model, params = read_llama(llama, scan_layers=True, mesh=mesh)
require_placed(params, read_llama(llama, scan_layers=True).params, mesh)
expected = load_file(llama / "expected.safetensors")
logits, _ = jax.jit(sharding.on_mesh(model.apply, mesh))({"params": params}, expected["ids"])
np.testing.assert_allclose(logits, expected["logits"], atol=1e-5)
"""


def test_parameters_lie_as_in_training_and_each_part_is_read_alone(tmp_path):
    refused = run_on_eight_devices(PROGRAM, str(tmp_path), quick=True)
    assert "mesh.tensor=8 must divide that" in refused
