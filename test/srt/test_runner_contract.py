"""The expanded prefill between dispatch and combine, on one rank without a transport: rows weighted exactly once."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.moe.moe_runner import deep_gemm as runner
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher.base import RoutewiseLayout
from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2DispatchOutput
from sglang.srt.plugins import load_plugins

from kernel_cases import make_psum, valid_rows
from moe_layer import Shape, Weights, relative_error

ALIGNMENT = 128
COUNTS = (3, 0, 130, 1)
SHAPE = Shape(experts=len(COUNTS), hidden=256, intermediate=256, topk=2)
# Of the exact output's norm: bf16 rows differ by their rounding, FP8 rows by that of their 1x128 activation scales.
MAX_ERROR = {False: 0.01, True: 0.06}
PIPELINES = [pytest.param(True, id="psum"), pytest.param(False, id="labels")]
DTYPES = [pytest.param(False, id="bf16"), pytest.param(True, id="fp8")]


@pytest.fixture(scope="module", autouse=True)
def platform():
    load_plugins()


@pytest.fixture(autouse=True)
def no_groups(monkeypatch):
    """SGLang's bf16 chain asks the process groups, which one rank does not have, whether to use symmetric memory."""
    monkeypatch.setattr(runner, "get_parallel", lambda: SimpleNamespace(tp_group=None))
    monkeypatch.setattr(runner, "is_allocation_symmetric", lambda: False)
    monkeypatch.setattr(runner, "use_symmetric_memory", lambda group, disabled: nullcontext())


def quantize(x: torch.Tensor, column_major: bool):
    """FP8 rows and their fp32 scale per 128 columns, in the layout that dispatch hands over."""
    groups = x.float().view(x.shape[0], x.shape[1] // 128, 128)
    scale = groups.abs().amax(-1).clamp(min=1e-10) / 448
    q = (groups / scale[..., None]).view(x.shape).to(torch.float8_e4m3fn)
    if column_major:
        lanes = -(-x.shape[0] // 4) * 4
        scale = torch.empty_strided(scale.shape, (1, lanes)).copy_(scale)
    return q, scale


@pytest.fixture(params=DTYPES)
def case(request):
    """Expanded rows of four experts with NaN in everything that is padding, and the exact unweighted outputs."""
    fp8 = request.param
    generator = torch.Generator().manual_seed(5)
    psum, rows = make_psum(COUNTS, ALIGNMENT)
    psum = psum.cpu()
    valid = valid_rows(COUNTS, rows).cpu()
    weights = Weights.make(SHAPE, fp8)
    x = torch.randn(rows, SHAPE.hidden, generator=generator).bfloat16()
    router = torch.rand(rows, generator=generator) + 0.3
    w13, w2 = weights.exact()
    exact = torch.zeros(rows, SHAPE.hidden, dtype=torch.float64)
    start = 0
    for expert, count in enumerate(COUNTS):
        segment = slice(start, start + count)
        gate, up = (x[segment].double() @ w13[expert].T).chunk(2, 1)
        exact[segment] = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
        start += -(-count // ALIGNMENT) * ALIGNMENT
    return SimpleNamespace(fp8=fp8, x=x, psum=psum, valid=valid, weights=weights, router=router, exact=exact)


def run(case, psum_layout: bool, padding: float = float("nan"), **options):
    """Pre-permute, runner core and post-permute of one layer over such padding; the combine input."""
    x, scale, router = case.x.clone(), None, case.router.clone()
    router[~case.valid] = padding
    if case.fp8:
        x, scale = quantize(x, psum_layout)
        scale[~case.valid] = padding
        # 0x7f is the NaN of e4m3fn, which has no infinity.
        x.view(torch.uint8)[~case.valid] = 0x7F if padding else 0
    else:
        x[~case.valid] = padding
    dispatched = DeepEPv2DispatchOutput(
        x,
        scale,
        None,
        router,
        case.psum,
        is_expanded=True,
        expert_alignment=ALIGNMENT,
        use_psum_layout=psum_layout,
    )
    quant_info = runner.DeepGemmMoeQuantInfo(
        case.weights.w13,
        case.weights.w2,
        case.fp8,
        case.weights.w13_scale,
        case.weights.w2_scale,
        [128, 128] if case.fp8 else None,
    )
    config = MoeRunnerConfig(
        num_experts=SHAPE.experts,
        num_local_experts=SHAPE.experts,
        hidden_size=SHAPE.hidden,
        intermediate_size_per_partition=SHAPE.intermediate,
        top_k=SHAPE.topk,
        params_dtype=torch.bfloat16,
        **options,
    )
    state = {}
    runner_input = runner.pre_permute_deepep_v2_to_deep_gemm(dispatched, quant_info, config, state)
    output = runner.DeepGemmRunnerCore(config).run(runner_input, quant_info, state)
    return runner.post_permute_deep_gemm_to_deepep_v2(output, quant_info, config, state)


@pytest.mark.parametrize("psum_layout", PIPELINES)
def test_rows_are_weighted_once(case, psum_layout):
    combined = run(case, psum_layout)
    exact = case.exact * case.router.double()[:, None]
    assert relative_error(combined.hidden_states[case.valid], exact[case.valid]) < MAX_ERROR[case.fp8]
    assert combined.hidden_states.dtype == torch.bfloat16
    assert combined.topk_weights is None and combined.routewise_layout is None


@pytest.mark.parametrize("psum_layout", PIPELINES)
def test_r7_raw_rows_stay_unweighted(case, psum_layout):
    """A routewise finaliser applies the router weights itself, so it gets them beside raw rows."""
    combined = run(case, psum_layout, no_combine=True)
    assert relative_error(combined.hidden_states[case.valid], case.exact[case.valid]) < MAX_ERROR[case.fp8]
    assert torch.equal(combined.topk_weights[case.valid], case.router[case.valid])
    assert combined.routewise_layout is RoutewiseLayout.EXPANDED


@pytest.mark.parametrize("psum_layout", PIPELINES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_k6_padding_changes_no_bit_through_both_gemms(case, psum_layout, poison):
    clean = run(case, psum_layout, padding=0.0).hidden_states[case.valid]
    assert clean.isfinite().all() and clean.any()
    assert torch.equal(run(case, psum_layout, padding=poison).hidden_states[case.valid], clean)


def test_pipelines_agree(case):
    psum, labels = (run(case, layout).hidden_states[case.valid] for layout in (True, False))
    assert relative_error(psum, labels) <= 5e-3


def test_ue8m0_scales_are_never_weighted(case, monkeypatch):
    """A power of two cannot take the weight: the labels pipeline leaves SGLang's chain alone and weights its output."""
    weighted = []

    def scale_rows(x, row_weights):
        weighted.append(x.dtype)
        return x.copy_(x.float() * row_weights[:, None])

    def chain(self, runner_input, quant_info, running_state):
        return case.exact.bfloat16()

    monkeypatch.setattr(runner.deep_gemm_wrapper, "DEEPGEMM_SCALE_UE8M0", True)
    monkeypatch.setattr(runner.DeepGemmRunnerCore, "_run_contiguous_gemm", chain)
    monkeypatch.setattr(runner.DeepGemmRunnerCore, "_run_bf16_contiguous_gemm", chain)
    monkeypatch.setattr(runner.kernels, "scale_expanded_rows_", scale_rows)
    combined = run(case, psum_layout=False)
    assert weighted == [torch.bfloat16]
    exact = case.exact * case.router.double()[:, None]
    assert relative_error(combined.hidden_states[case.valid], exact[case.valid]) < MAX_ERROR[False]


@pytest.mark.parametrize("psum_layout", PIPELINES)
def test_k1_no_rows(case, psum_layout, monkeypatch):
    """A rank that receives nothing launches nothing and hands an empty tensor on."""
    for name in ("_run_psum", "_run_labels", "_run_bf16_contiguous_gemm", "_run_contiguous_gemm"):
        monkeypatch.setattr(runner.DeepGemmRunnerCore, name, None)
    empty = SimpleNamespace(**vars(case))
    empty.x, empty.router, empty.valid = case.x[:0], case.router[:0], case.valid[:0]
    empty.psum = torch.zeros_like(case.psum)
    assert run(empty, psum_layout).hidden_states.shape == (0, SHAPE.hidden)


def test_rows_without_scales_are_refused(case):
    if not case.fp8:
        pytest.skip("bf16 rows have none")
    q, _ = quantize(case.x, True)
    dispatched = DeepEPv2DispatchOutput(q, None, None, case.router, case.psum, is_expanded=True)
    with pytest.raises(RuntimeError, match="float8_e4m3fn rows without scales"):
        runner.pre_permute_deepep_v2_to_deep_gemm(dispatched, None, MoeRunnerConfig(), {})
