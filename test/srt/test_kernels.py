"""The expanded-layout kernels: Triton (interpreted without a GPU) against their PyTorch twins and the contract."""

import pytest
import torch
from sglang.srt.layers.moe.ep_moe import kernels
from sglang.srt.layers.moe.ep_moe import kernels_reference as reference
from sglang.srt.layers.moe.ep_moe.launch import runs_triton
from sglang.srt.layers.moe.ep_moe.token_quant import quant_tokens

from kernel_cases import (
    ALIGNMENT,
    COUNTS,
    DEVICE,
    dequantize,
    make_psum,
    unpack_ue8m0,
    valid_rows,
)

ON_GPU = DEVICE == "cuda"
# exp and division differ by an ulp between the device and torch; one bf16 or FP8 step may then go the other way.
FP8_STEP = 2.0**-3


def random_rows(rows, cols, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=generator).to(dtype).to(DEVICE)


def random_weights(rows, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, generator=generator) + 0.05).to(DEVICE)


def test_triton_runs_here():
    psum, rows = make_psum((1,))
    assert runs_triton(psum), "this run would compare the twins with themselves"


class TestFillMIndices:
    @pytest.mark.parametrize("counts", COUNTS)
    def test_k1_k2_labels_equal_the_counts(self, counts):
        psum, rows = make_psum(counts)
        labels = kernels.fill_m_indices_from_psum(psum, len(counts), rows, ALIGNMENT)
        expected = [e for e, count in enumerate(counts) for _ in range(-(-count // ALIGNMENT) * ALIGNMENT)]
        assert labels.dtype == torch.int32 and labels.tolist() == expected
        assert torch.equal(labels, reference.fill_m_indices_from_psum(psum, len(counts), rows, ALIGNMENT))

    @pytest.mark.parametrize("alignment", [1, 64, 96, 128])
    def test_any_alignment(self, alignment):
        counts = (3, 0, alignment, alignment + 1)
        psum, rows = make_psum(counts, alignment)
        labels = kernels.fill_m_indices_from_psum(psum, 4, rows, alignment)
        assert torch.equal(labels, reference.fill_m_indices_from_psum(psum, 4, rows, alignment))

    def test_capacity_tail_is_skipped(self):
        psum, rows = make_psum((5, 1))
        labels = kernels.fill_m_indices_from_psum(psum, 2, rows + 3 * ALIGNMENT, ALIGNMENT)
        assert (labels[rows:] == -1).all() and (labels[:rows] >= 0).all()

    def test_k2_partial_alignment_is_refused(self):
        psum, rows = make_psum((5,))
        with pytest.raises(AssertionError, match=rf"{ALIGNMENT}.*{rows + 4}"):
            kernels.fill_m_indices_from_psum(psum, 1, rows + 4, ALIGNMENT)


class TestScaleExpandedRows:
    LAYOUTS = {
        "row_major": lambda x: x.clone(),
        "column_major": lambda x: torch.empty_strided(x.shape, (1, x.shape[0] + 3), device=DEVICE).copy_(x),
        "transposed": lambda x: x.t().clone().t(),
        "offset_slice": lambda x: torch.zeros(x.shape[0] + 5, x.shape[1] + 7, device=DEVICE)[5:, 7:].copy_(x),
    }

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("shape", [(1, 1), (130, 16), (257, 33)])
    def test_k4_any_strides(self, layout, shape):
        values, weights = random_rows(*shape, dtype=torch.float32), random_weights(shape[0])
        x = self.LAYOUTS[layout](values)
        assert kernels.scale_expanded_rows_(x, weights) is x
        assert torch.equal(x, values * weights[:, None])

    def test_k5_weights(self):
        x = torch.full((6, 8), 3.0, device=DEVICE)
        x[4] = float("inf")
        weights = torch.tensor([0.0, -2.0, 1e-40, 7.5, 0.0, 1.0], device=DEVICE)
        kernels.scale_expanded_rows_(x, weights)
        assert (x[0] == 0).all() and (x[1] == -6).all() and (x[3] == 22.5).all() and (x[5] == 3).all()
        assert x[4].isnan().all(), "0 x Inf stays in its own row"

    def test_bf16_rounds_once(self):
        values, weights = random_rows(9, 300), random_weights(9)
        x = kernels.scale_expanded_rows_(values.clone(), weights)
        assert torch.equal(x, (values.float() * weights[:, None]).bfloat16())

    def test_strided_weights(self):
        values, weights = random_rows(10, 4, dtype=torch.float32), random_weights(20)[::2]
        assert torch.equal(kernels.scale_expanded_rows_(values.clone(), weights), values * weights[:, None])

    def test_refusals(self):
        x, weights = random_rows(4, 4, dtype=torch.float32), random_weights(4)
        for bad_x, bad_w, reason in (
            (x.int(), weights, "int32"),
            (x[0], weights, "2-D"),
            (x, weights[:3], "4 rows, row_weights 3"),
            (x, weights[:, None], "1-D"),
            (x, weights.bfloat16(), "fp32"),
        ):
            with pytest.raises(AssertionError, match=reason):
                kernels.scale_expanded_rows_(bad_x, bad_w)

    def test_no_rows(self):
        assert kernels.scale_expanded_rows_(torch.empty(0, 4, device=DEVICE), random_weights(0)).shape == (0, 4)


VARIANTS = [dict(), dict(keep_fp32=True), dict(swiglu_limit=0.7), dict(scale_ue8m0=True)]


class TestSwigluQuant:
    @pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v) or "plain")
    @pytest.mark.parametrize("intermediate", [128, 384, 512, 640])
    @pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "raw"])
    def test_k8_equals_the_twin(self, intermediate, weighted, variant):
        counts = (64, 65, 0, 3)
        psum, rows = make_psum(counts)
        gateup = random_rows(rows, 2 * intermediate, seed=intermediate)
        weights = random_weights(rows) if weighted else None
        got = self.product(*kernels.swiglu_quant_expanded(gateup, weights, psum, ALIGNMENT, **variant))
        twin = self.product(*reference.swiglu_quant_expanded(gateup, weights, psum, ALIGNMENT, **variant))
        valid = valid_rows(counts, rows)
        got, twin = got[valid], twin[valid]
        assert ((got - twin).norm() / twin.norm()).item() < 5e-3
        assert ((got - twin).abs() <= FP8_STEP * twin.abs().clamp(min=1e-3)).all()

    @staticmethod
    def product(q, scale):
        rows, groups = q.shape[0], q.shape[1] // 128
        assert q.dtype == torch.float8_e4m3fn and scale.stride() == (1, -(-rows // 4) * 4)
        if scale.dtype == torch.int32:
            assert scale.shape == (rows, -(-groups // 4))
            return dequantize(q, unpack_ue8m0(scale, groups))
        assert scale.shape == (rows, groups)
        return dequantize(q, scale)

    @pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v) or "plain")
    def test_computes_weighted_swiglu(self, variant):
        counts = (70, 0, 9)
        psum, rows = make_psum(counts)
        gateup, weights = random_rows(rows, 512), random_weights(rows)
        got = self.product(*kernels.swiglu_quant_expanded(gateup, weights, psum, ALIGNMENT, **variant))
        gate, up = gateup.double().chunk(2, 1)
        if limit := variant.get("swiglu_limit"):
            limit = float(torch.tensor(limit, dtype=torch.bfloat16))
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        exact = torch.nn.functional.silu(gate) * up * weights.double()[:, None]
        valid = valid_rows(counts, rows)
        # FP8 has three mantissa bits: 2^-5 per element on average, twice that with power-of-two scales.
        assert ((got - exact)[valid].norm() / exact[valid].norm()).item() < 0.05

    @pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v) or "plain")
    def test_k6_padding_changes_no_bit(self, variant):
        counts = (3, 128, 0, 66)
        psum, rows = make_psum(counts)
        valid = valid_rows(counts, rows)
        gateup, weights = random_rows(rows, 512), random_weights(rows)
        gateup[~valid], weights[~valid] = 0, 0
        clean = kernels.swiglu_quant_expanded(gateup, weights, psum, ALIGNMENT, **variant)
        for poison in (float("nan"), float("inf"), -float("inf")):
            gateup[~valid], weights[~valid] = poison, poison
            dirty = kernels.swiglu_quant_expanded(gateup, weights, psum, ALIGNMENT, **variant)
            assert torch.equal(dirty[0].view(torch.uint8)[valid], clean[0].view(torch.uint8)[valid])
            assert torch.equal(dirty[1][valid], clean[1][valid])

    def test_tiles_of_padding_are_skipped(self):
        counts = (1, 0, 1)
        psum, rows = make_psum(counts)
        capacity = rows + 4 * ALIGNMENT
        gateup, weights = random_rows(capacity, 256), random_weights(capacity)
        q = torch.full((capacity, 128), 0x42, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
        scale = torch.full((capacity, 1), -5.0, device=DEVICE)
        kernels._run_swiglu(gateup, q, scale, weights, psum, ALIGNMENT, None, False, False)
        touched = (scale[:, 0] != -5.0).nonzero().flatten()
        tile = ALIGNMENT if not ON_GPU else kernels.SWIGLU_BLOCK_M
        assert touched.tolist() == [*range(tile), *range(ALIGNMENT, ALIGNMENT + tile)]
        assert (q.view(torch.uint8)[rows:] == 0x42).all()

    def test_k5_zero_weight_gives_a_zero_row(self):
        psum, rows = make_psum((4,))
        gateup, weights = random_rows(rows, 256), random_weights(rows)
        weights[1], weights[2] = 0, -1.5
        q, scale = kernels.swiglu_quant_expanded(gateup, weights, psum, ALIGNMENT)
        product = dequantize(q, scale)
        raw = dequantize(*kernels.swiglu_quant_expanded(gateup, None, psum, ALIGNMENT))
        assert (product[1] == 0).all()
        assert torch.allclose(product[2], -1.5 * raw[2], rtol=1e-6)

    def test_k7_rows_not_a_multiple_of_four(self):
        psum = torch.tensor([3, 4, 6], dtype=torch.int32, device=DEVICE)
        gateup, weights = random_rows(6, 512), random_weights(6)
        q, scale = kernels.swiglu_quant_expanded(gateup, weights, psum, 1)
        assert scale.stride() == (1, 8)
        twin = reference.swiglu_quant_expanded(gateup, weights, psum, 1)
        assert ((dequantize(q, scale) - dequantize(*twin)).norm() / dequantize(*twin).norm()).item() < 5e-3

    def test_k1_no_rows_launches_nothing(self, monkeypatch):
        psum, rows = make_psum((0, 0))
        monkeypatch.setattr(kernels, "_launch_swiglu", None)
        q, scale = kernels.swiglu_quant_expanded(random_rows(0, 256), random_weights(0), psum, ALIGNMENT)
        assert q.shape == (0, 128) and scale.shape == (0, 1)
        assert kernels.swiglu_expanded(random_rows(0, 256), None, psum, ALIGNMENT).shape == (0, 128)

    def test_refusals(self):
        psum, rows = make_psum((4,))
        gateup, weights = random_rows(rows, 256), random_weights(rows)
        for bad, reason in (
            ((gateup.float(), weights, psum), "bf16"),
            ((gateup[:, :200].contiguous(), weights, psum), "100 is not a multiple of 128"),
            ((gateup.t(), weights, psum), "contiguous"),
            ((gateup, weights[:5], psum), rf"\[{rows}\]"),
            ((gateup, weights.bfloat16(), psum), "fp32"),
            ((gateup, weights, psum.long()), "int32"),
            ((gateup, weights, torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)[:, 0]), "psum"),
        ):
            with pytest.raises(AssertionError, match=reason):
                kernels.swiglu_quant_expanded(*bad, ALIGNMENT)


class TestQuantTokens:
    @pytest.mark.parametrize("tokens", [1, 5, 33])
    @pytest.mark.parametrize("hidden", [256, 1152, 2048, 4096, 6144, 7168])
    @pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
    def test_k8_equals_the_twin(self, tokens, hidden, ids_dtype):
        x = random_rows(tokens, hidden)
        x[0, :128] = 0
        ids = torch.randint(-1, 9, (tokens, 6), device=DEVICE, dtype=ids_dtype)
        q, scale, wide = quant_tokens(x, ids)
        twin = reference.quant_tokens(x, ids)
        assert torch.equal(q.view(torch.uint8), twin[0].view(torch.uint8))
        assert torch.equal(scale, twin[1]) and scale.stride() == twin[1].stride() == (1, -(-tokens // 4) * 4)
        assert wide.dtype == torch.int64 and torch.equal(wide, ids.long())

    def test_no_tokens(self):
        q, scale, ids = quant_tokens(random_rows(0, 256), torch.empty(0, 2, dtype=torch.int32, device=DEVICE))
        assert q.shape == (0, 256) and scale.shape == (0, 2) and ids.shape == (0, 2)

    def test_refusals(self):
        x, ids = random_rows(4, 256), torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
        for bad_x, bad_ids, reason in (
            (x.float(), ids, "float32"),
            (x.t(), ids, "contiguous"),
            (x[:, :100].contiguous(), ids, "100"),
            (x, ids.t(), "topk_ids"),
            (x, ids.to(torch.int16), "int16"),
            (x, ids[:3], "4 tokens"),
        ):
            with pytest.raises(AssertionError, match=reason):
                quant_tokens(bad_x, bad_ids)


class TestSwigluBf16:
    def test_any_intermediate_size(self):
        psum, rows = make_psum((40, 3))
        gateup, weights = random_rows(rows, 2 * 200), random_weights(rows)
        got = kernels.swiglu_expanded(gateup, weights, psum, ALIGNMENT)
        twin = reference.swiglu_expanded(gateup, weights, psum, ALIGNMENT)
        valid = valid_rows((40, 3), rows)
        assert ((got.double() - twin.double())[valid].norm() / twin.double()[valid].norm()).item() < 2e-4

    @pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "raw"])
    @pytest.mark.parametrize("limit", [None, 0.5])
    def test_equals_the_twin(self, weighted, limit):
        counts = (64, 0, 131)
        psum, rows = make_psum(counts)
        gateup, weights = random_rows(rows, 768), random_weights(rows) if weighted else None
        got = kernels.swiglu_expanded(gateup, weights, psum, ALIGNMENT, swiglu_limit=limit)
        twin = reference.swiglu_expanded(gateup, weights, psum, ALIGNMENT, swiglu_limit=limit)
        valid = valid_rows(counts, rows)
        assert ((got.double() - twin.double())[valid].norm() / twin.double()[valid].norm()).item() < 2e-4

    def test_k6_padding_changes_no_bit(self):
        counts = (3, 129)
        psum, rows = make_psum(counts)
        valid = valid_rows(counts, rows)
        gateup, weights = random_rows(rows, 256), random_weights(rows)
        clean = kernels.swiglu_expanded(gateup, weights, psum, ALIGNMENT)
        gateup[~valid], weights[~valid] = float("nan"), float("inf")
        assert torch.equal(kernels.swiglu_expanded(gateup, weights, psum, ALIGNMENT)[valid], clean[valid])


class TestCompilation:
    """The kernels compile for GPUs that are not here (sm_90, sm_100): no spill of registers, no interpreter habit."""

    @pytest.mark.parametrize("arch", [90, 100])
    @pytest.mark.parametrize("ue8m0", [False, True], ids=["fp32", "ue8m0"])
    @pytest.mark.parametrize("loop", [False, True], ids=["grid", "loop"])
    def test_swiglu_compiles(self, arch, ue8m0, loop):
        import os
        import subprocess
        import sys

        groups = kernels.SWIGLU_UE8M0_GROUPS if ue8m0 else kernels.SWIGLU_GROUPS
        # A process of its own: under the interpreter the decorated kernel cannot be compiled.
        script = f"""
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang.srt.layers.moe.ep_moe import kernels
pointers = dict(gateup_ptr="*bf16", out_ptr="*fp8e4nv", scale_ptr="*{"i32" if ue8m0 else "fp32"}", weight_ptr="*fp32",
                psum_ptr="*i32", num_rows="i32", stride_scale_group="i32", limit="fp32")
constants = dict(INTERMEDIATE=2048, NUM_EXPERTS=16, EXPERTS_PAD=16, ALIGN=128, BLOCK_M=kernels.SWIGLU_BLOCK_M,
                 GROUPS={groups}, QUANTIZE=True, UE8M0={ue8m0}, HAS_WEIGHT=True, HAS_LIMIT=False,
                 KEEP_FP32=False, LOOP={loop}, FP8_LIMIT=448.0, FLOOR=1e-10)
names = kernels._swiglu_kernel.arg_names
signature = {{name: pointers.get(name, "constexpr") for name in names}}
source = ASTSource(kernels._swiglu_kernel, signature, constants,
                   {{(names.index(p),): [["tt.divisibility", 16]] for p in list(pointers)[:5]}})
compiled = triton.compile(source, target=GPUTarget("cuda", {arch}, 32), options=dict(num_warps=kernels.SWIGLU_WARPS))
ptx = compiled.asm["ptx"]
print("VECTOR_LOADS", ptx.count("ld.global.v4"), "LOCAL", ptx.count("ld.local"))
"""
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240
        )
        assert run.returncode == 0, run.stderr[-3000:]
        words = run.stdout.split()
        vector_loads = int(words[words.index("VECTOR_LOADS") + 1])
        assert vector_loads >= 2, "gate and up are read 16 bytes at a time"
        assert words[words.index("LOCAL") + 1] == "0", "no register spills to local memory"


@pytest.mark.gpu
class TestOnGpu:
    """K3: offsets past 2^31, on real memory."""

    def test_k3_rows_past_2_31_elements(self):
        rows, intermediate = 360_064, 3072
        psum = torch.tensor([rows], dtype=torch.int32, device="cuda")
        gateup = torch.empty(rows, 2 * intermediate, dtype=torch.bfloat16, device="cuda")
        gateup[-256:] = random_rows(256, 2 * intermediate)
        weights = torch.ones(rows, device="cuda")
        weights[-256:] = random_weights(256)
        q, scale = kernels.swiglu_quant_expanded(gateup, weights, psum, ALIGNMENT)
        small = torch.tensor([256], dtype=torch.int32, device="cuda")
        tail = kernels.swiglu_quant_expanded(gateup[-256:].contiguous(), weights[-256:].contiguous(), small, ALIGNMENT)
        assert torch.equal(q[-256:].view(torch.uint8), tail[0].view(torch.uint8))
        assert torch.equal(scale[-256:], tail[1])

    def test_k3_scale_offsets_past_2_31(self):
        base = torch.empty(2**31 + 4096, dtype=torch.float32, device="cuda")
        x = base.as_strided((128, 4), (1, 2**31 // 3))
        values = random_rows(128, 4, dtype=torch.float32)
        weights = random_weights(128)
        x.copy_(values)
        kernels.scale_expanded_rows_(x, weights)
        assert torch.equal(x, values * weights[:, None])

    def test_quantiser_equals_sglangs(self):
        from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

        x = random_rows(1000, 6144)
        q, scale, _ = quant_tokens(x, torch.zeros(1000, 8, dtype=torch.int32, device="cuda"))
        theirs = sglang_per_token_group_quant_fp8(x, 128, column_major_scales=True, scale_tma_aligned=True)
        assert torch.equal(scale, theirs[1])
        # Both divide approximately, so an exact tie between two FP8 numbers may fall either way.
        assert (q.view(torch.uint8) != theirs[0].view(torch.uint8)).float().mean() < 1e-3
        assert ((q.double() - theirs[0].double()).abs() <= FP8_STEP * theirs[0].double().abs()).all()

    def test_loop_over_capacity_equals_one_tile_per_program(self, monkeypatch):
        counts = (300, 0, 900, 5)
        psum, rows = make_psum(counts)
        gateup, weights = random_rows(rows + 512, 1024), random_weights(rows + 512)
        valid = valid_rows(counts, rows + 512)
        once = kernels.swiglu_quant_expanded(gateup, weights, psum, ALIGNMENT)
        monkeypatch.setattr(kernels, "SWIGLU_MAX_PROGRAMS", 7)
        looped = kernels.swiglu_quant_expanded(gateup, weights, psum, ALIGNMENT)
        assert torch.equal(once[0].view(torch.uint8)[valid], looped[0].view(torch.uint8)[valid])
        assert torch.equal(once[1][valid], looped[1][valid])

    def test_resolved_launch_equals_the_ordinary_one(self):
        psum, rows = make_psum((300, 5))
        gateup, weights = random_rows(rows, 1024), random_weights(rows)
        first = kernels.swiglu_quant_expanded(gateup, weights, psum, ALIGNMENT)
        again = kernels.swiglu_quant_expanded(gateup, weights, psum, ALIGNMENT)
        valid = valid_rows((300, 5), rows)
        assert torch.equal(first[0].view(torch.uint8)[valid], again[0].view(torch.uint8)[valid])
        assert torch.equal(first[1][valid], again[1][valid])
        # An unaligned pointer may not take the kernel that was compiled for aligned ones.
        shifted = torch.empty(rows + 1, device="cuda")[1:].copy_(weights)
        assert shifted.data_ptr() % 16
        odd = kernels.swiglu_quant_expanded(gateup, shifted, psum, ALIGNMENT)
        assert torch.equal(odd[1][valid], again[1][valid])
