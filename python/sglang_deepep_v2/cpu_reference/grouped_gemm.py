"""Grouped GEMMs under DeepGEMM's names, in plain PyTorch: what `deep_gemm` is on a machine without a GPU.

Every function writes into `d` and returns None. Products and sums are fp32; the result is rounded once, to
`d`'s dtype. Weights are dequantised in each call: a cache keyed on a tensor would go stale when weights are
updated in place, and inference tensors carry no version to notice it by.

Padding follows DeepGEMM on SM90, which works on halves of 64 rows:

* a half whose first row is valid is computed as a whole, so its padding rows hold products of whatever `a` holds;
* a half that starts at or past the end of its expert is zeros (contiguous layouts);
* rows past the last expert's region are not written.

No valid row depends on a padding row, NaN included.
"""

from __future__ import annotations

import torch

_HALF = 64
_mk_alignment = 128


def get_mk_alignment_for_contiguous_layout() -> int:
    """Rows that every expert's region must start at a multiple of."""
    return _mk_alignment


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Set the region alignment for later calls.

    Raises:
        ValueError: not a positive multiple of 16 rows.
    """
    global _mk_alignment
    if new_value <= 0 or new_value % 16 != 0:
        raise ValueError(f"the alignment of the contiguous layout is a positive multiple of 16, got {new_value}")
    _mk_alignment = new_value


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    """Scales in the layout that DeepGEMM's TMA loads take.

    Arguments:
        sf: fp32 [rows, packs] or [groups, rows, packs], any strides.

    Returns:
        The same values with strides (1, align(rows, 4)); `sf` itself when it already has them.
    """
    rows, packs = sf.shape[-2:]
    lanes = (rows + 3) // 4 * 4
    if sf.stride(-2) == 1 and sf.stride(-1) == lanes and (sf.dim() == 2 or sf.stride(0) == lanes * packs):
        return sf
    out = torch.empty((*sf.shape[:-2], packs, lanes), dtype=sf.dtype, device=sf.device)
    return out.transpose(-1, -2)[..., :rows, :].copy_(sf)


def m_grouped_fp8_gemm_nt_contiguous(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """`d[i] = a[i] @ b[expert of row i].T` for FP8 rows grouped by expert.

    Arguments:
        a: (fp8 [rows, K], fp32 scales [rows, K/128], any strides).
        b: (fp8 [experts, N, K], fp32 scales [experts, ceil(N/128), K/128]).
        d: bf16 or fp32 [rows, N].
        grouped_layout: int32. Labels: [rows], the expert of each row or -1. Psum: [experts], the inclusive end of
            each expert's rows; expert i starts at the alignment's next multiple after the end of expert i - 1.
        recipe_a, recipe_b: (rows, K) per scale where they differ from (1, 128) and (128, 128).

    Raises:
        ValueError: shapes, dtypes or a layout that DeepGEMM would read out of bounds or mix up.
    """
    del compiled_dims, disable_ue8m0_cast, ensure_zero_padding, expected_m_for_psum_layout
    gran_a, gran_b = _granularity(recipe, recipe_a, recipe_b)
    _check_fp8(a, b, gran_a, gran_b)
    spans = _spans(grouped_layout, a[0].shape[0], b[0].shape[0], use_psum_layout)
    _check_output(a[0], b[0], d)
    for expert, start, stop, stop_zero in spans:
        if stop > start:
            rows = _dequantize(a[0][start:stop], a[1][start:stop], gran_a)
            d[start:stop] = rows @ _dequantize(b[0][expert], b[1][expert], gran_b).t()
        d[stop:stop_zero] = 0


def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """`d[i] = a[i] @ b[expert of row i].T` for BF16: a [rows, K], b [experts, N, K], d [rows, N].

    `grouped_layout` and errors as in `m_grouped_fp8_gemm_nt_contiguous`.
    """
    del compiled_dims, ensure_zero_padding, expected_m_for_psum_layout
    _check_bf16(a, b)
    spans = _spans(grouped_layout, a.shape[0], b.shape[0], use_psum_layout)
    _check_output(a, b, d)
    for expert, start, stop, stop_zero in spans:
        if stop > start:
            d[start:stop] = a[start:stop].float() @ b[expert].float().t()
        d[stop:stop_zero] = 0


def fp8_m_grouped_gemm_nt_masked(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """`d[e, i] = a[e, i] @ b[e].T` for the first `masked_m[e]` rows of each expert's slab.

    Arguments:
        a: (fp8 [experts, M, K], fp32 scales [experts, M, K/128], any strides).
        b: (fp8 [experts, N, K], fp32 scales [experts, ceil(N/128), K/128]).
        d: bf16 or fp32 [experts, M, N]; rows past the last touched half keep their content.
        masked_m: int32 [experts], rows per expert.
        expected_m: a scheduling hint of DeepGEMM; not read.

    Raises:
        ValueError: shapes or dtypes that do not fit, or `masked_m[e]` outside 0..M.
    """
    del expected_m, compiled_dims, disable_ue8m0_cast
    gran_a, gran_b = _granularity(recipe, recipe_a, recipe_b)
    _check_fp8(a, b, gran_a, gran_b)
    for expert, stop in enumerate(_masked_stops(a[0], masked_m)):
        if stop:
            rows = _dequantize(a[0][expert, :stop], a[1][expert, :stop], gran_a)
            d[expert, :stop] = rows @ _dequantize(b[0][expert], b[1][expert], gran_b).t()


def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    compiled_dims: str = "nk",
) -> None:
    """`d[e, i] = a[e, i] @ b[e].T` for BF16: a [experts, M, K], b [experts, N, K], d [experts, M, N].

    `masked_m`, untouched rows and errors as in `fp8_m_grouped_gemm_nt_masked`.
    """
    del expected_m, compiled_dims
    _check_bf16(a, b)
    for expert, stop in enumerate(_masked_stops(a, masked_m)):
        if stop:
            d[expert, :stop] = a[expert, :stop].float() @ b[expert].float().t()


def _spans(layout: torch.Tensor, num_rows: int, num_experts: int, psum: bool) -> list[tuple[int, int, int, int]]:
    """(expert, first row, end of computed rows, end of zeroed rows) for every run of one expert."""
    if layout.dtype != torch.int32 or layout.dim() != 1 or not layout.is_contiguous():
        raise ValueError(f"grouped_layout must be contiguous int32 1-D, got {layout.dtype} {tuple(layout.shape)}")
    if psum:
        if layout.shape[0] != num_experts:
            raise ValueError(f"a psum layout has one entry per expert ({num_experts}), got {layout.shape[0]}")
        return _psum_spans(layout.tolist(), num_rows)
    if layout.shape[0] != num_rows:
        raise ValueError(f"a label layout has one entry per row ({num_rows}), got {layout.shape[0]}")
    return _label_spans(layout, num_experts)


def _psum_spans(psum: list[int], num_rows: int) -> list[tuple[int, int, int, int]]:
    spans, end = [], 0
    half = min(_HALF, _mk_alignment)
    for expert, stop in enumerate(psum):
        start = _round_up(end, _mk_alignment)
        if not start <= stop <= num_rows:
            if stop == end and stop <= num_rows:
                continue
            raise ValueError(
                f"psum[{expert}] = {stop} is outside {start}..{num_rows}: psum of another alignment than "
                f"{_mk_alignment}, or fewer rows than it counts"
            )
        end = stop
        computed = min(_round_up(stop - start, half) + start, num_rows)
        spans.append((expert, start, computed, max(computed, min(_round_up(stop, _mk_alignment), num_rows))))
    return spans


def _label_spans(labels: torch.Tensor, num_experts: int) -> list[tuple[int, int, int, int]]:
    half = min(_HALF, _mk_alignment)
    num_rows = labels.shape[0]
    _check_labels(labels, num_experts)
    spans: list[tuple[int, int, int, int]] = []
    for index, label in enumerate(labels[::half].tolist()):
        start, stop = index * half, min((index + 1) * half, num_rows)
        last = spans[-1] if spans else None
        if label < 0:
            if last is None:
                spans.append((0, start, start, stop))
            else:
                spans[-1] = (*last[:3], stop)
        elif last is not None and last[0] == label and last[2] == last[3] == start:
            spans[-1] = (label, last[1], stop, stop)
        else:
            spans.append((label, start, stop, stop))
    return spans


def _check_labels(labels: torch.Tensor, num_experts: int) -> None:
    """Every aligned block must hold one expert's rows: DeepGEMM reads only the label of its first row."""
    padded = torch.full((_round_up(labels.shape[0], _mk_alignment),), -1, dtype=labels.dtype, device=labels.device)
    padded[: labels.shape[0]] = labels
    blocks = padded.view(-1, _mk_alignment)
    wrong = (((blocks != blocks[:, :1]) & (blocks >= 0)) | (blocks >= num_experts)).nonzero()
    if wrong.numel():
        block, row = wrong[0].tolist()
        raise ValueError(
            f"row {block * _mk_alignment + row} has label {int(blocks[block, row])} in a block of {_mk_alignment} "
            f"rows that starts with {int(blocks[block, 0])} ({num_experts} experts); regions must be aligned"
        )


def _masked_stops(a: torch.Tensor, masked_m: torch.Tensor) -> list[int]:
    """Rows to compute per expert: `masked_m` rounded up to a half, within the slab."""
    if a.dim() != 3 or tuple(masked_m.shape) != (a.shape[0],):
        raise ValueError(f"masked_m {tuple(masked_m.shape)} does not fit a of shape {tuple(a.shape)}")
    counts = masked_m.tolist()
    for expert, count in enumerate(counts):
        if not 0 <= count <= a.shape[1]:
            raise ValueError(f"masked_m[{expert}] = {count} is outside 0..{a.shape[1]}, the slab's rows")
    return [min(_round_up(count, _HALF), a.shape[1]) for count in counts]


def _granularity(recipe, recipe_a, recipe_b) -> tuple[tuple[int, int], tuple[int, int]]:
    if recipe is not None:
        return (recipe[0], recipe[2]), (recipe[1], recipe[2])
    return tuple(recipe_a or (1, 128)), tuple(recipe_b or (128, 128))


def _check_fp8(a, b, gran_a, gran_b) -> None:
    for name, (values, scales), gran in (("a", a, gran_a), ("b", b, gran_b)):
        if values.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32:
            raise ValueError(f"{name} must be (float8_e4m3fn, float32 scales), got ({values.dtype}, {scales.dtype})")
        rows, k = values.shape[-2:]
        want = (*values.shape[:-2], -(-rows // gran[0]), -(-k // gran[1]))
        if tuple(scales.shape) != want:
            raise ValueError(f"{name} of shape {tuple(values.shape)} needs scales {want}, got {tuple(scales.shape)}")
    if a[0].shape[-1] != b[0].shape[-1]:
        raise ValueError(f"a and b differ in K: {a[0].shape[-1]} and {b[0].shape[-1]}")


def _check_bf16(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16 or a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"a and b must be bf16 with one K, got {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        )


def _check_output(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
    if tuple(d.shape) != (a.shape[0], b.shape[1]):
        raise ValueError(f"d must be {(a.shape[0], b.shape[1])}, got {tuple(d.shape)}")


def _dequantize(values: torch.Tensor, scales: torch.Tensor, gran: tuple[int, int]) -> torch.Tensor:
    """fp32 [rows, K] of fp8 values with one scale per `gran` = (rows, columns) block."""
    rows, k = values.shape
    if gran[0] > 1:
        scales = scales.repeat_interleave(gran[0], dim=0)[:rows]
    return values.float() * scales.repeat_interleave(gran[1], dim=1)[:, :k]


def _round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple
