"""From a config to the objects it describes; where a config's fields are checked first."""

from typing import NamedTuple

from ml_collections import ConfigDict

from interdomain_jax.data.tokenizers import Tokenizer, load_tokenizer
from interdomain_jax.modules.decoder import Decoder


class Experiment(NamedTuple):
    """A model and the tokenizer it reads with."""

    model: Decoder
    tokenizer: Tokenizer


def build_experiment(config: ConfigDict) -> Experiment:
    """Builds the model and the tokenizer of `config`, initialising no parameter.

    Raises:
        ValueError: a model field is out of range, or the vocabulary is too small for the tokenizer.
        FileNotFoundError: the tokenizer's file does not exist.
    """
    require_positive("data.sequence_length", config.data.sequence_length)
    for field in ("dtype", "param_dtype"):
        _require_float_dtype(f"model.{field}", config.model[field])
    model = Decoder(**config.model)
    tokenizer = load_tokenizer(config.data.tokenizer)
    if config.model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size is {config.model.vocab_size}, but the tokenizer "
            f"{config.data.tokenizer!r} has {tokenizer.vocab_size} ids; it must be at least that"
        )
    return Experiment(model, tokenizer)


def require_positive(field: str, value: int) -> None:
    """Raises ValueError, naming the config field, unless `value` is at least 1."""
    if value < 1:
        raise ValueError(f"{field} is {value}; it must be at least 1")


def _require_float_dtype(field: str, name: str) -> None:
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"{field} is {name!r}; it must be 'float32', 'bfloat16' or 'float16'")
