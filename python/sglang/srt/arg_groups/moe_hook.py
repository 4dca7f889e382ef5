"""extends: start-up checks of the deepep_v2 backend: per-rank prefill budget, batch layout, model shape.

Each check raises ``ValueError`` before any weight is loaded, naming the value, the limit and the setting to change.
"""

from __future__ import annotations

from typing import Any

import sglang_upstream.srt.arg_groups.moe_hook as upstream
from sglang.srt.arg_groups.overrides import max_prefill_buffer_tokens, model_config_of, resolved_view
from sglang.srt.configs.moe_model_registry import model_deepep_v2_prefill_dispatch_tokens
from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import derive_attn_tp_size

__overrides__ = (
    "required_deepep_v2_prefill_tokens_per_rank",
    "validate_deepep_v2_dispatch_token_budget",
    "validate_deepep_v2_model_architecture",
)

# DeepEP's combine moves rows in chunks of this many elements.
HIDDEN_MULTIPLE = 256
# Most experts per token that DeepEP dispatches.
MAX_TOPK = 32
_NUM_EXPERTS_FIELDS = ("n_routed_experts", "num_experts", "num_local_experts")


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _prefill_ceiling(server_args: Any) -> int:
    """Most prefill tokens that one attention-DP group runs in one forward."""
    chunk_ceiling = max_prefill_buffer_tokens(server_args)
    if chunk_ceiling:
        return chunk_ceiling
    # Without chunks the scheduler admits a first request longer than --max-prefill-tokens.
    view = resolved_view(server_args)
    longest_request = model_config_of(server_args).context_len
    if view.max_total_tokens:
        longest_request = min(longest_request, view.max_total_tokens)
    return max(view.max_prefill_tokens or 0, longest_request)


def _prefill_tokens_per_rank(view: Any, ceiling: int) -> int:
    """The largest slice of ``ceiling`` tokens that one rank dispatches, in tokens."""
    attn_tp_size = derive_attn_tp_size(
        tp_size=view.tp_size, attn_cp_size=view.attn_cp_size, attn_dp_size=view.attn_dp_size
    )
    rows = ceiling
    # Zigzag leaves a batch whole on every CP rank when one of its requests is shorter than 2 * attn_cp_size.
    if view.enable_prefill_cp and view.attn_cp_size > 1 and view.cp_strategy == "interleave":
        # Each rank's shard is padded to a multiple of the CP size as well.
        shard = _ceil_div(ceiling, view.attn_cp_size)
        rows = _ceil_div(shard, view.attn_cp_size) * view.attn_cp_size
    return _ceil_div(rows, attn_tp_size)


def required_deepep_v2_prefill_tokens_per_rank(server_args: Any) -> int:
    """The largest prefill dispatch of one rank, the one number that the buffer's capacity is checked against.

    Args:
        server_args: SGLang's resolved server arguments. ``chunked_prefill_size`` is per attention-DP group.

    Returns:
        Tokens: the prefill ceiling (the chunk, or 1.25 times it under dynamic chunking) divided, rounding up, by the
        attention-TP ranks it is scattered to, and by the CP ranks as well where every batch is sharded over them.
        The model's registered policy takes precedence. 0 in the decode role, which runs no prefill.
    """
    view = resolved_view(server_args)
    if view.disaggregation_mode == "decode":
        return 0
    ceiling = _prefill_ceiling(server_args)
    return model_deepep_v2_prefill_dispatch_tokens(
        hf_config=model_config_of(server_args).hf_config,
        cfg=view,
        ceiling=ceiling,
        default_tokens=_prefill_tokens_per_rank(view, ceiling),
    )


def validate_deepep_v2_dispatch_token_budget(server_args: Any) -> None:
    """Refuse batch layouts and budgets that the ElasticBuffer cannot hold; SGLang's own check compares the budgets.

    Raises:
        ValueError: a setting keeps batches unpadded, the reference transport meets decode CUDA graphs, or a prefill
            or a decode graph needs more than SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK tokens on one rank.
    """
    view = resolved_view(server_args)
    if view.moe_a2a_backend != "deepep_v2":
        return
    if view.disable_attn_tp_gather:
        # Unpadded batches stay whole on every rank, and prefill is reported as decode.
        raise ValueError(
            "--disable-attn-tp-gather is not supported with --moe-a2a-backend deepep_v2: a batch that does not "
            f"divide by the attention-TP size is dispatched whole by each of the {view.tp_size} ranks, and prefill "
            "takes the masked decode path. Remove --disable-attn-tp-gather."
        )
    graphs = view.cuda_graph_config
    if (
        envs.SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT.get()
        and view.disaggregation_mode != "prefill"
        and graphs is not None
        and graphs.decode.backend != Backend.DISABLED
    ):
        raise ValueError(
            "SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT reads token counts on the host, so it cannot be captured in "
            f"decode CUDA graphs (decode graph backend {graphs.decode.backend}). Pass --disable-cuda-graph, or unset "
            "the variable to use DeepEP."
        )
    upstream.validate_deepep_v2_dispatch_token_budget(server_args)


def validate_deepep_v2_model_architecture(server_args: Any) -> None:
    """Allow DeepEP v2 only for registered architectures, and only for shapes its kernels accept.

    Raises:
        ValueError: SGLang has not validated the architecture, or a shape in the model's config breaks a precondition
            that DeepEP itself asserts without naming it.
    """
    upstream.validate_deepep_v2_model_architecture(server_args)
    view = resolved_view(server_args)
    config = model_config_of(server_args).hf_text_config

    # A latent MoE dispatches narrower rows than the residual stream.
    hidden_size = getattr(config, "routed_expert_hidden_size", None) or getattr(config, "hidden_size", None)
    if hidden_size and hidden_size % HIDDEN_MULTIPLE:
        raise ValueError(
            f"DeepEP v2 combine needs a hidden size that is a multiple of {HIDDEN_MULTIPLE}; hidden_size is "
            f"{hidden_size} in the model's config. Use another --moe-a2a-backend."
        )
    topk = getattr(config, "num_experts_per_tok", None)
    if topk and topk > MAX_TOPK:
        raise ValueError(
            f"DeepEP v2 routes a token to at most {MAX_TOPK} experts; num_experts_per_tok is {topk} in the model's "
            "config. Use another --moe-a2a-backend."
        )
    num_experts = next((n for f in _NUM_EXPERTS_FIELDS if (n := getattr(config, f, None))), None)
    num_physical = num_experts and num_experts + view.ep_num_redundant_experts
    if num_physical and num_physical % view.ep_size:
        raise ValueError(
            f"DeepEP v2 needs the same number of experts on every rank: {num_experts} experts and "
            f"{view.ep_num_redundant_experts} redundant ones do not divide by the expert-parallel size "
            f"{view.ep_size} (equal to --tp-size). Change --tp-size or --ep-num-redundant-experts."
        )
