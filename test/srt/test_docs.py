"""README.md and docs/*.md: what they name exists, what they promise of variables and flags holds, shell blocks run.

A ```bash block of the guide is run as it stands (a CPU suffices); an ```output block after it is what it must print.
```sh blocks need GPUs or a model: only their flags are held against the programs'.
"""

import argparse
import json
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
sys.path.insert(0, str(ROOT / "benchmark" / "deepep_v2"))

import bench_layer  # noqa: E402
import bench_variants  # noqa: E402
import seed_claims  # noqa: E402
import server_tables  # noqa: E402
import tables  # noqa: E402

GUIDE = ROOT / "docs" / "deepep_v2.md"
PAGES = [ROOT / "README.md", ROOT / "benchmark/deepep_v2/README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = GUIDE.read_text()
PREFIX = "SGLANG_DEEPEP_V2_"
# Texts of DeepEP's own, which is not installed on a CPU machine.
DEEPEP_SAYS = ("NCCL GIN is unavailable", "Invalid NCCL versions", "Duplicate NCCL runtime")
# Options of programs that are not ours to parse.
OTHER_OPTIONS = {"--force-reinstall", "--no-deps", "--write", "--help"}


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


def test_page_holds_the_tables_of_the_records(capsys):
    if not (tables.HERE / "results" / "layer.jsonl").is_file():
        pytest.skip("no records are committed")
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def layer_record(path: str, us: float, date: str, **changes) -> dict:
    record = {field: 1 for field in tables.records.LAYER_FIELDS} | tables.records.TARGET
    record |= {"path": path, "tokens": 2304, "us_median": us, "us_min": us, "us_max": us, "rounds": 7}
    return record | {"gpu": "NVIDIA H200", "versions": {}, "commit": "c0ffee", "date": date} | changes


EARLY, LATE = "2026-11-30T19:00:00+00:00", "2026-11-30T20:00:00+00:00"


def write(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_ratio_never_mixes_two_runs(tmp_path):
    whole = [layer_record("sglang_expanded", 1500, EARLY), layer_record("psum", 1000, EARLY)]
    write(tmp_path / "layer.jsonl", [*whole, layer_record("psum", 500, LATE)])
    assert "**1.50**" in tables.layer(tables.load(tmp_path))
    again = [layer_record("sglang_expanded", 1200, LATE), layer_record("psum", 1000, LATE)]
    write(tmp_path / "layer.jsonl", [*whole, *again])
    text = tables.layer(tables.load(tmp_path))
    assert "**1.20**" in text and "1.50" not in text


def test_server_accuracy_and_agreement_take_the_last_run(tmp_path):
    def speed(path, median):
        names = ("input_tok_s_median", "input_tok_s_min", "input_tok_s_max")
        return {"path": path, "model": "m", "prompt_len": 1024, "rounds": 3, "ep": 1} | dict.fromkeys(names, median)

    write(tmp_path / "server.jsonl", [speed("a", 100), speed("b", 110), speed("a", 200), speed("b", 210)])
    scores = [("a", 90, LATE), ("b", 80, LATE)]
    same = {"total": 100, "logprob_diff_p50": 0.0, "logprob_diff_p99": 0.0}
    first = [{"path": "a", "correct": 50, "ep": 1, "date": EARLY} | same]
    second = [{"path": p, "correct": c, "correct_prefill": c - 5, "ep": 1, "date": d} | same for p, c, d in scores]
    two = [{"path": "a", "correct": 70, "ep": 2, "date": LATE} | same]
    write(tmp_path / "accuracy.jsonl", first + second + two)
    answers = {"model": "m", "baseline": "a", "server_args": "", "prompts": 50, "greedy_equal": 12, "median": 0.01}
    answers |= {"largest": 0.3, "passed": True, "ep": 1}
    parallel = answers | {"ep": 2, "server_args": "--enable-dp-attention --dp-size 2", "passed": False}
    rows = [answers | {"path": p, "greedy_equal": g} for p, g in (("b", 11), ("c", 11), ("b", 12), ("c", 12))]
    write(tmp_path / "agreement.jsonl", [*rows, parallel | {"path": "b"}])
    data = tables.load(tmp_path)
    lines = tables.agreement(data).splitlines()[2:]
    assert [("12 of 50" in line, "data parallel" in line, "differs" in line) for line in lines] == [
        (True, False, False), (True, False, False), (True, True, True),
    ]  # fmt: skip
    assert "+5.0%" in tables.server(data) and "+10.0%" not in tables.server(data)
    # Each accuracy run has a model of its own, so none replaces another; old records know nothing of prefill alone.
    old, new, parallel = tables.accuracy(data).split("\n\nEP")
    assert "19:00" in old and "| 50.00% |" in old and "| - |" in old
    assert "20:00" in new and "| 90.00% |" in new and "| 85.00% |" in new and "| 75.00% |" in new
    assert parallel.startswith("2, ") and "70.00%" in parallel


def test_ratios_of_every_run_are_shown_and_span_the_headline(tmp_path):
    def run(theirs, ours, date, commit, **changes):
        records = [layer_record("sglang_expanded", theirs, date), layer_record("psum", ours, date)]
        return [record | {"commit": commit} | changes for record in records]

    other = [layer_record("psum", 500, LATE, hidden=4096), layer_record("psum", 500, LATE, commit="no-peer")]
    rows = [*run(1500, 1000, EARLY, "old"), *run(1200, 1000, LATE, "new"), *run(1300, 1000, LATE, "new", ep=2), *other]
    write(tmp_path / "layer.jsonl", rows)
    data = tables.load(tmp_path)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables.spread(data).splitlines()[2:]]
    assert [(line[0], line[2], line[5]) for line in lines] == [
        ("1", "new", "1.20"), ("1", "old", "1.50"), ("2", "new", "1.30"),
    ]  # fmt: skip
    assert "2 recorded runs: 1.20 to 1.50 at 2304 tokens per rank" in tables.headline(data)


def test_share_of_the_layer_in_a_prefill(tmp_path):
    shares = ("moe_share_wall", "moe_share_busy", "attention_share", "dense_share", "other_share")
    row = {"path": "psum", "model": "m", "prompt_len": 8192, "ep": 1, "moe_span_us": 2745.1, "moe_busy_us": 2422.0}
    row |= {"commit": "c0ffee", "date": LATE} | {share: (1 + i) / 10 for i, share in enumerate(shares)}
    write(tmp_path / "server_profile.jsonl", [row | {"moe_span_us": 1.0, "date": EARLY}, row])
    text = tables.server_profile(tables.load(tmp_path))
    assert text.endswith("| `psum` | 2745 | 2422 | 10.0% | 20.0% | 30.0% | 40.0% | 50.0% |")


def test_interval_of_a_share():
    low, high = server_tables.wilson(1263, 1319)
    assert 0.94 < low < 1263 / 1319 < high < 0.97
    assert server_tables.wilson(10, 10)[1] == pytest.approx(1) and server_tables.wilson(0, 10)[0] == pytest.approx(0)


def test_every_block_is_filled_or_refused(tmp_path):
    data = tables.load(tmp_path)
    filled = [tables.fill(page.read_text(), data) for page in tables.PAGES]
    # Every table has its place; the one of the original numbers says so in its cells.
    assert "".join(filled).count("No record yet") == len(tables.TABLES) - 1
    assert [tables.fill(page, data) for page in filled] == filled
    for broken in (TEXT.replace("<!-- table:seed -->", ""), TEXT.replace("<!-- /table:seed -->", "")):
        with pytest.raises(ValueError, match="tables:"):
            tables.fill(broken, data)


def test_seed_table_from_a_profile(tmp_path):
    layer = {"ep": 1, "tokens": 2304, "count": 1.0} | tables.records.TARGET
    kernels = [("sglang_nonexpanded", "_fwd_kernel_ep_scatter_2", 60.0), ("psum", "_swiglu_kernel", 50.0)]
    write(tmp_path / "profile.jsonl", [layer | {"path": p, "kernel": k, "us": us} for p, k, us in kernels])
    rows = {(row[0], row[1]): row[2:] for row in seed_claims.rows(tables.load(tmp_path))}
    assert rows["copy kernel of the scatter, `ep_scatter_2`", "58 us"] == ["60.0 us", "reproduced (1.03x)"]
    assert rows["the expanded layout needs no scatter", "-58 us"][1] == "reproduced"
    assert rows["`fill_m_indices_from_psum`", "1.5 us"][1] == "open"


def test_kept_variants_are_measured_ones():
    assert set(tables.KEPT) == set(bench_variants.NAMES)
    files = ("variants.py", "half_batches.py")
    source = "".join((ROOT / "benchmark/deepep_v2" / file).read_text() for file in files)
    named = [kept.partition("=")[0] for kept in tables.KEPT.values() if kept]
    assert all(f'"{name}' in source or f"{name}=" in source for name in named)
    assert re.fullmatch(r"BM \d+ G \d+ W \d+ P \d+", tables.kept_tile())


def test_results_lie_where_the_benchmark_writes_them():
    assert bench_layer.HERE / "results" == tables.HERE / "results"


def test_variants_are_held_against_the_kept_one(tmp_path):
    base = tables.records.TARGET | {"name": "multiple_reduction", "tokens": 512, "ep": 1, "what": "dispatch + combine"}
    timed = [("True", 50.0, EARLY), ("False", 60.0, EARLY), ("True", 40.0, LATE), ("False", 50.0, LATE)]
    rows = [base | {"variant": f"allow_multiple_reduction={v}", "us": us, "date": d} for v, us, d in timed]
    rows[-1] |= {"error": 0.0012}
    tile = base | {"name": "swiglu_tiles", "what": "4096 rows", "date": LATE}
    tiles = [(tables.kept_tile(), 15.0), ("BM 2 G 1 W 2 P 16384", 12.0), ("BM 4 G 1 W 2 P 16384", 30.0)]
    rows += [tile | {"variant": name, "us": us} for name, us in tiles]
    rows.append(tile | {"variant": "BM 32 G 8 W 2 P 16384", "us": None, "failed": "too large"})
    write(tmp_path / "variants.jsonl", rows)
    text = tables.variants(tables.load(tmp_path))
    assert "| allow_multiple_reduction=True (kept) | 40.0 us |" in text
    assert "| allow_multiple_reduction=False | 50.0 us (1.25x, error 0.0012) |" in text
    assert f"| {tables.kept_tile()} (kept) | 15.0 us |" in text and "12.0 us (0.80x)" in text and "30.0 us" in text
    assert "BM 32" not in text
