"""Whole training steps as cases to time: ours, and those of other packages' models."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from benchmarks.model_peers import PeerModel, make_step
from benchmarks.timing import Case
from interdomain_jax import sharding
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.training.optimizer import make_optimizer
from interdomain_jax.training.state import init_state
from interdomain_jax.training.step import lower_train_step


def step_case(config: ConfigDict) -> Case:
    """Compiles a config's training step; each call is the update that follows the last one."""
    model = Decoder(**config.model)
    optimizer = make_optimizer(num_steps=config.num_steps, **config.optimizer)
    mesh = sharding.make_mesh(sharding.mesh_config(), jax.devices()[:1])
    compiled = lower_train_step(config, model, optimizer, mesh).compile()
    state = init_state(model, optimizer, seed=config.seed, mesh=mesh)
    return _updates(compiled, state, sharding.place_batch(random_batch(config), mesh, config.data.batch_size))


def peer_case(peer: PeerModel, config: ConfigDict) -> Case:
    """The same of another package's model."""
    step, state = make_step(peer, config)
    batch = jax.device_put(random_batch(config))
    return _updates(step.lower(state, batch).compile(), state, batch)


def _updates(compiled: jax.stages.Compiled, state: Any, batch: Any) -> Case:
    """A compiled update, whose result begins with the next state."""
    analysis: Any = compiled.memory_analysis()

    def update() -> Any:
        nonlocal state
        state, result = compiled(state, batch)
        return result

    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return Case(update, (), analysis.temp_size_in_bytes + outputs)


def random_batch(config: ConfigDict) -> Mapping[str, np.ndarray]:
    """Random tokens in a config's rows, all of them targets."""
    shape = config.data.batch_size, config.data.sequence_length + 1
    tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
    inputs = tokens[:, :-1]
    return {"inputs": inputs, "targets": tokens[:, 1:], "loss_mask": np.ones(inputs.shape, np.float32)}
