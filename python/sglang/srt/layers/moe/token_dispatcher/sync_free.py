"""new: decides whether prefill may run without a host sync, by the bytes that capacity-sized buffers need.

Without a host sync nobody on the host knows how many rows arrive, so every buffer of a layer is sized for the worst
case: ``rows = ranks * capacity * min(topk, local experts)``, plus alignment.
"""

from functools import cache

import torch
import torch.distributed as dist
from sglang.srt.environ import envs
from sglang.srt.utils import get_available_gpu_memory

# Without SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES, the share of the memory free at the decision that a layer may take.
DEFAULT_FREE_MEMORY_SHARE = 0.25

_widest_intermediate = 0


def note_intermediate_size(intermediate_size: int) -> None:
    """Record an expert width of the model; the widest layer sizes the buffers."""
    global _widest_intermediate
    _widest_intermediate = max(_widest_intermediate, intermediate_size or 0)


def capacity_rows(num_ranks: int, capacity: int, topk: int, num_local_experts: int, expert_alignment: int) -> int:
    """Rows of a worst-case expanded receive on one rank: every token of every rank selects local experts only."""
    rows = num_ranks * capacity * min(topk, num_local_experts) + num_local_experts * (expert_alignment - 1)
    return -(-rows // expert_alignment) * expert_alignment


def layer_bytes(rows: int, hidden: int, intermediate: int, fp8: bool) -> int:
    """Most bytes that one layer's expanded buffers take together at ``rows`` rows.

    Router weights live throughout; the rest is freed as it is consumed, so the peak is one of three stages: received
    rows with scales and the first GEMM's output, that output and the activation, the activation and the second output.
    """
    received = hidden + hidden // 32 if fp8 else 2 * hidden
    gateup = 2 * 2 * intermediate
    activation = intermediate + intermediate // 32 if fp8 else 2 * intermediate
    return rows * (4 + max(received + gateup, gateup + activation, activation + 2 * hidden))


@cache
def _agreed_bytes(limit: int | None, group: dist.ProcessGroup) -> int:
    """Bytes that a layer may take on every rank, the least that any allows; collective over ``group``, then remembered.

    Args:
        limit: this rank's SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES; None allows a share of its free device memory.
        group: ranks that dispatch together: one that waits for host counts and one that does not would never meet.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if limit is None:
        # On CPU only a limit that was set counts.
        limit = torch.iinfo(torch.int64).max
        if device == "cuda":
            free = get_available_gpu_memory(device, torch.cuda.current_device()) * (1 << 30)
            limit = int(free * DEFAULT_FREE_MEMORY_SHARE)
    agreed = torch.tensor([limit], device=device)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group)
    return int(agreed.item())


def refusal(rows: int, hidden: int, fp8: bool, group: dist.ProcessGroup) -> str | None:
    """Why sync-free prefill cannot be used, or None when its buffers fit; the same on every rank of ``group``.

    The first call is collective over ``group``.

    Raises:
        ValueError: ``SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES`` is set here and smaller than what a layer needs.
    """
    needed = layer_bytes(rows, hidden, _widest_intermediate, fp8)
    limit = envs.SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES.get()
    # Before any error, so that no rank is left alone in the collective.
    agreed = _agreed_bytes(limit, group)
    if limit is not None and needed > limit:
        raise ValueError(
            f"sync-free prefill needs {needed} bytes per layer ({rows} rows, hidden {hidden}, intermediate "
            f"{_widest_intermediate}), SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES allows {limit}. Raise it, lower "
            "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK, or unset "
            "SGLANG_DEEPEP_V2_ENABLE_SYNC_FREE_PREFILL."
        )
    if needed > agreed:
        return (
            f"needs {needed} bytes per layer, {agreed} allowed on the rank with least "
            f"({DEFAULT_FREE_MEMORY_SHARE:.0%} of free memory; SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES sets another limit)"
        )
    return None
