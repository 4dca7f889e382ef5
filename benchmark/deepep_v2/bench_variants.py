"""Measures what might make the layer faster still, so that the documentation can say what pays and what does not.

    python3 benchmark/deepep_v2/bench_variants.py --tokens 512 2304 8192
    python3 benchmark/deepep_v2/bench_variants.py --only swiglu_tiles              # the activation kernel's tile sweep
    python3 benchmark/deepep_v2/bench_variants.py --ep 2 --only multiple_reduction combine_bias

Appends one record a row to ``--out``/variants.jsonl and prints a table for each measurement.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bench_layer
import records
import shapes

from sglang_deepep_v2.provenance import commit, now

NAMES = (
    "multiple_reduction",
    "combine_bias",
    "half_batches",
    "gemm_options",
    "row_alignment",
    "scale_layout",
    "activation_order",
    "communication_sms",
    "swiglu_tiles",
)


def run(args: argparse.Namespace) -> int:
    deadline, done = time.monotonic() + args.time_budget, 0
    shape = shapes.named(args.shape, args.local_experts)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shapes.write_model_config(folder / "model")
        side = bench_layer.Side("patch", args, folder)
        try:
            meta = side.ask("start", 300, max_tokens=max(args.tokens))[0]
            meta = {"gpu": meta["gpu"], "commit": commit(), "versions": meta["versions"]}
            fields = ("hidden", "intermediate", "local_experts", "topk")
            side.ask("shape", **{field: getattr(shape, field) for field in fields})
            side.ask("copy_bandwidth", megabytes=1024 if args.device == "cuda" else 8)
            for tokens in args.tokens:
                # No path of the layer: the variants build what they need.
                side.ask("prepare", tokens=tokens, wanted=[])
                for name in args.only:
                    if time.monotonic() > deadline:
                        print(f"-- skipped {name} at {tokens} tokens: the time budget is spent", flush=True)
                        continue
                    try:
                        answers = side.ask("variant", 300, name=name)
                    except Exception as error:
                        known = isinstance(error, bench_layer.WorkerError)
                        print(
                            f"-- {name} at {tokens} tokens failed\n{error if known else traceback.format_exc()}",
                            flush=True,
                        )
                        if not side.alive():
                            return 1
                        continue
                    rows = slowest([answer["rows"] for answer in answers])
                    print(
                        f"\n== {name}, {shape.label}, {tokens} tokens per rank, ep {args.ep}\n{table(rows)}", flush=True
                    )
                    base = {"name": name, "tokens": tokens, "ep": args.ep, **{f: getattr(shape, f) for f in fields}}
                    records.append(args.out / "variants.jsonl", [base | row | meta | {"date": now()} for row in rows])
                    done += 1
        finally:
            side.stop()
    return 0 if done else 1


def slowest(by_rank: list[list[dict]]) -> list[dict]:
    """The rows of rank 0, each with the slowest rank's time for the same variant."""
    rows = []
    for row in by_rank[0]:
        same = [r["us"] for rank in by_rank for r in rank if r["variant"] == row["variant"] and r["us"] is not None]
        rows.append(row | {"us": max(same) if same else None})
    return rows


def table(rows: list[dict]) -> str:
    """Aligned rows: variant, what, us, and whatever figures the rows carry."""
    extra = list(dict.fromkeys(key for row in rows for key in row if key not in ("variant", "what", "us")))
    lines = [["variant", "what", "us", *extra]]
    for row in rows:
        time_us = "-" if row["us"] is None else f"{row['us']:.1f}"
        figures = [row.get(key) for key in extra]
        text = ["" if f is None else f"{f:.4g}" if isinstance(f, float) else str(f) for f in figures]
        lines.append([row["variant"], row["what"], time_us, *text])
    return records.align(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2304, 8192], help="tokens per rank")
    parser.add_argument("--shape", choices=list(shapes.WIDTHS), default="seed")
    parser.add_argument("--local-experts", type=int, default=16)
    parser.add_argument("--ep", type=int, default=1, help="ranks, one GPU each")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=bench_layer.HERE / "results")
    parser.add_argument("--time-budget", type=float, default=600)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run(parse()))
