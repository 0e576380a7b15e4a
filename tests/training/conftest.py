"""One model, one config and one small text for all tests of training."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict

from configs import tiny
from interdomain_jax.data.tokenizers import Tokenizer
from interdomain_jax.training import loop
from tests.token_lists import TokenLists, tokenised

CORPUS = tokenised(
    f"{name} = [{name}_{n} for {name}_{n} in range({n})]\n" * 6
    for n, name in enumerate(("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta"))
)


def open_corpora(data: ConfigDict, split: str, tokenizer: Tokenizer) -> tuple[TokenLists, ...]:
    """Seven short documents in place of prepared corpora."""
    return (CORPUS,)


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

SPEEDS = ("train/tokens_per_second", "train/model_tflops_per_device", "train/data_wait_seconds")


def without_speed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a run without the figures that differ from one run to the next."""
    return [{name: value for name, value in row.items() if name not in SPEEDS} for row in rows]


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ConfigDict]:
    """Returns the demo's config at the smallest size; keyword arguments override dotted fields."""

    def make(overrides: dict[str, Any] | None = None) -> ConfigDict:
        config = tiny.get_config()
        config.update_from_flattened_dict(SMALL | (overrides or {}))
        return config.lock()

    return make


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains and validates on seven short documents in place of prepared corpora."""
    monkeypatch.setattr(loop, "open_corpora", open_corpora)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keeps compiled programs in a directory, so that of many starts of one config only the first one compiles, and
    that one fast.
    """
    fields = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
        "jax_disable_most_optimizations": True,
    }
    before = {name: jax.config.values[name] for name in fields}
    for name, value in fields.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield Path(fields["jax_compilation_cache_dir"])
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
