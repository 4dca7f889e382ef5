"""GPU tests are skipped without a CUDA device, loader tests with the loader off; one thread, Triton interpreted."""

import os

# Before torch is imported: two workers and their spawned ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before any test module imports Triton, which decides at a kernel's definition whether it is interpreted.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402

LOADER_OFF = os.environ.get("SGLANG_OVERLAY") == "0"
# Imports SGLang's own modules through the loader.
collect_ignore = ["test_signatures.py"] if LOADER_OFF else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if LOADER_OFF:
        _skip(items, "loader", "needs the loader, which SGLANG_OVERLAY=0 turns off")
    if any("gpu" in item.keywords for item in items):
        import torch

        if not torch.cuda.is_available():
            _skip(items, "gpu", "needs a CUDA device")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if marker in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
