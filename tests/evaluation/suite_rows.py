"""A few rows of every data set that the suites ask about, with the columns that it has on the hub, in our own words."""

import json
from pathlib import Path

from interdomain_jax.evaluation.suites import SUITES, sources


def _arc(number, question, texts, answer):
    choices = {"text": texts, "label": ["A", "B", "C"][: len(texts)]}
    return {"id": number, "question": question, "choices": choices, "answerKey": answer}


def _hellaswag(activity, start, who, endings, label):
    return {
        "ind": 7,
        "activity_label": activity,
        "ctx_a": start,
        "ctx_b": who,
        "ctx": f"{start} {who}",
        "endings": endings,
        "source_id": "activitynet~v_0",
        "split": "val",
        "split_type": "indomain",
        "label": label,
    }


def _record(key, value, text):
    return {"doc_id": "0", "file_name": f"{key}.txt", "key": key, "value": value, "text": text}


def _reading(passage, question, *answers):
    return {
        "doc_id": "0",
        "context": passage,
        "question": question,
        "answers": list(answers),
        "orig_question": f"{question}?",
    }


def _longbench(task, context, question, *answers, classes=()):
    return {
        "context": context,
        "question": question,
        "answer_prefix": "Answer:",
        "answers": list(answers),
        "all_classes": list(classes),
        "max_new_tokens": 32,
        "task": task,
        "length": len(context.split()),
    }


_STORY = "Mara rowed to the island at dawn. She found the bell under the third stone and rang it twice."
_REPORT = "The office reviewed twelve bridges. Four of them need repairs, which will cost nine million."
_CODE = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"

ROWS = {
    ("EleutherAI/lambada_openai", "default", "test"): [
        {"text": "She looked for her lamp in every room, and at last under the stairs she found the lamp"},
        {"text": "The old dog slept by the door. When the bell rang, nobody moved but the dog"},
        {"text": "He had lost the key to the café. Without it nobody would ever drink at the café"},
    ],
    ("baber/piqa", "default", "validation"): [
        {"goal": "Keep bread fresh", "sol1": "Wrap it in a cloth.", "sol2": "Leave it in the rain.", "label": 0},
        {"goal": "Cool down tea", "sol1": "Put a lid on it.", "sol2": "Stir in some cold milk.", "label": 1},
    ],
    ("Rowan/hellaswag", "default", "validation"): [
        _hellaswag(
            "Washing a cup",
            "A boy holds a cup below the tap.",
            "he",
            ["dries it with a towel.", "eats the towel.", "throws the tap away.", "[substeps] paints the water."],
            "0",
        ),
        _hellaswag(
            "Making a fire",
            "Two women stack dry wood.",
            "one",
            ["folds the wood.", "swims home.", "lights a match.", "reads the smoke aloud."],
            "2",
        ),
    ],
    ("allenai/winogrande", "winogrande_xl", "validation"): [
        {
            "sentence": "The box did not fit on the shelf because the _ was too big.",
            "option1": "box",
            "option2": "shelf",
        }
        | {"answer": "1"},
        {
            "sentence": "Ann thanked Eve for the ride, for _ has no car.",
            "option1": "Eve",
            "option2": "Ann",
            "answer": "2",
        },
    ],
    ("allenai/ai2_arc", "ARC-Easy", "test"): [
        _arc("1", "What melts ice?", ["heat", "shade", "dust"], "A"),
        _arc("2", "Which of them lives in water?", ["cow", "trout"], "B"),
    ],
    ("allenai/ai2_arc", "ARC-Challenge", "test"): [
        _arc("3", "Why do shadows move?", ["wind", "the earth turns"], "B"),
        _arc("4", "What do roots take up?", ["water", "light", "wool"], "A"),
    ],
    ("lighteval/siqa", "default", "validation"): [
        {"context": "Lee lent Kim an umbrella.", "question": "How would Kim feel?"}
        | {"answerA": "grateful", "answerB": "angry", "answerC": "tall", "label": "1"},
        {"context": "Jo broke the vase.", "question": "What will Jo do next?"}
        | {"answerA": "sing", "answerB": "say sorry", "answerC": "sleep", "label": "2"},
    ],
    ("aps/super_glue", "boolq", "validation"): [
        {"question": "do bats fly", "passage": "Bats are mammals that fly.", "idx": 0, "label": 1},
        {"question": "is salt sweet", "passage": "Salt tastes of the sea.", "idx": 1, "label": 0},
    ],
    ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test"): [
        {"page": " = Lighthouse = \n \n The tower , built in 1 @,@ 801 , is 31 metres tall . \n"},
        {"page": " = Ferry = \n \n It carried mail until the bridge was built ( in 1933 ) . \n"},
    ],
    ("hazyresearch/based-swde-v2", "default", "validation"): [
        _record("director", "Ines Molnar", " The Long Pier. Director: Ines Molnar. Year: 1988. director: "),
        _record("year", "1988", " The Long Pier. Director: Ines Molnar. Year: 1988. year: "),
    ],
    ("hazyresearch/based-fda", "default", "validation"): [
        _record("device", "ear probe", "Premarket notice. Device: ear probe. Class: two. device:"),
        _record("class", "two (2)", "Premarket notice. Device: ear probe. Class: two (2). class:"),
    ],
    ("hazyresearch/based-squad", "default", "validation"): [
        {"doc_id": "0", "text": "The mill burnt down in May. The mill burnt down in", "value": "May", "title": "Mill"}
        | {"context": "The mill burnt down in May.", "question": "When did the mill burn down?"},
    ],
    ("hazyresearch/based_nq_2048", "default", "validation"): [
        {"id": "0", "context": "The canal was opened in 1869.", "question": "The canal was opened in"}
        | {"answers": ["1869", "in 1869"], "tok_pos": 6, "orig_question": "when was the canal opened"},
    ],
    ("hazyresearch/based_triviaqa", "default", "validation"): [
        _reading(
            "[DOC] [TLE] Rivers [PAR] The Vistula ends in the Baltic.",
            "The Vistula ends in the",
            "Baltic",
            "Baltic Sea",
        ),
    ],
    ("hazyresearch/based_drop", "default", "validation"): [
        _reading("They kicked 3 goals before the break. Goals before the break:", "Goals before the break:", "3"),
    ],
} | {
    ("Xnhyacinth/LongBench", row["task"], "test"): [row]
    for row in (
        _longbench("narrativeqa", _STORY, "What was under the stone?", "the bell", "a bell"),
        _longbench("qasper", _REPORT, "How many bridges were reviewed?", "twelve"),
        _longbench("multifieldqa_en", _REPORT, "What do four of them need?", "repairs"),
        _longbench("hotpotqa", _STORY, "Where was the bell?", "on the island"),
        _longbench("2wikimqa", _STORY, "Who rang it?", "Mara"),
        _longbench("musique", _STORY, "How often was it rung?", "twice"),
        _longbench("gov_report", _REPORT, "", "Four of twelve bridges need repairs for nine million."),
        _longbench("qmsum", _REPORT, "What was said of costs?", "The repairs will cost nine million."),
        _longbench("multi_news", _REPORT, "", "A review found four bridges in need of repairs."),
        _longbench("trec", "Question: Who is it?\nType: Person\n", "Question: Where is it?\nType:", "Place")
        | {"all_classes": ["Person", "Place"]},
        _longbench("triviaqa", _STORY, "Question: Who rowed?\nAnswer:", "Mara"),
        _longbench(
            "samsum", "Al: Late again?\nBo: The bus!\nSummary: Bo is late.\n", "Al: Tea?\nBo: Yes.", "Bo wants tea."
        ),
        _longbench("lcc", _CODE, "", "    return area(width, height) * depth"),
        _longbench("repobench-p", _CODE, "def cube(side):\n", "    return volume(side, side, side)"),
    )
}


def write_rows(directory: Path) -> Path:
    """Writes the rows of every suite as `--suite_data` takes them."""
    for suite in SUITES:
        for source in sources(suite).values():
            path = source.path(directory)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[tuple(source)]))
    return directory
