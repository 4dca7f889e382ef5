"""GSM8K and throughput through the A/B: SGLang's own programs against a fake server."""

import contextlib
import dataclasses
import io
import itertools
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from sglang_deepep_v2.ab import accuracy, fingerprint, report, servers, throughput
from sglang_deepep_v2.ab.accuracy import EvalSettings, check_data, evaluate_gsm8k, parse_printed
from sglang_deepep_v2.ab.checkpoints import _write_tokenizer
from sglang_deepep_v2.ab.paths import PATHS
from sglang_deepep_v2.ab.servers import Fleet, ServerFailed, ServeSettings
from sglang_deepep_v2.ab.serving_bench import start_serving_bench
from sglang_deepep_v2.ab.session import Job, Kept, run_path
from sglang_deepep_v2.ab.throughput import ThroughputPlan, measure_throughput, summarize

FAKE = Path(__file__).with_name("ab_fake_server.py")
SETTINGS = ServeSettings("model", tp=2, chunk=64, cpu=True, ready_timeout_s=30)


@pytest.fixture
def fake_servers(monkeypatch, tmp_path):
    monkeypatch.setattr(
        servers, "launch_command", lambda path, s, port: [sys.executable, str(FAKE), "--port", str(port)]
    )
    return tmp_path


def write_questions(file: Path, count: int) -> Path:
    """Questions `What is i plus 10?` in GSM8K's format."""
    lines = [
        {"question": f"What is {i} plus 10?", "answer": f"{i} plus 10 is <<{i}+10={i + 10}>>{i + 10}.\n#### {i + 10}"}
        for i in range(count)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_gsm8k_runs_sglangs_own_program_and_counts_wrong_answers(fake_servers, monkeypatch):
    # 12 questions with sums 10 .. 21; the server is wrong above 18.
    monkeypatch.setenv("FAKE_LARGEST_SUM", "18")
    settings = EvalSettings(
        write_questions(fake_servers / "gsm8k.jsonl", 20), num_questions=12, num_shots=2, parallel=4
    )
    fleet = Fleet()
    with fleet.run_server(PATHS["psum"], SETTINGS, fake_servers / "server.log") as server:
        result = evaluate_gsm8k(server, settings, fleet, fake_servers / "eval.log")
    assert (result["correct"], result["total"]) == (9, 12)
    assert result["accuracy"] == 0.75 and result["invalid"] == 0.0 and result["latency_s"] > 0
    assert (fake_servers / "eval.gsm8k" / "tmp_output_gsm8k.txt").is_file()
    assert not Path("tmp_output_gsm8k.txt").exists(), "nothing is written into the caller's directory"


def test_an_evaluation_that_dies_names_its_log(fake_servers, monkeypatch):
    monkeypatch.setattr(accuracy.sys, "executable", "/bin/false")
    settings = EvalSettings(write_questions(fake_servers / "gsm8k.jsonl", 3), num_shots=1)
    server = servers.Server("http://127.0.0.1:1", fake_servers / "server.log", process=None)
    with pytest.raises(ServerFailed, match=r"exit code 1 and no accuracy; log: .*eval\.log"):
        evaluate_gsm8k(server, settings, Fleet(), fake_servers / "eval.log")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "a", "answer": "#### 1"}\n{"question": "a"}', "2: not a GSM8K line"),
        ("[1]", "1: not a GSM8K line"),
        ('{"question": "a", "answer": "none"}', "1: the answer has no number"),
        ('{"question": "a", "answer": "#### 1"}', "has 1 questions, --eval-shots needs 5"),
        ("", "has 0 questions"),
    ],
)
def test_a_file_in_another_format_is_refused(tmp_path, text, message):
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        check_data(EvalSettings(file))


def test_printed_numbers_are_read():
    text = "noise\nAccuracy: 0.964\nInvalid: 0.002\nLatency: 12.345 s\nOutput throughput: 3.000 token/s\n"
    assert parse_printed(text) == {"accuracy": 0.964, "invalid": 0.002, "latency_s": 12.345}
    assert parse_printed("Traceback\n") == {}


def make_plan(tmp_path, **kwargs):
    options = dict(prompt_lengths=(16, 32), tokens=256, rounds=3, together=False, resume=False) | kwargs
    return ThroughputPlan(model="tiny", settings=SETTINGS, out=tmp_path / "runs", fleet=Fleet(), **options)


@pytest.mark.parametrize("together", [False, True])
def test_rounds_alternate_and_rows_carry_median_and_spread(fake_servers, monkeypatch, together):
    order, speed = [], itertools.count(100)

    def bench(plan, process, server, path, length, warm_up=False):
        if warm_up:
            return 0.0
        order.append((path.name, length))
        return float(next(speed))

    monkeypatch.setattr(throughput, "run_bench", bench)
    plan = make_plan(fake_servers, together=together)
    rows = measure_throughput(plan, [PATHS["nonexpanded"], PATHS["psum"]], lambda path, status: None)
    names = [name for name, length in order if length == 16]
    assert names == ["nonexpanded", "psum", "psum", "nonexpanded", "nonexpanded", "psum"]
    assert len(rows) == 4 and set(rows[0]) == {
        "path", "model", "prompt_len", "input_tok_s_median", "input_tok_s_min", "input_tok_s_max", "rounds", "ep",
        "gpu", "versions", "commit", "date",
    }  # fmt: skip
    first = next(row for row in rows if (row["path"], row["prompt_len"]) == ("psum", 32))
    assert (first["input_tok_s_min"], first["input_tok_s_median"], first["input_tok_s_max"]) == (103.0, 105.0, 111.0)
    assert first["rounds"] == 3 and first["ep"] == 2 and first["model"] == "tiny"


def test_a_kept_server_is_measured_without_a_second_start(fake_servers, monkeypatch):
    monkeypatch.setattr(throughput, "run_bench", lambda *args, **kwargs: 1.0)
    with contextlib.ExitStack() as stack:
        plan = make_plan(fake_servers, together=True)
        kept = Kept(stack)
        job = Job("tiny", SETTINGS, [[1, 2], [3]], 2, plan.out, plan.fleet, keep=kept)
        assert run_path(job, PATHS["psum"], lambda *_: None).error is None
        server = kept.servers["psum"]
        assert server.process.poll() is None
        plan = dataclasses.replace(plan, servers=kept.servers)
        measure_throughput(plan, [PATHS["psum"], PATHS["labels"]], lambda *_: None)
        assert server.process.poll() is None
    assert server.process.poll() is not None
    started = sorted(log.name for log in plan.out.glob("*throughput-server.log"))
    assert started == ["tiny.labels.throughput-server.log"]


def test_an_interrupted_measurement_resumes_where_it_stopped(fake_servers, monkeypatch):
    measured = []

    def bench(plan, process, server, path, length, warm_up=False):
        if not warm_up:
            if len(measured) == 3:
                raise KeyboardInterrupt
            measured.append((path.name, length))
        return 5.0

    monkeypatch.setattr(throughput, "run_bench", bench)
    paths = [PATHS["nonexpanded"], PATHS["psum"]]
    with pytest.raises(KeyboardInterrupt):
        measure_throughput(make_plan(fake_servers, rounds=1), paths, lambda *_: None)
    measured.clear()
    rows = measure_throughput(make_plan(fake_servers, rounds=1, resume=True), paths, lambda *_: None)
    assert measured == [("psum", 32)] and len(rows) == 4
    # A line that an interruption cut is measured again, and does not spoil the next.
    measured.clear()
    plan, said = make_plan(fake_servers, rounds=1, resume=True), []
    plan.raw_file.write_text(plan.raw_file.read_text()[:-20])
    assert len(measure_throughput(plan, paths, lambda *what: said.append(what))) == 4
    assert (
        len(measured) == 1 and ("throughput", f"1 damaged line(s) dropped from {plan.raw_file}: measured again") in said
    )
    assert len(plan.read_rows(paths)) == 4
    # Measurements under other settings are not taken over.
    measured.clear()
    with pytest.raises(KeyboardInterrupt):
        measure_throughput(make_plan(fake_servers, rounds=1, resume=True, tokens=512), paths, lambda *_: None)
    assert len(measured) == 3
    # Nor are those of another patch.
    measured.clear()
    monkeypatch.setattr(fingerprint, "sources", lambda: "another patch")
    with pytest.raises(KeyboardInterrupt):
        measure_throughput(make_plan(fake_servers, rounds=1, resume=True), paths, lambda *_: None)
    assert len(measured) == 3


def test_only_what_is_asked_is_summarised_in_its_order_and_the_rest_is_kept(fake_servers, monkeypatch):
    monkeypatch.setattr(throughput, "run_bench", lambda *args, **kwargs: 5.0)
    paths = [PATHS["nonexpanded"], PATHS["psum"], PATHS["labels"]]
    measure_throughput(make_plan(fake_servers, rounds=2), paths, lambda *_: None)
    plan = make_plan(fake_servers, rounds=1, prompt_lengths=(32,), resume=True)
    written = plan.raw_file.read_text()
    rows = measure_throughput(plan, [PATHS["psum"], PATHS["nonexpanded"]], lambda *_: None)
    assert [(row["path"], row["prompt_len"], row["rounds"]) for row in rows] == [
        ("psum", 32, 1),
        ("nonexpanded", 32, 1),
    ]
    assert plan.raw_file.read_text() == written


def test_throughput_is_told_against_the_first_path_and_no_other():
    speeds = {"input_tok_s_median": 10.0, "input_tok_s_min": 10.0, "input_tok_s_max": 10.0}
    rows = [
        {"model": "m", "path": path, "prompt_len": length, "rounds": 1} | speeds
        for path, length in (("labels", 8), ("psum", 8), ("labels", 16))
    ]
    console = Console(record=True, width=120, file=io.StringIO())
    report.print_throughput(console, rows, "psum")
    lines = console.export_text().splitlines()
    assert any("against psum" in line for line in lines)
    assert sum("+0.0%" in line for line in lines) == 2


def test_a_server_on_another_pipeline_is_not_measured(fake_servers, monkeypatch):
    monkeypatch.setenv("FAKE_PIPELINE", "labels")
    monkeypatch.setattr(throughput, "run_bench", lambda *args, **kwargs: 1.0)
    with pytest.raises(ServerFailed, match="ran pipeline=labels"):
        measure_throughput(make_plan(fake_servers), [PATHS["psum"]], lambda *_: None)


def test_the_reference_transport_on_a_gpu_is_neither_compared_nor_measured(fake_servers, monkeypatch):
    monkeypatch.setattr(throughput, "run_bench", lambda *args, **kwargs: 1.0)
    plan = dataclasses.replace(make_plan(fake_servers), settings=dataclasses.replace(SETTINGS, cpu=False))
    job = Job("tiny", plan.settings, [[1, 2], [3]], 2, plan.out, plan.fleet)
    wrong = "TP0 EP0 ran on a GPU with transport=reference"
    assert wrong in run_path(job, PATHS["psum"], lambda *_: None).error
    with pytest.raises(ServerFailed, match=wrong):
        measure_throughput(plan, [PATHS["psum"]], lambda *_: None)


def test_summarize_keeps_paths_apart():
    measured = (("a", 1.0, "mon"), ("b", 9.0, "mon"), ("a", 3.0, "tue"))
    rows = [{"path": p, "prompt_len": 8, "input_tok_s": v, "stamp": {"date": d}} for p, v, d in measured]
    assert [(r["path"], r["input_tok_s_median"], r["rounds"], r["date"]) for r in summarize(rows, "m", 1)] == [
        ("a", 2.0, 2, "tue"),
        ("b", 9.0, 1, "mon"),
    ]


def test_throughput_comes_from_sglangs_own_benchmark(fake_servers, monkeypatch):
    serve_tiny_model(fake_servers, monkeypatch)
    plan = make_plan(fake_servers, prompt_lengths=(16,), rounds=2, together=True, jobs=2)
    rows = measure_throughput(plan, [PATHS["nonexpanded"], PATHS["psum"]], lambda *_: None)
    assert [(row["path"], row["rounds"]) for row in rows] == [("nonexpanded", 2), ("psum", 2)]
    assert all(row["input_tok_s_min"] > 0 for row in rows)
    log = (plan.out / "tiny.bench.log").read_text()
    # 256 tokens in prompts of 16; two runs a path, and one to warm up.
    assert log.count("Total input tokens:                      256") == 4
    assert log.count("Total input tokens:                      32 ") == 2


def serve_tiny_model(folder, monkeypatch):
    """The fake servers name a model with a tokenizer, which SGLang's benchmark loads."""
    (folder / "model").mkdir()
    _write_tokenizer(folder / "model")
    monkeypatch.setenv("FAKE_MODEL", str(folder / "model"))


def test_prompts_that_the_server_rejects_are_no_throughput(fake_servers, monkeypatch):
    serve_tiny_model(fake_servers, monkeypatch)
    monkeypatch.setenv("FAKE_CONTEXT", "16")
    plan = make_plan(fake_servers, prompt_lengths=(16, 17), rounds=1)
    with pytest.raises(ServerFailed) as failure:
        measure_throughput(plan, [PATHS["psum"]], lambda *_: None)
    said = str(failure.value)
    assert "path psum, prompts of 17 tokens" in said and "2 of 2 requests were not answered" in said
    assert "The input (17 tokens) is too long" in said
    assert "tiny.bench.log" in said and plan.read_rows([PATHS["psum"]]) == []


def test_a_measurement_takes_some_prompts_even_above_its_tokens(fake_servers, monkeypatch):
    serve_tiny_model(fake_servers, monkeypatch)
    plan = make_plan(fake_servers, prompt_lengths=(128,), rounds=1, tokens=2 * 128)
    measure_throughput(plan, [PATHS["psum"]], lambda *_: None)
    log = (plan.out / "tiny.bench.log").read_text()
    assert [log.count(f"Successful requests:                     {count} ") for count in (2, 4)] == [1, 1]


def test_a_benchmark_that_fails_says_why_and_the_next_one_runs(tmp_path):
    log = tmp_path / "bench.log"
    with start_serving_bench(Fleet(), log) as bench:
        for arguments, message in ((["--no-such-flag"], "exit code 2"), (["--backend", "sglang"], "exit code 1")):
            with pytest.raises(ServerFailed, match=rf"{message}; log: .*bench\.log"):
                bench.run([*arguments, "--port", "1", "--ready-check-timeout-sec", "1"], 60)
        with pytest.raises(ServerFailed, match="took longer than 0 s"):
            bench.run(["--port", "1", "--ready-check-timeout-sec", "5"], 0.1)
    with pytest.raises(ServerFailed, match="is gone|ended with exit code"):
        bench.run(["--port", "1"], 60)
