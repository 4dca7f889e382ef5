"""Whether prefill may run without a host sync: the rows and bytes of the worst case, and the limit they are held to."""

import pytest
import torch
from sglang.srt.layers.moe.token_dispatcher import sync_free

LIMIT = "SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES"


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setattr(sync_free, "_widest_intermediate", 0)
    monkeypatch.setattr(sync_free, "_free_bytes", None)
    monkeypatch.delenv(LIMIT, raising=False)
    sync_free.note_intermediate_size(768)
    sync_free.note_intermediate_size(256)


@pytest.mark.parametrize(
    ("ranks", "capacity", "topk", "local_experts", "rows"),
    [
        (1, 128, 8, 16, 1024 + 16 * 128),
        # A token sends a rank one row per local expert at most.
        (8, 4096, 8, 2, 8 * 4096 * 2 + 2 * 128),
        (2, 1, 1, 1, 2 * 128),
    ],
)
def test_capacity_rows_hold_the_worst_routing(ranks, capacity, topk, local_experts, rows):
    got = sync_free.capacity_rows(ranks, capacity, topk, local_experts, 128)
    assert got % 128 == 0
    # Every expert that gets rows wastes up to 127 of them, and no routing needs a block more than this.
    needed = ranks * capacity * min(topk, local_experts)
    assert needed + local_experts * 127 <= got <= rows


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_bytes_are_those_of_the_tensors(fp8):
    rows, hidden, intermediate = 256, 512, 768
    x = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
    activation = torch.empty(rows, intermediate, dtype=x.dtype)
    tensors = [
        x,
        activation,
        torch.empty(rows),
        torch.empty(rows, 2 * intermediate, dtype=torch.bfloat16),
        torch.empty(rows, hidden, dtype=torch.bfloat16),
    ]
    if fp8:
        tensors += [torch.empty(rows, hidden // 128), torch.empty(rows, intermediate // 128)]
    total = sum(t.numel() * t.element_size() for t in tensors)
    assert sync_free.layer_bytes(rows, hidden, intermediate, fp8) == total


def test_a_limit_that_is_too_small_is_an_error(monkeypatch):
    needed = sync_free.layer_bytes(1024, 2048, 768, True)
    monkeypatch.setenv(LIMIT, str(needed))
    assert sync_free.refusal(1024, 2048, True, None) is None
    monkeypatch.setenv(LIMIT, str(needed - 1))
    with pytest.raises(ValueError, match=rf"needs {needed} bytes .*1024 rows.* allows {needed - 1}") as refused:
        sync_free.refusal(1024, 2048, True, None)
    assert LIMIT in str(refused.value) and "intermediate 768" in str(refused.value)
    monkeypatch.setenv(LIMIT, "0")
    with pytest.raises(ValueError, match="allows 0"):
        sync_free.refusal(128, 256, False, None)


def test_without_a_limit_a_share_of_the_free_memory_counts(monkeypatch):
    needed = sync_free.layer_bytes(1024, 2048, 768, True)
    free = {"bytes": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sync_free, "_least_free_bytes", lambda group: free["bytes"])
    free["bytes"] = 4 * needed
    assert sync_free.refusal(1024, 2048, True, None) is None
    free["bytes"] = 4 * needed - 4
    assert sync_free.refusal(1024, 2048, True, None) is None, "later layers decide as the first one did"
    monkeypatch.setattr(sync_free, "_free_bytes", None)
    refusal = sync_free.refusal(1024, 2048, True, None)
    assert str(needed) in refusal and LIMIT in refusal and "25%" in refusal


def test_every_rank_decides_by_the_rank_with_least_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 41))
    monkeypatch.setattr(torch, "tensor", lambda values, device: torch.as_tensor(values))
    asked = []

    def all_reduce(tensor, op, group):
        asked.append((op, group))
        tensor.clamp_(max=1 << 30)

    monkeypatch.setattr(sync_free.dist, "get_world_size", lambda group: {"one": 1, "two": 2}[group])
    monkeypatch.setattr(sync_free.dist, "all_reduce", all_reduce)
    assert sync_free._least_free_bytes("one") == 1 << 40 and not asked
    assert sync_free._least_free_bytes("two") == 1 << 30
    assert asked == [(sync_free.dist.ReduceOp.MIN, "two")]
