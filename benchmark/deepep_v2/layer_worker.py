"""One rank of one side of the layer benchmark: builds the real ``FusedMoE`` and runs what the parent asks for.

``layer_worker.py ADDRESS SIDE RANK WORLD PORT CONFIG_DIR DEVICE`` connects to the parent's socket and answers one
request at a time; a failing request answers with its traceback, the worker stays up. Sides: ``upstream`` (plain SGLang,
started with SGLANG_OVERLAY=0; also the parts that need no SGLang dispatcher) and ``patch``.
"""

from __future__ import annotations

import contextlib
import cProfile
import importlib.metadata
import io
import logging
import os
import pstats
import statistics
import sys
import time
import traceback
from multiprocessing.connection import Client
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

SYNC_FREE_MAX_BYTES = str(64 << 30)
_EXPAND, _PSUM, _SYNC_FREE = (
    "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND",
    "SGLANG_DEEPEP_V2_ENABLE_PSUM_PIPELINE",
    "SGLANG_DEEPEP_V2_ENABLE_SYNC_FREE_PREFILL",
)
# The variables that make a FusedMoE take each path.
LAYER_PATHS = {
    "upstream": {"sglang_nonexpanded": {_EXPAND: "0"}, "sglang_expanded": {_EXPAND: "1"}},
    "patch": {
        "nonexpanded": {_EXPAND: "0", _PSUM: "0", _SYNC_FREE: "0"},
        "labels": {_EXPAND: "1", _PSUM: "0", _SYNC_FREE: "0"},
        "psum": {_EXPAND: "1", _PSUM: "1", _SYNC_FREE: "0"},
        "psum_sync_free": {
            _EXPAND: "1",
            _PSUM: "1",
            _SYNC_FREE: "1",
            "SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES": SYNC_FREE_MAX_BYTES,
        },
    },
}
# Measured in the upstream worker: they use DeepEP and DeepGEMM directly.
PART_PATHS = ("mega_moe", "floor", "deepep_alone", "deepep_alone_sync_free")
REFERENCE_TOKENS = 64


class Worker:
    """The requests; every public method is one. ``side``, ``rank``, ``world``: which worker; ``device``: cuda, cpu."""

    def __init__(self, side: str, rank: int, world: int, port: int, config_dir: str, device: str):
        self.side, self.rank, self.world, self.port = side, rank, world, port
        self.config_dir, self.device_type = config_dir, device
        # A dry run on a CPU shows that the code works; its numbers mean nothing.
        self.profiled, self.host_calls, self.traced = (30, 15, 30) if device == "cuda" else (1, 1, 1)
        self.paths: dict = {}
        self.log_lines: list[str] = []

    def start(self, max_tokens: int) -> dict:
        """Brings SGLang up as a scheduler does. Returns the device's name and the versions."""
        import torch

        if self.device_type == "cuda":
            torch.cuda.set_device(self.rank)
            # As SGLang's model runner does.
            torch.set_num_threads(1)
        self.device = torch.device(self.device_type, self.rank if self.device_type == "cuda" else None)
        from devices import device_tools

        self.tools = device_tools(self.device)
        if self.side == "upstream" and self.device_type == "cpu":
            _stand_in_for_deep_ep()
        self._capture_log()
        os.environ["SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] = str(max_tokens)

        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers.moe.utils import initialize_moe_config
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import ServerArgs

        on_gpu = self.device_type == "cuda"
        backends = (
            {
                "attention_backend": "triton",
                "disable_cuda_graph": True,
                "mem_fraction_static": 0.4,
                "grammar_backend": "none",
            }
            if on_gpu
            else {"attention_backend": "torch_native"}
        )
        arguments = ServerArgs(
            model_path=self.config_dir,
            device=self.device_type,
            tp_size=self.world,
            load_format="dummy",
            skip_tokenizer_init=True,
            moe_a2a_backend="deepep_v2",
            sampling_backend="pytorch",
            chunked_prefill_size=max_tokens,
            max_prefill_tokens=max_tokens,
            **backends,
        )
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=self.rank, gpu_id=self.rank))
        initialize_moe_config()
        with contextlib.suppress(AttributeError):
            parallel_state.set_custom_all_reduce(False)
        backend = "nccl" if on_gpu else "gloo"
        parallel_state.init_distributed_environment(
            world_size=self.world,
            rank=self.rank,
            local_rank=self.rank,
            backend=backend,
            distributed_init_method=f"tcp://127.0.0.1:{self.port}",
        )
        parallel_state.initialize_model_parallel(backend=backend)
        if os.environ.get("SGLANG_OVERLAY") != "0":
            import sglang.srt.layers.moe.token_dispatcher.deepep_v2 as dispatcher

            if "replaces" not in (dispatcher.__doc__ or "")[:40]:
                raise RuntimeError(
                    f"the overlay is not active: {dispatcher.__file__} is SGLang's own file. "
                    "Run benchmark/deepep_v2/h200_env.sh, or install this repository."
                )
        return {"gpu": self.tools.name(), "versions": _versions(), "pid": os.getpid()}

    def shape(self, hidden: int, intermediate: int, local_experts: int, topk: int) -> dict:
        """Makes the seeded FP8 expert weights of a new shape. Returns a checksum that both sides must share."""
        import torch

        self.paths.clear()
        self.hidden, self.intermediate, self.local_experts, self.topk = hidden, intermediate, local_experts, topk
        self.weights = None
        self.tools.free()
        w13, s13, w2, s2 = [], [], [], []
        for expert in range(self.rank * local_experts, (self.rank + 1) * local_experts):
            for (quantised, scale), into, scales in zip(self._expert(expert), (w13, w2), (s13, s2)):
                into.append(quantised)
                scales.append(scale)
        self.weights = tuple(torch.stack(part) for part in (w13, s13, w2, s2))
        checksum = [float(part.float().abs().sum(dtype=torch.float64)) for part in self.weights[1::2]]
        checksum += [int(part.view(torch.uint8).sum(dtype=torch.int64)) for part in self.weights[::2]]
        return {"checksum": checksum}

    def prepare(self, tokens: int, wanted: list[str]) -> dict:
        """Builds and warms each wanted path at ``tokens`` tokens. Returns path -> error text or None."""
        import torch

        self.tokens = tokens
        self.paths.clear()
        self.tools.free()
        os.environ["SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] = str(tokens)
        generator = torch.Generator(self.device).manual_seed(7000 + self.rank)
        num_experts = self.local_experts * self.world
        self.x = torch.randn(tokens, self.hidden, generator=generator, device=self.device).to(torch.bfloat16)
        scores = torch.rand(tokens, num_experts, generator=generator, device=self.device).softmax(-1)
        weights, ids = torch.topk(scores, self.topk)
        self.topk_weights = (weights / weights.sum(-1, keepdim=True)).float().contiguous()
        self.topk_ids = ids.to(torch.int32).contiguous()
        self.router_logits = torch.zeros(tokens, num_experts, device=self.device)
        self.reference = None
        report = {}
        names = [
            name
            for name in (*LAYER_PATHS[self.side], *(PART_PATHS if self.side == "upstream" else ()))
            if name in wanted
        ]
        for name in names:
            started = time.perf_counter()
            try:
                self.paths[name] = self._build(name)
                with torch.inference_mode():
                    for _ in range(3):
                        self._call(name)
                    self.tools.synchronize()
                report[name] = None
            except Exception:
                self.paths.pop(name, None)
                report[name] = traceback.format_exc(limit=8)
            print(f"[{self.side}{self.rank}] {name} ready in {time.perf_counter() - started:.1f} s", flush=True)
        return {"paths": report, "log": list(dict.fromkeys(self.log_lines))}

    def time(self, path: str, layers: int) -> dict:
        """Mean time of ``layers`` layers run back to back, us per layer."""
        import torch

        if path == "floor":
            return {"us": self._floor()}
        self._enter(path)
        with torch.inference_mode():
            for _ in range(2):
                self._call(path)
            self._align_ranks()
            return {"us": self.tools.mean_us(lambda: self._call(path), layers)}

    def inspect(self, path: str) -> dict:
        """Error, reproducibility, host time and the kernels of one path."""
        import torch

        if path == "floor":
            return {}
        found: dict = {}
        self._enter(path)
        with torch.inference_mode():
            self._align_ranks()
            # A path may return the same buffer every time.
            first = self._call(path).clone()
            second = self._call(path)
            if not path.startswith("deepep_alone"):
                found["bitwise"] = bool(torch.equal(first, second))
                found["error"] = self._error(first)
            found["host_us"] = self._host_us(path)
            self._align_ranks()
            found |= self._profile(path)
        return found

    def host_profile(self, path: str) -> dict:
        """cProfile of some layers: the report's text, and where the host spends its time per layer."""
        import torch

        profile = cProfile.Profile()
        self._enter(path)
        with torch.inference_mode():
            self._align_ranks()
            profile.enable()
            for _ in range(self.traced):
                self._call(path)
            profile.disable()
            self.tools.synchronize()
        text = io.StringIO()
        text.write(f"{path}, {self.tokens} tokens, {self.traced} layers\n")
        for order in ("tottime", "cumulative"):
            pstats.Stats(profile, stream=text).strip_dirs().sort_stats(order).print_stats(30)
        return {"text": text.getvalue()}

    def copy_bandwidth(self, megabytes: int) -> dict:
        """Bandwidth of a large device-to-device copy, bytes read plus bytes written, GB/s."""
        import torch

        source = torch.empty(megabytes << 20, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        target.copy_(source)
        us = statistics.median(self.tools.mean_us(lambda: target.copy_(source), 10) for _ in range(5))
        self.bandwidth = 2 * source.numel() / us / 1e3
        return {"gb_s": self.bandwidth}

    def activation(self) -> dict:
        """Time and bandwidth of the patch's activation kernel alone, by graph replay over rotating inputs."""
        import torch
        from activation import activation_bandwidth

        with torch.inference_mode():
            return activation_bandwidth(self)

    def variant(self, name: str) -> dict:
        """One measurement of ``variants`` on the prepared input."""
        import torch
        from variants import VARIANTS

        self.tools.free()
        with torch.inference_mode():
            return {"rows": VARIANTS[name](self)}

    # -- what the requests are made of -------------------------------------------------------------------------------

    def _expert(self, expert: int):
        """((w13, scale), (w2, scale)) of one global expert: seeded, FP8 in 128x128 blocks."""
        import torch

        generator = torch.Generator(self.device).manual_seed(1000 + expert)
        for rows, columns in ((2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)):
            weight = torch.randn(rows, columns, generator=generator, device=self.device) * columns**-0.5
            blocks = weight.view(rows // 128, 128, columns // 128, 128)
            scale = blocks.abs().amax((1, 3)).clamp_min(1e-4) / 448
            yield (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(rows, columns), scale

    def _build(self, name: str):
        """A callable that runs one layer on the prepared input."""
        if name in LAYER_PATHS[self.side]:
            environment = LAYER_PATHS[self.side][name]
            os.environ.update(environment)
            return _Layer(self, environment)
        from layer_parts import DeepEPAlone, Floor, MegaMoE

        part = {
            "mega_moe": MegaMoE,
            "floor": Floor,
            "deepep_alone": DeepEPAlone,
            "deepep_alone_sync_free": lambda worker: DeepEPAlone(worker, cpu_sync=False),
        }
        return part[name](self)

    def _call(self, name: str):
        return self.paths[name]()

    def _enter(self, name: str) -> None:
        """Sets the path's variables, which a layer may read at construction or at a call."""
        os.environ.update(getattr(self.paths[name], "environment", {}))

    def _floor(self) -> float:
        import torch

        with torch.inference_mode():
            return self.paths["floor"].us()

    def _align_ranks(self) -> None:
        """Starts all ranks together on an idle device."""
        import torch.distributed as dist

        self.tools.synchronize()
        if self.world > 1:
            dist.barrier()
            self.tools.synchronize()

    def _host_us(self, path: str) -> float:
        """Median time until a call returns, the device idle before it; a CPU-synced dispatch waits inside the call."""
        times = []
        for _ in range(self.host_calls):
            self._align_ranks()
            started = time.perf_counter()
            self._call(path)
            times.append(1e6 * (time.perf_counter() - started))
        return statistics.median(times)

    def _error(self, output) -> float:
        """||output - reference|| / ||reference|| over the first tokens, float64, on the same quantised input."""
        import torch

        count = min(REFERENCE_TOKENS, self.tokens)
        if self.reference is None:
            quantised, scale = self.tools.quantise(self.x[:count].contiguous())
            x = (quantised.double().view(count, -1, 128) * scale.double()[:, :, None]).view(count, -1)
            reference = torch.zeros(count, self.hidden, dtype=torch.float64, device=self.device)
            for expert in range(self.local_experts * self.world):
                chosen = self.topk_ids[:count] == expert
                rows = chosen.any(1).nonzero().flatten()
                if rows.numel() == 0:
                    continue
                w13, w2 = (_dequantise(*pair) for pair in self._expert(expert))
                gate, up = (x[rows] @ w13.t()).chunk(2, -1)
                routed = (torch.nn.functional.silu(gate) * up) @ w2.t()
                reference[rows] += routed * (self.topk_weights[:count] * chosen)[rows].sum(1, keepdim=True).double()
            self.reference = reference
        difference = output[:count].double() - self.reference
        return float(difference.norm() / self.reference.norm())

    def _profile(self, path: str) -> dict:
        from profiling import summarise

        layers = range(self.profiled)

        def heat() -> None:
            # Kernels slow down under sustained load, so what the rounds timed is profiled in the same state.
            self._align_ranks()
            for _ in layers:
                self._call(path)

        events = self.tools.trace(lambda: [self._call(path) for _ in layers], heat)
        return summarise(events, self.profiled)

    def _capture_log(self) -> None:
        lines = self.log_lines

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                text = record.getMessage()
                if text.startswith(("DeepEP v2 prefill", "DeepEP v2 buffer")):
                    lines.append(text)

        logger = logging.getLogger("sglang")
        logger.setLevel(logging.INFO)
        logger.addHandler(Handler())


class _Layer:
    """The real FusedMoE on one path; all paths of a worker share one set of weight tensors."""

    def __init__(self, worker: Worker, environment: dict[str, str]):
        import torch
        from sglang.srt.layers.dp_attention import set_is_extend_in_batch
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
        from sglang.srt.layers.moe.topk import StandardTopKOutput
        from sglang.srt.layers.quantization.fp8 import Fp8Config

        set_is_extend_in_batch(True)
        config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
        with worker.device:
            layer = FusedMoE(
                num_experts=worker.local_experts * worker.world,
                hidden_size=worker.hidden,
                intermediate_size=worker.intermediate,
                layer_id=0,
                top_k=worker.topk,
                params_dtype=torch.bfloat16,
                quant_config=config,
            )
        names = ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")
        for name, tensor in zip(names, worker.weights):
            parameter = getattr(layer, name)
            if parameter.shape != tensor.shape or parameter.dtype != tensor.dtype:
                raise RuntimeError(
                    f"{name}: layer has {parameter.shape} {parameter.dtype}, weights {tensor.shape} {tensor.dtype}"
                )
            parameter.data = tensor
        layer.quant_method.process_weights_after_loading(layer)
        self.layer, self.environment = layer, environment
        self.x, self.topk = worker.x, StandardTopKOutput(worker.topk_weights, worker.topk_ids, worker.router_logits)

    def __call__(self):
        return self.layer(self.x, self.topk)


def _dequantise(weight, scale):
    rows, columns = weight.shape
    blocks = weight.double().view(rows // 128, 128, columns // 128, 128)
    return (blocks * scale.double()[:, None, :, None]).view(rows, columns)


def _stand_in_for_deep_ep() -> None:
    """On a CPU, plain SGLang finds the reference transport under DeepEP's name."""
    import types

    with contextlib.suppress(ImportError):
        import deep_ep  # noqa: F401

        return
    from sglang_deepep_v2.cpu_reference.elastic_buffer import ReferenceElasticBuffer

    module = types.ModuleType("deep_ep")
    module.ElasticBuffer = ReferenceElasticBuffer
    sys.modules["deep_ep"] = module


def _versions() -> dict[str, str]:
    names = {
        "sglang": "sglang",
        "torch": "torch",
        "triton": "triton",
        "deep_ep": "sgl-deep-ep",
        "deep_gemm": "sgl-deep-gemm",
    }
    found = {}
    for name, distribution in names.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(distribution)
    for name in ("deep_ep", "deep_gemm", "torch"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version:
            found[name] = str(version)
    with contextlib.suppress(Exception):
        import torch

        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def main() -> None:
    address, side, rank, world, port, config_dir, device = sys.argv[1:8]
    worker = Worker(side, int(rank), int(world), int(port), config_dir, device)
    connection = Client(address, family="AF_UNIX")
    connection.send({"side": side, "rank": int(rank)})
    while True:
        try:
            request = connection.recv()
        except EOFError:
            os._exit(0)
        if request["op"] == "exit":
            connection.send({})
            os._exit(0)
        try:
            reply = getattr(worker, request.pop("op"))(**request)
        except Exception:
            reply = {"error": traceback.format_exc(limit=12)}
        connection.send(reply)


if __name__ == "__main__":
    main()
