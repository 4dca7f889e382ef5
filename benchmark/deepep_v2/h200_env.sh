#!/usr/bin/env bash
# Puts this checkout's patch into the GPU machine's python3: every python3 started afterwards imports python/ of this checkout, then
# the packages in $SITE (default /opt/site), and loads the overlay at start. Run it once: `bash benchmark/deepep_v2/h200_env.sh`;
# no variable has to be exported. SGLANG_OVERLAY=0 runs plain SGLang. Undo: remove the .pth file it names.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
site=${SITE:-/opt/site}
packages=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
pth="$packages/sglang_deepep_v2_overlay.pth"
cat >"$pth" <<P
import sys; sys.path[:0] = [p for p in ("$root/python", "$site") if p not in sys.path]
import os; os.environ.setdefault("HF_HUB_OFFLINE", "1"); os.environ.setdefault("TRANSFORMERS_OFFLINE", "1"); os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
import sglang_deepep_v2.boot
P
cd /
# Freshly unpacked packages have no bytecode, and every server process would compile them for itself.
python3 -m compileall -q -j 0 "$site" "$packages/torch" >/dev/null 2>&1 || true
python3 - <<'P'
import importlib.metadata as m
import sys

import torch

import sglang_deepep_v2

names = ("sglang", "sgl-deep-ep", "sgl-deep-gemm", "triton", "transformers")


def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return "missing"


print("patch", sglang_deepep_v2.__file__)
print("overlay", any(getattr(f, "__name__", "") == "OverlayFinder" for f in sys.meta_path))
print("python", sys.version.split()[0], "torch", torch.__version__, *(f"{n} {version(n)}" for n in names))
print("gpus", [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])
P
