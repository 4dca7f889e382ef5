"""Real SGLang MoE layers, for tests: initialise a rank, build a FusedMoE, route tokens, compute the truth.

``rank_processes`` starts the ranks: over the CPU platform and gloo, or on one GPU per rank and NCCL where there are
GPUs. Weights and inputs come from seeds, so any rank can compute what every rank must get.
"""

import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from resolved_args import write_config

BLOCK = 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    """Sizes of one MoE layer; ``experts`` counts all ranks'."""

    experts: int = 8
    hidden: int = 256
    intermediate: int = 256
    topk: int = 2


def initialize(rank, world_size, port, capacity=512):
    """Publish server arguments and start the distributed environment, in the order SGLang's scheduler does."""
    os.environ.setdefault("SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK", str(capacity))
    # A test compiles what it runs, not every row count.
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    on_gpu = DEVICE == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    # One folder for the ranks of all test runs: nobody has to remove it.
    model = Path(tempfile.gettempdir(), f"deepep-v2-test-model-{os.getuid()}")
    args = ServerArgs(
        model_path=str(write_config(model)),
        device=DEVICE,
        tp_size=world_size,
        load_format="dummy",
        moe_a2a_backend="deepep_v2",
        attention_backend="triton" if on_gpu else "torch_native",
        sampling_backend="pytorch",
        chunked_prefill_size=64,
        max_prefill_tokens=64,
    )
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    initialize_moe_config()
    init_distributed_environment(
        world_size=world_size,
        rank=rank,
        local_rank=rank,
        backend="nccl" if on_gpu else "gloo",
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )
    initialize_model_parallel(backend="nccl" if on_gpu else "gloo")


@contextmanager
def variables(**values):
    """Environment variables for the time of a block; None removes one."""
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = str(value)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


PATHS = {
    "nonexpanded": dict(SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND="0"),
    "labels": dict(SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND="1", SGLANG_DEEPEP_V2_ENABLE_PSUM_PIPELINE="0"),
    "psum": dict(SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND="1", SGLANG_DEEPEP_V2_ENABLE_PSUM_PIPELINE="1"),
    "psum_sync_free": dict(
        SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND="1",
        SGLANG_DEEPEP_V2_ENABLE_PSUM_PIPELINE="1",
        SGLANG_DEEPEP_V2_ENABLE_SYNC_FREE_PREFILL="1",
    ),
}


def quantize_blocks(weight):
    """``[experts, n, k]`` fp32 -> float8_e4m3fn of the same shape and ``[experts, n/128, k/128]`` fp32 scales."""
    experts, n, k = weight.shape
    blocks = weight.view(experts, n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    scale = blocks.abs().amax((2, 4)).clamp(min=1e-8) / 448
    return (blocks / scale[:, :, None, :, None]).to(torch.float8_e4m3fn).view_as(weight), scale


def dequantize_blocks(quantized, scale):
    return quantized.double() * scale.double().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)


@dataclass
class Weights:
    """All experts' weights as the layer stores them, and in float64 for the truth."""

    fp8: bool
    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor = None
    w2_scale: torch.Tensor = None

    @classmethod
    def make(cls, shape: Shape, fp8: bool, seed: int = 1):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        w13 = torch.randn(shape.experts, 2 * shape.intermediate, shape.hidden, generator=generator, device=DEVICE) / 8
        w2 = torch.randn(shape.experts, shape.hidden, shape.intermediate, generator=generator, device=DEVICE) / 8
        if not fp8:
            return cls(False, w13.bfloat16(), w2.bfloat16())
        (w13, w13_scale), (w2, w2_scale) = quantize_blocks(w13), quantize_blocks(w2)
        return cls(True, w13, w2, w13_scale, w2_scale)

    def exact(self):
        if not self.fp8:
            return self.w13.double(), self.w2.double()
        return dequantize_blocks(self.w13, self.w13_scale), dequantize_blocks(self.w2, self.w2_scale)


def build_layer(shape: Shape, weights: Weights, rank: int, **runner_options):
    """A real FusedMoE with this rank's experts; the toggles in the environment decide its path."""
    from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    config = None
    if weights.fp8:
        config = Fp8Config(
            is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK]
        )
    with torch.device(DEVICE):
        layer = get_moe_impl_class(config)(
            num_experts=shape.experts,
            top_k=shape.topk,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            layer_id=0,
            params_dtype=torch.bfloat16,
            quant_config=config,
            **runner_options,
        )
    mine = slice(rank * layer.num_local_experts, (rank + 1) * layer.num_local_experts)
    layer.w13_weight.data.copy_(weights.w13[mine])
    layer.w2_weight.data.copy_(weights.w2[mine])
    if weights.fp8:
        layer.w13_weight_scale_inv.data.copy_(weights.w13_scale[mine])
        layer.w2_weight_scale_inv.data.copy_(weights.w2_scale[mine])
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@dataclass
class Batch:
    """Tokens of one rank with their routes."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, tokens: int, seed: int, drop: float = 0.0):
        """``tokens`` random tokens; each route is dropped (-1) with probability ``drop``."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        x = torch.randn(tokens, shape.hidden, generator=generator, device=DEVICE).bfloat16()
        order = torch.rand(tokens, shape.experts, generator=generator, device=DEVICE).argsort(1)[:, : shape.topk]
        weights = torch.rand(tokens, shape.topk, generator=generator, device=DEVICE) + 0.1
        dropped = torch.rand(tokens, shape.topk, generator=generator, device=DEVICE) < drop
        return cls(x, order.masked_fill(dropped, -1).int(), weights)


def forward(layer, batch: Batch, extend: bool = True):
    """One forward of the layer, as the model calls it after top-k."""
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    set_is_extend_in_batch(extend)
    logits = torch.zeros(batch.x.shape[0], layer.num_experts, device=batch.x.device)
    return layer(batch.x.clone(), StandardTopKOutput(batch.weights, batch.ids, logits))


def truth(batch: Batch, weights: Weights) -> torch.Tensor:
    """``[tokens, hidden]`` float64: the dense computation on the stored (dequantised) weights."""
    w13, w2 = weights.exact()
    out = torch.zeros(batch.x.shape, dtype=torch.float64, device=batch.x.device)
    intermediate = w2.shape[2]
    for expert in range(w13.shape[0]):
        token, slot = (batch.ids == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        hidden = batch.x[token].double() @ w13[expert].T
        act = torch.nn.functional.silu(hidden[:, :intermediate]) * hidden[:, intermediate:]
        out.index_add_(0, token, batch.weights[token, slot, None].double() * (act @ w2[expert].T))
    return out


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """``||got - expected|| / ||expected||`` in float64; 0 for two empty or zero tensors."""
    norm = expected.double().norm()
    return ((got.double() - expected.double()).norm() / norm.clamp(min=1e-30)).item() if norm else float(got.norm())
