"""A machine made of tables, for the tests of the doctor."""

import os
import subprocess
import textwrap

from sglang_deepep_v2.doctor.machine import Completed, Machine

CAPACITY = "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
LIMIT = "SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES"
H200 = "0, NVIDIA H200, 9.0, 580.1\n1, NVIDIA H200, 9.0, 580.1\n"
NO_GPU = {"version": "2.13.0+cpu", "cuda": None, "available": False, "devices": []}
CPU_TORCH = {**NO_GPU, "nccl_files": [], "nccl": 0, "nccl_built": None}
GPU_TORCH = {
    "version": "2.14.1",
    "cuda": "13.0",
    "available": True,
    "devices": [{"name": "NVIDIA H200", "capability": [9, 0]}] * 2,
    "nccl_files": ["/site/nvidia/nccl/lib/libnccl.so.2"],
    "nccl": 23007,
    "nccl_built": [2, 29, 3],
}
DEEP_EP = {
    "version": "2.1.0",
    "wheels": {"sgl-deep-ep": "0.1.2"},
    "buffer": "ElasticBuffer",
    "nccl_files": [],
}
PSUM = {"m_grouped_fp8_gemm_nt_contiguous": True, "m_grouped_bf16_gemm_nt_contiguous": True}
DEEP_GEMM = {"version": "0.2.3", "psum": PSUM, "alignment": 128}
OVERLAY = {
    "active": True,
    "enabled": True,
    "base": "0.5.23",
    "kinds": {"new": 2, "replaces": 1, "extends": 3},
}
LAUNCH = {
    "backend": "deepep_v2",
    "tp": 2,
    "pp": 1,
    "nnodes": 1,
    "mode": "direct",
    "role": "null",
    "capacity": 4096,
}


class FakeMachine(Machine):
    """A machine whose children answer from tables: probes by name, commands by their first two words."""

    def __init__(self, root, probes=None, commands=None, env=None):
        for folder in ("bin", "sys", "proc", "home"):
            (root / folder).mkdir(exist_ok=True)
        (root / "proc" / "mounts").write_text("/dev/root / ext4 rw 0 0\n")
        environment = {"HOME": str(root / "home"), "PATH": str(root / "bin"), **(env or {})}
        super().__init__(environment, root / "proc", root / "sys")
        self.root, self.probes, self.commands = root, probes or {}, commands or {}
        self.child_env = {}

    def _probe(self, name, args, env):
        self.child_env[name] = env
        return self.probes.get(
            name, {"error": f"No module named {name!r}", "error_type": "ModuleNotFoundError", "missing": name}
        )

    def which(self, name):
        return name if any(key.split()[0] == name for key in self.commands) else None

    def run(self, argv, timeout_s=None, env=None):
        words = [os.path.basename(argv[0]), *argv[1:]]
        for key, answer in self.commands.items():
            if " ".join(words).startswith(key):
                return answer if isinstance(answer, Completed) else Completed(0, answer, "")
        return Completed(127, "", "not found")


def without_gpu(root):
    """A builder of machines with no GPU; its keywords add to the tables."""
    return lambda probes=None, **rest: FakeMachine(root, {"torch": CPU_TORCH, **(probes or {})}, **rest)


def with_gpus(root):
    """A builder of machines with two H200s and a whole GPU stack; its keywords replace parts of it."""

    def build(probes=None, commands=None, **rest):
        probes = {"torch": GPU_TORCH, "deep_ep": DEEP_EP, "deep_gemm": DEEP_GEMM, **(probes or {})}
        return FakeMachine(root, probes, {"nvidia-smi --query-gpu": H200, **(commands or {})}, **rest)

    return build


def fake_site(root, **modules):
    """A folder for PYTHONPATH with modules of the given sources."""
    site = root / "site"
    site.mkdir(exist_ok=True)
    for name, source in modules.items():
        (site / f"{name}.py").write_text(textwrap.dedent(source))
    return {"HOME": str(root), "PATH": os.environ["PATH"], "PYTHONPATH": str(site)}


def expect(finding, level, *parts, fix=""):
    """The finding has this level, these parts in its message, and this part in its fix, which a shell can parse."""
    assert finding.level == level, finding
    for part in parts:
        assert part in finding.message, finding
    assert fix in (finding.fix or ""), finding
    if finding.fix:
        parsed = subprocess.run(["bash", "-n", "-c", finding.fix], capture_output=True, text=True)
        assert parsed.returncode == 0, (finding, parsed.stderr)
