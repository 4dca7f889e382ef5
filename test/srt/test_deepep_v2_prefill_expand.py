"""The feature's test: expanded prefill of a real FusedMoE, at EP1, EP2 and EP4, on every path.

Expanded against non-expanded against a dense float64 computation, FP8 and BF16 experts, switched by the variables a
user sets. One process per rank runs all cases of a world size.
"""

import logging

import pytest
import torch

from moe_layer import (
    DEVICE,
    PATHS,
    Batch,
    Shape,
    Weights,
    build_layer,
    forward,
    relative_error,
    truth,
    variables,
)
from rank_processes import run_ranks

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="test_gpu_layer.py runs these checks on real DeepEP")

# Interpreted SGLang kernels; bounds of random data: FP8 experts, BF16 experts.
ENVIRONMENT = dict(TRITON_INTERPRET="1", SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK="64")
AGREEMENT = 5e-3
ERROR = {True: 0.06, False: 0.01}


def watch(layer):
    """Record what dispatch hands to the runner and what reaches combine."""
    seen = {}
    impl = layer.dispatcher._impl
    dispatch, combine = impl.dispatch, impl.combine

    def watched_dispatch(hidden_states, topk_output):
        out = dispatch(hidden_states, topk_output)
        seen["dispatch"] = dict(
            is_expanded=out.is_expanded,
            use_masked_gemm=out.use_masked_gemm,
            use_psum_layout=out.use_psum_layout,
            rows=out.hidden_states.shape[0],
            scale_stride=None if out.hidden_states_scale is None else out.hidden_states_scale.stride(),
            weights_dim=out.topk_weights.dim(),
            psum=out.psum_num_recv_tokens_per_expert.tolist(),
        )
        return out

    def watched_combine(combine_input):
        seen["weighted_before_combine"] = combine_input.topk_weights is None
        return combine(combine_input)

    impl.dispatch, impl.combine = watched_dispatch, watched_combine
    return seen


def batches(shape, rank, world):
    """Named cases: random, uneven, an idle rank, dropped routes, everything to one expert, everything to one rank."""
    one_expert = Batch.make(shape, 6, 21 + rank)
    one_expert.ids.fill_(-1)
    one_expert.ids[:, 0] = shape.experts - 1
    one_rank = Batch.make(shape, 5, 31 + rank)
    one_rank.ids[:] = torch.tensor([0, 1], dtype=torch.int32)
    nothing = Batch.make(shape, 3, 41 + rank)
    nothing.ids.fill_(-1)
    return {
        "even": Batch.make(shape, 9, 1 + rank),
        "uneven": Batch.make(shape, 2 + 7 * rank, 11 + rank, drop=0.3),
        "r2_idle_rank": Batch.make(shape, 0 if rank == world - 1 and world > 1 else 4, 51 + rank),
        "r3_one_expert": one_expert,
        "r3_one_rank": one_rank,
        "r3_all_dropped": nothing,
    }


def feature_facts(rank, world, fp8):
    shape = Shape(experts=8)
    weights = Weights.make(shape, fp8)
    cases = batches(shape, rank, world)
    facts = {"error": {}, "difference": {}, "seen": {}, "decode": {}, "repeat": {}, "shape": {}}
    exact = {name: truth(batch, weights) for name, batch in cases.items()}
    outputs = {}
    for path, environment in PATHS.items():
        with variables(**environment):
            layer = build_layer(shape, weights, rank)
        seen = watch(layer)
        for name, batch in cases.items():
            outputs[path, name] = forward(layer, batch).clone()
            facts["error"][path, name] = relative_error(outputs[path, name], exact[name])
            facts["shape"][path, name] = tuple(outputs[path, name].shape)
            reference = outputs["nonexpanded", name]
            facts["difference"][path, name] = relative_error(outputs[path, name], reference)
            facts["seen"][path, name] = dict(seen)
        facts["repeat"][path] = torch.equal(forward(layer, cases["even"]), outputs[path, "even"])
        decoded = forward(layer, cases["even"], extend=False)
        facts["decode"][path] = (relative_error(decoded, exact["even"]), dict(seen))
    return facts


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda world: f"ep{world}")
def world(request):
    return request.param


@pytest.fixture(scope="module", params=[True, False], ids=["fp8", "bf16"])
def fp8(request, world):
    if world == 4 and not request.param:
        pytest.skip("EP4 is covered with FP8 experts; two cores hold the suite to ten minutes")
    return request.param


@pytest.fixture(scope="module")
def facts(world, fp8):
    return run_ranks(world, feature_facts, fp8, env=ENVIRONMENT)


def test_every_path_computes_the_layer(facts, fp8):
    for rank in facts:
        assert all(error < ERROR[fp8] for error in rank["error"].values()), rank["error"]


def test_paths_agree(facts):
    for rank in facts:
        assert all(difference <= AGREEMENT for difference in rank["difference"].values()), rank["difference"]


def test_r2_idle_rank_returns_no_rows(facts, world):
    if world == 1:
        pytest.skip("needs a second rank")
    assert facts[world - 1]["shape"]["psum", "r2_idle_rank"] == (0, 256)
    assert facts[0]["shape"]["psum", "r2_idle_rank"] == (4, 256)


def test_r3_uneven_and_extreme_routes(facts, fp8):
    for rank in facts:
        for path in PATHS:
            for case in ("uneven", "r3_one_expert", "r3_one_rank"):
                assert rank["error"][path, case] < ERROR[fp8], (path, case)
            # Nothing was routed, so the exact output is zero and the error is the output's own norm.
            assert rank["error"][path, "r3_all_dropped"] == 0.0, path


def test_bitwise_reproducible(facts):
    for rank in facts:
        assert all(rank["repeat"].values()), rank["repeat"]


def test_toggle_selects_the_layout(facts, fp8):
    for rank in facts:
        for (path, _), seen in rank["seen"].items():
            dispatch = seen["dispatch"]
            assert dispatch["is_expanded"] == (path != "nonexpanded")
            assert not dispatch["use_masked_gemm"], "prefill is never masked"
            assert dispatch["use_psum_layout"] == path.startswith("psum")
            assert dispatch["weights_dim"] == (2 if path == "nonexpanded" else 1)
            if path != "nonexpanded":
                assert seen["weighted_before_combine"]
                assert dispatch["rows"] % 128 == 0
                synced = -(-dispatch["psum"][-1] // 128) * 128
                assert dispatch["rows"] == synced if path != "psum_sync_free" else dispatch["rows"] >= synced
            if fp8 and dispatch["rows"] > 4:
                column_major = dispatch["scale_stride"][0] == 1
                assert column_major == (path != "labels"), (path, dispatch)


def test_decode_stays_masked(facts, fp8):
    for rank in facts:
        for error, seen in rank["decode"].values():
            assert error < ERROR[fp8]
            assert seen["dispatch"]["is_expanded"] and seen["dispatch"]["use_masked_gemm"]
            assert not seen["dispatch"]["use_psum_layout"]


def identity_facts(rank, world, fp8):
    """Non-expanded prefill and decode of the patch beside SGLang's own dispatcher and runner functions."""
    import sglang_upstream.srt.layers.moe.moe_runner.deep_gemm as upstream_runner
    import sglang_upstream.srt.layers.moe.token_dispatcher.deepep_v2 as upstream
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2Dispatcher

    from sglang_deepep_v2.cpu_reference.elastic_buffer import ReferenceElasticBuffer

    # SGLang's file imports deep_ep itself, which is not here; what it would find is the same class we use.
    upstream.ElasticBuffer, upstream.use_deepep_v2 = ReferenceElasticBuffer, True
    from sglang.kernels.ops.quantization import fp8_kernel

    upstream.sglang_per_token_group_quant_fp8 = fp8_kernel.sglang_per_token_group_quant_fp8
    shape = Shape(experts=8)
    weights = Weights.make(shape, fp8)
    batch = Batch.make(shape, 11, 5 + rank, drop=0.2)
    with variables(**PATHS["nonexpanded"]):
        ours = build_layer(shape, weights, rank)
        theirs = build_layer(shape, weights, rank)
        assert isinstance(ours.dispatcher, DeepEPv2Dispatcher)
        theirs.dispatcher = upstream.DeepEPv2Dispatcher(
            group=ours.dispatcher._impl.group,
            router_topk=shape.topk,
            num_experts=shape.experts,
            num_local_experts=shape.experts // world,
            hidden_size=shape.hidden,
            params_dtype=torch.bfloat16,
            use_fp8_dispatch=fp8,
        )
        core = theirs.quant_method.runner if fp8 else theirs.quant_method.runner
        core.runner_core.__class__ = upstream_runner.DeepGemmRunnerCore
        return [torch.equal(forward(ours, batch, extend), forward(theirs, batch, extend)) for extend in (True, False)]


@pytest.mark.loader
@pytest.mark.parametrize("experts", ["fp8", "bf16"])
def test_nonexpanded_and_decode_are_bitwise_sglangs(experts):
    for rank in run_ranks(2, identity_facts, experts == "fp8", env=ENVIRONMENT):
        assert rank == [True, True]


def weighting_facts(rank, world):
    """no_combine hands out raw rows; the weight enters once per route and nowhere twice."""
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe.token_dispatcher.base import RoutewiseLayout
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    shape = Shape(experts=4)
    weights = Weights.make(shape, True)
    batch = Batch.make(shape, 7, 3)
    facts = {}
    set_is_extend_in_batch(True)
    for path in ("labels", "psum"):
        with variables(**PATHS[path]):
            layer = build_layer(shape, weights, rank)
        topk = StandardTopKOutput(batch.weights, batch.ids, batch.weights)
        rows = {}
        for raw in (False, True):
            layer.quant_method.runner.config.no_combine = raw
            dispatched = layer.dispatcher.dispatch(batch.x.clone(), topk)
            row_weights = dispatched.topk_weights.clone()
            psum = dispatched.psum_num_recv_tokens_per_expert.tolist()
            combine_input = layer.run_moe_core(dispatched)
            rows[raw] = combine_input.hidden_states.double()
            if raw:
                facts[path, "layout"] = combine_input.routewise_layout is RoutewiseLayout.EXPANDED
                facts[path, "weights"] = torch.equal(combine_input.topk_weights, row_weights)
                try:
                    layer.dispatcher.combine(combine_input)
                    facts[path, "combine"] = "accepted"
                except ValueError as error:
                    facts[path, "combine"] = str(error)
            else:
                layer.dispatcher.combine(combine_input)
        layer.quant_method.runner.config.no_combine = False
        valid = torch.cat([torch.arange(-(-start // 128) * 128, end) for start, end in zip([0, *psum], psum)])
        expected = rows[True][valid] * row_weights[valid, None].double()
        facts[path, "once"] = relative_error(rows[False][valid], expected)
    return facts


def test_r7_weight_enters_once_and_never_with_no_combine():
    [facts] = run_ranks(1, weighting_facts, env=ENVIRONMENT)
    for path in ("labels", "psum"):
        assert facts[path, "layout"] and facts[path, "weights"]
        assert "finaliser" in facts[path, "combine"]
        assert facts[path, "once"] < 5e-3, facts


def life_cycle_facts(rank, world):
    """Handle life cycle, capacity, and what dispatch refuses or casts."""
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import (
        DeepEPv2Buffer,
        DeepEPv2CombineInput,
        DeepEPv2Dispatcher,
    )
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    shape = Shape(experts=4)
    set_is_extend_in_batch(True)
    layer = build_layer(shape, Weights.make(shape, False), rank)
    dispatcher, group = layer.dispatcher, layer.dispatcher._impl.group
    batch = Batch.make(shape, 5, 3)
    topk = StandardTopKOutput(batch.weights, batch.ids, batch.weights)

    def refused(call, *args, **kwargs):
        try:
            call(*args, **kwargs)
        except Exception as error:
            return type(error).__name__, str(error)
        return "accepted", ""

    facts = {}
    out = dispatcher.dispatch(batch.x, topk)
    facts["second dispatch"] = refused(dispatcher.dispatch, batch.x, topk)
    rows = torch.zeros(out.hidden_states.shape[0], shape.hidden, dtype=torch.bfloat16)
    dispatcher.combine(DeepEPv2CombineInput(rows, None))
    facts["second combine"] = refused(dispatcher.combine, DeepEPv2CombineInput(rows, None))

    dispatcher.dispatch(batch.x, topk)
    facts["failing combine"] = refused(dispatcher.combine, DeepEPv2CombineInput(rows[:1], None))
    facts["released"] = dispatcher._impl._handle is None and not DeepEPv2Buffer._state().live_handles
    dispatcher.dispatch(batch.x, topk)
    facts["key change"] = refused(DeepEPv2Buffer.get_buffer, group, 512, 2, 64, False)
    dispatcher.combine(DeepEPv2CombineInput(rows, None))

    big = Batch.make(shape, 65, 4)
    facts["capacity"] = refused(dispatcher.dispatch, big.x, StandardTopKOutput(big.weights, big.ids, big.weights))
    facts["hidden"] = refused(dispatcher.dispatch, batch.x[:, :128], topk)
    facts["topk"] = refused(
        dispatcher.dispatch, batch.x, StandardTopKOutput(batch.weights, batch.ids[:, :1], batch.weights)
    )

    exact = forward(layer, batch)
    odd = torch.stack([batch.weights, batch.weights], -1)[..., 0]
    facts["strided weights"] = torch.equal(forward(layer, Batch(batch.x, batch.ids, odd)), exact)
    facts["bf16 weights"] = relative_error(forward(layer, Batch(batch.x, batch.ids, batch.weights.bfloat16())), exact)
    ids = torch.stack([batch.ids, batch.ids], -1)[..., 0]
    facts["strided ids"] = torch.equal(forward(layer, Batch(batch.x, ids, batch.weights)), exact)

    def make(**changed):
        sizes = dict(group=group, router_topk=2, num_experts=4, num_local_experts=4, hidden_size=256,
                     params_dtype=torch.bfloat16, use_fp8_dispatch=False)  # fmt: skip
        return DeepEPv2Dispatcher(**(sizes | changed))

    facts["hidden 384"] = refused(make, hidden_size=384)
    facts["topk 33"] = refused(make, router_topk=33)
    facts["experts 7"] = refused(make, num_experts=7)
    facts["fp16"] = refused(make, params_dtype=torch.float16)
    return facts


def test_r1_r4_r5_life_cycle_and_refusals():
    [facts] = run_ranks(1, life_cycle_facts, env=ENVIRONMENT)
    for name, kind, words in (
        ("second dispatch", "RuntimeError", ["combine"]),
        ("second combine", "RuntimeError", ["dispatch"]),
        ("key change", "RuntimeError", ["512", "256", "combine"]),
        ("capacity", "ValueError", ["65", "64", "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"]),
        ("hidden", "ValueError", ["256", "128"]),
        ("topk", "ValueError", ["(5, 2)", "(5, 1)"]),
        ("hidden 384", "ValueError", ["256", "384", "--moe-a2a-backend deepep"]),
        ("topk 33", "ValueError", ["32", "33"]),
        ("experts 7", "ValueError", ["7", "4"]),
        ("fp16", "NotImplementedError", ["bf16", "float16"]),
    ):
        assert facts[name][0] == kind and all(word in facts[name][1] for word in words), (name, facts[name])
    assert facts["failing combine"][0] != "accepted" and facts["released"]
    assert facts["strided weights"] and facts["strided ids"] and facts["bf16 weights"] < 0.01


def pipeline_facts(rank, world):
    """Which pipeline a dispatcher takes, and the lines it logs."""
    from sglang.srt.layers.deep_gemm_wrapper import psum
    from sglang.srt.layers.moe.token_dispatcher import deepep_v2, sync_free

    from sglang_deepep_v2.cpu_reference import grouped_gemm

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    deepep_v2.logger.addHandler(handler)
    deepep_v2.logger.setLevel(logging.INFO)
    shape = Shape(experts=4)
    weights = Weights.make(shape, True)

    def decide(**environment):
        lines.clear()
        deepep_v2._logged_decisions.clear()
        with variables(**environment):
            layer = build_layer(shape, weights, rank)
            try:
                layer.dispatcher.settle_prefill()
            except ValueError as error:
                return str(error)
        return " | ".join(line for line in lines if "prefill" in line)

    facts = {path: decide(**environment) for path, environment in PATHS.items()}
    facts["limit"] = decide(**PATHS["psum_sync_free"], SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES="1000")
    rows = sync_free.capacity_rows(1, 64, 2, 4, 128)
    facts["bytes"] = sync_free.layer_bytes(rows, 256, 256, True)
    facts["rows"] = rows
    grouped_gemm.set_mk_alignment_for_contiguous_layout(64)
    facts["r6_alignment"] = decide(**PATHS["psum"])
    grouped_gemm.set_mk_alignment_for_contiguous_layout(256)
    facts["r6_mixing"] = decide(**PATHS["labels"])
    grouped_gemm.set_mk_alignment_for_contiguous_layout(128)
    psum.deep_gemm = None
    facts["no_deep_gemm"] = decide(**PATHS["psum"])
    return facts


def test_r6_one_line_says_which_pipeline_and_why():
    [facts] = run_ranks(1, pipeline_facts, env=ENVIRONMENT)
    for path, words in {
        "nonexpanded": ["pipeline=non-expanded", "sync=cpu", "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND=0"],
        "labels": ["pipeline=labels", "SGLANG_DEEPEP_V2_ENABLE_PSUM_PIPELINE=0"],
        "psum": ["pipeline=psum", "sync=cpu", "transport=reference"],
        "psum_sync_free": ["pipeline=psum", "sync=free"],
        "r6_alignment": ["pipeline=labels", "64 rows", "128"],
        "r6_mixing": ["tiles of 256 rows", "128", "set_mk_alignment_for_contiguous_layout"],
        "no_deep_gemm": ["pipeline=labels", "DeepGEMM is not available"],
        "limit": [str(facts["bytes"]), "1000", "SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES", f"{facts['rows']} rows"],
    }.items():
        assert all(word in facts[path] for word in words), (path, facts[path])
        assert facts[path].count("DeepEP v2 prefill") == (path not in ("limit", "r6_mixing")), facts[path]
