"""The pages' tables are those of the committed records, and each table takes its numbers from the right runs."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark" / "deepep_v2"))

import bench_layer  # noqa: E402
import bench_variants  # noqa: E402
import seed_claims  # noqa: E402
import server_tables  # noqa: E402
import tables  # noqa: E402


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
    assert "| 1.20 |" in tables.ratios(tables.load(tmp_path))


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
    short = tables.answers(tables.load(tmp_path)).splitlines()
    assert short[2:] == ["| `a` | 50 of 100 | 90 of 100 | 70 of 100 | - |", "| `b` | - | 80 of 100 | - | - |"]


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
    for broken in (filled[0].replace("<!-- table:headline -->", ""), filled[0].replace("<!-- /table:headline -->", "")):
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
