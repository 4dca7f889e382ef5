"""Every mutant of ``make mutants`` still fits its file, compiles and names tests that exist."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
_spec = importlib.util.spec_from_file_location("mutants", HERE.parent / "mutants.py")
mutants = importlib.util.module_from_spec(_spec)
sys.modules["mutants"] = mutants
_spec.loader.exec_module(mutants)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits(mutant, tmp_path):
    original = mutants.ROOT / mutants.TREE / mutant.file
    copy = tmp_path / mutants.TREE / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text(original.read_text())
    mutant.apply(tmp_path)
    assert ast.dump(ast.parse(copy.read_text())) != ast.dump(ast.parse(original.read_text()))
    assert mutant.tests


@pytest.mark.parametrize("node_id", sorted({test for mutant in mutants.MUTANTS for test in mutant.tests}))
def test_named_tests_exist(node_id):
    file, *names = node_id.split("::")
    nodes = ast.walk(ast.parse((HERE / file).read_text()))
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert names and set(names) <= defined


def test_names_are_distinct():
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(names) == len(set(names)) >= 25


def test_a_mutant_that_does_not_fit_is_refused(tmp_path):
    file = tmp_path / mutants.TREE / "environ.py"
    file.parent.mkdir(parents=True)
    file.write_text("x = 1\nx = 1\n")
    with pytest.raises(ValueError, match="holds 2 times, not once"):
        mutants.Mutant("twice", "environ.py", "x = 1", "x = 2", ()).apply(tmp_path)
