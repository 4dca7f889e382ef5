"""The A/B's machinery against fake servers: exit codes, kept logs, resuming, and that no process is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from child_signals import heed_signals
from sglang_deepep_v2 import provenance
from sglang_deepep_v2.ab import command, fingerprint, options, servers, session
from sglang_deepep_v2.ab.paths import PATHS
from sglang_deepep_v2.ab.probe import make_prompts
from sglang_deepep_v2.ab.servers import Fleet, ServerFailed, ServeSettings
from sglang_deepep_v2.cli import app

FAKE = Path(__file__).with_name("ab_fake_server.py")
NEW_TOKENS = 3


@pytest.fixture
def fake_servers(monkeypatch, tmp_path):
    """Every server is a fake one, and nothing is written outside `tmp_path`."""
    monkeypatch.setattr(servers, "launch_command", fake_command)
    monkeypatch.setattr(options, "supports", lambda model: False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fake_command(path, settings, port):
    return [sys.executable, str(FAKE), "--port", str(port)]


def make_job(tmp_path, fleet, **kwargs):
    settings = ServeSettings("model", tp=2, chunk=64, cpu=True, ready_timeout_s=30)
    return session.Job("tiny", settings, make_prompts(512, 64), NEW_TOKENS, tmp_path / "runs", fleet, **kwargs)


def run(tmp_path, *names, **kwargs):
    fleet = Fleet()
    job = make_job(tmp_path, fleet, **kwargs)
    return session.run_all(job, [PATHS[name] for name in names], False, 2, lambda path, status: None)


def ab(*args: str):
    return CliRunner().invoke(app, ["ab", "--quick", "--out", "runs", *args])


def test_all_prompts_reach_every_path_and_lines_are_read(fake_servers):
    results = run(fake_servers, "nonexpanded", "psum")
    for result in results.values():
        assert result.error is None and len(result.probes) == 50 and len(result.probes[0].tokens) == NEW_TOKENS
        assert [line.process for line in result.lines] == ["TP0 EP0", "TP1 EP1"]
    assert results["psum"].lines[0].pipeline == "psum"
    assert results["psum"].probes == results["nonexpanded"].probes


def test_agreement_exits_with_0_and_writes_json(fake_servers):
    outcome = ab("--json", "result.json")
    assert outcome.exit_code == 0, outcome.output
    document = json.loads(Path("result.json").read_text())
    assert document["passed"] and len(document["checkpoints"]["qwen3-moe-fp8"]) == 2
    compared = document["checkpoints"]["qwen3-moe-fp8"][1]["comparison"]
    assert compared["prompts"] == 50 and compared["largest"] == 0.0
    (row,) = map(json.loads, Path("runs/qwen3-moe-fp8.agreement.jsonl").read_text().splitlines())
    assert (row["path"], row["baseline"], row["greedy_equal"], row["passed"]) == ("psum", "nonexpanded", 50, True)
    assert row["gpu"] == "cpu" and row["versions"]["sglang"] and row["date"]
    assert "TP0, TP1: psum, reference, cpu sync" in outcome.output


def test_a_difference_exits_with_1_and_is_shown(fake_servers, monkeypatch):
    monkeypatch.setenv("FAKE_SHIFT", "-0.4")
    outcome = ab()
    assert outcome.exit_code == 1
    assert "apart by 0.4000" in outcome.output and "differs" in outcome.output
    assert ab("--bound", "0.41").exit_code == 0


def test_another_pipeline_than_the_paths_own_fails(fake_servers, monkeypatch):
    monkeypatch.setenv("FAKE_PIPELINE", "non-expanded")
    outcome = ab()
    assert outcome.exit_code == 1
    assert "TP0 EP0 ran pipeline=non-expanded" in " ".join(outcome.output.split())


def test_a_crash_names_the_log_and_shows_its_end(fake_servers, monkeypatch):
    monkeypatch.setenv("FAKE_CRASH", "1")
    outcome = ab()
    assert outcome.exit_code == 1
    shown = " ".join(outcome.output.split())
    assert "no weights here" in shown and "runs/qwen3-moe-fp8.psum.log" in shown and "exit code 1" in shown
    assert Path("runs/qwen3-moe-fp8.psum.log").is_file()


def test_a_dropped_prompt_is_a_failure(fake_servers, monkeypatch):
    monkeypatch.setenv("FAKE_DROP", "1")
    result = run(fake_servers, "psum")["psum"]
    assert "answered 49 of 50 prompts" in result.error


def test_a_server_that_never_answers_is_given_up(fake_servers, monkeypatch):
    code = "import time; time.sleep(600)"
    monkeypatch.setattr(servers, "launch_command", lambda *args: [sys.executable, "-c", code])
    settings = ServeSettings("model", tp=2, chunk=64, cpu=True, ready_timeout_s=0.5)
    with pytest.raises(ServerFailed, match="did not answer within 0 s|did not answer within 1 s"):
        with Fleet().run_server(PATHS["psum"], settings, fake_servers / "x.log"):
            pass


def test_resume_keeps_equal_questions_only(fake_servers, monkeypatch):
    first = run(fake_servers, "nonexpanded", "psum")
    again = run(fake_servers, "nonexpanded", "psum", resume=True)
    assert all(result.resumed for result in again.values())
    assert again["psum"].probes == first["psum"].probes and again["psum"].lines == first["psum"].lines
    # Another toggle is another question, for the path it reaches.
    monkeypatch.setenv("SGLANG_DEEPEP_V2_NUM_SMS", "8")
    assert not any(result.resumed for result in run(fake_servers, "psum", resume=True).values())
    assert not any(result.resumed for result in run(fake_servers, "psum", resume=True, evaluation="gsm8k").values())
    # A failed path is asked again, and without --resume every path is.
    monkeypatch.setenv("FAKE_DROP", "1")
    assert run(fake_servers, "psum")["psum"].error
    monkeypatch.delenv("FAKE_DROP")
    retried = run(fake_servers, "psum", resume=True)["psum"]
    assert retried.error is None and not retried.resumed


@pytest.mark.parametrize("what", ["sources", "versions"])
def test_resume_measures_again_with_another_patch_or_other_versions(fake_servers, monkeypatch, what):
    run(fake_servers, "psum")
    if what == "sources":
        monkeypatch.setattr(fingerprint, "sources", lambda: "another patch")
    else:
        machine = provenance.machine() | {"versions": provenance.machine()["versions"] | {"sglang": "0.0.1"}}
        monkeypatch.setattr(fingerprint, "machine", lambda: machine)
    assert not run(fake_servers, "psum", resume=True)["psum"].resumed
    assert run(fake_servers, "psum", resume=True)["psum"].resumed


@pytest.mark.parametrize(
    "variable", ["EP_X", "NCCL_X", "DG_X", "CUDA_VISIBLE_DEVICES", "TRITON_X", "SGLANG_X", "PYTHONPATH"]
)
def test_a_steering_variable_changes_the_fingerprint(monkeypatch, variable):
    settings = ServeSettings("model", tp=2, chunk=64, cpu=False)
    first, other = ({variable: value} for value in "01")
    assert fingerprint.fingerprint(settings, first) != fingerprint.fingerprint(settings, other)
    assert fingerprint.fingerprint(settings, first) == fingerprint.fingerprint(settings, first | {"EDITOR": "vi"})


@pytest.mark.parametrize("name", ["model/config.json", "model/x.safetensors", "front/package/module.py"])
def test_files_that_a_server_loads_change_the_fingerprint(tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text("one")
    settings = ServeSettings(str(tmp_path / "model"), 2, 64, False, pythonpath=(str(tmp_path / "front"),))
    before = fingerprint.fingerprint(settings, {})
    assert fingerprint.fingerprint(settings, {}) == before
    # The same size at another time.
    os.utime(file, ns=(0, 1))
    later = fingerprint.fingerprint(settings, {})
    file.write_text("three")
    os.utime(file, ns=(0, 1))
    assert len({before, later, fingerprint.fingerprint(settings, {})}) == 3


def test_resumed_rows_keep_the_commit_and_date_of_their_measurement(fake_servers, monkeypatch):
    def stamp(commit, date):
        monkeypatch.setattr(session, "stamp", lambda: provenance.machine() | {"commit": commit, "date": date})

    rows = Path("runs/qwen3-moe-fp8.agreement.jsonl")
    stamp("first", "2026-01-01T00:00:00+00:00")
    assert ab().exit_code == 0
    before = rows.read_text()
    stamp("second", "2026-01-02T00:00:00+00:00")
    assert ab("--resume").exit_code == 0
    assert rows.read_text() == before and '"first"' in before
    assert ab().exit_code == 0
    assert '"second"' in rows.read_text()


def test_the_hash_of_the_patch_covers_its_tree_and_this_package(monkeypatch, tmp_path):
    (tmp_path / "sglang/srt").mkdir(parents=True)
    (tmp_path / "package").mkdir()
    (tmp_path / "package/provenance.py").touch()
    monkeypatch.setattr(provenance.overlay, "TREE", tmp_path)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "package/provenance.py"))
    seen = {provenance.sources.__wrapped__()}
    for file in ("sglang/srt/a.py", "sglang/srt/b.py", "package/c.py"):
        for text in ("x = 1\n", "x = 2\n"):
            (tmp_path / file).write_text(text)
            seen.add(provenance.sources.__wrapped__())
    assert len(seen) == 7


def test_each_path_gets_its_own_environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/before")
    settings = ServeSettings("model", tp=2, chunk=64, cpu=True, pythonpath=("/front",))
    psum, plain = (servers.launch_environment(PATHS[name], settings) for name in ("psum", "sglang_expanded"))
    assert psum["SGLANG_OVERLAY"] == "1" and plain["SGLANG_OVERLAY"] == "0"
    assert psum["SGLANG_DEEPEP_V2_ENABLE_PSUM_PIPELINE"] == "1"
    assert psum["TRITON_INTERPRET"] == "1" and psum["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert psum[servers.CAPACITY] == "64" and psum["PYTHONPATH"].split(os.pathsep) == ["/front", "/before"]
    on_gpu = servers.launch_environment(PATHS["psum"], ServeSettings("model", tp=2, chunk=64, cpu=False))
    assert "TRITON_INTERPRET" not in on_gpu or "TRITON_INTERPRET" in os.environ
    monkeypatch.setenv(servers.CAPACITY, "4096")
    assert servers.launch_environment(PATHS["psum"], settings)[servers.CAPACITY] == "4096"


def test_command_lines_differ_by_backend():
    settings = ServeSettings("model", tp=2, chunk=64, cpu=False, extra_args=("--context-length", "512"))
    by_path = {name: " ".join(servers.launch_command(PATHS[name], settings, 1)) for name in PATHS}
    assert "--moe-a2a-backend deepep_v2 --ep-size 2 --moe-runner-backend deep_gemm" in by_path["psum"]
    assert (
        "--moe-a2a-backend deepep --ep-size 2" in by_path["deepep_v1"]
        and "--deepep-mode normal" in by_path["deepep_v1"]
    )
    assert "--ep-size" not in by_path["none"]
    assert all(line.endswith("--context-length 512") and "--disable-radix-cache" in line for line in by_path.values())


@pytest.mark.parametrize("how", ["the block ends", "the block raises", "the fleet is closed"])
def test_children_that_ignore_sigterm_end_with_their_server(fake_servers, monkeypatch, how):
    monkeypatch.setattr(servers, "_STOP_GRACE_S", 0.3)
    monkeypatch.setenv("FAKE_CHILD_PID_FILE", str(fake_servers / "pids"))
    settings = ServeSettings("model", tp=2, chunk=64, cpu=True, ready_timeout_s=30)
    fleet = Fleet()
    try:
        with fleet.run_server(PATHS["psum"], settings, fake_servers / "x.log") as server:
            pids = [server.process.pid, *map(int, (fake_servers / "pids").read_text().split())]
            assert len(pids) == 2 and all(map(is_running, pids))
            if how == "the block raises":
                raise RuntimeError
            if how == "the fleet is closed":
                fleet.close()
                assert not any(map(is_running, pids))
    except RuntimeError:
        pass
    wait_until(lambda: not any(map(is_running, pids)))
    if how == "the fleet is closed":
        with pytest.raises(ServerFailed, match="interrupted"):
            with fleet.run_server(PATHS["psum"], settings, fake_servers / "x.log"):
                pass


DRIVER = """
import sys
sys.path.insert(0, {folder!r})
from sglang_deepep_v2.ab import options, servers
from test_ab_session import fake_command
servers.launch_command = fake_command
options.supports = lambda model: False
from sglang_deepep_v2.cli import app
app(["ab", "--quick", "--out", "runs"])
"""


@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGINT], [signal.SIGHUP], [signal.SIGTERM, signal.SIGINT]],
    ids=lambda numbers: "+".join(number.name for number in numbers),
)
def test_ctrl_c_ends_every_child_and_exits_with_130(fake_servers, numbers):
    pid_file = fake_servers / "pids"
    scratch = fake_servers / "scratch"
    scratch.mkdir()
    env = os.environ | {"FAKE_CHILD_PID_FILE": str(pid_file), "FAKE_SLEEP_S": "60", "TMPDIR": str(scratch)}
    driver = DRIVER.format(folder=str(FAKE.parent))
    with (fake_servers / "out.txt").open("wb") as out:
        command_line = [sys.executable, "-c", driver]
        process = subprocess.Popen(
            command_line, env=env, cwd=fake_servers, stdout=out, stderr=out, preexec_fn=heed_signals
        )
    try:
        wait_until(lambda: (fake_servers / "out.txt").read_text().count("50 prompts") == 2)
        children = list(map(int, pid_file.read_text().split()))
        assert len(children) == 2 and all(map(is_running, children))
        for number in numbers:
            process.send_signal(number)
            # The children ignore SIGTERM, so that their end takes longer than this.
            time.sleep(0.5)
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
    assert not any(map(is_running, children))
    assert "interrupted; every server is ended; no result was finished" in (fake_servers / "out.txt").read_text()
    assert not list(scratch.iterdir())


def test_an_interrupt_at_the_start_of_a_process_finds_it_noted(tmp_path, monkeypatch):
    started, real = [], subprocess.Popen

    def start(*args, **kwargs):
        started.append(real(*args, **kwargs))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(servers.subprocess, "Popen", start)
    fleet = Fleet()
    try:
        with pytest.raises(KeyboardInterrupt), fleet.run_process(["sleep", "600"], dict(os.environ), tmp_path / "log"):
            pass
        fleet.close()
        assert not is_running(started[0].pid)
    finally:
        started[0].kill()


def test_two_runs_do_not_share_a_folder(fake_servers):
    Path("runs").mkdir()
    with options.locked_folder("--out", Path("runs")):
        outcome = CliRunner().invoke(app, ["ab", "--quick", "--out", "runs"], env={"COLUMNS": "400"})
        assert outcome.exit_code == 2 and "--out runs is in use by another ab" in outcome.output
    assert not Path(".demo").exists()
    assert ab().exit_code == 0


def test_ctrl_c_counts_what_resume_will_take_over(fake_servers, monkeypatch):
    assert ab().exit_code == 0
    real = command.run_all

    def interrupted(*args):
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_all", interrupted)
    outcome = ab("--resume")
    assert outcome.exit_code == 130 and "ended; 2 result(s) in runs for --resume" in outcome.output
    monkeypatch.setattr(fingerprint, "sources", lambda: "another patch")
    monkeypatch.setattr(command, "run_all", lambda *args: signal.raise_signal(signal.SIGINT))
    outcome = ab("--resume")
    assert outcome.exit_code == 130 and "no result was finished" in outcome.output


@pytest.mark.parametrize("suffix", [".json", ".probes.json"])
def test_a_damaged_result_is_told_and_measured_again(fake_servers, suffix):
    assert ab().exit_code == 0
    damaged = Path(f"runs/qwen3-moe-fp8.psum{suffix}")
    damaged.write_bytes(damaged.read_bytes()[:100])
    outcome = ab("--resume")
    shown = " ".join(outcome.output.split())
    assert outcome.exit_code == 0 and "psum: not kept, runs/qwen3-moe-fp8.psum.json or its .probes.json" in shown
    assert "nonexpanded: kept from the earlier run" in shown
    assert json.loads(Path("runs/qwen3-moe-fp8.psum.json").read_text())


def test_each_fleet_has_a_temporary_folder_of_its_own_and_removes_it(tmp_path):
    fleets, seen = [Fleet(), Fleet()], []
    code = "import os, tempfile; print(tempfile.mkdtemp())"
    for index, fleet in enumerate(fleets):
        log = tmp_path / f"{index}.log"
        with fleet.run_process([sys.executable, "-c", code], dict(os.environ), log) as process:
            process.wait(30)
        seen.append(Path(log.read_text().splitlines()[-1]))
    assert all(folder.is_dir() for folder in seen) and seen[0].parent != seen[1].parent
    for fleet in fleets:
        fleet.close()
    assert not any(folder.parent.exists() for folder in seen)


def test_a_refused_server_argument_is_told_in_one_line(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("usage: sglang serve [-h]\n    [--tp N]\nsglang serve: error: unrecognized arguments: --no-such\n")
    assert servers._log_tail(log) == "  | sglang serve: error: unrecognized arguments: --no-such"


def test_an_evaluation_runs_on_every_path_and_is_written_beside_the_differences(fake_servers, monkeypatch):
    monkeypatch.setenv("FAKE_SHIFT", "-0.05")
    Path("questions.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n')
    asked = []

    def evaluate(server, settings, fleet, log):
        asked.append((server.process.poll(), log.name))
        return {"correct": 1, "total": 1, "accuracy": 1.0, "invalid": 0.0, "latency_s": 0.1}

    monkeypatch.setattr(command, "evaluate_gsm8k", evaluate)
    outcome = ab("--eval", "gsm8k", "--data-path", "questions.jsonl", "--eval-shots", "0")
    assert outcome.exit_code == 0, outcome.output
    names = ("nonexpanded", "psum")
    assert sorted(asked, key=str) == [(None, f"qwen3-moe-fp8.{name}.gsm8k.log") for name in names], "servers must be up"
    rows = [json.loads(line) for line in Path("runs/qwen3-moe-fp8.accuracy.jsonl").read_text().splitlines()]
    assert [(row["path"], row["correct"], row["total"]) for row in rows] == [(name, 1, 1) for name in names]
    assert rows[1]["logprob_diff_p50"] == pytest.approx(0.05) and rows[0]["logprob_diff_p99"] == 0.0
    assert "GSM8K" in outcome.output
    again = ("--resume", "--eval", "gsm8k", "--data-path", "questions.jsonl", "--eval-shots", "0")
    assert ab(*again).exit_code == 0 and len(asked) == 2
    Path("questions.jsonl").write_text('{"question": "b", "answer": "#### 1"}\n')
    assert ab(*again).exit_code == 0 and len(asked) == 4, "other questions are another evaluation"


def test_misused_options_are_refused_before_anything_starts(fake_servers):
    Path("a_file").touch()
    Path("bad_model").mkdir()
    Path("bad_model/config.json").write_text("{")
    Path("binary").write_bytes(b"\xff\xfe\n")
    for name, config in (
        ("listed", "[]"),
        ("worded", '{"vocab_size": "many"}'),
        ("nested", '{"text_config": [1]}'),
        ("small", '{"text_config": {"vocab_size": 512, "max_position_embeddings": 8192}}'),
    ):
        Path(name).mkdir()
        Path(name, "config.json").write_text(config)
    for args, message in (
        (["--paths", "sglang_expanded"], "needs a GPU"),
        (["--paths", "quick"], "unknown path"),
        (["--prompt-len", "1k"], "positive token counts"),
        (["--eval", "mmlu"], "knows gsm8k"),
        (["--eval", "gsm8k"], "--data-path"),
        (["--model", "random:gpt"], "generated ones are random:qwen3-moe-fp8"),
        (["--paths", ""], "--paths names no path"),
        (["--paths", "psum,psum"], "--paths names psum twice"),
        (["--model", "bad_model"], "--model bad_model: bad_model/config.json is not JSON"),
        (["--model", "."], "--model . is no checkpoint folder: it has no config.json"),
        (["--model", "./absent/model"], "--model ./absent/model is no folder here"),
        (["--tp", "0"], "got 0"),
        (["--tp", "two"], "got two"),
        (["--tp", "3"], "--tp 3 must divide the 8 experts and 4 attention heads of qwen3-moe-fp8"),
        (["--chunk", "4096"], "--chunk 4096 and --new-tokens 4 make sequences of up to 4132 tokens"),
        (["--bound", "-1"], "got -1"),
        (["--outliers", "2"], "got 2"),
        (["--mem-fraction", "0"], "got 0"),
        (["--server-args", "'open"], '--server-args "\'open" is no shell command line'),
        (["--server-pythonpath", "a_file"], "--server-pythonpath a_file is no folder"),
        (["--server-pythonpath", ""], "--server-pythonpath '' is no folder"),
        (["--prompt-len", "5,6,5"], "--prompt-len names 5 twice"),
        (["--prompt-len", "16,2048"], "prompts of 2048 tokens and one generated token are longer than the 2048 tokens"),
        (["--model", "small", "--prompt-len", "8192"], "that --model small takes: give --prompt-len lengths of at"),
        (["--model", "small", "--chunk", "8192"], "up to 8228 tokens, --model small takes 8192"),
        (
            ["--prompt-len", "512", "--server-args", "--context-length=512"],
            "than the 512 tokens that --server-args '--context-length' takes: give --prompt-len lengths of at most 511",
        ),
        (["--model", "small", "--quick"], "ab with --model on a machine without a GPU has no use for --quick"),
        (["--model", "nested"], "--model nested: text_config of config.json must be an object, got [1]"),
        (["--data-path", "a_file"], "ab without --eval has no use for --data-path"),
        (["--quick", "--eval-shots", "1"], "ab without --eval has no use for --eval-shots"),
        (["--quick", "--rounds", "2", "--together"], "ab without --prompt-len has no use for --rounds, --together"),
        (["--model", ".", "--paths", "psum", "--quick"], "ab with --model and --paths has no use for --quick"),
        (["--prompt-len", "²"], "positive token counts separated by commas, got '²'"),
        (["--model", "listed"], "--model listed: config.json holds no object"),
        (["--model", "worded"], "--model worded: config.json must name a vocab_size above 10, got 'many'"),
        (["--eval", "gsm8k", "--data-path", "binary"], "binary:1: not a GSM8K line"),
        (["--json", "bad_model"], "--json: bad_model cannot be written: it is a folder"),
        (["--json", "/proc/absent"], "--json /proc/absent cannot be written: No such file"),
        (["--out", "/proc/absent"], "--out /proc/absent is no folder that can be written to: No such file"),
        (["--out", "a_file"], "--out a_file is no folder that can be written to: File exists"),
        (["--json", "absent/result.json"], "--json absent/result.json cannot be written: absent is no folder"),
    ):
        outcome = CliRunner().invoke(app, ["ab", *args], env={"COLUMNS": "400", "HF_HUB_OFFLINE": "1"})
        assert outcome.exit_code == 2 and message in outcome.output, (args, outcome.output)
    assert not list(Path().glob("**/*.log"))


def test_a_relative_folder_names_the_model(fake_servers):
    folder = fake_servers / "named"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 512}')
    os.chdir(folder)
    outcome = CliRunner().invoke(app, ["ab", "--model", ".", "--paths", "nonexpanded", "--tp", "2", "--out", "../runs"])
    assert outcome.exit_code == 0, outcome.output
    assert (fake_servers / "runs/named.nonexpanded.json").is_file()


@pytest.mark.parametrize("written", [False, True])
def test_a_bad_out_folder_is_refused_before_a_checkpoint_is_written(fake_servers, written):
    outcome = CliRunner().invoke(app, ["ab", "--quick", "--out", "runs" if written else "/proc/absent"])
    assert outcome.exit_code == (0 if written else 2), outcome.output
    assert Path(".demo").exists() is written


def test_a_working_folder_that_takes_no_checkpoint_is_named(fake_servers):
    os.chdir("/proc")
    outcome = CliRunner().invoke(app, ["ab", "--quick", "--out", str(fake_servers)], env={"COLUMNS": "400"})
    assert outcome.exit_code == 2
    assert "qwen3-moe-fp8 cannot be written into /proc/.demo/checkpoints" in outcome.output
    assert "run ab in a folder that can be written to" in outcome.output


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
