"""Tables in Markdown, for the reports of this package and its experiments."""

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """The lines of a table, all columns but the first `left` aligned to the right."""
    marks = ["---"] * left + ["---:"] * (len(heads) - left)
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in (heads, marks, *rows)]
