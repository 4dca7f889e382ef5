"""What the variants share: a DeepEP buffer of their own, and a median."""

from __future__ import annotations

import statistics

REPEATS = 5


def own_buffer(worker, tokens: int | None = None, **options):
    """A DeepEP buffer of its own, for ``tokens`` tokens a rank."""
    from sglang.srt.runtime_context import get_parallel

    if worker.device.type == "cpu":
        from sglang_deepep_v2.cpu_reference.elastic_buffer import ReferenceElasticBuffer as Buffer
    else:
        from deep_ep import ElasticBuffer as Buffer
    return Buffer(
        get_parallel().tp_group.device_group,
        num_max_tokens_per_rank=tokens or worker.tokens,
        hidden=worker.hidden,
        num_topk=worker.topk,
        use_fp8_dispatch=True,
        allow_hybrid_mode=False,
        sl_idx=0,
        prefer_overlap_with_compute=False,
        **options,
    )


def median_us(worker, call, count: int = 10) -> float:
    for _ in range(2):
        call()
    worker._align_ranks()
    return statistics.median(worker.tools.mean_us(call, count) for _ in range(REPEATS))
