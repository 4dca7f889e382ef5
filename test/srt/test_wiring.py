"""What the patch relies on in the installed SGLang, and that nothing SGLang imports from an overlaid module is lost."""

import dataclasses
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sglang
from sglang.srt.arg_groups import moe_hook
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.configs.moe_model_registry import model_supports_deepep_v2
from sglang.srt.layers.moe.moe_runner import deep_gemm as runner
from sglang.srt.layers.moe.moe_runner.base import PermuteMethodPool
from sglang.srt.layers.moe.token_dispatcher import deepep_v2
from sglang.srt.layers.moe.utils import MoeA2ABackend
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase
from sglang_upstream.srt.layers.moe.moe_runner import deep_gemm as upstream_runner
from sglang_upstream.srt.layers.moe.token_dispatcher import deepep_v2 as upstream_dispatcher

from resolved_args import resolve, write_config
from sglang_deepep_v2 import overlay

PROBE = Path(__file__).with_name("dispatch_probe.py")
CAPACITY = "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
OVERLAID = sorted(name for name, module in overlay.modules().items() if module.kind != "new")
EXTENDED = sorted(name for name, module in overlay.modules().items() if module.kind == "extends")

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


# Names and signatures


def imports_from(names: list[str]) -> set[tuple[str, str]]:
    """Every (module, name) that SGLang's sources import from one of the modules."""
    statement = re.compile(rf"^[ \t]*from ({'|'.join(map(re.escape, names))}) import (\([^)]*\)|.*)$", re.MULTILINE)
    found = set()
    for file in Path(sglang.__path__[0]).rglob("*.py"):
        for module, imported in statement.findall(file.read_text()):
            bare = re.sub(r"#.*", "", imported).strip("() \n")
            found |= {(module, name.split()[0]) for name in bare.split(",") if name.strip()}
    return found


def test_every_name_that_sglang_imports_is_there():
    imports = imports_from(OVERLAID)
    assert {module for module, _ in imports} == set(OVERLAID)
    assert not [(module, name) for module, name in imports if not hasattr(importlib.import_module(module), name)]


def test_public_names_of_the_replaced_dispatcher():
    theirs = {
        name
        for name, value in vars(upstream_dispatcher).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == upstream_dispatcher.__name__
    }
    assert theirs == {"DeepEPv2Buffer", "DeepEPv2CombineInput", "DeepEPv2Dispatcher", "DeepEPv2DispatchOutput"}
    assert not [name for name in theirs if not hasattr(deepep_v2, name)]
    assert isinstance(deepep_v2.use_deepep_v2, bool)


def parameters(function) -> list[tuple]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def public_methods(cls) -> dict:
    return {
        name: getattr(cls, name)
        for name, value in vars(cls).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod)))
    }


@pytest.mark.parametrize("name", ["DeepEPv2Buffer", "DeepEPv2Dispatcher"])
def test_methods_of_the_replaced_classes(name):
    ours, theirs = getattr(deepep_v2, name), getattr(upstream_dispatcher, name)
    methods = public_methods(theirs)
    assert methods
    for method, function in methods.items():
        assert parameters(getattr(ours, method)) == parameters(function), method


def test_constructor_of_the_replaced_dispatcher():
    ours = parameters(deepep_v2.DeepEPv2Dispatcher.__init__)
    assert ours == parameters(upstream_dispatcher.DeepEPv2Dispatcher.__init__)


@pytest.mark.parametrize("name", ["DeepEPv2DispatchOutput", "DeepEPv2CombineInput"])
def test_fields_extend_at_the_end(name):
    ours, theirs = getattr(deepep_v2, name), getattr(upstream_dispatcher, name)
    assert ours._fields[: len(theirs._fields)] == theirs._fields
    added = ours._fields[len(theirs._fields) :]
    assert {field: ours._field_defaults.get(field) for field in theirs._field_defaults} == theirs._field_defaults
    assert not [field for field in added if field not in ours._field_defaults]
    assert ours.format.fget(None) == theirs.format.fget(None)


def test_runner_input_extends_at_the_end():
    ours, theirs = (
        [(field.name, field.default) for field in dataclasses.fields(module.DeepGemmRunnerInput)]
        for module in (runner, upstream_runner)
    )
    assert ours[: len(theirs)] == theirs
    assert all(default is not dataclasses.MISSING for _, default in ours[len(theirs) :])


@pytest.mark.parametrize("module_name", EXTENDED)
def test_signatures_of_what_extends_files_take_over(module_name):
    module = importlib.import_module(module_name)
    upstream = importlib.import_module("sglang_upstream" + module_name.removeprefix("sglang"))
    for name in module.__overrides__:
        ours, theirs = getattr(module, name), getattr(upstream, name)
        assert ours.__name__ == theirs.__name__
        if inspect.isclass(theirs):
            assert issubclass(ours, theirs)
            for method, function in public_methods(theirs).items():
                assert parameters(getattr(ours, method)) == parameters(function), method
        else:
            assert parameters(ours) == parameters(theirs), name


def test_runner_core_is_a_subclass_with_the_same_constructor():
    assert issubclass(runner.DeepGemmRunnerCore, upstream_runner.DeepGemmRunnerCore)
    assert parameters(runner.DeepGemmRunnerCore.__init__) == parameters(upstream_runner.DeepGemmRunnerCore.__init__)


def test_permute_pool_holds_ours_and_keeps_theirs():
    pre, post = PermuteMethodPool._pre_permute_methods, PermuteMethodPool._post_permute_methods
    assert pre["deepep_v2", "deep_gemm"] is runner.pre_permute_deepep_v2_to_deep_gemm
    assert post["deep_gemm", "deepep_v2"] is runner.post_permute_deep_gemm_to_deepep_v2
    for other in ("standard", "deepep_normal", "deepep_ll"):
        assert pre[other, "deep_gemm"].__module__ == runner.__name__
        assert post["deep_gemm", other].__module__ == runner.__name__
        assert pre[other, "deep_gemm"] is vars(upstream_runner)[pre[other, "deep_gemm"].__name__]


# Models


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
