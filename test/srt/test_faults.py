"""What a failing rank does to the others: real processes, real signals, the reference transport over gloo.

The rule: who survives ends with an error that says why, within the process group's timeout, and never returns a wrong
output. Every function below runs inside a rank and returns what its completed forwards computed.
"""

import os
import signal
import time

import pytest
import torch

import moe_layer
from moe_layer import Batch, Shape, Weights
from rank_processes import watch_ranks

GROUP_TIMEOUT_S = 3
# A survivor may wait once for the group's timeout; the rest is for starting and for leaving.
DEADLINE_S = 40
SHAPE = Shape()
PSUM, LABELS = moe_layer.PATHS["psum"], moe_layer.PATHS["labels"]
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")


def ranks(world_size, function, *args, env=PSUM):
    return watch_ranks(world_size, function, *args, env=env, group_timeout_s=GROUP_TIMEOUT_S, deadline_s=DEADLINE_S)


def checked_forward(layer, weights, rank, step):
    """One forward of ``3 + rank`` tokens, held against the dense computation; its relative error."""
    batch = Batch.make(layer_shape(layer), 3 + rank, seed=100 * rank + step)
    error = moe_layer.relative_error(moe_layer.forward(layer, batch), moe_layer.truth(batch, weights))
    assert error < 0.01, f"rank {rank} step {step}: output is off by {error:.3g}"
    return error


def layer_shape(layer):
    return Shape(layer.num_experts, layer.hidden_size, SHAPE.intermediate, layer.top_k)


def build(rank, shape=SHAPE, seed=1):
    weights = Weights.make(shape, fp8=False, seed=seed)
    return moe_layer.build_layer(shape, weights, rank), weights


def assert_survivor(outcome, *texts):
    """The rank ended by itself, with an exception, in time, and without a result."""
    assert outcome.exit_code == 1, outcome
    assert outcome.value is None and outcome.seconds < DEADLINE_S
    assert any(text in outcome.error for text in texts), outcome.error[-2000:]


# a rank that is gone


def die_inside(rank, world_size, call, victim):
    """Two good forwards, then ``victim`` is killed between the header and the rows of one call of the third."""
    from sglang_deepep_v2.cpu_reference import elastic_buffer

    layer, weights = build(rank)
    for step in range(2):
        checked_forward(layer, weights, rank, step)
    move_rows, inside = elastic_buffer.all_to_all_rows, []

    def watched(name, function):
        def run(*args, **kwargs):
            inside.append(name)
            return function(*args, **kwargs)

        return run

    def move_or_die(*args):
        if rank == victim and inside[-1] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return move_rows(*args)

    cls = elastic_buffer.ReferenceElasticBuffer
    cls.dispatch, cls.combine = watched("dispatch", cls.dispatch), watched("combine", cls.combine)
    elastic_buffer.all_to_all_rows = move_or_die
    checked_forward(layer, weights, rank, 2)
    return "a forward came back although a rank is dead"


@pytest.mark.parametrize(("call", "world_size"), [("dispatch", 4), ("combine", 2)])
def test_a_rank_killed_inside_a_collective_ends_the_others(call, world_size):
    outcomes = ranks(world_size, die_inside, call, 1)
    assert outcomes[1].exit_code == -signal.SIGKILL and outcomes[1].error is None
    for survivor in outcomes[:1] + outcomes[2:]:
        assert_survivor(survivor, *LOST_PEER)
        assert f", in {call}" in survivor.error


def raise_before_dispatch(rank, world_size):
    layer, weights = build(rank)
    checked_forward(layer, weights, rank, 0)
    if rank == 1:
        raise MemoryError("attention ran out of memory on rank 1")
    checked_forward(layer, weights, rank, 1)
    return "a forward came back although a rank never dispatched"


def test_a_rank_that_raises_before_dispatch_ends_the_others():
    outcomes = ranks(2, raise_before_dispatch)
    assert_survivor(outcomes[1], "attention ran out of memory on rank 1")
    assert_survivor(outcomes[0], *LOST_PEER)


def stall_before_dispatch(rank, world_size):
    layer, weights = build(rank)
    checked_forward(layer, weights, rank, 0)
    if rank == 1:
        time.sleep(2 * GROUP_TIMEOUT_S)
        os._exit(7)
    started = time.monotonic()
    try:
        checked_forward(layer, weights, rank, 1)
    except RuntimeError as error:
        return time.monotonic() - started, str(error)
    return None


def test_a_rank_that_stalls_is_given_up_after_the_groups_timeout():
    first, second = ranks(2, stall_before_dispatch)
    assert second.exit_code == 7, "rank 1 was to outlast the timeout"
    waited, error = first.value
    assert GROUP_TIMEOUT_S - 1 < waited < 2 * GROUP_TIMEOUT_S and "Timed out" in error, error


# a call that one rank gets wrong


def wrong_argument(rank, world_size):
    layer, weights = build(rank)
    checked_forward(layer, weights, rank, 0)
    batch = Batch.make(SHAPE, 3, seed=rank)
    if rank == 1:
        batch.ids[0, 0] = SHAPE.experts
    try:
        moe_layer.forward(layer, batch)
    except ValueError as error:
        # The refused call moved nothing, so the ranks are still in step.
        checked_forward(layer, weights, rank, 1)
        return str(error)
    return None


def test_an_argument_refused_on_one_rank_is_refused_on_all():
    outcomes = ranks(2, wrong_argument)
    assert "topk_idx[0, 0] = 8 is outside -1..7" in outcomes[1].value
    assert "rank 1 of the group refused its arguments" in outcomes[0].value


# the buffer


def cannot_allocate(rank, world_size):
    """Allocation fails on every rank, as it does when the configured capacity does not fit; then there is room."""
    from sglang.srt.layers.moe.token_dispatcher.elastic_buffer import DeepEPv2Buffer

    from sglang_deepep_v2.cpu_reference.elastic_buffer import ReferenceElasticBuffer

    layer, weights = build(rank)
    construct = ReferenceElasticBuffer.__init__

    def out_of_memory(self, *args, **kwargs):
        raise MemoryError("cannot register 2 GiB of symmetric memory")

    ReferenceElasticBuffer.__init__ = out_of_memory
    errors = []
    for _ in range(2):
        try:
            checked_forward(layer, weights, rank, 0)
        except MemoryError as error:
            errors.append(str(error))
    assert DeepEPv2Buffer._state().buffer is None, "a buffer that was not built must not be published"
    ReferenceElasticBuffer.__init__ = construct
    checked_forward(layer, weights, rank, 0)
    return errors


def test_a_buffer_that_cannot_be_allocated_is_not_kept():
    for outcome in ranks(2, cannot_allocate):
        assert outcome.exit_code == 0, outcome.error
        assert outcome.value == ["cannot register 2 GiB of symmetric memory"] * 2


def allocation_fails_on_one_rank(rank, world_size):
    from sglang_deepep_v2.cpu_reference.elastic_buffer import ReferenceElasticBuffer

    layer, weights = build(rank)
    if rank == 1:
        ReferenceElasticBuffer.__init__ = lambda self, *args, **kwargs: (_ for _ in ()).throw(MemoryError("full"))
    checked_forward(layer, weights, rank, 0)
    return "a forward came back although a rank has no buffer"


def test_an_allocation_that_fails_on_one_rank_ends_all():
    outcomes = ranks(2, allocation_fails_on_one_rank)
    assert_survivor(outcomes[1], "MemoryError: full")
    assert_survivor(outcomes[0], *LOST_PEER)


def topk_output(batch):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return StandardTopKOutput(batch.weights, batch.ids, torch.zeros(batch.x.shape[0], SHAPE.experts))


def change_key_while_a_handle_lives(rank, world_size):
    """A model's handle is out when a layer of another width dispatches; the first one must still be combined right."""
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe.token_dispatcher.elastic_buffer import DeepEPv2Buffer

    wide_shape = Shape(hidden=512)
    (layer, weights), (wide, wide_weights) = build(rank), build(rank, wide_shape, seed=2)
    set_is_extend_in_batch(True)
    batch, other = Batch.make(SHAPE, 3, seed=rank), Batch.make(wide_shape, 2, seed=rank)
    dispatched = layer.dispatcher.dispatch(batch.x.clone(), topk_output(batch))
    buffer, refusals = DeepEPv2Buffer._state().buffer, []
    for _ in range(2):
        try:
            wide.dispatcher.dispatch(other.x.clone(), topk_output(other))
        except RuntimeError as error:
            refusals.append(str(error))
    assert DeepEPv2Buffer._state().buffer is buffer, "a refused change must leave the buffer alone"
    try:
        layer.dispatcher.dispatch(batch.x.clone(), topk_output(batch))
    except RuntimeError as error:
        refusals.append(str(error))
    combined = layer.dispatcher.combine(layer.run_moe_core(dispatched))
    error = moe_layer.relative_error(combined, moe_layer.truth(batch, weights))
    checked_forward(wide, wide_weights, rank, 5)
    checked_forward(layer, weights, rank, 6)
    return refusals, error


def test_a_key_change_is_refused_while_a_handle_is_live():
    for outcome in ranks(2, change_key_while_a_handle_lives):
        assert outcome.exit_code == 0, outcome.error
        refusals, error = outcome.value
        assert len(refusals) == 3
        for refusal in refusals[:2]:
            assert "1 dispatch handle(s)" in refusal and "256" in refusal and "512" in refusal
            assert "still wait for combine" in refusal
        assert "handle is unconsumed" in refusals[2]
        assert error < 0.01


def two_models(rank, world_size):
    """A target and a draft of another width in one process, turn by turn; a second draft shares the target's buffer."""
    from sglang.srt.layers.moe.token_dispatcher.elastic_buffer import DeepEPv2Buffer

    target, draft, twin = build(rank), build(rank, Shape(hidden=512), seed=2), build(rank, seed=3)
    seen = []
    for step in range(3):
        for layer, weights in (target, twin, draft):
            checked_forward(layer, weights, rank, step)
            seen.append(DeepEPv2Buffer._state().buffer)
    shared = [seen[i] is seen[i + 1] for i in (0, 3, 6)]
    rebuilt = [seen[i] is not seen[i + 1] for i in (1, 2, 4, 5, 7)]
    return shared, rebuilt


def test_a_second_model_in_the_process_computes_right():
    for outcome in ranks(2, two_models):
        assert outcome.exit_code == 0, outcome.error
        assert outcome.value == ([True] * 3, [True] * 5)


# between dispatch and combine, and after a failure


def raise_between_dispatch_and_combine(rank, world_size):
    from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmRunnerCore

    layer, weights = build(rank)
    run, errors = DeepGemmRunnerCore.run, []

    def broken(*args, **kwargs):
        raise RuntimeError("illegal memory access in the grouped GEMM")

    DeepGemmRunnerCore.run = broken
    for _ in range(2):
        try:
            checked_forward(layer, weights, rank, 0)
        except RuntimeError as error:
            errors.append(str(error))
    DeepGemmRunnerCore.run = run
    return errors


def test_an_exception_between_dispatch_and_combine_is_not_forgotten():
    """The rows of the broken forward are still on their way: the next forward must not take them for its own."""
    for outcome in ranks(2, raise_between_dispatch_and_combine):
        assert outcome.exit_code == 0, outcome.error
        first, second = outcome.value
        assert first == "illegal memory access in the grouped GEMM"
        assert "handle is unconsumed" in second


def healthy(rank, world_size):
    layer, weights = build(rank)
    return [checked_forward(layer, weights, rank, step) for step in range(3)]


def test_ranks_started_again_after_a_failure_work():
    outcomes = ranks(2, die_inside, "dispatch", 0)
    assert outcomes[0].exit_code == -signal.SIGKILL
    assert_survivor(outcomes[1], *LOST_PEER)
    for outcome in ranks(2, healthy, env=LABELS):
        assert outcome.exit_code == 0, outcome.error
        assert len(outcome.value) == 3
