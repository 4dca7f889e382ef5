"""The process-wide buffer: built once per key, for the mode and the environment that were asked for, or refused."""

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from sglang.srt.layers.deep_gemm_wrapper import psum
from sglang.srt.layers.moe.token_dispatcher import elastic_buffer
from sglang.srt.layers.moe.token_dispatcher.elastic_buffer import BufferClass, DeepEPv2Buffer

SIZES = {
    "hidden_size": 256,
    "router_topk": 2,
    "num_max_dispatch_tokens_per_rank": 16,
    "use_fp8_dispatch": True,
    "allow_hybrid_mode": False,
}


class Recorded:
    """A buffer class that remembers its instances."""

    built: list = []
    num_bytes = 1

    def __init__(self, group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_hybrid_mode):
        self.arguments = (hidden, num_topk, num_max_tokens_per_rank, use_fp8_dispatch, allow_hybrid_mode)
        self.environment = dict(os.environ)
        Recorded.built.append(self)


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """A process without a buffer, whose runtime context says what a test sets on the returned object."""
    context = SimpleNamespace(mode="direct", nnodes=1, rdma=False)
    buffers = {}
    Recorded.built = []
    for name in ("EP_REUSE_NCCL_COMM", "EP_DISABLE_GIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(elastic_buffer, "buffer_class", lambda: BufferClass(Recorded, "deep_ep", None))
    monkeypatch.setattr(elastic_buffer, "get_resources", lambda: SimpleNamespace(buffers=buffers))
    monkeypatch.setattr(elastic_buffer, "get_parallel", lambda: SimpleNamespace(nnodes=context.nnodes))
    monkeypatch.setattr(
        elastic_buffer, "get_exec", lambda: SimpleNamespace(moe=SimpleNamespace(deepep_v2_mode=context.mode))
    )
    monkeypatch.setattr(elastic_buffer, "_has_rdma_device", lambda: context.rdma)
    monkeypatch.setattr(elastic_buffer.dist, "get_world_size", lambda group: 2)
    return context


def test_one_buffer_per_key():
    first = DeepEPv2Buffer.get_buffer("group", **SIZES)
    assert DeepEPv2Buffer.get_buffer("group", **SIZES) is first
    assert len(Recorded.built) == 1
    assert first.arguments == (256, 2, 16, True, False)


@pytest.mark.parametrize("change", [{name: value * 2 for name, value in SIZES.items() if type(value) is int}])
def test_another_key_gets_another_buffer(change):
    first = DeepEPv2Buffer.get_buffer("group", **SIZES)
    for name, value in change.items():
        assert DeepEPv2Buffer.get_buffer("group", **SIZES | {name: value}) is not first, name
    assert DeepEPv2Buffer.get_buffer("group", **SIZES | {"use_fp8_dispatch": False}).arguments[3] is False


def test_r1_key_change_is_refused_while_a_handle_waits():
    first = DeepEPv2Buffer.get_buffer("group", **SIZES)
    handle = object()
    DeepEPv2Buffer.hold_handle(handle)
    with pytest.raises(RuntimeError, match="1 dispatch handle.* still wait for combine"):
        DeepEPv2Buffer.get_buffer("group", **SIZES | {"hidden_size": 512})
    assert DeepEPv2Buffer.get_buffer("group", **SIZES) is first
    DeepEPv2Buffer.release_handle(handle)
    assert DeepEPv2Buffer.get_buffer("group", **SIZES | {"hidden_size": 512}) is not first


def test_a_handle_that_outlived_destroy_is_not_mistaken_for_another():
    DeepEPv2Buffer.get_buffer("group", **SIZES)
    lost, held = object(), object()
    DeepEPv2Buffer.hold_handle(lost)
    DeepEPv2Buffer.destroy()
    DeepEPv2Buffer.get_buffer("group", **SIZES)
    DeepEPv2Buffer.hold_handle(held)
    DeepEPv2Buffer.release_handle(lost)
    with pytest.raises(RuntimeError, match="1 dispatch handle"):
        DeepEPv2Buffer.get_buffer("group", **SIZES | {"hidden_size": 512})


def test_a_replaced_buffer_is_announced(caplog):
    DeepEPv2Buffer.get_buffer("group", **SIZES)
    DeepEPv2Buffer.get_buffer("group", **SIZES | {"hidden_size": 512})
    assert "gives way" in caplog.text and "512" in caplog.text


@pytest.mark.parametrize(
    ("refusal", "raised", "told"),
    [
        ("NCCL GIN is unavailable", RuntimeError, "EP_DISABLE_GIN=1"),
        ("NCCL_NET_PLUGIN: ORIGIN unknown", AssertionError, "^NCCL_NET_PLUGIN"),
    ],
    ids=["missing", "only spelt"],
)
def test_r9_missing_gin_names_the_variable(monkeypatch, refusal, raised, told):
    def refuse(self, group, **sizes):
        raise AssertionError(refusal)

    monkeypatch.setattr(Recorded, "__init__", refuse)
    with pytest.raises(raised, match=told):
        DeepEPv2Buffer.get_buffer("group", **SIZES)


def test_a_buffer_that_cannot_be_built_is_not_kept(monkeypatch):
    DeepEPv2Buffer.get_buffer("group", **SIZES)

    def out_of_memory(self, group, **sizes):
        assert DeepEPv2Buffer._state().buffer is None, "the old buffer's memory is free, the new one is not published"
        raise MemoryError("cannot register symmetric memory")

    monkeypatch.setattr(elastic_buffer, "_accepted", lambda cls: None)
    with monkeypatch.context() as broken:
        broken.setattr(Recorded, "__init__", out_of_memory)
        for _ in range(2):
            with pytest.raises(MemoryError):
                DeepEPv2Buffer.get_buffer("group", **SIZES | {"hidden_size": 512})
        assert DeepEPv2Buffer._state().key is None


@pytest.mark.parametrize(("mode", "hybrid"), [("direct", False), ("hybrid", True)])
def test_r10_hybrid_exactly_when_asked_for(process, mode, hybrid):
    process.mode = mode
    sizes = SIZES | {"allow_hybrid_mode": None}
    assert DeepEPv2Buffer.get_buffer("group", **sizes).arguments[-1] is hybrid


def test_r9_nccl_communicator_is_not_reused_unless_the_user_says_so(monkeypatch):
    assert DeepEPv2Buffer.get_buffer("group", **SIZES).environment["EP_REUSE_NCCL_COMM"] == "0"
    DeepEPv2Buffer.destroy()
    monkeypatch.setenv("EP_REUSE_NCCL_COMM", "1")
    assert DeepEPv2Buffer.get_buffer("group", **SIZES).environment["EP_REUSE_NCCL_COMM"] == "1"


@pytest.mark.parametrize(
    ("nnodes", "rdma", "user", "expected"),
    [(1, False, None, "1"), (1, True, None, None), (2, False, None, None), (1, False, "0", "0")],
)
def test_r9_gin_is_off_on_one_node_without_rdma(process, monkeypatch, nnodes, rdma, user, expected):
    process.nnodes, process.rdma = nnodes, rdma
    if user is not None:
        monkeypatch.setenv("EP_DISABLE_GIN", user)
    assert DeepEPv2Buffer.get_buffer("group", **SIZES).environment.get("EP_DISABLE_GIN") == expected


def test_r9_gin_rule_is_said_once(caplog):
    caplog.set_level(logging.INFO, elastic_buffer.logger.name)
    for hidden in (256, 512):
        DeepEPv2Buffer.get_buffer("group", **SIZES | {"hidden_size": hidden})
    assert [record.getMessage() for record in caplog.records if "EP_DISABLE_GIN" in record.getMessage()] == [
        "DeepEP v2: no RDMA device on this one node, GIN is off (EP_DISABLE_GIN=1)."
    ]


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (ModuleNotFoundError("No module named 'deep_ep'"), "pip install sgl-deep-ep"),
        (AssertionError("NCCL 2.29.3 is loaded"), "nvidia-nccl-cu13"),
    ],
)
def test_r8_missing_deep_ep_is_told_at_first_use(monkeypatch, error, fix):
    monkeypatch.setattr(elastic_buffer, "buffer_class", lambda: BufferClass(None, "deep_ep", error))
    with pytest.raises(ImportError, match=fix) as refused:
        DeepEPv2Buffer.get_buffer("group", **SIZES)
    assert str(error) in str(refused.value)


def test_r8_an_assertion_while_importing_deep_ep_is_kept(monkeypatch, tmp_path):
    (tmp_path / "deep_ep.py").write_text("assert False, 'NCCL 2.29.3 is loaded'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    monkeypatch.setenv("SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT", "0")
    found = elastic_buffer.find_buffer_class()
    assert (found.cls, found.transport, str(found.error)) == (None, "deep_ep", "NCCL 2.29.3 is loaded")


def test_r8_sglang_imports_over_a_deep_ep_that_asserts(tmp_path):
    """A new interpreter: SGLang's MoE layer imports, only the first buffer tells why there is none."""
    (tmp_path / "deep_ep.py").write_text("assert False, 'Invalid NCCL versions'\n")
    script = """
import sglang.srt.layers.moe.ep_moe.layer
from sglang.srt.layers.moe.token_dispatcher import deepep_v2, elastic_buffer
assert not deepep_v2.use_deepep_v2
try:
    elastic_buffer.require(elastic_buffer.buffer_class())
except ImportError as error:
    print(error)
"""
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "AssertionError: Invalid NCCL versions" in done.stdout and "nvidia-nccl-cu13" in done.stdout


def grouped_gemm(*arguments, use_psum_layout=False):
    raise NotImplementedError


def gemms(alignment, function=grouped_gemm):
    return SimpleNamespace(
        m_grouped_fp8_gemm_nt_contiguous=function,
        m_grouped_bf16_gemm_nt_contiguous=function,
        get_mk_alignment_for_contiguous_layout=lambda: alignment,
    )


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (gemms(128), None),
        (gemms((128, 128)), None),
        (gemms(64), "aligns experts to 64 rows, dispatch to 128"),
        (gemms(256), "aligns experts to 256 rows, dispatch to 128"),
        (gemms(128, lambda a, b, d, grouped_layout: None), "no use_psum_layout"),
        (None, "DeepGEMM is not available"),
    ],
)
def test_r6_psum_pipeline_needs_equal_alignments(monkeypatch, module, reason):
    monkeypatch.setattr(psum, "deep_gemm", module)
    refusal = psum.unsupported_reason(128)
    assert refusal is None if reason is None else reason in refusal


@pytest.mark.parametrize(
    ("alignment", "mixes"), [(128, False), (64, False), ((128, 128), False), (256, True), (96, True)]
)
def test_r6_tiles_that_mix_experts_are_refused(monkeypatch, alignment, mixes):
    monkeypatch.setattr(psum, "deep_gemm", gemms(alignment))
    if not mixes:
        return psum.check_row_alignment(128)
    with pytest.raises(ValueError, match=rf"{alignment} rows.*128"):
        psum.check_row_alignment(128)


@pytest.mark.parametrize(("text", "refused"), [("f(a, use_psum_layout=False)", False), ("f(a)", True)])
def test_r6_a_compiled_deep_gemm_is_asked_by_its_docstring(monkeypatch, text, refused):
    class Compiled:
        """A function whose signature cannot be inspected."""

        __signature__ = "none"
        __doc__ = text

        def __call__(self): ...

    monkeypatch.setattr(psum, "deep_gemm", gemms(128, Compiled()))
    assert (psum.unsupported_reason(128) is not None) == refused
