"""How often a model gives the right answers: generated to questions in text, and by argmax in sequences of tokens.

Both go batch by batch, and their results depend neither on the size of the batches nor on the mesh, but for ties that
float32's rounding breaks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from interdomain_jax import sharding
from interdomain_jax.data.tokenizers import Tokenizer
from interdomain_jax.evaluation.recall.sequences import Sequences
from interdomain_jax.inference import Generator, Request
from interdomain_jax.ops.shards import ROW_AXES
from interdomain_jax.scoring import LanguageModel


def contains(text: str, answer: str) -> bool:
    """Whether the answer is somewhere in the text, in whichever case: RULER's rule (Hsieh et al. 2024)."""
    return answer.strip().lower() in text.lower()


def first_line_equals(text: str, answer: str) -> bool:
    """Whether the first line is the answer alone, but for spaces around it: the rule of Jelassi et al. 2024."""
    return text.split("\n", 1)[0].strip() == answer.strip()


def answer_questions(
    generator: Generator,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    answers: Sequence[str],
    is_right: Callable[[str, str], bool],
    *,
    batch_size: int,
) -> Iterator[np.ndarray]:
    """Generates behind each prompt and compares.

    Args:
        generator: of at least `batch_size` rows.
        tokenizer: of the model.
        requests: the prompts, and how long a text may become.
        answers: the right ones.
        is_right: whether a text, and which answer was wanted, agree.
        batch_size: requests at a time.

    Yields:
        float64 [N] of each batch: 1 for a right answer, 0 for a wrong one.
    """
    for first in range(0, len(requests), batch_size):
        completions = generator.generate(requests[first : first + batch_size])
        # A vocabulary may have been rounded up: ids that the tokenizer does not have are no text.
        texts = (tokenizer.decode(i for i in each.tokens if i < tokenizer.vocab_size) for each in completions)
        yield np.array(list(map(is_right, texts, answers[first : first + batch_size])), np.float64)


def make_count_correct(model: LanguageModel, mesh: Mesh) -> jax.stages.Wrapped:
    """Returns the jitted `(params, tokens, places, answers) -> counts`, on the mesh.

    Of tokens [B, T] it counts, for each row, the places [B, P] behind which the most likely token of the whole
    vocabulary is the answer [B, P]; an answer of -1 is never given. Logits are made at those places alone.
    """

    def count_correct(params: Any, tokens: Array, places: Array, answers: Array) -> Array:
        hidden, _ = model.apply({"params": params}, tokens, unembed=False)
        asked = jnp.take_along_axis(hidden, places[..., None], axis=1)
        kernel = params["unembed"]["kernel"].astype(asked.dtype)
        logits = jnp.matmul(asked, kernel, preferred_element_type=jnp.float32)
        return jnp.sum(jnp.argmax(logits, axis=-1) == answers, axis=1)

    return jax.jit(sharding.on_mesh(count_correct, mesh), out_shardings=sharding.replicated(mesh))


def answer_sequences(
    count_correct: Callable[..., Array], params: Any, sequences: Sequences, mesh: Mesh, *, batch_size: int
) -> Iterator[np.ndarray]:
    """Reads each sequence in one forward pass and compares the most likely tokens with the answers.

    Args:
        count_correct: from `make_count_correct`.
        params: on the mesh.
        sequences: each with at least one scored token; all processes have all of them.
        mesh: from `sharding.make_mesh`; its `seq` axis must divide the length.
        batch_size: sequences at a time, a multiple of `sharding.row_parts(mesh)`.

    Yields:
        float64 [N] of each batch: the share of each sequence's answers that are right.
    """
    count = len(sequences.tokens)
    totals = sequences.is_scored.sum(axis=1)
    # The scored places of each sequence come first.
    places = np.argsort(~sequences.is_scored, axis=1, kind="stable")[:, : totals.max()].astype(np.int32)
    answers = np.take_along_axis(np.where(sequences.is_scored, sequences.targets, -1), places, axis=1)
    rows = sharding.process_rows(mesh, batch_size)
    place = NamedSharding(mesh, PartitionSpec(ROW_AXES))
    for first in range(0, count, batch_size):
        # The last batch is filled up with its last sequence.
        batch = np.minimum(np.arange(first, first + batch_size), count - 1)
        arrays = (
            jax.make_array_from_process_local_data(place, each[batch[rows]], (batch_size, each.shape[1]))
            for each in (sequences.tokens, places, answers)
        )
        counts = np.asarray(count_correct(params, *arrays))[: count - first]
        yield counts / totals[first : first + batch_size]


def mean_and_error(shares: np.ndarray) -> tuple[float, float | None]:
    """The mean of independent samples, and its standard error: sample deviation / sqrt(N), None of a single one."""
    if len(shares) < 2:
        return float(shares.mean()), None
    return float(shares.mean()), float(shares.std(ddof=1) / len(shares) ** 0.5)
