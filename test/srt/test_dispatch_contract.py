"""What the dispatcher asks of DeepEP's buffer, and the life of a handle; over a buffer that records its calls."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.moe.token_dispatcher import deepep_v2
from sglang.srt.layers.moe.token_dispatcher.base import CombineInputFormat, RoutewiseLayout
from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2CombineInput, DeepEPv2Dispatcher
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import DeepEPv2Fp8ScaleFormat

HIDDEN, TOPK, EXPERTS, CAPACITY = 256, 2, 8, 16
CAPACITY_VARIABLE = "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
VARIABLES = {
    "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND": "1",
    "SGLANG_DEEPEP_V2_ENABLE_PSUM_PIPELINE": "1",
    "SGLANG_DEEPEP_V2_ENABLE_SYNC_FREE_PREFILL": "0",
    CAPACITY_VARIABLE: str(CAPACITY),
}


class RecordingBuffer:
    """Returns what an ElasticBuffer of one rank returns in shape, and remembers what it was called with."""

    def __init__(self):
        self.dispatched, self.combined, self.fails = [], [], False

    def dispatch(self, x, **options):
        self.dispatched.append(options | {"x": x})
        tokens, scale = (x, None) if isinstance(x, torch.Tensor) else x
        routes = options["topk_idx"]
        rows = tokens.shape[0] * routes.shape[1] if options["do_expand"] else tokens.shape[0]
        recv = torch.zeros(rows, tokens.shape[1], dtype=tokens.dtype)
        recv_scale = None if scale is None else torch.zeros(rows, scale.shape[1])
        weights = options["topk_weights"]
        handle = SimpleNamespace(
            psum_num_recv_tokens_per_expert=torch.zeros(EXPERTS, dtype=torch.int32),
            psum_num_recv_tokens_per_scaleup_rank=torch.tensor([rows]),
        )
        return (
            recv if scale is None else (recv, recv_scale),
            None if options["do_expand"] else routes,
            weights.flatten() if options["do_expand"] else weights,
            handle,
            SimpleNamespace(event=None),
        )

    def combine(self, x, handle, topk_weights):
        self.combined.append((x, handle, topk_weights))
        if self.fails:
            raise RuntimeError("the network is gone")
        tokens = self.dispatched[-1]["topk_idx"].shape[0]
        return torch.ones(tokens, HIDDEN, dtype=torch.bfloat16), None, SimpleNamespace(event=None)


class Facade:
    """Stands for DeepEPv2Buffer: one buffer under every key."""

    def __init__(self, buffer):
        self.buffer, self.handles = buffer, 0

    def make_key(self, *parts):
        return parts + (1,)

    def find(self, key):
        return self.buffer

    get_or_build = find

    def hold_handle(self, handle):
        self.handles += 1

    def release_handle(self, handle):
        self.handles -= handle is not None


@pytest.fixture
def buffer() -> RecordingBuffer:
    return RecordingBuffer()


@pytest.fixture
def make(monkeypatch, buffer):
    """Builds a dispatcher over ``buffer``; ``extend`` and ``psum`` say what the batch and DeepGEMM are."""
    facade = Facade(buffer)
    parallel = SimpleNamespace(attn_dp_size=2, attn_cp_size=1, tp_size=1, tp_group=None)
    monkeypatch.setattr(deepep_v2, "DeepEPv2Buffer", facade)
    monkeypatch.setattr(deepep_v2, "get_allow_hybrid_mode", lambda: False)
    monkeypatch.setattr(deepep_v2, "get_parallel", lambda: parallel)
    monkeypatch.setattr(deepep_v2, "sglang_per_token_group_quant_fp8", quantize)
    formats = DeepEPv2Fp8ScaleFormat(tma_aligned=True, ue8m0=False)
    monkeypatch.setattr(deepep_v2, "get_deepep_v2_fp8_scale_format", lambda: formats)

    def build(*, extend=True, psum=True, fp8=False, variables=None, **sizes):
        for name, value in (VARIABLES | (variables or {})).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(deepep_v2, "get_is_extend_in_batch", lambda: extend)
        refusal = None if psum else "DeepGEMM is not available"
        monkeypatch.setattr(deepep_v2._DeepEPv2Impl, "_find_psum_refusal", lambda self: refusal)
        dispatcher = DeepEPv2Dispatcher(
            group=None,
            params_dtype=torch.bfloat16,
            use_fp8_dispatch=fp8,
            **{"router_topk": TOPK, "num_experts": EXPERTS, "num_local_experts": EXPERTS, "hidden_size": HIDDEN}
            | sizes,
        )
        dispatcher.facade = facade
        return dispatcher

    return build


def quantize(x, group, column_major_scales, scale_tma_aligned, scale_ue8m0):
    assert column_major_scales == scale_tma_aligned
    return x.to(torch.float8_e4m3fn), torch.ones(x.shape[0], x.shape[1] // group)


def routed(tokens: int):
    """Hidden states and routes of ``tokens`` tokens."""
    ids = torch.arange(tokens * TOPK, dtype=torch.int32).view(tokens, TOPK) % EXPERTS
    weights = torch.full((tokens, TOPK), 0.5)
    return torch.ones(tokens, HIDDEN, dtype=torch.bfloat16), StandardTopKOutput(weights, ids, None)


def answer(dispatched) -> DeepEPv2CombineInput:
    return DeepEPv2CombineInput(dispatched.hidden_states.bfloat16(), None)


@pytest.mark.parametrize(
    ("extend", "expand", "psum", "do_expand", "masked", "psum_layout"),
    [
        pytest.param(True, "1", True, True, False, True, id="psum prefill"),
        pytest.param(True, "1", False, True, False, False, id="labels prefill"),
        pytest.param(True, "0", True, False, False, False, id="non-expanded prefill"),
        pytest.param(False, "1", True, True, True, False, id="decode"),
        pytest.param(False, "0", True, True, True, False, id="decode, toggle off"),
    ],
)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_layouts(make, buffer, extend, expand, psum, do_expand, masked, psum_layout, fp8):
    dispatcher = make(extend=extend, psum=psum, fp8=fp8, variables={"SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND": expand})
    output = dispatcher.dispatch(*routed(3))
    (asked,) = buffer.dispatched
    assert (asked["do_expand"], asked["do_cpu_sync"]) == (do_expand, extend)
    assert (output.is_expanded, output.use_masked_gemm, output.use_psum_layout) == (do_expand, masked, psum_layout)
    assert (output.topk_ids is None) is do_expand
    # Labels and decode read row-major scales; the psum GEMM and SGLang's scatter read aligned columns.
    assert asked["use_tma_aligned_col_major_sf"] is (fp8 and (psum_layout or not do_expand))


def test_r6_alignment_changed_after_construction(make, buffer, monkeypatch):
    """What refuses the psum pipeline only when the first batch comes still refuses it."""
    dispatcher = make()
    reason = "DeepGEMM aligns experts to 64 rows, dispatch to 128"
    monkeypatch.setattr(deepep_v2._DeepEPv2Impl, "_find_psum_refusal", lambda self: reason)
    output = dispatcher.dispatch(*routed(2))
    assert output.is_expanded and not output.use_psum_layout


@pytest.mark.parametrize("num_sms", [0, 24])
def test_num_sms_is_passed_through(make, buffer, num_sms):
    make(variables={"SGLANG_DEEPEP_V2_NUM_SMS": str(num_sms)}).dispatch(*routed(1))
    assert buffer.dispatched[0]["num_sms"] == num_sms


def test_r4_collective_arguments_do_not_depend_on_the_batch(make, buffer):
    dispatcher = make()
    for tokens in (1, 5, 0, CAPACITY):
        dispatcher.combine(answer(dispatcher.dispatch(*routed(tokens))))
    assert {asked["num_max_tokens_per_rank"] for asked in buffer.dispatched} == {CAPACITY}
    assert {asked["expert_alignment"] for asked in buffer.dispatched} == {128}


@pytest.mark.parametrize("extend", [True, False], ids=["prefill", "decode"])
def test_r4_capacity_is_checked_first(make, buffer, extend):
    dispatcher = make(extend=extend)
    with pytest.raises(ValueError, match=f"got {CAPACITY + 1} tokens.* holds {CAPACITY}\\b") as refused:
        dispatcher.dispatch(*routed(CAPACITY + 1))
    assert "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK" in str(refused.value)
    assert not buffer.dispatched
    dispatcher.dispatch(*routed(CAPACITY))


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float32])
def test_r5_routes_are_cast_before_deepep_sees_them(make, buffer, ids_dtype, weights_dtype):
    x, routes = routed(4)
    ids = torch.stack([routes.topk_ids.to(ids_dtype)] * 2, -1)[..., 0]
    weights = torch.stack([routes.topk_weights.to(weights_dtype)] * 2, -1)[..., 0]
    assert not ids.is_contiguous() and not weights.is_contiguous()
    make().dispatch(x, StandardTopKOutput(weights, ids, None))
    (asked,) = buffer.dispatched
    assert asked["topk_idx"].dtype == torch.int64 and asked["topk_idx"].is_contiguous()
    assert asked["topk_weights"].dtype == torch.float32 and asked["topk_weights"].is_contiguous()
    assert torch.equal(asked["topk_idx"], routes.topk_ids.long())
    assert torch.equal(asked["topk_weights"], routes.topk_weights)


def test_r2_idle_rank_joins_with_one_weightless_token(make, buffer):
    dispatcher = make()
    output = dispatcher.dispatch(*routed(0))
    (asked,) = buffer.dispatched
    assert asked["x"].shape == (1, HIDDEN)
    assert asked["topk_idx"].unique().numel() == TOPK
    assert not asked["topk_weights"].any()
    assert dispatcher.combine(answer(output)).shape == (0, HIDDEN)
    # The next batch is an ordinary one again.
    assert dispatcher.combine(answer(dispatcher.dispatch(*routed(3)))).shape == (3, HIDDEN)


def test_r2_idle_decode_needs_no_token(make, buffer):
    dispatcher = make(extend=False)
    dispatcher.combine(answer(dispatcher.dispatch(*routed(0))))
    assert buffer.dispatched[0]["topk_idx"].shape[0] == 0


def test_r1_one_dispatch_at_a_time(make):
    dispatcher = make()
    output = dispatcher.dispatch(*routed(2))
    with pytest.raises(RuntimeError, match="handle is unconsumed"):
        dispatcher.dispatch(*routed(2))
    assert dispatcher.facade.handles == 1
    dispatcher.combine(answer(output))
    assert dispatcher.facade.handles == 0
    dispatcher.dispatch(*routed(2))


def test_r1_a_handle_serves_once(make, buffer):
    dispatcher = make()
    output = dispatcher.dispatch(*routed(2))
    dispatcher.combine(answer(output))
    with pytest.raises(RuntimeError, match="without a valid dispatch handle"):
        dispatcher.combine(answer(output))
    assert dispatcher.facade.handles == 0


def test_r1_a_failed_combine_releases_the_handle_and_the_idle_flag(make, buffer):
    dispatcher = make()
    output = dispatcher.dispatch(*routed(0))
    buffer.fails = True
    with pytest.raises(RuntimeError, match="the network is gone"):
        dispatcher.combine(answer(output))
    buffer.fails = False
    assert dispatcher.facade.handles == 0
    assert dispatcher.combine(answer(dispatcher.dispatch(*routed(2)))).shape == (2, HIDDEN)


def test_r7_unreduced_rows_are_refused_and_release_the_handle(make, buffer):
    dispatcher = make()
    output = dispatcher.dispatch(*routed(2))
    with pytest.raises(ValueError, match="routewise finaliser"):
        dispatcher.combine(answer(output)._replace(routewise_layout=RoutewiseLayout.EXPANDED))
    assert not buffer.combined
    dispatcher.dispatch(*routed(2))


def test_rows_without_one_weight_each_are_refused(make, buffer, monkeypatch):
    dispatch = buffer.dispatch

    def one_weight_short(x, **options):
        recv, ids, weights, handle, event = dispatch(x, **options)
        return recv, ids, weights[:-1], handle, event

    monkeypatch.setattr(buffer, "dispatch", one_weight_short)
    with pytest.raises(ValueError, match=r"4 expanded rows and router weights of shape \(3,\)"):
        make().dispatch(*routed(2))


def test_rows_of_another_backend_are_refused(make):
    dispatcher = make()
    dispatcher.dispatch(*routed(2))
    with pytest.raises(TypeError, match="DeepEP v2 combine got an input of format"):
        dispatcher.combine(SimpleNamespace(format=CombineInputFormat.STANDARD))
    # The dispatch that the call should have answered is over.
    assert dispatcher.facade.handles == 0
    dispatcher.dispatch(*routed(2))


@pytest.mark.parametrize(
    ("attn_dp_size", "tokens", "height"),
    [(2, 3, 1024), (1, 3, 128), (1, 64, 256), (1, 63, 128), (1, 0, 128), (1, 512, 1024)],
)
def test_decode_slab_holds_what_one_expert_may_get(make, monkeypatch, attn_dp_size, tokens, height):
    """Every token of two ranks may pick one expert; ranks that split a batch differ by a token, others by anything."""
    dispatcher = make(extend=False, num_local_experts=EXPERTS // 2, variables={CAPACITY_VARIABLE: "512"})
    parallel = SimpleNamespace(
        attn_dp_size=attn_dp_size, attn_cp_size=1, tp_size=2, tp_group=SimpleNamespace(device_group=None)
    )
    monkeypatch.setattr(deepep_v2, "get_parallel", lambda: parallel)
    assert dispatcher.dispatch(*routed(tokens)).masked_max_m == height


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 384}, "multiple of 256, the model has 384"),
        ({"router_topk": 33, "num_experts": 64, "num_local_experts": 64}, "at most 32 experts, the model selects 33"),
        ({"num_experts": 9, "num_local_experts": 4}, "9 experts do not divide"),
    ],
)
def test_r5_sizes_that_deepep_cannot_take(make, sizes, message):
    with pytest.raises(ValueError, match=message):
        make(**sizes)


@pytest.mark.parametrize(
    ("hidden", "topk", "message"),
    [(HIDDEN + 256, TOPK, "hidden size 512, the layer has 256"), (HIDDEN, TOPK + 1, r"shape \(2, 3\)")],
)
def test_another_layers_input_is_refused(make, buffer, hidden, topk, message):
    routes = StandardTopKOutput(torch.ones(2, topk), torch.zeros(2, topk, dtype=torch.int32), None)
    with pytest.raises(ValueError, match=message):
        make().dispatch(torch.ones(2, hidden, dtype=torch.bfloat16), routes)
    assert not buffer.dispatched
