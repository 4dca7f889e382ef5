"""extends: the deepep_v2 <-> deep_gemm permutes and the expanded prefill of the runner core.

Only the expanded, unmasked layout is ours; non-expanded prefill and masked decode go to SGLang's own functions.
Between dispatch and combine an expanded prefill runs

- psum pipeline: grouped GEMM, one kernel for SwiGLU, quantisation and router weight, grouped GEMM;
- labels pipeline: row labels, aligned scales, grouped GEMM, activation, quantisation, weight fold, aligned scales,
  grouped GEMM.

Expanded combine sums rows as they are, so each row is weighted exactly once before it, unless ``no_combine`` asks for
raw rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import sglang_upstream.srt.layers.moe.moe_runner.deep_gemm as upstream
import torch
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.deep_gemm_wrapper import psum as psum_gemm
from sglang.srt.layers.moe.ep_moe import kernels
from sglang.srt.layers.moe.moe_runner.base import PermuteMethodPool, register_post_permute, register_pre_permute
from sglang.srt.runtime_context import get_flags

# The dispatcher package imports this module: at run time, import it inside functions only.
if TYPE_CHECKING:
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2CombineInput, DeepEPv2DispatchOutput

__overrides__ = (
    "DeepGemmRunnerCore",
    "DeepGemmRunnerInput",
    "post_permute_deep_gemm_to_deepep_v2",
    "pre_permute_deepep_v2_to_deep_gemm",
)

# The pool refuses a second registration, so SGLang's are taken out first.
del PermuteMethodPool._pre_permute_methods["deepep_v2", "deep_gemm"]
del PermuteMethodPool._post_permute_methods["deep_gemm", "deepep_v2"]

# running_state entry of an expanded prefill; absent for every other layout.
_EXPANDED = "deepep_v2_expanded_prefill"


@dataclass(slots=True)
class ExpandedPrefill:
    """What an expanded prefill carries from the pre- to the post-permute.

    Attributes:
        psum: ``[local experts]`` int32, DeepEP's expanded psum.
        expert_alignment: rows to which each expert's segment is rounded up.
        row_weights: ``[rows]`` fp32 router weights; None when the caller wants raw rows.
        weighted: the rows already carry their router weight.
    """

    psum: torch.Tensor
    expert_alignment: int
    row_weights: torch.Tensor | None
    weighted: bool = False


@dataclass
class DeepGemmRunnerInput(upstream.DeepGemmRunnerInput):
    # The psum then says which rows are whose, and m_indices stays None.
    use_psum_layout: bool = False


class DeepGemmRunnerCore(upstream.DeepGemmRunnerCore):
    """SGLang's runner core with the expanded prefill of deepep_v2."""

    def __init__(self, config: MoeRunnerConfig):
        super().__init__(config)
        from sglang.srt.layers.moe.token_dispatcher import sync_free

        sync_free.note_intermediate_size(config.intermediate_size_per_partition)

    def run(
        self,
        runner_input: DeepGemmRunnerInput,
        quant_info: upstream.DeepGemmMoeQuantInfo,
        running_state: dict,
        hooks=None,
    ) -> upstream.DeepGemmRunnerOutput:
        expanded = running_state.get(_EXPANDED)
        if expanded is None:
            return super().run(runner_input, quant_info, running_state, hooks)
        if self.config.silu_mul_keep_fp32 and quant_info.w13_weight.dtype != torch.float8_e4m3fn:
            raise ValueError(
                f"silu_mul_keep_fp32 needs float8_e4m3fn expert weights, the layer has {quant_info.w13_weight.dtype}"
            )
        if runner_input.hidden_states.shape[0] == 0:
            output = self._empty_output(runner_input, quant_info)
        elif runner_input.use_psum_layout:
            output = self._run_psum(runner_input, quant_info, expanded)
        elif runner_input.hidden_states_scale is None:
            output = self._run_bf16_contiguous_gemm(runner_input, quant_info, running_state)
        elif deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0:
            # A packed power-of-two scale cannot take the weight: the post-permute weights the output.
            output = self._run_contiguous_gemm(runner_input, quant_info, running_state)
        else:
            output = self._run_labels(runner_input, quant_info, expanded)
        return upstream.DeepGemmRunnerOutput(hidden_states=output)

    @staticmethod
    def _empty_output(runner_input, quant_info) -> torch.Tensor:
        hidden = quant_info.w2_weight.shape[1]
        return runner_input.hidden_states.new_empty((0, hidden), dtype=torch.bfloat16)

    def _run_psum(self, runner_input, quant_info, expanded: ExpandedPrefill) -> torch.Tensor:
        """``[rows, hidden]`` bf16 by three launches, weighted unless raw rows are asked for; padding holds anything."""
        rows_in, scale_in = runner_input.hidden_states, runner_input.hidden_states_scale
        w13, w2, psum = quant_info.w13_weight, quant_info.w2_weight, expanded.psum
        rows = rows_in.shape[0]
        gateup = torch.empty((rows, w13.shape[1]), device=rows_in.device, dtype=torch.bfloat16)
        activation = (gateup, expanded.row_weights, psum, expanded.expert_alignment)
        expanded.weighted = expanded.row_weights is not None
        if scale_in is None:
            psum_gemm.grouped_gemm_bf16(rows_in, w13, gateup, psum)
            _dispose(rows_in)
            # No limit: SGLang's bf16 experts have none in its other layouts, decode included.
            down_input = kernels.swiglu_expanded(*activation)
            del gateup, activation
            output = torch.empty((rows, w2.shape[1]), device=down_input.device, dtype=torch.bfloat16)
            psum_gemm.grouped_gemm_bf16(down_input, w2, output, psum)
            return output
        psum_gemm.grouped_gemm_fp8(rows_in, scale_in, w13, quant_info.w13_scale, gateup, psum)
        _dispose(rows_in)
        _dispose(scale_in)
        down_input, down_scale = kernels.swiglu_quant_expanded(
            *activation,
            swiglu_limit=self.swiglu_limit,
            keep_fp32=self.config.silu_mul_keep_fp32,
            scale_ue8m0=deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0,
        )
        del gateup, activation
        output = torch.empty((rows, w2.shape[1]), device=down_input.device, dtype=torch.bfloat16)
        psum_gemm.grouped_gemm_fp8(down_input, down_scale, w2, quant_info.w2_scale, output, psum)
        return output

    def _run_labels(self, runner_input, quant_info, expanded: ExpandedPrefill) -> torch.Tensor:
        """``[rows, hidden]`` bf16, weighted through the fp32 scale of the down projection's input."""
        rows_in, scale_in = runner_input.hidden_states, runner_input.hidden_states_scale
        m_indices = runner_input.m_indices
        w13, w2 = quant_info.w13_weight, quant_info.w2_weight
        rows, device = rows_in.shape[0], rows_in.device
        gateup = torch.empty((rows, w13.shape[1]), device=device, dtype=torch.bfloat16)
        self._labelled_gemm(rows_in, scale_in, w13, quant_info.w13_scale, gateup, m_indices)
        _dispose(rows_in)
        _dispose(scale_in)
        down_input, down_scale = self._activate_and_quantize(gateup)
        del gateup
        if expanded.row_weights is not None:
            # fp32 scales only: a UE8M0 scale is a power of two and would round the weight.
            kernels.scale_expanded_rows_(down_scale, expanded.row_weights)
            expanded.weighted = True
        output = torch.empty((rows, w2.shape[1]), device=device, dtype=torch.bfloat16)
        self._labelled_gemm(down_input, down_scale, w2, quant_info.w2_scale, output, m_indices)
        return output

    @staticmethod
    def _labelled_gemm(a, a_scale, b, b_scale, out, m_indices) -> None:
        from sglang.kernels.ops.moe.ep_moe_kernels import tma_align_input_scale

        if deep_gemm_wrapper.DEEPGEMM_NEED_TMA_ALIGNED_SCALES:
            a_scale = tma_align_input_scale(a_scale)
        deep_gemm_wrapper.grouped_gemm_nt_f8f8bf16_contig((a, a_scale), (b, b_scale), out, m_indices)

    def _activate_and_quantize(self, gateup: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """SGLang's own SwiGLU and FP8 1x128 quantisation: q ``[rows, intermediate]`` and row-major fp32 scales."""
        from sglang.kernels.ops.activation.silu_and_mul_clamp import silu_and_mul_clamp, silu_and_mul_contig_post_quant
        from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

        rows, intermediate, device = gateup.shape[0], gateup.shape[1] // 2, gateup.device
        group = kernels.QUANT_GROUP
        if self.config.silu_mul_keep_fp32:
            q = torch.empty((rows, intermediate), device=device, dtype=torch.float8_e4m3fn)
            scale = torch.empty((rows, intermediate // group), device=device, dtype=torch.float32)
            silu_and_mul_contig_post_quant(
                input=gateup, output=q, output_scale=scale, quant_group_size=group, swiglu_limit=self.swiglu_limit
            )
            return q, scale
        activated = torch.empty((rows, intermediate), device=device, dtype=torch.bfloat16)
        if self.swiglu_limit is not None:
            silu_and_mul_clamp(gateup, activated, self.swiglu_limit)
        else:
            _silu_and_mul(gateup, activated)
        return sglang_per_token_group_quant_fp8(activated, group)


def _dispose(received: torch.Tensor) -> None:
    """Give a received tensor's memory back although the dispatch output still names it.

    As SGLang's ``dispose_tensor`` without the empty tensor that it allocates. Prefill graphs, which keep reading the
    address, are off with this backend.
    """
    if not get_flags().capture.disable_dispose_tensor:
        received.set_()


def _silu_and_mul(gateup: torch.Tensor, out: torch.Tensor) -> None:
    # Looked up per call: the CPU platform puts its own function there after this module ran.
    from sglang.srt.layers.moe.moe_runner import deep_gemm

    deep_gemm._legacy_silu_and_mul(gateup, out)


def _record_shape(running_state: dict, hidden_states: torch.Tensor) -> None:
    """What SGLang's contiguous runner reads of its input; the tensor itself may be disposed of by then."""
    running_state["all_tokens"] = hidden_states.shape[0]
    running_state["hidden_states_shape"] = hidden_states.shape
    running_state["hidden_states_device"] = hidden_states.device
    running_state["hidden_states_dtype"] = hidden_states.dtype
    running_state["topk_ids"] = None


@register_pre_permute("deepep_v2", "deep_gemm")
def pre_permute_deepep_v2_to_deep_gemm(
    dispatch_output: DeepEPv2DispatchOutput,
    quant_info: upstream.DeepGemmMoeQuantInfo,
    runner_config: MoeRunnerConfig,
    running_state: dict,
) -> DeepGemmRunnerInput:
    """Runner input of a dispatch: the received rows as they are when expanded, SGLang's permutes otherwise."""
    if not dispatch_output.is_expanded or dispatch_output.use_masked_gemm:
        return upstream.pre_permute_deepep_v2_to_deep_gemm(dispatch_output, quant_info, runner_config, running_state)

    hidden_states, scale = dispatch_output.hidden_states, dispatch_output.hidden_states_scale
    psum = dispatch_output.psum_num_recv_tokens_per_expert
    if scale is None and hidden_states.dtype != torch.bfloat16:
        raise RuntimeError(
            f"DeepEP v2 dispatched {hidden_states.dtype} rows without scales; the DeepGEMM runner takes FP8 rows with "
            "scales or bf16 rows"
        )
    if psum is None:
        raise RuntimeError("DeepEP v2 expanded dispatch returned no psum_num_recv_tokens_per_expert")
    assert runner_config.activation == "silu", f"expanded prefill computes SwiGLU, not {runner_config.activation}"

    use_psum_layout = dispatch_output.use_psum_layout
    # no_combine hands raw rows and their weights to a routewise finaliser.
    running_state["topk_weights"] = dispatch_output.topk_weights
    running_state[_EXPANDED] = ExpandedPrefill(
        psum=psum,
        expert_alignment=dispatch_output.expert_alignment,
        row_weights=None if runner_config.no_combine else dispatch_output.topk_weights,
    )
    m_indices = None
    if not use_psum_layout:
        _record_shape(running_state, hidden_states)
        m_indices = kernels.fill_m_indices_from_psum(
            psum, psum.shape[0], hidden_states.shape[0], dispatch_output.expert_alignment
        )
    return DeepGemmRunnerInput(
        hidden_states=hidden_states,
        hidden_states_scale=scale,
        use_masked_gemm=False,
        m_indices=m_indices,
        activation_scale_block_size=dispatch_output.activation_scale_block_size,
        use_psum_layout=use_psum_layout,
    )


@register_post_permute("deep_gemm", "deepep_v2")
def post_permute_deep_gemm_to_deepep_v2(
    runner_output: upstream.DeepGemmRunnerOutput,
    quant_info: upstream.DeepGemmMoeQuantInfo,
    runner_config: MoeRunnerConfig,
    running_state: dict,
) -> DeepEPv2CombineInput:
    """Combine input of a runner output: expanded rows weighted exactly once, SGLang's permutes otherwise."""
    expanded = running_state.get(_EXPANDED)
    if expanded is None:
        return upstream.post_permute_deep_gemm_to_deepep_v2(runner_output, quant_info, runner_config, running_state)
    from sglang.srt.layers.moe.token_dispatcher.base import RoutewiseLayout
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2CombineInput

    rows = runner_output.hidden_states
    if expanded.row_weights is None:
        return DeepEPv2CombineInput(rows, running_state["topk_weights"], RoutewiseLayout.EXPANDED)
    if not expanded.weighted:
        kernels.scale_expanded_rows_(rows, expanded.row_weights)
    return DeepEPv2CombineInput(rows, None)
