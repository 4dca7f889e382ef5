"""extends: hands the prebuild that ModelRunner delegates to ``model_executor.moe_ep_setup``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.model_executor.moe_ep_setup import maybe_prebuild_deepep_v2_buffers

if TYPE_CHECKING:
    import torch.nn as nn

__overrides__ = ("prebuild_deepep_v2_buffer",)


def prebuild_deepep_v2_buffer(*, model: nn.Module) -> None:
    """Build the deepep_v2 ElasticBuffer unless it exists; ModelRunner calls this after graph capture."""
    maybe_prebuild_deepep_v2_buffers(model=model)
