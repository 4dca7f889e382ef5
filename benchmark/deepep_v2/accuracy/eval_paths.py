"""Exact-match accuracy and logprob differences of every prefill path, through real SGLang servers.

    python3 benchmark/deepep_v2/accuracy/eval_paths.py --model /opt/arithmetic-moe/fp8

Serves the checkpoint of train_arithmetic_moe.py once a path, answers the held-out problems greedily, and scores the
true solutions token by token (teacher forcing). Appends one record a path to ``--out``/accuracy.jsonl: ``path``,
``correct`` (right greedy answers; the prompt is prefilled, the answer decoded), ``correct_prefill`` (solutions of which
prefill alone, given the true tokens before, ranks every token first), ``total``, ``logprob_diff_p50``,
``logprob_diff_p99`` (absolute differences to the first path's logprobs), ``ep`` and where it was measured.
The path ``psum_broken_fold`` serves with a fault planted from outside; it has to lose at least 20 points of both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import problems
import records

from sglang_deepep_v2.ab.paths import PATHS
from sglang_deepep_v2.ab.servers import (
    Fleet,
    Server,
    ServeSettings,
    check_prefill_lines,
    interrupt_on_sigterm,
    read_prefill_lines,
)
from sglang_deepep_v2.provenance import stamp

HERE = Path(__file__).resolve().parent
FIELDS = (
    "path",
    "correct",
    "correct_prefill",
    "total",
    "logprob_diff_p50",
    "logprob_diff_p99",
    "ep",
    "gpu",
    "versions",
    "commit",
    "date",
)
BROKEN = "psum_broken_fold"
# The demo's negative control serves here too.
PLANTED_FAULT = HERE.parents[2] / "test" / "demo_break" / "fold"
LEAST_DROP_POINTS = 20.0
DEFAULT_PATHS = ("nonexpanded", "labels", "psum", "psum_sync_free", "sglang_nonexpanded", "sglang_expanded", BROKEN)
GPU_ARGUMENTS = (
    "--attention-backend triton --sampling-backend pytorch --grammar-backend none --disable-cuda-graph "
    "--mem-fraction-static 0.4 --max-total-tokens 200000 --context-length 1024 --max-running-requests 512"
)


def answers(server: Server, tests: list[problems.Problem], timeout_s: float) -> list[int | None]:
    """The greedy answer to each problem."""
    limit = max(len(test.solution) for test in tests) + 4
    body = {
        "input_ids": [test.prompt_ids() for test in tests],
        "sampling_params": {"temperature": 0, "max_new_tokens": limit, "stop_token_ids": [problems.EOS]},
    }
    replies = server.post("/generate", body, timeout_s)
    return [problems.read_answer_text(reply["text"]) for reply in replies]


def score_solutions(server: Server, tests: list[problems.Problem], timeout_s: float) -> tuple[int, list[float]]:
    """Solutions whose every token is ranked first, and the logprob of every token, given the true tokens before it."""
    body = {
        "input_ids": [test.prompt_ids() + test.solution_ids() for test in tests],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
    }
    ranked_first, found = 0, []
    for test, reply in zip(tests, server.post("/generate", body, timeout_s)):
        wanted, meta = test.solution_ids(), reply["meta_info"]
        found += [entry[0] for entry in meta["input_token_logprobs"][-len(wanted) :]]
        ranked_first += [best[0][1] for best in meta["input_top_logprobs"][-len(wanted) :]] == wanted
    return ranked_first, found


def quantiles(reference: list[float], other: list[float]) -> tuple[float, float]:
    """(p50, p99) of the absolute differences. Raises ValueError when the lists have different lengths."""
    if len(reference) != len(other):
        raise ValueError(f"{len(other)} logprobs, the reference has {len(reference)}")
    differences = sorted(abs(a - b) for a, b in zip(reference, other))
    return statistics.median(differences), differences[min(len(differences) - 1, int(0.99 * len(differences)))]


class Outcome(NamedTuple):
    """What one path's server answered: right answers, solutions ranked first by prefill, their tokens' logprobs."""

    correct: int
    correct_prefill: int
    logprobs: list[float]
    seconds: float


def evaluate(name: str, args: argparse.Namespace, tests: list[problems.Problem], fleet: Fleet) -> Outcome:
    """Serve one path and ask it every problem.

    Raises:
        ServerFailed: the server did not start or answer.
        RuntimeError: a rank ran another path than the one asked for, or the fault was not planted.
        TimeoutError: the time budget is spent before the server starts.
    """
    begin = time.monotonic()
    if begin > args.deadline:
        raise TimeoutError(f"not started: the time budget of {args.time_budget:.0f} s is spent")
    path = PATHS["psum" if name == BROKEN else name]
    settings = ServeSettings(
        model=str(args.model),
        tp=args.tp,
        chunk=args.chunk,
        cpu=args.device == "cpu",
        extra_args=() if args.device == "cpu" else tuple(GPU_ARGUMENTS.split()),
        pythonpath=(str(PLANTED_FAULT),) if name == BROKEN else (),
        ready_timeout_s=args.timeout,
    )
    # Sync-free prefill falls back by free memory unless a limit is set.
    path = replace(path, env={**path.env, "SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES": str(32 << 30)})
    log = args.logs / f"{name}.log"
    with fleet.run_server(path, settings, log) as server:
        correct_prefill, logprobs = score_solutions(server, tests, args.timeout)
        given = answers(server, tests, args.timeout)
    wrong_path = check_prefill_lines(path, read_prefill_lines(log), args.tp)
    if wrong_path:
        raise RuntimeError(f"{name}: {wrong_path}; log: {log}")
    if name == BROKEN and "broken fold" not in log.read_text(errors="replace"):
        raise RuntimeError(f"{name}: the fault was not planted; log: {log}")
    correct = sum(answer == test.answer for answer, test in zip(given, tests))
    return Outcome(correct, correct_prefill, logprobs, time.monotonic() - begin)


def record_all(args: argparse.Namespace, finished: dict[str, Outcome], total: int) -> None:
    """Write and print the paths that finished, in the order asked for.

    Logprobs are compared with the first of them.
    """
    rows = [["path", "correct", "%", "by prefill", "%", "total", "logprob diff p50", "p99", "seconds"]]
    # One date for all paths: what lies apart in time is read as two runs.
    origin, reference = stamp(), None
    for name in (name for name in args.paths if name in finished):
        correct, correct_prefill, logprobs, seconds = finished[name]
        reference = reference or logprobs
        p50, p99 = quantiles(reference, logprobs)
        record = dict(zip(FIELDS, (name, correct, correct_prefill, total, p50, p99, args.tp))) | origin
        records.append(args.out / "accuracy.jsonl", [records.validate(record, FIELDS)])
        counts = (
            f"{figure}" for count in (correct, correct_prefill) for figure in (count, f"{100 * count / total:.2f}")
        )
        rows.append([name, *counts, str(total), f"{p50:.5f}", f"{p99:.5f}", f"{seconds:.0f}"])
    print(records.align(rows), flush=True)


def print_drop(finished: dict[str, Outcome], total: int) -> None:
    """Whether the planted fault loses as much as it has to."""
    if BROKEN not in finished or "psum" not in finished:
        return
    for what in ("correct", "correct_prefill"):
        drop = 100 * (getattr(finished["psum"], what) - getattr(finished[BROKEN], what)) / total
        verdict = "ok" if drop >= LEAST_DROP_POINTS else "MISS"
        print(
            f"{what}: broken fold loses {drop:.1f} points, at least {LEAST_DROP_POINTS:.0f} wanted: {verdict}",
            flush=True,
        )


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    os.environ.setdefault("EP_DISABLE_GIN", "1")
    training = json.loads((args.model.parent / "train.json").read_text()) if args.with_training else {}
    tests = problems.held_out(max_value=args.max_value)[: args.limit]
    args.deadline = time.monotonic() + args.time_budget
    finished: dict[str, Outcome] = {}
    failed = []
    fleet = Fleet()
    try:
        with ThreadPoolExecutor(args.parallel) as pool:
            jobs = {pool.submit(evaluate, name, args, tests, fleet): name for name in args.paths}
            try:
                for job in as_completed(jobs):
                    name = jobs[job]
                    try:
                        finished[name] = job.result()
                    except Exception as error:
                        failed.append(name)
                        print(f"-- {name} failed: {type(error).__name__}: {error}", flush=True)
                        continue
                    print(
                        f"{name}: {finished[name].correct} of {len(tests)}, {finished[name].seconds:.0f} s", flush=True
                    )
            finally:
                fleet.close()
                for job in jobs:
                    job.cancel()
    finally:
        # An interrupted run keeps what it has.
        record_all(args, finished, len(tests))
    if training:
        print(
            f"plain PyTorch: {training.get('accuracy_bf16')} before, {training.get('accuracy_fp8_experts')} after FP8"
        )
    print_drop(finished, len(tests))
    return 1 if failed or not finished else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder with FP8 experts")
    parser.add_argument("--paths", nargs="+", choices=(*PATHS, BROKEN), default=list(DEFAULT_PATHS), metavar="PATH")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=8192, help="tokens per prefill chunk")
    parser.add_argument("--limit", type=int, default=problems.NUM_HELD_OUT, help="problems to answer")
    parser.add_argument("--max-value", type=int, default=problems.MAX_VALUE, help="as in training")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parallel", type=int, default=3, help="servers that run at once on the device")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results")
    parser.add_argument("--logs", type=Path, default=Path("accuracy-logs"))
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a server's start and for each request")
    parser.add_argument("--time-budget", type=float, default=1800, help="seconds after which no path starts")
    args = parser.parse_args(arguments)
    args.with_training = (args.model.parent / "train.json").is_file()
    return args


if __name__ == "__main__":
    with interrupt_on_sigterm():
        sys.exit(run(parse()))
