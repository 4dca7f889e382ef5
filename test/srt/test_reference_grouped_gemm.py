"""The reference grouped GEMMs against float64, in the label, psum and masked layouts, with hostile padding."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_deepep_v2.cpu_reference import grouped_gemm

A = 128
NAN_FP8 = 0x7F
KINDS = ("fp8", "bf16")


@pytest.fixture(autouse=True)
def _default_alignment():
    yield
    grouped_gemm.set_mk_alignment_for_contiguous_layout(A)


@dataclass
class Problem:
    """Rows grouped by expert: a and b as DeepGEMM takes them, and their float64 values."""

    a: object
    b: object
    a64: torch.Tensor
    b64: torch.Tensor
    psum: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor


def _align(value: int, multiple: int = A) -> int:
    return (value + multiple - 1) // multiple * multiple


def _problem(kind, counts, n=256, k=256, tail=0, nan_padding=True, alignment=A, col_major=False, seed=0) -> Problem:
    gen = torch.Generator().manual_seed(seed)
    psum, labels, end = [], [], 0
    for expert, count in enumerate(counts):
        labels += [-1] * (_align(end, alignment) - len(labels)) + [expert] * count
        end = _align(end, alignment) + count
        psum.append(end)
    rows = _align(end, alignment) + tail
    labels = torch.tensor(labels + [-1] * (rows - len(labels)), dtype=torch.int32)
    valid = labels >= 0
    a64 = torch.randn((rows, k), generator=gen).double()
    b64 = torch.randn((len(counts), n, k), generator=gen).double() / 16
    if kind == "bf16":
        a, b = a64.bfloat16(), b64.bfloat16()
        a64, b64 = a.double(), b.double()
        if nan_padding:
            a[~valid] = float("nan")
    else:
        sa = torch.rand((rows, k // 128), generator=gen) + 0.5
        sb = torch.rand((len(counts), -(-n // 128), k // 128), generator=gen) + 0.5
        qa, qb = a64.to(torch.float8_e4m3fn), b64.to(torch.float8_e4m3fn)
        a64 = qa.double() * sa.double().repeat_interleave(128, 1)
        b64 = qb.double() * sb.double().repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)
        if nan_padding:
            qa.view(torch.uint8)[~valid] = NAN_FP8
            sa[~valid] = float("nan")
        if col_major:
            sa = grouped_gemm.get_mn_major_tma_aligned_tensor(sa)
        a, b = (qa, sa), (qb, sb)
    return Problem(a, b, a64, b64, torch.tensor(psum, dtype=torch.int32), labels, valid)


def _contiguous(kind, problem: Problem, psum: bool, dtype=torch.float32, fill=7.0) -> torch.Tensor:
    d = torch.full((problem.labels.shape[0], problem.b64.shape[1]), fill, dtype=dtype)
    gemm = getattr(grouped_gemm, f"m_grouped_{kind}_gemm_nt_contiguous")
    gemm(problem.a, problem.b, d, problem.psum if psum else problem.labels, use_psum_layout=psum)
    return d


def _want(problem: Problem) -> torch.Tensor:
    rows = problem.valid
    return torch.einsum("rk,rnk->rn", problem.a64[rows], problem.b64[problem.labels[rows].long()])


def _assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert not got.isnan().any()
    assert ((got.double() - want).norm() <= 1e-6 * want.norm()).item()


@pytest.mark.parametrize("psum", [True, False], ids=["psum", "labels"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 7), (64, 65, 128, 129), (200,)], ids=str)
def test_valid_rows_match_float64(kind, psum, counts):
    problem = _problem(kind, counts)
    _assert_close(_contiguous(kind, problem, psum)[problem.valid], _want(problem))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("psum", [True, False], ids=["psum", "labels"])
@settings(max_examples=20, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 1, 63, 64, 65, 127, 128, 130]), min_size=1, max_size=4),
    k=st.sampled_from([128, 384]),
    n=st.sampled_from([128, 192]),
    alignment=st.sampled_from([64, 128]),
    col_major=st.booleans(),
)
def test_any_counts(kind, psum, counts, k, n, alignment, col_major):
    grouped_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    problem = _problem(kind, counts, n=n, k=k, alignment=alignment, col_major=col_major)
    _assert_close(_contiguous(kind, problem, psum)[problem.valid], _want(problem))


@pytest.mark.parametrize("psum", [True, False], ids=["psum", "labels"])
@pytest.mark.parametrize("kind", KINDS)
def test_k6_nan_padding_changes_no_bit_of_a_valid_row(kind, psum):
    counts = (3, 65, 0, 64)
    hostile, clean = (_problem(kind, counts, nan_padding=nan) for nan in (True, False))
    got, want = (_contiguous(kind, problem, psum, torch.bfloat16) for problem in (hostile, clean))
    assert torch.equal(got[hostile.valid], want[clean.valid])


@pytest.mark.parametrize("psum", [True, False], ids=["psum", "labels"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_rows_are_those_of_sm90(kind, psum):
    """Expert 0 has 3 rows, expert 1 has 65, then a tail of one more region."""
    problem = _problem(kind, (3, 65), tail=A, nan_padding=True)
    d = _contiguous(kind, problem, psum)
    assert d[3:64].isnan().all(), "a half with valid rows is computed as a whole"
    assert (d[64:128] == 0).all(), "a half past the expert's end is zeros"
    assert d[128 + 65 : 256].isnan().all()
    assert (d[256:] == (7.0 if psum else 0.0)).all(), "the psum layout does not visit rows past the last region"


def test_a_bf16_output_is_rounded_once():
    problem = _problem("fp8", (5, 9))
    d32, d16 = (_contiguous("fp8", problem, True, dtype)[problem.valid] for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(d32.bfloat16(), d16)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_rows_match_float64_and_the_rest_is_untouched(kind):
    counts, rows, n, k = [3, 0, 64, 65], 192, 256, 256
    gen = torch.Generator().manual_seed(1)
    valid = torch.arange(rows)[None] < torch.tensor(counts)[:, None]
    a64 = torch.randn((4, rows, k), generator=gen).double()
    b64 = torch.randn((4, n, k), generator=gen).double() / 16
    d = torch.full((4, rows, n), 7.0)
    masked_m = torch.tensor(counts, dtype=torch.int32)
    if kind == "bf16":
        a, b = a64.bfloat16(), b64.bfloat16()
        a64, b64 = a.double(), b.double()
        a[~valid] = float("nan")
        grouped_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, 8)
    else:
        qa, qb = a64.to(torch.float8_e4m3fn), b64.to(torch.float8_e4m3fn)
        sa, sb = torch.rand((4, rows, 2), generator=gen) + 0.5, torch.rand((4, 2, 2), generator=gen) + 0.5
        a64 = qa.double() * sa.double().repeat_interleave(128, 2)
        b64 = qb.double() * sb.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        qa.view(torch.uint8)[~valid] = NAN_FP8
        sa = grouped_gemm.get_mn_major_tma_aligned_tensor(sa.masked_fill(~valid[..., None], float("nan")))
        grouped_gemm.fp8_m_grouped_gemm_nt_masked((qa, sa), (qb, sb), d, masked_m, 8)
    want = a64 @ b64.transpose(1, 2)
    _assert_close(d[valid], want[valid])
    assert d[0, 3:64].isnan().all(), "a half with valid rows is computed as a whole"
    assert (d[1] == 7).all() and (d[0, 64:] == 7).all() and (d[2, 64:] == 7).all() and (d[3, 128:] == 7).all()


def test_tma_aligned_scales_keep_values_and_are_not_copied_twice():
    for shape in ((5, 3), (4, 2), (2, 7, 3)):
        sf = torch.rand(shape)
        out = grouped_gemm.get_mn_major_tma_aligned_tensor(sf)
        lanes = _align(shape[-2], 4)
        assert torch.equal(out, sf) and out.stride()[-2:] == (1, lanes)
        assert grouped_gemm.get_mn_major_tma_aligned_tensor(out) is out


def test_no_rows_is_no_work():
    problem = _problem("bf16", (0, 0))
    for psum in (True, False):
        assert _contiguous("bf16", problem, psum).shape == (0, 256)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(psum=(3, 5)), "psum[1] = 5 is outside 128..256"),
        (dict(psum=(3, 300)), "psum[1] = 300 is outside 128..256"),
        (dict(psum=(3,)), "one entry per expert (2), got 1"),
        (dict(labels=[0] * 3 + [1] * 253), "row 3 has label 1 in a block of 128 rows that starts with 0"),
        (dict(labels=[0] * 128 + [2] * 128), "row 128 has label 2"),
        (dict(labels=[0] * 100), "one entry per row (256), got 100"),
        (dict(d=(256, 128)), "d must be (256, 256), got (256, 128)"),
        (dict(scales=(256, 3)), "needs scales (256, 2), got (256, 3)"),
        (dict(int64=True), "contiguous int32"),
    ],
)
def test_refuses(change, text):
    problem = _problem("fp8", (3, 7))
    psum = "psum" in change
    layout = torch.tensor(change.get("psum" if psum else "labels", problem.labels.tolist()), dtype=torch.int32)
    if "int64" in change:
        layout = layout.long()
    a = (problem.a[0], torch.ones(change["scales"])) if "scales" in change else problem.a
    d = torch.zeros(change.get("d", (256, 256)))
    with pytest.raises(ValueError) as caught:
        grouped_gemm.m_grouped_fp8_gemm_nt_contiguous(a, problem.b, d, layout, use_psum_layout=psum)
    assert text in str(caught.value)


def test_packed_scales_are_refused():
    problem = _problem("fp8", (3,))
    packed = torch.zeros((128, 1), dtype=torch.int32)
    with pytest.raises(ValueError, match="float32 scales"):
        grouped_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (problem.a[0], packed), problem.b, torch.zeros((128, 256)), problem.labels
        )


def test_masked_counts_must_fit_the_slab():
    a, b, d = torch.zeros((1, 64, 128)).bfloat16(), torch.zeros((1, 128, 128)).bfloat16(), torch.zeros((1, 64, 128))
    with pytest.raises(ValueError, match=r"masked_m\[0\] = 65 is outside 0\.\.64"):
        grouped_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, torch.tensor([65], dtype=torch.int32), 1)


@pytest.mark.parametrize("value", [0, -128, 100])
def test_the_alignment_is_a_positive_multiple_of_16(value):
    with pytest.raises(ValueError, match=f"got {value}"):
        grouped_gemm.set_mk_alignment_for_contiguous_layout(value)
    assert grouped_gemm.get_mk_alignment_for_contiguous_layout() == A
