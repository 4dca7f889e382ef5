"""Times one dispatch and one combine of the reference transport; prints one line, appends one JSONL record on request.

    python benchmark/deepep_v2/bench_reference_transport.py
    python benchmark/deepep_v2/bench_reference_transport.py --ranks 4 --tokens 1024 --dtype bf16 --out reference.jsonl
    python benchmark/deepep_v2/bench_reference_transport.py --device cuda --ranks 2

The default is 4096 tokens x 2048 per rank at EP2, top-8 of 128 experts, FP8 dispatch with column-major scales, one core
a rank. A round's time is that of its slowest rank; the line gives the median and the best round. `--limit` turns the
best round into the exit code: other work on the machine slows rounds down, none speeds them up.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from sglang_deepep_v2.cpu_reference.elastic_buffer import ReferenceElasticBuffer  # noqa: E402
from sglang_deepep_v2.provenance import now  # noqa: E402


def run_rank(rank: int, args: argparse.Namespace, port: int, times) -> None:
    """Time `args.rounds` rounds on one rank into `times` [rank, round, (dispatch, combine)], in seconds."""
    torch.set_num_threads(1)
    cuda = args.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.ranks
    )
    group = dist.group.WORLD
    gen = torch.Generator().manual_seed(rank)
    x = torch.randn((args.tokens, args.hidden), generator=gen).bfloat16().to(args.device)
    topk_idx = torch.rand((args.tokens, args.experts), generator=gen).topk(args.topk, dim=1).indices.to(args.device)
    weights = torch.rand((args.tokens, args.topk), generator=gen).to(args.device)
    scales = torch.rand((args.tokens, args.hidden // 128), generator=gen).to(args.device)
    sent = (x.to(torch.float8_e4m3fn), scales) if args.dtype == "fp8" else x
    buffer = ReferenceElasticBuffer(
        group, num_max_tokens_per_rank=args.tokens, hidden=args.hidden, num_topk=args.topk, use_fp8_dispatch=True
    )

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    for index in range(args.rounds + args.warmup):
        dist.barrier()
        started = now()
        received, _, received_weights, handle, _ = buffer.dispatch(
            sent,
            topk_idx=topk_idx,
            topk_weights=weights,
            num_experts=args.experts,
            expert_alignment=128,
            do_expand=not args.plain,
            use_tma_aligned_col_major_sf=True,
        )
        dispatched = now() - started
        rows = (received[0] if isinstance(received, tuple) else received).to(torch.bfloat16)
        dist.barrier()
        started = now()
        buffer.combine(rows, handle=handle, topk_weights=received_weights)
        if index >= args.warmup:
            times[rank, index - args.warmup] = torch.tensor([dispatched, now() - started], dtype=torch.float64)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per rank")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--dtype", choices=("fp8", "bf16"), default="fp8", help="of the dispatched activations")
    parser.add_argument("--plain", action="store_true", help="one row per token instead of one per (token, expert)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--limit", type=float, help="exit 1 when the best round takes longer than this, seconds")
    parser.add_argument("--out", type=Path, help="append one JSONL record here")
    args = parser.parse_args()

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    times = torch.zeros((args.ranks, args.rounds, 2), dtype=torch.float64).share_memory_()
    mp.spawn(run_rank, (args, port, times), nprocs=args.ranks)
    rounds = times.max(dim=0).values
    dispatch, combine = (statistics.median(part) for part in rounds.t().tolist())
    total = rounds.sum(dim=1).tolist()
    layout = "plain" if args.plain else "expanded"
    print(
        f"EP{args.ranks} {args.device} {layout} {args.dtype} {args.tokens} tokens x {args.hidden} "
        f"top-{args.topk} of {args.experts} | dispatch {dispatch * 1e3:.0f} ms | combine {combine * 1e3:.0f} ms | "
        f"both {statistics.median(total) * 1e3:.0f} ms, best {min(total) * 1e3:.0f} ms of {args.rounds} rounds"
    )
    if args.out:
        record = {
            **{key: getattr(args, key) for key in ("ranks", "tokens", "hidden", "experts", "topk", "dtype", "device")},
            "layout": layout,
            "rounds": args.rounds,
            "dispatch_s": dispatch,
            "combine_s": combine,
            "both_s": statistics.median(total),
            "best_s": min(total),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "date": now(),
        }
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
    return int(args.limit is not None and min(total) > args.limit)


if __name__ == "__main__":
    raise SystemExit(main())
