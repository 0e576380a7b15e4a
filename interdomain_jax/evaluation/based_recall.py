"""What the recall tasks of Based do with a document: the functions that the YAML files in `tasks` name.

Tasks and data sets: Arora et al., arXiv:2402.18668 and arXiv:2407.05483.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")
"""Of paragraphs, documents and titles in TriviaQA's passages."""


def prompt(document: Mapping[str, Any]) -> str:
    """The passage as one sentence or more, and the question behind it, which the answer completes.

    Some passages end in their own question; it is asked once.
    """
    passage, question = _MARKS.sub("", document["context"].strip()), document["question"].strip()
    while question and passage.lower().endswith(question.lower()):
        passage = passage[: -len(question)]
    return f"{passage.strip().strip('.')}. {question}"


def contains(document: Mapping[str, Any], generated: Sequence[str]) -> dict[str, int]:
    """1 if one of the right answers occurs in the generated text, in upper or lower case, otherwise 0."""
    from lm_eval.tasks.swde.task import contains_score

    answers = document["answers"] if "answers" in document else [document["value"].strip()]
    return {"contains": contains_score(generated[0], answers)}
