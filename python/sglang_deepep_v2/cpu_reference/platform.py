"""The CPU as an out-of-tree SGLang platform whose operators are the plain PyTorch ones."""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class CpuReferencePlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang on CPU through `forward_native`.

    SGLang's own CPU engine takes AMX kernels and refuses the deepep_v2 backend, so this platform is a third way:
    out of tree, without graph capture, with torch-native attention.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device=None) -> bool:
        return False

    def get_device(self, device_id: int | None = None) -> str:
        # SGLang splits the name it gets when no --device is passed.
        return "cpu"

    # SGLang asks an out-of-tree platform for both when /start_profile comes.
    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU
