"""The ElasticBuffer is built once before serving, by the call that ModelRunner delegates, and only for deepep_v2."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from sglang.srt.layers.deep_gemm_wrapper import psum
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2Dispatcher
from sglang.srt.layers.moe.utils import MoeA2ABackend
from sglang.srt.model_executor import model_runner, moe_ep_setup
from sglang.srt.model_executor.model_runner_components import moe_ep_setup as components
from sglang.srt.model_executor.moe_ep_setup import maybe_prebuild_deepep_v2_buffers
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner.eager_runner import EagerRunner

from resolved_args import write_config

PROBE = Path(__file__).with_name("dispatch_probe.py")


class Buffer:
    """The process-wide buffer's key, and how often it was built."""

    def __init__(self):
        self.key, self.builds, self.settled = None, 0, 0


class RecordingDispatcher(DeepEPv2Dispatcher):
    """A dispatcher of one key over a shared ``Buffer``; nothing of the real one is set up."""

    def __init__(self, buffer: Buffer, key: str = "fp8"):
        self.buffer, self.key = buffer, key

    def buffer_is_built(self) -> bool:
        return self.buffer.key == self.key

    def prebuild(self) -> None:
        self.buffer.key = self.key
        self.buffer.builds += 1

    def settle_prefill(self) -> None:
        self.buffer.settled += 1

    @property
    def uses_psum_pipeline(self) -> bool:
        return self.key == "fp8"


class Layer(FusedMoE):
    def __init__(self, dispatcher):
        nn.Module.__init__(self)
        self.dispatcher = dispatcher
        self.w13_weight = torch.empty(4, 512, 256).to(torch.float8_e4m3fn)
        self.w2_weight = torch.empty(4, 256, 256).to(torch.float8_e4m3fn)


@pytest.fixture
def buffer() -> Buffer:
    return Buffer()


@pytest.fixture(autouse=True)
def backend(monkeypatch) -> SimpleNamespace:
    chosen = SimpleNamespace(value=MoeA2ABackend.DEEPEP_V2, disaggregation_mode="null")
    monkeypatch.setattr(moe_ep_setup, "get_moe_a2a_backend", lambda: chosen.value)
    monkeypatch.setattr(moe_ep_setup, "get_disagg", lambda: chosen)
    return chosen


def model_of(*dispatchers) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), *(Layer(dispatcher) for dispatcher in dispatchers))


def graph_runner(cls):
    return cls.__new__(cls)


@pytest.mark.parametrize("runner", [None, EagerRunner], ids=["no runner", "eager"])
def test_r11_builds_once_for_all_layers(buffer, runner):
    model = model_of(RecordingDispatcher(buffer), RecordingDispatcher(buffer))
    decode_cuda_graph_runner = runner and graph_runner(runner)
    maybe_prebuild_deepep_v2_buffers(model=model, decode_cuda_graph_runner=decode_cuda_graph_runner)
    assert (buffer.builds, buffer.settled) == (1, 2)
    maybe_prebuild_deepep_v2_buffers(model=model, decode_cuda_graph_runner=decode_cuda_graph_runner)
    assert buffer.builds == 1


@pytest.fixture
def compiled(buffer, monkeypatch) -> list:
    """``(dtype, shape, rows)`` of each warm-up that a machine with a GPU would run."""
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(psum, "_warmed", set())
    monkeypatch.setattr(psum, "_max_rows", 640)
    monkeypatch.setattr(psum.compile_utils, "_ENABLE_JIT_DEEPGEMM_PRECOMPILE", True)
    monkeypatch.setattr(psum.compile_utils, "_DO_COMPILE_ALL", True)

    def warm_up(weight, rows):
        assert buffer.settled == 2, "the row counts to compile are known once every layer has settled"
        seen.append((weight.dtype, tuple(weight.shape), rows))

    monkeypatch.setattr(psum, "_warm_up", warm_up)
    return seen


def test_psum_gemms_are_compiled_before_any_forward(buffer, compiled, monkeypatch):
    odd = Layer(RecordingDispatcher(buffer))
    odd.w13_weight, odd.w2_weight = torch.empty(4, 512, 128, dtype=torch.uint8), torch.empty(3, dtype=torch.bfloat16)
    maybe_prebuild_deepep_v2_buffers(model=nn.Sequential(Layer(RecordingDispatcher(buffer)), odd))
    fp8 = torch.float8_e4m3fn
    assert compiled == [(fp8, (4, 512, 256), 640), (fp8, (4, 256, 256), 640)]
    psum._ensure_warm(torch.empty(4, 512, 256, dtype=fp8), 1000)
    assert len(compiled) == 2, "each shape once"
    psum._ensure_warm(torch.empty(4, 512, 256, dtype=torch.bfloat16), 1000)
    assert compiled[2:] == [(torch.bfloat16, (4, 512, 256), 1000)]
    monkeypatch.setattr(psum.compile_utils, "_ENABLE_JIT_DEEPGEMM_PRECOMPILE", False)
    psum._ensure_warm(torch.empty(5, 512, 256, dtype=fp8), 1000)
    assert len(compiled) == 3


@pytest.mark.parametrize(("offloaded", "rows"), [(False, 4096), (True, 3072)])
def test_warm_up_takes_half_of_the_free_memory(monkeypatch, offloaded, rows):
    """Experts that are offloaded need their own bytes of it as well."""
    experts, n, k = 1, 1024, 2048
    row_bytes = 2 * k + 2 * n
    weight = SimpleNamespace(shape=(experts, n, k), dtype=torch.bfloat16, is_cuda=not offloaded)
    weight.nbytes = 1024 * row_bytes
    compiled = []
    monkeypatch.setattr(psum, "_row_alignment", lambda: 128)
    monkeypatch.setattr(psum, "_compile", lambda weight, row_counts: compiled.append(row_counts))
    monkeypatch.setattr(psum, "get_available_gpu_memory", lambda *_: 2 * 4096 * row_bytes / (1 << 30))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(psum.compile_utils, "_local_rank_compile_lock", lambda *_: contextlib.nullcontext())
    psum._warm_up(weight, 10**6)
    psum._warm_up(weight, 300)
    assert compiled == [range(128, rows + 1, 128), range(128, 301, 128)]


def test_labels_pipeline_compiles_no_psum_gemms(buffer, compiled):
    maybe_prebuild_deepep_v2_buffers(model=model_of(RecordingDispatcher(buffer, "labels")))
    assert not compiled


def test_decode_role_builds_the_buffer_and_nothing_for_prefill(buffer, compiled, backend):
    backend.disaggregation_mode = "decode"
    maybe_prebuild_deepep_v2_buffers(model=model_of(RecordingDispatcher(buffer), RecordingDispatcher(buffer)))
    assert (buffer.builds, buffer.settled) == (1, 0) and not compiled


def test_r11_captured_decode_graph_has_built_it(buffer):
    model = model_of(RecordingDispatcher(buffer), RecordingDispatcher(buffer))
    maybe_prebuild_deepep_v2_buffers(model=model, decode_cuda_graph_runner=graph_runner(DecodeCudaGraphRunner))
    assert (buffer.builds, buffer.settled) == (0, 2), "no layer decides in the first request"


def test_r11_key_tells_of_a_capture_where_the_runner_is_unknown(buffer):
    buffer.key = "fp8"
    maybe_prebuild_deepep_v2_buffers(model=model_of(RecordingDispatcher(buffer)))
    assert buffer.builds == 0


def test_r11_buffer_of_another_key_is_not_enough(buffer):
    buffer.key = "bf16"
    maybe_prebuild_deepep_v2_buffers(model=model_of(RecordingDispatcher(buffer)))
    assert (buffer.key, buffer.builds) == ("fp8", 1)


@pytest.mark.parametrize("other", [b for b in MoeA2ABackend if b is not MoeA2ABackend.DEEPEP_V2])
def test_r11_other_backends_are_untouched(buffer, backend, other):
    backend.value = other
    maybe_prebuild_deepep_v2_buffers(model=model_of(RecordingDispatcher(buffer)))
    assert (buffer.builds, buffer.settled) == (0, 0)


def test_layers_of_another_dispatcher_are_passed_over(buffer):
    maybe_prebuild_deepep_v2_buffers(model=model_of(object()))
    maybe_prebuild_deepep_v2_buffers(model=model_of(object(), RecordingDispatcher(buffer)))
    assert buffer.builds == 1
    maybe_prebuild_deepep_v2_buffers(model=nn.Linear(1, 1))


def test_model_runner_calls_the_patch(buffer):
    """model_runner.py binds the name at import; it is the patch's function that it got."""
    assert model_runner.prebuild_deepep_v2_buffer is components.prebuild_deepep_v2_buffer
    assert "prebuild_deepep_v2_buffer" in model_runner.ModelRunner.init_cuda_graphs.__code__.co_names
    model_runner.prebuild_deepep_v2_buffer(model=model_of(RecordingDispatcher(buffer)))
    assert buffer.builds == 1


@pytest.mark.slow
def test_r11_start_up_builds_it_before_the_first_forward(tmp_path):
    """Real ranks, started as a scheduler starts them: the buffer stands on both; the prefill role of PD included."""
    model = str(write_config(tmp_path))
    common = {"tp_size": 2, "chunked_prefill_size": 64}
    prefill_role = {"disaggregation_mode": "prefill", "disaggregation_transfer_backend": "nixl"}
    cases = [
        {"model": model, "arguments": common, "batches": [[[8]]]},
        {"model": model, "arguments": common | prefill_role, "batches": [[[8]]]},
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROBE), json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "64"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for ranks in json.loads(done.stdout.splitlines()[-1]):
        assert [rank["prebuilt"] for rank in ranks] == [True, True]
