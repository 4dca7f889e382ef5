"""Makes interpreted Triton kernels compute what compiled ones do, for the two places where Triton 3.7 differs.

The interpreter truncates when it narrows floating point numbers, where the GPU rounds to nearest even; and its loops over
``range`` and ``tl.range`` hand out Python integers, where compiled loops have tensors (``i.to(tl.int64)`` then fails).
"""

from __future__ import annotations

import sys

import numpy as np
import torch


def install() -> None:
    """Patch ``triton.runtime.interpreter`` once per process; harmless where nothing is interpreted."""
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "_rounds_to_nearest", False):
        return
    interpreter._rounds_to_nearest = True
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
        if source is None or target is None:
            return truncating(data, from_type, to_type, rounding_mode)
        # A copy: numpy's bytes become the torch type they stand for.
        values = (
            torch.frombuffer(bytearray(data.tobytes()), dtype=source) if data.size else torch.empty(0, dtype=source)
        )
        if target in (torch.float8_e4m3fn, torch.float8_e5m2):
            # The device saturates finite values and keeps NaN.
            limit = torch.finfo(target).max
            values = values.float().clamp(-limit, limit)
        narrowed = values.to(target).view(torch.uint8).numpy()
        return narrowed.view(np.dtype(f"u{to_type.primitive_bitwidth // 8}")).reshape(data.shape)

    def loop_range(first, stop=None, step=None, **_):
        start, stop = (0, first) if stop is None else (first, stop)
        for value in range(int(start), int(stop), 1 if step is None else int(step)):
            yield interpreter._implicit_cvt(value)

    patch_lang = interpreter._patch_lang

    def patch_lang_with_loops(fn):
        scope = patch_lang(fn)
        scope.set_attr(tl, "range", loop_range)
        # Kernels that loop over the builtin see their module's name first.
        scope.set_attr(sys.modules[fn.__module__], "range", loop_range)
        return scope

    interpreter._convert_float = convert_float
    interpreter._patch_lang = patch_lang_with_loops
