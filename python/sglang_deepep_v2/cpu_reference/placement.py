"""Where the rows of a dispatch go: grouped by expert with aligned regions, or in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_deepep_v2.cpu_reference.routing import align


@dataclass(frozen=True)
class Placement:
    """The rows of one rank's receive; a copy is a received token's row, one per local expert when expanded.

    Attributes:
        counts: int64 [local experts], rows of each expert.
        aligned: int64 [local experts], the same rounded up to the alignment.
        psum: int64 [local experts]. Expanded: where each expert's rows end. Else: inclusive sum of `aligned`.
        num_recv_tokens: rows of a receive that is not expanded.
        num_expanded: rows of an expanded one.
        num_rows: whichever of the two this receive has.
        token: int64 [copies], the received token of each copy.
        lane: int64 [copies], which of the token's selections made it; None if not expanded.
        row: int64 [copies], where it goes.
        slots: int64 [received tokens, top-k], the expanded row of each selection or -1.
        source_of_row: int64 [num_rows], the received token of each row, or -1 for padding.
        padding: int64, the rows of padding.
    """

    counts: torch.Tensor
    aligned: torch.Tensor
    psum: torch.Tensor
    num_recv_tokens: int
    num_expanded: int
    num_rows: int
    token: torch.Tensor
    lane: torch.Tensor | None
    row: torch.Tensor
    slots: torch.Tensor
    source_of_row: torch.Tensor
    padding: torch.Tensor


def place_rows(
    local_ids: torch.Tensor, num_local_experts: int, alignment: int, expand: bool, max_tokens: int | None
) -> Placement:
    """Place the rows of a receive.

    Arguments:
        local_ids: int64 [received tokens, top-k], local expert ids; -1 selects none here.
        num_local_experts: experts on this rank.
        alignment: rows that each expert's region is rounded up to.
        expand: one row per (token, local expert), grouped by expert; else one row per token.
        max_tokens: most tokens that could arrive, where the rows are to be the worst case; None: rows that arrived.
    """
    num_recv, num_topk = local_ids.shape
    device = local_ids.device
    counts = torch.bincount(local_ids[local_ids >= 0], minlength=num_local_experts)
    aligned = (counts + alignment - 1) // alignment * alignment
    if max_tokens is None:
        num_recv_tokens, num_expanded = num_recv, int(aligned.sum())
    else:
        num_recv_tokens = max_tokens
        num_expanded = max_tokens * min(num_topk, num_local_experts)
        num_expanded = align(num_expanded + (alignment - 1) * num_local_experts, alignment)

    slots = torch.full((num_recv, num_topk), -1, dtype=torch.int64, device=device)
    if expand:
        starts = aligned.cumsum(0) - aligned
        psum = starts + counts
        token, lane = (local_ids >= 0).nonzero(as_tuple=True)
        expert = local_ids[token, lane]
        order = torch.argsort(expert, stable=True)
        token, lane, expert = token[order], lane[order], expert[order]
        nth_of_expert = torch.arange(expert.numel(), device=device) - (counts.cumsum(0) - counts)[expert]
        row = starts[expert] + nth_of_expert
        slots[token, lane] = row
        num_rows = num_expanded
    else:
        psum = aligned.cumsum(0)
        lane, num_rows = None, num_recv_tokens
        row = token = torch.arange(num_recv, device=device)
    source_of_row = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    source_of_row[row] = token
    padding = (source_of_row < 0).nonzero().flatten()
    return Placement(
        counts, aligned, psum, num_recv_tokens, num_expanded, num_rows, token, lane, row, slots, source_of_row, padding
    )


def gather_rows(rows: torch.Tensor, placement: Placement, fill: torch.Tensor) -> torch.Tensor:
    """Each row's received token out of `rows`; padding rows get the one row `fill` (same bytes per row as `rows`)."""
    fill = fill.view(rows.dtype)
    if rows.shape[0] == 0:
        return fill.repeat(placement.num_rows, 1)
    out = rows.index_select(0, placement.source_of_row.clamp(min=0))
    out[placement.padding] = fill
    return out


def tma_aligned_column_major(scales: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
    """`scales` with strides (1, rows rounded up to 4); the lanes past the last row are padding too."""
    num_rows = scales.shape[0]
    lanes = fill.t().repeat(1, align(num_rows, 4))
    lanes[:, :num_rows] = scales.t()
    return lanes.t()[:num_rows]
