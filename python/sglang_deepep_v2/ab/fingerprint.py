"""What decides whether an earlier result may be taken over: the question, and everything that answers it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from sglang_deepep_v2.ab.servers import ServeSettings
from sglang_deepep_v2.provenance import machine, sources

_STEERING = ("SGLANG_", "EP_", "NCCL_", "DG_", "TRITON_", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")


def fingerprint(settings: ServeSettings, environment: Mapping[str, str], *question) -> str:
    """Changes with the question, the options, the variables and files that steer a server, the versions, the GPU."""
    variables = {name: value for name, value in environment.items() if name.startswith(_STEERING)}
    files = [_states(Path(settings.model), "*")]
    files += [_states(Path(folder), "**/*.py") for folder in settings.pythonpath]
    code = [sources(), machine()["versions"], machine()["gpu"]]
    whole = [asdict(settings), variables, files, code, question]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def file_hash(file: Path) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _states(folder: Path, pattern: str) -> list[tuple[str, int, int]]:
    """Name, size and time of change of the folder's files; none for a Hugging Face name, which is no folder."""
    found = ((file, file.stat()) for file in sorted(folder.glob(pattern)) if file.is_file())
    return [(str(file.relative_to(folder)), state.st_size, state.st_mtime_ns) for file, state in found]
