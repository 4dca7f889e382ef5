"""The command line: light to import, every command explains itself."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sglang_deepep_v2 import overlay
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


@pytest.mark.loader
def test_status_says_that_no_loader_is_in_this_interpreter(monkeypatch):
    site = [sysconfig.get_path("purelib"), str(Path(overlay.__file__).parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(site))
    command = [sys.executable, "-S", "-m", "sglang_deepep_v2", "status"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "overlay without its loader, sglang" in done.stdout
    assert f"the loader is not active in this interpreter, so it runs SGLang without the patch ({sys.exec_prefix}" in (
        done.stdout
    )
    assert "install into the interpreter's own site-packages" in done.stdout
    report = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120).stdout)
    assert report["enabled"] and not report["active"] and report["error"].startswith("the loader is not active")
    monkeypatch.setenv("SGLANG_OVERLAY", "0")
    off = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert off.returncode == 0 and "overlay off (SGLANG_OVERLAY=0), sglang" in off.stdout


def test_a_folder_named_like_markup_is_printed_as_it_is(monkeypatch):
    monkeypatch.setattr(overlay, "TREE", Path("/a[red]b[/c]"))
    done = CliRunner().invoke(app, ["status"])
    assert "tree /a[red]b[/c]\n" in done.output, done.output


OUTPUTS = ["status", "status --json", "--help", "upstream --help", "doctor --help"]


@pytest.mark.parametrize("words", OUTPUTS)
def test_output_to_a_full_disk_is_one_line_and_an_exit_code_of_its_own(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "sglang_deepep_v2", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (74, "cannot write the output: No space left on device\n")


@pytest.mark.parametrize("words", OUTPUTS)
def test_a_reader_that_goes_away_ends_a_command_quietly(words):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "sglang_deepep_v2", *words.split()]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_refusal_that_cannot_be_written_has_that_exit_code_too():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "sglang_deepep_v2", "upstream", "--into", ""]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (74, "")


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
