"""PNGs of the layer benchmark's records: time per layer stacked by kernel, speed-up over tokens, kernel timelines.

    python3 benchmark/deepep_v2/plot.py --results benchmark/deepep_v2/results --out docs/figures

Needs matplotlib. Reads ``layer.jsonl``, ``profile.jsonl``, ``detail.jsonl``, ``timeline.jsonl``; a figure whose records
are missing is left out. Kernels are drawn for the shape that the ratios are set for, or without it for the last shape.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import profiling
import records
import shapes

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
PEER_COLOURS = {"sglang_expanded": "#4c78a8", "sglang_nonexpanded": "#f58518", "mega_moe": "#9d755d"}
RATIO_MARKS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


def chosen_layer(rows: list[dict], ep: int) -> list[dict]:
    """The records of one shape at ``ep`` ranks: the one that the ratios are set for if present, else the last one."""
    rows = [r for r in rows if r["ep"] == ep]
    fields = ("hidden", "intermediate", "local_experts")
    of_target = [r for r in rows if records.has_target_widths(r)]
    return of_target or [r for r in rows if all(r[f] == rows[-1][f] for f in fields)]


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
    """shape -> "slower / ours" -> [(tokens, ratio of medians)] in order of tokens, each ratio from one run."""
    found: dict[tuple, dict[str, list[tuple[int, float]]]] = {}
    for shape, by_tokens in records.groups(records.newest_runs(layer)):
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
    """Ratios of medians over tokens, one panel a shape on common axes; one size alone is no curve."""
    found = {shape: series for shape, series in speedups(layer).items() if any(len(p) > 1 for p in series.values())}
    if not found:
        return False
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    size = (5.2 * columns, 3.8 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(found) :]:
        axes.axis("off")
    for axes, (values, series) in zip(grid.flat, found.items()):
        shape = dict(zip(records.SHAPE_FIELDS, values))
        for name, points in series.items():
            slower, ours = name.split(" / ")
            axes.plot(
                *zip(*sorted(points)),
                marker="o",
                markersize=3,
                color=PEER_COLOURS[slower],
                linestyle="--" if ours == "psum_sync_free" else "-",
                label=name,
            )
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.grid(alpha=0.3)
        name = shapes.name_of(shape) or f"hidden {shape['hidden']}, intermediate {shape['intermediate']}"
        named = "the table's layer" if records.has_target_widths(shape) else f"widths of {name}"
        axes.tick_params(labelbottom=True, labelleft=True)
        axes.set_title(f"EP{shape['ep']}, {named}, {shape['local_experts']} local experts", fontsize=9)
    ratios = [ratio for series in found.values() for points in series.values() for _, ratio in points]
    marks = [mark for mark in RATIO_MARKS if min(ratios) / 1.2 <= mark <= max(ratios) * 1.2]
    ticks = sorted({tokens for series in found.values() for points in series.values() for tokens, _ in points})
    axes = grid.flat[0]
    axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    figure.supxlabel("tokens per rank", fontsize=9)
    figure.supylabel("time over ours (log scale)", fontsize=9)
    lines, names = axes.get_legend_handles_labels()
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

    layer = records.read(results / "layer.jsonl", records.validate)
    profile = records.read(results / "profile.jsonl", partial(records.validate, fields=records.PROFILE_FIELDS))
    detail = records.read(results / "detail.jsonl", partial(records.require, fields=records.DETAIL_FIELDS))
    timeline = records.read(results / "timeline.jsonl", partial(records.require, fields=records.TIMELINE_FIELDS))
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
    try:
        files = draw(args.results, args.out)
    except ImportError as error:
        print(f"the plots need matplotlib: pip install 'matplotlib>=3.8' ({error})", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(map(str, files)) or f"nothing to draw in {args.results}")
    return 0 if files else 1


if __name__ == "__main__":
    sys.exit(main())
