"""The corpora that a config names, as documents of token ids."""

from absl import logging
from etils import epath
from ml_collections import ConfigDict

from interdomain_jax.data.loader import require_packing, require_weights
from interdomain_jax.data.token_files import TokenDocuments
from interdomain_jax.data.tokenizers import Tokenizer, fingerprint

EMBEDDED = "stdlib_text"
"""The corpus that needs no preparation by hand."""


def check_corpora(data: ConfigDict) -> None:
    """Checks the fields of a config that choose, mix and pack corpora.

    Raises:
        ValueError: one is out of range.
    """
    if not data.corpora:
        raise ValueError("data.corpora is empty; it must name at least one corpus")
    require_weights("data.weights", data.weights, len(data.corpora))
    require_packing("data.packing", data.packing)


def open_corpora(data: ConfigDict, split: str, tokenizer: Tokenizer) -> tuple[TokenDocuments, ...]:
    """Opens a split of each of `data.corpora`; the embedded one is prepared under `data.directory` on first use.

    Args:
        data: the part of a config.
        split: "train" or "validation".
        tokenizer: that of `data.tokenizer`.

    Raises:
        FileNotFoundError: a corpus or one of its files is not there.
        ValueError: it was prepared with another tokenizer, or its files are not what was written.
    """
    opened = []
    for name in data.corpora:
        directory = _prepare_embedded(data, tokenizer) if name == EMBEDDED else epath.Path(name).expanduser()
        if not directory.exists():
            raise FileNotFoundError(
                f"data.corpora names {name!r}, which is neither {EMBEDDED!r} nor the directory of a prepared corpus"
            )
        opened.append(TokenDocuments(directory / split, tokenizer))
    return tuple(opened)


def _prepare_embedded(data: ConfigDict, tokenizer: Tokenizer) -> epath.Path:
    # Imported here so that training on another corpus does not pay for TFDS.
    from interdomain_jax.data import preparation
    from interdomain_jax.data.preparation_progress import show_progress
    from interdomain_jax.data.sources import make_source

    below = epath.Path(data.directory).expanduser()
    source = make_source(EMBEDDED, data_dir=str(below))
    directory = below / "tokens" / f"{source.info.full_name.replace('/', '-')}-{fingerprint(tokenizer)}"
    plans = preparation.plan(source, directory, data.tokenizer)
    if not all(plan.is_complete() for plan in plans.values()):
        logging.info("preparing %s in %s, once", EMBEDDED, directory)
        # Several processes may do it at once: they write the same.
        with show_progress(plans):
            preparation.carry_out(plans, preparation.run_here)
    return directory
