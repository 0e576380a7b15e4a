"""Generation on a mesh: the tokens of one device."""

import pytest

from tests.virtual_devices import run_on_eight_devices

PROGRAM = """
import sys
import jax, numpy as np
from interdomain_jax import sharding
from interdomain_jax.inference import Generator, Request, Sampling
from interdomain_jax.modules import Decoder
from tests.inference.test_generator import prompts_of

jax.config.update("jax_disable_most_optimizations", True)
mixer = sys.argv[1]
model = Decoder(
    vocab_size=40, d_model=16, num_layers=2, num_heads=2, head_dim=8, state_dim=4, mixers=(mixer,), init_std=0.3,
    scan_layers=True,
)
params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
requests = [
    Request(prompt, 12, Sampling(temperature=temperature), seed)
    for seed, (prompt, temperature) in enumerate(zip(prompts_of(3, 20, 1, 9), (0.0, 1.0) * 2, strict=True))
]

def tokens_on(sizes):
    mesh = sharding.make_mesh(dict(zip(sharding.AXES, sizes, strict=True)), jax.devices()[:int(np.prod(sizes))])
    placed = jax.device_put(params, sharding.state_sharding(params, mesh))
    own = Generator(model, placed, mesh, batch_size=4, max_length=64, chunk_size=16)
    behind = own.read([requests[1].prompt])
    return [
        completion.tokens for completion in [*own.generate(requests), *own.generate(requests, behind=behind)]
    ]

alone = tokens_on((1, 1, 1, 1))
assert len({tuple(tokens) for tokens in alone}) == 8
for sizes in ((4, 1, 2, 1), (1, 4, 2, 1)):
    assert tokens_on(sizes) == alone, sizes
"""


@pytest.mark.parametrize("mixer", ["interdomain", "softmax"])
def test_the_tokens_do_not_depend_on_the_mesh(mixer):
    run_on_eight_devices(PROGRAM, mixer, quick=True)
