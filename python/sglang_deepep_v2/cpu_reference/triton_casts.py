"""Triton's interpreter truncates when it narrows a float; a GPU rounds to nearest even and saturates FP8.

``install()`` makes the interpreter round as the GPU does, so that interpreted quantisation agrees with torch's.
"""

from __future__ import annotations

import numpy as np
import torch


def install() -> None:
    """Round to nearest even in every conversion interpreted from now on. Idempotent."""
    import triton.language as tl
    from triton.runtime import interpreter

    if interpreter._convert_float.__module__ == __name__:
        return
    truncating = interpreter._convert_float
    torch_types = {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
        tl.float64: torch.float64,
    }

    def convert_float(data, from_type, to_type, rounding_mode):
        source, target = torch_types.get(from_type), torch_types.get(to_type)
        if source is None or target is None or data.size == 0:
            return truncating(data, from_type, to_type, rounding_mode)
        values = torch.frombuffer(bytearray(data.tobytes()), dtype=source)
        if to_type.primitive_bitwidth == 8:
            limit = torch.finfo(target).max
            values = values.float().clamp(-limit, limit)
        narrowed = values.to(target).view(torch.uint8).numpy()
        return narrowed.view(np.dtype(f"u{to_type.primitive_bitwidth // 8}")).reshape(data.shape)

    interpreter._convert_float = convert_float
