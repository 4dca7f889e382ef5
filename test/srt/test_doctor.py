"""The doctor's checks of software and hardware: every branch, with small fakes."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from doctor_fakes import CPU_TORCH, DEEP_EP, DEEP_GEMM, GPU_TORCH, OVERLAY, PSUM, expect, with_gpus, without_gpu
from sglang_deepep_v2.doctor import hardware, software
from sglang_deepep_v2.doctor.machine import REFERENCE, USE_REFERENCE


@pytest.fixture
def cpu(tmp_path):
    return without_gpu(tmp_path)


@pytest.fixture
def gpu(tmp_path):
    return with_gpus(tmp_path)


# overlay


def test_overlay(cpu):
    check = software.check_overlay
    expect(check(cpu({"overlay": OVERLAY})), "ok", "0.5.23", "2 new, 1 replaces, 3 extends")
    expect(check(cpu({"overlay": {**OVERLAY, "enabled": False}})), "warn", fix="unset SGLANG_OVERLAY")
    unread = check(cpu({"overlay": {**OVERLAY, "active": False}}))
    expect(unread, "fail", "not in a new interpreter", "its .pth file was not processed", "not with --target")
    nowhere = {"error": "x", "error_type": "ModuleNotFoundError", "missing": "sglang_deepep_v2"}
    expect(check(cpu({"overlay": nowhere})), "fail", "not in a new interpreter", "is not installed there")
    wrong = {
        **OVERLAY,
        "problem": "verified on sglang 0.5.23; installed: 0.5.22. Run `pip install sglang==0.5.23`",
    }
    expect(check(cpu({"overlay": wrong})), "fail", "0.5.22", fix="pip install sglang==0.5.23")
    expect(check(cpu()), "fail", "No module named 'overlay'")


@pytest.mark.parametrize(
    ("recorded", "words"),
    [
        ({"url": "file://{root}/a%20b", "dir_info": {"editable": True}}, "-e '{root}/a b'"),
        ({"url": "file://{root}/a%20b", "dir_info": {}}, "'{root}/a b'"),
        ({"url": "file://{root}/gone", "dir_info": {}}, "{here}"),
        ({"url": "https://host/it.whl", "archive_info": {}}, "{here}"),
        (None, "{here}"),
    ],
)
def test_the_remedy_of_a_missing_loader_names_a_checkout(cpu, monkeypatch, tmp_path, recorded, words):
    """Never a name to look up in an index, where anybody may have taken it."""
    root = tmp_path / "a b"
    (root / "python" / "sglang_deepep_v2").mkdir(parents=True)
    (root / "pyproject.toml").touch()
    text = json.dumps(recorded).replace("{root}", str(tmp_path)) if recorded else None
    monkeypatch.setattr(software, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    found = software.check_overlay(cpu({"overlay": {**OVERLAY, "active": False}}))
    words = words.format(root=tmp_path, here=Path(__file__).resolve().parents[2])
    assert found.fix == f"{sys.executable} -m pip install --force-reinstall --no-deps {words}"


def test_the_remedy_of_a_wheel_whose_checkout_is_gone(cpu, monkeypatch):
    monkeypatch.setattr(software, "_checkout", lambda: (None, False))
    found = software.check_overlay(cpu({"overlay": {**OVERLAY, "active": False}}))
    expect(found, "fail", fix=" -m pip install --force-reinstall --no-deps .  # in a checkout of this repository")


# torch and NCCL


def test_torch(cpu, gpu):
    expect(software.check_torch(cpu()), "ok", "no CUDA", "CPU reference transport")
    expect(software.check_torch(gpu()), "ok", "CUDA 13.0", "2 GPU(s)")
    expect(software.check_torch(gpu({"torch": CPU_TORCH})), "fail", "a GPU is here", fix="torch==2.13.0")
    blind = {**GPU_TORCH, "available": False, "devices": []}
    expect(software.check_torch(gpu({"torch": blind})), "fail", "is_available() is False", "580.1", fix="driver")
    crash = {"error": "killed by SIGSEGV: no message", "error_type": "signal"}
    expect(software.check_torch(cpu({"torch": crash})), "fail", "SIGSEGV", fix="pip install torch")


def test_nccl_is_the_one_loaded(cpu, gpu):
    expect(software.check_nccl(cpu()), "ok", "none mapped", "gloo")
    expect(software.check_nccl(gpu()), "ok", "NCCL 2.30.7", "libnccl.so.2", "torch was built with 2.29.3")
    same = software.check_nccl(gpu({"torch": {**GPU_TORCH, "nccl_built": [2, 30, 7]}}))
    assert "built with" not in same.message
    old = gpu({"torch": {**GPU_TORCH, "nccl": 22903}})
    expect(software.check_nccl(old), "fail", "2.29.3", "needs 2.30.0", fix="nvidia-nccl-cu13==2.30.7")
    newer = gpu({"deep_ep": {**DEEP_EP, "buffer": "EPBuffer"}})
    expect(software.check_nccl(newer), "fail", "EPBuffer needs 2.32.3", fix="nvidia-nccl-cu13==2.32.3")
    two = gpu({"deep_ep": {**DEEP_EP, "nccl_files": ["/usr/lib/libnccl.so.2"]}})
    expect(software.check_nccl(two), "fail", "two NCCL libraries", "/usr/lib/libnccl.so.2", fix="LD_LIBRARY_PATH")
    expect(software.check_nccl(gpu({"torch": {**GPU_TORCH, "nccl_files": []}})), "fail", "no libnccl.so")
    expect(software.check_nccl(gpu({"torch": {**GPU_TORCH, "nccl": 0}})), "warn", "unreadable version")
    broken = {"error": "libcudart.so: cannot open", "error_type": "ImportError"}
    expect(software.check_nccl(cpu({"torch": broken})), "warn", "torch does not import: libcudart.so")


# deep_ep and deep_gemm


def test_deep_ep(cpu, gpu):
    check = software.check_deep_ep
    expect(check(gpu()), "ok", "deep_ep 2.1.0 (sgl-deep-ep 0.1.2), ElasticBuffer")
    expect(check(cpu()), "warn", "not installed", REFERENCE)
    missing = {
        "error": "No module named 'deep_ep'",
        "error_type": "ModuleNotFoundError",
        "missing": "deep_ep",
    }
    expect(check(gpu({"deep_ep": missing})), "fail", "not installed", fix="pip install sgl-deep-ep==")
    expect(check(gpu({"deep_ep": {**DEEP_EP, "buffer": None}})), "fail", "no ElasticBuffer", "V1")
    newer = {**DEEP_EP, "package": "deep_ep_v25", "version": "2.5.0", "buffer": "EPBuffer"}
    newer |= {"wheels": {"sgl-deep-ep-v25": "0.1.0"}, "refused": ["deep_ep: Invalid NCCL versions"]}
    expect(
        check(gpu({"deep_ep": newer})), "ok", "deep_ep_v25 2.5.0 (sgl-deep-ep-v25 0.1.0), EPBuffer; passed over deep_ep"
    )
    old = {"package": "deep_ep_v25", "error": "DeepEP 2.5 needs NCCL 2.32.3 or newer", "error_type": "ImportError"}
    expect(check(gpu({"deep_ep": old})), "fail", "import deep_ep_v25", fix="nvidia-nccl-cu13==2.32.3")
    expect(check(gpu(env={USE_REFERENCE: "1"})), "warn", "slow", fix=f"unset {USE_REFERENCE}")


@pytest.mark.parametrize(
    ("kind", "text", "fix"),
    [
        (
            "AssertionError",
            "Invalid NCCL versions: /a (loaded) v.s. /b (expected)",
            "nvidia-nccl-cu13==2.30.7",
        ),
        ("AssertionError", "Duplicate NCCL runtime found: /a and /b", "keep one libnccl.so"),
        ("ImportError", "This wheel requires CUDA 13, but PyTorch uses CUDA 12", "same CUDA major"),
        ("ImportError", "The installed PyTorch build does not provide CUDA", "same CUDA major"),
        ("ImportError", "The NVIDIA driver does not expose a usable CUDA device", "nvidia-smi"),
        ("ImportError", "_C.so: undefined symbol: _ZN3c105ErrorC2E", "pip install sgl-deep-ep"),
    ],
)
def test_deep_ep_import_refusals_name_their_fix(cpu, gpu, kind, text, fix):
    probes = {"deep_ep": {"error": text, "error_type": kind}}
    expect(software.check_deep_ep(gpu(probes)), "fail", text, kind, fix=fix)
    expect(software.check_deep_ep(cpu(probes)), "warn", text, REFERENCE)


def test_deep_gemm(cpu, gpu):
    check = software.check_deep_gemm
    expect(check(gpu()), "ok", "psum layout, alignment 128")
    expect(check(cpu()), "warn", "not installed", REFERENCE)
    no_psum = {**DEEP_GEMM, "psum": {**PSUM, "m_grouped_fp8_gemm_nt_contiguous": False}}
    expect(check(gpu({"deep_gemm": no_psum})), "warn", "m_grouped_fp8", "labels pipeline", fix="sgl-deep-gemm==")
    expect(check(gpu({"deep_gemm": {**DEEP_GEMM, "alignment": 64}})), "warn", "alignment 64, not 128", "labels")
    expect(check(gpu({"deep_gemm": {**DEEP_GEMM, "alignment": None}})), "warn", "unknown alignment")
    expect(check(gpu({"deep_gemm": {**DEEP_GEMM, "alignment": 224}})), "fail", "224", "does not divide", "128")
    crash = {"error": "killed by SIGABRT: terminate", "error_type": "signal"}
    expect(check(gpu({"deep_gemm": crash})), "fail", "SIGABRT", fix="pip install sgl-deep-gemm")


# CUDA toolkit


@pytest.fixture
def cuda_home(tmp_path):
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("")
    nvcc.chmod(0o755)
    return str(tmp_path / "cuda")


def test_toolkit(cpu, gpu, cuda_home, tmp_path):
    check, env = software.check_toolkit, {"CUDA_HOME": cuda_home}
    answer = lambda version: {"nvcc --version": f"Cuda compilation tools, release {version}, V", "c++": ""}  # noqa: E731
    expect(check(cpu()), "ok", "not needed")
    expect(check(gpu(commands=answer("13.0"), env=env)), "ok", "nvcc 13.0", cuda_home)
    expect(check(gpu(commands=answer("12.9"), env=env)), "warn", "torch was built for CUDA 13.0", fix="cuda-13.0")
    expect(check(gpu(commands=answer("12.2"), env=env)), "fail", "needs 12.3 or newer", fix="CUDA_HOME")
    no_compiler = {"nvcc --version": "release 13.0,"}
    expect(check(gpu(commands=no_compiler, env=env)), "fail", "no host C++ compiler", fix="g++")
    expect(check(gpu(env=env)), "fail", "does not answer: not found")
    gone = {"CUDA_HOME": str(tmp_path / "nowhere")}
    expect(check(gpu(env=gone)), "fail", "no nvcc at", "nowhere", fix="CUDA_HOME")
    # DeepEP's own compiler override wins over a broken CUDA_HOME.
    other = {**gone, "EP_JIT_NVCC_COMPILER": f"{cuda_home}/bin/nvcc"}
    expect(check(gpu(commands=answer("13.0"), env=other)), "ok", cuda_home)
    # CUDA_PATH and PATH are the next places.
    expect(check(gpu(commands=answer("13.0"), env={"CUDA_PATH": cuda_home})), "ok", cuda_home)


# hardware


@pytest.mark.parametrize(
    ("listing", "level", "part"),
    [
        ("0, NVIDIA H200, 9.0, 580\n", "ok", "1 x NVIDIA H200 (sm_90)"),
        ("0, NVIDIA B200, 10.0, 580\n", "warn", "sm_100): not validated"),
        ("0, NVIDIA A100, 8.0, 580\n", "fail", "needs sm_90"),
        ("0, NVIDIA H200, 9.0, 580\n1, NVIDIA B200, 10.0, 580\n", "fail", "needs one architecture"),
        ("0, NVIDIA H200, [N/A], 580\n", "ok", "2 x NVIDIA H200 (sm_90)"),
    ],
)
def test_gpu_architecture(gpu, listing, level, part):
    expect(hardware.check_gpu(gpu(commands={"nvidia-smi --query-gpu": listing})), level, part)


def test_gpus_of_two_architectures_are_told_apart_by_a_command(gpu):
    cards = ["NVIDIA A100, 8.0", "NVIDIA H200, 9.0", "NVIDIA A100, 8.0", "NVIDIA A100, 8.0", "NVIDIA H200, 9.0"]
    listing = "".join(f"{index}, {card}, 580\n" for index, card in enumerate(cards))
    found = hardware.check_gpu(gpu(commands={"nvidia-smi --query-gpu": listing}))
    expect(found, "fail", "3 x NVIDIA A100", "2 x NVIDIA H200")
    assert found.fix == "export CUDA_VISIBLE_DEVICES=1,4"


def test_no_gpu(cpu):
    expect(hardware.check_gpu(cpu()), "warn", "no NVIDIA GPU", REFERENCE)


def test_visible_devices_narrow_the_gpus(gpu):
    assert [g.index for g in gpu(env={"CUDA_VISIBLE_DEVICES": "1"}).gpus] == [1]
    assert gpu(env={"CUDA_VISIBLE_DEVICES": ""}).gpus == []
    assert gpu(env={"CUDA_VISIBLE_DEVICES": "-1"}).gpus == []
    assert len(gpu(env={"CUDA_VISIBLE_DEVICES": "GPU-8f2c"}).gpus) == 2


def topology(first, second):
    head = "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m\n"
    return f"{head}GPU0\t X \t{first}\tPIX\t0-15\nGPU1\t{second}\t X \tSYS\t0-15\nNIC0\tPIX\tSYS\t X \n"


def test_nvlink(cpu, gpu):
    check = hardware.check_nvlink
    expect(check(cpu()), "ok", "not needed")
    expect(check(gpu(env={"CUDA_VISIBLE_DEVICES": "0"}, probes={"torch": CPU_TORCH})), "ok", "not needed")
    expect(check(gpu(commands={"nvidia-smi topo": topology("NV18", "NV18")})), "ok", "1 pair(s) of 2 GPUs, NV18")
    apart = check(gpu(commands={"nvidia-smi topo": topology("SYS", "SYS")}))
    expect(apart, "fail", "GPU0-GPU1 SYS")
    assert apart.fix == "export CUDA_VISIBLE_DEVICES=0"
    expect(check(gpu()), "warn", "does not say", fix="nvidia-smi topo -m")


def nic(root, name, state, driver="mlx5_core"):
    port = root / "sys" / "class" / "infiniband" / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)
    (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    device = root / "sys" / "class" / "infiniband" / name / "device"
    device.mkdir()
    (device / "driver").symlink_to(root / "drivers" / driver)


def test_gin_without_a_nic(cpu, gpu):
    check = hardware.check_gin
    expect(check(gpu()), "ok", "no RDMA NIC", "EP_DISABLE_GIN=1")
    expect(check(gpu(env={"EP_DISABLE_GIN": "1"})), "ok", "off by EP_DISABLE_GIN=1")
    expect(check(gpu(env={"EP_DISABLE_GIN": "0"})), "fail", "unavailable", fix="export EP_DISABLE_GIN=1")
    expect(check(gpu(), nnodes=2), "fail", "2 nodes", "no active RDMA port", fix="ibv_devinfo")
    expect(
        check(gpu(env={"EP_DISABLE_GIN": "1"}), nnodes=2),
        "fail",
        "2 nodes need it",
        fix="unset EP_DISABLE_GIN",
    )
    expect(check(cpu(), nnodes=2), "warn", REFERENCE)


def test_gin_with_nics(gpu, tmp_path):
    machine = gpu(env={"NCCL_GIN_TYPE": "3"})
    nic(tmp_path, "mlx5_2", "1: DOWN", driver="efa")
    expect(hardware.check_gin(machine), "warn", "mlx5_2 efa down", "no active port", fix="EP_DISABLE_GIN=1")
    shutil.rmtree(tmp_path / "sys" / "class" / "infiniband" / "mlx5_2")
    nic(tmp_path, "mlx5_0", "4: ACTIVE")
    expect(hardware.check_gin(machine, nnodes=2), "ok", "NCCL_GIN_TYPE=3", "mlx5_0 mlx5_core active")
    expect(hardware.check_gin(gpu()), "ok", "NCCL chooses the type")
    nic(tmp_path, "mlx5_1", "1: DOWN")
    expect(hardware.check_gin(gpu()), "warn", "mlx5_1 mlx5_core down", "PORT_ACTIVE", fix="ibv_devinfo")
