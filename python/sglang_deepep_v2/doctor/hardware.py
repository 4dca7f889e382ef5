"""Checks of the hardware: GPU architecture, NVLink between the local GPUs, RDMA NICs for NCCL's GIN."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable

from .machine import REFERENCE, Finding, Machine

VALIDATED = (9, 0)


def check_gpu(machine: Machine) -> Finding:
    """The architecture of every visible GPU."""
    if not machine.has_gpu:
        return Finding("gpu", "warn", f"no NVIDIA GPU: {REFERENCE}")
    seen = _devices(machine)
    counts = Counter((name, capability) for _, name, capability in seen)
    text = ", ".join(f"{count} x {name} (sm_{major}{minor})" for (name, (major, minor)), count in counts.items())
    capabilities = Counter(capability for *_, capability in seen)
    if len(capabilities) > 1:
        kept = max(capabilities, key=lambda capability: (capability == VALIDATED, capabilities[capability]))
        fix = _visible(index for index, _, capability in seen if capability == kept)
        return Finding("gpu", "fail", f"{text}: one expert-parallel group needs one architecture", fix)
    (capability,) = capabilities
    if capability < VALIDATED:
        return Finding("gpu", "fail", f"{text}: DeepGEMM needs sm_90", "use --moe-a2a-backend none on this GPU")
    if capability != VALIDATED:
        problem = (
            f"{text}: not validated, expanded prefill was measured on sm_90 only; the remedy takes the non-expanded"
        )
        return Finding("gpu", "warn", problem, "export SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND=0")
    return Finding("gpu", "ok", text)


def _visible(indices: Iterable[int]) -> str:
    return f"export CUDA_VISIBLE_DEVICES={','.join(map(str, indices))}"


def _devices(machine: Machine) -> list[tuple[int, str, tuple[int, int]]]:
    """(index, name, capability) of each GPU; torch answers where nvidia-smi does not know the capability."""
    found = [(gpu.index, gpu.name, gpu.capability) for gpu in machine.gpus]
    if not found or any(capability is None for *_, capability in found):
        devices = machine.probe("torch").get("devices") or []
        found = [(index, device["name"], tuple(device["capability"])) for index, device in enumerate(devices)]
    if not found:
        raise RuntimeError("neither nvidia-smi nor torch names the GPU's compute capability")
    return found


def check_nvlink(machine: Machine) -> Finding:
    """Every pair of local GPUs is joined by NVLink, as direct mode requires."""
    count = len(machine.gpus) or len(machine.probe("torch").get("devices") or [])
    if count < 2:
        return Finding("nvlink", "ok", f"not needed: {count} GPU(s) here")
    smi = machine.which("nvidia-smi")
    done = smi and machine.run([smi, "topo", "-m"], timeout_s=30)
    links = _links(done.out) if done and done.code == 0 else {}
    pairs = list(itertools.combinations([gpu.index for gpu in machine.gpus], 2))
    unknown = [pair for pair in pairs if pair not in links]
    if unknown or not pairs:
        return Finding(
            "nvlink",
            "warn",
            f"nvidia-smi topo -m does not say how {count} GPUs are joined",
            "nvidia-smi topo -m",
        )
    without = [f"GPU{a}-GPU{b} {links[a, b]}" for a, b in pairs if not links[a, b].startswith("NV")]
    if without:
        joined: list[int] = []
        for gpu in machine.gpus:
            if all(links[other, gpu.index].startswith("NV") for other in joined):
                joined.append(gpu.index)
        problem = f"no NVLink: {', '.join(without)}; direct mode needs it between all"
        return Finding("nvlink", "fail", problem, _visible(joined))
    kinds = "/".join(sorted({links[pair] for pair in pairs}))
    return Finding("nvlink", "ok", f"{len(pairs)} pair(s) of {count} GPUs, {kinds}")


def _links(matrix: str) -> dict[tuple[int, int], str]:
    """(GPU a, GPU b) -> link name, from the table of `nvidia-smi topo -m`."""
    rows = [re.sub(r"\x1b\[\d*m", "", line).split() for line in matrix.splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0"), [])
    columns = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    links = {}
    for row in rows:
        if row is header or not row or row[0] not in columns:
            continue
        for column, link in zip(columns, row[1:], strict=False):
            links[int(row[0][3:]), int(column[3:])] = link
    return links


def check_gin(machine: Machine, nnodes: int = 1) -> Finding:
    """RDMA NICs for NCCL's GIN (GPU-initiated networking); one node without them runs over NVLink alone.

    nnodes  of the launch command, 1 without one
    """
    nics = _nics(machine)
    active = [nic for nic, (_, up) in nics.items() if up]
    setting = machine.env.get("EP_DISABLE_GIN")
    disabled = setting not in (None, "", "0")
    if nnodes > 1 and disabled:
        problem = f"EP_DISABLE_GIN={setting}, but {nnodes} nodes need it"
        return machine.unavailable("gin", problem, "unset EP_DISABLE_GIN")
    if nnodes > 1 and not active:
        problem = f"{nnodes} nodes, but no active RDMA port here ({_listed(nics)}): none is PORT_ACTIVE"
        return machine.unavailable("gin", problem, "ibv_devinfo")
    if disabled:
        return Finding("gin", "ok", f"off by EP_DISABLE_GIN={setting}; one node runs over NVLink")
    if not active and setting == "0":
        problem = f"EP_DISABLE_GIN=0 with {_listed(nics)}: several ranks assert 'NCCL GIN is unavailable'"
        return machine.unavailable("gin", problem, "export EP_DISABLE_GIN=1")
    if nics and not active:
        # The dispatcher turns GIN off only where no RDMA device exists.
        problem = f"{_listed(nics)}: no active port, so NCCL may find GIN unavailable"
        return Finding("gin", "warn", problem, "export EP_DISABLE_GIN=1")
    if not active:
        return Finding("gin", "ok", f"none ({_listed(nics)}): the dispatcher sets EP_DISABLE_GIN=1 for one node")
    kind = machine.env.get("NCCL_GIN_TYPE")
    chosen = f"NCCL_GIN_TYPE={kind}" if kind else "NCCL chooses the type"
    down = len(nics) - len(active)
    if down:
        return Finding("gin", "warn", f"{chosen}; {_listed(nics)}; a port that serves is PORT_ACTIVE", "ibv_devinfo")
    return Finding("gin", "ok", f"{chosen}; {_listed(nics)}")


def _nics(machine: Machine) -> dict[str, tuple[str, bool]]:
    """RDMA device -> (driver, whether a port of it is ACTIVE)."""
    found = {}
    for nic in sorted((machine.sys / "class" / "infiniband").glob("*")):
        states = [port.read_text() for port in nic.glob("ports/*/state")]
        driver = nic / "device" / "driver"
        found[nic.name] = (
            driver.resolve().name if driver.exists() else "unknown driver",
            any("ACTIVE" in s for s in states),
        )
    return found


def _listed(nics: dict[str, tuple[str, bool]]) -> str:
    if not nics:
        return "no RDMA NIC"
    return ", ".join(f"{nic} {driver} {'active' if up else 'down'}" for nic, (driver, up) in nics.items())


CHECKS = (check_gpu, check_nvlink)
