"""Timing, tracing and quantising on the device of a benchmark worker."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch


class CudaTools:
    """CUDA events, graph replay, and the profiler's trace."""

    categories = ("kernel", "gpu_memcpy", "gpu_memset")

    def __init__(self, device: torch.device):
        self.device = device

    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def free(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def mean_us(self, call: Callable[[], object], count: int) -> float:
        """Mean device time of ``count`` calls issued back to back, us."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        start.record()
        for _ in range(count):
            call()
        end.record()
        self.synchronize()
        return 1e3 * start.elapsed_time(end) / count

    def graph(self, calls: list[Callable[[], object]]) -> Callable[[], object]:
        """Captures ``calls`` one after another; the returned callable replays them."""
        for call in calls:
            call()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        self.synchronize()
        return graph.replay

    def graph_us(self, calls: list[Callable[[], object]], replays: int = 5) -> float:
        """Device time of one of ``calls``, us: median over ``replays`` replays of a graph of them all."""
        replay = self.graph(calls)
        times = sorted(self.mean_us(replay, 3) for _ in range(replays))
        return times[len(times) // 2] / len(calls)

    def quantise(self, x: torch.Tensor, column_major: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """SGLang's own FP8 1x128 quantisation of bf16 [rows, hidden]: (fp8 [rows, hidden], fp32 [rows, hidden/128])."""
        from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

        return sglang_per_token_group_quant_fp8(
            x, 128, column_major_scales=column_major, scale_tma_aligned=column_major, scale_ue8m0=False
        )

    def trace(self, call: Callable[[], object], prepare: Callable[[], None]) -> list[dict]:
        """Device activities of ``call`` in time order: name, ts and dur in us."""
        from torch.profiler import ProfilerActivity, profile

        prepare()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            self.synchronize()
        return _events(profiler, self.categories)


class CpuTools(CudaTools):
    """The same on a CPU: wall clock, no graph, the profiler's operators. For dry runs; the numbers mean nothing."""

    categories = ("cpu_op",)

    def name(self) -> str:
        return "cpu"

    def synchronize(self) -> None:
        pass

    def free(self) -> None:
        gc.collect()

    def mean_us(self, call: Callable[[], object], count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            call()
        return 1e6 * (time.perf_counter() - started) / count

    def graph(self, calls: list[Callable[[], object]]) -> Callable[[], object]:
        return lambda: [call() for call in calls]

    def quantise(self, x: torch.Tensor, column_major: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        groups = x.float().view(x.shape[0], -1, 128)
        scale = groups.abs().amax(-1).clamp_min(1e-10) / 448
        if column_major:
            scale = scale.t().contiguous().t()
        return (groups / scale[:, :, None]).to(torch.float8_e4m3fn).view(x.shape), scale

    def trace(self, call: Callable[[], object], prepare: Callable[[], None]) -> list[dict]:
        from torch.profiler import ProfilerActivity, profile

        prepare()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            call()
        return _events(profiler, self.categories)


def _events(profiler, categories: tuple[str, ...]) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    chosen = [e for e in events if e.get("ph") == "X" and e.get("cat", "").lower() in categories]
    return sorted(
        ({"name": e["name"], "ts": float(e["ts"]), "dur": float(e["dur"])} for e in chosen), key=lambda e: e["ts"]
    )


def device_tools(device: torch.device) -> CudaTools:
    return CudaTools(device) if device.type == "cuda" else CpuTools(device)
