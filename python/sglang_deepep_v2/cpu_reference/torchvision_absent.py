"""Lets modules that import torchvision at module level load where torchvision is not installed.

SGLang and transformers do so for image models, in every process. The names resolve; using one raises.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class InterpolationMode(enum.Enum):
    """Named at import time by image processors, as defaults of their arguments."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class ImageReadMode(enum.Enum):
    """Named at import time by image loaders."""

    RGB = "RGB"


def _missing(*args, **kwargs):
    raise RuntimeError("torchvision is not installed; install it to process images on this machine")


_NAMES: dict[str, dict[str, object]] = {
    "torchvision": {"__version__": "0.0.0+absent"},
    "torchvision.io": {"ImageReadMode": ImageReadMode, "decode_image": _missing, "decode_jpeg": _missing},
    "torchvision.transforms": {"InterpolationMode": InterpolationMode},
    "torchvision.transforms.functional": {"InterpolationMode": InterpolationMode, "pil_to_tensor": _missing},
    "torchvision.transforms.v2": {"InterpolationMode": InterpolationMode},
    "torchvision.transforms.v2.functional": {"InterpolationMode": InterpolationMode, "pil_to_tensor": _missing},
}
_PACKAGES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


class _AbsentTorchvision(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        if name not in _NAMES:
            return None
        return ModuleSpec(name, self, origin="absent", is_package=name in _PACKAGES)

    def create_module(self, spec):
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(_NAMES[module.__name__])


def install() -> bool:
    """Serve torchvision's import-time names if torchvision is not installed; return whether that is so."""
    if any(isinstance(finder, _AbsentTorchvision) for finder in sys.meta_path):
        return True
    if importlib.util.find_spec("torchvision") is not None:
        return False
    sys.meta_path.append(_AbsentTorchvision())
    return True
