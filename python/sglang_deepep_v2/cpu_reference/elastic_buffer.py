"""`ReferenceElasticBuffer`: the contract of `deep_ep.ElasticBuffer` over `torch.distributed`.

It runs wherever the process group does (gloo on CPU, NCCL on GPUs) and serves as DeepEP's stand-in on a
machine without GPUs and as an oracle beside it. Layouts, preconditions and handle fields are those of deep_ep
2.1.0; three choices are its own:

* rows arrive in a fixed order (source rank, then source token), so results are bitwise reproducible;
* combine sums in fp32 and rounds to bf16 once, whatever `allow_multiple_reduction` says;
* a wrong argument on one rank raises on every rank instead of leaving the others in a collective.

Counts are read on the host in both `do_cpu_sync` modes, so a CUDA graph cannot capture it.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from sglang_deepep_v2.cpu_reference.placement import gather_rows, place_rows, tma_aligned_column_major
from sglang_deepep_v2.cpu_reference.routing import (
    Header,
    ReferenceEvent,
    ReferenceHandle,
    all_to_all_rows,
    check_dispatch_arguments,
    exchange_headers,
    filled,
)

PaddingFill = Literal["zeros", "nan"]

# Rows per step of the local reduction on CPU: the fp32 accumulator of a step stays in cache (L2, H = 2048).
_REDUCE_ROWS = 256


class ReferenceElasticBuffer:
    """Expert-parallel dispatch and combine with the interface of `deep_ep.ElasticBuffer`.

    Arguments:
        group: the expert-parallel process group.
        num_bytes: accepted for compatibility; the reference keeps no communication memory.
        num_max_tokens_per_rank: most tokens one rank may dispatch. Required unless `num_bytes` is given.
        hidden: largest hidden size, in elements. Required unless `num_bytes` is given; a multiple of 256.
        num_topk: largest top-k (0: not limited beyond DeepEP's 32).
        allow_multiple_reduction: kept for its one visible effect: with False, an expanded combine takes no weights.
        explicitly_destroy: `destroy()` is allowed only with True.
        The remaining arguments tune DeepEP's transport; they are accepted and change nothing here.

    Attributes:
        padding_fill: what padding rows, scales and weights hold: 'zeros' or 'nan' (DeepEP leaves them
            uninitialised; 'nan' finds code that reads them). Set it on the class or on an instance.
        num_bytes: communication memory held between calls, in bytes (0 unless given).

    Raises:
        ValueError: an argument that DeepEP cannot serve.
    """

    padding_fill: PaddingFill = "zeros"

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ):
        if num_bytes is None and (num_max_tokens_per_rank <= 0 or hidden <= 0):
            raise ValueError(
                f"num_max_tokens_per_rank={num_max_tokens_per_rank} and hidden={hidden} must both be positive "
                "when num_bytes is not given"
            )
        if hidden % 256 != 0:
            raise ValueError(f"hidden={hidden} is not a multiple of 256, which DeepEP's combine requires")
        if not 0 <= num_topk <= 32:
            raise ValueError(f"num_topk={num_topk} is outside 0..32, DeepEP's limit of selections per token")

        self.group = group
        self.rank_idx = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.hidden = hidden
        self.num_topk = num_topk
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_bytes = num_bytes or 0
        self.use_fp8_dispatch = use_fp8_dispatch
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.explicitly_destroy = explicitly_destroy
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self._capacity = num_max_tokens_per_rank or None
        self._destroyed = False

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return (scale-out ranks, scale-up ranks): the reference treats the group as one scale-up domain."""
        return 1, self.num_ranks

    def destroy(self) -> None:
        """Refuse further calls. Needs `explicitly_destroy=True`, as in DeepEP; a second call does nothing."""
        if not self.explicitly_destroy:
            raise RuntimeError("destroy() needs a buffer that was built with explicitly_destroy=True")
        self._destroyed = True

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: ReferenceEvent | None = None,
        previous_event_before_epilogue: ReferenceEvent | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: ReferenceHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[
        torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        torch.Tensor | None,
        torch.Tensor | None,
        ReferenceHandle,
        ReferenceEvent,
    ]:
        """Send every token to the ranks of its experts. Collective over the group.

        Arguments:
            x: bf16 [tokens, hidden], or (fp8 e4m3 [tokens, hidden], scales [tokens, packs]) with scales of four
                bytes each (fp32, or int32 that packs four UE8M0) in any strides; scales are only moved.
            topk_idx: int64 [tokens, top-k], contiguous; -1 selects nothing. A token names an expert once.
            topk_weights: fp32 [tokens, top-k], contiguous, or None. Moved, never multiplied.
            cumulative_local_expert_recv_stats: int32 [local experts]; the received counts are added to it.
            num_max_tokens_per_rank: capacity, the same on every rank and in every call. Default: the constructor's.
            expert_alignment: rows that each expert's region is rounded up to. Default 1.
            do_cpu_sync: True (default): rows are what arrived. False: rows are the worst case.
            do_expand: True: one row per (token, local expert), grouped by expert. False: one row per token.
            do_zero_padding: zero the gaps between experts (expanded only), whatever `padding_fill` says.
            use_tma_aligned_col_major_sf: received scales get strides (1, rows rounded up to 4).

        Returns:
            recv_x: like `x`, [rows, hidden] with scales [rows, packs].
            recv_topk_idx: None if expanded; else int64 [rows, top-k] of local expert ids, -1 for other ranks' experts.
            recv_topk_weights: None without weights; fp32 [rows] if expanded; else fp32 [rows, top-k], as sent.
            handle: for `combine`, once.
            event: complete already; its `event` is None.

        Raises:
            ValueError: an argument that DeepEP cannot serve, on this or on another rank.
            RuntimeError: inside a CUDA graph capture, or after `destroy()`.
        """
        self._check_usable(x[0] if isinstance(x, tuple) else x)
        x, sf = x if isinstance(x, tuple) else (x, None)
        capacity = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        alignment = 1 if expert_alignment is None else expert_alignment
        cpu_sync = True if do_cpu_sync is None else do_cpu_sync

        problem = check_dispatch_arguments(
            self,
            x=x,
            sf=sf,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            stats=cumulative_local_expert_recv_stats,
            num_experts=num_experts,
            capacity=capacity,
            alignment=alignment,
            num_sms=num_sms,
            handle=handle,
            do_expand=do_expand,
            do_zero_padding=do_zero_padding,
        )
        if problem is None:
            num_local_experts = num_experts // self.num_ranks
            routes = _routes(topk_idx, num_local_experts, self.num_ranks)
            send_counts = routes.sum(dim=1).tolist()
        else:
            send_counts = [0] * self.num_ranks
        header = Header(
            tokens=x.shape[0] if x.dim() else 0,
            capacity=capacity,
            num_experts=num_experts or 0,
            num_topk=topk_idx.shape[-1] if topk_idx is not None and topk_idx.dim() else 0,
            hidden=x.shape[-1] if x.dim() else 0,
            element_size=x.element_size(),
            num_sf_packs=0 if sf is None else sf.shape[-1],
            with_weights=int(topk_weights is not None),
            do_expand=int(do_expand),
            do_cpu_sync=int(cpu_sync),
        )
        recv_counts = exchange_headers(self.group, x.device, header, send_counts, problem)
        self._capacity = capacity

        # Rows leave in (destination rank, token) order and arrive in (source rank, token) order.
        dst_rank, sent_tokens = routes.nonzero(as_tuple=True)
        payload = x.view(torch.int64)
        recv_rows = all_to_all_rows(payload.index_select(0, sent_tokens), send_counts, recv_counts, self.group)
        meta = _pack_metadata(topk_idx, topk_weights, sf, self.rank_idx * capacity)
        meta = all_to_all_rows(meta.index_select(0, sent_tokens), send_counts, recv_counts, self.group)
        global_ids, weights, sf_rows, src_token = _unpack_metadata(meta, topk_idx, topk_weights, sf)
        first_expert = self.rank_idx * num_local_experts
        is_local = (global_ids >= first_expert) & (global_ids < first_expert + num_local_experts)
        local_ids = torch.where(is_local, global_ids - first_expert, -1)

        max_tokens = None if cpu_sync else self.num_ranks * capacity
        placement = place_rows(local_ids, num_local_experts, alignment, do_expand, max_tokens)
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats += placement.counts.to(torch.int32)
        recv_x, recv_sf, recv_topk_idx, recv_topk_weights = self._lay_out(
            placement, recv_rows, x.dtype, sf_rows, local_ids, weights, use_tma_aligned_col_major_sf
        )
        if do_zero_padding:
            gaps = placement.padding[placement.padding < int(placement.aligned.sum())]
            for tensor in (recv_x, recv_sf, recv_topk_weights):
                if tensor is not None:
                    (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor)[gaps] = 0

        master_lane = is_local.to(torch.int8).argmax(dim=1)
        src_lane = src_token // capacity * topk_idx.shape[1] + master_lane
        metadata = torch.cat([src_token[:, None], src_lane[:, None], placement.slots], dim=1)
        recv_per_rank = torch.tensor(recv_counts, dtype=torch.int32, device=x.device)
        out_handle = ReferenceHandle(
            do_expand=do_expand,
            num_experts=num_experts,
            expert_alignment=alignment,
            num_max_tokens_per_rank=capacity,
            num_sms=num_sms,
            topk_idx=topk_idx.clone() if do_handle_copy else topk_idx,
            num_recv_tokens=placement.num_recv_tokens,
            num_expanded_tokens=placement.num_expanded,
            num_recv_tokens_per_expert_list=placement.aligned.tolist() if cpu_sync else [],
            psum_num_recv_tokens_per_scaleup_rank=recv_per_rank.cumsum(0).to(torch.int32),
            psum_num_recv_tokens_per_expert=placement.psum.to(torch.int32),
            num_unaligned_recv_tokens_per_expert=placement.counts.to(torch.int32) if do_expand else None,
            recv_src_metadata=metadata.to(torch.int32),
            num_rows=placement.num_rows,
            sent_tokens=sent_tokens,
            send_counts=send_counts,
            recv_counts=recv_counts,
            buffer_id=id(self),
        )
        return (
            recv_x if sf is None else (recv_x, recv_sf),
            recv_topk_idx,
            recv_topk_weights,
            out_handle,
            ReferenceEvent(),
        )

    def _lay_out(self, placement, rows, dtype, scales, local_ids, weights, column_major):
        """Received rows (int64 words of `dtype`), scales, ids (not expanded) and weights in place, padding filled."""
        expanded, fill = placement.lane is not None, self.padding_fill

        def gather(received):
            one_row = filled((1, received.shape[1]), received.dtype, received.device, fill)
            return gather_rows(received, placement, one_row), one_row

        hidden = rows.shape[1] * rows.element_size() // dtype.itemsize
        recv_x = gather_rows(rows, placement, filled((1, hidden), dtype, rows.device, fill)).view(dtype)
        recv_sf = recv_topk_idx = recv_topk_weights = None
        if scales is not None:
            recv_sf, sf_fill = gather(scales)
            if column_major:
                recv_sf = tma_aligned_column_major(recv_sf, sf_fill)
        if not expanded:
            recv_topk_idx, _ = gather(local_ids)
        if weights is not None and expanded:
            recv_topk_weights = filled((placement.num_rows,), torch.float32, weights.device, fill)
            recv_topk_weights[placement.row] = weights[placement.token, placement.lane]
        elif weights is not None:
            recv_topk_weights, _ = gather(weights)
        return recv_x, recv_sf, recv_topk_idx, recv_topk_weights

    def combine(
        self,
        x: torch.Tensor,
        handle: ReferenceHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: ReferenceEvent | None = None,
        previous_event_before_epilogue: ReferenceEvent | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, ReferenceEvent]:
        """Bring rows back to the ranks they came from and add up each token's rows. Collective over the group.

        Arguments:
            x: bf16 [rows, hidden], contiguous, with the rows of the dispatch that made `handle`. Padding rows
                are not read.
            handle: from `dispatch` of this buffer; used up by this call.
            topk_weights: fp32, [rows] if expanded, [rows, top-k] if not. Moved back, never multiplied.
            bias: up to two bf16 [tokens, hidden], added before the one rounding to bf16.

        Returns:
            combined_x: bf16 [tokens, hidden]; zeros (plus bias) for a token without selections.
            combined_topk_weights: fp32 [tokens, top-k], or None without `topk_weights`.
            event: complete already.

        Raises:
            ValueError: an argument that DeepEP cannot serve, on this or on another rank.
            RuntimeError: inside a CUDA graph capture, or after `destroy()`.
        """
        self._check_usable(x)
        biases = bias if isinstance(bias, tuple) else (bias,)
        problem = self._check_combine_arguments(x, handle, topk_weights, biases)
        header = Header(hidden=x.shape[-1] if x.dim() else 0, with_weights=int(topk_weights is not None))
        exchange_headers(self.group, x.device, header, [0] * self.num_ranks, problem)
        handle.combined = True

        num_tokens, num_topk = handle.topk_idx.shape
        slots = handle.recv_src_metadata[:, 2:].to(torch.int64)
        partial = _sum_local_rows(x, slots) if handle.do_expand else x[: slots.shape[0]]
        returned = all_to_all_rows(partial, handle.recv_counts, handle.send_counts, self.group)

        total = torch.zeros((num_tokens, x.shape[1]), dtype=torch.float32, device=x.device)
        offset = 0
        for count in handle.send_counts:
            # A rank returns a token at most once, so this add has no colliding rows and one fixed order.
            part = slice(offset, offset + count)
            total.index_add_(0, handle.sent_tokens[part], returned[part].float())
            offset += count
        for tensor in biases:
            if tensor is not None:
                total += tensor.float()

        combined_weights = None
        if topk_weights is not None:
            if handle.do_expand:
                sent_back = torch.where(slots >= 0, topk_weights[slots.clamp(min=0)], 0.0)
            else:
                sent_back = topk_weights[: slots.shape[0]]
            sent_back = all_to_all_rows(sent_back, handle.recv_counts, handle.send_counts, self.group)
            combined_weights = self._pick_weights(sent_back, handle)
        return total.to(x.dtype), combined_weights, ReferenceEvent()

    def _pick_weights(self, sent_back: torch.Tensor, handle: ReferenceHandle) -> torch.Tensor:
        """Weight of selection k of a token, as returned by the rank that owns the selected expert."""
        num_tokens, num_topk = handle.topk_idx.shape
        by_rank = sent_back.new_zeros((self.num_ranks, num_tokens, num_topk))
        counts = torch.tensor(handle.send_counts, device=sent_back.device)
        rank = torch.repeat_interleave(torch.arange(self.num_ranks, device=sent_back.device), counts)
        by_rank[rank, handle.sent_tokens] = sent_back
        owner = handle.topk_idx // (handle.num_experts // self.num_ranks)
        picked = by_rank.gather(0, owner.clamp(min=0)[None])[0]
        return torch.where(owner >= 0, picked, 0.0)

    def _check_combine_arguments(self, x, handle, topk_weights, biases) -> ValueError | None:
        if not isinstance(handle, ReferenceHandle) or handle.buffer_id != id(self):
            return ValueError("the handle was not made by this buffer's dispatch")
        if handle.combined:
            return ValueError("the handle was combined already; a handle serves one combine")
        if x.dim() != 2 or x.dtype != torch.bfloat16 or not x.is_contiguous():
            return ValueError(
                f"combine takes contiguous bf16 [rows, hidden], got {x.dtype} {tuple(x.shape)} stride {x.stride()}"
            )
        if x.shape[0] != handle.num_rows:
            return ValueError(f"combine got {x.shape[0]} rows, the dispatch of this handle made {handle.num_rows}")
        if x.shape[1] % 256 != 0:
            return ValueError(f"hidden={x.shape[1]} is not a multiple of 256, which DeepEP's combine requires")
        num_tokens, num_topk = handle.topk_idx.shape
        if topk_weights is not None:
            if handle.do_expand and not self.allow_multiple_reduction:
                return ValueError("an expanded combine takes no topk_weights with allow_multiple_reduction=False")
            want = (handle.num_rows,) if handle.do_expand else (handle.num_rows, num_topk)
            if topk_weights.dtype != torch.float32 or tuple(topk_weights.shape) != want:
                return ValueError(
                    f"combine topk_weights must be fp32 {want}, got {topk_weights.dtype} {tuple(topk_weights.shape)}"
                )
        if len(biases) > 2:
            return ValueError(f"combine adds at most two bias tensors, got {len(biases)}")
        for tensor in biases:
            if tensor is None:
                continue
            if tensor.dtype != x.dtype or tuple(tensor.shape) != (num_tokens, x.shape[1]):
                return ValueError(
                    f"bias must be {x.dtype} {(num_tokens, x.shape[1])}, got {tensor.dtype} {tuple(tensor.shape)}"
                )
        return None

    def _check_usable(self, x: torch.Tensor) -> None:
        if self._destroyed:
            raise RuntimeError("this ReferenceElasticBuffer was destroyed")
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the reference transport reads counts on the host and cannot be captured in a CUDA graph: pass "
                "--disable-cuda-graph, or unset SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT to use DeepEP"
            )


def _routes(topk_idx: torch.Tensor, num_local_experts: int, num_ranks: int) -> torch.Tensor:
    """bool [ranks, tokens]: whether a token has an expert on a rank."""
    rank = torch.where(topk_idx >= 0, topk_idx // num_local_experts, num_ranks)
    member = torch.zeros((topk_idx.shape[0], num_ranks + 1), dtype=torch.bool, device=topk_idx.device)
    return member.scatter_(1, rank, True)[:, :num_ranks].t()


def _pack_metadata(topk_idx, topk_weights, sf, first_token: int) -> torch.Tensor:
    """int32 [tokens, 1 + top-k (+ top-k) (+ packs)]: token number, expert ids, weight bits, scale bits."""
    token = torch.arange(topk_idx.shape[0], device=topk_idx.device, dtype=torch.int32) + first_token
    parts = [token[:, None], topk_idx.to(torch.int32)]
    if topk_weights is not None:
        parts.append(topk_weights.view(torch.int32))
    if sf is not None:
        parts.append(sf.contiguous().view(torch.int32))
    return torch.cat(parts, dim=1)


def _unpack_metadata(meta, topk_idx, topk_weights, sf):
    """Undo `_pack_metadata`: (global ids int64, weights or None, scales or None, source token int64)."""
    num_topk = topk_idx.shape[1]
    src_token, ids, end = meta[:, 0].to(torch.int64), meta[:, 1 : 1 + num_topk].to(torch.int64), 1 + num_topk
    weights = scales = None
    if topk_weights is not None:
        weights = meta[:, end : end + num_topk].contiguous().view(torch.float32)
        end += num_topk
    if sf is not None:
        scales = meta[:, end:].contiguous().view(sf.dtype)
    return ids, weights, scales, src_token


def _sum_local_rows(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """fp32 [tokens, hidden]: each received token's expert rows, added in the order of its selections."""
    num_tokens, num_topk = slots.shape
    total = torch.zeros((num_tokens, x.shape[1]), dtype=torch.float32, device=x.device)
    step = num_tokens if x.is_cuda else _REDUCE_ROWS
    for first in range(0, num_tokens, max(step, 1)):
        part, acc = slots[first : first + step], total[first : first + step]
        for k in range(num_topk):
            token = (part[:, k] >= 0).nonzero().flatten()
            if token.numel():
                acc.index_add_(0, token, x.index_select(0, part[token, k]).float())
    return total
