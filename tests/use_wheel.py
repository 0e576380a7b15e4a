"""Uses the installed package where nothing but its requirements is: `make release-check` runs this, outside pytest.

    python -I tests/use_wheel.py

with the Python of that environment; -I keeps the checkout off its path.
"""

import importlib
import importlib.metadata
import pkgutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import interdomain_jax
import pallas_kernels
from interdomain_jax import Decoder, InterdomainAttention, interdomain_attention, layer_dynamics, sharding
from interdomain_jax.training.optimizer import make_optimizer
from interdomain_jax.training.state import init_state
from interdomain_jax.training.step import make_train_step
from interdomain_jax.version import __version__

CHECKOUT = Path(__file__).resolve().parents[1]
EXTRAS = {"apache_beam", "datasets", "lm_eval", "pyarrow"}
"""What modules may miss here: it comes with the extras."""


def every_file_is_there() -> None:
    """Modules and data alike, as in the checkout, and from another place."""
    for package in (interdomain_jax, pallas_kernels):
        installed, source = Path(package.__file__).parent, CHECKOUT / package.__name__
        assert not installed.is_relative_to(CHECKOUT / package.__name__), installed
        files = [path.relative_to(source) for path in source.rglob("*.*") if "__pycache__" not in path.parts]
        assert files
        for file in files:
            assert (installed / file).read_bytes() == (source / file).read_bytes(), file
    metadata = importlib.metadata.metadata("interdomain-jax")
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"


def every_module_is_imported() -> None:
    """But for those of the extras."""
    for package in (interdomain_jax, pallas_kernels):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                importlib.import_module(module.name)
            except flags.DuplicateFlagError:
                # The second of two programs that have a flag of one name; they run in processes of their own.
                continue
            except ImportError as error:
                if (error.name or "").partition(".")[0] not in EXTRAS:
                    raise


def the_op_is_its_sequential_form() -> None:
    """In float32."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (2, 100, 4, 16)) for key in keys[:3])
    mixer = InterdomainAttention(num_heads=4, head_dim=16, state_dim=16)
    dynamics = layer_dynamics(mixer.init(keys[3], jnp.zeros((1, 1, 64)))["params"])
    output, _ = interdomain_attention(q, k, v, dynamics)
    expected, _ = interdomain_attention(q, k, v, dynamics, implementation="sequential")
    error = float(jnp.linalg.norm(output - expected) / jnp.linalg.norm(expected))
    print(f"the op against its sequential form: relative RMS {error:.1e}")
    assert error < 1e-5


def a_model_learns() -> None:
    """Twenty updates on one batch, by the package's own optimizer and step."""
    model = Decoder(vocab_size=32, d_model=32, num_layers=2, num_heads=2, head_dim=16, state_dim=8)
    optimizer = make_optimizer(
        num_steps=20,
        warmup_steps=2,
        peak_learning_rate=1e-2,
        final_learning_rate=1e-5,
        ssm_peak_learning_rate=1e-3,
        weight_decay=0.1,
        clip_norm=1.0,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
    )
    mesh = sharding.make_mesh(sharding.mesh_config())
    step = make_train_step(model, optimizer, accumulation_steps=1, vocab_chunks=1, mesh=mesh)
    state = init_state(model, optimizer, seed=0, mesh=mesh)
    tokens = np.random.default_rng(0).integers(32, size=(4, 33), dtype=np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": np.ones((4, 32), np.float32)}
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    print(f"a tiny model: loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per token in {len(losses)} updates")
    assert losses[-1] < losses[0] - 1


if __name__ == "__main__":
    every_file_is_there()
    every_module_is_imported()
    the_op_is_its_sequential_form()
    a_model_learns()
