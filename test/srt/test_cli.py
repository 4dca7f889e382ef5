"""The command line: light to import, every command explains itself."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from sglang_deepep_v2.cli import app

COMMANDS = typer.main.get_command(app).commands


def python(code: str, *args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120)


def test_the_command_line_imports_neither_torch_nor_sglang():
    done = python("import json, sys, sglang_deepep_v2.cli; print(json.dumps([*sys.modules]))")
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert not {"torch", "sglang", "transformers", "numpy"} & loaded


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_option_explains_itself(name: str):
    command = COMMANDS[name]
    assert command.help
    assert [option.name for option in command.params if not getattr(option, "help", None)] == []
    done = python("from sglang_deepep_v2.cli import app; app()", name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: -c {name}" in done.stdout


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_examples_in_the_help_are_command_lines_of_this_command(name: str):
    examples = re.findall(r"^\* .*: sglang-deepep-v2 (.*)", COMMANDS[name].help, re.M)
    assert examples
    for example in examples:
        command, *words = shlex.split(example)
        assert command == name
        # Raises on an option or a value that the command does not take.
        COMMANDS[name].make_context(name, words)


@pytest.mark.loader
def test_status_agrees_with_this_environment():
    done = python("from sglang_deepep_v2.cli import app; app()", "status", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["error"], report["enabled"]) == (0, None, True)
    assert report["sglang"] in report["verified"]
    assert {module["kind"] for module in report["modules"]} == {"new", "replaces", "extends"}


@pytest.mark.parametrize("words", ["--tp 8", "python -m sglang.launch_server --tp 8"])
def test_doctor_says_where_a_launch_command_goes(words):
    done = CliRunner().invoke(app, ["doctor", *words.split()], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "A launch command goes after `--`: doctor -- sglang serve" in done.output


@pytest.mark.loader
def test_what_is_piped_is_neither_wrapped_nor_cut(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "40")
    status = python("from sglang_deepep_v2.cli import app; app()", "status").stdout
    assert "model_executor.model_runner_components.moe_ep_setup" in status and "…" not in status
    folder = tmp_path / "a folder with a long name" / ("and another" * 9)
    refused = python("from sglang_deepep_v2.cli import app; app()", "upstream", "--into", str(folder), "--from", "")
    assert refused.stderr.splitlines()[-1] == "Error: Invalid value: --from '' names no folder"
    missing = python("from sglang_deepep_v2.cli import app; app()", "upstream", "--into", str(folder))
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1) and str(folder) in missing.stderr
    commands = python("from sglang_deepep_v2.cli import app; app()").stderr.partition("Commands:")[2]
    assert "upstream" in commands and "..." not in commands


def test_status_refuses_a_switch_that_is_neither_0_nor_1(monkeypatch):
    monkeypatch.setenv("SGLANG_OVERLAY", "7")
    done = python("from sglang_deepep_v2.cli import app; app()", "status")
    assert done.returncode == 2 and "SGLANG_OVERLAY='7'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--into", "a_file"), "--into a_file is no folder"),
        (("--into", ""), "--into '' names no folder"),
        (("--into", "tree", "--from", ""), "--from '' names no folder"),
        (("--into", "tree", "--branch", "two words"), "--branch two words is no branch name"),
        (("--into", "tree", "--branch", "base"), "--branch base is SGLang's own here"),
    ],
)
def test_upstream_refuses_bad_values_and_leaves_nothing_behind(monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").touch()
    done = CliRunner().invoke(app, ["upstream", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and message in done.output, done.output
    assert not (tmp_path / "tree").exists()
