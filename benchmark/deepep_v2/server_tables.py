"""The documentation's tables of whole servers: throughput, the MoE layer's share, agreement and accuracy."""

from __future__ import annotations

import statistics

import seed_claims
from table_format import markdown, missing, span


def server(data: seed_claims.Data) -> str:
    if not data.server:
        return missing("sglang-deepep-v2 ab --model random:qwen3-moe-fp8 --prompt-len 1024,8192,32768")
    blocks = []
    for model, ep in dict.fromkeys((row["model"], row["ep"]) for row in data.server):
        of_model = [row for row in data.server if (row["model"], row["ep"]) == (model, ep)]
        lengths = sorted({row["prompt_len"] for row in of_model})
        paths = list(dict.fromkeys(row["path"] for row in of_model))
        by_key = {(row["path"], row["prompt_len"]): row for row in of_model}
        first = paths[0]
        rows = [["input tok/s: median (min-max), against the first", *(f"prompts of {length}" for length in lengths)]]
        for path in paths:
            cells = []
            for length in lengths:
                row, base = by_key.get((path, length)), by_key.get((first, length))
                if row is None:
                    cells.append("-")
                    continue
                low, high = row["input_tok_s_min"], row["input_tok_s_max"]
                gain = f", {row['input_tok_s_median'] / base['input_tok_s_median'] - 1:+.1%}" if base else ""
                cells.append(f"{row['input_tok_s_median']:.0f} ({low:.0f}-{high:.0f}){'' if path == first else gain}")
            rows.append([f"`{path}`", *cells])
        rounds = span(row["rounds"] for row in of_model)
        blocks.append(f"{model}, EP{ep}, {rounds} alternating rounds:\n\n{markdown(rows)}")
    return "\n\n".join(blocks)


def server_profile(data: seed_claims.Data) -> str:
    if not data.server_profile:
        return missing("python3 benchmark/deepep_v2/server_profile.py --model random:qwen3-moe-fp8")
    heads = (
        "path",
        "MoE layer us",
        "of it GPU busy us",
        "MoE of wall time",
        "of busy time",
        "attention",
        "dense",
        "other",
    )
    shares = ("moe_share_wall", "moe_share_busy", "attention_share", "dense_share", "other_share")
    runs: dict[tuple, list[list[str]]] = {}
    for row in data.server_profile:
        rows = runs.setdefault((row["model"], row["ep"], row["prompt_len"], row["commit"]), [list(heads)])
        times = (f"{row['moe_span_us']:.0f}", f"{row['moe_busy_us']:.0f}")
        rows.append([f"`{row['path']}`", *times, *(f"{row[share]:.1%}" for share in shares)])
    return "\n\n".join(
        f"{model}, EP{ep}, prompts of {length} tokens, commit {commit}; the last four columns divide the GPU's busy "
        f"time:\n\n{markdown(rows)}"
        for (model, ep, length, commit), rows in runs.items()
    )


def agreement(data: seed_claims.Data) -> str:
    if not data.agreement:
        return missing("sglang-deepep-v2 ab --model random:qwen3-moe-fp8")
    rows = [["model", "EP", "attention", "path", "against", "same greedy", "logprob difference", "largest", "verdict"]]
    for row in data.agreement:
        spread = "data parallel" if _DP_ATTENTION & set(row["server_args"].split()) else "tensor parallel"
        rows.append(
            [
                row["model"],
                str(row["ep"]),
                "-" if row["ep"] == 1 else spread,
                f"`{row['path']}`",
                f"`{row['baseline']}`",
                f"{row['greedy_equal']} of {row['prompts']}",
                f"{row['median']:.4f}",
                f"{row['largest']:.2f}",
                "agrees" if row["passed"] else "differs",
            ]
        )
    return markdown(rows, left=5)


_DP_ATTENTION = {"--enable-dp-attention", "--attn-dp-size"}


def wilson(correct: int, total: int, z: float = statistics.NormalDist().inv_cdf(0.975)) -> tuple[float, float]:
    """Wilson's interval of a share."""
    share, square = correct / total, z * z / total
    centre = (share + square / 2) / (1 + square)
    half = z * ((share * (1 - share) / total + square / total / 4) ** 0.5) / (1 + square)
    return max(0.0, centre - half), min(1.0, centre + half)


def accuracy(data: seed_claims.Data) -> str:
    if not data.accuracy:
        return missing("python3 benchmark/deepep_v2/accuracy/eval_paths.py --model DIR/fp8")
    heads = (
        "path",
        "correct",
        "of",
        "exact match",
        "95 % interval",
        "by prefill alone",
        "logprob difference p50",
        "p99",
    )
    runs: dict[tuple, list[list[str]]] = {}
    for row in data.accuracy:
        rows = runs.setdefault((row["ep"], row["date"]), [list(heads)])
        low, high = wilson(row["correct"], row["total"])
        rows.append(
            [
                f"`{row['path']}`",
                str(row["correct"]),
                str(row["total"]),
                f"{row['correct'] / row['total']:.2%}",
                f"{low:.1%}-{high:.1%}",
                f"{row['correct_prefill'] / row['total']:.2%}" if "correct_prefill" in row else "-",
                f"{row['logprob_diff_p50']:.1e}",
                f"{row['logprob_diff_p99']:.1e}",
            ]
        )
    return "\n\n".join(
        f"EP{ep}, {date[:16].replace('T', ' ')} UTC:\n\n{markdown(rows)}" for (ep, date), rows in runs.items()
    )


def answers(data: seed_claims.Data) -> str:
    """Accuracy in short: a row each path, of every run the share answered right, of the newest also prefill's own."""
    if not data.accuracy:
        return missing("python3 benchmark/deepep_v2/accuracy/eval_paths.py --model DIR/fp8")
    runs: dict[tuple, dict[str, dict]] = {}
    for row in data.accuracy:
        runs.setdefault((row["ep"], row["date"]), {})[row["path"]] = row
    newest = list(runs.values())[-1]
    heads = [f"EP{ep}, {date[:16].replace('T', ' ')}" for ep, date in runs]
    rows = [["path", *heads, "the last by prefill alone"]]
    for path in dict.fromkeys(row["path"] for row in data.accuracy):
        of_path = [run.get(path) for run in runs.values()]
        cells = [f"{row['correct']} of {row['total']}" if row else "-" for row in of_path]
        prefill = newest.get(path, {}).get("correct_prefill")
        rows.append([f"`{path}`", *cells, "-" if prefill is None else f"{prefill} of {newest[path]['total']}"])
    return markdown(rows)
