"""One model, one config and one small text for all tests of training."""

from collections.abc import Callable
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import tiny
from interdomain_jax.training import loop

DOCUMENTS = [
    {"text": f"{name} = [{name}_{n} for {name}_{n} in range({n})]\n" * 6}
    for n, name in enumerate(("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta"))
]

SMALL = {
    "model.d_model": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.head_dim": 8,
    "model.state_dim": 4,
    "data.sequence_length": 32,
    "data.batch_size": 4,
    "optimizer.warmup_steps": 2,
    "optimizer.peak_learning_rate": 1e-2,
    "num_steps": 12,
    "eval_every": 6,
    "eval_tokens": 200,
    "checkpoint_every": 4,
    "accumulation_steps": 4,
}


@pytest.fixture
def make_config() -> Callable[..., ConfigDict]:
    """Returns the demo's config at the smallest size; keyword arguments override dotted fields."""

    def make(overrides: dict[str, Any] | None = None) -> ConfigDict:
        config = tiny.get_config()
        config.update_from_flattened_dict(SMALL | (overrides or {}))
        return config.lock()

    return make


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains and validates on seven short documents in place of a prepared corpus."""
    monkeypatch.setattr(loop, "open_corpus", lambda name, split, directory: DOCUMENTS)
