"""A server plugin that drops the router weight from expanded prefill, so that the demo must fail.

SGLang finds it by its entry point, in servers only and only with this directory on their PYTHONPATH:
`sglang-deepep-v2 ab --server-pythonpath test/demo_break/fold`.
"""

import logging
import os

logger = logging.getLogger(__name__)


def register() -> None:
    """Let every expanded row enter combine as if its router weight were one."""
    if os.environ.get("SGLANG_OVERLAY") == "0":
        return
    from sglang.srt.layers.moe.ep_moe import kernels

    for name in ("swiglu_expanded", "swiglu_quant_expanded"):
        setattr(kernels, name, _without_weights(getattr(kernels, name)))
    kernels.scale_expanded_rows_ = lambda x, row_weights: x
    logger.warning("broken fold: the router weight of expanded prefill is dropped on purpose")


def _without_weights(kernel):
    def broken(gateup, row_weights, *args, **kwargs):
        return kernel(gateup, None, *args, **kwargs)

    return broken
