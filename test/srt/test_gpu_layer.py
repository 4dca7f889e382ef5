"""The MoE layer on real DeepEP and DeepGEMM: every path's numbers, padding, launches, CUDA graphs and JIT cache.

One process per rank runs all the checks of a file's half and hands back what it saw; the tests assert on that.
"""

import time

import pytest
import torch

from moe_layer import PATHS, Batch, Shape, Weights, build_layer, forward, relative_error, truth, variables
from rank_processes import run_ranks

pytestmark = pytest.mark.gpu

SHAPE = Shape(experts=16, hidden=2048, intermediate=768, topk=8)
TOKENS = 300
WORLDS = [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))]


def clone(tensor):
    return tensor.detach().clone()


def poison_padding(layer, value):
    """Make the next dispatches fill padding rows, scales and weights with ``value``; returns an undo."""
    impl = layer.dispatcher._impl
    real = impl.dispatch

    def dispatch(hidden_states, topk_output):
        out = real(hidden_states, topk_output)
        ends = out.psum_num_recv_tokens_per_expert.tolist()
        padding = torch.ones(out.hidden_states.shape[0], dtype=torch.bool, device="cuda")
        start = 0
        for end in ends:
            padding[start:end] = False
            start = -(-end // out.expert_alignment) * out.expert_alignment
        rows = out.hidden_states
        if rows.dtype == torch.float8_e4m3fn:
            # 0x7f is the NaN of e4m3fn.
            rows.view(torch.uint8)[padding] = 0x7F if value != value else 0
            out.hidden_states_scale[padding] = value
        else:
            rows[padding] = value
        out.topk_weights[padding] = value
        return out

    impl.dispatch = dispatch
    return lambda: delattr(impl, "dispatch")


def kernels_between_dispatch_and_combine(run):
    """Names of the kernels launched after dispatch's copy epilogue and before combine."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    names = [e.name for e in sorted(events, key=lambda e: e.time_range.start)]
    last_dispatch = max(i for i, name in enumerate(names) if "dispatch" in name)
    first_combine = min(i for i, name in enumerate(names) if "combine" in name)
    return names[last_dispatch + 1 : first_combine]


def layer_facts(rank, world, fp8):
    weights = Weights.make(SHAPE, fp8)
    batch = Batch.make(SHAPE, TOKENS + 40 * rank, 7 + rank, drop=0.1)
    exact = truth(batch, weights)
    facts = {"error": {}, "repeat": {}, "poison": {}, "launches": {}, "idle": {}}
    outputs, layers = {}, {}
    for path, environment in PATHS.items():
        with variables(**environment):
            layer = layers[path] = build_layer(SHAPE, weights, rank)
            outputs[path] = clone(forward(layer, batch))
        facts["error"][path] = relative_error(outputs[path], exact)
        facts["repeat"][path] = all(torch.equal(outputs[path], forward(layer, batch)) for _ in range(3))
        if path == "nonexpanded":
            continue
        undo = poison_padding(layer, 0.0)
        clean = clone(forward(layer, batch))
        undo()
        undo = poison_padding(layer, float("nan"))
        facts["poison"][path] = torch.equal(clean, forward(layer, batch)) and torch.equal(clean, outputs[path])
        undo()
        facts["launches"][path] = kernels_between_dispatch_and_combine(lambda layer=layer: forward(layer, batch))
    facts["difference"] = {p: relative_error(outputs[p], outputs["nonexpanded"]) for p in PATHS}
    facts["decode_error"] = relative_error(forward(layers["psum"], batch, extend=False), exact)

    # R2: one rank without tokens changes nothing for the others.
    empty = Batch(batch.x[:0], batch.ids[:0], batch.weights[:0])
    mine = empty if rank == 1 else batch
    for path, layer in layers.items():
        alone = forward(layer, mine)
        facts["idle"][path] = alone.shape[0] == 0 if rank == 1 else relative_error(alone, exact)

    # R3: all routes dropped; every token to one expert.
    nothing = Batch(batch.x, torch.full_like(batch.ids, -1), batch.weights)
    facts["dropped"] = bool((forward(layers["psum"], nothing) == 0).all())
    one = torch.full_like(batch.ids, -1)
    one[:, 0] = SHAPE.experts - 1
    lonely = Batch(batch.x, one, batch.weights)
    facts["one_expert"] = relative_error(forward(layers["psum"], lonely), truth(lonely, weights))

    # R1: the handle serves once.
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    topk = StandardTopKOutput(batch.weights, batch.ids, batch.weights)
    dispatcher = layers["psum"].dispatcher
    dispatcher.dispatch(batch.x, topk)
    try:
        dispatcher.dispatch(batch.x, topk)
        facts["second_dispatch"] = "accepted"
    except RuntimeError as error:
        facts["second_dispatch"] = str(error)
    dispatcher._impl._release()
    return facts


def capture(layer, batch, extend):
    """A replayable CUDA graph of one forward over fixed buffers: ``(graph, buffers, output)``."""
    buffers = Batch(clone(batch.x), clone(batch.ids), clone(batch.weights))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            forward(layer, buffers, extend)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward(layer, buffers, extend)
    return graph, buffers, output


def graph_facts(rank, world, fp8):
    # Disposal of a tensor frees memory that a graph still reads; SGLang sets this flag for its own captures.
    from sglang.srt.runtime_context import get_flags

    weights = Weights.make(SHAPE, fp8)
    facts = {}
    for path, extend in (("psum_sync_free", True), ("psum", False)):
        with variables(**PATHS[path]):
            layer = build_layer(SHAPE, weights, rank)
            get_flags().capture.disable_dispose_tensor = True
            batch = Batch.make(SHAPE, 128, 1 + rank)
            graph, buffers, output = capture(layer, batch, extend)
        same = []
        for seed in (11, 12, 13):
            fresh = Batch.make(SHAPE, 128, seed + 10 * rank, drop=0.2)
            for buffer, values in zip((buffers.x, buffers.ids, buffers.weights), (fresh.x, fresh.ids, fresh.weights)):
                buffer.copy_(values)
            graph.replay()
            replayed = clone(output)
            same.append(torch.equal(replayed, forward(layer, fresh, extend)))
            same.append(relative_error(replayed, truth(fresh, weights)) < 0.06)
        facts["prefill" if extend else "decode"] = same
        get_flags().capture.disable_dispose_tensor = False
    return facts


@pytest.fixture(scope="module", params=WORLDS)
def world(request):
    return request.param


@pytest.fixture(scope="module", params=[True, False], ids=["fp8", "bf16"])
def fp8(request):
    return request.param


@pytest.fixture(scope="module")
def facts(world, fp8):
    return run_ranks(world, layer_facts, fp8)


def test_every_path_computes_the_layer(facts, fp8):
    for rank in facts:
        assert all(error < (0.06 if fp8 else 0.01) for error in rank["error"].values()), rank["error"]
        assert rank["decode_error"] < (0.06 if fp8 else 0.01)
        assert rank["one_expert"] < (0.06 if fp8 else 0.01) and rank["dropped"]


def test_expanded_agrees_with_nonexpanded(facts):
    for rank in facts:
        assert all(difference <= 5e-3 for difference in rank["difference"].values()), rank["difference"]


def test_bitwise_reproducible(facts):
    for rank in facts:
        assert all(rank["repeat"].values()), rank["repeat"]


def test_k6_nan_in_padding_changes_no_bit(facts):
    for rank in facts:
        assert all(rank["poison"].values()), rank["poison"]


def test_psum_pipeline_is_three_launches(facts):
    for rank in facts:
        assert len(rank["launches"]["psum"]) == 3, rank["launches"]["psum"]
        assert len(rank["launches"]["psum_sync_free"]) == 3, rank["launches"]["psum_sync_free"]
        assert len(rank["launches"]["labels"]) > 3


def test_r2_idle_rank(facts, fp8):
    for number, rank in enumerate(facts):
        for path, seen in rank["idle"].items():
            assert seen is True if number == 1 else seen < (0.06 if fp8 else 0.01), (path, seen)


def test_r1_handle_serves_once(facts):
    assert all("handle is unconsumed" in rank["second_dispatch"] for rank in facts)


def test_whole_layer_replays_from_a_cuda_graph(world, fp8):
    for rank in run_ranks(world, graph_facts, fp8):
        assert all(rank["prefill"]), "sync-free prefill"
        assert all(rank["decode"]), "masked decode"


def prebuild_facts(rank, world, prebuild):
    import sglang.srt.model_executor.moe_ep_setup as setup

    layer = build_layer(SHAPE, Weights.make(SHAPE, True), rank)
    torch.cuda.synchronize()
    if prebuild:
        setup.maybe_prebuild_deepep_v2_buffers(model=torch.nn.ModuleList([layer]))
    built = layer.dispatcher.buffer_is_built()
    start = time.perf_counter()
    forward(layer, Batch.make(SHAPE, 64, 3))
    torch.cuda.synchronize()
    return built, time.perf_counter() - start


def test_r11_prebuild_takes_the_buffer_off_the_first_request():
    # The first process may compile kernels, which the others then load.
    run_ranks(1, prebuild_facts, False)
    [(built, with_prebuild)] = run_ranks(1, prebuild_facts, True)
    [(absent, without)] = run_ranks(1, prebuild_facts, False)
    print(f"first forward: {with_prebuild:.2f} s with prebuild, {without:.2f} s without")
    assert built and not absent
    assert with_prebuild < without


def jit_facts(rank, world, cache):
    import os

    import sglang.srt.model_executor.moe_ep_setup as setup
    import torch.distributed as dist
    from sglang.srt.layers.deep_gemm_wrapper import compile_utils, psum

    def kernels():
        """DeepGEMM's: one folder each, with its binary in it once it is compiled."""
        return {os.path.basename(folder) for folder, _, names in os.walk(cache) if "kernel.cubin" in names}

    # As the scheduler sets it: the first rank of a node compiles for the others.
    compile_utils._DO_COMPILE_ALL = rank == 0
    layer = build_layer(SHAPE, Weights.make(SHAPE, True), rank)
    model = torch.nn.ModuleList([layer])
    setup.maybe_prebuild_deepep_v2_buffers(model=model)
    dist.barrier()
    compiled = kernels()
    for tokens in (4, 1, 60, 128, 512):
        forward(layer, Batch.make(SHAPE, tokens, tokens))
    torch.cuda.synchronize()
    added = sorted(kernels() - compiled)
    psum._warmed.clear()
    for name in ("w13_weight", "w2_weight"):
        # What weight offloading leaves of them between two forwards.
        setattr(layer, name, torch.nn.Parameter(getattr(layer, name).to("meta"), requires_grad=False))
    setup.maybe_prebuild_deepep_v2_buffers(model=model)
    return len(compiled), added, len(psum._warmed)


@pytest.mark.timeout(560)
def test_start_up_compiles_every_gemm_that_a_prefill_runs(world, tmp_path):
    environment = dict(SGLANG_JIT_DEEPGEMM_PRECOMPILE="1", SGLANG_DG_CACHE_DIR=str(tmp_path))
    for compiled, added, offloaded in run_ranks(world, jit_facts, str(tmp_path), env=environment, timeout_s=500):
        print(f"start-up compiled {compiled} kernels")
        assert compiled > 0 and not added, added
        assert offloaded == 2, "experts that are offloaded are compiled as well"


def memory_facts(rank, world, fp8):
    from sglang.srt.layers.moe.token_dispatcher import sync_free

    with variables(**PATHS["psum_sync_free"]):
        layer = build_layer(SHAPE, Weights.make(SHAPE, fp8), rank)
        batch = Batch.make(SHAPE, TOKENS, 5)
        forward(layer, batch)
    capacity = layer.dispatcher.num_max_dispatch_tokens_per_rank
    rows = sync_free.capacity_rows(world, capacity, SHAPE.topk, SHAPE.experts // world, 128)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = forward(layer, batch)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return peak, sync_free.layer_bytes(rows, SHAPE.hidden, SHAPE.intermediate, fp8), output.shape[0]


def test_sync_free_layer_takes_the_bytes_that_it_announces(fp8):
    """Beside them only what grows with the tokens sent: their copy, its quantisation, ids, and combine's output."""
    [(peak, announced, tokens)] = run_ranks(1, memory_facts, fp8)
    per_token = SHAPE.hidden * 2 * 3 + SHAPE.topk * 64
    print(f"peak {peak} bytes, announced {announced}")
    assert 0.95 * announced < peak < 1.05 * announced + tokens * per_token


def dispatch_facts(rank, world):
    """What CONTRACTS states as measured, on DeepEP's own class."""
    import torch.distributed as dist
    from sglang.srt.layers.moe.token_dispatcher.elastic_buffer import prepare_environment

    # DeepEP would take torch's communicator, which a group that is bound to no device has not made.
    prepare_environment(num_nodes=1)
    from deep_ep import ElasticBuffer

    hidden, tokens, topk, experts = 2048, 256, 4, 8
    buffer = ElasticBuffer(
        dist.group.WORLD, num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=topk, use_fp8_dispatch=True,
        allow_hybrid_mode=False, sl_idx=0, prefer_overlap_with_compute=False,
    )  # fmt: skip
    batch = Batch.make(Shape(experts=experts, hidden=hidden, intermediate=256, topk=topk), tokens, 3)
    q, scale = batch.x.to(torch.float8_e4m3fn), torch.rand(hidden // 128, tokens, device="cuda").t()
    send = dict(topk_idx=batch.ids.long(), topk_weights=batch.weights, num_experts=experts, expert_alignment=128,
                num_max_tokens_per_rank=tokens, do_expand=True, do_cpu_sync=True)  # fmt: skip
    (rows, recv_scale), _, row_weights, handle, _ = buffer.dispatch(
        (q, scale), use_tma_aligned_col_major_sf=True, **send
    )
    values = torch.ones(rows.shape[0], hidden, dtype=torch.bfloat16, device="cuda")
    plain = buffer.combine(values, handle=handle)[0]
    (rows, _), _, row_weights, handle, _ = buffer.dispatch((q, scale.contiguous()), **send)
    weighted = buffer.combine(values, handle=handle, topk_weights=row_weights)[0]
    return dict(
        weights_ignored=torch.equal(plain, weighted),
        counts=plain[:, 0].tolist() == [float(topk)] * tokens,
        scale_stride=recv_scale.stride(),
        rows=rows.shape[0],
        num_sms=buffer.get_theoretical_num_sms(experts, topk),
    )


def test_facts_about_deepep():
    [facts] = run_ranks(1, dispatch_facts)
    assert facts["weights_ignored"] and facts["counts"], "combine transports router weights and never multiplies"
    assert facts["scale_stride"] == (1, -(-facts["rows"] // 4) * 4), "column-major scales need no alignment pass"
    assert facts["num_sms"] > 0
