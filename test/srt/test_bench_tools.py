"""The layer benchmark's tools: record schema, regression check, ratio table, kernel accounting, plots, command."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "benchmark" / "deepep_v2"
sys.path.insert(0, str(BENCHMARK))

import activation_counts  # noqa: E402
import bench_layer  # noqa: E402
import profiling  # noqa: E402
import records  # noqa: E402
import shapes  # noqa: E402

from child_signals import heed_signals  # noqa: E402
from sglang_deepep_v2 import bench as bench_command  # noqa: E402


def layer_record(path="psum", tokens=2304, us=1000.0, **changes):
    record = {
        "path": path,
        "tokens": tokens,
        "ep": 1,
        "hidden": 6144,
        "intermediate": 2048,
        "local_experts": 16,
        "topk": 8,
        "us_median": us,
        "us_min": us - 1,
        "us_max": us + 1,
        "rounds": 7,
        "gpu": "NVIDIA H200",
        "versions": {"sglang": "0.5.23"},
        "commit": "abc1234",
        "date": "2026-11-30T19:00:00+00:00",
    }
    return record | changes


def test_record_has_exactly_the_published_fields():
    assert records.validate(layer_record()) == layer_record()
    with pytest.raises(ValueError, match="unknown fields .'extra'"):
        records.validate(layer_record(extra=1))
    short = layer_record()
    del short["rounds"]
    with pytest.raises(ValueError, match="missing fields .'rounds'"):
        records.validate(short)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "ours"}, "'ours'"),
        ({"us_min": 2000.0}, "not ordered"),
        ({"rounds": 0}, "rounds '0'"),
        ({"us_median": float("nan")}, "us_median 'nan' is not a number"),
        ({"us_max": float("inf")}, "us_max 'inf' is not a number"),
        ({"us_min": -1.0}, "us_min '-1.0' is not a number of at least 0"),
        ({"tokens": "8"}, "tokens '8' is not a whole number"),
        ({"date": "yesterday"}, "date 'yesterday' is not a time"),
    ],
)
def test_record_refuses_values_that_make_no_sense(changes, message):
    with pytest.raises(ValueError, match=message):
        records.validate(layer_record(**changes))


def test_append_and_read_keep_lines(tmp_path):
    file = tmp_path / "deep" / "layer.jsonl"
    records.append(file, [layer_record(tokens=512)])
    records.append(file, [layer_record(tokens=2304)])
    assert [r["tokens"] for r in records.read(file)] == [512, 2304]
    file.write_text(file.read_text() + "{broken\n")
    with pytest.raises(ValueError, match="layer.jsonl:3"):
        records.read(file)
    assert records.read(tmp_path / "none.jsonl") == []


def test_committed_records_are_valid():
    for record in records.read(BENCHMARK / "results" / "layer.jsonl"):
        records.validate(record)


@pytest.mark.parametrize(("us", "slower"), [(1149.0, False), (1151.0, True), (500.0, False)])
def test_regression_limit_is_fifteen_percent(us, slower):
    lines = records.regressions([layer_record(us=us)], [layer_record(us=1000.0)])
    assert bool(lines) == slower
    if slower:
        assert "psum at 2304 tokens" in lines[0] and "1.15x" in lines[0]


def test_regression_compares_the_last_record_of_the_same_key_only():
    baseline = [layer_record(us=2000.0), layer_record(us=1000.0), layer_record(us=10.0, tokens=512)]
    assert len(records.regressions([layer_record(us=1500.0)], baseline)) == 1
    for other in ({"ep": 2}, {"gpu": "NVIDIA H100"}, {"local_experts": 8}, {"path": "labels"}):
        assert records.regressions([layer_record(us=9000.0, **other)], baseline) == []
        assert records.compared([layer_record(us=9000.0, **other)], baseline) == 0


def test_ratio_table_marks_each_target():
    rows = [
        layer_record("sglang_expanded", 512, 650.0),
        layer_record("psum", 512, 500.0),
        layer_record("sglang_expanded", 2304, 1100.0),
        layer_record("psum", 2304, 1000.0),
    ]
    [(shape, by_tokens)] = records.groups(rows)
    found = {(name, tokens): (ratio, least) for name, tokens, ratio, least in records.ratio_rows(shape, by_tokens)}
    assert found["sglang_expanded / psum", 512] == (1.3, 1.25)
    assert found["sglang_expanded / psum", 2304] == (1.1, 1.12)
    table = records.ratio_table(shape, by_tokens)
    assert "1.300 ok (>= 1.25)" in table and "1.100 MISS (>= 1.12)" in table


def test_ratio_targets_belong_to_one_shape_and_gpu():
    rows = [layer_record(path, us=us, gpu="cpu") for path, us in (("sglang_expanded", 2.0), ("psum", 1.5))]
    [(shape, by_tokens)] = records.groups(rows)
    assert [least for *_, least in records.ratio_rows(shape, by_tokens)] == [None]


PSUM_LAYER = [
    "void per_token_group_quant_8bit_kernel<c10::BFloat16, c10::Float8_e4m3fn>(void const*)",
    "void deep_ep::elastic::dispatch_impl<true, 132>(int)",
    "void deep_ep::elastic::dispatch_copy_epilogue_impl<true>(int)",
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 4096u, 6144u>(float*)",
    "_swiglu_kernel",
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 6144u, 2048u>(float*)",
    "void deep_ep::elastic::combine_impl<false>(void*)",
    "void deep_ep::elastic::combine_reduce_epilogue_impl<8>(void*)",
]


def events(names, layers):
    times = [{"name": name, "ts": 10.0 * i, "dur": 4.0} for i, name in enumerate(names * layers)]
    return times


def test_kernel_accounting_of_a_psum_layer():
    found = profiling.summarise(events(PSUM_LAYER, 5), 5)
    assert found["between"] == 3
    assert found["launches"] == len(PSUM_LAYER)
    assert found["busy_us"] == pytest.approx(4.0 * len(PSUM_LAYER))
    labels = [kernel["kernel"] for kernel in found["kernels"]]
    assert labels[3] == "w13 sm90_fp8_gemm_1d2d_impl" and labels[5] == "w2 sm90_fp8_gemm_1d2d_impl"
    assert all(kernel["us"] == pytest.approx(4.0) and kernel["count"] == 1 for kernel in found["kernels"])
    assert [profiling.category(label) for label in labels] == [
        "quantise",
        "dispatch",
        "dispatch",
        "GEMM w13",
        "activation",
        "GEMM w2",
        "combine",
        "combine",
    ]
    assert [span["start_us"] for span in found["timeline"]] == [10.0 * i for i in range(len(PSUM_LAYER))]


def test_an_extra_launch_between_dispatch_and_combine_is_counted():
    fill = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1>>(int)"
    names = PSUM_LAYER[:3] + [fill] + PSUM_LAYER[3:]
    found = profiling.summarise(events(names, 5), 5)
    assert found["between"] == 4
    assert "vectorized_elementwise_kernel[FillFunctor]" in {kernel["kernel"] for kernel in found["kernels"]}


def test_accounting_of_nothing_and_of_uneven_layers():
    assert profiling.summarise([], 5)["busy_us"] == 0
    uneven = profiling.summarise(events(PSUM_LAYER, 2)[:-1], 2)
    assert uneven["busy_us"] == pytest.approx(4.0 * (2 * len(PSUM_LAYER) - 1) / 2)


def test_expanded_psum_and_bytes_of_the_activation():
    assert activation_counts.expanded_psum([3, 0, 5, 130], 128) == ([3, 128, 133, 386], 512)
    assert activation_counts.num_bytes(10, 2048) == 10 * (8192 + 2048 + 64 + 4)


def test_every_named_shape_suits_the_kernels():
    for name in shapes.WIDTHS:
        shape = shapes.named(name, 16)
        assert shape.hidden % 256 == 0 and shape.intermediate % 128 == 0
    with pytest.raises(ValueError, match="unknown shape 'gpt'"):
        shapes.named("gpt", 8)


def test_defaults_are_the_target_shape():
    args = bench_layer.parse([])
    wanted = records.TARGET | {"local_experts": [16]}
    assert {field: getattr(args, field) for field in wanted} == wanted
    assert args.tokens == [512, 2304, 8192] and args.rounds >= 7
    assert set(records.PATHS) <= set(args.paths)


@pytest.fixture
def results(tmp_path):
    paths = {"sglang_expanded": 1500.0, "psum": 1300.0}
    records.append(tmp_path / "layer.jsonl", [layer_record(p, t, us) for p, us in paths.items() for t in (512, 2304)])
    layer = {"ep": 1, "hidden": 6144, "intermediate": 2048, "local_experts": 16}
    for path, us in paths.items():
        found = profiling.summarise(events(PSUM_LAYER, 5), 5)
        kernels = [{"path": path, "tokens": 2304, **kernel, **layer} for kernel in found["kernels"]]
        records.append(
            tmp_path / "profile.jsonl", [records.validate(kernel, records.PROFILE_FIELDS) for kernel in kernels]
        )
        waiting = {"path": path, "tokens": 2304, "waiting_us": us / 10, **layer}
        records.append(tmp_path / "detail.jsonl", [waiting])
        timeline = {"path": path, "tokens": 2304, "kernels": found["timeline"], **layer}
        records.append(tmp_path / "timeline.jsonl", [timeline])
    return tmp_path


def test_plots_are_drawn_from_records(results):
    pytest.importorskip("matplotlib")
    import plot

    files = plot.draw(results, results / "figures")
    assert [file.name for file in files] == ["layer_ep1_2304.png", "timeline_ep1_2304.png", "speedup.png"]
    assert all(file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for file in files)
    assert plot.draw(results / "empty", results / "none") == []


def test_stack_is_the_last_run_of_a_path(results):
    import plot

    old = records.read(results / "profile.jsonl")
    again = [record | {"us": 7.0} for record in old if record["path"] == "psum"]
    parts = plot.stacks(old + again, 2304)
    assert parts["psum"]["activation"] == 7.0 and parts["sglang_expanded"]["activation"] == 4.0
    assert sum(parts["psum"].values()) == pytest.approx(7.0 * len(PSUM_LAYER))


def test_speedups_follow_tokens(results):
    import plot

    [series] = plot.speedups(records.read(results / "layer.jsonl")).values()
    assert series["sglang_expanded / psum"] == [(512, 1500 / 1300), (2304, 1500 / 1300)]
    # A later run without a peer makes no ratio with the earlier run's.
    rows = records.read(results / "layer.jsonl")
    alone = next(row for row in reversed(rows) if row["path"] == "psum") | {"us_median": 100.0}
    [series] = plot.speedups([*rows, alone]).values()
    assert series["sglang_expanded / psum"] == [(512, 1500 / 1300), (2304, 1500 / 1300)]


@pytest.fixture
def command():
    app = Typer()
    app.command()(bench_command.bench)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_check_command_compares_records(command, tmp_path, monkeypatch):
    baseline, new = tmp_path / "benchmark" / "results" / "layer.jsonl", tmp_path / "new.jsonl"
    records.append(baseline, [layer_record(us=1000.0)])
    (tmp_path / "benchmark" / "records.py").write_text((BENCHMARK / "records.py").read_text())
    monkeypatch.setattr(bench_command, "BENCHMARK", tmp_path / "benchmark")
    for us, status in ((1100.0, 0), (1200.0, 1)):
        new.write_text(json.dumps(layer_record(us=us)) + "\n")
        result = command("--check", "--records", new)
        assert result.exit_code == status, result.output
        assert "1 of 1 records compared" in result.output
    # Only the last record of a kind is judged.
    records.append(new, [layer_record(us=1000.0)])
    result = command("--check", "--records", new)
    assert result.exit_code == 0 and "1 of 1 records compared" in result.output
    new.write_text(json.dumps(layer_record(tokens=99)) + "\n")
    assert command("--check", "--records", new).exit_code == 2


def test_the_committed_records_pass_the_check(command):
    result = command("--check", "--records", BENCHMARK / "results" / "layer.jsonl")
    assert result.exit_code == 0 and "0 slower" in result.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "layer.jsonl:2: not JSON"),
        ("[1]", "layer.jsonl:2: record [1] is no object"),
        ('{"path": "psum"}', "layer.jsonl:2: record has missing fields"),
        (json.dumps(layer_record(us_median=float("nan"))), "layer.jsonl:2: us_median 'nan'"),
        (json.dumps(layer_record(us=-5.0)), "layer.jsonl:2: us_median '-5.0'"),
        ("\udcff", "layer.jsonl:2: not JSON"),
    ],
)
def test_broken_records_are_named_by_check_and_plot(command, tmp_path, monkeypatch, capfd, line, message):
    monkeypatch.setenv("COLUMNS", "400")
    file = tmp_path / "layer.jsonl"
    file.write_text(json.dumps(layer_record()) + f"\n{line}\n", errors="surrogateescape")
    result = command("--check", "--records", file)
    assert result.exit_code == 2 and message in result.output
    if importlib.util.find_spec("matplotlib"):
        assert command("--plot", "--out", tmp_path).exit_code == 2
        assert message in capfd.readouterr().err


def test_plot_draws_into_the_folder_of_its_records(command, results):
    pytest.importorskip("matplotlib")
    assert command("--plot", "--out", results).exit_code == 0
    assert {file.name for file in results.glob("*.png")} == {
        "layer_ep1_2304.png",
        "timeline_ep1_2304.png",
        "speedup.png",
    }


def test_a_failed_part_makes_exit_code_1_and_is_named(monkeypatch, tmp_path, capsys):
    def run(failures):
        bench = bench_layer.Bench(bench_layer.parse(["--out", str(tmp_path), "--paths", "psum"]))
        monkeypatch.setattr(bench, "_start", lambda folder: bench.new.append(layer_record()))
        monkeypatch.setattr(bench, "_shape", lambda shape: bench.failures.extend(failures))
        return bench.run()

    assert run([]) == 0
    assert run(["labels at 8 tokens"]) == 1
    assert "1 part(s) failed: labels at 8 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(("timed", "code"), [([layer_record()], 0), ([], 1)])
def test_exit_code_of_skipped_parts(monkeypatch, tmp_path, capsys, timed, code):
    bench = bench_layer.Bench(bench_layer.parse(["--out", str(tmp_path), "--paths", "psum"]))
    monkeypatch.setattr(bench, "_start", lambda folder: bench.new.extend(timed))
    monkeypatch.setattr(bench, "_shape", lambda shape: pytest.fail("started"))
    bench.deadline = 0.0
    assert bench.run() == code
    assert "skipped shape H6144 I2048 E16 top8: the time budget" in capsys.readouterr().out


def test_a_check_without_a_folder_needs_none(command, monkeypatch):
    prepared = []
    monkeypatch.setattr(bench_command, "_gpus", lambda: 2)
    monkeypatch.setattr(bench_command, "_run", lambda *_: 130)
    monkeypatch.setattr(bench_command, "prepare_folder", lambda option, folder: prepared.append(folder))
    assert command("--check").exit_code == 130 and prepared == []
    assert command().exit_code == 130 and prepared == [BENCHMARK / "results"]


def test_a_check_with_a_failed_part_still_compares(command, monkeypatch, tmp_path):
    [committed] = [r for r in records.latest(records.read(BENCHMARK / "results/layer.jsonl")).values()][:1]

    def measured(script, *arguments):
        records.append(Path(arguments[-1]) / "layer.jsonl", [committed])
        return 1

    monkeypatch.setattr(bench_command, "_gpus", lambda: 2)
    monkeypatch.setattr(bench_command, "_run", measured)
    result = command("--check")
    assert result.exit_code == 1 and "1 of 1 records compared, 0 slower" in result.output


def test_the_script_refuses_what_the_command_refuses(tmp_path, monkeypatch, capsys):
    for words, message in (
        ("", "name a folder with --out"),
        (f"--out {tmp_path} --paths mega_moe", "needs a GPU"),
        (f"--out {tmp_path} --topk 9 --local-experts 4 --ep 2", "--local-experts 4 makes 8 expert(s), fewer than"),
    ):
        with pytest.raises(SystemExit):
            bench_layer.parse(["--device", "cpu", *words.split()])
        assert message in capsys.readouterr().err
    assert "mega_moe" not in bench_layer.parse(["--device", "cpu", "--out", str(tmp_path)]).paths
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["bench_layer.py", "--out", str(tmp_path / "file")])
    assert bench_layer.main() == 2 and "is no folder that can be written to" in capsys.readouterr().err


def test_command_says_that_a_wheel_has_no_benchmark(command, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_command, "BENCHMARK", tmp_path / "absent")
    result = command("--check")
    assert result.exit_code == 2 and "checkout" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--path nope", "--path nope is unknown; it takes sglang_nonexpanded"),
        ("--shape nope", "--shape nope is unknown; it takes seed"),
        ("--device tpu", "--device tpu is unknown; it takes cuda, cpu"),
        ("--ep 3", "--ep 3 needs 3 GPU(s), 2 visible; --device cpu"),
        ("--ep 0", "--ep"),
        ("--tokens -1", "--tokens"),
        ("--local-experts 0", "--local-experts"),
        ("--rounds 0", "--rounds"),
        ("--shape tiny --local-experts 1", "--ep 1 times --local-experts 1 makes 1 expert(s), fewer than the top-2"),
        ("--ep 2 --local-experts 8 --local-experts 3", "--ep 2 times --local-experts 3 makes 6 expert(s), fewer than"),
        ("--time-budget -1", "--time-budget"),
        ("--out {file}", "is no folder"),
        ("--plot --out {absent}", "which does not exist"),
        ("--check --records {absent}", "is no file"),
        ("--check --records {file}", "file:1"),
        ("--device cpu --shape tiny", "--device cpu would add to the GPU records"),
        ("--device cpu --path mega_moe --out {absent}", "mega_moe needs a GPU"),
        ("--device cpu --check --out {absent}", "--check compares with records of GPUs"),
        ("--out /proc/absent", "/proc/absent is no folder that can be written to: No such file"),
        ("--out {readonly}", "layer.jsonl cannot be written: it is a folder"),
        ("--check --records {file} --path psum --tokens 8", "--check --records has no use for --tokens, --path"),
        ("--plot --check", "--plot has no use for --check"),
        ("--plot --ep 2", "--plot has no use for --ep"),
    ],
)
def test_command_refuses_bad_values_before_it_starts(command, monkeypatch, tmp_path, arguments, message):
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(bench_command, "_gpus", lambda: 2)
    monkeypatch.setattr(bench_command, "_run", lambda *_: pytest.fail("started"))
    (tmp_path / "file").write_text("{broken\n")
    (tmp_path / "readonly/layer.jsonl").mkdir(parents=True)
    names = ("file", "absent", "readonly")
    words = arguments.format(**{name: tmp_path / name for name in names}).split()
    result = command(*words)
    assert result.exit_code == 2 and message in result.output, result.output


def test_command_passes_its_options_on(command, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(bench_command, "_gpus", lambda: 2)
    monkeypatch.setattr(bench_command, "_run", lambda script, *arguments: seen.append((script, *arguments)) or 0)
    assert command("--tokens", 512, "--tokens", 8192, "--ep", 2, "--path", "psum", "--out", tmp_path).exit_code == 0
    [(script, *arguments)] = seen
    args = bench_layer.parse([str(argument) for argument in arguments])
    assert script == "bench_layer.py" and (args.tokens, args.ep, args.paths) == ([512, 8192], 2, ["psum"])
    assert args.out == str(tmp_path)


def test_a_reader_that_goes_away_ends_the_benchmark_quietly(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARK)!r}); import bench_layer\n"
        "bench_layer.Bench.run = lambda self: [print('line', flush=True) for _ in range(100_000)] and 0\n"
        f"sys.argv[1:] = ['--out', {str(tmp_path)!r}]; sys.exit(bench_layer.main())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (141, b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_ended_benchmark_leaves_no_worker(tmp_path, number):
    command = [
        sys.executable,
        str(BENCHMARK / "bench_layer.py"),
        "--device",
        "cpu",
        "--shapes",
        "tiny",
        "--tokens",
        "8",
    ]
    command += ["--paths", "psum", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=heed_signals,
    )
    try:
        deadline = time.monotonic() + 30
        while len(_group(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(_group(process.pid)) > 1, "no worker started"
        # A signal between fork and the parent's note of it would leave a process that nobody knows.
        time.sleep(0.5)
        process.send_signal(number)
        assert process.wait(30) == 130
        assert b"interrupted" in process.stdout.read()
        assert not _group(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _group(leader: int) -> list[int]:
    """Processes of the group that run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rsplit(")", 1)[1].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(stat.parent.name))
    return found
