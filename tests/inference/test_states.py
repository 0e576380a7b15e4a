"""States as values: saved, loaded elsewhere, forked, and refused by other models."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interdomain_jax.inference import Request, Sampling
from interdomain_jax.inference.states import load_state, save_state, take_rows, with_room
from tests.inference.test_generator import CHUNK, ROWS, generator, prompts_of, trained

# In a process that has read nothing: the tokens of eight continuations of a saved state.
CONTINUED = """
import json, sys
from pathlib import Path
from interdomain_jax.inference import Request, Sampling
from interdomain_jax.inference.states import load_state
from tests.inference.test_generator import generator, trained

mixers = tuple(sys.argv[2].split("-"))
state = load_state(Path(sys.argv[1]), trained(mixers)[0])
own = generator(mixers)
tokens = []
for first in (0, 4):
    requests = [Request((), 20, Sampling(temperature=1.0), seed) for seed in range(first, first + 4)]
    completions, _ = own.go_on(own.fork(state, [0, 0, 0, 0]), requests)
    tokens += [completion.tokens for completion in completions]
print(json.dumps(tokens))
"""


@pytest.mark.parametrize("mixers", [("interdomain",), ("softmax",)], ids="-".join)
def test_a_saved_state_is_forked_in_another_process(tmp_path, mixers):
    """Eight continuations, equal to eight runs over the whole text."""
    (text,) = prompts_of(45)
    own, (model, _) = generator(mixers), trained(mixers)
    expected = own.generate([Request(text, 20, Sampling(temperature=1.0), seed) for seed in range(8)])
    save_state(tmp_path / "text.state", model, take_rows(own.read([text]), [0]))
    command = [sys.executable, "-c", CONTINUED, str(tmp_path / "text.state"), "-".join(mixers)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [completion.tokens for completion in expected]


def test_storage(tmp_path):
    """float32 to the last bit; bfloat16 within its 8 bits, in half the room."""
    model, _ = trained(("interdomain", "softmax"))
    state = generator(("interdomain", "softmax")).read(prompts_of(30, 2))
    save_state(tmp_path / "whole", model, state)
    save_state(tmp_path / "half", model, state, storage="bfloat16")
    whole, half = load_state(tmp_path / "whole", model), load_state(tmp_path / "half", model)
    for name in ("shape", "dtype"):
        same = jax.tree.map(lambda a, b, name=name: getattr(a, name) == getattr(b, name), state, whole)
        assert jax.tree.all(same)
    jax.tree.map(np.testing.assert_array_equal, whole, state)
    close = lambda actual, expected: np.testing.assert_allclose(
        actual.astype(jnp.float32), expected.astype(jnp.float32), rtol=2**-8, atol=0
    )
    jax.tree.map(close, half, state)
    np.testing.assert_array_equal(half.logits, state.logits)
    assert (tmp_path / "half").stat().st_size < 0.6 * (tmp_path / "whole").stat().st_size


def test_rows_can_be_taken_in_any_order():
    state = generator(("interdomain", "softmax")).read(prompts_of(9, 4, 1, 30))
    taken = take_rows(state, [2, 0, 2])
    assert taken.length.tolist() == [1, 9, 1]
    jax.tree.map(
        lambda part, whole: np.testing.assert_array_equal(part, np.take(whole, [2, 0, 2], axis=0)), taken, state
    )


def test_prompts_go_on_behind_a_state_that_stays_as_it_is(tmp_path):
    """More of them than rows, and an empty one; the cache of the state has no room beside its 50 tokens."""
    text, *questions = prompts_of(50, 3, 5, 17, 1, 2)
    mixers = ("interdomain", "softmax")
    own, (model, _) = generator(mixers), trained(mixers)
    requests = [Request(question, 10) for question in [*questions, []]]
    whole = own.generate([request._replace(prompt=text + list(request.prompt)) for request in requests])
    save_state(tmp_path / "text", model, with_room(take_rows(own.read([text]), [0]), 50))
    read = load_state(tmp_path / "text", model)
    room = lambda state: state.cache[0][1].keys.shape[2]
    assert (room(read), room(with_room(read, 90)), room(own.fork(read, [0]))) == (50, 90, 512)
    programs = own._read._cache_size(), own._decode._cache_size()
    for _ in range(2):
        assert [each.tokens for each in own.generate(requests, behind=read)] == [each.tokens for each in whole]
    assert (own._read._cache_size(), own._decode._cache_size()) == programs
    with pytest.raises(ValueError, match="request 0: 53 tokens and 248 to generate are 301; max_length is 300"):
        own.generate([Request(questions[0], 248)], behind=read)
    # A chunk is longer than the cache of the state was.
    (again,) = prompts_of(CHUNK - 1, seed=1)
    (expected,) = own.generate([Request(text[:5] + again, 8)])
    small = with_room(take_rows(own.read([text[:5]]), [0] * ROWS), 5)
    completions, _ = own.go_on(own.read([again], small), [Request((), 8)])
    assert completions[0].tokens == expected.tokens
    with pytest.raises(ValueError, match="max_length is 49; the state holds 50 tokens"):
        with_room(read, 49)


def test_what_is_no_state_of_the_model_is_refused(tmp_path):
    model, _ = trained(("interdomain",))
    other, _ = trained(("s4d",))
    with pytest.raises(FileNotFoundError, match="missing does not exist"):
        load_state(tmp_path / "missing", model)
    (tmp_path / "text").write_text("a text")
    with pytest.raises(ValueError, match="text is no safetensors file"):
        load_state(tmp_path / "text", model)
    state = generator(("s4d",)).read(prompts_of(3))
    save_state(tmp_path / "state", other.clone(rope_base=20.0), state)
    with pytest.raises(ValueError, match=r"another model: rope_base is 20\.0 there and 10000\.0 here"):
        load_state(tmp_path / "state", other)
    save_state(tmp_path / "state", other, state)
    with pytest.raises(ValueError, match=r"another model: mixers is \['s4d'\] there and \['interdomain'\] here"):
        load_state(tmp_path / "state", model)
