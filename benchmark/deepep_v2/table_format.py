"""Markdown tables of the documentation."""


def markdown(rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table: the first row is the heading, the first ``left`` columns are aligned left, the others right."""
    rules = ["---"] * left + ["---:"] * (len(rows[0]) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rules, *rows[1:]))


def missing(command: str) -> str:
    return f"No record yet; `{command}` writes it."
