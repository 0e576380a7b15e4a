"""The tasks of text against a reader in plain Python; their budgets counted again with each tokenizer."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax.data.tokenizers import load_tokenizer
from interdomain_jax.evaluation.recall.needle import CONTEXTS, NOISE, RULER_ANSWER_TOKENS, needle
from interdomain_jax.evaluation.recall.phonebook import ENTRIES, phonebook
from interdomain_jax.evaluation.recall.questions import largest

# Of each tokenizer, budgets from one that holds a line of noise or two.
BUDGETS = {"bytes": (450, 451, 1_024, 4_096), "mistral": (150, 151, 1_024, 4_096)}


@pytest.fixture(scope="module", params=BUDGETS)
def tokenizer_name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(tokenizer_name):
    return load_tokenizer(tokenizer_name)


class OneToken:
    """A tokenizer to which any text is one token: no text is too long."""

    vocab_size, eos_id, definition = 2, 1, b""

    def encode(self, text):
        return np.zeros(1, np.int32)

    def decode(self, ids):
        return ""


def size(tokenizer, question) -> int:
    return len(tokenizer.encode(question.prompt + question.answer))


def read_needle(prompt: str) -> str:
    """The number that the text gives to the key of its last line."""
    *text, last = prompt.split("\n")
    (key,) = {*re.findall(r"\w+-\w+", last)}
    (number,) = [number for line in text for number in re.findall(rf" {key} is (\d{{7}})\.", line)]
    return f" {number}"


def read_phonebook(prompt: str) -> str:
    """The number behind the name of the last line."""
    book, _, asked = prompt.partition("\n\n")
    numbers = dict(line.split(": ") for line in book.split("\n"))
    name = asked.split("\n")[-1].removesuffix(":")
    return f" {numbers[name]}"


def test_each_question_has_its_answer_in_the_text(tokenizer, tokenizer_name):
    for budget in BUDGETS[tokenizer_name]:
        for question in needle(tokenizer, budget=budget, count=6, seed=budget):
            assert read_needle(question.prompt) == question.answer
    for entries in (3, 16):
        for question in phonebook(tokenizer, entries=entries, budget=4_096, count=6, seed=entries):
            assert read_phonebook(question.prompt) == question.answer


def test_the_noise_fills_the_budget_to_the_line(tokenizer, tokenizer_name):
    for budget in BUDGETS[tokenizer_name]:
        for question in needle(tokenizer, budget=budget, count=5, seed=1):
            assert size(tokenizer, question) <= budget
            before, after = question.prompt.split(NOISE, maxsplit=1)
            more = question._replace(prompt=f"{before}{NOISE}\n{NOISE}{after}")
            assert size(tokenizer, more) > budget


def test_the_budget_holds_to_the_token(tokenizer):
    """A budget that a question fills is enough for it, one token less is not."""
    (question,) = needle(tokenizer, budget=1_024, count=1, seed=5)
    exact = size(tokenizer, question)
    assert needle(tokenizer, budget=exact, count=1, seed=5) == [question]
    (shorter,) = needle(tokenizer, budget=exact - 1, count=1, seed=5)
    assert shorter.prompt.count(NOISE) == question.prompt.count(NOISE) - 1

    books = phonebook(tokenizer, entries=16, budget=4_096, count=4, seed=5)
    exact = max(size(tokenizer, book) for book in books)
    assert phonebook(tokenizer, entries=16, budget=exact, count=4, seed=5) == books
    with pytest.raises(ValueError) as caught:
        phonebook(tokenizer, entries=16, budget=exact - 1, count=4, seed=5)
    assert str(caught.value) == (
        f"budget is {exact - 1}; a question about a phonebook of 16 entries and its answer take {exact} tokens: "
        "give a larger budget or fewer entries"
    )


def test_the_budget_keeps_room_for_a_longer_answer(tokenizer):
    (question,) = needle(tokenizer, budget=1_024, count=1, seed=5, answer_tokens=RULER_ANSWER_TOKENS)
    prompt = len(tokenizer.encode(question.prompt))
    line = len(tokenizer.encode(f"{NOISE}\n{NOISE}")) - len(tokenizer.encode(NOISE))
    assert 1_024 - line < prompt + RULER_ANSWER_TOKENS <= 1_024
    (book,) = phonebook(tokenizer, entries=3, budget=1_024, count=1, seed=5)
    prompt = len(tokenizer.encode(book.prompt))
    assert phonebook(tokenizer, entries=3, budget=prompt + 99, count=1, seed=5, answer_tokens=99) == [book]
    with pytest.raises(ValueError, match=f"take {prompt + 99} tokens"):
        phonebook(tokenizer, entries=3, budget=prompt + 98, count=1, seed=5, answer_tokens=99)


def test_facts_lie_at_even_depths(tokenizer):
    questions = needle(tokenizer, budget=2_048, count=9, seed=0)
    for number, question in enumerate(questions):
        opening, *lines, asked = question.prompt.split("\n")
        assert opening != NOISE != asked
        (place,) = [place for place, line in enumerate(lines) if line != NOISE]
        # Half a line is lost in rounding.
        assert place / (len(lines) - 1) == pytest.approx(number / 8, abs=0.51 / (len(lines) - 1))
    (middle,) = needle(tokenizer, budget=2_048, count=1, seed=0)
    _, *lines, _ = middle.prompt.split("\n")
    (place,) = [place for place, line in enumerate(lines) if line != NOISE]
    assert abs(place - (len(lines) - 1) / 2) <= 0.5


def test_the_contexts_and_entries_of_the_paper_fit():
    tokenizer = load_tokenizer("mistral")
    for budget in CONTEXTS:
        for question in needle(tokenizer, budget=budget, count=2, seed=0):
            assert budget - 40 < size(tokenizer, question) <= budget
    for entries in ENTRIES:
        for question in phonebook(tokenizer, entries=entries, budget=4_096, count=2, seed=0):
            assert question.prompt.partition("\n\n")[0].count("\n") == entries - 1


def test_a_phonebook_shows_two_others_as_examples(tokenizer):
    for question in phonebook(tokenizer, entries=5, budget=4_096, count=30, seed=0):
        book, _, rest = question.prompt.partition("\n\n")
        lines = book.split("\n")
        _, *examples, asked = rest.split("\n")
        assert len({*examples}) == 2
        assert {*examples} < {*lines}
        (entry,) = [line for line in lines if line.startswith(f"{asked} ")]
        assert entry not in examples
        assert f"{asked}{question.answer}" == entry
        names, numbers = zip(*(line.split(": ") for line in lines), strict=True)
        assert len({*names}) == len({*numbers}) == 5
        assert all(re.fullmatch(r"\d{3}-\d{3}-\d{4}", number) for number in numbers)


def test_questions_are_a_function_of_the_seed(tokenizer):
    makers = (
        lambda seed: needle(tokenizer, budget=1_024, count=10, seed=seed),
        lambda seed: phonebook(tokenizer, entries=8, budget=1_024, count=10, seed=seed),
    )
    for make in makers:
        assert make(3) == make(3)
        assert not {*make(3)} & {*make(4)}
        assert len({*make(3)}) == 10


@given(budget=st.integers(1, 1_500))
def test_at_any_budget_there_is_a_question_or_a_sentence(budget):
    """lm-eval#2963: at some lengths the generator never ended."""
    tokenizer = load_tokenizer("bytes")
    try:
        questions = needle(tokenizer, budget=budget, count=3, seed=0)
    except ValueError as error:
        refused = re.fullmatch(
            rf"budget is {budget}; with one line of noise the question and its answer take (\d+) tokens", str(error)
        )
        assert refused is not None
        assert int(refused[1]) > budget
    else:
        assert all(size(tokenizer, question) <= budget for question in questions)


def test_noise_that_takes_no_tokens_ends_too():
    (question,) = needle(OneToken(), budget=50, count=1, seed=0)
    assert question.prompt.count(NOISE) == 50


@given(limit=st.integers(1, 5_000), data=st.data())
def test_the_largest_is_found_in_few_questions(limit, data):
    start, expected = data.draw(st.integers(1, limit)), data.draw(st.integers(0, limit))
    asked = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number <= expected

    assert largest(holds, start=start, limit=limit) == expected
    assert len({*asked}) == len(asked) <= 2 * np.log2(limit) + 3
    assert all(1 <= number <= limit for number in asked)
    if start == expected:
        assert len(asked) <= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count is 0; it must be at least 1"),
        ({"budget": 0}, "budget is 0; it must be at least 1"),
        ({"answer_tokens": -1}, "answer_tokens is -1; it must be at least 0"),
        ({"seed": -1}, "seed is -1; it must be 0 or more"),
    ],
)
def test_arguments_out_of_range_are_refused_in_a_sentence(arguments, message):
    arguments = {"budget": 2_000, "count": 1, "seed": 0} | arguments
    for make in (lambda: needle(OneToken(), **arguments), lambda: phonebook(OneToken(), entries=3, **arguments)):
        with pytest.raises(ValueError) as caught:
            make()
        assert str(caught.value) == message


@pytest.mark.parametrize("entries", [2, 10**6])
def test_a_phonebook_has_at_least_three_entries_and_no_name_twice(entries):
    with pytest.raises(
        ValueError, match=rf"^entries is {entries}; it must lie between 3, of which 2 are examples, and"
    ):
        phonebook(OneToken(), entries=entries, budget=10**9, count=1, seed=0)
