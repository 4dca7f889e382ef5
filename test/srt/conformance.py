"""The dispatch and combine contract as a table of cases that any ElasticBuffer class must pass.

Every rank can generate every rank's inputs from the case and a seed, so expected data never travels. `check`
communicates first and asserts afterwards: a failing case leaves no rank waiting for another.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

Routing = Literal["random", "some_unselected", "none_selected", "one_expert", "one_rank", "counts"]
_SCALE_BLOCK = 128


@dataclass(frozen=True)
class Case:
    """One dispatch and combine.

    tokens: tokens per rank, repeated over the ranks. A rank with 0 sends one dummy token of weight 0 under CPU sync.
    counts: rows per local expert of every rank, for routing "counts"; the tokens of a rank follow from it.
    scales: "fp32" (one per 128 columns), "ue8m0" (four packed in an int32) or None for bf16 activations.
    """

    name: str
    tokens: tuple[int, ...] = (5,)
    routing: Routing = "random"
    counts: tuple[int, ...] = ()
    num_local_experts: int = 4
    num_topk: int = 2
    hidden: int = 512
    alignment: int = 128
    scales: Literal["fp32", "ue8m0"] | None = "fp32"
    col_major: bool = False
    expand: bool = True
    cpu_sync: bool = True
    num_bias: int = 0
    with_weights: bool = True

    @property
    def capacity(self) -> int:
        """Tokens a rank may send: one more than any rank does, so that capacity and tokens are not confused."""
        return max(*self.tokens, sum(self.counts), 1) + 1


@dataclass(frozen=True)
class Inputs:
    """What one rank hands to dispatch and combine: x fp8 or bf16 [tokens, H], sf or None, ids, weights, biases."""

    x: torch.Tensor
    sf: torch.Tensor | None
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    bias: tuple[torch.Tensor, ...]


def cases() -> list[Case]:
    """The table."""
    base = [
        Case("uneven", tokens=(5, 9, 1, 3)),
        Case("some_unselected", tokens=(6, 3), routing="some_unselected"),
        Case("none_selected", tokens=(3,), routing="none_selected"),
        Case("all_to_one_expert", tokens=(7,), routing="one_expert", num_topk=1),
        Case("all_to_one_rank", tokens=(7, 2), routing="one_rank"),
        Case("idle_first_rank", tokens=(0, 4)),
        Case("idle_last_rank", tokens=(4, 0)),
        Case("bf16", tokens=(5, 2), scales=None),
        Case("col_major", tokens=(5, 6), col_major=True),
        Case("col_major_ue8m0", tokens=(5, 6), col_major=True, scales="ue8m0", hidden=1024),
        Case("ue8m0", tokens=(3, 6), scales="ue8m0", hidden=1024),
    ]
    variants = [
        replace(
            case,
            name=f"{case.name}-{'expand' if expand else 'plain'}-{'sync' if sync else 'async'}",
            expand=expand,
            cpu_sync=sync,
        )
        for case in base
        for expand in (True, False)
        for sync in (True, False)
    ]
    edges = (64, 65, 128, 129)
    table = variants + [
        Case("tile_edges-fp8", routing="counts", counts=edges, num_topk=1, col_major=True),
        Case("tile_edges-bf16", routing="counts", counts=edges, num_topk=1, scales=None),
        Case("tile_edges-empty_experts", routing="counts", counts=(0, 128, 0, 1), num_topk=1),
        Case("tile_edges-all_empty_but_last", routing="counts", counts=(0, 0, 0, 3), num_topk=1),
        Case("no_weights-expand", with_weights=False),
        Case("no_weights-plain", with_weights=False, expand=False),
        Case("bias-1", num_bias=1, scales=None),
        Case("bias-2", num_bias=2, tokens=(4, 0, 2)),
        Case("bias-2-plain", num_bias=2, tokens=(4, 2), expand=False),
    ]
    table += [Case(f"alignment-{a}", alignment=a, tokens=(9, 4), num_topk=3) for a in (1, 16, 64)]
    table += [Case(f"topk-{k}", num_topk=k, num_local_experts=8, tokens=(6, 3)) for k in range(1, 9)]
    table += [Case(f"topk-{k}-plain", num_topk=k, num_local_experts=8, expand=False) for k in (1, 4, 8)]
    table += [Case(f"hidden-{h}", hidden=h, col_major=True, tokens=(3, 2)) for h in (256, 2048, 7168)]
    assert len({case.name for case in table}) == len(table)
    return table


def generate(case: Case, rank: int, num_ranks: int) -> Inputs:
    """The inputs of one rank, on CPU; the same numbers on every rank that asks."""
    gen = torch.Generator().manual_seed(zlib.crc32(f"{case.name}/{num_ranks}/{rank}".encode()))
    num_experts = case.num_local_experts * num_ranks
    topk_idx = _route(case, rank, num_experts, gen)
    topk_weights = torch.rand(topk_idx.shape, generator=gen) + 0.1
    if topk_idx.shape[0] == 0 and case.cpu_sync:
        topk_idx = torch.arange(case.num_topk)[None]
        topk_weights = torch.zeros((1, case.num_topk))
    num_tokens = topk_idx.shape[0]
    x = torch.randn((num_tokens, case.hidden), generator=gen).bfloat16()
    sf = None
    if case.scales == "fp32":
        sf = torch.rand((num_tokens, case.hidden // _SCALE_BLOCK), generator=gen) + 0.5
    elif case.scales == "ue8m0":
        packs = -(-case.hidden // (4 * _SCALE_BLOCK))
        sf = torch.randint(120, 135, (num_tokens, packs * 4), generator=gen, dtype=torch.uint8).view(torch.int32)
    if case.col_major and sf is not None:
        # As the quantiser hands them over: strides (1, tokens rounded up to 4).
        lanes = torch.zeros((sf.shape[1], -(-num_tokens // 4) * 4), dtype=sf.dtype)
        lanes[:, :num_tokens] = sf.t()
        sf = lanes.t()[:num_tokens]
    bias = tuple(torch.randn((num_tokens, case.hidden), generator=gen).bfloat16() for _ in range(case.num_bias))
    return Inputs(x if sf is None else x.to(torch.float8_e4m3fn), sf, topk_idx, topk_weights, bias)


def _route(case: Case, rank: int, num_experts: int, gen: torch.Generator) -> torch.Tensor:
    if case.routing == "counts":
        # Rank r sends its tokens to rank r + 1, `counts[e]` of them to that rank's expert e.
        num_ranks = num_experts // case.num_local_experts
        first = (rank + 1) % num_ranks * case.num_local_experts
        ids = torch.repeat_interleave(torch.arange(case.num_local_experts), torch.tensor(case.counts)) + first
        return ids[torch.randperm(ids.numel(), generator=gen)][:, None].contiguous()
    num_tokens = case.tokens[rank % len(case.tokens)]
    pool = {"one_expert": 1, "one_rank": case.num_local_experts}.get(case.routing, num_experts)
    ids = torch.rand((num_tokens, pool), generator=gen).argsort(dim=1)[:, : case.num_topk]
    if case.routing in ("one_expert", "one_rank"):
        ids = ids + num_experts - pool
    if case.routing == "none_selected":
        ids = torch.full_like(ids, -1)
    if case.routing == "some_unselected":
        ids = torch.where(torch.rand(ids.shape, generator=gen) < 0.4, -1, ids)
        ids[:1] = -1
    return ids.contiguous()


def check(buffer_class: type, case: Case, rank: int, group: dist.ProcessGroup, device: str = "cpu", roundings: int = 1):
    """Run one case on this rank and assert everything that this rank can see.

    Arguments:
        buffer_class: deep_ep.ElasticBuffer or a class of its interface.
        roundings: bf16 roundings that combine may make (DeepEP with multiple reduction: 2).
    """
    num_ranks = dist.get_world_size(group)
    sent = [generate(case, source, num_ranks) for source in range(num_ranks)]
    mine = Inputs(*(_to(part, device) for part in vars(sent[rank]).values()))
    buffer = buffer_class(
        group,
        num_max_tokens_per_rank=case.capacity,
        hidden=case.hidden,
        num_topk=case.num_topk,
        use_fp8_dispatch=case.scales is not None,
        allow_hybrid_mode=False,
    )
    stats = torch.ones(case.num_local_experts, dtype=torch.int32, device=device)
    recv_x, recv_topk_idx, recv_weights, handle, event = buffer.dispatch(
        mine.x if mine.sf is None else (mine.x, mine.sf),
        topk_idx=mine.topk_idx,
        topk_weights=mine.topk_weights if case.with_weights else None,
        cumulative_local_expert_recv_stats=stats,
        num_experts=case.num_local_experts * num_ranks,
        num_max_tokens_per_rank=case.capacity,
        expert_alignment=case.alignment,
        do_cpu_sync=case.cpu_sync,
        do_expand=case.expand,
        use_tma_aligned_col_major_sf=case.col_major,
    )
    if event.event is not None:
        event.current_stream_wait()
    recv_x, recv_sf = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    received = _Received(recv_x, recv_sf, recv_topk_idx, recv_weights, handle)
    psum = handle.psum_num_recv_tokens_per_expert.tolist()
    y = _expert_outputs(case, received, psum, rank)
    combined, combined_weights, event = buffer.combine(
        y,
        handle=handle,
        topk_weights=recv_weights,
        bias={0: None, 1: mine.bias[0] if mine.bias else None, 2: mine.bias}[case.num_bias],
    )
    if event.event is not None:
        event.current_stream_wait()

    rows = _expected_rows(case, sent, rank)
    counts = [len([row for row in rows if row.expert == expert]) for expert in range(case.num_local_experts)]
    assert psum == _expected_psum(case, counts)
    assert stats.tolist() == [1 + count for count in counts]
    per_rank = Counter(source for source, _ in {(row.source, row.token) for row in rows})
    per_source = [per_rank[source] for source in range(num_ranks)]
    psum_per_rank = [sum(per_source[: source + 1]) for source in range(num_ranks)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == psum_per_rank
    _check_shapes(case, received, counts, sum(per_source), num_ranks)
    if case.expand:
        _check_expanded(case, received, sent, rows, psum)
    else:
        _check_plain(case, received, sent, rows, psum_per_rank)
    _check_combined(case, sent[rank], num_ranks, combined.cpu(), roundings)
    if case.with_weights:
        ids = sent[rank].topk_idx
        assert torch.equal(combined_weights.cpu(), torch.where(ids >= 0, sent[rank].topk_weights, 0.0))
    else:
        assert recv_weights is None and combined_weights is None


@dataclass(frozen=True)
class _Received:
    x: torch.Tensor
    sf: torch.Tensor | None
    topk_idx: torch.Tensor | None
    weights: torch.Tensor | None
    handle: object


@dataclass(frozen=True)
class _Row:
    source: int
    token: int
    lane: int
    expert: int


def _expected_rows(case: Case, sent: list[Inputs], rank: int) -> list[_Row]:
    first = rank * case.num_local_experts
    return [
        _Row(source, token, lane, expert - first)
        for source, inputs in enumerate(sent)
        for token, ids in enumerate(inputs.topk_idx.tolist())
        for lane, expert in enumerate(ids)
        if first <= expert < first + case.num_local_experts
    ]


def _expected_psum(case: Case, counts: list[int]) -> list[int]:
    psum, end = [], 0
    for count in counts:
        end = _align(end, case.alignment) + count if case.expand else end + _align(count, case.alignment)
        psum.append(end)
    return psum


def _check_shapes(case: Case, received: _Received, counts: list[int], num_recv: int, num_ranks: int) -> None:
    aligned = sum(_align(count, case.alignment) for count in counts)
    worst = num_ranks * case.capacity
    if case.expand:
        slots = worst * min(case.num_topk, case.num_local_experts)
        worst = _align(slots + (case.alignment - 1) * case.num_local_experts, case.alignment)
    rows = (aligned if case.expand else num_recv) if case.cpu_sync else worst
    assert received.x.shape == (rows, case.hidden)
    if case.cpu_sync:
        listed = received.handle.num_recv_tokens_per_expert_list
        assert list(listed) == [_align(count, case.alignment) for count in counts]
    if case.with_weights:
        assert received.weights.shape == ((rows,) if case.expand else (rows, case.num_topk))
    if case.scales is not None:
        packs = case.hidden // _SCALE_BLOCK if case.scales == "fp32" else -(-case.hidden // (4 * _SCALE_BLOCK))
        assert received.sf.shape == (rows, packs)
        if rows > 1 and packs > 1:
            assert received.sf.stride() == ((1, _align(rows, 4)) if case.col_major else (packs, 1))
    if case.expand:
        assert received.topk_idx is None
    else:
        assert received.topk_idx.dtype == torch.int64 and received.topk_idx.shape == (rows, case.num_topk)


def _check_expanded(case: Case, received: _Received, sent: list[Inputs], rows: list[_Row], psum: list[int]) -> None:
    start = 0
    for expert, stop in enumerate(psum):
        got = Counter(
            (_bytes(received.x, i), _bytes(received.sf, i), _bytes(received.weights, i)) for i in range(start, stop)
        )
        want = Counter(
            (
                _bytes(sent[row.source].x, row.token),
                _bytes(sent[row.source].sf, row.token),
                _bytes(sent[row.source].topk_weights[:, row.lane], row.token) if case.with_weights else b"",
            )
            for row in rows
            if row.expert == expert
        )
        assert got == want, f"rows of local expert {expert}: {len(got - want)} not sent, {len(want - got)} missing"
        start = _align(stop, case.alignment)


def _check_plain(case: Case, received: _Received, sent: list[Inputs], rows: list[_Row], ends: list[int]) -> None:
    start = 0
    for source, stop in enumerate(ends):
        inputs = sent[source]
        got = Counter(
            (
                _bytes(received.x, i),
                _bytes(received.sf, i),
                _bytes(received.weights, i),
                tuple(received.topk_idx[i].tolist()),
            )
            for i in range(start, stop)
        )
        local: dict[int, list[int]] = {}
        for row in rows:
            if row.source == source:
                local.setdefault(row.token, [-1] * case.num_topk)[row.lane] = row.expert
        want = Counter(
            (
                _bytes(inputs.x, token),
                _bytes(inputs.sf, token),
                _bytes(inputs.topk_weights, token) if case.with_weights else b"",
                tuple(ids),
            )
            for token, ids in local.items()
        )
        assert got == want, f"rows from rank {source}: {len(got - want)} not sent, {len(want - got)} missing"
        start = stop


def _expert_outputs(case: Case, received: _Received, psum: list[int], rank: int) -> torch.Tensor:
    """bf16 rows for combine: each row times its expert's gain and its weight; padding rows are NaN."""
    y = torch.full(received.x.shape, float("nan"), dtype=torch.bfloat16, device=received.x.device)
    first = rank * case.num_local_experts
    values = _values(received.x, received.sf)
    if case.expand:
        start = 0
        for expert, stop in enumerate(psum):
            weight = received.weights[start:stop, None].double() if case.with_weights else 1.0
            y[start:stop] = (values[start:stop] * (_gain(first + expert) * weight)).bfloat16()
            start = _align(stop, case.alignment)
        return y
    num_recv = int(received.handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    ids = received.topk_idx[:num_recv]
    weights = received.weights[:num_recv].double() if case.with_weights else torch.ones(ids.shape).double()
    factor = torch.where(ids >= 0, _gain(first + ids) * weights.to(ids.device), 0.0).sum(dim=1, keepdim=True)
    y[:num_recv] = (values[:num_recv] * factor).bfloat16()
    return y


def _check_combined(case: Case, inputs: Inputs, num_ranks: int, combined: torch.Tensor, roundings: int) -> None:
    ids = inputs.topk_idx
    weights = inputs.topk_weights.double() if case.with_weights else torch.ones(ids.shape).double()
    factors = torch.where(ids >= 0, _gain(ids) * weights, 0.0)
    values = _values(inputs.x, inputs.sf)
    if not case.expand:
        owner = torch.where(ids >= 0, ids // case.num_local_experts, num_ranks)
        per_rank = torch.zeros((ids.shape[0], num_ranks + 1), dtype=torch.float64)
        factors = per_rank.scatter_add_(1, owner, factors)[:, :num_ranks]
    terms = [(values * factors[:, k, None]).bfloat16().double() for k in range(factors.shape[1])]
    terms += [tensor.double() for tensor in inputs.bias]
    want = sum(terms)
    bound = sum(term.abs() for term in terms) * (roundings * 2.0**-8 + 2.0**-20)
    assert combined.dtype == torch.bfloat16 and combined.shape == want.shape
    worst = ((combined.double() - want).abs() - bound).nan_to_num(nan=float("inf"))
    assert worst.numel() == 0 or worst.max() <= 0, f"combine is off by {worst.max().item()} more than its roundings"


def _values(x: torch.Tensor, sf: torch.Tensor | None) -> torch.Tensor:
    """float64 values of the rows; scales are applied per 128 columns."""
    if sf is None:
        return x.double()
    if sf.dtype == torch.int32:
        exponents = sf.clone(memory_format=torch.contiguous_format).view(torch.uint8)[:, : x.shape[1] // _SCALE_BLOCK]
        sf = torch.exp2(exponents.double() - 127)
    return x.double() * sf.double().repeat_interleave(_SCALE_BLOCK, dim=1)


def _gain(expert):
    return 1.0 + (expert % 5) / 4


def _bytes(tensor: torch.Tensor | None, row: int) -> bytes:
    if tensor is None:
        return b""
    return tensor[row].reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes()


def _to(part, device: str):
    if isinstance(part, tuple):
        return tuple(tensor.to(device) for tensor in part)
    return None if part is None else part.to(device)


def _align(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple
