"""Bandwidth of the patch's SwiGLU + FP8 quantisation kernel, alone, on the row counts of the prepared input."""

from __future__ import annotations

import torch
from activation_counts import expanded_psum, num_bytes

# Rotated so that a replay does not read what the previous one left in the L2 cache.
NUM_INPUTS = 4


def activation_inputs(worker, num_inputs: int = NUM_INPUTS, alignment: int = 128):
    """``num_inputs`` gate-ups ``[rows, 2 * intermediate]`` bf16, row weights, psum and valid rows of the input."""
    local_ids = worker.topk_ids.flatten().long() % worker.local_experts
    counts = torch.bincount(local_ids, minlength=worker.local_experts).tolist()
    ends, rows = expanded_psum(counts, alignment)
    psum = torch.tensor(ends, dtype=torch.int32, device=worker.device)
    generator = torch.Generator(worker.device).manual_seed(5)
    gateups = [
        torch.randn(rows, 2 * worker.intermediate, generator=generator, device=worker.device).to(torch.bfloat16)
        for _ in range(num_inputs)
    ]
    weights = torch.rand(rows, generator=generator, device=worker.device)
    return gateups, weights, psum, sum(counts)


def activation_bandwidth(worker, num_inputs: int = NUM_INPUTS) -> dict:
    """Time (us) and bandwidth (GB/s) of ``swiglu_quant_expanded`` by graph replay, beside what a copy reaches.

    ``copy_gb_s`` is a large copy's bandwidth, ``same_size_copy_gb_s`` that of a copy that moves as many bytes as the
    kernel: short kernels pay for their start and end.
    """
    from sglang.srt.layers.moe.ep_moe.kernels import swiglu_quant_expanded

    gateups, weights, psum, valid = activation_inputs(worker, num_inputs)
    calls = [lambda gateup=gateup: swiglu_quant_expanded(gateup, weights, psum, 128) for gateup in gateups]
    us = worker.tools.graph_us(calls * 2)
    moved = num_bytes(valid, worker.intermediate)
    sources = [torch.empty(moved // 2, dtype=torch.uint8, device=worker.device) for _ in range(num_inputs)]
    targets = [torch.empty_like(source) for source in sources]
    copies = [lambda pair=pair: pair[0].copy_(pair[1]) for pair in zip(targets, sources)]
    copy_us = worker.tools.graph_us(copies * 2)
    return {
        "kernel": "swiglu_quant_expanded",
        "rows": valid,
        "us": us,
        "num_bytes": moved,
        "gb_s": moved / us / 1e3,
        "copy_gb_s": worker.bandwidth,
        "same_size_copy_gb_s": 2 * sources[0].numel() / copy_us / 1e3,
    }
