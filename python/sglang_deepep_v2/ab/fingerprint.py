"""What decides whether an earlier result may be taken over: the question, and everything that answers it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from sglang_deepep_v2.ab.servers import ServeSettings
from sglang_deepep_v2.provenance import machine, sources


def fingerprint(settings: ServeSettings, environment: Mapping[str, str], *question) -> str:
    """Changes with the question, the options and SGLANG_* variables, the patch's sources, the versions, the GPU."""
    toggles = {name: value for name, value in environment.items() if name.startswith("SGLANG_")}
    # A generated checkpoint says what it was generated from.
    stamp = Path(settings.model) / "generated.json"
    code = [sources(), machine()["versions"], machine()["gpu"]]
    whole = [asdict(settings), toggles, stamp.read_text() if stamp.is_file() else "", code, question]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
