"""h200_records.sh: every step's command line is one that its tool takes; failures and bad steps are told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from sglang_deepep_v2.cli import app

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "benchmark/deepep_v2"
sys.path[:0] = [str(BENCHMARK), str(BENCHMARK / "accuracy")]

import bench_layer  # noqa: E402
import bench_variants  # noqa: E402
import eval_paths  # noqa: E402
import server_profile  # noqa: E402
import train_arithmetic_moe  # noqa: E402

STEPS = ("tests", "layer", "variants", "shapes", "qwen3", "mimo", "profile", "accuracy")
SCRIPTS = {
    "bench_layer.py": bench_layer,
    "bench_variants.py": bench_variants,
    "eval_paths.py": eval_paths,
    "server_profile.py": server_profile,
    "train_arithmetic_moe.py": train_arithmetic_moe,
}
# Stands in for python: notes its arguments, and fails where one of them is in FAIL.
FAKE = """#!{python}
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(int(any(os.environ.get("FAIL", "no such word") in word for word in sys.argv)))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    fake = tmp_path / "python"
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(0o755)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PYTHON", str(fake))

    def run(*arguments: str) -> tuple[subprocess.CompletedProcess, list[list[str]]]:
        command = ["bash", str(BENCHMARK / "h200_records.sh"), *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        calls = tmp_path / "calls"
        return done, [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []

    return run


def test_every_step_is_a_command_line_of_its_tool(script, tmp_path, monkeypatch):
    done, calls = script("out", *STEPS)
    assert done.returncode == 0, done.stderr
    assert len(calls) == len(STEPS) + 1  # the accuracy step trains first
    monkeypatch.chdir(ROOT)
    for program, *words in calls:
        if program == "-m" and words[0] == "pytest":
            assert (ROOT / words[1]).is_dir()
        elif program == "-m":
            module, name, *words = words
            assert module == "sglang_deepep_v2"
            typer.main.get_command(app).commands[name].make_context(name, words)
        else:
            (tmp_path / "out/model/fp8").mkdir(parents=True, exist_ok=True)
            parsed = SCRIPTS[Path(program).name].parse(words)
            assert Path(parsed.out).is_relative_to(tmp_path / "out")
    assert [(tmp_path / f"out/{step}.log").exists() for step in STEPS] == [True] * len(STEPS)


def test_a_failed_step_is_told_and_the_others_run(script, monkeypatch):
    monkeypatch.setenv("FAIL", "bench_variants")
    done, calls = script("out", "variants", "layer")
    assert done.returncode == 1 and len(calls) == 2
    assert "variants: failed or cut" in done.stdout and "layer: done" in done.stdout
    assert "not whole: variants" in done.stderr


def test_an_evaluation_needs_its_training(script, monkeypatch):
    monkeypatch.setenv("FAIL", "train_arithmetic")
    done, calls = script("out", "accuracy")
    assert done.returncode == 1 and len(calls) == 1


@pytest.mark.parametrize("arguments", [(), ("out",), ("--help",), ("out", "layers")])
def test_bad_calls_run_nothing(script, arguments):
    done, calls = script(*arguments)
    assert (done.returncode, calls) == (2, [])
    assert all(step in done.stdout + done.stderr for step in STEPS)
