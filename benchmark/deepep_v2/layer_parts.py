"""What the layer is measured against: DeepEP's dispatch and combine alone, DeepGEMM's fused MoE, and the floor.

They talk to DeepEP and DeepGEMM directly, in the upstream worker.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def _buffer(worker):
    """The process-wide ElasticBuffer, under the key that the layers use too."""
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2Buffer
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group.device_group
    return DeepEPv2Buffer.get_buffer(group, worker.hidden, worker.topk, worker.tokens, True)


def expanded_dispatch(worker, buffer, x, cpu_sync: bool, *, ids=None, weights=None, **options):
    """Expanded dispatch with column-major scales: of the worker's tokens, unless ``ids`` and ``weights`` say others.

    ``options`` go to DeepEP in place of what stands here.
    """
    ids = worker.topk_ids.to(torch.int64) if ids is None else ids
    arguments = {
        "topk_idx": ids,
        "topk_weights": worker.topk_weights if weights is None else weights,
        "num_experts": worker.local_experts * worker.world,
        "num_max_tokens_per_rank": ids.shape[0],
        "expert_alignment": 128,
        "do_cpu_sync": cpu_sync,
        "do_expand": True,
        "use_tma_aligned_col_major_sf": True,
    }
    return buffer.dispatch(x, **(arguments | options))


def deep_gemm_of(worker):
    """DeepGEMM, or on a CPU what stands in for it."""
    if worker.device.type == "cpu":
        from sglang_deepep_v2.cpu_reference import grouped_gemm

        return grouped_gemm
    import deep_gemm

    return deep_gemm


class DeepEPAlone:
    """Expanded dispatch and combine with the layer's own counts and nothing in between."""

    def __init__(self, worker, cpu_sync: bool = True):
        self.worker, self.cpu_sync = worker, cpu_sync
        self.x = worker.tools.quantise(worker.x, column_major=True)
        self.rows = None

    def __call__(self) -> torch.Tensor:
        # Fetched per call: another path may have rebuilt the buffer.
        buffer = _buffer(self.worker)
        received, _, _, handle, _ = expanded_dispatch(self.worker, buffer, self.x, self.cpu_sync)
        shape = received[0].shape
        if self.rows is None or self.rows.shape != shape:
            self.rows = torch.randn(shape, device=received[0].device, dtype=torch.bfloat16)
        return buffer.combine(self.rows, handle=handle)[0]


class MegaMoE:
    """DeepGEMM's ``fp8_mega_moe`` with its own pre-dispatch (quantise and copy into the symmetric buffer)."""

    def __init__(self, worker):
        import deep_gemm

        self.deep_gemm, self.worker = deep_gemm, worker
        w13, s13, w2, s2 = worker.weights
        num_experts = worker.local_experts * worker.world
        self.symmetric = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
            dist.group.WORLD, num_experts, worker.tokens, worker.topk, worker.hidden, worker.intermediate
        )
        self.weights = deep_gemm.transform_weights_for_mega_moe_sm90((w13, s13), (w2, s2))
        self.output = torch.empty(worker.tokens, worker.hidden, device=worker.device, dtype=torch.bfloat16)

    def __call__(self) -> torch.Tensor:
        worker, symmetric = self.worker, self.symmetric
        self.deep_gemm.mega_moe_pre_dispatch_sm90(
            worker.x,
            worker.topk_ids,
            worker.topk_weights,
            symmetric.x,
            symmetric.x_sf,
            symmetric.topk_idx,
            symmetric.topk_weights,
            worker.tokens,
        )
        self.deep_gemm.fp8_mega_moe(self.output, *self.weights, symmetric)
        return self.output


class Floor:
    """The two grouped GEMMs alone, plus the bytes that the rest of the layer must move over the copy bandwidth.

    Bytes: every input of quantise, dispatch, activation and combine read once, every output written once; links between
    GPUs and padding rows count as nothing.
    """

    def __init__(self, worker, alignment: int = 128):
        if getattr(worker, "bandwidth", None) is None:
            worker.copy_bandwidth(1024 if worker.device.type == "cuda" else 8)
        self.worker = worker
        buffer = _buffer(worker)
        (x, x_scale), _, _, handle, _ = expanded_dispatch(
            worker, buffer, worker.tools.quantise(worker.x, column_major=True), True, expert_alignment=alignment
        )
        self.psum = handle.psum_num_recv_tokens_per_expert.clone()
        self.x, self.x_scale = x.clone(), column_major(x_scale)
        rows, intermediate = x.shape[0], worker.intermediate
        buffer.combine(torch.zeros(rows, worker.hidden, device=worker.device, dtype=torch.bfloat16), handle=handle)
        activated = torch.randn(rows, intermediate, device=worker.device)
        self.down, down_scale = worker.tools.quantise(activated.to(torch.bfloat16))
        self.down_scale = column_major(down_scale)
        self.gate_up = torch.empty(rows, 2 * intermediate, device=worker.device, dtype=torch.bfloat16)
        self.output = torch.empty(rows, worker.hidden, device=worker.device, dtype=torch.bfloat16)
        self.gemm = deep_gemm_of(worker).m_grouped_fp8_gemm_nt_contiguous
        self.valid = valid_rows(self.psum, alignment)
        with torch.inference_mode():
            self.replay = worker.tools.graph([self] * 3)

    def __call__(self) -> None:
        w13, s13, w2, s2 = self.worker.weights
        self.gemm((self.x, self.x_scale), (w13, s13), self.gate_up, self.psum, use_psum_layout=True)
        self.gemm((self.down, self.down_scale), (w2, s2), self.output, self.psum, use_psum_layout=True)

    def num_bytes(self) -> int:
        worker, rows = self.worker, self.valid
        hidden, intermediate = worker.hidden, worker.intermediate
        token_fp8, row_fp8 = hidden + hidden // 128 * 4, intermediate + intermediate // 128 * 4
        quantise = worker.tokens * (2 * hidden + token_fp8)
        dispatch = worker.tokens * token_fp8 + rows * token_fp8
        activation = rows * (4 * intermediate + row_fp8 + 4)
        combine = rows * 2 * hidden + worker.tokens * 2 * hidden
        return quantise + dispatch + activation + combine

    def us(self) -> float:
        gemms = self.worker.tools.mean_us(self.replay, 3) / 3
        return gemms + self.num_bytes() / self.worker.bandwidth / 1e3


def valid_rows(psum: torch.Tensor, alignment: int = 128) -> int:
    """Real rows behind an expanded psum [experts]: padding not counted."""
    rows, start = 0, 0
    for end in psum.tolist():
        rows += end - start
        start = -(-end // alignment) * alignment
    return rows


def column_major(scale: torch.Tensor) -> torch.Tensor:
    """A copy of [rows, groups] fp32 scales, column-major with rows padded to a multiple of 4."""
    rows, groups = scale.shape
    storage = torch.empty(groups, -(-rows // 4) * 4, device=scale.device, dtype=torch.float32)
    view = storage.t()[:rows]
    view.copy_(scale)
    return view
