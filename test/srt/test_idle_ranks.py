"""An idle rank among two and eight: it joins, contributes nothing, and changes no bit of what the others compute."""

import pytest
import torch

import moe_layer
from moe_layer import PATHS, Batch, Shape, Weights
from rank_processes import run_ranks

SHAPE = Shape(experts=16, topk=4)
TOKENS = 5


def outputs(rank, world_size, idle):
    """Outputs of this rank by path: with every rank at work, then with the ranks of ``idle`` out of tokens, twice."""
    weights = Weights.make(SHAPE, fp8=False)
    busy = Batch.make(SHAPE, TOKENS + rank, seed=rank)
    resting = Batch(busy.x[:0], busy.ids[:0], busy.weights[:0]) if rank in idle else busy
    exact = moe_layer.truth(busy, weights)
    seen = {}
    for path, environment in PATHS.items():
        with moe_layer.variables(**environment):
            layer = moe_layer.build_layer(SHAPE, weights, rank)
            seen[path] = [moe_layer.forward(layer, batch).float().numpy() for batch in (busy, resting, resting, busy)]
        assert moe_layer.relative_error(torch.tensor(seen[path][0]), exact) < 0.01
    return seen


@pytest.mark.parametrize(("world_size", "idle"), [(2, (1,)), (8, (0, 3, 7))], ids=["ep2", "ep8"])
def test_r2_idle_ranks_change_no_bit(world_size, idle):
    for rank, seen_by_path in enumerate(run_ranks(world_size, outputs, idle)):
        for path, seen in seen_by_path.items():
            everyone, first, again, back = map(torch.tensor, seen)
            assert torch.equal(back, everyone), path
            if rank in idle:
                assert first.shape == again.shape == (0, SHAPE.hidden), path
            else:
                assert torch.equal(first, everyone) and torch.equal(again, everyone), (rank, path)
        # Without a host sync an idle rank sends no dummy token, and the other ranks' rows are the same all the same.
        assert torch.equal(torch.tensor(seen_by_path["psum"][1]), torch.tensor(seen_by_path["psum_sync_free"][1]))
