"""replaces: the DeepEP V2 dispatcher: layout choice, quantisation, the process-wide buffer and the handle's life cycle.

Prefill is dispatched expanded (one row per token and local expert) unless ``SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND`` is
off; decode is expanded and masked. An expanded prefill runs in one of two pipelines:

- psum: scales leave dispatch column-major and TMA-aligned, the psum itself is the grouped GEMMs' row layout;
- labels: row-major scales (packed column-major under UE8M0) and one label per row, for any DeepGEMM.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from sglang.srt.arg_groups.moe_hook import HIDDEN_MULTIPLE, MAX_TOPK
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import get_is_extend_in_batch
from sglang.srt.layers.moe.ep_moe.token_quant import quant_tokens
from sglang.srt.layers.moe.token_dispatcher import sync_free
from sglang.srt.layers.moe.token_dispatcher.base import (
    BaseDispatcher,
    CombineInput,
    CombineInputFormat,
    DispatchOutput,
)
from sglang.srt.layers.moe.token_dispatcher.deepep_v2_formats import (
    SCALE_BLOCK_SIZE,
    DeepEPv2CombineInput,
    DeepEPv2DispatchOutput,
)
from sglang.srt.layers.moe.token_dispatcher.elastic_buffer import (
    DeepEPv2Buffer,
    buffer_class,
    get_allow_hybrid_mode,
    require,
)
from sglang.srt.layers.moe.topk import TopKOutput
from sglang.srt.layers.moe.utils import DeepEPv2Fp8ScaleFormat, get_deepep_v2_fp8_scale_format
from sglang.srt.runtime_context import get_parallel

logger = logging.getLogger(__name__)

# DeepGEMM derives each expert's first row from the same number.
_EXPERT_ALIGNMENT = 128

use_deepep_v2 = buffer_class().cls is not None

_fp8_quant_import_error: BaseException | None = None
sglang_per_token_group_quant_fp8 = None
if use_deepep_v2:
    try:
        from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
    except (ImportError, OSError) as error:
        _fp8_quant_import_error = error


def _ensure_fp8_quant_available() -> None:
    require(buffer_class())
    if sglang_per_token_group_quant_fp8 is None:
        raise ImportError(
            f"DeepEP v2 FP8 dispatch needs SGLang's FP8 quantisation kernel: {_fp8_quant_import_error}. "
            "Fix: pip install sglang-kernel==0.4.10"
        )


_logged_decisions: set[str] = set()


def _log_once(message: str, level: int = logging.INFO) -> None:
    if message not in _logged_decisions:
        _logged_decisions.add(message)
        logger.log(level, message)


class _DeepEPv2Impl:
    def __init__(
        self,
        group: dist.ProcessGroup,
        router_topk: int,
        num_experts: int,
        num_local_experts: int,
        hidden_size: int,
        scale_format: DeepEPv2Fp8ScaleFormat,
        num_max_dispatch_tokens_per_rank: int,
        use_fp8_dispatch: bool,
        activation_scale_block_size: int = SCALE_BLOCK_SIZE,
    ):
        self.group = group
        self.router_topk = router_topk
        self.num_experts = num_experts
        self.num_local_experts = num_local_experts
        self.hidden_size = hidden_size
        self.scale_format = scale_format
        self.activation_scale_block_size = activation_scale_block_size
        self.num_max_dispatch_tokens_per_rank = num_max_dispatch_tokens_per_rank
        self.use_fp8_dispatch = use_fp8_dispatch
        self._num_ranks = max(1, num_experts // num_local_experts)
        self._handle = None
        self._buffer = None
        self._buffer_key = None
        self._pad_empty_combine = False
        self._num_sms = envs.SGLANG_DEEPEP_V2_NUM_SMS.get()
        self._validate_shape()

        self._prefill_expand_enabled = envs.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND.get()
        self._psum_refusal = self._find_psum_refusal() if self._prefill_expand_enabled else None
        self._use_psum_pipeline = self._prefill_expand_enabled and self._psum_refusal is None
        self._sync_free_wanted = envs.SGLANG_DEEPEP_V2_ENABLE_SYNC_FREE_PREFILL.get()
        # None until the first use: the memory that sync-free buffers may take is known once the model is loaded.
        self._prefill_is_sync_free: bool | None = None

    def _validate_shape(self) -> None:
        if self.hidden_size % HIDDEN_MULTIPLE:
            raise ValueError(
                f"DeepEP v2 needs a hidden size that is a multiple of {HIDDEN_MULTIPLE}, the model has "
                f"{self.hidden_size}. Use --moe-a2a-backend deepep."
            )
        if self.router_topk > MAX_TOPK:
            raise ValueError(
                f"DeepEP v2 routes a token to at most {MAX_TOPK} experts, the model selects {self.router_topk}. "
                "Use --moe-a2a-backend deepep."
            )
        if self.num_experts % self.num_local_experts:
            raise ValueError(
                f"DeepEP v2 needs the same number of experts on every rank: {self.num_experts} experts do not divide "
                f"into {self.num_local_experts} per rank. Change --ep-size or --ep-num-redundant-experts."
            )

    def _find_psum_refusal(self) -> str | None:
        if not envs.SGLANG_DEEPEP_V2_ENABLE_PSUM_PIPELINE.get():
            return "SGLANG_DEEPEP_V2_ENABLE_PSUM_PIPELINE=0"
        if self.activation_scale_block_size != SCALE_BLOCK_SIZE:
            return f"scale groups of {self.activation_scale_block_size} elements, the psum kernels take 128"
        # deep_gemm_wrapper reads the device at import, so not at this module's top.
        from sglang.srt.layers.deep_gemm_wrapper import psum

        return psum.unsupported_reason(_EXPERT_ALIGNMENT)

    def _decide_sync_free(self, rows: int) -> tuple[bool, str]:
        """Whether prefill runs without a host sync, and why."""
        if not self._sync_free_wanted:
            return False, "SGLANG_DEEPEP_V2_ENABLE_SYNC_FREE_PREFILL=0"
        if not self._use_psum_pipeline:
            return False, "the psum pipeline is off"
        refusal = sync_free.refusal(rows, self.hidden_size, self.use_fp8_dispatch, self.group)
        return refusal is None, refusal or "capacity-sized buffers"

    def _decide_prefill(self) -> None:
        """Settle the pipeline and whether it syncs with the host; says once what was taken and why."""
        # deep_gemm_wrapper reads the device at import, so not at this module's top.
        from sglang.srt.layers.deep_gemm_wrapper import psum

        psum.check_row_alignment(_EXPERT_ALIGNMENT)
        rows = sync_free.capacity_rows(
            self._num_ranks,
            self.num_max_dispatch_tokens_per_rank,
            self.router_topk,
            self.num_local_experts,
            _EXPERT_ALIGNMENT,
        )
        if self._use_psum_pipeline:
            # DeepGEMM's alignment is a runtime setting, so what construction saw is asked once more.
            self._psum_refusal = self._find_psum_refusal()
            self._use_psum_pipeline = self._psum_refusal is None
        free, reason = self._decide_sync_free(rows)
        if self._use_psum_pipeline:
            psum.announce_max_rows(rows)
            pipeline, why = "psum", "DeepGEMM takes DeepEP's psum"
        elif self._prefill_expand_enabled:
            pipeline, why = "labels", self._psum_refusal
        else:
            pipeline, why = "non-expanded", "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND=0"
        _log_once(
            f"DeepEP v2 prefill: pipeline={pipeline} sync={'free' if free else 'cpu'} "
            f"transport={buffer_class().transport} dtype={'fp8' if self.use_fp8_dispatch else 'bf16'} "
            f"reason={why}; sync: {reason}"
        )
        if self._prefill_expand_enabled and self.scale_format.ue8m0:
            _log_once(
                "DeepEP v2 prefill: the expanded layout has not been validated on a GPU with UE8M0 scales; "
                "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND=0 turns it off.",
                logging.WARNING,
            )
        if self._prefill_expand_enabled and envs.SGLANG_DEEPEP_V2_TRACE_CONTIG.get():
            _log_once(
                "DeepEP v2 prefill: SGLANG_DEEPEP_V2_TRACE_CONTIG traces SGLang's own runner, which expanded prefill "
                "does not take here.",
                logging.WARNING,
            )
        self._prefill_is_sync_free = free

    def _key(self) -> tuple:
        if self._buffer_key is None:
            self._buffer_key = DeepEPv2Buffer.make_key(
                self.group,
                self.hidden_size,
                self.router_topk,
                self.num_max_dispatch_tokens_per_rank,
                self.use_fp8_dispatch,
                get_allow_hybrid_mode(),
            )
        return self._buffer_key

    def _get_buffer(self):
        return DeepEPv2Buffer.get_or_build(self._key())

    def prebuild_buffer(self) -> None:
        """Build the buffer now, so that the first request does not wait for it."""
        self._get_buffer()

    def settle_prefill(self) -> None:
        """Decide how prefill runs, once; collective as :meth:`DeepEPv2Dispatcher.settle_prefill`."""
        if self._prefill_is_sync_free is None:
            self._decide_prefill()

    def buffer_is_built(self) -> bool:
        """Whether the process-wide buffer stands under this dispatcher's key."""
        return DeepEPv2Buffer.find(self._key()) is not None

    def _validate_common(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor) -> None:
        if hidden_states.shape[0] > self.num_max_dispatch_tokens_per_rank:
            raise ValueError(
                f"DeepEP v2 dispatch got {hidden_states.shape[0]} tokens, a rank's buffer holds "
                f"{self.num_max_dispatch_tokens_per_rank}. Raise SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK "
                "or lower --chunked-prefill-size, --max-prefill-tokens or --cuda-graph-max-bs-decode."
            )
        if hidden_states.shape[1] != self.hidden_size:
            raise ValueError(
                f"DeepEP v2 dispatch got hidden size {hidden_states.shape[1]}, the layer has {self.hidden_size}"
            )
        if topk_ids.shape != (hidden_states.shape[0], self.router_topk):
            raise ValueError(
                f"DeepEP v2 dispatch got expert ids of shape {tuple(topk_ids.shape)}, the tokens need "
                f"{(hidden_states.shape[0], self.router_topk)}"
            )

    def _masked_token_capacity(self, local_tokens: int, ep_group_size: int) -> int:
        capacity = self.num_max_dispatch_tokens_per_rank * ep_group_size
        parallel = get_parallel()
        shares_one_batch = (
            parallel.attn_dp_size == 1
            and parallel.attn_cp_size == 1
            and parallel.tp_size == ep_group_size
            and parallel.tp_group is not None
            and self.group is parallel.tp_group.device_group
        )
        if not shares_one_batch:
            return capacity
        # A split of one batch leaves at most one token more on another rank, and a token picks an expert once.
        most_rows = max(1, local_tokens * ep_group_size + ep_group_size - 1)
        return min(capacity, -(-most_rows // _EXPERT_ALIGNMENT) * _EXPERT_ALIGNMENT)

    def _prepare(self, hidden_states, topk_ids, expanded: bool, psum_pipeline: bool):
        """Dispatch input, int64 expert ids, whether this dispatch owns them, and whether scales are column-major."""
        owns_ids = topk_ids.dtype != torch.int64
        if psum_pipeline and self.use_fp8_dispatch and not self.scale_format.ue8m0:
            # One launch for what the other layouts need two for.
            q, scale, topk_ids = quant_tokens(hidden_states, topk_ids)
            return (q, scale), topk_ids, owns_ids, True
        topk_ids = topk_ids.to(torch.int64)
        if not self.use_fp8_dispatch:
            return hidden_states, topk_ids, owns_ids, False
        _ensure_fp8_quant_available()
        ue8m0 = self.scale_format.ue8m0
        # Labels and decode read row-major fp32 scales; packed UE8M0 exists column-major only.
        column_major = ue8m0 if expanded else self.scale_format.tma_aligned
        quantized = sglang_per_token_group_quant_fp8(
            hidden_states,
            self.activation_scale_block_size,
            column_major_scales=column_major,
            scale_tma_aligned=column_major,
            scale_ue8m0=ue8m0,
        )
        return quantized, topk_ids, owns_ids, column_major

    def _dummy_token(self, hidden_states, topk_ids, topk_weights):
        """One token with distinct experts and zero weights: a synced dispatch needs every rank to notify."""
        return (
            hidden_states.new_zeros((1, hidden_states.shape[1])),
            torch.arange(self.router_topk, dtype=topk_ids.dtype, device=topk_ids.device).unsqueeze(0),
            topk_weights.new_zeros((1, self.router_topk)),
        )

    def dispatch(self, hidden_states: torch.Tensor, topk_output: TopKOutput) -> DeepEPv2DispatchOutput:
        if self._handle is not None:
            raise RuntimeError("DeepEP v2 dispatch: the previous dispatch's handle is unconsumed, combine comes first")
        topk_ids, topk_weights = topk_output.topk_ids, topk_output.topk_weights
        self._validate_common(hidden_states, topk_ids)
        if not topk_ids.is_contiguous():
            topk_ids = topk_ids.contiguous()
        if topk_weights.dtype != torch.float32 or not topk_weights.is_contiguous():
            topk_weights = topk_weights.to(torch.float32).contiguous()

        is_decode = not get_is_extend_in_batch()
        use_masked = is_decode
        use_expand_layout = is_decode or self._prefill_expand_enabled
        if not is_decode:
            self.settle_prefill()
        use_psum_layout = self._use_psum_pipeline and not is_decode
        do_cpu_sync = not (is_decode or self._prefill_is_sync_free)

        local_tokens = hidden_states.shape[0]
        self._pad_empty_combine = do_cpu_sync and local_tokens == 0
        if self._pad_empty_combine:
            hidden_states, topk_ids, topk_weights = self._dummy_token(hidden_states, topk_ids, topk_weights)
            local_tokens = 1

        dispatch_x, topk_ids, owns_ids, column_major = self._prepare(
            hidden_states, topk_ids, use_expand_layout, use_psum_layout
        )
        buffer = self._get_buffer()
        recv_x, recv_topk_idx, recv_topk_weights, handle, event = buffer.dispatch(
            dispatch_x,
            topk_idx=topk_ids,
            topk_weights=topk_weights,
            num_experts=self.num_experts,
            # Equal on every rank and every call, so never the batch's own size.
            num_max_tokens_per_rank=self.num_max_dispatch_tokens_per_rank,
            expert_alignment=_EXPERT_ALIGNMENT,
            num_sms=self._num_sms,
            # The handle may keep ids that nobody else can write to.
            do_handle_copy=not owns_ids,
            use_tma_aligned_col_major_sf=column_major,
            do_cpu_sync=do_cpu_sync,
            do_expand=use_expand_layout,
        )
        if event.event is not None:
            event.current_stream_wait()
        recv_hidden_states, recv_scale = recv_x if isinstance(recv_x, tuple) else (recv_x, None)

        expected_m = masked_max_m = total_expanded = 0
        if use_expand_layout:
            recv_topk_idx = None
            total_rows = recv_hidden_states.shape[0]
            if recv_topk_weights.shape != (total_rows,):
                raise ValueError(
                    f"DeepEP v2 returned {total_rows} expanded rows and router weights of shape "
                    f"{tuple(recv_topk_weights.shape)}; expected [{total_rows}]"
                )
            if use_masked:
                # Only a scheduling hint; the device counts bound the masked GEMM.
                expected_m = max(
                    1, (local_tokens * self._num_ranks * self.router_topk + self.num_experts) // self.num_experts
                )
                masked_max_m = self._masked_token_capacity(local_tokens, self._num_ranks)
                total_expanded = total_rows
        else:
            num_recv_tokens = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1].item())
            recv_topk_idx = recv_topk_idx[:num_recv_tokens]
            recv_topk_weights = recv_topk_weights[:num_recv_tokens]
            recv_hidden_states = recv_hidden_states[:num_recv_tokens]
            if recv_scale is not None:
                recv_scale = recv_scale[:num_recv_tokens]

        self._hold(buffer, handle)
        return DeepEPv2DispatchOutput(
            hidden_states=recv_hidden_states,
            hidden_states_scale=recv_scale,
            topk_ids=recv_topk_idx,
            topk_weights=recv_topk_weights,
            psum_num_recv_tokens_per_expert=handle.psum_num_recv_tokens_per_expert,
            is_expanded=use_expand_layout,
            use_masked_gemm=use_masked,
            expected_m=expected_m,
            masked_max_m=masked_max_m,
            total_expanded=total_expanded,
            expert_alignment=_EXPERT_ALIGNMENT,
            activation_scale_block_size=self.activation_scale_block_size,
            use_psum_layout=use_psum_layout,
        )

    def _hold(self, buffer, handle) -> None:
        self._buffer, self._handle = buffer, handle
        DeepEPv2Buffer.hold_handle(handle)

    def _release(self) -> None:
        DeepEPv2Buffer.release_handle(self._handle)
        self._buffer = self._handle = None
        self._pad_empty_combine = False

    def combine(self, combine_input: DeepEPv2CombineInput) -> torch.Tensor:
        if self._handle is None:
            raise RuntimeError("DeepEP v2 combine without a valid dispatch handle: dispatch first, combine once")
        try:
            if combine_input.routewise_layout is not None:
                raise ValueError(
                    f"DeepEP v2 combine got rows in layout {combine_input.routewise_layout}: "
                    "the model's routewise finaliser has to reduce them first"
                )
            combined_x, _, event = self._buffer.combine(
                combine_input.hidden_states, handle=self._handle, topk_weights=combine_input.topk_weights
            )
            if event.event is not None:
                event.current_stream_wait()
            return combined_x[:0] if self._pad_empty_combine else combined_x
        finally:
            # A handle serves once, also when combine fails.
            self._release()


class DeepEPv2Dispatcher(BaseDispatcher):
    """Dispatch and combine of one MoE layer over the process-wide DeepEP V2 buffer.

    Args:
        group: ranks that exchange tokens.
        router_topk: experts per token, at most 32.
        num_experts: experts over all ranks, a multiple of ``num_local_experts``.
        num_local_experts: experts on this rank.
        hidden_size: elements per token, a multiple of 256.
        params_dtype: must be bf16.
        use_fp8_dispatch: whether FP8 rows with scales travel, else bf16 rows.
        activation_scale_block_size: elements that share one scale: 128, or 32 for MXFP8.

    Raises:
        NotImplementedError: ``params_dtype`` is not bf16.
        ValueError: a size that DeepEP cannot take.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        router_topk: int,
        num_experts: int,
        num_local_experts: int,
        hidden_size: int,
        params_dtype: torch.dtype,
        use_fp8_dispatch: bool,
        activation_scale_block_size: int = SCALE_BLOCK_SIZE,
    ):
        super().__init__()
        if params_dtype != torch.bfloat16:
            raise NotImplementedError(f"DeepEP v2 dispatches bf16 activations, the model has {params_dtype}")
        self.num_max_dispatch_tokens_per_rank = envs.SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()
        self.use_fp8_dispatch = use_fp8_dispatch
        self._impl = _DeepEPv2Impl(
            group=group,
            router_topk=router_topk,
            num_experts=num_experts,
            num_local_experts=num_local_experts,
            hidden_size=hidden_size,
            scale_format=get_deepep_v2_fp8_scale_format(),
            num_max_dispatch_tokens_per_rank=self.num_max_dispatch_tokens_per_rank,
            use_fp8_dispatch=use_fp8_dispatch,
            activation_scale_block_size=activation_scale_block_size,
        )

    def dispatch(self, hidden_states: torch.Tensor, topk_output: TopKOutput) -> DispatchOutput:
        """Send ``[tokens, hidden]`` bf16 to the ranks of its experts; collective over the group.

        Raises:
            ImportError: no buffer class or no FP8 quantisation kernel can be loaded.
            RuntimeError: the previous dispatch was not combined, or another key's buffer still awaits a combine.
            ValueError: more tokens than the buffer holds, shapes that do not belong to this layer, or what
                :meth:`settle_prefill` refuses.
        """
        return self._impl.dispatch(hidden_states, topk_output)

    def combine(self, combine_input: CombineInput) -> torch.Tensor:
        """Reduce expert outputs to ``[tokens, hidden]`` bf16 on the ranks that sent the tokens.

        Raises:
            TypeError: an input of another backend.
            RuntimeError: nothing was dispatched.
        """
        if combine_input.format != CombineInputFormat.DEEPEP_V2:
            # The dispatch that this call should have answered is over.
            self._impl._release()
            raise TypeError(f"DeepEP v2 combine got an input of format {combine_input.format}")
        return self._impl.combine(combine_input)

    def prebuild(self) -> None:
        """Build the process-wide buffer now; collective over the group, no forward needed.

        Raises:
            ImportError: no buffer class can be loaded.
            RuntimeError: another key's buffer still awaits a combine, or NCCL's GPU-initiated networking cannot start.
        """
        self._impl.prebuild_buffer()

    def buffer_is_built(self) -> bool:
        """Whether the process-wide buffer already stands under this layer's key."""
        return self._impl.buffer_is_built()

    @property
    def uses_psum_pipeline(self) -> bool:
        """Whether an expanded prefill takes the psum pipeline; final once prefill is settled."""
        return self._impl._use_psum_pipeline

    def settle_prefill(self) -> None:
        """Decide and log now how this layer's prefill will run; collective over the group where sync-free is wanted.

        Raises:
            ValueError: DeepGEMM's row alignment does not divide dispatch's, or sync-free prefill needs more than
                ``SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES``.
        """
        self._impl.settle_prefill()
