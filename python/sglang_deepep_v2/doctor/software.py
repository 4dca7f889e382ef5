"""Checks of the installed software: SGLang with the overlay, torch, NCCL, DeepEP, DeepGEMM, CUDA toolkit."""

import json
import os
import re
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .machine import USE_REFERENCE, Finding, Machine

# DeepGEMM's default row alignment, which the dispatcher asks DeepEP for as expert_alignment.
EXPERT_ALIGNMENT = 128
_DEEP_EP = "pip install sgl-deep-ep==0.1.2.post1"
_DEEP_GEMM = "pip install sgl-deep-gemm==0.2.3.post2"
_NCCL_MIN = {"ElasticBuffer": (2, 30, 0), "EPBuffer": (2, 32, 3)}
_NVCC_MIN = (12, 3)
_DISTRIBUTION = "sglang-deepep-v2"
SITE_ONLY = "install into the interpreter's own site-packages, not with --target or PYTHONPATH"


def check_overlay(machine: Machine) -> Finding:
    """The installed SGLang is the locked one and new interpreters carry the loader."""
    reply = machine.probe("overlay")
    absent = reply.get("missing") == "sglang_deepep_v2"
    if absent or reply.get("active") is False:
        why = "sglang_deepep_v2 is not installed there" if absent else f"its .pth file was not processed: {SITE_ONLY}"
        problem = f"the loader is not in a new interpreter, so servers run SGLang without the patch; {why}"
        return Finding("overlay", "fail", problem, _reinstall(machine.python))
    problem = reply.get("error") or reply.get("problem")
    if problem:
        command = re.search(r"`([^`]+)`", problem)
        return Finding("overlay", "fail", problem, command and command[1])
    if not reply["enabled"]:
        return Finding("overlay", "warn", "SGLANG_OVERLAY=0: SGLang runs without the patch", "unset SGLANG_OVERLAY")
    kinds = ", ".join(f"{count} {kind}" for kind, count in reply["kinds"].items() if count)
    return Finding("overlay", "ok", f"sglang {reply['base']}, as locked; modules: {kinds}")


def _reinstall(python: str) -> str:
    """The command that installs this package anew; it is in no index, only in a checkout."""
    install = f"{shlex.quote(python)} -m pip install --force-reinstall --no-deps"
    checkout, editable = _checkout()
    if checkout is None:
        return f"{install} .  # in a checkout of this repository"
    return f"{install} {'-e ' * editable}{shlex.quote(str(checkout))}"


def _checkout() -> tuple[Path | None, bool]:
    """The checkout that this package was installed from or runs in, None where it is gone; and whether editable."""
    try:
        recorded = json.loads(distribution(_DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        recorded = {}
    address = urlsplit(recorded.get("url", ""))
    # A wheel file's address is a file: one too.
    places = [Path(unquote(address.path))] if address.scheme == "file" else []
    for place in (*places, Path(__file__).resolve().parents[3]):
        if (place / "pyproject.toml").is_file() and (place / "python" / "sglang_deepep_v2").is_dir():
            return place, bool(recorded.get("dir_info", {}).get("editable"))
    return None, False


def check_torch(machine: Machine) -> Finding:
    """torch imports, and sees the GPU where there is one."""
    reply = machine.probe("torch")
    if "error" in reply:
        return Finding("torch", "fail", f"import torch: {reply['error']}", "pip install torch")
    built = f"torch {reply['version']}, " + (f"CUDA {reply['cuda']}" if reply["cuda"] else "no CUDA")
    if reply["available"]:
        return Finding("torch", "ok", f"{built}, {len(reply['devices'])} GPU(s)")
    if machine.gpus and not reply["cuda"]:
        version = reply["version"].partition("+")[0]
        return machine.unavailable(
            "torch", f"{built}, but a GPU is here", f"pip install --force-reinstall torch=={version}"
        )
    if machine.gpus:
        problem = f"{built}, but torch.cuda.is_available() is False (driver {machine.gpus[0].driver})"
        return machine.unavailable(
            "torch", problem, f"install a driver for CUDA {reply['cuda']}, or a torch for this driver"
        )
    return Finding("torch", "ok", f"{built}: enough for the CPU reference transport")


def check_deep_ep(machine: Machine) -> Finding:
    """deep_ep, or DeepEP 2.5's deep_ep_v25, imports (host checks included) and has an elastic buffer."""
    if machine.flag(USE_REFERENCE):
        return Finding("deep_ep", "warn", f"{USE_REFERENCE} is on: slow, for tests only", f"unset {USE_REFERENCE}")
    reply = machine.probe("deep_ep")
    if reply.get("missing") == "deep_ep":
        return machine.unavailable("deep_ep", "deep_ep is not installed", _DEEP_EP)
    package = reply.get("package", "deep_ep")
    if "error" in reply:
        hint, fix = _deep_ep_fix(machine, reply["error"], package)
        problem = f"import {package}: {reply['error_type']}: {reply['error']}{hint}"
        return machine.unavailable("deep_ep", problem, fix)
    wheel = "".join(f" ({name} {version})" for name, version in reply["wheels"].items())
    if reply["buffer"] is None:
        problem = f"{package} {reply['version']}{wheel} has no ElasticBuffer: it is DeepEP V1"
        return machine.unavailable("deep_ep", problem, _DEEP_EP)
    passed_over = "".join(f"; passed over {text}" for text in reply.get("refused", ()))
    return Finding("deep_ep", "ok", f"{package} {reply['version']}{wheel}, {reply['buffer']}{passed_over}")


def _deep_ep_fix(machine: Machine, error: str, package: str) -> tuple[str, str]:
    """What to add to one of the import-time refusals of ``deep_ep`` or ``deep_ep_v25``, and its remedy."""
    cuda = (machine.probe("torch").get("cuda") or "13").partition(".")[0]
    if "Duplicate NCCL" in error:
        return "", "keep one libnccl.so: unset LD_PRELOAD and LD_LIBRARY_PATH entries that name the other one"
    if "NCCL" in error or "nccl" in error:
        version = "2.32.3" if package == "deep_ep_v25" else "2.30.7"
        return "", f"pip install --force-reinstall --no-deps nvidia-nccl-cu{cuda}=={version}"
    if "does not provide CUDA" in error or "requires CUDA" in error:
        return "", "install a torch and an sgl-deep-ep of the same CUDA major version"
    if "driver" in error:
        return "; the driver must show a device, a container needs --gpus all", "nvidia-smi"
    if "undefined symbol" in error or "cannot open shared object" in error:
        return "; torch must be the one that DeepEP was built for, see its Requires-Dist", _DEEP_EP
    return "", _DEEP_EP


def check_nccl(machine: Machine) -> Finding:
    """The NCCL this process maps, which need not be the one torch was built with."""
    reply = machine.probe("torch")
    if "error" in reply:
        return Finding("nccl", "warn", f"not examined: torch does not import: {reply['error']}")
    files = list(dict.fromkeys([*reply["nccl_files"], *machine.probe("deep_ep").get("nccl_files", [])]))
    if not files:
        if machine.needs_gpu_stack:
            return Finding("nccl", "fail", "importing torch maps no libnccl.so", "install a CUDA build of torch")
        return Finding("nccl", "ok", "none mapped; the reference transport uses gloo")
    if len(files) > 1:
        fix = "keep one: unset LD_PRELOAD and LD_LIBRARY_PATH entries that name the other one"
        return machine.unavailable("nccl", f"two NCCL libraries in one process: {' and '.join(files)}", fix)
    loaded = _nccl_version(reply["nccl"])
    built = tuple(reply["nccl_built"] or ())
    seen = f"NCCL {_dotted(loaded) if loaded else 'of unreadable version'} from {files[0]}"
    if built and loaded and built[:3] != loaded:
        seen += f" (torch was built with {_dotted(built)})"
    buffer = machine.probe("deep_ep").get("buffer") or "ElasticBuffer"
    least = _NCCL_MIN[buffer]
    if loaded and loaded < least:
        cuda = (reply["cuda"] or "13").partition(".")[0]
        wanted = "2.30.7" if buffer == "ElasticBuffer" else _dotted(least)
        fix = f"pip install --force-reinstall --no-deps nvidia-nccl-cu{cuda}=={wanted}"
        return machine.unavailable("nccl", f"{seen}; {buffer} needs {_dotted(least)} or newer", fix)
    return Finding("nccl", "ok" if loaded else "warn", seen)


def _nccl_version(number: int) -> tuple[int, int, int] | None:
    """ncclGetVersion's integer as (major, minor, patch); None for 0."""
    return (number // 10000, number // 100 % 100, number % 100) if number else None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def check_deep_gemm(machine: Machine) -> Finding:
    """DeepGEMM imports, takes the psum layout, and asks for the alignment the dispatcher uses."""
    reply = machine.probe("deep_gemm")
    if reply.get("missing") == "deep_gemm":
        return machine.unavailable("deep_gemm", "deep_gemm is not installed", _DEEP_GEMM)
    if "error" in reply:
        return machine.unavailable("deep_gemm", f"deep_gemm: {reply['error_type']}: {reply['error']}", _DEEP_GEMM)
    seen, alignment = f"deep_gemm {reply['version']}", reply["alignment"]
    lacking = [name for name, there in reply["psum"].items() if not there]
    if lacking:
        problem = f"{seen} has no use_psum_layout in {', '.join(lacking)}: prefill takes the labels pipeline"
        return Finding("deep_gemm", "warn", problem, _DEEP_GEMM)
    if alignment is not None and EXPERT_ALIGNMENT % alignment:
        problem = f"{seen} aligns rows to {alignment}, which does not divide expert_alignment {EXPERT_ALIGNMENT}"
        return machine.unavailable(
            "deep_gemm", problem, f"call deep_gemm.set_mk_alignment_for_contiguous_layout with {EXPERT_ALIGNMENT}"
        )
    if alignment != EXPERT_ALIGNMENT:
        known = "an unknown alignment" if alignment is None else f"alignment {alignment}"
        problem = f"{seen} reports {known}, not {EXPERT_ALIGNMENT}: prefill takes the labels pipeline"
        return Finding("deep_gemm", "warn", problem, _DEEP_GEMM)
    return Finding("deep_gemm", "ok", f"{seen}, psum layout, alignment {alignment}")


def check_toolkit(machine: Machine) -> Finding:
    """nvcc and a host compiler for the just-in-time kernels of DeepEP and DeepGEMM."""
    if not machine.needs_gpu_stack:
        return Finding("toolkit", "ok", "not needed: nothing is compiled for a GPU here")
    home = _cuda_home(machine)
    nvcc = machine.env.get("EP_JIT_NVCC_COMPILER") or (home and str(home / "bin" / "nvcc"))
    if not nvcc or not os.access(nvcc, os.X_OK):
        where = nvcc or "CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda"
        fix = "install the CUDA toolkit and export CUDA_HOME=/path/to/cuda"
        return Finding("toolkit", "fail", f"no nvcc at {where}: DeepEP and DeepGEMM compile kernels at first use", fix)
    done = machine.run([nvcc, "--version"], timeout_s=30)
    match = re.search(r"release (\d+)\.(\d+)", done.out)
    if match is None:
        said = (done.err or done.out).strip().splitlines()[-1:] or ["no output"]
        return Finding(
            "toolkit",
            "fail",
            f"{nvcc} --version does not answer: {said[0]}",
            "export CUDA_HOME=/path/to/cuda",
        )
    version = (int(match[1]), int(match[2]))
    seen = f"nvcc {match[1]}.{match[2]} at {nvcc}"
    if version < _NVCC_MIN:
        return Finding(
            "toolkit",
            "fail",
            f"{seen}; DeepEP needs {_dotted(_NVCC_MIN)} or newer",
            "export CUDA_HOME=/path/to/newer/cuda",
        )
    if machine.which("c++") is None and machine.which("g++") is None:
        return Finding("toolkit", "fail", f"{seen}, but no host C++ compiler on PATH", "apt-get install g++")
    cuda = machine.probe("torch").get("cuda")
    if cuda and cuda.partition(".")[0] != match[1]:
        fix = f"export CUDA_HOME=/usr/local/cuda-{cuda}"
        return Finding("toolkit", "warn", f"{seen}, torch was built for CUDA {cuda}", fix)
    return Finding("toolkit", "ok", seen)


def _cuda_home(machine: Machine) -> Path | None:
    """The toolkit folder, by the rule that DeepEP and DeepGEMM share."""
    named = machine.env.get("CUDA_HOME") or machine.env.get("CUDA_PATH")
    if named:
        return Path(named)
    found = machine.which("nvcc")
    if found:
        return Path(found).parent.parent
    usual = Path("/usr/local/cuda")
    return usual if usual.exists() else None


CHECKS = (check_overlay, check_torch, check_deep_ep, check_nccl, check_deep_gemm, check_toolkit)
