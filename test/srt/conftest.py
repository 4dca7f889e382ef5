"""Skips GPU tests where there is no CUDA device; keeps torch to one thread and, without a GPU, Triton interpreted."""

import os

# Before torch is imported: two workers and their spawned ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before any test module imports Triton, which decides at a kernel's definition whether it is interpreted.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
