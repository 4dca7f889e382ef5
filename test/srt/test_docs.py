"""README.md and docs/*.md: what they name exists, what they promise of variables and flags holds, shell blocks run.

A ```bash block of the guide is run as it stands (a CPU suffices); an ```output block after it is what it must print.
```sh blocks need GPUs or a model: only their flags are held against the programs'.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from sglang.srt.arg_groups import moe_hook
from sglang.srt.configs import moe_model_registry
from sglang.srt.environ import EnvBool, EnvField, EnvInt, Envs
from sglang.srt.server_args import ServerArgs

from resolved_args import resolve, write_config
from sglang_deepep_v2 import overlay
from sglang_deepep_v2.cli import app

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "deepep_v2.md"
PAGES = [ROOT / "README.md", ROOT / "benchmark/deepep_v2/README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = GUIDE.read_text()
PREFIX = "SGLANG_DEEPEP_V2_"
# Texts of DeepEP's own, which is not installed on a CPU machine.
DEEPEP_SAYS = ("NCCL GIN is unavailable", "Invalid NCCL versions", "Duplicate NCCL runtime")
# Options of programs that are not ours to parse.
OTHER_OPTIONS = {"--force-reinstall", "--no-deps", "--write", "--help", "--pd-disaggregation", "--prefill", "--decode"}


def blocks(text: str, language: str) -> list[str]:
    return [
        "\n".join(line.strip() for line in body.splitlines())
        for body in re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.M | re.S)
    ]


def table_after(heading: str) -> list[list[str]]:
    """Body rows of the first table under a heading of the guide."""
    section = TEXT.split(f"\n## {heading}\n", 1)[1]
    lines = iter(section.splitlines())
    rows = []
    for line in lines:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", target):
            continue
        file, _, fragment = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{page.name} links {target}"
        if fragment:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.M)
            assert fragment in map(anchor, headings), f"{page.name} links {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_named_exist(page):
    """Every path with a folder in it that a page names, from the root, the page's folder or the patched tree."""
    text = page.read_text()
    words = set(re.findall(r"(?<![\w/.~-])((?:[\w.-]+/)+[\w.-]*\w\.(?:py|md|sh|jsonl|png|txt))\b", text))
    places = (ROOT, page.parent, ROOT / "python/sglang/srt", ROOT / "test/srt", *overlay_roots())
    missing = [word for word in words if not any((place / word).exists() for place in places)]
    assert missing == []
    for file, name in re.findall(r"\b(test_\w+\.py)::(\w+)", text):
        assert f"def {name}(" in (ROOT / "test/srt" / file).read_text(), (file, name)


def overlay_roots() -> list[Path]:
    base = overlay.base_root()
    return [base.parent, base / "srt"] if base else []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_names_a_machine(page):
    assert re.findall(r"(?<!\w)/(?:work|root|home|mnt|opt/site)\b|\bpip\.conf\b|index-url", page.read_text()) == []


def test_readme_is_one_screen():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 60 and "docs/deepep_v2.md" in "\n".join(lines)


def test_the_table_holds_every_variable():
    documented = {name: row for row in table_after("Variables and flags") for name in re.findall(r"`(\w+)`", row[0])}
    declared = {name: field for name, field in vars(Envs).items() if isinstance(field, EnvField)}
    ours = {name for name in declared if name.startswith(PREFIX)}
    assert {name for name in documented if name.startswith(PREFIX)} == ours
    for name in ours:
        _, kind, default, _ = documented[name]
        field = declared[name]
        wanted = {EnvBool: "bool", EnvInt: "int"}[type(field)]
        assert kind.partition(",")[0] == wanted, name
        said = "unset" if field.default is None else str(int(field.default))
        assert default.split()[0] == said, name
    # Variables of others, where SGLang declares them too.
    for name in set(documented) & set(declared) - ours:
        default = declared[name].default
        if isinstance(default, bool):
            assert documented[name][2] == str(int(default)), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_variables_named_anywhere_exist(page):
    declared = {name for name, field in vars(Envs).items() if isinstance(field, EnvField)}
    named = set(re.findall(r"\bSGLANG_[A-Z0-9_]*[A-Z0-9]\b", page.read_text()))
    assert {name for name in named if not any(known.startswith(name) for known in declared)} <= {overlay.SWITCH}


@pytest.fixture(scope="module")
def options() -> set[str]:
    """Every option of SGLang's server, of our command line and of the benchmark scripts."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found = {option for action in parser._actions for option in action.option_strings}
    # argparse's unambiguous abbreviations, as SGLang's own documentation writes them.
    abbreviated = parser.parse_args(["--model-path", "m", "--tp", "4", "--dp", "2"])
    assert (abbreviated.tp_size, abbreviated.dp_size) == (4, 2)
    found |= {"--tp", "--dp"}
    for command in typer.main.get_command(app).commands.values():
        found |= {option for parameter in command.params for option in parameter.opts}
    for script in (ROOT / "benchmark/deepep_v2").rglob("*.py"):
        found |= set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', script.read_text()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_named_exist(page, options):
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", page.read_text()))
    assert named - options - OTHER_OPTIONS == set()


def test_documented_defaults_of_flags():
    rows = {row[0].strip("`"): row[2].strip("`") for row in table_after("Variables and flags") if row[0][1] == "-"}
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    actions = {option: action for action in parser._actions for option in action.option_strings}
    assert rows and all(actions[flag].default == default for flag, default in rows.items())


def test_sizing_table(tmp_path, monkeypatch):
    """The launches of the sizing table need what it says, by SGLang's own resolution."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setenv(f"{PREFIX}NUM_MAX_DISPATCH_TOKENS_PER_RANK", str(1 << 20))
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    rows = table_after("Sizing")
    assert len(rows) >= 3
    model = write_config(tmp_path / "model")
    plain = vars(parser.parse_args(["--model-path", str(model)]))
    for launch, tokens in rows:
        words = shlex.split(launch.strip("`"))
        parsed = vars(parser.parse_args(["--model-path", str(model), *words]))
        arguments = {name: value for name, value in parsed.items() if value != plain[name]}
        assert moe_hook.required_deepep_v2_prefill_tokens_per_rank(resolve(model, **arguments)) == int(tokens), launch


def launches_of_the_guide() -> list[tuple[dict[str, str], str]]:
    """(exported variables, arguments) of every launch_server command in the ```sh blocks."""
    found = []
    for block in blocks(TEXT, "sh"):
        exported = dict(re.findall(r"^export (\w+)=(\S+)$", block, re.M))
        commands = block.replace("\\\n", " ").splitlines()
        found += [(exported, c.partition("sglang.launch_server ")[2]) for c in commands if "sglang.launch_server " in c]
    return found


@pytest.mark.parametrize("exported, command", launches_of_the_guide())
def test_launch_commands_pass_the_start_up_checks(tmp_path, monkeypatch, exported, command):
    monkeypatch.setattr(os, "environ", os.environ | exported)
    model = str(write_config(tmp_path / "model", num_attention_heads=16, num_key_value_heads=16))
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    plain = vars(parser.parse_args(["--model-path", model]))
    parsed = vars(parser.parse_args(shlex.split(command.replace("MODEL", model))))
    # SGLang looks for the named NICs.
    parsed["disaggregation_ib_device"] = None
    arguments = {name: value for name, value in parsed.items() if value != plain[name]}
    if arguments["moe_a2a_backend"] != "deepep_v2":
        pytest.skip("parsed only: DeepEP V1 is not this backend's to check")
    resolved = resolve(Path(model), **arguments)
    assert resolved.moe_a2a_backend == "deepep_v2"
    required = moe_hook.required_deepep_v2_prefill_tokens_per_rank(resolved)
    assert str(required) == exported[f"{PREFIX}NUM_MAX_DISPATCH_TOKENS_PER_RANK"]


def test_models_named_are_the_registered_ones():
    limits = TEXT.split("\n## Limits\n", 1)[1]
    # From the file: other tests register models of their own.
    source = Path(moe_model_registry.__file__).read_text()
    registered = re.findall(r'^    "(\w+)": _DeepEPv2ModelPolicy', source, re.M)
    assert registered and re.findall(r"`(\w+For\w+)`", limits) == registered


def test_symptoms_are_texts_that_something_prints():
    """Quoted parts of the troubleshooting table's symptoms occur in the sources, split only where values stand."""
    sources = [*(ROOT / "python").rglob("*.py"), overlay.base_file("sglang.srt.arg_groups.moe_hook")]
    # Adjacent string literals are one text.
    printed = "".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in sources)
    rows = table_after("Troubleshooting by symptom")
    checked = 0
    for symptom, _, _ in rows:
        for quoted in re.findall(r"`([^`]+)`", symptom):
            for part in re.split(r"\.\.\.|\b\w+=\w*|\b[A-Z]\b|\b128\b|OverlayError|: ", quoted):
                part = part.strip(" ,:")
                if len(part) < 6 or part in DEEPEP_SAYS or part.startswith("import "):
                    continue
                assert part in printed, f"nothing prints {part!r} (of {quoted!r})"
                checked += 1
    assert checked >= 10


@pytest.mark.loader
@pytest.mark.slow
def test_shell_blocks_run():
    parts = re.split(r"^```(bash|output)\n(.*?)^```$", TEXT, flags=re.M | re.S)
    shown = [(parts[i], parts[i + 1]) for i in range(1, len(parts), 3)]
    assert len(shown) >= 3
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    printed = None
    for language, body in shown:
        if language == "output":
            assert printed is not None and body in printed
            continue
        command = ["bash", "-euo", "pipefail", "-c", body]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, f"{body}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        printed = done.stdout


def test_make_rules_named_exist():
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {rule for page in PAGES for rule in re.findall(r"(?:`|^)make ([a-z][\w-]*)", page.read_text(), re.M)}
    assert {"demo", "test", "test-gpu"} <= named <= rules
