"""Measurements of what might make the layer faster still; each function takes a prepared worker and returns rows.

A row: ``variant``, ``what`` (one line), ``us``, and figures of its own. They talk to DeepEP, DeepGEMM and the patch's
kernels directly, without ``FusedMoE``.
"""

from __future__ import annotations

import importlib.util
import re
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl
from activation import activation_inputs
from activation_counts import num_bytes
from half_batches import half_batches
from layer_parts import Floor, column_major, deep_gemm_of, expanded_dispatch
from variant_tools import REPEATS, median_us, own_buffer


def _rows(received) -> torch.Tensor:
    generator = torch.Generator(received[0].device).manual_seed(3)
    return torch.randn(received[0].shape, generator=generator, device=received[0].device).to(torch.bfloat16)


def multiple_reduction(worker) -> list[dict]:
    """allow_multiple_reduction True (local rows summed to bf16 before sending) against False (one fp32 sum)."""
    x = worker.tools.quantise(worker.x, column_major=True)
    rows = []
    for allowed in (True, False):
        buffer = own_buffer(worker, allow_multiple_reduction=allowed)
        received, _, _, handle, _ = expanded_dispatch(worker, buffer, x, True)
        sent = _rows(received)
        combined = buffer.combine(sent, handle=handle)[0]

        def pair(buffer=buffer, sent=sent):
            buffer.combine(sent, handle=expanded_dispatch(worker, buffer, x, True)[3])

        row = {
            "variant": f"allow_multiple_reduction={allowed}",
            "what": "dispatch + combine",
            "us": median_us(worker, pair),
        }
        row["error"] = _combine_error(worker, buffer, x)
        row["norm"] = float(combined.double().norm())
        rows.append(row)
        del buffer
    return rows


def _weighted_rows(worker, buffer, x):
    """A dispatch's expanded rows, dequantised and times their router weight, in bf16; and its handle."""
    (fp8, scale), _, weights, handle, _ = expanded_dispatch(worker, buffer, x, True)
    count = fp8.shape[0]
    values = fp8.float().view(count, -1, 128) * scale.float()[:, :, None]
    return (values.view(count, -1) * weights.float()[:, None]).to(torch.bfloat16), handle


def _combine_error(worker, buffer, x) -> float | None:
    """Relative error of combine against float64, each expanded row being the token's own row times its router weight.

    What a row holds depends on its token and weight alone, so the exact sum is known on every rank without a message.
    """
    sent, handle = _weighted_rows(worker, buffer, x)
    combined = buffer.combine(sent, handle=handle)[0].double()
    own = x[0].double().view(worker.tokens, -1, 128) * x[1].double()[:, :, None]
    wanted = own.view(worker.tokens, -1) * worker.topk_weights.double().sum(1, keepdim=True)
    return float((combined - wanted).norm() / wanted.norm())


def combine_bias(worker) -> list[dict]:
    """A shared expert's output through combine's ``bias`` against an addition afterwards."""
    x = worker.tools.quantise(worker.x, column_major=True)
    buffer = own_buffer(worker)
    shared = torch.randn_like(worker.x)
    sent, handle = _weighted_rows(worker, buffer, x)
    plain = buffer.combine(sent, handle=handle)[0]
    # Another dispatch may order an expert's rows differently, so it brings its own rows.
    sent, handle = _weighted_rows(worker, buffer, x)
    biased = buffer.combine(sent, handle=handle, bias=shared)[0]
    added = (plain.float() + shared.float()).to(torch.bfloat16)
    difference = float((biased.float() - added.float()).norm() / added.float().norm())

    def without() -> torch.Tensor:
        return buffer.combine(sent, handle=expanded_dispatch(worker, buffer, x, True)[3])[0]

    return [
        {"variant": "no shared expert", "what": "dispatch + combine", "us": median_us(worker, without)},
        {
            "variant": "addition afterwards",
            "what": "dispatch + combine + add_",
            "us": median_us(worker, lambda: without().add_(shared)),
        },
        {
            "variant": "bias",
            "what": "dispatch + combine(bias=)",
            "us": median_us(
                worker, lambda: buffer.combine(sent, handle=expanded_dispatch(worker, buffer, x, True)[3], bias=shared)
            ),
            "difference": difference,
        },
    ]


def gemm_options(worker) -> list[dict]:
    """Layouts and hints of DeepGEMM's contiguous grouped GEMM, and a sync-free launch sized for capacity."""
    floor = Floor(worker)
    w13, s13, w2, s2 = worker.weights
    rows_per_expert = -(-floor.valid // worker.local_experts)
    labels = torch.repeat_interleave(
        torch.arange(worker.local_experts, device=worker.device, dtype=torch.int32), _aligned_counts(floor.psum)
    )
    capacity = worker.world * worker.tokens * min(worker.topk, worker.local_experts) + worker.local_experts * 128
    capacity = -(-capacity // 128) * 128
    prepared = []

    def prepare(variant: str, layout: torch.Tensor, rows: int, **options) -> None:
        def pad(tensor: torch.Tensor) -> torch.Tensor:
            if rows == tensor.shape[0]:
                return tensor
            if tensor.dtype == torch.float32:
                wide = torch.ones(tensor.shape[1], rows, device=tensor.device).t()
            else:
                wide = torch.zeros(rows, tensor.shape[1], device=tensor.device, dtype=torch.uint8).view(tensor.dtype)
            wide[: tensor.shape[0]] = tensor
            return wide

        x, scale, down, down_scale = (pad(t) for t in (floor.x, floor.x_scale, floor.down, floor.down_scale))
        gate_up = torch.empty(rows, w13.shape[1], device=x.device, dtype=torch.bfloat16)
        out = torch.empty(rows, w2.shape[1], device=x.device, dtype=torch.bfloat16)

        def both() -> None:
            floor.gemm((x, scale), (w13, s13), gate_up, layout, **options)
            floor.gemm((down, down_scale), (w2, s2), out, layout, **options)

        prepared.append(({"variant": variant, "what": f"both grouped GEMMs, {rows} rows"}, both, []))

    rows = floor.x.shape[0]
    prepare("labels", labels, rows)
    prepare("psum", floor.psum, rows, use_psum_layout=True)
    if worker.device.type == "cuda":
        for variant, options in (
            ("psum, padding not zeroed", {"ensure_zero_padding": False}),
            ("psum, expected rows per expert", {"expected_m_for_psum_layout": rows_per_expert}),
            ("psum, expected rows in total", {"expected_m_for_psum_layout": floor.valid}),
        ):
            prepare(variant, floor.psum, rows, use_psum_layout=True, **options)
    prepare("psum, capacity-sized", floor.psum, capacity, use_psum_layout=True)
    if worker.device.type == "cuda":
        hint = {"expected_m_for_psum_layout": rows_per_expert}
        prepare("psum, capacity-sized, expected rows per expert", floor.psum, capacity, use_psum_layout=True, **hint)
    # In turns: the first GEMMs on a cool device run a tenth faster than the last ones on a hot one.
    for _ in range(REPEATS):
        for row, both, times in prepared:
            if "failed" in row:
                continue
            try:
                times.append(worker.tools.graph_us([both] * 3))
            except Exception as error:
                row["failed"] = str(error)[:200]
    return [row | {"us": statistics.median(times) if times else None} for row, _, times in prepared]


def row_alignment(worker) -> list[dict]:
    """Both grouped GEMMs with experts aligned to 128 rows against 256, which lets DeepGEMM take taller tiles."""
    deep_gemm = deep_gemm_of(worker)
    standard = deep_gemm.get_mk_alignment_for_contiguous_layout()
    prepared = []
    for variant, alignment in (("128 rows", 128), ("256 rows", 256)):
        deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
        try:
            floor = Floor(worker, alignment)
            row = {"variant": variant, "what": f"both grouped GEMMs, {floor.x.shape[0]} rows"}
            prepared.append((row, floor, []))
        except Exception as error:
            row = {"variant": variant, "what": "both grouped GEMMs", "failed": str(error)[:200]}
            prepared.append((row, None, []))
        finally:
            deep_gemm.set_mk_alignment_for_contiguous_layout(standard)
    # A captured graph keeps its kernels, whatever the alignment is at its replay; in turns, for the clocks.
    for _ in range(2 * REPEATS):
        for _, floor, times in prepared:
            if floor:
                times.append(worker.tools.mean_us(floor.replay, 3) / 3)
    return [row | {"us": statistics.median(times) if times else None} for row, _, times in prepared]


def _aligned_counts(psum: torch.Tensor, alignment: int = 128) -> torch.Tensor:
    ends = -(-psum // alignment) * alignment
    return torch.diff(ends, prepend=ends.new_zeros(1))


@triton.jit
def _transpose_kernel(rows_ptr, columns_ptr, rows, GROUPS: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.arange(0, PAD)
    mask = (row < rows)[:, None] & (group < GROUPS)[None, :]
    scale = tl.load(rows_ptr + row[:, None] * GROUPS + group[None, :], mask=mask, other=0.0)
    tl.store(columns_ptr + group[None, :].to(tl.int64) * rows + row[:, None], scale, mask=mask)


def _transposed(scale: torch.Tensor) -> torch.Tensor:
    """Row-major scales [rows, groups], column-major; rows are a multiple of 4 already."""
    if not scale.is_cuda:
        return column_major(scale)
    rows, groups = scale.shape
    columns = torch.empty(groups, rows, device=scale.device, dtype=scale.dtype).t()
    _transpose_kernel[(triton.cdiv(rows, 64),)](
        scale, columns, rows, GROUPS=groups, PAD=triton.next_power_of_2(groups), BLOCK=64, num_warps=4
    )
    return columns


def scale_layout(worker) -> list[dict]:
    """Scales that leave dispatch column-major against row-major ones and a transposing kernel of our own."""
    buffer = own_buffer(worker)
    by_column, by_row = (worker.tools.quantise(worker.x, column_major=layout) for layout in (True, False))

    received, _, _, handle, _ = expanded_dispatch(worker, buffer, by_column, False)
    sent = _rows(received)
    buffer.combine(sent, handle=handle)

    def columns() -> None:
        buffer.combine(sent, handle=expanded_dispatch(worker, buffer, by_column, False)[3])

    def rows(transpose: bool) -> None:
        (_, scale), _, _, handle, _ = expanded_dispatch(
            worker, buffer, by_row, False, use_tma_aligned_col_major_sf=False
        )
        if transpose:
            _transposed(scale)
        buffer.combine(sent, handle=handle)

    what = "sync-free dispatch + combine"
    return [
        {"variant": variant, "what": f"{what}{rest}", "us": median_us(worker, call)}
        for variant, rest, call in (
            ("column-major out of dispatch", "", columns),
            ("row-major", ", not readable by the GEMM", lambda: rows(False)),
            ("row-major, then transposed", " + a kernel", lambda: rows(True)),
        )
    ]


def _kernels_from_the_end():
    """The patch's kernels module with the activation's tiles taken from the last row to the first."""
    from sglang.srt.layers.moe.ep_moe import kernels

    source = Path(kernels.__file__).read_text()
    for forward, backward in (
        (r"tile \* BLOCK_M,", "(tl.cdiv(last, BLOCK_M) - 1 - tile) * BLOCK_M,"),
        (r"tl\.program_id\(0\) \* BLOCK_M,", "(tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M,"),
    ):
        source, count = re.subn(rf"(_swiglu_tile\(\s+){forward}", rf"\1{backward}", source)
        assert count == 1, f"{count} calls of _swiglu_tile start with {forward}"
    # Triton reads a kernel's source from its file, for as long as it is compiled.
    folder = tempfile.TemporaryDirectory(prefix="activation-order-")
    path = Path(folder.name) / "kernels_from_the_end.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("kernels_from_the_end", path)
    module = importlib.util.module_from_spec(spec)
    module.folder = folder
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def activation_order(worker) -> list[dict]:
    """Activation and both GEMMs around it, rows taken first to last against last to first.

    The first GEMM leaves its last rows in the L2 cache, and the second starts with the first ones.
    """
    from sglang.srt.layers.moe.ep_moe import kernels

    floor = Floor(worker)
    w13, s13, w2, s2 = worker.weights
    generator = torch.Generator(worker.device).manual_seed(5)
    row_weights = torch.rand(floor.x.shape[0], generator=generator, device=worker.device)
    prepared = []
    for variant, module in (("first rows first", kernels), ("last rows first", _kernels_from_the_end())):

        def chain(module=module) -> None:
            floor.gemm((floor.x, floor.x_scale), (w13, s13), floor.gate_up, floor.psum, use_psum_layout=True)
            down = module.swiglu_quant_expanded(floor.gate_up, row_weights, floor.psum, 128)
            floor.gemm(down, (w2, s2), floor.output, floor.psum, use_psum_layout=True)

        with torch.inference_mode():
            row = {"variant": variant, "what": "first GEMM, activation, second GEMM"}
            prepared.append((row, worker.tools.graph([chain] * 3), floor.output.clone(), []))
    # In turns, for the clocks.
    for _ in range(4 * REPEATS):
        for _, replay, _, times in prepared:
            times.append(worker.tools.mean_us(replay, 2) / 3)
    valid = slice(0, int(floor.psum[0]))
    equal = torch.equal(prepared[0][2][valid], prepared[1][2][valid])
    return [row | {"us": statistics.median(times), "same_bits": equal} for row, _, _, times in prepared]


def communication_sms(worker) -> list[dict]:
    """Dispatch and combine on fewer SMs than DeepEP takes by itself (0)."""
    x = worker.tools.quantise(worker.x, column_major=True)
    buffer = own_buffer(worker)
    found = []
    for num_sms in (0, 24, 48, 64, 96):
        sent = _rows(expanded_dispatch(worker, buffer, x, False, num_sms=num_sms)[0])

        def pair(num_sms=num_sms, sent=sent):
            buffer.combine(sent, handle=expanded_dispatch(worker, buffer, x, False, num_sms=num_sms)[3])

        pair()
        found.append(
            {"variant": f"num_sms={num_sms}", "what": "sync-free dispatch + combine", "us": median_us(worker, pair)}
        )
        del sent
    return found


def swiglu_tiles(worker) -> list[dict]:
    """Tile shapes of ``swiglu_quant_expanded``: rows x 128-column groups, warps, and the cap on programs."""
    from sglang.srt.layers.moe.ep_moe import kernels

    names = ("SWIGLU_BLOCK_M", "SWIGLU_GROUPS", "SWIGLU_WARPS", "SWIGLU_MAX_PROGRAMS")
    saved = {name: getattr(kernels, name) for name in names}
    chosen = tuple(saved.values())
    gateups, weights, psum, valid = activation_inputs(worker)
    moved, found = num_bytes(valid, worker.intermediate), []
    sizes = [
        (m, g, w) for m in (1, 2, 4, 8, 16) for g in (1, 2, 4, 8, 16) for w in (2, 4, 8) if 1024 <= m * g * 128 <= 8192
    ]
    tiles = [(*size, chosen[3]) for size in sizes] + [(*chosen[:3], cap) for cap in (528, 1056, 2112, 4224, 65536)]
    if worker.device.type == "cpu":
        tiles = [chosen]
    try:
        for tile in dict.fromkeys([chosen, *tiles]):
            for name, value in zip(names, tile):
                setattr(kernels, name, value)
            row = {"variant": "BM {} G {} W {} P {}".format(*tile), "what": f"{valid} rows"}
            try:
                calls = [
                    lambda gateup=gateup: kernels.swiglu_quant_expanded(gateup, weights, psum, 128)
                    for gateup in gateups
                ]
                row["us"] = worker.tools.graph_us(calls * 2)
                row["share_of_copy"] = moved / row["us"] / 1e3 / worker.bandwidth
            except Exception as error:
                row |= {"us": None, "failed": str(error)[:200]}
            found.append(row)
    finally:
        for name, value in saved.items():
            setattr(kernels, name, value)
    return sorted(found, key=lambda row: row["us"] or float("inf"))


VARIANTS = {
    "multiple_reduction": multiple_reduction,
    "combine_bias": combine_bias,
    "half_batches": half_batches,
    "gemm_options": gemm_options,
    "row_alignment": row_alignment,
    "scale_layout": scale_layout,
    "activation_order": activation_order,
    "communication_sms": communication_sms,
    "swiglu_tiles": swiglu_tiles,
}
