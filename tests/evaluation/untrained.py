"""Runs whose models are not trained, their choices clear all the same."""

import jax
import jax.numpy as jnp
from etils import epath

from configs import tiny
from interdomain_jax import checkpoints
from interdomain_jax import workdir as workdirs
from interdomain_jax.experiment import build_experiment
from tests.quick import quick_jit

SIZES = {"model.d_model": 16, "model.num_layers": 1, "model.num_heads": 2, "model.head_dim": 8, "model.init_std": 0.3}


def begin_run(directory, mixers="interdomain", overrides=None):
    """Saves the config of a run, and returns its first parameters."""
    config = tiny.get_config(mixers)
    config.update_from_flattened_dict(SIZES | (overrides or {}))
    workdirs.save_config(epath.Path(directory), config)
    model, _ = build_experiment(config)
    return quick_jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def save_params(directory, step, params):
    """Saves a checkpoint that can be evaluated."""
    with checkpoints.open_checkpoints(epath.Path(directory)) as opened:
        checkpoints.save(opened, step, {checkpoints.PARAMS_ITEM: params}, {})
