"""docs/review.md names only files, functions and tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "docs/review.md").read_text().splitlines() if re.match(r"\| \d+ \|", line)]


def names_in(file: Path) -> set[str]:
    """Functions, methods and classes of a file."""
    nodes = ast.walk(ast.parse(file.read_text()))
    return {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_points_are_numbered():
    assert [int(row.split("|")[1]) for row in ROWS] == list(range(1, len(ROWS) + 1))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_references_exist(row):
    _, _, _, _, where, tests, _ = re.split(r"(?<!\\)\|", row)
    places = re.findall(r"`([\w/]+\.py):(\w+)`", where)
    assert places
    for file, name in places:
        assert name in names_in(ROOT / "python/sglang/srt" / file), (file, name)
    cited = re.findall(r"`(test_\w+\.py)::(\w+)`", tests)
    assert cited or tests.strip() == "reading"
    assert tests.count("`") == 2 * len(cited)
    for file, name in cited:
        assert name in names_in(ROOT / "test/srt" / file), (file, name)
