"""new: Triton kernels of the expanded layout, one row per (token, local expert), rows grouped by expert.

The psum that bounds every kernel here is DeepEP's ``psum_num_recv_tokens_per_expert`` of an expanded dispatch:
``psum[e] = align(psum[e - 1]) + count[e]``, so expert ``e`` owns rows ``[align(psum[e - 1]), psum[e])`` and the rows up
to ``align(psum[e])`` are padding with undefined content. ``kernels_reference`` holds a PyTorch twin of every function
here, with the same signature; CPU tensors run the twin unless ``TRITON_INTERPRET=1`` was set before the import.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from sglang.srt.layers.moe.ep_moe import kernels_reference as reference
from sglang.srt.layers.moe.ep_moe.launch import INTERPRETED, ResolvedLaunch, runs_triton

FP8_MAX = 448.0
QUANT_GROUP = 128
# Scale groups are divided by their largest magnitude; this floor keeps an all-zero group finite.
AMAX_FLOOR = 1e-10

# Rows x 128-column groups of one swiglu tile and its warps: `bench_variants.py --only swiglu_tiles` on an H200.
SWIGLU_BLOCK_M = 8
SWIGLU_GROUPS = 1
SWIGLU_WARPS = 2
# Packed UE8M0 scales hold four groups in one int32, so such a tile is four groups wide.
SWIGLU_UE8M0_GROUPS = 4
SWIGLU_UE8M0_WARPS = 4
# More programs than this loop over tiles, so that a capacity-sized launch does not pay for its empty tail.
SWIGLU_MAX_PROGRAMS = 16384


@triton.jit
def _align_up(value, alignment):
    return (value + alignment - 1) // alignment * alignment


@triton.jit
def _fill_m_indices_kernel(
    psum_ptr,
    labels_ptr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program labels one aligned block: a block never holds rows of two experts.
    first_row = tl.program_id(0).to(tl.int64) * ALIGN
    experts = tl.arange(0, EXPERTS_PAD)
    ends = tl.load(psum_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    passed = (experts < NUM_EXPERTS) & (_align_up(ends, ALIGN) <= first_row)
    owner = tl.sum(passed.to(tl.int32), 0)
    # Blocks behind the last expert exist only in a capacity-sized buffer; DeepGEMM skips label -1.
    label = tl.where(owner < NUM_EXPERTS, owner, -1)
    rows = tl.arange(0, BLOCK)
    tl.store(labels_ptr + first_row + rows, tl.zeros([BLOCK], tl.int32) + label, mask=rows < ALIGN)


@torch.no_grad()
def fill_m_indices_from_psum(
    psum_num_recv_tokens_per_expert: torch.Tensor,
    num_local_experts: int,
    total_rows: int,
    expert_alignment: int,
) -> torch.Tensor:
    """Label every expanded row with its local expert, from the device psum alone.

    Args:
        psum_num_recv_tokens_per_expert: ``[num_local_experts]`` int32, DeepEP's expanded psum.
        num_local_experts: number of experts on this rank.
        total_rows: rows of the expanded buffer, a multiple of ``expert_alignment``.
        expert_alignment: rows to which each expert's segment is rounded up.

    Returns:
        ``[total_rows]`` int32 labels; padding rows carry their segment's expert, rows behind the last expert -1.

    Raises:
        AssertionError: ``total_rows`` is not a multiple of ``expert_alignment``.
    """
    assert total_rows % expert_alignment == 0, (
        f"expert_alignment {expert_alignment} does not divide total_rows {total_rows}"
    )
    psum = psum_num_recv_tokens_per_expert
    assert psum.dtype == torch.int32 and psum.shape == (num_local_experts,) and psum.is_contiguous(), (
        f"psum must be contiguous int32 [{num_local_experts}], got {psum.dtype} {tuple(psum.shape)}"
    )
    if not runs_triton(psum):
        return reference.fill_m_indices_from_psum(psum, num_local_experts, total_rows, expert_alignment)
    labels = torch.empty(total_rows, device=psum.device, dtype=torch.int32)
    if total_rows:
        _fill_m_indices_kernel[(total_rows // expert_alignment,)](
            psum,
            labels,
            NUM_EXPERTS=num_local_experts,
            EXPERTS_PAD=triton.next_power_of_2(num_local_experts),
            ALIGN=expert_alignment,
            BLOCK=triton.next_power_of_2(expert_alignment),
            num_warps=1,
        )
    return labels


@triton.jit
def _scale_rows_kernel(
    x_ptr,
    weight_ptr,
    rows,
    cols,
    stride_row,
    stride_col,
    stride_weight,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    at = x_ptr + row[:, None] * stride_row + col[None, :] * stride_col
    weight = tl.load(weight_ptr + row * stride_weight, mask=row < rows, other=0.0)
    # fp32 product, rounded once to the element type.
    scaled = tl.load(at, mask=mask, other=0.0).to(tl.float32) * weight[:, None]
    tl.store(at, scaled.to(x_ptr.dtype.element_ty), mask=mask)


@torch.no_grad()
def scale_expanded_rows_(x: torch.Tensor, row_weights: torch.Tensor) -> torch.Tensor:
    """Multiply row ``r`` of ``x`` by ``row_weights[r]`` in place, in fp32, whatever the strides.

    Args:
        x: ``[rows, cols]`` fp32 (a scale tensor) or bf16 (a GEMM output, rounded once); row-major, column-major or a
            slice of either. Packed UE8M0 scales are refused: a power of two cannot hold the weight.
        row_weights: ``[rows]`` fp32, the router weight of each expanded row.

    Returns:
        ``x`` itself.

    Raises:
        AssertionError: wrong rank, dtype or number of weights.
    """
    assert x.dim() == 2, f"x must be 2-D, got shape {tuple(x.shape)}"
    assert x.dtype in (torch.float32, torch.bfloat16), f"x must be fp32 or bf16, got {x.dtype}"
    assert row_weights.dtype == torch.float32, f"row_weights must be fp32, got {row_weights.dtype}"
    assert row_weights.dim() == 1, f"row_weights must be 1-D, got shape {tuple(row_weights.shape)}"
    rows, cols = x.shape
    assert row_weights.numel() == rows, f"x has {rows} rows, row_weights {row_weights.numel()}"
    if rows == 0 or cols == 0:
        return x
    if not runs_triton(x):
        return reference.scale_expanded_rows_(x, row_weights)
    # The tile follows the contiguous dimension, so that neighbouring lanes touch neighbouring elements.
    block_m, block_n = (256, 4) if x.stride(0) == 1 else (8, min(512, triton.next_power_of_2(cols)))
    _scale_rows_kernel[(triton.cdiv(rows, block_m), triton.cdiv(cols, block_n))](
        x,
        row_weights,
        rows,
        cols,
        x.stride(0),
        x.stride(1),
        row_weights.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
    )
    return x


@triton.jit
def _ue8m0_exponent(scale):
    # Biased exponent of the smallest power of two that is >= scale.
    bits = scale.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def _swiglu_tile(
    first,
    gateup_ptr,
    out_ptr,
    scale_ptr,
    weight_ptr,
    start,
    end,
    num_rows,
    stride_scale_group,
    limit,
    INTERMEDIATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUPS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    UE8M0: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    KEEP_FP32: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
    FLOOR: tl.constexpr,
):
    # Padding experts of the vector have start == end == 0.
    holds = (end > first) & (start < first + BLOCK_M) & (end > start)
    if tl.sum(holds.to(tl.int32), 0) > 0:
        BLOCK_N: tl.constexpr = GROUPS * 128
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = first.to(tl.int64) + tl.arange(0, BLOCK_M)
        row_mask = row < num_rows
        mask = row_mask[:, None] & (col < INTERMEDIATE)[None, :]
        at = row[:, None] * (2 * INTERMEDIATE) + col[None, :]
        gate = tl.load(gateup_ptr + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gateup_ptr + at + INTERMEDIATE, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + row, mask=row_mask, other=0.0)
        if HAS_LIMIT:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
        y = gate / (1.0 + tl.exp(-gate)) * up
        if QUANTIZE:
            if not KEEP_FP32:
                # SGLang's activation hands bf16 to its quantiser; the same rounding keeps both layouts comparable.
                y = y.to(tl.bfloat16).to(tl.float32)
            if HAS_WEIGHT and UE8M0:
                y = y * weight[:, None]
            y = tl.reshape(y, (BLOCK_M, GROUPS, 128))
            amax = tl.maximum(tl.max(tl.abs(y), 2), FLOOR)
            scale = amax * (1.0 / FP8_LIMIT)
            if UE8M0:
                exponent = _ue8m0_exponent(scale)
                multiplier = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
                # Groups behind the row's end pack as zero lanes, which the GEMM expects.
                exponent = tl.where((group < INTERMEDIATE // 128)[None, :], exponent, 0)
                lane = tl.arange(0, 4)[None, None, :] * 8
                packed = tl.sum(tl.reshape(exponent, (BLOCK_M, GROUPS // 4, 4)) << lane, 2)
                pack = tl.program_id(1) * (GROUPS // 4) + tl.arange(0, GROUPS // 4)
                scale_at = row[:, None] + pack[None, :].to(tl.int64) * stride_scale_group
                scale_mask = row_mask[:, None] & (pack < (INTERMEDIATE + 511) // 512)[None, :]
                tl.store(scale_ptr + scale_at, packed, mask=scale_mask)
            else:
                multiplier = FP8_LIMIT / amax
                if HAS_WEIGHT:
                    # The GEMM multiplies by this scale, so the row leaves it weighted.
                    scale = scale * weight[:, None]
                scale_at = row[:, None] + group[None, :].to(tl.int64) * stride_scale_group
                scale_mask = row_mask[:, None] & (group < INTERMEDIATE // 128)[None, :]
                tl.store(scale_ptr + scale_at, scale, mask=scale_mask)
            y = tl.minimum(tl.maximum(y * multiplier[:, :, None], -FP8_LIMIT), FP8_LIMIT)
            y = tl.reshape(y, (BLOCK_M, BLOCK_N))
        elif HAS_WEIGHT:
            y = y * weight[:, None]
        out_at = out_ptr + row[:, None] * INTERMEDIATE + col[None, :]
        tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "stride_scale_group", "limit"])
def _swiglu_kernel(
    gateup_ptr,
    out_ptr,
    scale_ptr,
    weight_ptr,
    psum_ptr,
    num_rows,
    stride_scale_group,
    limit,
    INTERMEDIATE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUPS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    UE8M0: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    KEEP_FP32: tl.constexpr,
    LOOP: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
    FLOOR: tl.constexpr,
):
    experts = tl.arange(0, EXPERTS_PAD)
    known = experts < NUM_EXPERTS
    end = tl.load(psum_ptr + experts, mask=known, other=0)
    start = _align_up(tl.load(psum_ptr + experts - 1, mask=known & (experts > 0), other=0), ALIGN)
    if LOOP:
        # Rows behind the last expert's end are capacity, not data: no tile there is visited.
        last = tl.minimum(tl.max(end, 0), num_rows)
        for tile in tl.range(tl.program_id(0), tl.cdiv(last, BLOCK_M), tl.num_programs(0), num_stages=1):
            _swiglu_tile(
                tile * BLOCK_M,
                gateup_ptr,
                out_ptr,
                scale_ptr,
                weight_ptr,
                start,
                end,
                num_rows,
                stride_scale_group,
                limit,
                INTERMEDIATE,
                BLOCK_M,
                GROUPS,
                QUANTIZE,
                UE8M0,
                HAS_WEIGHT,
                HAS_LIMIT,
                KEEP_FP32,
                FP8_LIMIT,
                FLOOR,
            )
    else:
        _swiglu_tile(
            tl.program_id(0) * BLOCK_M,
            gateup_ptr,
            out_ptr,
            scale_ptr,
            weight_ptr,
            start,
            end,
            num_rows,
            stride_scale_group,
            limit,
            INTERMEDIATE,
            BLOCK_M,
            GROUPS,
            QUANTIZE,
            UE8M0,
            HAS_WEIGHT,
            HAS_LIMIT,
            KEEP_FP32,
            FP8_LIMIT,
            FLOOR,
        )


_launch_swiglu = ResolvedLaunch(_swiglu_kernel)


def _check_swiglu(gateup, row_weights, psum, multiple):
    assert gateup.dim() == 2 and gateup.is_contiguous(), f"gateup must be 2-D contiguous, got {tuple(gateup.shape)}"
    assert gateup.dtype == torch.bfloat16, f"gateup must be bf16, got {gateup.dtype}"
    rows, width = gateup.shape
    assert width % (2 * multiple) == 0, f"intermediate size {width // 2} is not a multiple of {multiple}"
    assert psum.dtype == torch.int32 and psum.dim() == 1 and psum.is_contiguous(), (
        f"psum must be 1-D int32, got {psum.dtype} {tuple(psum.shape)}"
    )
    if row_weights is not None:
        assert row_weights.dtype == torch.float32 and row_weights.is_contiguous(), "row_weights must be contiguous fp32"
        assert row_weights.shape == (rows,), f"row_weights must be [{rows}], got {tuple(row_weights.shape)}"
    return rows, width // 2


def _run_swiglu(gateup, out, scale, row_weights, psum, alignment, limit, keep_fp32, ue8m0):
    rows, intermediate = out.shape
    num_experts = psum.shape[0]
    # The interpreter pays per program, not per element.
    block_m = triton.next_power_of_2(min(alignment, 128)) if INTERPRETED else SWIGLU_BLOCK_M
    groups, warps = (SWIGLU_UE8M0_GROUPS, SWIGLU_UE8M0_WARPS) if ue8m0 else (SWIGLU_GROUPS, SWIGLU_WARPS)
    if INTERPRETED:
        groups = SWIGLU_UE8M0_GROUPS
    tiles = -(-rows // block_m)
    programs = min(tiles, SWIGLU_MAX_PROGRAMS)
    _launch_swiglu(
        (programs, -(-intermediate // (groups * QUANT_GROUP)), 1),
        (gateup, out, scale, row_weights, psum),
        (rows, 0 if scale is None else scale.stride(1), _bf16_limit(limit)),
        (
            intermediate,
            num_experts,
            triton.next_power_of_2(num_experts),
            alignment,
            block_m,
            groups,
            scale is not None,
            ue8m0,
            row_weights is not None,
            limit is not None,
            keep_fp32,
            tiles > programs,
            FP8_MAX,
            AMAX_FLOOR,
        ),
        warps,
    )


def swiglu_quant_expanded(
    gateup: torch.Tensor,
    row_weights: torch.Tensor | None,
    psum_num_recv_tokens_per_expert: torch.Tensor,
    expert_alignment: int,
    *,
    swiglu_limit: float | None = None,
    keep_fp32: bool = False,
    scale_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU, FP8 1x128 quantisation and router weight in one pass over the expanded rows.

    Args:
        gateup: ``[rows, 2 * intermediate]`` bf16, contiguous: gate columns, then up columns.
        row_weights: ``[rows]`` fp32 router weight per row, or None to leave rows unweighted.
        psum_num_recv_tokens_per_expert: ``[local experts]`` int32, DeepEP's expanded psum.
        expert_alignment: rows to which each expert's segment is rounded up.
        swiglu_limit: upper bound of the gate and bound of the magnitude of up, applied in bf16; None for no bound.
        keep_fp32: quantise the fp32 product; by default it is rounded to bf16 first, as SGLang's activation does.
        scale_ue8m0: write packed power-of-two scales; the weight then enters before the group maximum.

    Returns:
        ``(q, scale)``: q ``[rows, intermediate]`` float8_e4m3fn; scale ``[rows, intermediate / 128]`` fp32 with strides
        ``(1, align(rows, 4))``, or with ``scale_ue8m0`` ``[rows, ceil(intermediate / 512)]`` int32 of four exponents
        each, same strides. Rows of tiles that hold only padding are not written.

    Raises:
        AssertionError: a shape, dtype or layout that the kernel does not take.
    """
    psum = psum_num_recv_tokens_per_expert
    rows, intermediate = _check_swiglu(gateup, row_weights, psum, QUANT_GROUP)
    if not runs_triton(gateup):
        return reference.swiglu_quant_expanded(
            gateup,
            row_weights,
            psum,
            expert_alignment,
            swiglu_limit=swiglu_limit,
            keep_fp32=keep_fp32,
            scale_ue8m0=scale_ue8m0,
        )
    q = torch.empty((rows, intermediate), device=gateup.device, dtype=torch.float8_e4m3fn)
    groups = intermediate // QUANT_GROUP
    scale = torch.empty_strided(
        (rows, -(-groups // 4) if scale_ue8m0 else groups),
        (1, -(-rows // 4) * 4),
        device=gateup.device,
        dtype=torch.int32 if scale_ue8m0 else torch.float32,
    )
    if rows:
        _run_swiglu(gateup, q, scale, row_weights, psum, expert_alignment, swiglu_limit, keep_fp32, scale_ue8m0)
    return q, scale


def swiglu_expanded(
    gateup: torch.Tensor,
    row_weights: torch.Tensor | None,
    psum_num_recv_tokens_per_expert: torch.Tensor,
    expert_alignment: int,
    *,
    swiglu_limit: float | None = None,
) -> torch.Tensor:
    """SwiGLU and router weight of BF16 experts in one pass over the expanded rows.

    Args:
        gateup: ``[rows, 2 * intermediate]`` bf16, contiguous: gate columns, then up columns.
        row_weights: ``[rows]`` fp32 router weight per row, or None to leave rows unweighted.
        psum_num_recv_tokens_per_expert: ``[local experts]`` int32, DeepEP's expanded psum.
        expert_alignment: rows to which each expert's segment is rounded up.
        swiglu_limit: as in :func:`swiglu_quant_expanded`.

    Returns:
        ``[rows, intermediate]`` bf16, rounded once from the weighted fp32 product; tiles of padding are not written.

    Raises:
        AssertionError: a shape, dtype or layout that the kernel does not take.
    """
    psum = psum_num_recv_tokens_per_expert
    rows, intermediate = _check_swiglu(gateup, row_weights, psum, 1)
    if not runs_triton(gateup):
        return reference.swiglu_expanded(gateup, row_weights, psum, expert_alignment, swiglu_limit=swiglu_limit)
    out = torch.empty((rows, intermediate), device=gateup.device, dtype=torch.bfloat16)
    if rows:
        _run_swiglu(gateup, out, None, row_weights, psum, expert_alignment, swiglu_limit, False, False)
    return out


@cache
def _bf16_limit(limit: float | None) -> float:
    """The bound as the bf16 number that clamps bf16 operands; 0 where there is none."""
    return 0.0 if limit is None else float(torch.tensor(limit, dtype=torch.bfloat16))
