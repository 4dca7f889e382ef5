"""Markdown tables of the documentation."""

from collections.abc import Callable, Iterable


def markdown(rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table: the first row is the heading, the first ``left`` columns are aligned left, the others right."""
    rules = ["---"] * left + ["---:"] * (len(rows[0]) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rules, *rows[1:]))


def span(values: Iterable[float], form: Callable[[float], str] = str) -> str:
    """``lowest to highest``, or the one value where both read alike."""
    values = sorted(values)
    return " to ".join(dict.fromkeys((form(values[0]), form(values[-1]))))


def missing(command: str) -> str:
    return f"No record yet; `{command}` writes it."
