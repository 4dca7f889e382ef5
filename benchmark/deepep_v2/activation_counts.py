"""Rows and bytes of the activation between the two expert GEMMs. Plain Python."""

from __future__ import annotations


def expanded_psum(counts: list[int], alignment: int) -> tuple[list[int], int]:
    """(psum, rows) of an expanded receive: every expert's segment starts at a multiple of ``alignment``."""
    psum, start = [], 0
    for count in counts:
        psum.append(start + count)
        start = -(-psum[-1] // alignment) * alignment
    return psum, start


def num_bytes(rows: int, intermediate: int) -> int:
    """Bytes moved for ``rows`` valid rows: bf16 gate and up in, FP8 out, fp32 scales out, fp32 row weight in."""
    return rows * (2 * 2 * intermediate + intermediate + intermediate // 128 * 4 + 4)
