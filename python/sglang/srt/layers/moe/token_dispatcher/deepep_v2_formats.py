"""new: what the DeepEP V2 dispatcher and the MoE runner hand to each other."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.layers.moe.token_dispatcher.base import (
    CombineInput,
    CombineInputFormat,
    DispatchOutput,
    DispatchOutputFormat,
    RoutewiseLayout,
)

SCALE_BLOCK_SIZE = 128


class DeepEPv2DispatchOutput(NamedTuple):
    """What dispatch hands to the MoE runner.

    Attributes:
        hidden_states: ``[rows, hidden]`` float8_e4m3fn or bf16.
        hidden_states_scale: ``[rows, hidden / 128]`` fp32, or packed UE8M0 int32, or MXFP8 groups of 32; None: bf16.
        topk_ids: ``[rows, topk]`` int64 receiver-local expert ids or -1; None when expanded.
        topk_weights: ``[rows]`` fp32 when expanded, else ``[rows, topk]`` fp32.
        psum_num_recv_tokens_per_expert: ``[local experts]`` int32, on the device.
        is_expanded: one row per (token, local expert), grouped by expert.
        use_masked_gemm: decode, the rows go through a fixed-height slab.
        expected_m: rows per expert that the masked GEMM is scheduled for.
        masked_max_m: slab height per expert.
        total_expanded: rows of the receive buffer in the masked case.
        expert_alignment: rows to which each expert's segment is rounded up.
        activation_scale_block_size: elements of hidden that share one scale.
        use_psum_layout: the rows, and their scales if they have any, are laid out for the psum pipeline.
    """

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor | None
    topk_weights: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor | None = None
    is_expanded: bool = False
    use_masked_gemm: bool = False
    expected_m: int = 0
    masked_max_m: int = 0
    total_expanded: int = 0
    expert_alignment: int = 128
    activation_scale_block_size: int = SCALE_BLOCK_SIZE
    use_psum_layout: bool = False

    @property
    def format(self) -> DispatchOutputFormat:
        return DispatchOutputFormat.DEEPEP_V2


class DeepEPv2CombineInput(NamedTuple):
    """What the MoE runner hands to combine.

    Attributes:
        hidden_states: ``[rows, hidden]`` bf16, rows of the dispatch they answer, already weighted when expanded.
        topk_weights: ``[rows, topk]`` fp32 of a non-expanded dispatch, only transported; None when expanded.
        routewise_layout: set when a routewise finaliser still has to run.
    """

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor | None
    routewise_layout: RoutewiseLayout | None = None

    @property
    def format(self) -> CombineInputFormat:
        return CombineInputFormat.DEEPEP_V2


assert isinstance(DeepEPv2DispatchOutput, DispatchOutput)
assert isinstance(DeepEPv2CombineInput, CombineInput)
