"""Start-up checks of the deepep_v2 backend: how many prefill tokens a rank dispatches, and what is refused.

The arguments go through SGLang's own resolution. ``test_forwards_*`` compare the budget with the rows that reach the
dispatcher in real forwards over gloo ranks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from sglang.srt.arg_groups import moe_hook
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.configs import moe_model_registry
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

from resolved_args import resolve, unresolved, write_config

CAPACITY = "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
PROBE = Path(__file__).with_name("dispatch_probe.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def large_capacity(monkeypatch):
    monkeypatch.setenv(CAPACITY, str(1 << 20))
    # Resolution sets variables for the processes it would start.
    monkeypatch.setattr(os, "environ", os.environ.copy())


def required(model: Path, **arguments) -> int:
    return moe_hook.required_deepep_v2_prefill_tokens_per_rank(resolve(model, **arguments))


def declared(server_args, **fields):
    """The arguments with ``fields`` declared last, as a later resolution step would."""
    server_args._resolved_overrides.append(("test", fields))
    return server_args


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param({"chunked_prefill_size": 2048, "tp_size": 1}, 2048, id="one rank"),
        pytest.param({"chunked_prefill_size": 2048, "tp_size": 8}, 256, id="tp 8"),
        pytest.param({"chunked_prefill_size": 2049, "tp_size": 8}, 257, id="tp 8, one token more"),
        pytest.param({"chunked_prefill_size": 8 * 2048, "tp_size": 8, "attn_dp_size": 8}, 2048, id="tp 8, dp 8"),
        pytest.param(
            {"chunked_prefill_size": 8 * 2048, "tp_size": 8, "dp_size": 8, "enable_dp_attention": True},
            2048,
            id="tp 8, dp 8, old spelling",
        ),
        pytest.param({"chunked_prefill_size": 2 * 32768, "tp_size": 16, "attn_dp_size": 2}, 4096, id="tp 16, dp 2"),
        pytest.param({"chunked_prefill_size": 2048, "tp_size": 8, "attn_cp_size": 2}, 512, id="tp 8, cp 2"),
        pytest.param(
            {
                "chunked_prefill_size": 2048,
                "tp_size": 8,
                "attn_cp_size": 2,
                "enable_prefill_cp": True,
                "cp_strategy": "interleave",
            },
            256,
            id="tp 8, prefill cp 2",
        ),
        pytest.param(
            {
                "chunked_prefill_size": 2 * 2047,
                "tp_size": 8,
                "attn_dp_size": 2,
                "attn_cp_size": 4,
                "enable_prefill_cp": True,
                "cp_strategy": "interleave",
            },
            512,
            id="tp 8, dp 2, prefill cp 4",
        ),
        pytest.param(
            {
                "chunked_prefill_size": 2048,
                "tp_size": 8,
                "attn_cp_size": 2,
                "enable_prefill_cp": True,
                "cp_strategy": "zigzag",
            },
            512,
            id="tp 8, zigzag cp 2",
        ),
        pytest.param({"chunked_prefill_size": -1, "tp_size": 8, "max_prefill_tokens": 4096}, 512, id="no chunks"),
        pytest.param(
            {"chunked_prefill_size": -1, "tp_size": 8, "max_prefill_tokens": 1000}, 256, id="no chunks, long request"
        ),
        pytest.param(
            {"chunked_prefill_size": -1, "tp_size": 8, "max_prefill_tokens": 1000, "max_total_tokens": 1200},
            150,
            id="no chunks, small pool",
        ),
    ],
)
def test_r12_required_tokens(model, arguments, expected):
    assert required(model, **arguments) == expected


@pytest.mark.parametrize(
    ("max_prefill_tokens", "expected"),
    [pytest.param(1000, 320, id="probe 1.25 x"), pytest.param(4000, 500, id="grows to --max-prefill-tokens")],
)
def test_r12_dynamic_chunking(model, max_prefill_tokens, expected):
    arguments = {"chunked_prefill_size": 2047, "max_prefill_tokens": max_prefill_tokens, "tp_size": 8, "pp_size": 2}
    assert required(model, **arguments) == 256
    assert required(model, **arguments, enable_dynamic_chunking=True) == expected


def test_r12_decode_role_runs_no_prefill(model, monkeypatch):
    arguments = {"chunked_prefill_size": 2048, "tp_size": 2}
    server_args = resolve(model, **arguments)
    assert moe_hook.required_deepep_v2_prefill_tokens_per_rank(server_args) == 1024
    decode = declared(server_args, disaggregation_mode="decode")
    assert moe_hook.required_deepep_v2_prefill_tokens_per_rank(decode) == 0
    monkeypatch.setenv(CAPACITY, "1")
    moe_hook.validate_deepep_v2_dispatch_token_budget(decode)


def test_r12_registered_policy_decides(model, monkeypatch):
    seen = []

    def policy(cfg, tokens):
        seen.append((cfg.tp_size, tokens))
        return 7

    monkeypatch.setitem(
        moe_model_registry._DEEPEP_V2_MODELS,
        "Qwen3MoeForCausalLM",
        moe_model_registry._DeepEPv2ModelPolicy(prefill_dispatch_tokens=policy),
    )
    assert required(model, chunked_prefill_size=2048, tp_size=8) == 7
    assert seen[-1] == (8, 2048)


@pytest.mark.parametrize(("capacity", "fits"), [(256, False), (257, True)])
def test_r12_budget_is_checked_against_the_capacity(model, monkeypatch, capacity, fits):
    monkeypatch.setenv(CAPACITY, str(capacity))
    arguments = {"chunked_prefill_size": 2049, "tp_size": 8}
    if fits:
        resolve(model, **arguments)
        return
    with pytest.raises(ValueError, match="required=257, capacity=256") as refused:
        resolve(model, **arguments)
    assert CAPACITY in str(refused.value)
    assert "--chunked-prefill-size" in str(refused.value)


def test_r12_pure_tp_is_scattered(model, monkeypatch):
    """Without DP attention a chunk is scattered all the same, so this capacity is enough."""
    monkeypatch.setenv(CAPACITY, "256")
    resolve(model, chunked_prefill_size=2048, tp_size=8)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_r12_disabled_gather_is_refused(model, dp_size):
    with pytest.raises(ValueError, match="--disable-attn-tp-gather is not supported .* deepep_v2") as refused:
        resolve(model, tp_size=2, attn_dp_size=dp_size, disable_attn_tp_gather=True)
    assert "each of the 2 ranks" in str(refused.value)


def test_r12_disabled_gather_is_left_to_other_backends(model):
    resolve(model, tp_size=2, moe_a2a_backend="none", disable_attn_tp_gather=True)


def test_r10_direct_mode_across_nodes_is_refused(model):
    with pytest.raises(ValueError, match=r"direct is NVLink-only .*nnodes=2.* --deepep-v2-mode hybrid"):
        resolve(model, tp_size=2, nnodes=2, deepep_v2_mode="direct")
    assert resolve(model, tp_size=2, nnodes=2, deepep_v2_mode="hybrid").deepep_v2_mode == "hybrid"


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        pytest.param({"hidden_size": 384}, {}, "multiple of 256; hidden_size is 384", id="hidden"),
        pytest.param(
            {"num_experts_per_tok": 33, "num_experts": 64},
            {},
            "at most 32 experts; num_experts_per_tok is 33",
            id="topk",
        ),
        pytest.param({"num_experts": 15}, {}, "15 experts and 0 redundant .* size 2 .*--tp-size", id="experts"),
        pytest.param(
            {},
            {"ep_num_redundant_experts": 1},
            "16 experts and 1 redundant .*--ep-num-redundant-experts",
            id="redundant",
        ),
    ],
)
def test_r5_shapes_that_deepep_asserts_without_naming(tmp_path, config, arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve(write_config(tmp_path, **config), tp_size=2, **arguments)


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        pytest.param({"hidden_size": 7168}, {}, id="hidden"),
        pytest.param({"num_experts_per_tok": 32, "num_experts": 64}, {}, id="topk"),
        pytest.param({"num_experts": 15}, {"ep_num_redundant_experts": 1}, id="redundant"),
        pytest.param({"hidden_size": 384, "routed_expert_hidden_size": 256}, {}, id="latent"),
    ],
)
def test_r5_shapes_at_the_limit_start(tmp_path, config, arguments):
    resolve(write_config(tmp_path, **config), tp_size=2, **arguments)


def test_shapes_are_not_checked_for_other_backends(tmp_path):
    resolve(write_config(tmp_path, hidden_size=384, num_experts=15), tp_size=2, moe_a2a_backend="none")


def test_reference_transport_with_decode_graphs_is_refused(model, monkeypatch):
    server_args = resolve(model, tp_size=2)
    graphs = with_phase(resolved_view(server_args).cuda_graph_config, Phase.DECODE, backend=Backend.FULL)
    captured = declared(server_args, cuda_graph_config=graphs)
    monkeypatch.setenv("SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT", "1")
    with pytest.raises(ValueError, match="SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT .* --disable-cuda-graph"):
        moe_hook.validate_deepep_v2_dispatch_token_budget(captured)
    monkeypatch.setenv("SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT", "0")
    moe_hook.validate_deepep_v2_dispatch_token_budget(captured)


@pytest.mark.parametrize(("others", "admitted"), [([], True), ([object()], False)], ids=["first", "second"])
def test_r12_scheduler_admits_one_long_request_without_chunks(others, admitted):
    """Why the longest request counts when chunking is off: --max-prefill-tokens bounds only the requests after it."""
    adder = MagicMock(spec=PrefillAdder)
    adder.configure_mock(
        rem_chunk_tokens=None, rem_input_tokens=16, can_run_list=others, dllm_config=None, exact_chunk_fill=False
    )
    adder.ceil_paged_tokens.side_effect = lambda tokens: tokens
    adder._replay_len.return_value = 0
    adder._check_prefill_budget.return_value = (True, None)
    adder._check_prefill_tile_budget.return_value = None
    request = SimpleNamespace(
        prefix_len=0, full_untruncated_fill_ids=range(100), sampling_params=SimpleNamespace(max_new_tokens=1)
    )
    admission = PrefillAdder._select_prefill_admission(
        adder, request, total_tokens=100, host_hit_length=0, swa_host_hit_length=0, truncation_align_size=None
    )
    if admitted:
        assert admission.extend_len == 100
    else:
        assert admission is AddReqResult.OTHER


PREFILL_CP = {"attn_cp_size": 2, "enable_prefill_cp": True}
FORWARDS = {
    # name: (arguments, {batch, as request lengths per attention-DP group: rows dispatched by each rank})
    "tp": ({"tp_size": 2}, {((8,),): [4, 4], ((9,),): [5, 5], ((3, 4),): [4, 4]}),
    "dp attention": ({"tp_size": 2, "attn_dp_size": 2}, {((8,), ()): [8, 0], ((9,), (20,)): [9, 20]}),
    "cp without prefill cp": ({"tp_size": 2, "attn_cp_size": 2}, {((8,),): [8, 8], ((9,),): [9, 9]}),
    "interleave": (
        {"tp_size": 4, "cp_strategy": "interleave"} | PREFILL_CP,
        {((12, 3),): [4] * 4, ((17,),): [5] * 4},
    ),
    "zigzag": ({"tp_size": 2, "cp_strategy": "zigzag"} | PREFILL_CP, {((15,),): [8, 8], ((12, 3),): [15, 15]}),
    "no gather": ({"tp_size": 2, "disable_attn_tp_gather": True}, {((8,),): [4, 4], ((9,),): [9, 9]}),
}


@pytest.fixture(scope="module")
def forwards(tmp_path_factory) -> dict[str, list]:
    """Name -> ``[rows, is_extend]`` by forward and rank of the case."""
    model = str(write_config(tmp_path_factory.mktemp("forwards")))
    cases = [
        {
            "model": model,
            "arguments": arguments | {"chunked_prefill_size": 64},
            "batches": list(batches),
            "skip_checks": "disable_attn_tp_gather" in arguments,
        }
        for arguments, batches in FORWARDS.values()
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROBE), json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {CAPACITY: "64"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reports = json.loads(done.stdout.splitlines()[-1])
    return {name: list(zip(*(rank["reached"] for rank in ranks))) for name, ranks in zip(FORWARDS, reports)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FORWARDS if name != "no gather"])
def test_r12_forwards_stay_within_the_budget(forwards, model, name):
    arguments, batches = FORWARDS[name]
    worst = []
    for (groups, expected), reached in zip(batches.items(), forwards[name]):
        assert [rows for rows, _ in reached] == expected
        assert all(is_extend for _, is_extend in reached)
        ceiling = max(sum(lengths) for lengths in groups)
        budget = required(model, **arguments, chunked_prefill_size=ceiling * arguments.get("attn_dp_size", 1))
        assert max(expected) <= budget
        worst.append(max(expected) == budget)
    # The budget is the smallest that holds: some batch fills it.
    assert any(worst)


@pytest.mark.slow
def test_r12_forwards_without_the_gather_show_why_it_is_refused(forwards, model):
    """An odd batch stays whole on every rank, over the budget, and prefill takes the decode path."""
    arguments, batches = FORWARDS["no gather"]
    assert [[rows for rows, _ in reached] for reached in forwards["no gather"]] == list(batches.values())
    assert not any(is_extend for reached in forwards["no gather"] for _, is_extend in reached)
    assert required(model, tp_size=2, chunked_prefill_size=9) == 5
    with pytest.raises(ValueError, match="--disable-attn-tp-gather"):
        resolve(model, **arguments)


def test_unresolved_arguments_are_left_alone(model):
    """Construction alone runs no check: launchers resolve later."""
    unresolved(model, tp_size=2, disable_attn_tp_gather=True)
