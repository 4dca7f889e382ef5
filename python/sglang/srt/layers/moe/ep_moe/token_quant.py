"""new: the tokens of an expanded dispatch: FP8 1x128 quantisation with column-major scales, and int64 expert ids.

Its twin is ``kernels_reference.quant_tokens``; ``kernels`` says when it runs.
"""

import torch
import triton
import triton.language as tl
from sglang.srt.layers.moe.ep_moe import kernels_reference as reference
from sglang.srt.layers.moe.ep_moe.kernels import AMAX_FLOOR, FP8_MAX, QUANT_GROUP
from sglang.srt.layers.moe.ep_moe.launch import ResolvedLaunch, runs_triton

# Rows x 128-column groups of one tile, and its warps: not swept, the kernel takes 1 % of a layer.
BLOCK_M = 4
GROUPS = 8
WARPS = 4


@triton.jit(do_not_specialize=["num_tokens", "stride_scale_group"])
def _quant_tokens_kernel(
    x_ptr,
    ids_ptr,
    q_ptr,
    scale_ptr,
    ids_out_ptr,
    num_tokens,
    stride_scale_group,
    HIDDEN: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDEN_IDS: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
    FLOOR: tl.constexpr,
):
    BLOCK_N: tl.constexpr = GROUPS * 128
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    row_mask = row < num_tokens
    mask = row_mask[:, None] & (col < HIDDEN)[None, :]
    at = row[:, None] * HIDDEN + col[None, :]
    x = tl.reshape(tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32), (BLOCK_M, GROUPS, 128))
    amax = tl.maximum(tl.max(tl.abs(x), 2), FLOOR)
    scale_at = row[:, None] + group[None, :].to(tl.int64) * stride_scale_group
    scale_mask = row_mask[:, None] & (group < HIDDEN // 128)[None, :]
    tl.store(scale_ptr + scale_at, amax * (1.0 / FP8_LIMIT), mask=scale_mask)
    x = tl.minimum(tl.maximum(x * (FP8_LIMIT / amax)[:, :, None], -FP8_LIMIT), FP8_LIMIT)
    tl.store(q_ptr + at, tl.reshape(x, (BLOCK_M, BLOCK_N)).to(q_ptr.dtype.element_ty), mask=mask)
    if WIDEN_IDS:
        if tl.program_id(1) == 0:
            slot = tl.arange(0, TOPK_PAD)
            id_at = row[:, None] * TOPK + slot[None, :]
            id_mask = row_mask[:, None] & (slot < TOPK)[None, :]
            ids = tl.load(ids_ptr + id_at, mask=id_mask, other=0)
            tl.store(ids_out_ptr + id_at, ids.to(tl.int64), mask=id_mask)


_launch_quant_tokens = ResolvedLaunch(_quant_tokens_kernel)


def quant_tokens(x: torch.Tensor, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What an expanded dispatch sends, in one pass: FP8 tokens, column-major scales, expert ids as DeepEP takes them.

    Args:
        x: ``[tokens, hidden]`` bf16, contiguous.
        topk_ids: ``[tokens, topk]`` int32 or int64, contiguous.

    Returns:
        ``(q, scale, ids)``: q ``[tokens, hidden]`` float8_e4m3fn; scale ``[tokens, hidden / 128]`` fp32 with strides
        ``(1, align(tokens, 4))``, equal to SGLang's own quantiser; ids int64, ``topk_ids`` itself where it is already.

    Raises:
        AssertionError: a shape, dtype or layout that the kernel does not take.
    """
    assert x.dtype == torch.bfloat16 and x.is_contiguous(), f"x must be contiguous bf16, got {x.dtype} {x.stride()}"
    assert topk_ids.is_contiguous(), f"topk_ids must be contiguous, got strides {topk_ids.stride()}"
    tokens, hidden = x.shape
    assert topk_ids.dtype in (torch.int32, torch.int64), f"topk_ids must be int32 or int64, got {topk_ids.dtype}"
    assert topk_ids.dim() == 2 and topk_ids.shape[0] == tokens, f"{tokens} tokens, ids of {tuple(topk_ids.shape)}"
    assert hidden % QUANT_GROUP == 0, f"hidden size {hidden} is not a multiple of {QUANT_GROUP}"
    if not runs_triton(x):
        return reference.quant_tokens(x, topk_ids)
    q = torch.empty((tokens, hidden), device=x.device, dtype=torch.float8_e4m3fn)
    stride = -(-tokens // 4) * 4
    scale = torch.empty_strided((tokens, hidden // QUANT_GROUP), (1, stride), device=x.device, dtype=torch.float32)
    widen = topk_ids.dtype != torch.int64
    ids = torch.empty_like(topk_ids, dtype=torch.int64) if widen else topk_ids
    if tokens:
        topk = topk_ids.shape[1]
        _launch_quant_tokens(
            (-(-tokens // BLOCK_M), -(-hidden // (GROUPS * QUANT_GROUP)), 1),
            (x, topk_ids, q, scale, ids),
            (tokens, stride),
            (hidden, topk, triton.next_power_of_2(topk), BLOCK_M, GROUPS, widen, FP8_MAX, AMAX_FLOOR),
            WARPS,
        )
    return q, scale, ids
