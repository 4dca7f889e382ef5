"""The dispatcher over DeepEP 2.1's and 2.5's buffer classes: their signatures, their packages, what each refuses."""

import inspect
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from sglang.srt.layers.moe.token_dispatcher import deepep_v2, elastic_buffer
from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2Dispatcher
from sglang.srt.layers.moe.token_dispatcher.elastic_buffer import DeepEPv2Buffer
from sglang.srt.layers.moe.topk import StandardTopKOutput

import test_dispatch_contract as contract

COMMON = {
    "num_max_tokens_per_rank": 0,
    "hidden": 0,
    "num_topk": 0,
    "use_fp8_dispatch": False,
    "deterministic": False,
    "allow_hybrid_mode": True,
    "allow_multiple_reduction": True,
    "prefer_overlap_with_compute": True,
    "num_allocated_qps": 0,
    "num_cpu_timeout_secs": 300,
    "num_gpu_timeout_secs": 100,
    "explicitly_destroy": False,
}
# Keywords and defaults of the constructors of deep_ep 2.1.0 and deep_ep_v25 2.5.0, beside `group`.
CONSTRUCTOR = {
    "ElasticBuffer": COMMON | {"num_bytes": None, "num_cpu_bytes": 0, "sl_idx": 3},
    "EPBuffer": COMMON | {"num_bytes": None, "lb_allocation_plan_or_num_bytes": 0, "sl_idx": None},
}
DISPATCH = {
    "topk_idx": None,
    "topk_weights": None,
    "cumulative_local_expert_recv_stats": None,
    "num_experts": None,
    "num_max_tokens_per_rank": None,
    "expert_alignment": None,
    "num_sms": 0,
    "num_qps": 0,
    "previous_event": None,
    "async_with_compute_stream": False,
    "allocate_on_comm_stream": False,
    "handle": None,
    "do_cpu_sync": None,
    "do_expand": False,
    "do_zero_padding": False,
    "use_tma_aligned_col_major_sf": False,
}
DISPATCHES = {
    "ElasticBuffer": DISPATCH | {"previous_event_before_epilogue": None, "do_handle_copy": True},
    "EPBuffer": DISPATCH | {"do_handle_copy": False, "defer_epilogue": False},
}
COMBINE = {
    "topk_weights": None,
    "bias": None,
    "num_sms": 0,
    "num_qps": 0,
    "previous_event": None,
    "async_with_compute_stream": False,
    "allocate_on_comm_stream": False,
}
COMBINES = {
    "ElasticBuffer": COMBINE | {"previous_event_before_epilogue": None},
    "EPBuffer": COMBINE | {"defer_epilogue": False},
}


def signature(*positional: str, **defaults: object) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = [inspect.Parameter(name, kind) for name in positional]
    return inspect.Signature(required + [inspect.Parameter(n, kind, default=d) for n, d in defaults.items()])


def fake(name: str) -> type:
    """A recording class that takes exactly the arguments of DeepEP's class of that name."""
    constructor = signature("self", "group", **CONSTRUCTOR[name])
    dispatching = signature("self", "x", **DISPATCHES[name])
    combining = signature("self", "x", "handle", **COMBINES[name])

    class Buffer:
        num_bytes = 1

        def __init__(self, *arguments, **options):
            self.built = constructor.bind(self, *arguments, **options).arguments
            self.environment = {k: os.environ.get(k) for k in ("EP_REUSE_NCCL_COMM", "EP_DISABLE_GIN")}
            self.recording = contract.RecordingBuffer()

        def dispatch(self, *arguments, **options):
            bound = dispatching.bind(self, *arguments, **options)
            bound.apply_defaults()
            if name == "EPBuffer":
                assert not bound.arguments["do_handle_copy"], "`do_handle_copy` must be False"
            rest = {key: value for key, value in bound.arguments.items() if key not in ("self", "x")}
            return self.recording.dispatch(bound.arguments["x"], **rest)

        def combine(self, *arguments, **options):
            bound = combining.bind(self, *arguments, **options).arguments
            return self.recording.combine(bound["x"], bound["handle"], bound.get("topk_weights"))

    Buffer.__name__ = Buffer.__qualname__ = name
    Buffer.__init__.__signature__ = constructor
    return Buffer


def install(monkeypatch, package: str, name: str | None, version: str = "2.1.0") -> None:
    """Make ``package`` importable with a fake class ``name`` in it, with none where ``name`` is None."""
    module = ModuleType(package)
    module.__version__ = version
    if name is not None:
        setattr(module, name, fake(name))
        getattr(module, name).__module__ = package
    monkeypatch.setitem(sys.modules, package, module)


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    monkeypatch.setenv("SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT", "0")
    for package in ("deep_ep", "deep_ep_v25"):
        # None is how Python marks a package that cannot be found.
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize(
    ("packages", "chosen"),
    [
        ({"deep_ep": "ElasticBuffer"}, "deep_ep.ElasticBuffer"),
        ({"deep_ep": "EPBuffer"}, "deep_ep.EPBuffer"),
        ({"deep_ep_v25": "EPBuffer"}, "deep_ep_v25.EPBuffer"),
        ({"deep_ep": "ElasticBuffer", "deep_ep_v25": "EPBuffer"}, "deep_ep.ElasticBuffer"),
        ({"deep_ep": None, "deep_ep_v25": "EPBuffer"}, "deep_ep_v25.EPBuffer"),
    ],
)
def test_the_class_is_the_installed_one(monkeypatch, packages, chosen):
    for package, name in packages.items():
        install(monkeypatch, package, name)
    found = elastic_buffer.find_buffer_class()
    assert (f"{found.cls.__module__}.{found.cls.__qualname__}", found.transport) == (chosen, "deep_ep")
    assert (found.error, found.package) == (None, chosen.partition(".")[0])


def refusing(monkeypatch, tmp_path, package: str, raised: str) -> None:
    """Make importing ``package`` raise what DeepEP raises on a host that does not suit it."""
    (tmp_path / f"{package}.py").write_text(f"raise {raised}\n")
    monkeypatch.delitem(sys.modules, package)
    monkeypatch.syspath_prepend(tmp_path)


WRONG_NCCL = "AssertionError('Invalid NCCL versions: a (loaded) v.s. b (expected)')"
OLD_NCCL = "ImportError('DeepEP 2.5 needs NCCL 2.32.3 or newer, but there is 2.30.7')"
NO_CUPTI = "ModuleNotFoundError('No module named cupti', name='cupti')"
BARE_ASSERT = "AssertionError()"
NO_NVCC = "ImportError('DeepEP compiles kernels at runtime and needs nvcc')"


@pytest.mark.parametrize(
    ("raises", "reason", "fix"),
    [
        ({}, "No module named|halted", r"pip install sgl-deep-ep==0\.1"),
        ({"deep_ep": WRONG_NCCL}, "Invalid NCCL", r"nvidia-nccl-cu13==2\.30\.7"),
        ({"deep_ep_v25": WRONG_NCCL}, "Invalid NCCL", r"nvidia-nccl-cu13==2\.32\.3"),
        ({"deep_ep_v25": OLD_NCCL}, "2.32.3 or newer", r"nvidia-nccl-cu13==2\.32\.3"),
        ({"deep_ep_v25": NO_NVCC}, "needs nvcc", "deep_ep_v25 is installed and refuses this host; CUDA_HOME"),
        ({"deep_ep": BARE_ASSERT}, r"AssertionError: raise AssertionError\(\) \(.*deep_ep.py:1\)", "CUDA_HOME"),
        ({"deep_ep_v25": NO_CUPTI}, "cupti", r"pip install sgl-deep-ep==0\.1"),
        ({"deep_ep": WRONG_NCCL, "deep_ep_v25": NO_NVCC}, "Invalid NCCL", r"nvidia-nccl-cu13==2\.30\.7"),
    ],
)
def test_r8_a_host_that_does_not_suit_deep_ep_is_told_why(monkeypatch, tmp_path, raises, reason, fix):
    for package, raised in raises.items():
        refusing(monkeypatch, tmp_path, package, raised)
    found = elastic_buffer.find_buffer_class()
    assert found.cls is None
    with pytest.raises(ImportError, match=reason) as told:
        elastic_buffer.require(found)
    assert told.match(fix)


def test_the_other_package_serves_where_one_refuses(monkeypatch, tmp_path):
    refusing(monkeypatch, tmp_path, "deep_ep", WRONG_NCCL)
    install(monkeypatch, "deep_ep_v25", "EPBuffer", "2.5.0")
    assert elastic_buffer.find_buffer_class().package == "deep_ep_v25"


def test_deepep_v1_is_no_buffer_class(monkeypatch):
    install(monkeypatch, "deep_ep", None, "1.2.1")
    with pytest.raises(ImportError, match="deep_ep 1.2.1 has neither of ElasticBuffer, EPBuffer; V2 needs >= 2.0"):
        elastic_buffer.require(elastic_buffer.find_buffer_class())


@pytest.fixture(params=[("deep_ep", "ElasticBuffer"), ("deep_ep_v25", "EPBuffer")], ids=["2.1", "2.5"])
def dispatcher(request, monkeypatch) -> DeepEPv2Dispatcher:
    """A BF16 labels dispatcher of one rank over the real facade and a fake class of each version."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    install(monkeypatch, *request.param)
    found = elastic_buffer.find_buffer_class()
    buffers = {}
    parallel = SimpleNamespace(nnodes=1, attn_dp_size=2, attn_cp_size=1, tp_size=1, tp_group=None)
    context = SimpleNamespace(moe=SimpleNamespace(deepep_v2_mode="direct"))
    monkeypatch.setattr(elastic_buffer, "get_resources", lambda: SimpleNamespace(buffers=buffers))
    monkeypatch.setattr(elastic_buffer, "get_exec", lambda: context)
    monkeypatch.setattr(elastic_buffer, "_has_rdma_device", lambda: False)
    monkeypatch.setattr(elastic_buffer.dist, "get_world_size", lambda group: 1)
    for module in (deepep_v2, elastic_buffer):
        monkeypatch.setattr(module, "buffer_class", lambda: found)
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    monkeypatch.setattr(deepep_v2, "get_is_extend_in_batch", lambda: True)
    monkeypatch.setattr(deepep_v2._DeepEPv2Impl, "_find_psum_refusal", lambda self: "no DeepGEMM")
    for name in ("EP_REUSE_NCCL_COMM", "EP_DISABLE_GIN"):
        os.environ.pop(name, None)
    for name, value in contract.VARIABLES.items():
        os.environ[name] = value
    return DeepEPv2Dispatcher(
        group="group",
        router_topk=contract.TOPK,
        num_experts=contract.EXPERTS,
        num_local_experts=contract.EXPERTS,
        hidden_size=contract.HIDDEN,
        params_dtype=torch.bfloat16,
        use_fp8_dispatch=False,
    )


def built(dispatcher):
    dispatcher.prebuild()
    return DeepEPv2Buffer._state().buffer


def test_the_constructor_takes_what_it_is_given(dispatcher):
    buffer = built(dispatcher)
    arguments = {name: value for name, value in buffer.built.items() if name != "self"}
    assert arguments == {
        "group": "group",
        "num_max_tokens_per_rank": contract.CAPACITY,
        "hidden": contract.HIDDEN,
        "num_topk": contract.TOPK,
        "use_fp8_dispatch": False,
        "allow_hybrid_mode": False,
        "sl_idx": 0,
        "prefer_overlap_with_compute": False,
    }
    assert buffer.environment == {"EP_REUSE_NCCL_COMM": "0", "EP_DISABLE_GIN": "1"}


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_dispatch_and_combine_take_what_they_are_given(dispatcher, ids_dtype):
    x, routes = contract.routed(3)
    output = dispatcher.dispatch(
        x, StandardTopKOutput(routes.topk_weights, routes.topk_ids.to(ids_dtype), routes.router_logits)
    )
    assert output.hidden_states.shape == (3 * contract.TOPK, contract.HIDDEN)
    assert dispatcher.combine(contract.answer(output)).shape == (3, contract.HIDDEN)


def test_the_handle_never_shares_the_callers_ids(dispatcher):
    x, routes = contract.routed(3)
    ids = routes.topk_ids.long()
    dispatcher.dispatch(x, StandardTopKOutput(routes.topk_weights, ids, None))
    (seen,) = built(dispatcher).recording.dispatched
    shared = seen["topk_idx"].data_ptr() == ids.data_ptr()
    assert seen["do_handle_copy"] is shared
    assert torch.equal(seen["topk_idx"], ids)
