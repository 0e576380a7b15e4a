"""From a config to the objects it describes; where a config's fields are checked first."""

from typing import NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict

from interdomain_jax import sharding
from interdomain_jax.data.corpora import check_corpora
from interdomain_jax.data.tokenizers import Tokenizer, load_tokenizer
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.modules.softmax import require_whole_rows

POSITIVE_FIELDS = (
    "num_steps",
    "accumulation_steps",
    "vocab_chunks",
    "eval_every",
    "eval_tokens",
    "checkpoint_every",
    "checkpoints_to_keep",
    "max_skipped_in_a_row",
    "log_every",
)
SPIKE_ACTIONS = ("none", "skip", "rewind")


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


def check_fields(config: ConfigDict) -> None:
    """Checks the numbers of a training config that stand by themselves.

    Raises:
        ValueError: one is out of range.
    """
    for field in POSITIVE_FIELDS:
        require_positive(field, config[field])
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"seed is {config.seed}; it must be at least 0 and below 2**32")
    check_corpora(config.data)
    if config.best_checkpoints_to_keep < 0:
        raise ValueError(f"best_checkpoints_to_keep is {config.best_checkpoints_to_keep}; it must not be negative")
    if config.checkpoint_minutes < 0:
        raise ValueError(f"checkpoint_minutes is {config.checkpoint_minutes}; it must not be negative, 0 for never")
    if config.hang_seconds <= 0:
        raise ValueError(f"hang_seconds is {config.hang_seconds}; it must be above 0")
    if config.spikes.action not in SPIKE_ACTIONS:
        raise ValueError(f"spikes.action is {config.spikes.action!r}; it must be one of {SPIKE_ACTIONS}")
    if config.spikes.threshold <= 0:
        raise ValueError(f"spikes.threshold is {config.spikes.threshold}; it must be above 0 standard deviations")


def check_batch(config: ConfigDict, mesh: Mesh) -> None:
    """Checks that the batches of a config can be laid out on the mesh.

    Raises:
        ValueError: they cannot; the message names the field.
    """
    batch_size, accumulation_steps = config.data.batch_size, config.accumulation_steps
    parts = sharding.row_parts(mesh)
    require_positive("data.batch_size", batch_size)
    if batch_size % (accumulation_steps * parts):
        raise ValueError(
            f"data.batch_size is {batch_size}; it must be a multiple of accumulation_steps times mesh.data times "
            f"mesh.fsdp, {accumulation_steps} x {parts}"
        )
    check_rows(config, mesh)


def check_rows(config: ConfigDict, mesh: Mesh) -> None:
    """Checks that the rows of a config can be split as the mesh splits them.

    Raises:
        ValueError: they cannot; the message names the field.
    """
    parts = mesh.shape["seq"]
    if config.data.sequence_length % parts:
        raise ValueError(f"data.sequence_length is {config.data.sequence_length}; mesh.seq={parts} must divide it")
    if "softmax" in config.model.mixers:
        sharding.on_mesh(require_whole_rows, mesh)()


def require_positive(field: str, value: int) -> None:
    """Checks the value of a config field.

    Raises:
        ValueError: it is below 1; it names the field.
    """
    if value < 1:
        raise ValueError(f"{field} is {value}; it must be at least 1")


def _require_float_dtype(field: str, name: str) -> None:
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"{field} is {name!r}; it must be 'float32', 'bfloat16' or 'float16'")
