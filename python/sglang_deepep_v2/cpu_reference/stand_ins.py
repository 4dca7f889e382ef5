"""What takes the place of GPU-only code when SGLang runs on the CPU reference platform.

Each stand-in is a function of this file whose docstring says why it is needed. Functions are replaced where they
are defined and in every module that imported them already: the plugin runs after the scheduler process has
imported the MoE layers. A stand-in that does not fit the installed SGLang ends the process, since SGLang logs a
failing plugin and would go on with half of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType

import torch

logger = logging.getLogger(__name__)

_FP8_MAX = 448.0
_AMAX_FLOOR = 1e-10


def register() -> None:
    """Entry point of `sglang.srt.plugins`: install the stand-ins on the CPU reference platform, nothing elsewhere.

    Raises:
        SystemExit: a module of the patch came from SGLang instead, or a stand-in does not fit the installed SGLang.
    """
    from sglang_deepep_v2 import overlay
    from sglang_deepep_v2.cpu_reference import is_selected

    # SGLang calls entry points also where no .pth file was processed, and only logs what derives from Exception.
    try:
        overlay.check_in_charge()
    except overlay.OverlayError as error:
        raise SystemExit(str(error)) from error
    if not is_selected():
        return
    for stand_in in _STAND_INS:
        try:
            stand_in()
        except Exception as exc:
            logger.exception("CPU reference: stand-in %s failed", stand_in.__name__)
            raise SystemExit(
                f"CPU reference: the stand-in {stand_in.__name__} does not fit this SGLang ({exc!r}); "
                "`sglang-deepep-v2 status` tells which versions were verified"
            ) from exc
    names = ", ".join(stand_in.__name__ for stand_in in _STAND_INS)
    logger.info("CPU reference: %d stand-ins installed: %s", len(_STAND_INS), names)
    if not _interpreted():
        logger.warning(
            "CPU reference: SGLang's Triton kernels (non-expanded prefill, decode) cannot run; set TRITON_INTERPRET=1"
        )


def grouped_gemms() -> None:
    """DeepGEMM has no CPU build: its grouped GEMMs become `grouped_gemm`, under SGLang's own wrappers."""
    from sglang_deepep_v2.cpu_reference import grouped_gemm

    entrypoint = _module("sglang.srt.layers.deep_gemm_wrapper.entrypoint")
    entrypoint.deep_gemm = grouped_gemm
    # The wrappers would first compile every kernel of a shape.
    compile_utils = _module("sglang.srt.layers.deep_gemm_wrapper.compile_utils")
    _require(compile_utils, "_ENABLE_JIT_DEEPGEMM_PRECOMPILE")
    compile_utils._ENABLE_JIT_DEEPGEMM_PRECOMPILE = False
    # The wrapper of the masked GEMM moves CPU tensors to a GPU.
    _replace(entrypoint, "_ensure_cuda", lambda pair: pair)
    # SGLang defines this name only beside an importable deep_gemm, and calls it through the package.
    for name in ("entrypoint", None):
        module = "sglang.srt.layers.deep_gemm_wrapper" + (f".{name}" if name else "")
        _module(module).get_mn_major_tma_aligned_tensor = grouped_gemm.get_mn_major_tma_aligned_tensor
    # Part of the patch tree, so absent when plain SGLang runs (SGLANG_OVERLAY=0).
    psum = "sglang.srt.layers.deep_gemm_wrapper.psum"
    if importlib.util.find_spec(psum) is not None:
        _module(psum).deep_gemm = grouped_gemm


def fp8_quantization() -> None:
    """SGLang's FP8 quantisers are CUDA kernels, compiled at run time or from sgl_kernel."""
    module = _module("sglang.kernels.ops.quantization.per_token_group_quant")
    _replace(module, "per_token_group_quant", per_token_group_quant)
    fp8_kernel = _module("sglang.kernels.ops.quantization.fp8_kernel")
    # fp8_kernel imports both names on CUDA only.
    fp8_kernel.per_token_group_quant = per_token_group_quant
    fp8_kernel.sgl_per_token_quant_fp8 = per_token_quant


def activation() -> None:
    """The DeepGEMM runner's SwiGLU comes from sgl_kernel and is None on a build without CUDA."""
    runner = _module("sglang.srt.layers.moe.moe_runner.deep_gemm")
    _require(runner, "_legacy_silu_and_mul")
    runner._legacy_silu_and_mul = silu_and_mul


def bf16_experts_on_the_runner() -> None:
    """On an out-of-tree platform SGLang sends BF16 experts to its plain loop; deepep_v2 needs the runner's path."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    _require(UnquantizedFusedMoEMethod, "forward_cuda")
    _require(UnquantizedFusedMoEMethod, "forward_native")

    def forward(self, layer, dispatch_output):
        on_runner = self.runner.runner_backend.is_deep_gemm()
        return (self.forward_cuda if on_runner else self.forward_native)(layer, dispatch_output)

    BaseFusedOp.register_oot_forward(UnquantizedFusedMoEMethod, forward, "native")


def torch_native_attention() -> None:
    """torch-native attention lacks a padding length (an a2a backend pads every batch) and the `sinks` argument."""
    module = _module("sglang.srt.layers.attention.torch_native_backend")
    backend = _require(module, "TorchNativeAttnBackend")
    backend.get_cpu_graph_seq_len_fill_value = lambda self: 1
    for name in ("forward_extend", "forward_decode"):
        setattr(backend, name, _without_sinks(_require(backend, name)))


def host_tensors() -> None:
    """SGLang asks whether it is its own CPU engine before it avoids pinned memory and CUDA-only collectives."""
    for name in ("sglang.srt.model_executor.forward_batch_info", "sglang.srt.distributed.parallel_state"):
        module = _module(name)
        _require(module, "_is_cpu")
        module._is_cpu = True


def stream_capture_query() -> None:
    """The masked-slab kernels ask at every call whether a CUDA graph is captured; a CPU build of torch raises."""
    if not torch.cuda.is_available():
        torch.cuda.is_current_stream_capturing = lambda: False


def interpreted_kernels() -> None:
    """Triton's interpreter truncates casts and loops over Python ints; SGLang's kernels rely on what GPUs do."""
    if _interpreted():
        from sglang_deepep_v2.cpu_reference import triton_casts, triton_loops

        triton_casts.install()
        triton_loops.install()


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


_STAND_INS: tuple[Callable[[], None], ...] = (
    grouped_gemms,
    fp8_quantization,
    activation,
    bf16_experts_on_the_runner,
    torch_native_attention,
    host_tensors,
    stream_capture_query,
    interpreted_kernels,
)


def per_token_group_quant(
    input: torch.Tensor,
    output_q: torch.Tensor | None = None,
    output_s: torch.Tensor | None = None,
    group_size: int = 128,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: torch.Tensor | None = None,
    expected_m: int | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    sorted_token_ids: torch.Tensor | None = None,
    num_tokens_post_padded: torch.Tensor | None = None,
    num_valid_tokens: int = 0,
    silu_and_mul_mode: str = "legacy",
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and fp32 scales per group of `group_size` columns, with the signature of SGLang's kernel.

    Arguments:
        input: bf16 or fp16 [tokens, hidden], or [experts, rows, hidden] with `masked_m` int32 [experts]; twice as
            wide (gate, then up) with `fuse_silu_and_mul`.
        output_q, output_s: written when given; rows past `masked_m` are left alone.

    Raises:
        NotImplementedError: UE8M0 scales, int8 output or the sorted layout, which no CPU path asks for.
    """
    if scale_ue8m0 or sorted_token_ids is not None or out_dtype not in (None, torch.float8_e4m3fn):
        raise NotImplementedError("the CPU reference quantises to FP8 with fp32 scales in the flat and masked layouts")
    if output_q is None:
        hidden = input.shape[-1] // (2 if fuse_silu_and_mul else 1)
        output_q = torch.empty((*input.shape[:-1], hidden), dtype=torch.float8_e4m3fn, device=input.device)
        output_s = _empty_scales((*input.shape[:-1], hidden // group_size), column_major_scales, input.device)
    counts = None if masked_m is None else masked_m.tolist()
    parts = [...] if counts is None else [(expert, slice(0, count)) for expert, count in enumerate(counts)]
    for part in parts:
        rows = input[part]
        if fuse_silu_and_mul:
            # The kernel's default rounds SiLU before the product; its dense mode rounds the product only.
            rows = silu_and_mul(rows) if silu_and_mul_mode == "dense" else _silu_and_mul_early_rounding(rows)
        values, scales = _quantize(rows, group_size)
        output_q[part].copy_(values)
        output_s[part].copy_(scales)
    return output_q, output_s


def per_token_quant(input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor) -> None:
    """FP8 values [tokens, hidden] and one fp32 scale per token [tokens, 1], written in place."""
    values, scales = _quantize(input, input.shape[-1])
    output_q.copy_(values)
    output_s.copy_(scales)


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """SwiGLU of [..., 2 x N] (gate, then up) in fp32, rounded once to the input's dtype."""
    gate, up = input.float().chunk(2, dim=-1)
    result = (torch.nn.functional.silu(gate) * up).to(input.dtype)
    return result if out is None else out.copy_(result)


def _silu_and_mul_early_rounding(input: torch.Tensor) -> torch.Tensor:
    gate, up = input.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.float()).to(input.dtype) * up


def _quantize(rows: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    groups = rows.float().unflatten(-1, (-1, group_size))
    amax = groups.abs().amax(dim=-1).clamp(min=_AMAX_FLOOR)
    values = (groups * (torch.tensor(_FP8_MAX) / amax)[..., None]).clamp(-_FP8_MAX, _FP8_MAX)
    return values.flatten(-2).to(torch.float8_e4m3fn), amax * (1.0 / _FP8_MAX)


def _empty_scales(shape: tuple[int, ...], column_major: bool, device: torch.device) -> torch.Tensor:
    if not column_major:
        return torch.empty(shape, dtype=torch.float32, device=device)
    *outer, rows, packs = shape
    lanes = (rows + 3) // 4 * 4
    return torch.empty((*outer, packs, lanes), dtype=torch.float32, device=device).transpose(-1, -2)[..., :rows, :]


def _without_sinks(forward: Callable) -> Callable:
    def wrapped(self, *args, sinks=None, **kwargs):
        if sinks is not None:
            raise NotImplementedError("torch-native attention has no attention sinks")
        return forward(self, *args, **kwargs)

    return wrapped


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


def _require(owner: object, name: str):
    """The attribute; AttributeError where SGLang has renamed it, so that no stand-in is set beside its target."""
    return getattr(owner, name)


def _replace(owner: ModuleType, name: str, new: Callable) -> None:
    """Rebind a function in its module and in every SGLang module that holds it under any name."""
    old = _require(owner, name)
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.startswith("sglang"):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)
