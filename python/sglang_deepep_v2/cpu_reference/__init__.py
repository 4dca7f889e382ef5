"""SGLang without a GPU: a CPU platform, a reference ElasticBuffer and reference grouped GEMMs.

The transport also serves on GPUs, where `SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT=1` selects it.
"""

from __future__ import annotations

import logging
import os

PLATFORM_NAME = "deepep_v2_cpu"
_PLATFORM_CLASS = "sglang_deepep_v2.cpu_reference.platform.CpuReferencePlatform"

logger = logging.getLogger(__name__)


def is_selected() -> bool:
    """Whether this machine runs the CPU reference platform.

    `SGLANG_PLATFORM` decides when it is set. Without it: only where torch finds no accelerator and SGLang's own
    CPU engine is not asked for (`SGLANG_USE_CPU_ENGINE=1`).
    """
    selected = os.environ.get("SGLANG_PLATFORM")
    if selected:
        return selected == PLATFORM_NAME
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return False
    import torch

    return not (torch.cuda.is_available() or torch.accelerator.is_available())


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the platform's class name, or None where it stays out of the way.

    Selects the reference transport unless the user chose otherwise, and lets SGLang's image code be imported
    without torchvision.
    """
    if not is_selected():
        return None
    os.environ.setdefault("SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT", "1")
    from sglang_deepep_v2.cpu_reference import torchvision_absent

    absent = torchvision_absent.install()
    logger.info(
        "CPU reference platform active: reference transport=%s, torchvision=%s",
        os.environ["SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT"],
        "absent, its names raise when used" if absent else "installed",
    )
    return _PLATFORM_CLASS
