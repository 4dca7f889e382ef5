"""new: when a kernel wrapper launches Triton, and a launch that costs the host little."""

import os

import torch

# Read once: a kernel is decorated for the interpreter or for the device when its module is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether a wrapper launches its Triton kernel on this tensor, rather than calling its PyTorch twin."""
    return tensor.is_cuda or INTERPRETED


class ResolvedLaunch:
    """Launches one Triton kernel without re-deriving its specialisation from the arguments.

    An ordinary launch inspects every argument on the host, which costs more than the small kernels here run for. The
    compiled kernel is kept per device and constants instead. That is valid because integers are declared
    ``do_not_specialize``, ``constants`` names every dtype that may vary, and pointers are 16-byte aligned; others take
    the ordinary launch.
    """

    def __init__(self, kernel):
        self._kernel = kernel
        self._compiled = {}

    def __call__(self, grid, tensors, scalars, constants, num_warps):
        args = (*tensors, *scalars, *constants)
        addresses = 0
        for tensor in tensors:
            if tensor is not None:
                addresses |= tensor.data_ptr()
        if INTERPRETED or addresses & 15:
            self._kernel[grid](*args, num_warps=num_warps)
            return
        device = tensors[0].get_device()
        key = (device, constants, num_warps)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._kernel[grid](*args, num_warps=num_warps)
            return
        compiled[grid](*args, stream=torch._C._cuda_getCurrentRawStream(device))
