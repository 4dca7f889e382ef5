"""new: decides whether prefill may run without a host sync, by the bytes that capacity-sized buffers need.

Without a host sync nobody on the host knows how many rows arrive, so every buffer of a layer is sized for the worst
case: ``rows = ranks * capacity * min(topk, local experts)``, plus alignment.
"""

import logging

import torch
import torch.distributed as dist
from sglang.srt.environ import envs

logger = logging.getLogger(__name__)

# Without SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES, the share of the memory free at the decision that a layer may take.
DEFAULT_FREE_MEMORY_SHARE = 0.25

_widest_intermediate = 0
# Free bytes at the first decision, the least of all ranks: layers and ranks of one model must decide alike.
_free_bytes: int | None = None


def note_intermediate_size(intermediate_size: int) -> None:
    """Record an expert width of the model; the widest layer sizes the buffers."""
    global _widest_intermediate
    _widest_intermediate = max(_widest_intermediate, intermediate_size or 0)


def capacity_rows(num_ranks: int, capacity: int, topk: int, num_local_experts: int, expert_alignment: int) -> int:
    """Rows of a worst-case expanded receive on one rank: every token of every rank selects local experts only."""
    rows = num_ranks * capacity * min(topk, num_local_experts) + num_local_experts * (expert_alignment - 1)
    return -(-rows // expert_alignment) * expert_alignment


def layer_bytes(rows: int, hidden: int, intermediate: int, fp8: bool) -> int:
    """Bytes that one layer's expanded buffers take at ``rows`` rows: received rows with scales and weights, both GEMM
    outputs, and the activation between them."""
    received = hidden + hidden // 32 if fp8 else 2 * hidden
    activation = intermediate + intermediate // 32 if fp8 else 2 * intermediate
    return rows * (received + 4 + 2 * 2 * intermediate + activation + 2 * hidden)


def _least_free_bytes(group: dist.ProcessGroup) -> int:
    """Free device memory of the rank that has least, bytes; collective over ``group``."""
    free = torch.tensor([torch.cuda.mem_get_info()[0]], device="cuda")
    if dist.get_world_size(group) > 1:
        dist.all_reduce(free, dist.ReduceOp.MIN, group)
    return int(free.item())


def refusal(rows: int, hidden: int, fp8: bool, group: dist.ProcessGroup) -> str | None:
    """Why sync-free prefill cannot be used, or None when its buffers fit; the same on every rank of ``group``.

    The first call without a limit is collective over ``group``.

    Raises:
        ValueError: ``SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES`` is set and smaller than what the launch needs.
    """
    needed = layer_bytes(rows, hidden, _widest_intermediate, fp8)
    limit = envs.SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES.get()
    if limit is not None:
        if needed > limit:
            raise ValueError(
                f"sync-free prefill needs {needed} bytes per layer ({rows} rows, hidden {hidden}, intermediate "
                f"{_widest_intermediate}), SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES allows {limit}. Raise it, lower "
                "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK, or unset "
                "SGLANG_DEEPEP_V2_ENABLE_SYNC_FREE_PREFILL."
            )
        return None
    if not torch.cuda.is_available():
        return None
    global _free_bytes
    if _free_bytes is None:
        _free_bytes = _least_free_bytes(group)
    allowed = int(_free_bytes * DEFAULT_FREE_MEMORY_SHARE)
    if needed > allowed:
        return (
            f"needs {needed} bytes per layer, {allowed} allowed ({DEFAULT_FREE_MEMORY_SHARE:.0%} of free memory; "
            "SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES sets another limit)"
        )
    return None
