"""Imported once by the fork server of rank_processes: SGLang's layers and the CPU stand-ins, but no process group."""

import os

# Read by Triton at import: SGLang's own permutes exist as Triton kernels only.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "256")

import sglang.srt.layers.moe.ep_moe.layer  # noqa: E402, F401
import sglang.srt.layers.moe.fused_moe_triton.layer  # noqa: E402, F401
import sglang.srt.layers.quantization.fp8  # noqa: E402, F401
import sglang.srt.server_args  # noqa: E402, F401
from sglang.srt.plugins import load_plugins  # noqa: E402

import moe_layer  # noqa: E402, F401

load_plugins()
