"""What the patch relies on in the installed SGLang: models, start-up resolution, refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.srt.arg_groups import moe_hook
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.configs.moe_model_registry import model_supports_deepep_v2
from sglang.srt.layers.moe.utils import MoeA2ABackend
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

from resolved_args import resolve, write_config

PROBE = Path(__file__).with_name("dispatch_probe.py")
CAPACITY = "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"

MIMO_V2 = {
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 2,
    "v_head_dim": 64,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 64,
    "swa_v_head_dim": 64,
    "n_routed_experts": 8,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": None,
    "routed_scaling_factor": None,
    "moe_layer_freq": [0, 1],
    "hybrid_layer_pattern": [0, 1],
    "sliding_window_size": 128,
    "sliding_window": 128,
    "layernorm_epsilon": 1e-6,
    "swa_rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "attention_bias": False,
    "add_swa_attention_sink_bias": False,
    "add_full_attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MIMO_ARCHITECTURES = ("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    # Resolution sets variables for the processes it would start.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setenv(CAPACITY, str(1 << 20))


@pytest.mark.parametrize("architecture", MIMO_ARCHITECTURES + ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"))
def test_r13_registered_architectures(architecture):
    from sglang.srt.models.registry import ModelRegistry

    config = type("Config", (), {"architectures": [architecture]})
    assert model_supports_deepep_v2(config)
    cls, _ = ModelRegistry.resolve_model_cls([architecture])
    assert cls.__name__ == architecture or architecture in (c.__name__ for c in cls.__mro__)


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "MixtralForCausalLM"])
def test_r13_other_architectures_are_refused(tmp_path, architecture):
    with pytest.raises(ValueError, match=f"not validated for '{architecture}'.*register_deepep_v2_model"):
        resolve(write_config(tmp_path, architectures=[architecture]), tp_size=2)


def test_r13_deepep_v2_belongs_to_the_a2a_branch(monkeypatch):
    from sglang.srt.layers.moe import utils

    for backend, in_class in ((MoeA2ABackend.DEEPEP_V2, True), (MoeA2ABackend.NONE, False)):
        monkeypatch.setattr(utils, "get_moe_a2a_backend", lambda backend=backend: backend)
        assert utils.is_deepep_class_backend() is in_class


@pytest.mark.slow
def test_r13_mimo_v2_forwards_reach_dispatch(tmp_path):
    """Both architectures take the a2a branch; the other one adds an all-reduce and never dispatches."""
    cases = [
        {
            "model": str(write_config(tmp_path / architecture, **MIMO_V2, architectures=[architecture])),
            "arguments": {"tp_size": 2, "chunked_prefill_size": 64},
            "batches": [[[8]], [[9]]],
        }
        for architecture in MIMO_ARCHITECTURES
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROBE), json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {CAPACITY: "64"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for ranks in json.loads(done.stdout.splitlines()[-1]):
        assert [rank["reached"] for rank in ranks] == [[[4, True], [5, True]]] * 2


# Server arguments


def test_cumem_is_enabled_for_nccl(model, monkeypatch):
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    resolve(model, tp_size=2, moe_a2a_backend="none")
    assert "NCCL_CUMEM_ENABLE" not in os.environ
    resolve(model, tp_size=2)
    assert os.environ["NCCL_CUMEM_ENABLE"] == "1"


def test_users_cumem_choice_is_kept(model, monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    resolve(model, tp_size=2)
    assert os.environ["NCCL_CUMEM_ENABLE"] == "0"


def test_ranks_and_runner(model):
    view = resolved_view(resolve(model, tp_size=4))
    assert (view.ep_size, view.moe_runner_backend) == (4, "deep_gemm")
    assert view.disable_shared_experts_fusion is True
    assert view.deepep_v2_mode == "direct"


def test_prefill_graphs_are_disabled_and_decode_graphs_are_not(model):
    server_args = resolve(model, tp_size=2)
    graphs = resolved_view(server_args).cuda_graph_config
    for phase in (Phase.PREFILL, Phase.DECODE):
        graphs = with_phase(graphs, phase, backend=Backend.FULL)
    server_args._resolved_overrides.append(("test", {"cuda_graph_config": graphs}))
    server_args._resolution_finished = False
    moe_hook.handle_a2a_moe(server_args)
    graphs = resolved_view(server_args).cuda_graph_config
    assert (graphs.prefill.backend, graphs.decode.backend) == (Backend.DISABLED, Backend.FULL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_two_batch_overlap": True}, "TBO/SBO overlap hooks"),
        ({"enable_single_batch_overlap": True}, "TBO/SBO overlap hooks"),
        ({"enforce_shared_experts_fusion": True}, "fused shared experts"),
        ({"moe_runner_backend": "triton"}, "only --moe-runner-backend deep_gemm"),
        ({"speculative_moe_a2a_backend": "deepep_v2"}, "not validated as a speculative draft backend"),
    ],
)
def test_r13_refused_combinations(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve(model, tp_size=2, **arguments)


def test_r13_draft_inherits_and_is_refused(model):
    server_args = resolve(model, tp_size=2)
    server_args._resolved_overrides.append(("test", {"speculative_algorithm": "EAGLE"}))
    with pytest.raises(ValueError, match="speculative draft backend"):
        moe_hook.validate_deepep_v2_speculative_draft(server_args)
    server_args._resolved_overrides.append(("test", {"speculative_moe_a2a_backend": "none"}))
    moe_hook.validate_deepep_v2_speculative_draft(server_args)
