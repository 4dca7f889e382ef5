"""The doctor's check of a launch command: what it takes apart, what SGLang says of it, and what SGLang does not say."""

import os
import textwrap

import pytest

from doctor_fakes import CAPACITY, LAUNCH, LIMIT, expect, fake_site, with_gpus, without_gpu
from resolved_args import write_config
from sglang_deepep_v2.doctor.launch import check_launch, read_command
from sglang_deepep_v2.doctor.machine import USE_REFERENCE, Finding, Machine


@pytest.fixture
def cpu(tmp_path):
    return without_gpu(tmp_path)


@pytest.fixture
def gpu(tmp_path):
    return with_gpus(tmp_path)


@pytest.mark.parametrize(
    ("words", "env", "argv"),
    [
        ("python -m sglang.launch_server --tp 8", {}, ["--tp", "8"]),
        (
            "env A=1 B=x=y /usr/bin/python3 -m sglang.launch_server --tp 8",
            {"A": "1", "B": "x=y"},
            ["--tp", "8"],
        ),
        ("sglang serve org/model --tp 8", {}, ["--model-path", "org/model", "--tp", "8"]),
        ("sglang serve --tp 8", {}, ["--tp", "8"]),
    ],
)
def test_read_command(words, env, argv):
    launch = read_command(words.split())
    assert (launch.env, launch.argv, launch.problem) == (env, argv, None)


def test_a_command_that_starts_no_server(cpu):
    expect(check_launch(cpu(), read_command(["python", "train.py"])), "fail", "python train.py", fix="doctor --")


def test_launch_findings(cpu, gpu):
    launch = read_command(["python", "-m", "sglang.launch_server", "--tp", "2"])
    check = lambda reply, machine=gpu: check_launch(machine({"launch": reply}), launch)  # noqa: E731
    done = {**LAUNCH, "required": 1024, "device": "cuda"}
    expect(check(done), "ok", "tp 2", "up to 1024 tokens per rank, capacity 4096")
    expect(check(done, cpu), "ok", "no GPU is here")
    expect(check({**LAUNCH, "role": "decode", "device": "cuda"}), "ok", "decode role", "4096")
    expect(check({**done, "backend": "none"}), "warn", "--moe-a2a-backend none", fix="deepep_v2")
    expect(check({**done, "tp": 4}), "fail", "needs 4 GPUs on this node, 2 visible")
    expect(check({**done, "tp": 4, "nnodes": 2}), "ok", "2 node(s)")
    refused = {
        "stage": "resolve",
        "error_type": "ValueError",
        "error": f"{CAPACITY}: required=1025, capacity=128.",
    }
    expect(check(refused), "fail", "required=1025", fix=f"export {CAPACITY}=1025")
    direct = {**refused, "error": "direct cannot run across nodes (nnodes=2); pass --deepep-v2-mode hybrid."}
    expect(check(direct), "fail", fix="--deepep-v2-mode hybrid")
    parse = {"stage": "parse", "error_type": "SystemExit", "error": "error: unrecognized arguments: --tpp 2"}
    expect(check(parse), "fail", "--tpp", fix="--help")
    absent = {"stage": "resolve", "error_type": "OSError", "error": "no config.json", "absent": True, "model": "a/b"}
    expect(check(absent), "warn", "capacity was not checked", "no config.json", fix="hf download a/b config.json")
    given = {"stage": "given", "error_type": "ValueError", "error": "--tp-size 0 is below 1", "model": "a/b"}
    assert check(given, cpu) == Finding("launch", "fail", "--tp-size 0 is below 1")
    odd = {"stage": "resolve", "error_type": "AttributeError", "error": "no attribute 'split'", "absent": False}
    expect(check(odd), "fail", "AttributeError: no attribute 'split'")
    expect(check({"stage": "import", "error_type": "ImportError", "error": "x"}), "fail", "does not import")
    expect(check({"error_type": "timeout", "error": "no answer within 120 s"}), "fail", "no answer within 120 s")


def test_a_cuda_command_is_not_held_against_the_cpu_transport(cpu, gpu):
    def transport_seen(machine, device):
        check_launch(machine, read_command(f"python -m sglang.launch_server --device {device}".split()))
        assert machine.child_env["launch"]["HF_HUB_OFFLINE"] == "1"
        return machine.child_env["launch"].get(USE_REFERENCE)

    probes = {"launch": {**LAUNCH, "device": "cuda", "required": 1}}
    assert transport_seen(cpu(probes), "cuda") == "0"
    assert transport_seen(cpu(probes), "cpu") is None
    assert transport_seen(gpu(probes), "cuda") is None


@pytest.mark.parametrize(
    ("words", "transport", "said"),
    [
        ("--device=cuda", "0", False),
        ("--device cpu --device cuda", "0", False),
        ("--device cuda --device cpu", None, False),
        ("--served-model-name cuda", None, True),
        ("--served-model-name --device=x cuda", None, False),
    ],
)
def test_only_the_device_option_makes_a_cuda_command(cpu, words, transport, said):
    machine = cpu({"launch": {**LAUNCH, "device": "cpu", "required": 1}})
    found = check_launch(machine, read_command(["sglang", "serve", "m", *words.split()]))
    assert machine.child_env["launch"].get(USE_REFERENCE) == transport
    assert ("checked as a CPU server" in found.message) == said


def test_launch_command_without_a_device(tmp_path):
    """Where no GPU is, SGLang starts a CPU server, and the doctor says what it took the command for."""
    command = f"python -m sglang.launch_server --model-path {write_config(tmp_path)} --moe-a2a-backend deepep_v2"
    machine = Machine({**os.environ, CAPACITY: "32"})
    if machine.has_gpu:
        pytest.skip("needs a machine without a GPU")
    words = f"{command} --tp 2 --chunked-prefill-size 64".split()
    captured = check_launch(machine, read_command(words))
    expect(captured, "fail", USE_REFERENCE, "as a CPU server, add --device cuda", fix="--disable-cuda-graph")
    fits = check_launch(machine, read_command([*words, "--disable-cuda-graph"]))
    expect(fits, "ok", "cpu, tp 2", "up to 32 tokens per rank, capacity 32", "as a CPU server, add --device cuda")


@pytest.mark.loader
def test_a_sync_free_limit_is_held_against_the_models_layer(tmp_path):
    from sglang.srt.layers.moe.token_dispatcher import sync_free

    words = f"sglang serve {write_config(tmp_path)} --moe-a2a-backend deepep_v2 --tp 2 --device cuda"
    launch = read_command([*words.split(), "--chunked-prefill-size", "64", "--max-prefill-tokens", "64"])
    rows = sync_free.capacity_rows(2, 32, 2, 8, 128)
    needed = sync_free.layer_bytes(rows, 256, 256, False)

    def check(limit):
        switches = {CAPACITY: "32", "SGLANG_DEEPEP_V2_ENABLE_SYNC_FREE_PREFILL": "1", LIMIT: str(limit)}
        return check_launch(Machine({**os.environ, **switches}), launch)

    short = check(needed - 1)
    if "needs 2 GPUs" in short.message:
        pytest.skip("this machine has one GPU")
    expect(short, "fail", f"needs {needed} bytes", f"{rows} rows", f"allows {needed - 1}")
    assert short.fix == f"export {LIMIT}={needed}"
    expect(check(needed), "ok", "capacity 32")


def test_plain_sglang_has_no_sync_free_limit_to_hold(tmp_path):
    words = f"SGLANG_OVERLAY=0 sglang serve {write_config(tmp_path)} --moe-a2a-backend deepep_v2 --tp 2 --device cuda"
    launch = read_command([*words.split(), "--chunked-prefill-size", "64", "--max-prefill-tokens", "64"])
    finding = check_launch(Machine({**os.environ, CAPACITY: "64", **launch.env}), launch)
    if "needs 2 GPUs" in finding.message:
        pytest.skip("this machine has one GPU")
    expect(finding, "ok", "capacity 64")


def test_a_sync_free_limit_that_cannot_be_compared_is_said(gpu):
    launch = read_command(["sglang", "serve", "m"])
    reply = {**LAUNCH, "required": 1, "device": "cuda", "sync_free": {"limit": 7, "needed": None}}
    expect(check_launch(gpu({"launch": reply}), launch), "ok", f"{LIMIT}=7 was not checked")


def test_launch_command_that_fits(tmp_path):
    words = f"sglang serve {write_config(tmp_path)} --moe-a2a-backend deepep_v2 --tp 2 --device cuda"
    launch = read_command([*words.split(), "--chunked-prefill-size", "1000", "--max-prefill-tokens", "1000"])
    finding = check_launch(Machine({**os.environ, CAPACITY: "500"}), launch)
    if "needs 2 GPUs" in finding.message:
        pytest.skip("this machine has one GPU")
    expect(finding, "ok", "up to 500 tokens per rank, capacity 500")


def test_probe_of_a_launch_command_reports_the_stage_it_reached(tmp_path):
    """SGLang replaced by a few lines, so that each way to fail costs no import of the real one."""
    package = tmp_path / "site" / "sglang" / "srt"
    (package / "plugins").mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "plugins" / "__init__.py").write_text("def load_plugins(): ...")
    source = """
        import argparse, sys
        class Args:
            def resolve_once(self): raise {raised}
        def prepare_server_args(argv):
            parser = argparse.ArgumentParser()
            parser.add_argument("--model", dest="model_path", default="org/name")
            parser.add_argument("--tp", dest="tp_size", type=int, default=1)
            parser.add_argument("--nnodes", type=int, default=1)
            parser.add_argument("--node-rank", type=int, default=0)
            return parser.parse_args(argv, Args())
    """

    def probe(raised, *argv):
        (package / "server_args.py").write_text(textwrap.dedent(source).format(raised=raised))
        env = {**fake_site(tmp_path), "SGLANG_OVERLAY": "0"}
        return Machine(env).probe("launch", *argv)

    assert probe("ValueError('too big')", "--tp", "0")["error"] == "--tp-size 0 is below 1"
    reply = probe("ValueError('too big')", "--tp", "8")
    assert (reply["stage"], reply["error"], reply["absent"]) == ("resolve", "too big", False)
    assert probe("OSError('no config')")["absent"] is True
    there = tmp_path / "model"
    there.mkdir()
    assert probe("OSError('not JSON')", "--model", str(there))["absent"] is False
    assert probe("OSError('not JSON')", "--nnodes", "2", "--node-rank", "1")["stage"] == "resolve"
    outside = probe("ValueError", "--nnodes", "2", "--node-rank", "2")
    assert (outside["stage"], outside["error"]) == ("given", "--node-rank 2 is not between 0 and 1 (--nnodes 2)")
    for path in ("./none", "/none/at/all", "~/none", "none/at/all", "none/"):
        refused = probe("ValueError", "--model", path)
        assert (refused["stage"], refused["error"]) == (
            "given",
            f"--model-path {path}: there is no such file or folder",
        )
    for name in ("gpt2", "org/name.v1", "s3://bucket/model"):
        assert probe("OSError", "--model", name)["stage"] == "resolve"
    wrong = probe("ValueError('too big')", "--tpp")
    assert wrong["stage"] == "parse" and "unrecognized arguments: --tpp" in wrong["error"]
    (package / "server_args.py").write_text("import nowhere_to_be_found")
    reply = Machine({**fake_site(tmp_path), "SGLANG_OVERLAY": "0"}).probe("launch")
    assert reply["stage"] == "import" and reply["error_type"] == "ModuleNotFoundError"
