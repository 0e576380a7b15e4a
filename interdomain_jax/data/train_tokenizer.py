"""Trains a SentencePiece model on the training split of a source.

python -m interdomain_jax.data.train_tokenizer --corpus=stdlib_text --vocab_size=4096 --output=/tmp/pieces.model

The same command gives the same file. Of a corpus larger than `--max_mib` a sample is read: one document after the other
from stretches of a thirty-second of that, 1 MiB at least, 64 at a time, which are drawn from all of the corpus.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from absl import app, flags, logging
from etils import epath
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress

from interdomain_jax import cli
from interdomain_jax import workdir as workdirs
from interdomain_jax.data import source_flags
from interdomain_jax.data.tokenizer_training import (
    MIN_VOCAB_SIZE,
    bytes_per_token,
    sample_documents,
    train_model,
)
from interdomain_jax.data.tokenizers import SentencePieceTokenizer, fingerprint

_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 32_000, "Number of ids, 256 of them for bytes.")
_MODEL_TYPE = flags.DEFINE_enum("model_type", "bpe", ["bpe", "unigram"], "How the pieces are found.")
_MAX_MIB = flags.DEFINE_float(
    "max_mib", 256, "MiB of text to train on, spread over the corpus if it has more.", lower_bound=0.001
)
_OUTPUT = flags.DEFINE_string("output", None, "The file to write; its name ends in .model.", required=True)


class _Measured:
    """Passes texts on, counts their bytes, and shows how far they are from so many."""

    def __init__(self, texts: Iterable[str], max_bytes: int):
        self._texts = texts
        self._max_bytes = max_bytes
        self.bytes = 0

    def __iter__(self) -> Iterator[str]:
        console = Console(stderr=True)
        columns = ("Reading", BarColumn(), DownloadColumn(binary_units=True))
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=self._max_bytes)
            for text in self._texts:
                self.bytes += len(text.encode())
                progress.update(task, completed=self.bytes)
                yield text
        logging.info("Training on %s bytes of text.", f"{self.bytes:,}")


def main(_: list[str]) -> None:
    """Trains a tokenizer on the texts that the flags name, writes it, and prints how it does."""
    started = time.perf_counter()
    with cli.exit_on_bad_input():
        output = Path(_OUTPUT.value).expanduser()
        _check_flags(output)
        source = source_flags.source_from_flags()
        max_bytes = int(_MAX_MIB.value * 2**20)
        part_bytes = max(1 << 20, max_bytes // 32)
        sample = sample_documents(source, "train", part_bytes=part_bytes, max_bytes=max_bytes)
        texts = _Measured(sample, max_bytes)
        model = train_model(texts, vocab_size=_VOCAB_SIZE.value, model_type=_MODEL_TYPE.value)
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f"{output.name}.tmp")
    unfinished.write_bytes(model)
    unfinished.replace(output)
    tokenizer = SentencePieceTokenizer(str(output))
    # Few of the texts of a part are for validation, and a hundred documents are enough.
    ratio = bytes_per_token(sample_documents(source, "validation", part_bytes=64 << 20, max_bytes=1 << 19), tokenizer)
    print(
        f"{output}: {tokenizer.vocab_size:,} pieces from {texts.bytes:,} bytes of text in "
        f"{time.perf_counter() - started:.1f} s; "
        + ("no text for validation" if ratio is None else f"{ratio:.2f} bytes per token of the validation split")
    )
    print(f"fingerprint {fingerprint(tokenizer)}; to use it: --config.data.tokenizer={output}")


def _check_flags(output: Path) -> None:
    if _VOCAB_SIZE.value < MIN_VOCAB_SIZE:
        raise ValueError(
            f"--vocab_size is {_VOCAB_SIZE.value}; it must be at least {MIN_VOCAB_SIZE}: 256 bytes, the unknown, the "
            "end of a document, and something to learn"
        )
    if output.suffix != ".model" or output.is_dir():
        raise ValueError(f"--output is {output}; it must be a file whose name ends in .model")
    workdirs.require_writable("--output", epath.Path(output.parent))


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
