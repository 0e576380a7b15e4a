"""The same run on every mesh: initial values, losses and parameters do not depend on how the devices are laid out."""

import pytest

from tests.virtual_devices import run_on_eight_devices

# data, fsdp, tensor, seq; the first is one device, that the others are compared with.
MESHES = ((1, 1, 1, 1), (8, 1, 1, 1), (1, 8, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2), (1, 1, 1, 8))

PROGRAM = """
import sys
import jax, numpy as np
from interdomain_jax import sharding
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.training.state import init_state
from interdomain_jax.training.step import make_train_step
from tests.training.test_meshes import MESHES
from tests.training.test_step import OPTIMIZER

mixer, meshes = sys.argv[1], [MESHES[int(number)] for number in sys.argv[2].split(",")]
model = Decoder(
    vocab_size=32, d_model=16, num_layers=2, num_heads=2, head_dim=8, state_dim=4, mixers=(mixer,),
    scan_layers=True, remat="full",
)

def batch_of(step):
    rng = np.random.default_rng(step)
    tokens = lambda: rng.integers(32, size=(16, 24), dtype=np.int32)
    lengths = rng.integers(1, 25, size=(16, 1))
    batch = dict(inputs=tokens(), targets=tokens(), loss_mask=(np.arange(24) < lengths).astype(np.float32))
    if mixer == "s4d":
        return batch
    # Two documents in each row, apart from each other.
    first = rng.integers(1, 24, size=(16, 1))
    is_second = np.arange(24) >= first
    positions = np.arange(24) - np.where(is_second, first, 0)
    return batch | dict(segment_ids=1 + is_second.astype(np.int32), positions=positions.astype(np.int32))

def run(sizes):
    mesh = sharding.make_mesh(dict(zip(sharding.AXES, sizes, strict=True)), jax.devices()[:np.prod(sizes)])
    state = init_state(model, OPTIMIZER, seed=0, mesh=mesh)
    initial = jax.tree.map(np.asarray, state.params)
    step = make_train_step(model, OPTIMIZER, accumulation_steps=2, vocab_chunks=2, mesh=mesh)
    losses = []
    for n in range(5):
        state, metrics = step(state, sharding.place_batch(batch_of(n), mesh, 16))
        losses.append(float(metrics.loss))
    return initial, losses, jax.tree.map(np.asarray, state.params)

alone = run(MESHES[0])
for sizes in meshes:
    initial, losses, params = run(sizes)
    jax.tree.map(np.testing.assert_array_equal, initial, alone[0])
    np.testing.assert_allclose(losses, alone[1], rtol=0, atol=1e-5, err_msg=str(sizes))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5, err_msg=str(sizes)), params, alone[2])
assert len(set(alone[1])) == 5
moved = max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (alone[0], alone[2])), strict=True))
assert moved > 1e-3, moved
"""


@pytest.mark.parametrize(
    ("mixer", "meshes"),
    [
        ("interdomain", "1,2,3,4,5"),
        # The tokens split or not; rows and parameters alone are split as for the others.
        ("s4d", "3,4,5"),
        pytest.param("s4d", "1,2", marks=pytest.mark.slow),
        # Softmax attention does not split tokens.
        ("softmax", "1,2,3"),
    ],
)
def test_five_updates_agree(mixer, meshes):
    """With two layers, rows of all lengths, accumulation, chunks of the vocabulary, rematerialization, and but for s4d
    documents that cross the edges of the shards.
    """
    run_on_eight_devices(PROGRAM, mixer, meshes, quick=True)


INITIAL = """
import jax, numpy as np
from interdomain_jax import sharding
from interdomain_jax.training.state import init_state
from tests.training.test_step import INTERDOMAIN, OPTIMIZER

values = []
for count in (1, 2, 4, 8):
    mesh = sharding.make_mesh(dict(data=1, fsdp=-1, tensor=1, seq=1), jax.devices()[:count])
    state = init_state(INTERDOMAIN, OPTIMIZER, seed=0, mesh=mesh)
    embedding = state.params["embed"]["embedding"]
    assert embedding.addressable_shards[0].data.shape == (19, 16 // count)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == embedding.shape]
    assert len(moments) == 2 and all(leaf.sharding == embedding.sharding for leaf in moments)
    values.append(jax.tree.map(np.asarray, state.params))
for other in values[1:]:
    jax.tree.map(np.testing.assert_array_equal, other, values[0])
"""


def test_initial_values_do_not_depend_on_the_devices():
    """jax#40232: they did. Here every device makes its part of them."""
    run_on_eight_devices(INITIAL)
