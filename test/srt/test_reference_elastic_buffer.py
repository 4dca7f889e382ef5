"""ReferenceElasticBuffer against the conformance table at EP1, EP2 and EP4, its refusals and its own promises."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException

import conformance
from sglang_deepep_v2.cpu_reference.elastic_buffer import ReferenceElasticBuffer

WORLDS = (1, 2, 4)
CASES = {case.name: case for case in conformance.cases()}


class NanPadding(ReferenceElasticBuffer):
    """Padding as hostile as uninitialised memory can be."""

    padding_fill = "nan"


def _refuses(error: type[Exception], text: str, call) -> None:
    try:
        call()
    except error as exc:
        assert text in str(exc), f"{text!r} not in {exc}"
        return
    raise AssertionError(f"no {error.__name__} with {text!r}")


def _buffer(group, hidden=256, capacity=8, num_topk=2, **options) -> ReferenceElasticBuffer:
    return NanPadding(group, num_max_tokens_per_rank=capacity, hidden=hidden, num_topk=num_topk, **options)


def _arguments(num_tokens=3, hidden=256, num_experts=4, num_topk=2, **changes) -> dict:
    gen = torch.Generator().manual_seed(0)
    topk_idx = torch.rand((num_tokens, num_experts), generator=gen).argsort(dim=1)[:, :num_topk].contiguous()
    values = dict(
        x=torch.randn((num_tokens, hidden), generator=gen).bfloat16(),
        topk_idx=topk_idx,
        topk_weights=torch.rand((num_tokens, num_topk), generator=gen),
        num_experts=num_experts,
        expert_alignment=16,
        do_expand=True,
    )
    return {**values, **changes}


def one_rank_with_a_wrong_argument(rank: int, group) -> None:
    """The other ranks are told instead of waiting."""
    tokens = 9 if rank == 1 else 3
    text = "9 tokens exceed num_max_tokens_per_rank=8" if rank == 1 else "rank 1 of the group refused"
    buffer = _buffer(group)
    _refuses(ValueError, text, lambda: buffer.dispatch(**_arguments(num_tokens=tokens)))
    # The refusal leaves the buffer usable.
    x, _, _, handle, _ = buffer.dispatch(**_arguments())
    rows = x.shape[0] + (1 if rank == 0 else 0)
    text = "the dispatch of this handle made" if rank == 0 else "rank 0 of the group refused"
    _refuses(ValueError, text, lambda: buffer.combine(torch.zeros((rows, 256), dtype=torch.bfloat16), handle))


def unequal_capacity(rank: int, group) -> None:
    buffer = _buffer(group, capacity=8 + rank)
    _refuses(ValueError, "num_max_tokens_per_rank must be the same", lambda: buffer.dispatch(**_arguments()))


def unequal_layout(rank: int, group) -> None:
    buffer = _buffer(group)
    _refuses(ValueError, "do_expand must be the same", lambda: buffer.dispatch(**_arguments(do_expand=rank == 0)))


def idle_rank_under_cpu_sync(rank: int, group) -> None:
    arguments = _arguments(num_tokens=0 if rank == 1 else 3)
    buffer = _buffer(group)
    _refuses(ValueError, "rank 1 dispatches 0 tokens", lambda: buffer.dispatch(**arguments))


def same_bits_twice(rank: int, group) -> None:
    """Dispatch and combine are bitwise reproducible, and padding does not reach the result."""
    outputs = []
    for buffer_class in (NanPadding, NanPadding, ReferenceElasticBuffer):
        buffer = buffer_class(group, num_max_tokens_per_rank=64, hidden=256, num_topk=4)
        arguments = _arguments(num_tokens=40 + rank, num_experts=8, num_topk=4)
        x, _, weights, handle, _ = buffer.dispatch(**arguments)
        assert x.isnan().any() == (buffer_class is NanPadding)
        outputs.append(buffer.combine(x, handle, topk_weights=weights)[0])
    assert not outputs[0].isnan().any()
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


PAIR_CHECKS = (
    one_rank_with_a_wrong_argument,
    unequal_capacity,
    unequal_layout,
    idle_rank_under_cpu_sync,
    same_bits_twice,
)


# On GPUs DeepEP compiles its kernels for every shape, so a few cases stand for the table.
GPU_CASES = (
    "uneven-expand-sync",
    "uneven-plain-sync",
    "some_unselected-expand-async",
    "none_selected-plain-sync",
    "all_to_one_rank-expand-sync",
    "idle_last_rank-expand-async",
    "col_major-expand-sync",
    "bf16-expand-sync",
    "tile_edges-fp8",
    "bias-2",
)


def _run_rank(rank: int, num_ranks: int, out: str, transport: str) -> None:
    """Run one rank's checks; `transport`: "gloo" and "nccl" are the reference, "deep_ep" is the real class."""
    torch.set_num_threads(1)
    on_gpu = transport != "gloo"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        # A file, since another process may take a port between its choice and its use.
        init_method=f"file://{out}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=240),
    )
    group = dist.group.WORLD
    buffer_class, roundings = NanPadding, 1
    if transport == "deep_ep":
        # Ranks of one node without an RDMA NIC; communicators are not bound to a device here.
        os.environ |= {"EP_DISABLE_GIN": "1", "EP_REUSE_NCCL_COMM": "0"}
        from deep_ep import ElasticBuffer as buffer_class

        roundings = 2

    def run(case: conformance.Case) -> None:
        conformance.check(buffer_class, case, rank, group, "cuda" if on_gpu else "cpu", roundings)

    checks = {name: lambda case=case: run(case) for name, case in CASES.items() if not on_gpu or name in GPU_CASES}
    if num_ranks > 2:
        # What these cases vary does not depend on the number of ranks.
        checks = {name: check for name, check in checks.items() if not name.startswith(("topk", "hidden", "alignment"))}
    if num_ranks == 2 and not on_gpu:
        checks |= {check.__name__: lambda check=check: check(rank, group) for check in PAIR_CHECKS}
    failures = {}
    for name, check in checks.items():
        try:
            check()
        except Exception:
            failures[name] = traceback.format_exc()
            # At once: a rank that failed between two collectives may take the others down with it.
            Path(out, f"{rank}.json").write_text(json.dumps(failures))
    dist.barrier()
    # Skips the end of the interpreter, which gloo threads that still run may turn into an abort.
    os._exit(0)


def _conforms(num_ranks: int, out: Path, transport: str) -> None:
    ended = ""
    try:
        mp.spawn(_run_rank, (num_ranks, str(out), transport), nprocs=num_ranks)
    except ProcessException as exc:
        ended = f"the ranks did not finish: {exc}\n"
    report = "".join(
        f"[{name}] rank {file.stem}: {text}\n"
        for file in sorted(out.glob("*.json"))
        for name, text in json.loads(file.read_text()).items()
    )
    assert not report and not ended, ended + report


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_conforms(num_ranks, tmp_path):
    """One spawn per world size runs the whole table (and at two ranks what needs exactly two)."""
    _conforms(num_ranks, tmp_path, "gloo")


def test_the_gpu_cases_are_in_the_table():
    assert set(GPU_CASES) <= set(CASES)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["nccl", "deep_ep"])
def test_conforms_on_gpus(transport, tmp_path):
    """The reference over NCCL, and DeepEP itself, on as many of one, two or four GPUs as there are."""
    if transport == "deep_ep" and importlib.util.find_spec("deep_ep") is None:
        pytest.skip("needs deep_ep")
    gpus = torch.cuda.device_count()
    _conforms(max(size for size in WORLDS if size <= gpus), tmp_path, transport)


@pytest.fixture(scope="module")
def group():
    """A group of one rank in this process."""
    if dist.is_initialized():
        assert dist.get_world_size() == 1
        yield dist.group.WORLD
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _fp8(num_tokens=3, hidden=256, packs=2, dtype=torch.float32):
    return torch.zeros((num_tokens, hidden)).to(torch.float8_e4m3fn), torch.zeros((num_tokens, packs), dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(hidden=384), "hidden=384 is not a multiple of 256"),
        (dict(num_tokens=9), "9 tokens exceed num_max_tokens_per_rank=8"),
        (dict(num_topk=3), "top-k 3 is outside 1..2"),
        (dict(topk_idx=torch.tensor([[0, 1]] * 3, dtype=torch.int32)), "contiguous int64, got torch.int32"),
        (dict(topk_idx=torch.tensor([[0] * 3, [1] * 3]).t()), "contiguous int64"),
        (dict(topk_idx=torch.tensor([[0, 1]] * 2)), "topk_idx must be [tokens=3, top-k]"),
        (dict(topk_idx=torch.tensor([[0, 4]] * 3)), "topk_idx[0, 1] = 4 is outside -1..3"),
        (dict(topk_idx=torch.tensor([[0, 1], [-2, 1], [0, 1]])), "topk_idx[1, 0] = -2 is outside"),
        (dict(topk_idx=torch.tensor([[0, 1], [-1, -1], [3, 3]])), "token 2 names expert 3 twice"),
        (dict(topk_weights=torch.ones((3, 2)).bfloat16()), "contiguous fp32, got torch.bfloat16"),
        (dict(topk_weights=torch.ones((2, 3)).t()), "contiguous fp32"),
        (dict(topk_weights=torch.ones((3, 1))), "differ in shape"),
        (dict(x=torch.zeros((3, 256))), "x must be contiguous torch.bfloat16"),
        (dict(x=torch.zeros((256, 3)).bfloat16().t()), "x must be contiguous torch.bfloat16"),
        (dict(x=(torch.zeros((3, 256)).bfloat16(), torch.zeros((3, 2)))), "float8_e4m3fn"),
        (dict(x=_fp8(dtype=torch.float64)), "4 bytes"),
        (dict(x=(_fp8()[0], torch.zeros((2, 2)))), "scales must be [tokens=3, packs]"),
        (dict(num_max_tokens_per_rank=16), "differs from this buffer's 8"),
        (dict(expert_alignment=0), "expert_alignment=0"),
        (dict(num_sms=-1), "num_sms=-1"),
        (dict(num_experts=4096), "exceeds DeepEP's 2048 experts"),
        (dict(do_expand=False, do_zero_padding=True), "do_zero_padding applies to do_expand=True only"),
        (dict(cumulative_local_expert_recv_stats=torch.zeros(4)), "must be int32 (4,)"),
        (dict(topk_idx=None), "needs topk_idx"),
    ],
)
def test_dispatch_refuses(group, changes, text):
    size = {key: changes[key] for key in ("num_tokens", "hidden", "num_topk") if key in changes}
    rest = {key: value for key, value in changes.items() if key not in size}
    buffer = _buffer(group, hidden=512)
    with pytest.raises(ValueError) as caught:
        buffer.dispatch(**_arguments(**size, **rest))
    assert text in str(caught.value)


def test_more_than_32_selections_are_refused(group):
    with pytest.raises(ValueError, match=r"num_topk=33 is outside 0\.\.32"):
        _buffer(group, num_topk=33)
    with pytest.raises(ValueError, match=r"top-k 33 is outside 1\.\.32"):
        _buffer(group, num_topk=0).dispatch(**_arguments(num_experts=64, num_topk=33))


@pytest.mark.parametrize(("hidden", "capacity"), [(0, 8), (256, 0), (200, 8)])
def test_constructor_refuses(group, hidden, capacity):
    with pytest.raises(ValueError, match=f"hidden={hidden}"):
        _buffer(group, hidden=hidden, capacity=capacity)


def test_experts_must_divide_among_the_ranks(group):
    buffer = _buffer(group)
    buffer.num_ranks = 3
    with pytest.raises(ValueError, match="num_experts=4 is not a multiple of the group's 3 ranks"):
        buffer.dispatch(**_arguments())


def test_combine_refuses(group):
    buffer = _buffer(group)
    x, _, weights, handle, _ = buffer.dispatch(**_arguments())
    other = _buffer(group)
    bias = torch.zeros((3, 256), dtype=torch.bfloat16)
    for arguments, text in (
        (dict(x=x[:-1]), f"combine got {x.shape[0] - 1} rows"),
        (dict(x=x.float()), "contiguous bf16"),
        (dict(x=x, topk_weights=weights[:-1]), "combine topk_weights must be fp32"),
        (dict(x=x, bias=bias[:-1]), "bias must be"),
        (dict(x=x, bias=(bias, bias, bias)), "at most two bias tensors, got 3"),
    ):
        with pytest.raises(ValueError) as caught:
            buffer.combine(handle=handle, **arguments)
        assert text in str(caught.value)
    with pytest.raises(ValueError, match="not made by this buffer's dispatch"):
        other.combine(x, handle)
    buffer.combine(x, handle)
    with pytest.raises(ValueError, match="combined already"):
        buffer.combine(x, handle)


def test_weights_need_multiple_reduction_in_the_expanded_layout(group):
    buffer = _buffer(group, allow_multiple_reduction=False)
    x, _, weights, handle, _ = buffer.dispatch(**_arguments())
    with pytest.raises(ValueError, match="allow_multiple_reduction=False"):
        buffer.combine(x, handle, topk_weights=weights)


def test_destroy_needs_the_constructor_flag(group):
    with pytest.raises(RuntimeError, match="explicitly_destroy=True"):
        _buffer(group).destroy()
    buffer = _buffer(group, explicitly_destroy=True)
    buffer.destroy()
    buffer.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        buffer.dispatch(**_arguments())


@pytest.mark.parametrize("fill", ["zeros", "nan"])
@pytest.mark.parametrize("col_major", [False, True])
def test_padding_holds_the_fill(group, fill, col_major):
    buffer = _buffer(group)
    buffer.padding_fill = fill
    x, sf = _fp8()
    arguments = _arguments(x=(x, sf + 1), do_cpu_sync=False, use_tma_aligned_col_major_sf=col_major)
    (rows, scales), _, weights, handle, _ = buffer.dispatch(**arguments)
    padding = torch.ones(rows.shape[0], dtype=torch.bool)
    start = 0
    for stop in handle.psum_num_recv_tokens_per_expert.tolist():
        padding[start:stop] = False
        start = (stop + 15) // 16 * 16
    assert int((~padding).sum()) == 6
    for tensor in (rows.float(), scales, weights):
        filled = tensor[padding].isnan() if fill == "nan" else tensor[padding] == 0
        assert filled.all()
    assert (scales[~padding] == 1).all()


def test_zero_padding_overrides_the_fill_between_experts(group):
    x, _, weights, handle, _ = _buffer(group).dispatch(**_arguments(do_zero_padding=True))
    assert not x.isnan().any() and not weights.isnan().any()
    assert (x == 0).all(dim=1).sum() == x.shape[0] - int(handle.num_unaligned_recv_tokens_per_expert.sum())


def test_the_handle_keeps_its_own_ids_unless_told_otherwise(group):
    arguments = _arguments()
    kept = _buffer(group).dispatch(**arguments)[3]
    shared = _buffer(group).dispatch(**arguments, do_handle_copy=False)[3]
    arguments["topk_idx"].fill_(-1)
    assert (kept.topk_idx >= 0).all() and (shared.topk_idx == -1).all()


@pytest.mark.gpu
def test_a_graph_capture_is_refused():
    if not dist.is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
        dist.init_process_group("nccl", rank=0, world_size=1)
    arguments = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in _arguments().items()}
    buffer = _buffer(dist.group.WORLD)
    buffer.dispatch(**arguments)
    with pytest.raises(RuntimeError, match="--disable-cuda-graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        buffer.dispatch(**arguments)
