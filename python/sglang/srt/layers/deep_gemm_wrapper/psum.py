"""new: grouped GEMMs that take DeepEP's expanded psum as their row layout, with a JIT warm-up of their own.

SGLang's wrapper and its warm-up know row labels only. In the psum layout DeepGEMM reads expert ``e``'s rows as
``[align(psum[e - 1]), psum[e])``, so dispatch's psum goes in as it is and no labelling kernel runs.
"""

import inspect
import logging

import torch
from sglang.srt.distributed.device_communicators.pynccl_allocator import (
    disable_symmetric_memory_context,
    restore_symmetric_memory_context,
)
from sglang.srt.layers.deep_gemm_wrapper import compile_utils
from sglang.srt.layers.deep_gemm_wrapper.configurer import (
    DEEPGEMM_BLACKWELL,
    DEEPGEMM_SCALE_UE8M0,
    ENABLE_JIT_DEEPGEMM,
)
from sglang.srt.utils import get_available_gpu_memory

logger = logging.getLogger(__name__)

deep_gemm = None
if ENABLE_JIT_DEEPGEMM:
    import deep_gemm

# Of the free memory, what warm-up buffers may take; the rest stays for the requests that triggered it.
_WARM_UP_MEMORY_FRACTION = 0.5

# Largest number of expanded rows per launch that a dispatcher announced.
_max_rows = 0
_warmed: set[tuple] = set()


def unsupported_reason(expert_alignment: int) -> str | None:
    """Why the installed DeepGEMM cannot take DeepEP's psum, or None when it can.

    Args:
        expert_alignment: rows to which dispatch rounds each expert's segment; DeepGEMM must round to the same number,
            since it derives every expert's first row from it.
    """
    if deep_gemm is None:
        return "DeepGEMM is not available"
    for name in ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_bf16_gemm_nt_contiguous"):
        function = getattr(deep_gemm, name, None)
        if function is None or "use_psum_layout" not in _keywords(function):
            return f"deep_gemm.{name} has no use_psum_layout"
    if DEEPGEMM_SCALE_UE8M0 and not DEEPGEMM_BLACKWELL:
        return "DeepGEMM's psum layout was not checked on SM120"
    alignment = _row_alignment()
    if alignment != expert_alignment:
        return f"DeepGEMM aligns experts to {alignment} rows, dispatch to {expert_alignment}"
    return None


def check_row_alignment(expert_alignment: int) -> None:
    """Refuse a runtime alignment under which one tile of any layout could hold rows of two experts.

    Raises:
        ValueError: DeepGEMM's alignment does not divide ``expert_alignment``.
    """
    if deep_gemm is not None and expert_alignment % _row_alignment():
        raise ValueError(
            f"DeepGEMM computes tiles of {_row_alignment()} rows, dispatch aligns experts to {expert_alignment}: a "
            f"tile could mix two experts. deep_gemm.set_mk_alignment_for_contiguous_layout({expert_alignment}) fits."
        )


def _keywords(function) -> str:
    """The signature's text; a compiled function states it in its docstring only."""
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return function.__doc__ or ""


def _row_alignment() -> int:
    alignment = deep_gemm.get_mk_alignment_for_contiguous_layout()
    return alignment[0] if isinstance(alignment, tuple) else alignment


def announce_max_rows(rows: int) -> None:
    """Tell the warm-up how many expanded rows one launch may have (not tokens: each token is up to top-k rows)."""
    global _max_rows
    _max_rows = max(_max_rows, rows)


def grouped_gemm_fp8(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    psum: torch.Tensor,
) -> None:
    """``out[r] = dequant(a[r]) @ dequant(b[e]).T`` for the rows ``r`` of each expert ``e``.

    Args:
        a: ``[rows, k]`` float8_e4m3fn, rows grouped by expert.
        a_scale: ``[rows, k / 128]`` fp32, strides ``(1, align(rows, 4))``; or packed UE8M0 int32 ``[rows, k / 512]``.
        b: ``[experts, n, k]`` float8_e4m3fn.
        b_scale: block scales of ``b`` as SGLang loads them.
        out: ``[rows, n]`` bf16, written for valid rows; padding rows get anything.
        psum: ``[experts]`` int32, DeepEP's expanded psum.
    """
    rows = a.shape[0]
    if rows == 0:
        return
    _ensure_warm(b, rows)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), out, psum, use_psum_layout=True)


def grouped_gemm_bf16(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, psum: torch.Tensor) -> None:
    """``out[r] = a[r] @ b[e].T`` for the rows ``r`` of each expert ``e``.

    Args:
        a: ``[rows, k]`` bf16, rows grouped by expert.
        b: ``[experts, n, k]`` bf16.
        out: ``[rows, n]`` bf16, written for valid rows; padding rows get anything.
        psum: ``[experts]`` int32, DeepEP's expanded psum.
    """
    rows = a.shape[0]
    if rows == 0:
        return
    _ensure_warm(b, rows)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, out, psum, use_psum_layout=True)


def warm_up(weight: torch.Tensor) -> None:
    """Compile the GEMM of an expert weight now, while no peer waits inside a dispatch or combine.

    Args:
        weight: ``[experts, n, k]`` float8_e4m3fn or bf16; anything else has no psum GEMM and is passed over.
    """
    if weight.dim() == 3 and weight.dtype in (torch.float8_e4m3fn, torch.bfloat16):
        _ensure_warm(weight, 0)


def _ensure_warm(weight: torch.Tensor, rows: int) -> None:
    """Warm up the GEMM of a weight's shape once; ``rows`` may exceed what was announced."""
    key = (weight.dtype, *weight.shape)
    if key not in _warmed and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        _warmed.add(key)
        # SGLang's own switches: off by SGLANG_JIT_DEEPGEMM_PRECOMPILE=0, and only the node's first rank compiles.
        if compile_utils._ENABLE_JIT_DEEPGEMM_PRECOMPILE and compile_utils._DO_COMPILE_ALL:
            _warm_up(weight, max(rows, _max_rows))


def _warm_up(weight: torch.Tensor, max_rows: int) -> None:
    """Compile the kernels of one GEMM shape for every aligned row count up to ``max_rows``, or as memory allows."""
    experts, n, k = weight.shape
    kind = "FP8" if weight.dtype == torch.float8_e4m3fn else "BF16"
    alignment = _row_alignment()
    row_bytes = (k + k // 32 if kind == "FP8" else 2 * k) + 2 * n
    budget = get_available_gpu_memory("cuda", torch.cuda.current_device()) * (1 << 30) * _WARM_UP_MEMORY_FRACTION
    if not weight.is_cuda:
        budget = max(0, budget - weight.nbytes)
    affordable = int(budget // row_bytes)
    if affordable < max_rows:
        logger.warning(
            "DeepEP v2 psum GEMM warm-up covers %d of %d rows (%s n=%d k=%d): free memory ends it; "
            "larger batches compile on first use.",
            affordable,
            max_rows,
            kind,
            n,
            k,
        )
        max_rows = affordable
    row_counts = range(alignment, max_rows + 1, alignment)
    if not row_counts:
        return
    logger.info("DeepEP v2 psum GEMM warm-up: %s n=%d k=%d experts=%d rows<=%d", kind, n, k, experts, row_counts[-1])
    with compile_utils._local_rank_compile_lock(_LockName(f"PSUM_{kind}"), n, k, experts):
        # One rank compiles alone, so nothing of it may come from memory that ranks allocate together.
        symmetric = disable_symmetric_memory_context()
        try:
            _compile(weight, row_counts)
        finally:
            restore_symmetric_memory_context(symmetric)
            # The buffers are large and never needed again.
            torch.cuda.empty_cache()


class _LockName:
    """What SGLang's compile lock reads of a kernel type."""

    def __init__(self, name: str):
        self.name = name


def _compile(weight: torch.Tensor, row_counts: range) -> None:
    """Launch the GEMM of ``weight`` once for each row count; a psum of zeros makes every launch compute nothing."""
    experts, n, k = weight.shape
    rows = row_counts[-1]
    cuda = {"device": "cuda"}
    if not weight.is_cuda:
        # Offloaded experts are on the GPU within a forward only.
        weight = torch.empty(weight.shape, dtype=weight.dtype, **cuda)
    psum = torch.zeros(experts, dtype=torch.int32, **cuda)
    out = torch.empty(rows, n, dtype=torch.bfloat16, **cuda)
    a = torch.empty(rows, k, dtype=weight.dtype, **cuda)
    if weight.dtype == torch.float8_e4m3fn:
        weight_scale = torch.ones(experts, -(-n // 128), -(-k // 128), **cuda)
    # Largest first: the smaller scales then fit where it lay.
    for count in reversed(row_counts):
        if weight.dtype == torch.bfloat16:
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a[:count], weight, out[:count], psum, use_psum_layout=True)
            continue
        # The scale's row stride depends on the row count, so it is laid out anew for each.
        if DEEPGEMM_SCALE_UE8M0:
            a_scale = torch.zeros(-(-k // 512), -(-count // 4) * 4, dtype=torch.int32, **cuda).t()[:count]
        else:
            a_scale = torch.empty_strided((count, -(-k // 128)), (1, -(-count // 4) * 4), dtype=torch.float32, **cuda)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (a[:count], a_scale), (weight, weight_scale), out[:count], psum, use_psum_layout=True
        )
    torch.cuda.current_stream().synchronize()
