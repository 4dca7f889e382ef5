"""The layer in one go against two half batches, one after the other and overlapped."""

from __future__ import annotations

import torch
from layer_parts import Floor, deep_gemm_of, expanded_dispatch
from variant_tools import median_us, own_buffer


class _HalfLayer:
    """The sync-free psum chain on a share of the tokens, with a buffer of its own.

    ``num_sms``: the SMs that dispatch takes, 0 for DeepEP's own choice.
    """

    def __init__(self, worker, tokens: slice):
        self.worker, self.gemm = worker, deep_gemm_of(worker).m_grouped_fp8_gemm_nt_contiguous
        self.num_sms = 0
        self.x = tuple(part[tokens].contiguous() for part in worker.tools.quantise(worker.x))
        self.x = (self.x[0], self.x[1].t().contiguous().t())
        self.ids = worker.topk_ids[tokens].to(torch.int64).contiguous()
        self.weights = worker.topk_weights[tokens].contiguous()
        self.buffer = own_buffer(worker, self.ids.shape[0])

    def __call__(self) -> torch.Tensor:
        from sglang.srt.layers.moe.ep_moe.kernels import swiglu_quant_expanded

        worker = self.worker
        (x, scale), _, weights, handle, _ = expanded_dispatch(
            worker, self.buffer, self.x, False, ids=self.ids, weights=self.weights, num_sms=self.num_sms
        )
        psum = handle.psum_num_recv_tokens_per_expert
        w13, s13, w2, s2 = worker.weights
        gate_up = torch.empty(x.shape[0], 2 * worker.intermediate, device=x.device, dtype=torch.bfloat16)
        self.gemm((x, scale), (w13, s13), gate_up, psum, use_psum_layout=True)
        down, down_scale = swiglu_quant_expanded(gate_up, weights, psum, 128)
        out = torch.empty(x.shape[0], worker.hidden, device=x.device, dtype=torch.bfloat16)
        self.gemm((down, down_scale), (w2, s2), out, psum, use_psum_layout=True)
        return self.buffer.combine(out, handle=handle)[0]


def half_batches(worker) -> list[dict]:
    """The layer in one go against two half batches, one after the other and on two streams (one rank only)."""
    half = worker.tokens // 2
    whole = _HalfLayer(worker, slice(None))
    halves = [_HalfLayer(worker, slice(0, half)), _HalfLayer(worker, slice(half, None))]
    reference = whole()
    together = torch.cat([part() for part in halves])
    rows = [
        {"variant": "whole batch", "what": "sync-free psum chain", "us": median_us(worker, whole)},
        {
            "variant": "two halves in turn",
            "what": "the same twice on half the tokens",
            "us": median_us(worker, lambda: [part() for part in halves]),
            "difference": float((together.float() - reference.float()).norm() / reference.float().norm()),
        },
    ]
    if worker.device.type == "cuda" and worker.world == 1:
        # More ranks could order two spinning kernels differently and never meet.
        us = median_us(worker, _overlapped(worker, halves))
        rows.append({"variant": "two halves, two streams", "what": "overlapped", "us": us})
        rows.append(_overlapped_on_split_sms(worker, halves))
    for name, tokens in (("whole batch", worker.tokens), ("half batch", half)):
        rows.append(
            {"variant": f"GEMMs of the {name}", "what": "both grouped GEMMs", "us": _gemms_alone(worker, tokens)}
        )
    return rows


def _overlapped(worker, halves: list[_HalfLayer]):
    """A call that runs the halves on a stream each."""
    streams = [torch.cuda.Stream(worker.device) for _ in halves]

    def call() -> None:
        main = torch.cuda.current_stream()
        for stream, half in zip(streams, halves):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                half()
        for stream in streams:
            main.wait_stream(stream)

    return call


def _overlapped_on_split_sms(worker, halves: list[_HalfLayer], communication: int = 24) -> dict:
    """The halves on a stream each, the GEMMs leaving ``communication`` SMs to the other half's DeepEP kernels."""
    deep_gemm = deep_gemm_of(worker)
    total = deep_gemm.get_num_sms()
    for half in halves:
        half.num_sms = communication
    deep_gemm.set_num_sms(total - communication)
    try:
        us = median_us(worker, _overlapped(worker, halves))
    finally:
        deep_gemm.set_num_sms(total)
        for half in halves:
            half.num_sms = 0
    what = f"overlapped, GEMMs on {total - communication} SMs, DeepEP on {communication}"
    return {"variant": "two halves, two streams, split SMs", "what": what, "us": us}


def _gemms_alone(worker, tokens: int) -> float:
    """Both grouped GEMMs on the first ``tokens`` tokens, us."""
    saved = worker.tokens, worker.x, worker.topk_ids, worker.topk_weights
    try:
        worker.x, worker.topk_ids, worker.topk_weights = (part[:tokens].contiguous() for part in saved[1:])
        worker.tokens = tokens
        floor = Floor(worker)
        return median_us(worker, floor.replay, 3) / 3
    finally:
        worker.tokens, worker.x, worker.topk_ids, worker.topk_weights = saved
