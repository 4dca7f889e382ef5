"""The doctor's checks of settings, its child processes, and the command itself."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import typer
from typer.testing import CliRunner

from child_signals import heed_signals
from doctor_fakes import CAPACITY, LAUNCH, LIMIT, OVERLAY, expect, fake_site, with_gpus, without_gpu
from resolved_args import write_config
from sglang_deepep_v2.doctor import doctor, examine, hardware, settings
from sglang_deepep_v2.doctor.launch import read_command
from sglang_deepep_v2.doctor.machine import REFERENCE, Finding, Machine


@pytest.fixture
def cpu(tmp_path):
    return without_gpu(tmp_path)


@pytest.fixture
def gpu(tmp_path):
    return with_gpus(tmp_path)


# settings


def test_declared_variables_are_those_the_installed_registry_has():
    from sglang.srt.environ import Envs

    known = {name for name in settings.declared_variables() if name.startswith(settings.PREFIX)}
    assert known == {name for name in vars(Envs) if name.startswith(settings.PREFIX)}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("SGLANG_DEEPEP_V2_PREFILL_DO_EXPAND", "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND"),
        ("SGLANG_DEEPEP_V2_ENABLE_PREFIL_EXPAND", "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND"),
        ("sglang_deepep_v2_num_sms", "SGLANG_DEEPEP_V2_NUM_SMS"),
        ("SGLANG_DEEPEPV2_NUM_SMS", "SGLANG_DEEPEP_V2_NUM_SMS"),
        ("DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK", CAPACITY),
        ("SGLANG_DEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK", CAPACITY),
    ],
)
def test_misspelt_variable_is_named_with_the_nearest(cpu, name, nearest):
    finding = settings.check_variables(cpu(env={name: "7"}))
    expect(finding, "fail", name, nearest, fix=f"unset {name}; export {nearest}=7")


def test_unknown_variable_without_a_near_name(cpu):
    name = "SGLANG_DEEPEP_V2_QQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQ"
    expect(settings.check_variables(cpu(env={name: "1"})), "fail", "read by nothing", fix=f"unset {name}")


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND", "on", "not a boolean"),
        ("SGLANG_DEEPEP_V2_NUM_SMS", "many", "not an integer"),
        (CAPACITY, "0", "below 1"),
        (LIMIT, "-1", "below 1"),
        (LIMIT, "4G", "not an integer"),
        ("SGLANG_DEEPEP_V2_NUM_SMS", "-1", "below 0"),
        ("NCCL_CUMEM_ENABLE", "0", "cuMem"),
    ],
)
def test_bad_values(cpu, name, value, part):
    expect(settings.check_variables(cpu(env={name: value})), "fail", part)


@pytest.mark.parametrize(("value", "remedy"), [("on", "1"), ("Off", "0")])
def test_remedies_of_bad_values_can_be_pasted(cpu, value, remedy):
    name = "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND"
    assert settings.check_variables(cpu(env={name: value})).fix == f"export {name}={remedy}"
    misspelt = settings.check_variables(cpu(env={"SGLANG_DEEPEPV2_NUM_SMS": "a b"}))
    assert misspelt.fix == "unset SGLANG_DEEPEPV2_NUM_SMS; export SGLANG_DEEPEP_V2_NUM_SMS='a b'"


def test_a_limit_of_what_is_off_has_no_effect(cpu):
    env = {LIMIT: "4096"}
    expect(settings.check_variables(cpu(env=env)), "warn", f"{LIMIT}=4096 has no effect", fix=f"unset {LIMIT}")
    on = {**env, "SGLANG_DEEPEP_V2_ENABLE_SYNC_FREE_PREFILL": "1"}
    expect(settings.check_variables(cpu(env=on)), "ok", "SYNC_FREE_MAX_BYTES=4096")


def test_variables_that_are_fine_or_doubtful(cpu):
    others = {
        "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "64",
        "NCCL_CUMEM_ENABLE": "1",
        "UNRELATED": "x",
    }
    expect(settings.check_variables(cpu(env=others)), "ok", "at their defaults")
    fine = {
        CAPACITY: "4096",
        "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND": "True",
        "SGLANG_DEEPEP_V2_NUM_SMS": "0",
    }
    expect(settings.check_variables(cpu(env=fine)), "ok", "NUM_MAX_DISPATCH_TOKENS_PER_RANK=4096", "NUM_SMS=0")
    expect(settings.check_variables(cpu(env={"EP_REUSE_NCCL_COMM": "1"})), "warn", fix="unset EP_REUSE_NCCL_COMM")


def test_caches_defaults_and_overrides(cpu, tmp_path):
    found = settings.check_caches(cpu())
    assert [f.level for f in found] == ["ok"] * 3
    home = tmp_path / "home"
    for finding, folder in zip(found, (".cache/sglang/deep_gemm", ".deep_ep", ".cache/sglang/triton")):
        expect(finding, "ok", str(home / folder), "ext4")
    moved = {
        "SGLANG_DG_CACHE_DIR": f"{tmp_path}/a",
        "EP_JIT_CACHE_DIR": f"{tmp_path}/b",
        "TRITON_CACHE_DIR": f"{tmp_path}/c",
    }
    for finding, letter in zip(settings.check_caches(cpu(env=moved)), "abc"):
        expect(finding, "ok", f"{tmp_path}/{letter}")
    ignored = settings.check_caches(cpu(env={"DG_JIT_CACHE_DIR": "/elsewhere"}))[0]
    expect(ignored, "warn", "overwritten by SGLang", fix="export SGLANG_DG_CACHE_DIR=/elsewhere")
    # SGLANG_CACHE_DIR moves the two caches that SGLang places, not DeepEP's.
    all_moved = settings.check_caches(cpu(env={"SGLANG_CACHE_DIR": f"{tmp_path}/all"}))
    assert [f"{tmp_path}/all" in f.message for f in all_moved] == [True, False, True]


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.s3fs", "ceph"])
def test_cache_on_a_network_file_system(cpu, tmp_path, kind):
    machine = cpu()
    mounts = f"/dev/root / ext4 rw 0 0\nserver:/export {tmp_path}/home {kind} rw 0 0\n"
    (tmp_path / "proc" / "mounts").write_text(mounts)
    for finding in settings.check_caches(machine):
        expect(finding, "warn", kind, f"{tmp_path}/home", fix="-cache")


def test_cache_that_cannot_be_used(cpu, gpu, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    in_a_file = {"EP_JIT_CACHE_DIR": str(file)}
    expect(settings.check_caches(gpu(env=in_a_file))[1], "fail", "not a directory", fix="export EP_JIT_CACHE_DIR=")
    expect(settings.check_caches(cpu(env=in_a_file))[1], "warn", "not a directory", REFERENCE)
    expect(settings.check_caches(gpu(env={"EP_JIT_CACHE_DIR": "/proc/deep_ep"}))[1], "fail", "cannot be written")
    machine = gpu()
    noexec = f"/dev/root / ext4 rw 0 0\ntmpfs {tmp_path}/home tmpfs rw,noexec 0 0\n"
    (tmp_path / "proc" / "mounts").write_text(noexec)
    assert [f.level for f in settings.check_caches(machine)] == ["ok", "ok", "fail"]
    monkeypatch.setattr(settings, "_MIN_FREE", 1 << 62)
    expect(settings.check_caches(cpu())[0], "warn", "MiB free")


def test_mount_points_with_spaces_and_overmounts(cpu, tmp_path):
    machine = cpu()
    folder = tmp_path / "a b"
    folder.mkdir()
    escaped = str(folder).replace(" ", "\\040")
    (tmp_path / "proc" / "mounts").write_text(f"x {escaped} ext4 rw 0 0\ny {escaped} nfs rw 0 0\nz / xfs rw 0 0\n")
    assert settings._mount_of(machine, folder)[1] == "nfs"
    assert settings._mount_of(machine, tmp_path)[1] == "xfs"


# the whole


def test_examine_never_raises(cpu, monkeypatch):
    def broken(machine):
        raise KeyError("surprise")

    monkeypatch.setattr(hardware, "CHECKS", (broken,))
    findings = examine(cpu({"overlay": OVERLAY}))
    assert Finding("doctor", "fail", "a check failed itself: KeyError: 'surprise'") in findings
    assert {"overlay", "torch", "gin", "variables"} <= {f.check for f in findings}


def test_examine_takes_the_node_count_from_the_command(gpu):
    launch = read_command("python -m sglang.launch_server --nnodes 2 --tp 4".split())
    machine = gpu(
        {
            "overlay": OVERLAY,
            "launch": {**LAUNCH, "tp": 4, "nnodes": 2, "required": 8, "device": "cuda"},
        }
    )
    by_check = {f.check: f for f in examine(machine, launch)}
    expect(by_check["gin"], "fail", "2 nodes")
    expect(by_check["launch"], "ok")


def test_children_that_crash_hang_or_print_rubbish(tmp_path):
    machine = Machine(fake_site(tmp_path, deep_ep="import os\nos.kill(os.getpid(), 11)"))
    assert machine.probe("deep_ep") == {"error": "killed by SIGSEGV: no message", "error_type": "signal"}
    slow = fake_site(tmp_path, deep_ep="import subprocess, time\nsubprocess.Popen(['sleep', '60'])\ntime.sleep(60)")
    assert Machine(slow, timeout_s=2).probe("deep_ep") == {
        "error": "no answer within 2 s",
        "error_type": "timeout",
    }
    leaves = fake_site(tmp_path, deep_ep="raise SystemExit(3)")
    assert Machine(leaves).probe("deep_ep")["error_type"] == "SystemExit"
    noisy = fake_site(tmp_path, deep_ep="print('half a line', end='')\n__version__ = '2.5.0'\nEPBuffer = object")
    reply = Machine(noisy).probe("deep_ep")
    assert (reply["version"], reply["buffer"]) == ("2.5.0", "EPBuffer")


def test_a_grandchild_that_holds_the_pipes_is_not_waited_for(tmp_path):
    source = """
        import subprocess, sys, time
        held = subprocess.Popen(["sleep", "60"], start_new_session=True)
        print("said", held.pid, flush=True)
        time.sleep(60)
    """
    began = time.monotonic()
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = Machine(fake_site(tmp_path), timeout_s=2).run(command)
    taken = time.monotonic() - began
    os.kill(int(done.out.split()[1]), signal.SIGKILL)
    assert (done.code, done.out[:5], done.err) == (None, "said ", "") and taken < 30


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (
            {"deep_ep_v25": "__version__ = '2.5.0'\nEPBuffer = object"},
            {"package": "deep_ep_v25", "buffer": "EPBuffer", "version": "2.5.0", "refused": []},
        ),
        (
            {"deep_ep": "ElasticBuffer = object", "deep_ep_v25": "EPBuffer = object"},
            {"package": "deep_ep", "buffer": "ElasticBuffer"},
        ),
        (
            {"deep_ep": "assert False, 'Invalid NCCL'", "deep_ep_v25": "EPBuffer = object"},
            {"package": "deep_ep_v25", "buffer": "EPBuffer", "refused": ["deep_ep: Invalid NCCL"]},
        ),
        (
            {"deep_ep": "__version__ = '1.2.1'", "deep_ep_v25": "EPBuffer = object"},
            {"package": "deep_ep_v25", "refused": ["deep_ep: no buffer"]},
        ),
        (
            {"deep_ep_v25": "raise ImportError('needs nvcc')"},
            {"package": "deep_ep_v25", "error": "needs nvcc", "error_type": "ImportError"},
        ),
        ({"deep_ep": "__version__ = '1.2.1'"}, {"package": "deep_ep", "buffer": None, "version": "1.2.1"}),
        ({}, {"package": "deep_ep", "missing": "deep_ep"}),
    ],
)
def test_probe_of_deep_ep_takes_the_package_that_the_dispatcher_takes(tmp_path, sources, expected):
    reply = Machine(fake_site(tmp_path, **sources)).probe("deep_ep")
    assert {key: reply.get(key) for key in expected} == expected


def test_probe_of_deep_gemm_reads_signatures_and_docstrings(tmp_path):
    source = """
        def m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, use_psum_layout=False): ...
        def m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout): ...
        def get_mk_alignment_for_contiguous_layout(): return (128, 128)
        __version__ = "9"
    """
    reply = Machine(fake_site(tmp_path, deep_gemm=source)).probe("deep_gemm")
    assert reply["psum"] == {
        "m_grouped_fp8_gemm_nt_contiguous": True,
        "m_grouped_bf16_gemm_nt_contiguous": False,
    }
    assert (reply["version"], reply["alignment"]) == ("9", 128)
    compiled = """
        class Op:
            __signature__ = "none"
            def __init__(self, text): self.__doc__ = text
            def __call__(self, *a): ...
        m_grouped_fp8_gemm_nt_contiguous = Op("f(a, b, use_psum_layout)")
        m_grouped_bf16_gemm_nt_contiguous = Op("f(a, b)")
    """
    reply = Machine(fake_site(tmp_path, deep_gemm=compiled)).probe("deep_gemm")
    assert list(reply["psum"].values()) == [True, False] and reply["alignment"] is None


def test_probe_of_torch_finds_the_mapped_nccl(tmp_path):
    library = next(line.split()[-1] for line in open("/proc/self/maps") if ".so" in line)
    (tmp_path / "libnccl.so.2").write_bytes(open(library, "rb").read())
    torch = f"""
        import mmap, types
        file = open("{tmp_path}/libnccl.so.2", "rb")
        held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        __version__ = "2.14.1"
        version = types.SimpleNamespace(cuda="13.0")
        cuda = types.SimpleNamespace(is_available=lambda: False, nccl=types.SimpleNamespace(version=lambda: (2, 29, 3)))
    """
    reply = Machine(fake_site(tmp_path, torch=torch)).probe("torch")
    assert reply["nccl_files"] == [f"{tmp_path}/libnccl.so.2"]
    assert reply["nccl_built"] == [2, 29, 3] and reply["nccl"] == 0


def test_what_ran_out_of_time_names_the_limit(cpu):
    late = {"error": "no answer within 120 s", "error_type": "timeout"}
    probes = {"overlay": late, "torch": late, "deep_ep": late, "launch": late}
    by_check = {finding.check: finding for finding in examine(cpu(probes))}
    for check in ("overlay", "torch", "deep_ep", "nccl"):
        expect(by_check[check], by_check[check].level, "no answer within 120 s")
        assert by_check[check].fix == "sglang-deepep-v2 doctor --timeout 240"
    launch = read_command(["sglang", "serve", "m"])
    assert examine(cpu(probes), launch)[-1].fix == "sglang-deepep-v2 doctor --timeout 240 -- ..."


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_doctor_ends_its_children(tmp_path, number):
    started = tmp_path / "started"
    source = f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    env = {**os.environ, **fake_site(tmp_path, deep_ep=source)}
    command = [sys.executable, "-m", "sglang_deepep_v2", "doctor"]
    child = subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_signals
    )
    for _ in range(600):
        if started.exists() and started.read_text():
            break
        time.sleep(0.1)
    child.send_signal(number)
    out, err = child.communicate(timeout=30)
    assert (child.returncode, out, err) == (130, "", "interrupted; every check is ended\n")
    assert not os.path.exists(f"/proc/{started.read_text()}")


def test_importing_the_doctor_is_light():
    code = (
        "import sys, sglang_deepep_v2.doctor; print([m for m in ('torch', 'sglang.srt', 'numpy') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


app = typer.Typer()
app.command()(doctor)
app.callback()(lambda: None)


def run_doctor(*words, **env):
    done = CliRunner().invoke(app, ["doctor", "--json", *words], env=env)
    report = json.loads(done.stdout)
    assert report["ok"] == (done.exit_code == 0) == (report["counts"]["fail"] == 0)
    return {f["check"]: f for f in report["findings"]}


@pytest.mark.parametrize("seconds", ["inf", "1e300", "nan", "86401"])
def test_a_limit_that_no_clock_holds_is_refused(seconds):
    done = CliRunner().invoke(app, ["doctor", "--timeout", seconds], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "--timeout" in done.output and "86400" in done.output, done.output


def test_the_longest_limit_is_not_doubled(cpu):
    machine = cpu()
    machine.timeout_s = 86400.0
    machine.probes["overlay"] = {"error": machine.late, "error_type": "timeout"}
    fix = next(finding.fix for finding in examine(machine) if finding.check == "overlay")
    assert fix == "sglang-deepep-v2 doctor --timeout 86400"


@pytest.mark.loader
def test_command_on_this_machine(tmp_path):
    """End to end on whatever machine this is, with a launch command whose budget does not fit."""
    command = f"python -m sglang.launch_server --model-path {write_config(tmp_path)} --moe-a2a-backend deepep_v2"
    words = f"{CAPACITY}=1023 {command} --tp 8 --device cuda --chunked-prefill-size 8192".split()
    found = run_doctor("--", *words)
    assert found["overlay"]["level"] == "ok" and found["torch"]["level"] == "ok"
    assert found["launch"]["level"] == "fail", found["launch"]
    assert "required=1024, capacity=1023" in found["launch"]["message"]
    assert found["launch"]["fix"] == f"export {CAPACITY}=1024"
    assert "NUM_MAX_DISPATCH_TOKENS_PER_RANK=1023" in found["variables"]["message"]


def test_lines_and_exit_status(monkeypatch):
    import sglang_deepep_v2.doctor as package

    found = [Finding("torch", "ok", "fine"), Finding("deep_ep", "fail", "two\nlines", "pip install x")]
    monkeypatch.setattr(package, "examine", lambda machine, launch: found)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert done.stdout.splitlines() == ["ok    torch    fine", "fail  deep_ep  two lines  -> pip install x"]
    found.pop()
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
