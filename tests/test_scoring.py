"""The next-token score, in any number of chunks, against optax and float64 NumPy."""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax.scoring import next_token_score
from tests.numerics import assert_close, double_precision, relative_rms, to_float64
from tests.quick import environment_with


class Problem(NamedTuple):
    """What `next_token_score` takes."""

    hidden: np.ndarray
    kernel: np.ndarray
    targets: np.ndarray
    loss_mask: np.ndarray


def random_problem(seed: int, length: int, d_model: int, vocab_size: int) -> Problem:
    rng = np.random.default_rng(seed)
    return Problem(
        rng.normal(size=(2, length, d_model)).astype(np.float32),
        rng.normal(size=(d_model, vocab_size)).astype(np.float32),
        rng.integers(vocab_size, size=(2, length)),
        rng.integers(2, size=(2, length)).astype(np.float32),
    )


def table_problem(logits, targets) -> Problem:
    """One row of tokens with exactly these logits [T, V]: their hidden states are one-hot, the logits the kernel."""
    return Problem(
        np.eye(len(logits), dtype=np.float32)[None],
        np.asarray(logits, np.float32),
        np.asarray(targets)[None],
        np.ones((1, len(logits)), np.float32),
    )


@partial(jax.jit, static_argnames="vocab_chunks")
def nats_and_gradient(problem, vocab_chunks):
    """The summed nats; their gradient with respect to hidden states and kernel."""

    def nats(hidden, kernel):
        return next_token_score(hidden, kernel, *problem[2:], vocab_chunks=vocab_chunks).nats

    return jax.value_and_grad(nats, argnums=(0, 1))(*problem[:2])


def by_numpy(problem):
    """As `nats_and_gradient`, in float64: the gradient of the logits is softmax(logits) less one at the target."""
    hidden, kernel, targets, mask = (np.asarray(each, np.float64) for each in problem)
    logits = hidden @ kernel
    logits -= logits.max(axis=-1, keepdims=True)
    softmax = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    hit = np.arange(kernel.shape[1]) == targets[..., None]
    nats = np.log(np.exp(logits).sum(axis=-1)) - np.where(hit, logits, 0).sum(axis=-1)
    slope = (softmax - hit) * mask[..., None]
    return (nats * mask).sum(), (slope @ kernel.T, np.einsum("btd,btv->dv", hidden, slope))


@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 40), st.integers(1, 9))
def test_any_number_of_chunks_is_the_whole(seed, length, vocab_size, vocab_chunks):
    """Vocabularies that the chunks divide or not, and chunks with no id at all."""
    problem = random_problem(seed, length, 3, vocab_size)
    with double_precision():
        wide = problem._replace(hidden=to_float64(problem.hidden), kernel=to_float64(problem.kernel))
        actual = nats_and_gradient(wide, vocab_chunks)
        assert actual[0].dtype == jnp.float64
        assert_close(actual, by_numpy(problem), 1e-13)


@pytest.mark.parametrize("vocab_chunks", [1, 2, 8])
def test_bytes_in_float32(vocab_chunks):
    """The 257 ids of bytes and the end of a document, which no number of chunks but 1 divides."""
    problem = random_problem(0, 9, 16, 257)

    @jax.jit
    def by_optax(hidden, kernel):
        each = optax.softmax_cross_entropy_with_integer_labels(hidden @ kernel, problem.targets)
        return jnp.sum(each * problem.loss_mask)

    actual = nats_and_gradient(problem, vocab_chunks)
    assert_close(actual, jax.value_and_grad(by_optax, argnums=(0, 1))(*problem[:2]), 1e-6)
    assert_close(actual, by_numpy(problem), 1e-6)


@pytest.mark.parametrize("vocab_chunks", [1, 3, 5])
def test_large_logits(vocab_chunks):
    """A float32 near 10,000 has no more than three decimals for the logarithm of a sum."""
    low, high = -1e4, 1e4
    logits = np.full((4, 10), low)
    logits[1:] = high
    logits[2, :9] = low
    logits[3, 0] = low
    problem = table_problem(logits, [7, 9, 9, 0])
    nats, gradient = nats_and_gradient(problem, vocab_chunks)
    expected = [math.log(10), math.log(10), 0, 20_000 + math.log(9)]
    assert float(nats) == pytest.approx(sum(expected), rel=1e-7)
    assert_close(gradient, by_numpy(problem)[1], 1e-6)
    nats, _ = nats_and_gradient(problem._replace(loss_mask=np.array([[1, 1, 1, 0]], np.float32)), vocab_chunks)
    assert float(nats) == pytest.approx(sum(expected[:3]), rel=1e-6)


@pytest.mark.parametrize("vocab_chunks", [1, 4])
def test_padding_never_counts(vocab_chunks):
    """Neither its targets nor a NaN in its hidden states."""
    problem = random_problem(0, 6, 5, 11)
    problem = problem._replace(loss_mask=np.array([[1, 1, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0]], np.float32))
    padding = problem.loss_mask == 0
    expected = by_numpy(problem)
    for target in (-1, 11, 12, 2**30):
        dirty = problem._replace(
            hidden=np.where(padding[..., None], np.float32(np.nan), problem.hidden),
            targets=np.where(padding, target, problem.targets),
        )
        actual = nats_and_gradient(dirty, vocab_chunks)
        assert_close(actual, expected, 1e-5)
        assert (np.asarray(actual[1][0])[padding] == 0).all()
    score = next_token_score(*dirty, vocab_chunks=vocab_chunks)
    assert score.tokens == 5
    assert float(score.loss) == pytest.approx(expected[0] / 5, rel=1e-5)


def test_bfloat16_is_rounded_once():
    """Logits are sums in float32; the gradient of the hidden states is one over the chunks as well."""
    problem = random_problem(0, 8, 16, 640)
    hidden = jnp.asarray(problem.hidden, jnp.bfloat16)
    rounded = problem._replace(
        hidden=np.asarray(hidden, np.float32),
        kernel=np.asarray(jnp.asarray(problem.kernel, jnp.bfloat16), np.float32),
    )
    expected, slopes = by_numpy(rounded)
    errors = {}
    for vocab_chunks in (1, 64):
        nats, gradient = nats_and_gradient(problem._replace(hidden=hidden), vocab_chunks)
        assert nats.dtype == jnp.float32
        assert [each.dtype for each in gradient] == [jnp.bfloat16, jnp.float32]
        assert float(nats) == pytest.approx(expected, rel=1e-6)
        errors[vocab_chunks] = [relative_rms(*pair) for pair in zip(gradient, slopes, strict=True)]
    assert max(errors[1]) < 4e-3
    assert max(errors[64]) < 4e-3, errors


def compiled_for(vocab_chunks, vocab_size=8192):
    """The program for nats and gradient: 2 x 128 tokens."""
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((2, 128, 16), jnp.float32),
            ((16, vocab_size), jnp.float32),
            ((2, 128), jnp.int32),
            ((2, 128), jnp.float32),
        )
    ]

    def nats(*problem):
        return next_token_score(*problem, vocab_chunks=vocab_chunks).nats

    return jax.jit(jax.value_and_grad(nats, argnums=(0, 1))).lower(*shapes).compile()


def test_chunks_bound_the_memory_for_logits():
    logits = 4 * 2 * 128 * 8192
    whole, chunked = (compiled_for(chunks).memory_analysis().temp_size_in_bytes for chunks in (1, 8))
    assert whole > logits
    assert chunked < whole / 4, (whole, chunked)


def test_one_chunk_is_no_loop():
    assert " while(" not in compiled_for(1, vocab_size=64).as_text()
    assert " while(" in compiled_for(2, vocab_size=64).as_text()


SHARED_COLUMNS = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from interdomain_jax.scoring import next_token_score
from tests.numerics import assert_close
from tests.test_scoring import by_numpy, random_problem

problem = random_problem(0, 6, 5, 48)
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
rows, columns = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "tensor"))
nats = lambda *args: next_token_score(*args, vocab_chunks=3).nats
function = jax.jit(
    jax.value_and_grad(nats, argnums=(0, 1)),
    in_shardings=(rows, columns, rows, rows),
    out_shardings=(NamedSharding(mesh, P()), (rows, columns)),
)
assert_close(function(*problem), by_numpy(problem), 1e-5)
program = function.lower(*problem).compile().as_text()
assert "all-reduce" in program
for exchange in ("all-gather", "all-to-all", "collective-permute"):
    assert exchange not in program, exchange
"""


def test_devices_share_the_columns_of_every_chunk():
    """Only sums and maxima over the vocabulary go between them: no column of the kernel, no logit."""
    finished = subprocess.run(
        [sys.executable, "-c", SHARED_COLUMNS],
        cwd=Path(__file__).parents[1],
        env=environment_with("--xla_force_host_platform_device_count=8") | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
