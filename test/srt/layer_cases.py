"""Random MoE layers and what every path must make of them, for the property tests and the soak.

A case names everything: any rank computes its own batch and its own truth from it.
"""

import ctypes
import gc
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

import moe_layer
from moe_layer import Batch, Shape, Weights

# Of the exact output's norm. FP8 rows (1x128 scales, twice) err by 3.7% on average; one small batch can reach 6%.
MAX_ERROR = {False: 0.01, True: 0.1}
# Between two paths that compute the same from the same rows.
MAX_DIFFERENCE = 5e-3


@dataclass(frozen=True)
class Case:
    """One forward over all ranks.

    Attributes:
        shape: sizes of the layer.
        fp8: FP8 experts and FP8 dispatch, else bf16.
        alignment: rows to which each expert's segment is rounded up, by dispatch and by the grouped GEMM.
        tokens: tokens of each rank; 0 is an idle rank.
        drop: probability that a route is -1.
        routing: ``spread`` at random, ``one_expert`` (the first route always expert 0) or ``one_rank``.
        weights: router weights ``plain`` (0.1 .. 1.1), ``signed``, ``zeros`` (half of them), ``tiny`` or ``large``.
        seed: of inputs and routes.
    """

    shape: Shape
    fp8: bool
    alignment: int
    tokens: tuple[int, ...]
    drop: float
    routing: str
    weights: str
    seed: int

    def batch(self, rank: int) -> Batch:
        """This rank's tokens: ids int64 ``[tokens, topk]`` with distinct experts per token, -1 where dropped."""
        made = Batch.make(self.shape, self.tokens[rank], seed=1000 * self.seed + rank, drop=0.0)
        ids, weights = made.ids.clone(), made.weights
        generator = torch.Generator().manual_seed(self.seed * 77 + rank)
        if self.routing == "one_expert" and ids.numel():
            _swap_in(ids, 0, torch.zeros(len(ids), dtype=ids.dtype))
        elif self.routing == "one_rank":
            local = self.shape.experts // len(self.tokens)
            for column in range(min(self.shape.topk, local)):
                _swap_in(ids, column, torch.full((len(ids),), column, dtype=ids.dtype))
        ids.masked_fill_(torch.rand(ids.shape, generator=generator) < self.drop, -1)
        if self.weights == "signed":
            weights = weights - 0.6
        elif self.weights == "zeros":
            weights = weights * (torch.rand(weights.shape, generator=generator) < 0.5)
        elif self.weights == "tiny":
            weights = weights * 1e-30
        elif self.weights == "large":
            weights = weights * 1e3
        return replace(made, ids=ids, weights=weights)


def _swap_in(ids: torch.Tensor, column: int, experts: torch.Tensor) -> None:
    """Sets a column, moving what it held to where the row already named the new expert, so ids stay distinct."""
    for row, expert in enumerate(experts.tolist()):
        at = (ids[row] == expert).nonzero().flatten()
        if at.numel():
            ids[row, at[0]] = ids[row, column]
        ids[row, column] = expert


@lru_cache(maxsize=8)
def weights_of(shape: Shape, fp8: bool) -> Weights:
    return Weights.make(shape, fp8, seed=3)


_layers: dict[tuple, Any] = {}


def layer_of(case: Case, path: str, rank: int):
    """The layer of a case's shape on one path; the same few layers serve all cases, as in a model."""
    from sglang.srt.layers.moe.token_dispatcher import deepep_v2

    from sglang_deepep_v2.cpu_reference import grouped_gemm

    deepep_v2._EXPERT_ALIGNMENT = case.alignment
    grouped_gemm.set_mk_alignment_for_contiguous_layout(case.alignment)
    key = (case.shape, case.fp8, path, case.alignment if path.startswith("psum") else None)
    if key not in _layers:
        _layers[key] = moe_layer.build_layer(case.shape, weights_of(case.shape, case.fp8), rank)
    return _layers[key]


def path_taken(layer) -> str:
    """Which of moe_layer.PATHS the last prefill of a layer really took."""
    impl = layer.dispatcher._impl
    if not impl._prefill_expand_enabled:
        return "nonexpanded"
    if not impl._use_psum_pipeline:
        return "labels"
    return "psum_sync_free" if impl._prefill_is_sync_free else "psum"


def check_case(rank: int, world_size: int, case: Case, paths: tuple[str, ...], padding_fill: str = "nan") -> float:
    """As _check; a case that fails takes its layers with it, whose handles may still be out."""
    from sglang.srt.layers.moe.token_dispatcher.elastic_buffer import DeepEPv2Buffer

    try:
        return _check(rank, world_size, case, paths, padding_fill)
    except BaseException:
        _layers.clear()
        DeepEPv2Buffer.destroy()
        raise


def _check(rank: int, world_size: int, case: Case, paths: tuple[str, ...], padding_fill: str = "nan") -> float:
    """Runs a case on each path and holds every output against the dense float64 one and against each other.

    Returns:
        the largest relative error of this rank.

    Raises:
        AssertionError: naming the path, the case and the error.
    """
    from sglang_deepep_v2.cpu_reference.elastic_buffer import ReferenceElasticBuffer

    assert world_size == len(case.tokens)
    ReferenceElasticBuffer.padding_fill = padding_fill
    batch = case.batch(rank)
    exact = moe_layer.truth(batch, weights_of(case.shape, case.fp8))
    outputs = {}
    for path in paths:
        # A dispatcher reads its toggles when it is built and, for the host sync, at its first prefill.
        with moe_layer.variables(**moe_layer.PATHS[path]):
            layer = layer_of(case, path, rank)
            outputs[path] = moe_layer.forward(layer, batch)
        assert path_taken(layer) == path, f"{path}: the layer went {path_taken(layer)} in {case}"
    worst = 0.0
    for path, output in outputs.items():
        assert output.shape == batch.x.shape and output.dtype == torch.bfloat16, (path, output.shape, case)
        assert torch.isfinite(output).all(), f"{path}: padding reached an output of {case}"
        error = moe_layer.relative_error(output, exact)
        assert error < MAX_ERROR[case.fp8], f"{path}: off by {error:.3g} in {case}"
        unrouted = (batch.ids < 0).all(dim=1)
        assert not output[unrouted].any(), f"{path}: a token without experts is not zero in {case}"
        worst = max(worst, error)
    first = next(iter(outputs.values()), None)
    for path, output in outputs.items():
        difference = moe_layer.relative_error(output, first)
        assert difference <= MAX_DIFFERENCE, f"{path} differs from {paths[0]} by {difference:.3g} in {case}"
    return worst


def resident_mib() -> float:
    """Resident memory of this process in MiB, without what the allocator only keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
