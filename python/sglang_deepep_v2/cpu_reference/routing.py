"""What `ReferenceElasticBuffer` is made of: argument checks, the header exchange, row exchange, the handle."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from sglang_deepep_v2.cpu_reference.elastic_buffer import ReferenceElasticBuffer

# Limits compiled into deep_ep 2.1.0's kernels.
MAX_TOPK = 32
MAX_EXPERTS = 2048
MAX_LOCAL_EXPERTS = 256


def align(value: int, multiple: int) -> int:
    """Round `value` up to a multiple of `multiple`."""
    return (value + multiple - 1) // multiple * multiple


@dataclass(eq=False)
class ReferenceHandle:
    """What `combine` needs to bring rows back; field names and shapes as in `deep_ep`'s EPHandle.

    `psum_num_recv_tokens_per_expert` is int32 [local experts]. Expanded: psum[i] = align(psum[i-1]) + count_i.
    Not expanded: the inclusive sum of aligned counts. `psum_num_recv_tokens_per_scaleup_rank` is int32 [ranks],
    the inclusive sum of tokens received from each rank. `recv_src_metadata` is int32 [received tokens, 2 + top-k]:
    source token (rank x capacity + token), source rank x top-k + first local selection, then the expanded row of
    each selection or -1.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor | None
    recv_src_metadata: torch.Tensor
    # The reference's own: rows of the dispatch, the exchange to undo, and the buffer that made the handle.
    num_rows: int
    sent_tokens: torch.Tensor
    send_counts: list[int]
    recv_counts: list[int]
    buffer_id: int
    combined: bool = False


class ReferenceEvent:
    """The event that dispatch and combine return: the work is done, so waiting is free."""

    event = None

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Return at once."""


@dataclass(frozen=True)
class Header:
    """What the ranks of one call tell each other first. All but `tokens` must be equal everywhere."""

    tokens: int = 0
    capacity: int = 0
    num_experts: int = 0
    num_topk: int = 0
    hidden: int = 0
    element_size: int = 0
    num_sf_packs: int = 0
    with_weights: int = 0
    do_expand: int = 0
    do_cpu_sync: int = 0


def exchange_headers(
    group: dist.ProcessGroup, device: torch.device, header: Header, send_counts: list[int], problem: ValueError | None
) -> list[int]:
    """Swap headers and row counts with every rank; raise the same error everywhere. Returns rows per source rank."""
    num_ranks = dist.get_world_size(group)
    own = [int(problem is not None), *astuple(header)]
    sent = torch.tensor([[*own, count] for count in send_counts], dtype=torch.int64, device=device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    if problem is not None:
        raise problem
    rows = received.tolist()
    for rank in range(num_ranks):
        if rows[rank][0]:
            raise ValueError(f"rank {rank} of the group refused its arguments of this call; see its error")
    names = [f.name for f in fields(Header)]
    for rank in range(num_ranks):
        for name, mine, theirs in zip(names, own[1:], rows[rank][1:-1]):
            if name != "tokens" and mine != theirs:
                label = "num_max_tokens_per_rank" if name == "capacity" else name
                raise ValueError(
                    f"{label} must be the same on every rank: rank {dist.get_rank(group)} has {mine}, "
                    f"rank {rank} has {theirs}"
                )
        if header.do_cpu_sync and rows[rank][1] == 0:
            raise ValueError(
                f"rank {rank} dispatches 0 tokens with do_cpu_sync=True, which DeepEP would wait for without end: "
                "an idle rank sends one dummy token of weight 0"
            )
    return [row[-1] for row in rows]


def all_to_all_rows(
    rows: torch.Tensor, send_counts: list[int], recv_counts: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Exchange rows: the first `send_counts[0]` go to rank 0, and so on. Any dtype; only bytes are moved."""
    # Indexing may leave stride 0 on an empty tensor, which has no byte view.
    rows = rows.contiguous() if rows.numel() else rows.new_empty(rows.shape)
    received = torch.empty((sum(recv_counts), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    # Every backend moves bytes; not every backend knows fp8 or bf16.
    dist.all_to_all_single(received.view(torch.uint8), rows.view(torch.uint8), recv_counts, send_counts, group=group)
    return received


def filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: str) -> torch.Tensor:
    """A tensor of zeros, or of what uninitialised memory may hold at worst: NaN, all ones, the largest id."""
    if fill == "zeros":
        return torch.zeros(shape, dtype=dtype, device=device)
    if fill != "nan":
        raise ValueError(f"padding_fill is 'zeros' or 'nan', got {fill!r}")
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)
    if dtype == torch.int32:
        # As UE8M0 every byte is 0xFF, which is NaN.
        return torch.full(shape, -1, dtype=dtype, device=device)
    value = torch.iinfo(dtype).max if not dtype.is_floating_point else float("nan")
    return torch.full(shape, value, dtype=dtype, device=device)


def check_dispatch_arguments(
    buffer: ReferenceElasticBuffer,
    *,
    x: torch.Tensor,
    sf: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    stats: torch.Tensor | None,
    num_experts: int | None,
    capacity: int,
    alignment: int,
    num_sms: int,
    handle: ReferenceHandle | None,
    do_expand: bool,
    do_zero_padding: bool,
) -> ValueError | None:
    """Return what is wrong with a dispatch, or None. Nothing is raised, so that the other ranks can be told."""
    try:
        _check_call(buffer, topk_idx, num_experts, capacity, alignment, num_sms, handle, do_expand, do_zero_padding)
        _check_activations(buffer, x, sf, capacity)
        _check_routing(buffer, x, topk_idx, topk_weights, num_experts)
        num_local_experts = num_experts // buffer.num_ranks
        if stats is not None and (stats.dtype != torch.int32 or tuple(stats.shape) != (num_local_experts,)):
            raise ValueError(
                f"cumulative_local_expert_recv_stats must be int32 ({num_local_experts},), "
                f"got {stats.dtype} {tuple(stats.shape)}"
            )
    except ValueError as exc:
        return exc
    return None


def _check_call(buffer, topk_idx, num_experts, capacity, alignment, num_sms, handle, do_expand, do_zero_padding):
    if handle is not None:
        raise ValueError("the reference transport does not take a cached handle in dispatch; pass topk_idx")
    if topk_idx is None or num_experts is None:
        raise ValueError("dispatch needs topk_idx and num_experts")
    if num_experts <= 0 or num_experts % buffer.num_ranks != 0:
        raise ValueError(f"num_experts={num_experts} is not a multiple of the group's {buffer.num_ranks} ranks")
    if num_experts > MAX_EXPERTS or num_experts // buffer.num_ranks > MAX_LOCAL_EXPERTS:
        raise ValueError(
            f"num_experts={num_experts} on {buffer.num_ranks} ranks exceeds DeepEP's {MAX_EXPERTS} experts or "
            f"{MAX_LOCAL_EXPERTS} per rank"
        )
    if capacity <= 0:
        raise ValueError(f"num_max_tokens_per_rank={capacity} must be positive")
    if buffer._capacity is not None and capacity != buffer._capacity:
        raise ValueError(
            f"num_max_tokens_per_rank={capacity} differs from this buffer's {buffer._capacity}; it is one number "
            "for every rank and every call"
        )
    if alignment <= 0:
        raise ValueError(f"expert_alignment={alignment} must be positive")
    if num_sms < 0:
        raise ValueError(f"num_sms={num_sms} must be 0 (DeepEP's own choice) or positive")
    if do_zero_padding and not do_expand:
        raise ValueError("do_zero_padding applies to do_expand=True only")


def _check_activations(buffer, x, sf, capacity):
    want = torch.bfloat16 if sf is None else torch.float8_e4m3fn
    if x.dim() != 2 or x.dtype != want or not x.is_contiguous():
        raise ValueError(
            f"x must be contiguous {want} [tokens, hidden]{'' if sf is None else ' when scales come with it'}, "
            f"got {x.dtype} {tuple(x.shape)} stride {x.stride()}"
        )
    num_tokens, hidden = x.shape
    if hidden % 256 != 0:
        raise ValueError(f"hidden={hidden} is not a multiple of 256, which DeepEP's combine requires")
    if buffer.hidden and hidden > buffer.hidden:
        raise ValueError(f"hidden={hidden} exceeds the {buffer.hidden} this buffer was built for")
    if num_tokens > capacity:
        raise ValueError(
            f"{num_tokens} tokens exceed num_max_tokens_per_rank={capacity}; raise "
            "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK or lower the prefill or decode batch limit"
        )
    if sf is not None and (sf.dim() != 2 or sf.shape[0] != num_tokens or sf.element_size() != 4):
        raise ValueError(
            f"scales must be [tokens={num_tokens}, packs] of 4 bytes (fp32, or int32 packing four UE8M0), "
            f"got {sf.dtype} {tuple(sf.shape)}"
        )


def _check_routing(buffer, x, topk_idx, topk_weights, num_experts):
    num_tokens = x.shape[0]
    if topk_idx.dim() != 2 or topk_idx.shape[0] != num_tokens:
        raise ValueError(f"topk_idx must be [tokens={num_tokens}, top-k], got {tuple(topk_idx.shape)}")
    limit = buffer.num_topk or MAX_TOPK
    if not 1 <= topk_idx.shape[1] <= limit:
        raise ValueError(f"top-k {topk_idx.shape[1]} is outside 1..{limit} of this buffer (DeepEP: at most {MAX_TOPK})")
    if topk_idx.dtype != torch.int64 or not topk_idx.is_contiguous():
        raise ValueError(f"topk_idx must be contiguous int64, got {topk_idx.dtype} stride {topk_idx.stride()}")
    if topk_weights is not None:
        if tuple(topk_weights.shape) != tuple(topk_idx.shape):
            raise ValueError(
                f"topk_weights {tuple(topk_weights.shape)} and topk_idx {tuple(topk_idx.shape)} differ in shape"
            )
        if topk_weights.dtype != torch.float32 or not topk_weights.is_contiguous():
            raise ValueError(
                f"topk_weights must be contiguous fp32, got {topk_weights.dtype} stride {topk_weights.stride()}"
            )
    bad = ((topk_idx < -1) | (topk_idx >= num_experts)).nonzero()
    if bad.numel():
        token, lane = bad[0].tolist()
        raise ValueError(f"topk_idx[{token}, {lane}] = {topk_idx[token, lane].item()} is outside -1..{num_experts - 1}")
    ids = topk_idx.sort(dim=1).values
    twice = ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).nonzero()
    if twice.numel():
        token, lane = twice[0].tolist()
        raise ValueError(f"token {token} names expert {ids[token, lane].item()} twice; DeepEP takes an expert once")
