"""Inputs for the kernel tests: psums from counts, devices, and an interpreter that rounds as a GPU does."""

import os

import torch

# The wrappers look at this when their module is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from sglang_deepep_v2.cpu_reference import triton_casts, triton_loops

    triton_casts.install()
    triton_loops.install()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALIGNMENT = 128

# Rows per expert; empty experts in first, middle and last place, half-tile and tile edges.
COUNTS = [
    (3, 0, 5, 1),
    (0, 4, 0),
    (0, 0, 0),
    (64, 65, 128, 0),
    (127, 1, 256, 257, 129),
]


def make_psum(counts, alignment=ALIGNMENT):
    """``(psum, rows)``: DeepEP's expanded psum as int32 on the device, and the rows of a synced dispatch."""
    ends, end = [], 0
    for count in counts:
        end = -(-end // alignment) * alignment + count
        ends.append(end)
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE), -(-end // alignment) * alignment


def valid_rows(counts, rows, alignment=ALIGNMENT):
    """``[rows]`` bool: rows that belong to a token."""
    valid = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    start = 0
    for count in counts:
        valid[start : start + count] = True
        start += -(-count // alignment) * alignment
    return valid


def dequantize(q, scale):
    """``[rows, cols]`` float64 of 1x128 blocks."""
    return q.double().view(q.shape[0], q.shape[1] // 128, 128).mul(scale.double()[..., None]).flatten(1)


def unpack_ue8m0(packed, groups):
    """``[rows, groups]`` fp32 powers of two from packed int32 exponents."""
    exponents = (packed[..., None] >> torch.tensor([0, 8, 16, 24], device=packed.device)) & 0xFF
    return torch.exp2(exponents.flatten(1)[:, :groups].float() - 127)
