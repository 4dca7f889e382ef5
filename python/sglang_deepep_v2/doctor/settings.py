"""Checks of the settings: this backend's environment variables, and the JIT compilers' caches."""

import ast
import difflib
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from .machine import Finding, Machine

PREFIX = "SGLANG_DEEPEP_V2_"
_BOOLEANS = ("true", "1", "yes", "y", "false", "0", "no", "n")
_NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2",
    "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "vastnfs", "wekafs",
}  # fmt: skip
_NETWORK_FUSE = re.compile(r"fuse\.(?!fuse-overlayfs|overlay|lxcfs|portal|gvfsd)")
_MIN_FREE = 1 << 30


def declared_variables() -> dict[str, str]:
    """Every variable that SGLang and this patch declare -> its field's class (EnvBool, EnvInt ...); no import."""
    from sglang_deepep_v2 import overlay

    name = "sglang.srt.environ"
    found = {}
    # Ours last: where both declare a variable, the overlay's field wins.
    for file in (overlay.base_file(name), getattr(overlay.modules().get(name), "file", None)):
        for node in ast.walk(ast.parse(file.read_text())) if file else ():
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and isinstance(node.targets[0], ast.Name)
            ):
                found[node.targets[0].id] = getattr(node.value.func, "id", "")
    return found


def check_variables(machine: Machine) -> Finding:
    """Every variable that is meant for this backend is one it reads, with a value it accepts."""
    declared = declared_variables()
    known = {name: kind for name, kind in declared.items() if name.startswith(PREFIX)}
    if not known:
        return Finding("variables", "warn", "SGLang is not installed: the variables cannot be checked")
    bad = [text for name, value in sorted(machine.env.items()) if (text := _misuse(name, value, declared, known))]
    if bad:
        problems, fixes = zip(*bad, strict=True)
        return Finding("variables", "fail", "; ".join(problems), "; ".join(fixes))
    doubts = {name: text for name, text in _DOUBTS.items() if machine.env.get(name) == "1"}
    if _LIMIT in machine.env and not machine.flag(_SYNC_FREE):
        doubts[_LIMIT] = f"{_LIMIT}={machine.env[_LIMIT]} has no effect without {_SYNC_FREE}=1"
    if doubts:
        return Finding("variables", "warn", "; ".join(doubts.values()), f"unset {' '.join(doubts)}")
    used = [f"{name.removeprefix(PREFIX)}={machine.env[name]}" for name in sorted(known) if name in machine.env]
    return Finding("variables", "ok", f"{PREFIX}*: {', '.join(used) or 'all at their defaults'}")


_DOUBTS = {
    "EP_REUSE_NCCL_COMM": "EP_REUSE_NCCL_COMM=1 needs a device-bound process group, SGLang's is not",
    "EP_SUPPRESS_NCCL_CHECK": "EP_SUPPRESS_NCCL_CHECK=1 hides a wrong NCCL until it corrupts or hangs",
}
_LIMIT, _SYNC_FREE = f"{PREFIX}SYNC_FREE_MAX_BYTES", f"{PREFIX}ENABLE_SYNC_FREE_PREFILL"


def _misuse(name: str, value: str, declared: dict[str, str], known: dict[str, str]) -> tuple[str, str] | None:
    """(problem, fix) of one variable, None where nothing is wrong with it."""
    if name == "NCCL_CUMEM_ENABLE" and value == "0":
        return "NCCL_CUMEM_ENABLE=0, but ElasticBuffer needs cuMem allocations", "unset NCCL_CUMEM_ENABLE"
    if name in known:
        return _bad_value(name, value, known[name])
    if name in declared or not _meant(name, known):
        return None
    near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.6)
    if not near:
        return f"{name} is read by nothing", f"unset {name}"
    return (
        f"{name} is read by nothing; the nearest name is {near[0]}",
        f"unset {name}; export {near[0]}={shlex.quote(value)}",
    )


def _meant(name: str, known: dict[str, str]) -> bool:
    """Whether an unknown variable was meant for this backend, by its words or its likeness."""
    if "DEEPEPV2" in re.sub("[^A-Z0-9]", "", name.upper()):
        return True
    return name.upper().startswith("SGL") and bool(difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.87))


def _bad_value(name: str, value: str, kind: str) -> tuple[str, str] | None:
    if kind == "EnvBool" and value.lower() not in _BOOLEANS:
        problem = f"{name}={value!r} is not a boolean (1 is on, 0 off): the default is used instead"
        return problem, f"export {name}={int(value.lower() != 'off')}"
    if kind != "EnvInt":
        return None
    try:
        number = int(value)
    except ValueError:
        return f"{name}={value!r} is not an integer: the default is used instead", f"unset {name}"
    least = 1 if name.endswith(("TOKENS_PER_RANK", "BYTES")) else 0
    return (f"{name}={number} is below {least}", f"unset {name}") if number < least else None


def check_caches(machine: Machine) -> list[Finding]:
    """Each compiler's cache is writable, on a local file system, with room in it."""
    env = machine.env
    home = Path(env.get("HOME", "/nonexistent"))
    base = (
        Path(os.path.expanduser(env["SGLANG_CACHE_DIR"])) if "SGLANG_CACHE_DIR" in env else home / ".cache" / "sglang"
    )
    caches = (
        ("DeepGEMM", "SGLANG_DG_CACHE_DIR", base / "deep_gemm"),
        ("DeepEP", "EP_JIT_CACHE_DIR", home / ".deep_ep"),
        ("Triton", "TRITON_CACHE_DIR", base / "triton"),
    )
    found = [
        _check_cache(machine, owner, variable, Path(env.get(variable) or usual)) for owner, variable, usual in caches
    ]
    other, used = env.get("DG_JIT_CACHE_DIR"), env.get("SGLANG_DG_CACHE_DIR") or str(base / "deep_gemm")
    if other and other != used and found[0].level == "ok":
        problem = f"DG_JIT_CACHE_DIR={other} is overwritten by SGLang; {used} is used"
        found[0] = Finding(found[0].check, "warn", problem, f"export SGLANG_DG_CACHE_DIR={shlex.quote(other)}")
    return found


def _check_cache(machine: Machine, owner: str, variable: str, folder: Path) -> Finding:
    check = f"cache {owner}"
    local = f"export {variable}=/tmp/{owner.lower()}-cache"
    # os.path answers False where Path raises for a parent that may not be entered.
    there = next((place for place in (folder, *folder.parents) if os.path.isdir(place)), Path("/"))
    if os.path.exists(folder) and not os.path.isdir(folder):
        return machine.unavailable(check, f"{folder} is not a directory", local)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return machine.unavailable(check, f"{folder} cannot be written: {error.strerror} ({there})", local)
    mount, kind, options = _mount_of(machine, there)
    if kind in _NETWORK or _NETWORK_FUSE.match(kind):
        problem = f"{folder} is on {kind} ({mount}): slow compiles there run into DeepEP's timeouts"
        return Finding(check, "warn", problem, local)
    if owner == "Triton" and "noexec" in options:
        problem = f"{folder} is on a noexec mount ({mount}): Triton loads its launchers from there"
        return machine.unavailable(check, problem, local)
    free = shutil.disk_usage(there).free
    if free < _MIN_FREE:
        return Finding(check, "warn", f"{folder} has {free >> 20} MiB free, less than {_MIN_FREE >> 20}", local)
    return Finding(check, "ok", f"{folder} on {kind or 'an unnamed file system'}")


def _mount_of(machine: Machine, folder: Path) -> tuple[str, str, list[str]]:
    """(mount point, file system type, options) of a folder's mount; the last of equal ones is on top."""
    best = ("", "", [])
    for line in (machine.proc / "mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)
        if len(point) >= len(best[0]) and folder.resolve().is_relative_to(point):
            best = (point, kind, options.split(","))
    return best


CHECKS = (check_variables, check_caches)
