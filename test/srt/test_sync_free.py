"""Whether prefill may run without a host sync: the rows and bytes of the worst case, and the limit they are held to."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.moe.token_dispatcher import sync_free

LIMIT = "SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES"


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setattr(sync_free, "_widest_intermediate", 0)
    monkeypatch.setattr(sync_free.dist, "get_world_size", lambda group: 1)
    sync_free._agreed_bytes.cache_clear()
    monkeypatch.delenv(LIMIT, raising=False)
    sync_free.note_intermediate_size(768)
    sync_free.note_intermediate_size(256)
    yield
    sync_free._agreed_bytes.cache_clear()


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
@pytest.mark.parametrize(("hidden", "intermediate"), [(2048, 768), (512, 2048), (4096, 256)])
def test_bytes_are_those_of_the_tensors(fp8, hidden, intermediate):
    """A layer as it runs: what a stage reads is given back once the next stage's input stands."""
    rows = 256
    quantized = torch.float8_e4m3fn if fp8 else torch.bfloat16

    def activations(width):
        scales = [torch.empty(rows, width // 128)] if fp8 else []
        return [torch.empty(rows, width, dtype=quantized), *scales]

    gateup, output = (torch.empty(rows, n, dtype=torch.bfloat16) for n in (2 * intermediate, hidden))
    received, down_input = activations(hidden), activations(intermediate)
    stages = [[*received, gateup], [gateup, *down_input], [*down_input, output]]
    peak = max(sum(t.numel() * t.element_size() for t in [torch.empty(rows), *stage]) for stage in stages)
    assert sync_free.layer_bytes(rows, hidden, intermediate, fp8) == peak


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


@pytest.fixture
def gpu(monkeypatch):
    """A device whose free bytes the test sets, its tensors on the CPU."""
    device = SimpleNamespace(free=0, group=object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(sync_free, "get_available_gpu_memory", lambda kind, number: device.free / (1 << 30))
    monkeypatch.setattr(torch, "tensor", lambda values, device: torch.as_tensor(values))
    return device


def test_without_a_limit_a_share_of_the_free_memory_counts(gpu):
    needed = sync_free.layer_bytes(1024, 2048, 768, True)
    gpu.free = 4 * needed
    assert sync_free.refusal(1024, 2048, True, gpu.group) is None
    gpu.free = 4 * needed - 4
    assert sync_free.refusal(1024, 2048, True, gpu.group) is None, "later layers decide as the first one did"
    refusal = sync_free.refusal(1024, 2048, True, object())
    assert str(needed) in refusal and LIMIT in refusal and "25%" in refusal


@pytest.mark.parametrize("own_limit", [True, False], ids=["limit here", "limit elsewhere"])
def test_every_rank_decides_by_the_rank_that_allows_least(gpu, monkeypatch, own_limit):
    """Also when only one of them sets a limit: every rank enters the collective, before any raises."""
    needed = sync_free.layer_bytes(1024, 2048, 768, True)
    asked = []

    def all_reduce(tensor, op, group):
        asked.append((int(tensor), op, group))
        tensor.clamp_(max=needed - 1)

    gpu.free = 400 * needed
    monkeypatch.setattr(sync_free.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(sync_free.dist, "all_reduce", all_reduce)
    if own_limit:
        monkeypatch.setenv(LIMIT, str(needed - 2))
        with pytest.raises(ValueError, match=f"allows {needed - 2}"):
            sync_free.refusal(1024, 2048, True, gpu.group)
    else:
        assert f"{needed - 1} allowed" in sync_free.refusal(1024, 2048, True, gpu.group)
    assert asked == [(needed - 2 if own_limit else 100 * needed, sync_free.dist.ReduceOp.MIN, gpu.group)]
