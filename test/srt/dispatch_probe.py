"""Runs real prefill forwards on CPU ranks and reports how many tokens reach each rank's dispatch.

``python dispatch_probe.py CASES`` with CASES a JSON list of ``{"model": folder, "arguments": {ServerArgs fields},
"batches": [[[request lengths] of each attention-DP group] of each forward]}``; prints one JSON line, per case and rank
``{"prebuilt": the buffer stands before the first forward, "reached": [rows, is_extend] of each forward}``.
``"skip_checks": true`` drops the start-up check whose reason a case shows.
A rank forwards through SGLang's ModelRunner after the scheduler's own batch padding, and stops at the first dispatch.
SGLang is imported once; the ranks of a case are forks.
"""

import json
import os
import sys
from multiprocessing import get_context
from pathlib import Path

from sglang_deepep_v2.ab.servers import free_port


class _Dispatched(Exception):
    """Carries what reached the first dispatch out of the forward."""


def _stop_at_dispatch(self, hidden_states, topk_output):
    from sglang.srt.layers.dp_attention import get_is_extend_in_batch

    raise _Dispatched(hidden_states.shape[0], bool(get_is_extend_in_batch()))


def _prefill(runner, lengths: list[int]) -> None:
    """One scheduler step of this rank: a prefill of requests of these lengths, or the idle batch for none."""
    from sglang.benchmark import one_batch
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler_components.dp_attn import prepare_mlp_sync_batch_raw
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.runtime_context import get_schedule
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.utils import require_mlp_sync, require_mlp_tp_gather

    cache = one_batch.TreeCacheNamespace(
        page_size=get_schedule().page_size,
        device=runner.device,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
    )

    def batch_of(requests):
        return ScheduleBatch.init_new(
            reqs=requests,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=cache,
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )

    def idle_batch():
        batch = batch_of([])
        batch.prepare_for_idle()
        return batch

    batch = None
    if lengths:
        requests = []
        for index, length in enumerate(lengths):
            requests += one_batch.prepare_synthetic_inputs_for_latency_test(1, length, [list(range(length))])
            # The scheduler's padding reads request ids as text.
            requests[-1].rid = str(index)
        batch = batch_of(requests)
        batch.prepare_for_extend()
    if require_mlp_sync():
        batch = prepare_mlp_sync_batch_raw(
            batch,
            model_runner=runner,
            get_idle_batch=idle_batch,
            disable_cuda_graph=True,
            require_mlp_tp_gather=require_mlp_tp_gather(),
            disable_overlap_schedule=True,
            offload_tags=set(),
        )
    if batch.input_ids is None:
        batch.input_ids = batch.prefill_input_ids_cpu
    runner.forward(ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False))


def _model_runner(server_args, tp_rank: int, port: int):
    """A rank's ModelRunner with dummy weights, ready to forward."""
    from sglang.benchmark import one_batch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner

    one_batch.publish(
        server_args,
        role="scheduler",
        ranks=one_batch.SpawnRanks(
            world_rank=one_batch.spawn_world_rank(server_args, tp_rank=tp_rank, pp_rank=0), gpu_id=tp_rank
        ),
    )
    one_batch._init_process_global_configs()
    model_config = ModelConfig.from_server_args(server_args)
    one_batch.bootstrap.init_parallel_runtime(server_args=server_args, device="cpu", dist_port=port)
    one_batch.bootstrap.init_layer_runtime(model_config=model_config)
    runner = ModelRunner(
        model_config=model_config,
        mem_fraction_static=0.3,
        gpu_id=tp_rank,
        nccl_port=port,
        server_args=server_args,
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return runner


def _rank_main(case: dict, tp_rank: int, port: int, results) -> None:
    import torch
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2Dispatcher
    from sglang.srt.plugins import load_plugins

    from resolved_args import resolve

    load_plugins()
    cores = sorted(os.sched_getaffinity(0))
    num_ranks = case["arguments"]["tp_size"]
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[r % len(cores)]) for r in range(num_ranks))
    DeepEPv2Dispatcher.dispatch = _stop_at_dispatch
    # No CPU attention backend knows prefill CP; the rows that reach dispatch do not depend on attention's values.
    if case["arguments"].get("enable_prefill_cp"):
        from sglang.srt.layers.radix_attention import RadixAttention

        RadixAttention.forward = lambda self, q, k, v, *args, **kwargs: torch.zeros_like(q)
    if case.get("skip_checks"):
        register_resolution_hook("validate_deepep_v2_dispatch_token_budget")(lambda args, previous: None)
    server_args = resolve(Path(case["model"]), max_total_tokens=256, max_running_requests=4, **case["arguments"])
    view = resolved_view(server_args)
    runner = _model_runner(server_args, tp_rank, port)
    group = tp_rank // (view.tp_size // view.attn_dp_size)
    dispatcher = next(m.dispatcher for m in runner.model.modules() if isinstance(m, FusedMoE))
    prebuilt = dispatcher.buffer_is_built()
    reached = []
    for batch in case["batches"]:
        try:
            with torch.no_grad():
                _prefill(runner, batch[group])
            raise AssertionError(f"no dispatch in the forward of {batch}")
        except _Dispatched as dispatched:
            reached.append(dispatched.args)
    results.put((tp_rank, {"prebuilt": prebuilt, "reached": reached}))
    os._exit(0)


def main(cases: list[dict]) -> list[list]:
    """Runs every case with one process per rank; returns the ranks' reports by case."""
    # Compiling the embedding takes longer than all forwards.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # The forks share these imports; the registry imports every model.
    import sglang.benchmark.one_batch  # noqa: F401
    import sglang.srt.models.registry  # noqa: F401

    context = get_context("fork")
    outcome = []
    for case in cases:
        results, port = context.SimpleQueue(), free_port()
        ranks = [
            context.Process(target=_rank_main, args=(case, rank, port, results))
            for rank in range(case["arguments"]["tp_size"])
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
            if rank.exitcode != 0:
                rank.kill()
                raise SystemExit(f"a rank of {case} ended with {rank.exitcode}")
        outcome.append([report for _, report in sorted((results.get() for _ in ranks), key=lambda report: report[0])])
    return outcome


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
