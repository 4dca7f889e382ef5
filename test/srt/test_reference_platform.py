"""When the CPU reference platform is active, what it sets, and that a stand-in that does not fit is never silent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from sglang_deepep_v2 import cpu_reference, overlay
from sglang_deepep_v2.cpu_reference import stand_ins, torchvision_absent

TRANSPORT = "SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT"
SELECTION = ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE", TRANSPORT)


@pytest.fixture
def bare(monkeypatch):
    for name in SELECTION:
        monkeypatch.delenv(name, raising=False)
    # activate() may append a finder.
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "accelerator", "active"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"SGLANG_PLATFORM": "deepep_v2_cpu"}, True, True),
        ({"SGLANG_PLATFORM": "another"}, False, False),
        ({"SGLANG_USE_CPU_ENGINE": "1"}, False, False),
        ({"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLATFORM": "deepep_v2_cpu"}, False, True),
    ],
)
def test_selection(bare, variables, accelerator, active):
    for name, value in variables.items():
        bare.setenv(name, value)
    bare.setattr(torch.cuda, "is_available", lambda: accelerator)
    bare.setattr(torch.accelerator, "is_available", lambda: accelerator)
    assert cpu_reference.is_selected() is active
    bare.setenv(TRANSPORT, "")
    name = cpu_reference.activate()
    assert (name == "sglang_deepep_v2.cpu_reference.platform.CpuReferencePlatform") is active


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_activation_selects_the_transport_unless_the_user_did(bare, before, after):
    bare.setenv("SGLANG_PLATFORM", cpu_reference.PLATFORM_NAME)
    bare.setenv(TRANSPORT, before or "")
    if before is None:
        bare.delenv(TRANSPORT)
    cpu_reference.activate()
    assert os.environ[TRANSPORT] == after


def test_nothing_is_stood_in_for_elsewhere(bare):
    bare.setenv("SGLANG_PLATFORM", "another")
    bare.setattr(stand_ins, "_STAND_INS", (lambda: pytest.fail("installed"),))
    stand_ins.register()


def test_a_process_that_runs_past_the_patch_is_ended(bare):
    """On every platform: SGLang loads entry points also where no .pth file was processed."""

    def refuse():
        raise overlay.OverlayError("its loader is not")

    bare.setenv("SGLANG_PLATFORM", "another")
    bare.setattr(overlay, "check_in_charge", refuse)
    with pytest.raises(SystemExit, match="its loader is not"):
        stand_ins.register()


def test_a_stand_in_that_does_not_fit_ends_the_process(bare, caplog):
    def renamed_upstream():
        raise AttributeError("module has no attribute 'gone'")

    bare.setenv("SGLANG_PLATFORM", cpu_reference.PLATFORM_NAME)
    bare.setattr(stand_ins, "_STAND_INS", (renamed_upstream,))
    # Not an Exception: SGLang's plugin loader logs those and goes on.
    with pytest.raises(SystemExit, match="renamed_upstream does not fit this SGLang.*'gone'"):
        stand_ins.register()
    assert "stand-in renamed_upstream failed" in caplog.text


def test_missing_interpreter_is_said(bare, caplog):
    bare.setenv("SGLANG_PLATFORM", cpu_reference.PLATFORM_NAME)
    bare.setattr(stand_ins, "_STAND_INS", ())
    bare.setenv("TRITON_INTERPRET", "1")
    stand_ins.register()
    assert not caplog.records
    bare.delenv("TRITON_INTERPRET")
    stand_ins.register()
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "TRITON_INTERPRET=1" in caplog.text


PROBE = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
import sglang.srt.layers.moe.moe_runner.deep_gemm as runner
from sglang.srt.platforms import current_platform
from sglang.srt.plugins import load_plugins
load_plugins()
import torch
from sglang.kernels.ops.quantization import fp8_kernel
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.deep_gemm_wrapper import psum
from sglang_deepep_v2.cpu_reference import grouped_gemm, stand_ins
assert type(current_platform).__name__ == "CpuReferencePlatform"
assert runner.per_token_group_quant is stand_ins.per_token_group_quant
assert psum.deep_gemm is deep_gemm_wrapper.entrypoint.deep_gemm is grouped_gemm
q, s = fp8_kernel.sglang_per_token_group_quant_fp8(torch.ones(3, 256).bfloat16(), 128)
a = torch.eye(128).bfloat16()
d = torch.zeros(128, 128).bfloat16()
deep_gemm_wrapper.grouped_gemm_nt_bf16_contig(a, a[None] * 2, d, torch.zeros(128, dtype=torch.int32))
assert torch.equal(d, 2 * a)
print("probe passed", tuple(s.shape))
"""


def test_a_server_can_be_profiled():
    # Before the platform's module, which the package otherwise finds half imported.
    import sglang.srt.utils  # noqa: F401

    from sglang_deepep_v2.cpu_reference.platform import CpuReferencePlatform

    # SGLang maps the activity that a request names through these two.
    platform = CpuReferencePlatform()
    name = platform.get_torch_profiler_activity_str()
    assert getattr(torch.profiler.ProfilerActivity, name) is platform.get_torch_profiler_activity()


def test_the_installed_sglang_takes_every_stand_in():
    """In a process of its own: through SGLang's own discovery, after the runner was imported as in a scheduler."""
    environment = {key: value for key, value in os.environ.items() if key not in SELECTION}
    environment |= {"SGLANG_PLATFORM": cpu_reference.PLATFORM_NAME, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE], env=environment, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "probe passed (3, 2)" in run.stdout
    installed = [line for line in run.stdout.splitlines() if "stand-ins installed" in line]
    assert len(installed) == 1 and "cannot run" not in run.stdout
    for stand_in in stand_ins._STAND_INS:
        assert stand_in.__name__ in installed[0] and stand_in.__doc__


def test_torchvision_names_resolve_and_raise_when_used(monkeypatch):
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torchvision"}
    for name in kept:
        monkeypatch.delitem(sys.modules, name)
    # In front of an installed torchvision.
    monkeypatch.setattr(sys, "meta_path", [torchvision_absent._AbsentTorchvision(), *sys.meta_path])
    from torchvision.io import decode_jpeg
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2.functional import pil_to_tensor

    assert InterpolationMode.BICUBIC.value == "bicubic"
    for function in (decode_jpeg, pil_to_tensor):
        with pytest.raises(RuntimeError, match="torchvision is not installed"):
            function(None)
    with pytest.raises(ImportError):
        import torchvision.models  # noqa: F401
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)


def _dequantize(q, s, group):
    return q.float() * s.repeat_interleave(group, dim=-1)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("col_major", [False, True])
def test_quantised_values_are_within_half_a_step(group, col_major):
    x = torch.randn((7, 256), generator=torch.Generator().manual_seed(0)).bfloat16() * 100
    q, s = stand_ins.per_token_group_quant(x, group_size=group, column_major_scales=col_major)
    assert s.stride() == ((1, 8) if col_major else (256 // group, 1))
    amax = x.float().unflatten(1, (-1, group)).abs().amax(2)
    assert torch.allclose(s, amax / 448)
    # e4m3 keeps 3 mantissa bits: half a step is 2^-4 of the value, and 2^-10 of the scale among subnormals.
    bound = (x.float().abs() * 2.0**-4).maximum(s.repeat_interleave(group, 1) * 2.0**-10) * 1.001
    assert ((_dequantize(q, s, group) - x.float()).abs() <= bound).all()


def test_zero_rows_and_nan_rows_quantise_to_zero_and_nan():
    x = torch.zeros((2, 128)).bfloat16()
    x[1, 5] = float("nan")
    q, s = stand_ins.per_token_group_quant(x)
    assert (q[0].float() == 0).all() and s[0] > 0 and q[1].float().isnan().all()


def test_masked_quantisation_leaves_the_rest_alone():
    x = torch.randn((2, 4, 512), generator=torch.Generator().manual_seed(0)).bfloat16()
    q = torch.ones((2, 4, 256)).to(torch.float8_e4m3fn)
    s = torch.full((2, 4, 2), 9.0)
    stand_ins.per_token_group_quant(x, q, s, fuse_silu_and_mul=True, masked_m=torch.tensor([3, 0]))
    assert (s[0, 3:] == 9).all() and (s[1] == 9).all() and (q[1].float() == 1).all() and (q[0, 3:].float() == 1).all()
    gate, up = x[0, :3].float().chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate).bfloat16() * up.bfloat16()
    alone_q, alone_s = stand_ins.per_token_group_quant(want.contiguous())
    assert torch.equal(q[0, :3].float(), alone_q.float()) and torch.equal(s[0, :3], alone_s)


def test_formats_without_a_stand_in_are_refused():
    x = torch.zeros((2, 128)).bfloat16()
    for changes in (dict(scale_ue8m0=True), dict(out_dtype=torch.int8), dict(sorted_token_ids=torch.zeros(1))):
        with pytest.raises(NotImplementedError):
            stand_ins.per_token_group_quant(x, **changes)


def test_swiglu_rounds_once():
    x = torch.randn((5, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
    gate, up = x.double().chunk(2, dim=-1)
    want = (torch.nn.functional.silu(gate) * up).float().bfloat16()
    out = torch.empty_like(want)
    assert stand_ins.silu_and_mul(x, out) is out
    assert torch.allclose(out.float(), want.float(), rtol=2**-8, atol=0)
