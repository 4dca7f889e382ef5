"""The command line: light to import, every command explains itself."""

import json
import subprocess
import sys

import pytest

from sglang_deepep_v2.cli import app

COMMANDS = sorted(command.name or command.callback.__name__ for command in app.registered_commands)


def python(code: str, *args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120)


def test_the_command_line_imports_neither_torch_nor_sglang():
    done = python("import json, sys, sglang_deepep_v2.cli; print(json.dumps([*sys.modules]))")
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert not {"torch", "sglang", "transformers", "numpy"} & loaded


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str):
    done = python("from sglang_deepep_v2.cli import app; app()", command, "--help")
    assert done.returncode == 0, done.stderr
    # The first line of the function's docstring, and every option explained.
    assert f"Usage: -c {command}" in done.stdout


def test_status_agrees_with_this_environment():
    done = python("from sglang_deepep_v2.cli import app; app()", "status", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["error"], report["enabled"]) == (0, None, True)
    assert report["sglang"] in report["verified"]
    assert {module["kind"] for module in report["modules"]} == {"new", "replaces", "extends"}
