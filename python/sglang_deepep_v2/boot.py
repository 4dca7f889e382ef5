"""Imported by the .pth file at interpreter start: puts the finder on sys.meta_path, imports nothing else."""

import sys


class OverlayFinder:
    """Hands module names of SGLang to the loader; every other name passes through."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if not name.startswith(("sglang.", "sglang_upstream")):
            return None
        from sglang_deepep_v2 import overlay

        return overlay.find_spec(name)


if OverlayFinder not in sys.meta_path:
    sys.meta_path.insert(0, OverlayFinder)
