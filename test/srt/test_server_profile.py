"""The server profile: layers and parts of a trace, argument errors, and the whole program against fake servers."""

import gzip
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark" / "deepep_v2"))

import server_profile  # noqa: E402

from sglang_deepep_v2.ab import servers  # noqa: E402

TOPK = "void topkGatingSoftmax<float, 4, 64>(float const*)"
COPY = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)"
QUANT = "void per_token_group_quant_flat_kernel<__nv_bfloat16>(void const*)"
DISPATCH = "void deep_ep::elastic::dispatch_impl<true, 8>(void*)"
EPILOGUE = "void deep_ep::elastic::dispatch_copy_epilogue_impl<8>(void*)"
GROUPED = "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u>(float*)"
SWIGLU = "_swiglu_kernel"
COMBINE = "void deep_ep::elastic::combine_impl<8>(void*)"
REDUCE = "void deep_ep::elastic::combine_reduce_epilogue_impl<8>(void*)"
ATTENTION = "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<CollectiveMainloop>>>(Params)"
# What splits KV ends in a combine kernel of its own.
SPLIT_KV = "void flash::flash_fwd_splitkv_combine_kernel<Traits>(Flash_fwd_params)"
DENSE = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
NORM = "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(void*)"

MOE = [(COPY, 2), (QUANT, 8), (DISPATCH, 10), ("Memcpy DtoH (Device -> Pinned)", 2), (EPILOGUE, 20)]
MOE += [(GROUPED, 200), (SWIGLU, 20), (GROUPED, 100), (COMBINE, 30), ("Memset (Device)", 1), (REDUCE, 9)]
BEFORE = [(NORM, 5), (QUANT, 5), (GROUPED, 40), (ATTENTION, 100), (SPLIT_KV, 10), (DENSE, 20), (TOPK, 10)]
LAYER = BEFORE + MOE
GAP = 1.0


def timeline(kernels, gap=GAP):
    events, now = [], 1000.0
    for name, dur in kernels:
        events.append({"name": name, "ts": now, "dur": float(dur)})
        now += dur + gap
    return events


def total(kernels):
    return sum(us for _, us in kernels)


def test_two_layers_among_attention_and_dense_kernels():
    found = server_profile.analyse(timeline(LAYER * 2 + [(NORM, 5), (DENSE, 50)]))
    busy = 2 * total(LAYER) + 55
    assert found["layers_seen"] == 2
    assert found["moe_share_busy"] == pytest.approx(2 * total(MOE) / busy)
    assert found["attention_share"] == pytest.approx(2 * 110 / busy)
    assert found["dense_share"] == pytest.approx((2 * 60 + 50) / busy)
    assert found["other_share"] == pytest.approx((2 * 20 + 5) / busy)
    # Span and busy time start at the first dispatch kernel, behind copy and quantiser.
    assert found["moe_busy_us"] == pytest.approx(total(MOE[2:]))
    assert found["moe_span_us"] == pytest.approx(total(MOE[2:]) + GAP * (len(MOE) - 3))
    wall = busy + GAP * (2 * len(LAYER) + 1)
    assert found["moe_share_wall"] == pytest.approx(2 * found["moe_span_us"] / wall)


def test_shares_add_up_to_one():
    found = server_profile.analyse(timeline(LAYER * 3))
    shares = ("moe_share_busy", "attention_share", "dense_share", "other_share")
    assert sum(found[share] for share in shares) == pytest.approx(1)


def test_events_in_any_order():
    events = timeline(LAYER * 2)
    assert server_profile.analyse(events[::-1]) == server_profile.analyse(events)


def test_overlapping_kernels_are_counted_once():
    # A dependent launch starts early and waits: each kernel reaches 5 us into the next one.
    events = [dict(event, dur=event["dur"] + 5) for event in timeline(LAYER * 2, gap=0.0)]
    found = server_profile.analyse(events)
    # The span's first 5 us are still the quantiser's.
    assert (found["moe_busy_us"], found["moe_span_us"]) == pytest.approx((total(MOE[2:]), total(MOE[2:]) + 5))
    assert server_profile.exclusive_us(
        [{"ts": 0.0, "dur": 10.0}, {"ts": 2.0, "dur": 3.0}, {"ts": 8.0, "dur": 4.0}]
    ) == [10.0, 0.0, 2.0]


@pytest.mark.parametrize("kept", range(3, len(MOE) - 3))
def test_an_unfinished_last_layer_counts_nowhere(kept):
    whole = server_profile.analyse(timeline(LAYER * 2 + BEFORE))
    assert server_profile.analyse(timeline(LAYER * 2 + BEFORE + MOE[:kept])) == whole


def test_layers_that_touch_are_two():
    layers, kept = server_profile.find_layers([DISPATCH, COMBINE, REDUCE, QUANT, DISPATCH, COMBINE])
    assert layers == [(0, 0, 3), (3, 4, 6)] and kept == 6


def test_a_barrier_between_combine_kernels_belongs_to_the_layer():
    names = [NORM, DISPATCH, COMBINE, "void deep_ep::elastic::barrier_impl<8>(int)", REDUCE, COPY, NORM]
    assert server_profile.find_layers(names) == ([(1, 1, 5)], 7)


def test_a_trace_without_a_layer_says_what_is_missing():
    with pytest.raises(ValueError, match="no dispatch kernel among the trace's 7 device"):
        server_profile.analyse(timeline(BEFORE))
    with pytest.raises(ValueError, match="no dispatch kernel among the trace's 0 device"):
        server_profile.analyse([])
    with pytest.raises(ValueError, match="a dispatch kernel but no combine"):
        server_profile.analyse(timeline(BEFORE + MOE[:5]))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (ATTENTION, "attention"),
        ("_fwd_kernel", "attention"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("void flashinfer::BatchPrefillWithRaggedKVCacheKernel<Traits>(Params)", "attention"),
        ("_fwd_kernel_ep_scatter_2", "other"),
        (NORM, "other"),
        ("void flashinfer::activation::act_and_mul_kernel<silu>(int)", "other"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(int)", "other"),
        (GROUPED, "dense"),
        ("_w8a8_block_fp8_matmul", "dense"),
        ("void cublasLt::splitKreduce_kernel<32, 16>(int)", "dense"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<int>>(Params)", "dense"),
    ],
)
def test_parts_outside_a_layer(name, part):
    assert server_profile.part_outside(name) == part


def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300}))
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-len", "0"], "--prompt-len 0 is less than 1"),
        (["--jobs", "0"], "--jobs 0 is less than 1"),
        (["--paths", "none"], "invalid choice: 'none'"),
        (["--paths", "deepep_v1"], "needs at least 2 ranks"),
        (["--model", "random:glm"], "generated ones are random:qwen3-moe-fp8"),
    ],
)
def test_argument_errors(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        server_profile.parse(["--model", model_folder(tmp_path), *arguments])
    assert message in capsys.readouterr().err


def test_a_random_model_is_written_once_and_gives_its_vocabulary(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(server_profile, "ensure_checkpoint", lambda spec, *_: asked.append(spec.name) or tmp_path)
    args = server_profile.parse(["--model", "random:qwen3-moe-fp8"])
    assert (args.model, args.vocab, asked) == (tmp_path, 32000, ["random-qwen3-moe-fp8"])
    assert args.paths == ["sglang_nonexpanded", "sglang_expanded", "psum", "psum_sync_free"]


FAKE = """
import gzip, json, os, sys
from http.server import ThreadingHTTPServer
from pathlib import Path
import ab_fake_server

class Handler(ab_fake_server.Handler):
    asked = {}
    def do_POST(self):
        if self.path not in ("/start_profile", "/stop_profile"):
            return super().do_POST()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        refused = os.environ.get("FAKE_REFUSE") == self.path
        if self.path == "/start_profile":
            self.asked.update(body)
        elif not os.environ.get("FAKE_NO_TRACE"):
            folder = Path(self.asked["output_dir"])
            folder.mkdir(parents=True, exist_ok=True)
            for rank in (0, 1):
                name = f"{self.asked['profile_id']}-TP-{rank}-EP-{rank}.trace.json.gz"
                trace = os.environ["FAKE_TRACE"] if rank == 0 else "{}"
                (folder / name).write_bytes(gzip.compress(trace.encode()))
        self.send_response(500 if refused else 200)
        self.end_headers()
        self.wfile.write(b"Start or stop profiling.")

ab_fake_server.log_prefill()
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def profile(tmp_path, monkeypatch, capsys):
    """Runs the program against fake servers of two ranks: (exit code, records, output)."""
    fake = tmp_path / "fake.py"
    fake.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{FAKE}")
    # The program sets variables for its servers.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    commands = []

    def command(path, settings, port):
        commands.append((path.name, settings.extra_args, settings.cpu))
        return [sys.executable, str(fake), str(port)]

    monkeypatch.setattr(servers, "launch_command", command)
    events = [{"ph": "X", "cat": "kernel", **event} for event in timeline(LAYER * 2)]
    noise = [{"ph": "M", "name": "process_name", "ts": 0}, {"ph": "X", "cat": "cuda_runtime", "ts": 0, "dur": 9e9}]
    trace = {"deviceProperties": [{"id": 0, "name": "Fake GPU"}], "traceEvents": noise + events}
    os.environ["FAKE_TRACE"] = json.dumps(trace)

    def run(*paths):
        arguments = ["--model", model_folder(tmp_path), "--tp", "2", "--prompt-len", "8", "--chunk", "8"]
        arguments += ["--out", str(tmp_path / "out"), "--logs", str(tmp_path / "logs"), "--timeout", "20"]
        arguments += ["--jobs", "2", "--mem-fraction", "0.3", "--server-args", "--sampling-backend pytorch"]
        code = server_profile.run(server_profile.parse([*arguments, "--paths", *paths]))
        file = tmp_path / "out" / "server_profile.jsonl"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        return code, found, capsys.readouterr().out

    run.commands = commands
    return run


def test_the_whole_program(profile):
    code, found, output = profile("sglang_nonexpanded", "psum")
    assert code == 0, output
    assert [record["path"] for record in found] == ["sglang_nonexpanded", "psum"]
    for record in found:
        assert set(record) == set(server_profile.FIELDS)
        assert (record["gpu"], record["model"], record["ep"], record["prompt_len"]) == ("Fake GPU", "model", 2, 8)
        assert record["layers_seen"] == 2 and record["moe_busy_us"] == pytest.approx(total(MOE[2:]))
    extra = ("--sampling-backend", "pytorch", "--mem-fraction-static", "0.3")
    assert sorted(profile.commands) == [("psum", extra, False), ("sglang_nonexpanded", extra, False)]
    assert "MoE % busy" in output and "psum" in output.splitlines()[-1]


def test_a_server_that_writes_no_trace(profile, tmp_path):
    os.environ["FAKE_NO_TRACE"] = "1"
    code, found, output = profile("sglang_expanded")
    assert code == 1 and not found
    assert "the profiler wrote no trace of rank 0" in output and str(tmp_path / "logs/sglang_expanded-trace") in output


def test_a_refused_profile_and_a_wrong_pipeline_are_told(profile):
    os.environ |= {"FAKE_REFUSE": "/start_profile", "FAKE_PIPELINE": "labels"}
    code, found, output = profile("sglang_expanded", "psum")
    assert code == 1 and not found and "no path was measured" in output
    assert "sglang_expanded failed: ServerFailed: server did not accept /start_profile: HTTP Error 500" in output
    assert "psum failed: RuntimeError: " in output and "ran pipeline=labels" in output


def test_a_trace_without_dispatch_names_its_folder(profile, tmp_path):
    os.environ["FAKE_TRACE"] = json.dumps({"traceEvents": []})
    code, _, output = profile("sglang_expanded")
    assert code == 1 and "no dispatch kernel" in output and str(tmp_path / "logs/sglang_expanded-trace") in output


def test_the_trace_of_rank_0_is_read(tmp_path):
    for rank in (0, 1, 10):
        trace = {"deviceProperties": [{"name": f"GPU {rank}"}], "traceEvents": []}
        (tmp_path / f"id-TP-{rank}.trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    assert server_profile.read_trace(tmp_path, "id") == ([], "GPU 0")
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        server_profile.read_trace(tmp_path, "other")
