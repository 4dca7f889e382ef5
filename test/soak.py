"""Thousands of random MoE layers over gloo ranks: every output checked, memory flat, no hang.

    python test/soak.py [--layers 2000] [--ranks 4] [--seed 0]

Each layer draws its sizes, routing, router weights and path (non-expanded, labels, psum, psum without host sync), and
how many tokens every rank has; ranks fall idle and come back. A batch of layers runs in the ranks between two
checkpoints, which print progress and the resident memory. Exits 1 at the first wrong output, the first batch that does
not come back in time, or when memory grew by more than ``MEMORY_LIMIT_MIB`` after the warm-up.
"""

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "srt"))

import layer_cases
from layer_cases import Case, check_case
from moe_layer import Shape
from rank_processes import RankPool

BATCH = 50
# Layers before memory is first noted: every shape has been built and every allocator has its arenas by then.
WARM_UP = 300
MEMORY_LIMIT_MIB = 20
# A collective that waits longer has lost a rank; a batch that takes longer hangs, even on a busy machine.
GROUP_TIMEOUT_S, BATCH_TIMEOUT_S = 120, 600
SHAPES = tuple(Shape(experts=experts, topk=topk) for experts, topk in ((8, 2), (8, 5), (16, 8), (32, 4)))
PATHS = ("nonexpanded", "labels", "psum", "psum_sync_free")


def draw(chooser: random.Random, ranks: int) -> tuple[Case, str]:
    """A layer and the path it takes; FP8 keeps to the psum pipelines, whose kernels are fast when interpreted."""
    fp8 = chooser.random() < 0.4
    path = chooser.choice(PATHS[2:] if fp8 and chooser.random() < 0.9 else PATHS)
    idle = chooser.choice((0.0, 0.25, 0.75))
    return Case(
        shape=chooser.choice(SHAPES),
        fp8=fp8,
        alignment=128,
        tokens=tuple(0 if chooser.random() < idle else chooser.randint(1, 12) for _ in range(ranks)),
        drop=chooser.choice((0.0, 0.2, 0.9)),
        routing=chooser.choice(("spread", "one_expert", "one_rank")),
        weights=chooser.choice(("plain", "signed", "zeros", "tiny", "large")),
        seed=chooser.randrange(1 << 20),
    ), path


def run_batch(rank: int, world_size: int, layers: list[tuple[Case, str]]) -> tuple[float, float]:
    """Runs layers one after another; the largest relative error and the resident memory in MiB afterwards."""
    worst = max(check_case(rank, world_size, case, (path,)) for case, path in layers)
    return worst, layer_cases.resident_mib()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chooser, started, before = random.Random(options.seed), time.monotonic(), None
    done, worst = 0, 0.0
    with RankPool(options.ranks, group_timeout_s=GROUP_TIMEOUT_S, answer_timeout_s=BATCH_TIMEOUT_S) as pool:
        while done < options.layers:
            layers = [draw(chooser, options.ranks) for _ in range(min(BATCH, options.layers - done))]
            try:
                answers = pool.run(run_batch, layers)
            except AssertionError as error:
                print(f"FAILED within layers {done}..{done + len(layers)} of seed {options.seed}:\n{error}")
                return 1
            done += len(layers)
            worst = max(worst, *(error for error, _ in answers))
            memory = max(mib for _, mib in answers)
            before = memory if before is None and done >= WARM_UP else before
            growth = memory - before if before is not None else 0.0
            took = time.monotonic() - started
            print(f"{done:6} layers {took:7.1f} s  worst {worst:.4f}  {memory:7.1f} MiB ({growth:+.1f})", flush=True)
            if growth > MEMORY_LIMIT_MIB:
                print(f"FAILED: memory grew by {growth:.1f} MiB, limit {MEMORY_LIMIT_MIB}")
                return 1
    print(f"ok: {done} layers on {options.ranks} ranks, largest relative error {worst:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
