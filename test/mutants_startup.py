"""Mutants of the start-up checks, the prebuild and the variables.

Each is (name, file under ``python/sglang/srt``, text that occurs there once, what replaces it, tests that notice).
"""

HOOK = "arg_groups/moe_hook.py"
PREBUILD = "model_executor/moe_ep_setup.py"
COMPONENTS = "model_executor/model_runner_components/moe_ep_setup.py"
ENVIRON = "environ.py"

BUDGET_TESTS = "test_token_budget.py::"
PREBUILD_TESTS = "test_prebuild.py::"
WIRING_TESTS = "test_wiring.py::"

STARTUP = (
    (
        "budget rounded down",
        HOOK,
        "return -(-value // divisor)",
        "return value // divisor",
        (BUDGET_TESTS + "test_r12_required_tokens",),
    ),
    (
        "budget without dynamic chunking",
        HOOK,
        "chunk_ceiling = max_prefill_buffer_tokens(server_args)",
        "chunk_ceiling = max(0, resolved_view(server_args).chunked_prefill_size)",
        (BUDGET_TESTS + "test_r12_dynamic_chunking",),
    ),
    (
        "budget divides by the whole TP group under DP attention",
        HOOK,
        "attn_dp_size=view.attn_dp_size\n",
        "attn_dp_size=1\n",
        (BUDGET_TESTS + "test_r12_required_tokens",),
    ),
    (
        "budget divides by zigzag CP ranks",
        HOOK,
        ' and view.cp_strategy == "interleave":',
        ":",
        (BUDGET_TESTS + "test_r12_required_tokens",),
    ),
    (
        "unpadded batches accepted",
        HOOK,
        "if view.disable_attn_tp_gather:",
        "if False:",
        (BUDGET_TESTS + "test_r12_disabled_gather_is_refused",),
    ),
    (
        "prebuild gate inverted",
        PREBUILD,
        "return not isinstance(decode_cuda_graph_runner, EagerRunner)",
        "return isinstance(decode_cuda_graph_runner, EagerRunner)",
        (PREBUILD_TESTS + "test_r11_builds_once_for_all_layers",),
    ),
    (
        "standing buffer built again",
        PREBUILD,
        " and not first.buffer_is_built():",
        ":",
        (PREBUILD_TESTS + "test_r11_builds_once_for_all_layers",),
    ),
    (
        "prebuild never reached from ModelRunner",
        COMPONENTS,
        "    maybe_prebuild_deepep_v2_buffers(model=model)",
        "    return None",
        (PREBUILD_TESTS + "test_model_runner_calls_the_patch",),
    ),
    (
        "expanded prefill off by default",
        ENVIRON,
        "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND = EnvBool(True)",
        "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND = EnvBool(None)",
        ("test_environ.py::test_declaration",),
    ),
    (
        "longest request ignored where chunking is off",
        HOOK,
        "return max(view.max_prefill_tokens or 0, longest_request)",
        "return view.max_prefill_tokens or 0",
        (BUDGET_TESTS + "test_r12_required_tokens",),
    ),
    (
        "decode role needs a prefill budget",
        HOOK,
        'if view.disaggregation_mode == "decode":',
        "if False:",
        (BUDGET_TESTS + "test_r12_decode_role_runs_no_prefill",),
    ),
    (
        "model's registered policy ignored",
        HOOK,
        "    return model_deepep_v2_prefill_dispatch_tokens(",
        "    return _prefill_tokens_per_rank(view, ceiling) or model_deepep_v2_prefill_dispatch_tokens(",
        (BUDGET_TESTS + "test_r12_registered_policy_decides",),
    ),
    (
        "capacity no longer compared with the budget",
        HOOK,
        "    upstream.validate_deepep_v2_dispatch_token_budget(server_args)",
        "    pass",
        (BUDGET_TESTS + "test_r12_budget_is_checked_against_the_capacity",),
    ),
    (
        "reference transport captured in decode graphs",
        HOOK,
        "graphs.decode.backend != Backend.DISABLED",
        "False",
        (BUDGET_TESTS + "test_reference_transport_with_decode_graphs_is_refused",),
    ),
    (
        "model that was not validated accepted",
        HOOK,
        "    upstream.validate_deepep_v2_model_architecture(server_args)",
        "    pass",
        (WIRING_TESTS + "test_r13_other_architectures_are_refused",),
    ),
    (
        "hidden size of the config unchecked",
        HOOK,
        "if hidden_size and hidden_size % HIDDEN_MULTIPLE:",
        "if False:",
        (BUDGET_TESTS + "test_r5_shapes_that_deepep_asserts_without_naming",),
    ),
    (
        "top-k of the config unchecked",
        HOOK,
        "if topk and topk > MAX_TOPK:",
        "if False:",
        (BUDGET_TESTS + "test_r5_shapes_that_deepep_asserts_without_naming",),
    ),
    (
        "experts of the config unchecked",
        HOOK,
        "if num_physical and num_physical % view.ep_size:",
        "if False:",
        (BUDGET_TESTS + "test_r5_shapes_that_deepep_asserts_without_naming",),
    ),
    (
        "buffer prebuilt for other backends",
        PREBUILD,
        "if not get_moe_a2a_backend().is_deepep_v2():",
        "if False:",
        (PREBUILD_TESTS + "test_r11_other_backends_are_untouched",),
    ),
    (
        "only the first layer settles its prefill",
        PREBUILD,
        "    for layer in layers:\n        layer.dispatcher.settle_prefill()",
        "    for layer in layers[:1]:\n        layer.dispatcher.settle_prefill()",
        (PREBUILD_TESTS + "test_r11_builds_once_for_all_layers",),
    ),
    (
        "decode role readies a prefill that it never runs",
        PREBUILD,
        'if get_disagg().disaggregation_mode == "decode":',
        "if False:",
        (PREBUILD_TESTS + "test_decode_role_builds_the_buffer_and_nothing_for_prefill",),
    ),
    (
        "psum GEMMs compiled by the first request",
        PREBUILD,
        "            _warm_up_psum_gemms(layer)",
        "            pass",
        (PREBUILD_TESTS + "test_psum_gemms_are_compiled_before_any_forward",),
    ),
)
