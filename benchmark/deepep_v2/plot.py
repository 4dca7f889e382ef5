"""PNGs of the layer benchmark's records: time per layer stacked by kernel, speed-up over tokens, kernel timelines.

    python3 benchmark/deepep_v2/plot.py --results benchmark/deepep_v2/results --out docs/figures

Needs matplotlib. Reads ``layer.jsonl``, ``profile.jsonl``, ``detail.jsonl``, ``timeline.jsonl``; a figure whose records
are missing is left out. Kernels are drawn for the shape that the ratios are set for, or without it for the last shape.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import profiling
import records

LAYER_ORDER = (
    "sglang_nonexpanded",
    "sglang_expanded",
    "nonexpanded",
    "labels",
    "psum",
    "psum_sync_free",
    "mega_moe",
    "deepep_alone",
    "deepep_alone_sync_free",
)
# Part of the layer -> colour; the waiting is drawn last and hatched.
COLOURS = {
    "quantise": "#8c8c8c",
    "dispatch": "#4c78a8",
    "GEMM w13": "#54a24b",
    "activation": "#e45756",
    "GEMM w2": "#9ecb8c",
    "combine": "#72b7b2",
    "row moves": "#f58518",
    "scales and labels": "#eeca3b",
    "copies and fills": "#b279a2",
    "mega MoE": "#9d755d",
    "other": "#d8b5a5",
}


def chosen_layer(rows: list[dict], ep: int) -> list[dict]:
    """The records of one shape at ``ep`` ranks: the one that the ratios are set for if present, else the last one."""
    rows = [r for r in rows if r["ep"] == ep]
    fields = ("hidden", "intermediate", "local_experts")
    target = tuple(records.TARGET[f] for f in fields)
    shapes = [tuple(r[f] for f in fields) for r in rows]
    wanted = target if target in shapes else shapes[-1] if shapes else None
    return [r for r, shape in zip(rows, shapes) if shape == wanted]


def stacks(profile: list[dict], tokens: int) -> dict[str, dict[str, float]]:
    """path -> part of the layer -> us per layer, from the last profile of each path at ``tokens`` tokens.

    ``profile.jsonl`` is appended to by every run: a path's kernels that come again start its newest profile.
    """
    newest: dict[str, dict[str, float]] = {}
    for record in profile:
        if record["tokens"] != tokens:
            continue
        kernels = newest.setdefault(record["path"], {})
        if record["kernel"] in kernels:
            kernels.clear()
        kernels[record["kernel"]] = record["us"]
    parts: dict[str, dict[str, float]] = {}
    for path, kernels in newest.items():
        for kernel, us in kernels.items():
            part = profiling.category(kernel)
            parts.setdefault(path, {})[part] = parts.get(path, {}).get(part, 0.0) + us
    return parts


def waits(detail: list[dict], tokens: int) -> dict[str, float]:
    """path -> us per layer in which the GPU waits (wall time without a profiler minus its kernels), last record."""
    return {
        r["path"]: max(0.0, r["waiting_us"]) for r in detail if r["tokens"] == tokens and r["waiting_us"] is not None
    }


def speedups(layer: list[dict]) -> dict[tuple, dict[str, list[tuple[int, float]]]]:
    """shape -> "slower / ours" -> [(tokens, ratio of medians)] in order of tokens."""
    found: dict[tuple, dict[str, list[tuple[int, float]]]] = {}
    for shape, by_tokens in records.groups(layer):
        series = found.setdefault(tuple(shape.values()), {})
        for name, tokens, ratio, _ in records.ratio_rows(shape, by_tokens):
            series.setdefault(name, []).append((tokens, ratio))
    return {shape: series for shape, series in found.items() if series}


def _ordered(paths) -> list[str]:
    return [path for path in LAYER_ORDER if path in paths]


def draw_stacks(plt, profile: list[dict], detail: list[dict], tokens: int, file: Path) -> bool:
    """Horizontal bars: one a path, its kernels by part of the layer, then the waiting."""
    parts, waiting = stacks(profile, tokens), waits(detail, tokens)
    paths = _ordered(parts)
    if not paths:
        return False
    figure, axes = plt.subplots(figsize=(10, 0.55 * len(paths) + 1.8))
    left = dict.fromkeys(paths, 0.0)
    for part, colour in COLOURS.items():
        widths = [parts[path].get(part, 0.0) for path in paths]
        if any(widths):
            axes.barh(paths, widths, left=[left[path] for path in paths], color=colour, label=part)
            left = {path: left[path] + width for path, width in zip(paths, widths)}
    idle = [waiting.get(path, 0.0) for path in paths]
    if any(idle):
        starts = [left[path] for path in paths]
        axes.barh(paths, idle, left=starts, color="white", edgecolor="#888888", hatch="////", label="GPU waits")
    for path, wait in zip(paths, idle):
        axes.text(left[path] + wait, path, f" {left[path] + wait:.0f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("us per MoE layer")
    axes.set_title(f"One MoE layer by kernel, {tokens} tokens per rank")
    axes.legend(fontsize=7, ncol=4, loc="upper center", bbox_to_anchor=(0.5, -0.25 if len(paths) < 6 else -0.14))
    _save(plt, figure, file)
    return True


def draw_speedups(plt, layer: list[dict], file: Path) -> bool:
    """Ratios of medians over tokens, one panel a shape; one size alone is no curve."""
    found = {shape: series for shape, series in speedups(layer).items() if any(len(p) > 1 for p in series.values())}
    if not found:
        return False
    shapes = list(found)
    columns = min(3, len(shapes))
    rows = -(-len(shapes) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.8 * rows), squeeze=False)
    for axes in grid.flat[len(shapes) :]:
        axes.axis("off")
    for axes, shape in zip(grid.flat, shapes):
        for name, points in found[shape].items():
            points.sort()
            axes.plot(*zip(*points), marker="o", markersize=3, label=name)
        axes.axhline(1.0, color="#888888", linewidth=0.8)
        axes.set_xscale("log", base=2)
        ticks = sorted({tokens for points in found[shape].values() for tokens, _ in points})
        axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=7, rotation=45)
        axes.minorticks_off()
        ep, hidden, intermediate, local_experts, topk, gpu = shape
        axes.set_title(
            f"{gpu}, EP{ep}: H {hidden}, I {intermediate}, {local_experts} local experts, top-{topk}", fontsize=8
        )
        axes.set_xlabel("tokens per rank", fontsize=8)
        axes.set_ylabel("speed-up", fontsize=8)
    lines, names = grid.flat[0].get_legend_handles_labels()
    figure.legend(lines, names, fontsize=8, ncol=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    _save(plt, figure, file)
    return True


def draw_timeline(plt, timeline: list[dict], tokens: int, file: Path) -> bool:
    """One layer's kernels over time, a row a path, from real profiles."""
    newest = {r["path"]: r["kernels"] for r in timeline if r["tokens"] == tokens and r["kernels"]}
    paths = _ordered(newest)
    if not paths:
        return False
    figure, axes = plt.subplots(figsize=(12, 0.7 * len(paths) + 1.8))
    used = {}
    for row, path in enumerate(paths):
        for kernel in newest[path]:
            part = profiling.category(kernel["kernel"])
            used[part] = axes.barh(
                row,
                kernel["us"],
                left=kernel["start_us"],
                height=0.7,
                color=COLOURS[part],
                edgecolor="black",
                linewidth=0.3,
            )
    axes.set_yticks(range(len(paths)), paths)
    axes.invert_yaxis()
    axes.set_xlabel("us from the layer's first kernel (under the profiler, which lengthens the gaps)")
    axes.set_title(f"Kernels of one MoE layer, {tokens} tokens per rank")
    names = [part for part in COLOURS if part in used]
    handles = [used[part] for part in names]
    axes.legend(handles, names, fontsize=7, ncol=5, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    _save(plt, figure, file)
    return True


def _save(plt, figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(file, dpi=150, bbox_inches="tight")
    plt.close(figure)


def draw(results: Path, out: Path) -> list[Path]:
    """Draws every figure that the records of ``results`` allow into ``out``; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layer, profile, detail, timeline = (
        records.read(results / f"{name}.jsonl") for name in ("layer", "profile", "detail", "timeline")
    )
    files = []
    for ep in sorted({r["ep"] for r in profile + timeline}):
        of_layer, waiting, spans = (chosen_layer(rows, ep) for rows in (profile, detail, timeline))
        for tokens in sorted({r["tokens"] for r in of_layer}):
            file = out / f"layer_ep{ep}_{tokens}.png"
            if draw_stacks(plt, of_layer, waiting, tokens, file):
                files.append(file)
        for tokens in sorted({r["tokens"] for r in spans}):
            file = out / f"timeline_ep{ep}_{tokens}.png"
            if draw_timeline(plt, spans, tokens, file):
                files.append(file)
    file = out / "speedup.png"
    if draw_speedups(plt, layer, file):
        files.append(file)
    return files


def main() -> int:
    here = Path(__file__).resolve()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=here.parent / "results")
    parser.add_argument("--out", type=Path, default=here.parents[2] / "docs" / "figures")
    args = parser.parse_args()
    files = draw(args.results, args.out)
    print("\n".join(map(str, files)) or f"nothing to draw in {args.results}")
    return 0 if files else 1


if __name__ == "__main__":
    sys.exit(main())
