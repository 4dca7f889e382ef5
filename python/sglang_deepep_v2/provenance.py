"""Where a record comes from: the GPU, the versions, the commit, the time, the patch's sources."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import os
import subprocess
from functools import cache
from pathlib import Path

from sglang_deepep_v2 import overlay

_DISTRIBUTIONS = {
    "sglang": "sglang",
    "torch": "torch",
    "triton": "triton",
    "deep_ep": "sgl-deep-ep",
    "deep_gemm": "sgl-deep-gemm",
}


def stamp() -> dict:
    """``gpu``, ``versions`` (package -> version), ``commit`` of this checkout and ``date`` (UTC, seconds)."""
    return {**machine(), "date": now()}


def now() -> str:
    """The time of a record: UTC, ISO 8601, whole seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def commit() -> str:
    """Short hash of this checkout, or ``BENCH_COMMIT`` where it is set; ``unknown`` without either."""
    # A copy of the tree may carry another commit's history, or none.
    if named := os.environ.get("BENCH_COMMIT"):
        return named
    here = str(Path(__file__).resolve().parent)
    try:
        command = ["git", "-C", here, "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@cache
def sources() -> str:
    """SHA-256 of the Python files that servers load: the patch tree and this package."""
    digest = hashlib.sha256()
    for root in (overlay.TREE / "sglang", Path(__file__).resolve().parent):
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def machine() -> dict:
    """``gpu``, ``versions`` and ``commit``, which no process outlives."""
    import torch

    versions = {}
    for name, distribution in _DISTRIBUTIONS.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(distribution)
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return {"gpu": gpu, "versions": versions | {"torch": torch.__version__}, "commit": commit()}
