"""new: plain PyTorch twins of the expanded-layout kernels, same names and signatures.

They define what the Triton kernels must compute, run on CPU tensors in their place, and are written for reading: one
expression per step, whole tensors, no tiling. Rows of padding are computed like any other row.
"""

import torch

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_AMAX_FLOOR = 1e-10
_GROUP = 128


def fill_m_indices_from_psum(
    psum_num_recv_tokens_per_expert: torch.Tensor,
    num_local_experts: int,
    total_rows: int,
    expert_alignment: int,
) -> torch.Tensor:
    """Twin of :func:`kernels.fill_m_indices_from_psum`: ``[total_rows]`` int32 labels, -1 behind the last expert."""
    assert total_rows % expert_alignment == 0, (
        f"expert_alignment {expert_alignment} does not divide total_rows {total_rows}"
    )
    psum = psum_num_recv_tokens_per_expert
    segment_ends = (psum.to(torch.int64) + expert_alignment - 1) // expert_alignment * expert_alignment
    rows = torch.arange(total_rows, device=psum.device)
    labels = torch.searchsorted(segment_ends, rows, right=True).to(torch.int32)
    return labels.masked_fill_(labels == num_local_experts, -1)


def scale_expanded_rows_(x: torch.Tensor, row_weights: torch.Tensor) -> torch.Tensor:
    """Twin of :func:`kernels.scale_expanded_rows_`: ``x[r, :] *= row_weights[r]`` in fp32, in place."""
    return x.copy_(x.float() * row_weights[:, None])


def _tma_aligned(scale: torch.Tensor) -> torch.Tensor:
    """The same values, column-major with columns starting at multiples of four elements."""
    aligned_rows = -(-scale.shape[0] // 4) * 4
    out = torch.empty_strided(scale.shape, (1, aligned_rows), dtype=scale.dtype, device=scale.device)
    return out.copy_(scale)


def quant_tokens(x: torch.Tensor, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Twin of :func:`token_quant.quant_tokens`: ``(q, scale, ids)`` with the same layouts."""
    grouped = x.float().view(x.shape[0], x.shape[1] // _GROUP, _GROUP)
    amax = grouped.abs().amax(-1).clamp(min=_AMAX_FLOOR)
    q = (
        (grouped * (torch.tensor(_FP8_MAX) / amax)[..., None])
        .clamp(-_FP8_MAX, _FP8_MAX)
        .view_as(x)
        .to(torch.float8_e4m3fn)
    )
    return q, _tma_aligned(amax * (1 / _FP8_MAX)), topk_ids.to(torch.int64)


def _swiglu(gateup: torch.Tensor, limit: float | None) -> torch.Tensor:
    gate, up = gateup.float().chunk(2, dim=1)
    if limit is not None:
        # Bounds act in bf16; fmin/fmax drop a NaN operand, as the device's bf16 minimum does.
        bound = torch.tensor(limit, dtype=torch.bfloat16, device=gateup.device).float()
        gate, up = torch.fmin(gate, bound), torch.fmin(torch.fmax(up, -bound), bound)
    return gate / (1 + torch.exp(-gate)) * up


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
    """Twin of :func:`kernels.swiglu_quant_expanded`: ``(q, scale)`` with the same layouts."""
    rows = gateup.shape[0]
    y = _swiglu(gateup, swiglu_limit)
    if not keep_fp32:
        y = y.bfloat16().float()
    weights = None if row_weights is None else row_weights[:, None]
    if weights is not None and scale_ue8m0:
        y = y * weights
    grouped = y.view(rows, y.shape[1] // _GROUP, _GROUP)
    amax = grouped.abs().amax(-1).clamp(min=_AMAX_FLOOR)
    scale = amax * (1 / _FP8_MAX)
    if scale_ue8m0:
        bits = scale.view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
        multiplier = ((254 - exponent) << 23).to(torch.int32).view(torch.float32)
        packs = -(-exponent.shape[1] // 4)
        lanes = torch.zeros(rows, packs * 4, dtype=torch.int32, device=gateup.device)
        lanes[:, : exponent.shape[1]] = exponent
        shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=gateup.device)
        scale = (lanes.view(rows, packs, 4) << shifts).sum(-1, dtype=torch.int32)
    else:
        multiplier = torch.tensor(_FP8_MAX) / amax
        if weights is not None:
            scale = scale * weights
    q = (grouped * multiplier[..., None]).clamp(-_FP8_MAX, _FP8_MAX).view_as(y).to(torch.float8_e4m3fn)
    return q, _tma_aligned(scale)


def swiglu_expanded(
    gateup: torch.Tensor,
    row_weights: torch.Tensor | None,
    psum_num_recv_tokens_per_expert: torch.Tensor,
    expert_alignment: int,
    *,
    swiglu_limit: float | None = None,
) -> torch.Tensor:
    """Twin of :func:`kernels.swiglu_expanded`: ``[rows, intermediate]`` bf16, rounded once."""
    y = _swiglu(gateup, swiglu_limit)
    if row_weights is not None:
        y = y * row_weights[:, None]
    return y.bfloat16()
