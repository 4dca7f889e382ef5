"""Mutants of the kernels, the GEMMs and the runner.

Each is (name, file under ``python/sglang/srt``, text that occurs there once, what replaces it, tests that notice).
"""

KERNELS = "layers/moe/ep_moe/kernels.py"
RUNNER = "layers/moe/moe_runner/deep_gemm.py"
PSUM = "layers/deep_gemm_wrapper/psum.py"
TOKEN_QUANT = "layers/moe/ep_moe/token_quant.py"
SYNC_FREE = "layers/moe/token_dispatcher/sync_free.py"

KERNEL_TESTS = "test_kernels.py::"
RUNNER_TESTS = "test_runner_contract.py::"
BUFFER_TESTS = "test_buffer_facade.py::"
SYNC_FREE_TESTS = "test_sync_free.py::"

COMPUTE = (
    (
        "label off by one expert",
        KERNELS,
        "label = tl.where(owner < NUM_EXPERTS, owner, -1)",
        "label = tl.where(owner < NUM_EXPERTS, owner + 1, -1)",
        (KERNEL_TESTS + "TestFillMIndices",),
    ),
    (
        "psum end taken as exclusive",
        KERNELS,
        "(_align_up(ends, ALIGN) <= first_row)",
        "(_align_up(ends, ALIGN) < first_row)",
        (KERNEL_TESTS + "TestFillMIndices",),
    ),
    (
        "capacity tail labelled as an expert",
        KERNELS,
        "label = tl.where(owner < NUM_EXPERTS, owner, -1)",
        "label = tl.minimum(owner, NUM_EXPERTS - 1)",
        (KERNEL_TESTS + "TestFillMIndices",),
    ),
    (
        "rows that do not divide by the alignment accepted",
        KERNELS,
        "    assert total_rows % expert_alignment == 0, (",
        "    assert True, (",
        (KERNEL_TESTS + "TestFillMIndices",),
    ),
    (
        "scale rows by the row-major stride",
        KERNELS,
        "at = x_ptr + row[:, None] * stride_row + col[None, :] * stride_col",
        "at = x_ptr + row[:, None] * cols + col[None, :]",
        (KERNEL_TESTS + "TestScaleExpandedRows",),
    ),
    (
        "row weights in the wrong order",
        KERNELS,
        "weight = tl.load(weight_ptr + row * stride_weight,",
        "weight = tl.load(weight_ptr + (rows - 1 - row) * stride_weight,",
        (KERNEL_TESTS + "TestScaleExpandedRows",),
    ),
    (
        "fused kernel: fold dropped",
        KERNELS,
        "scale = scale * weight[:, None]",
        "scale = scale * 1.0",
        (KERNEL_TESTS + "TestSwigluQuant::test_computes_weighted_swiglu",),
    ),
    (
        "fused kernel: fold twice",
        KERNELS,
        "if HAS_WEIGHT and UE8M0:",
        "if HAS_WEIGHT:",
        (KERNEL_TESTS + "TestSwigluQuant::test_computes_weighted_swiglu",),
    ),
    (
        "fused kernel: scale stride without the TMA padding",
        KERNELS,
        " " * 16 + "scale_at = row[:, None] + group[None, :].to(tl.int64) * stride_scale_group",
        " " * 16 + "scale_at = row[:, None] + group[None, :].to(tl.int64) * num_rows",
        (KERNEL_TESTS + "TestSwigluQuant::test_k7_rows_not_a_multiple_of_four",),
    ),
    (
        "fused kernel: gate and up swapped",
        KERNELS,
        "y = gate / (1.0 + tl.exp(-gate)) * up",
        "y = up / (1.0 + tl.exp(-up)) * gate",
        (KERNEL_TESTS + "TestSwigluBf16::test_equals_the_twin",),
    ),
    (
        "labels pipeline: fold dropped",
        RUNNER,
        "kernels.scale_expanded_rows_(down_scale, expanded.row_weights)",
        "pass",
        (RUNNER_TESTS + "test_rows_are_weighted_once",),
    ),
    (
        "labels pipeline: fold twice",
        RUNNER,
        "if not expanded.weighted:",
        "if True:",
        (RUNNER_TESTS + "test_rows_are_weighted_once",),
    ),
    (
        "psum pipeline: weights dropped",
        RUNNER,
        "activation = (gateup, expanded.row_weights, psum, expanded.expert_alignment)",
        "activation = (gateup, None, psum, expanded.expert_alignment)",
        (RUNNER_TESTS + "test_rows_are_weighted_once",),
    ),
    (
        "psum off by one",
        RUNNER,
        "psum = dispatch_output.psum_num_recv_tokens_per_expert\n",
        "psum = dispatch_output.psum_num_recv_tokens_per_expert - 1\n",
        (RUNNER_TESTS + "test_rows_are_weighted_once",),
    ),
    (
        "raw rows weighted although the caller wants none",
        RUNNER,
        "row_weights=None if runner_config.no_combine else dispatch_output.topk_weights",
        "row_weights=dispatch_output.topk_weights",
        (RUNNER_TESTS + "test_r7_raw_rows_stay_unweighted",),
    ),
    (
        "alignment of the GEMM ignored",
        PSUM,
        "if alignment != expert_alignment:",
        "if False:",
        (BUFFER_TESTS + "test_r6_psum_pipeline_needs_equal_alignments",),
    ),
    (
        "quantiser: an all-zero group divides by zero",
        TOKEN_QUANT,
        "amax = tl.maximum(tl.max(tl.abs(x), 2), FLOOR)",
        "amax = tl.max(tl.abs(x), 2)",
        (KERNEL_TESTS + "TestQuantTokens::test_k8_equals_the_twin",),
    ),
    (
        "quantiser: scale stride without the TMA padding",
        TOKEN_QUANT,
        "scale_at = row[:, None] + group[None, :].to(tl.int64) * stride_scale_group",
        "scale_at = row[:, None] + group[None, :].to(tl.int64) * num_tokens",
        (KERNEL_TESTS + "TestQuantTokens::test_k8_equals_the_twin",),
    ),
    (
        "GEMM launched over no rows",
        RUNNER,
        "if runner_input.hidden_states.shape[0] == 0:",
        "if False:",
        (RUNNER_TESTS + "test_k1_no_rows",),
    ),
    (
        "power-of-two scales weighted",
        RUNNER,
        "elif deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0:",
        "elif False:",
        (RUNNER_TESTS + "test_ue8m0_scales_are_never_weighted",),
    ),
    (
        "FP8 rows without scales accepted",
        RUNNER,
        "if scale is None and hidden_states.dtype != torch.bfloat16:",
        "if False:",
        (RUNNER_TESTS + "test_rows_without_scales_are_refused",),
    ),
    (
        "raw rows not marked for the routewise finaliser",
        RUNNER,
        'return DeepEPv2CombineInput(rows, running_state["topk_weights"], RoutewiseLayout.EXPANDED)',
        'return DeepEPv2CombineInput(rows, running_state["topk_weights"])',
        (RUNNER_TESTS + "test_r7_raw_rows_stay_unweighted",),
    ),
    (
        "DeepGEMM without the psum layout accepted",
        PSUM,
        'if function is None or "use_psum_layout" not in _keywords(function):',
        "if function is None:",
        (BUFFER_TESTS + "test_r6_psum_pipeline_needs_equal_alignments",),
    ),
    (
        "tiles that mix experts accepted",
        PSUM,
        "if deep_gemm is not None and expert_alignment % _row_alignment():",
        "if False:",
        (BUFFER_TESTS + "test_r6_tiles_that_mix_experts_are_refused",),
    ),
    (
        "offloaded experts warm up without memory of their own",
        PSUM,
        "budget = max(0, budget - weight.nbytes)",
        "pass",
        ("test_prebuild.py::test_warm_up_takes_half_of_the_free_memory",),
    ),
    (
        "sync-free limit ignored",
        SYNC_FREE,
        "if limit is not None and needed > limit:",
        "if False:",
        (SYNC_FREE_TESTS + "test_a_limit_that_is_too_small_is_an_error",),
    ),
    (
        "sync-free prefill takes all free memory",
        SYNC_FREE,
        "int(free * DEFAULT_FREE_MEMORY_SHARE)",
        "int(free)",
        (SYNC_FREE_TESTS + "test_without_a_limit_a_share_of_the_free_memory_counts",),
    ),
    (
        "sync-free rows without alignment",
        SYNC_FREE,
        " + num_local_experts * (expert_alignment - 1)",
        "",
        (SYNC_FREE_TESTS + "test_capacity_rows_hold_the_worst_routing",),
    ),
    (
        "sync-free bytes of the last layer, not the widest",
        SYNC_FREE,
        "_widest_intermediate = max(_widest_intermediate, intermediate_size or 0)",
        "_widest_intermediate = intermediate_size or 0",
        (SYNC_FREE_TESTS + "test_a_limit_that_is_too_small_is_an_error",),
    ),
    (
        "sync-free decided anew by every layer",
        SYNC_FREE,
        "@cache\n",
        "",
        (SYNC_FREE_TESTS + "test_without_a_limit_a_share_of_the_free_memory_counts",),
    ),
    (
        "sync-free decided by each rank alone",
        SYNC_FREE,
        "if dist.get_world_size(group) > 1:",
        "if False:",
        (SYNC_FREE_TESTS + "test_every_rank_decides_by_the_rank_that_allows_least",),
    ),
    (
        "strided psum accepted",
        KERNELS,
        "psum.dim() == 1 and psum.is_contiguous()",
        "psum.dim() == 1",
        (KERNEL_TESTS + "TestSwigluQuant::test_refusals",),
    ),
    (
        "quantiser: ids of another dtype accepted",
        TOKEN_QUANT,
        "assert topk_ids.dtype in (torch.int32, torch.int64),",
        "assert True,",
        (KERNEL_TESTS + "TestQuantTokens::test_refusals",),
    ),
)
