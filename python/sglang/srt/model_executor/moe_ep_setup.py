"""new: builds the process-wide ElasticBuffer and readies every layer's prefill before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.runtime_context import get_disagg

if TYPE_CHECKING:
    import torch.nn as nn


def _decode_graph_is_captured(decode_cuda_graph_runner: Any) -> bool:
    """Whether a decode graph was captured: an EagerRunner stands in where graphs are off."""
    if decode_cuda_graph_runner is None:
        return False
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner

    return not isinstance(decode_cuda_graph_runner, EagerRunner)


def maybe_prebuild_deepep_v2_buffers(*, model: nn.Module, decode_cuda_graph_runner: Any = None) -> None:
    """Build the deepep_v2 ElasticBuffer now, and have every layer ready to prefill, so that no request pays for it.

    Collective over the expert-parallel group: building allocates the symmetric memory and meets every rank in an NCCL
    barrier. The buffer is process-wide: one dispatcher builds it for every MoE layer.

    Every layer also decides and logs here how its prefill runs, and its psum GEMMs are compiled where start-up compiles
    any: in a first forward, peers would wait in combine for the rank that compiles, until DeepEP's timeout. The decode
    role of a disaggregated deployment runs no prefill and does neither.

    Nothing is built when the a2a backend is not deepep_v2, when a decode graph was captured (its dispatches built the
    buffer), or when a buffer with this model's key exists.

    Args:
        model: the loaded model; its ``FusedMoE`` layers own the dispatchers.
        decode_cuda_graph_runner: the decode graph runner, an ``EagerRunner`` where nothing was captured, or None
            where the caller does not know (SGLang 0.5.23's call); the buffer's key decides then.

    Raises:
        ImportError: no buffer class can be loaded.
        RuntimeError: NCCL's GPU-initiated networking could not start.
        ValueError: sync-free prefill needs more than ``SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES``, or DeepGEMM's row
            alignment does not divide dispatch's.
    """
    if not get_moe_a2a_backend().is_deepep_v2():
        return

    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2Dispatcher

    experts = (module for module in model.modules() if isinstance(module, FusedMoE))
    layers = [layer for layer in experts if isinstance(layer.dispatcher, DeepEPv2Dispatcher)]
    if not layers:
        return
    first = layers[0].dispatcher
    if not _decode_graph_is_captured(decode_cuda_graph_runner) and not first.buffer_is_built():
        first.prebuild()
    if get_disagg().disaggregation_mode == "decode":
        return
    # A layer that cannot prefill as configured must not be found out by a request.
    for layer in layers:
        layer.dispatcher.settle_prefill()
    for layer in layers:
        if layer.dispatcher.uses_psum_pipeline:
            _warm_up_psum_gemms(layer)


def _warm_up_psum_gemms(layer: nn.Module) -> None:
    # deep_gemm_wrapper reads the device at import, so not at this module's top.
    from sglang.srt.layers.deep_gemm_wrapper import psum

    for name in ("w13_weight", "w2_weight"):
        weight = getattr(layer, name, None)
        if weight is not None:
            psum.warm_up(weight)
