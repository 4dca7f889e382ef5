"""The numbers of the pull request that first proposed the expanded prefill, each beside what the records here say."""

from __future__ import annotations

import re
from dataclasses import dataclass

import records

# The pull request's kernels were traced at about 18,432 expanded rows: 2,304 tokens with top-8 on one rank.
TOKENS = 2304
ROWS, HIDDEN, GROUPS = 18432, 6144, 16
NONE_YET = "not measured yet"


@dataclass
class Data:
    """Records of one results folder, of each measurement the newest run; ``layer_runs`` and ``accuracy`` hold all."""

    layer: list[dict]
    layer_runs: list[dict]
    detail: list[dict]
    profile: list[dict]
    activation: list[dict]
    server: list[dict]
    server_profile: list[dict]
    accuracy: list[dict]
    agreement: list[dict]
    variants: list[dict]


def kernels(data: Data, path: str) -> dict[str, float]:
    """Kernel -> us per layer of a path's newest profile at ``TOKENS`` tokens, one rank, the target shape."""
    newest: dict[str, float] = {}
    for row in data.profile:
        of_layer = (row["path"], row["tokens"], row["ep"]) == (path, TOKENS, 1)
        if not (of_layer and records.has_target_widths(row)):
            continue
        if row["kernel"] in newest:
            newest.clear()
        newest[row["kernel"]] = row["us"]
    return newest


def time_of(data: Data, path: str, pattern: str) -> float | None:
    """Summed us of a path's kernels whose names match; None without a profile, 0.0 where none matches."""
    found = kernels(data, path)
    return sum(us for name, us in found.items() if re.search(pattern, name)) if found else None


def _us(value: float | None) -> str:
    return NONE_YET if value is None else "no such kernel" if value == 0 else f"{value:.1f} us"


def _against(seed_us: float, here: float | None) -> str:
    """Whether a kernel's time was met within a quarter."""
    if here is None:
        return "open"
    if here == 0:
        return "gone"
    ratio = here / seed_us
    verdict = "reproduced" if 0.75 <= ratio <= 1.25 else "less here" if ratio < 1 else "more here"
    return f"{verdict} ({ratio:.2f}x)"


def layer_ratios(data: Data, slow: str, ours: str, ep: int = 1) -> str:
    """Ratios of the layer's medians at the target shape, "1.20 at 512, ..." tokens; empty without records."""
    found = []
    for shape, by_tokens in records.groups(data.layer):
        if shape["ep"] != ep or not records.has_target_widths(shape):
            continue
        for tokens, by_path in by_tokens.items():
            if slow in by_path and ours in by_path:
                ratio = by_path[slow]["us_median"] / by_path[ours]["us_median"]
                found.append(f"{ratio:.2f} at {tokens}")
    return ", ".join(found)


def _ratio(data: Data, slow: str, ours: str) -> str:
    found = layer_ratios(data, slow, ours)
    return f"{found} tokens" if found else NONE_YET


def _server(data: Data, ours: str, base: str) -> str:
    """Gains of the input token throughput over prompt lengths."""
    speed = {(r["model"], r["ep"], r["prompt_len"], r["path"]): r["input_tok_s_median"] for r in data.server}
    found = []
    for (model, ep, length, path), value in speed.items():
        other = speed.get((model, ep, length, base))
        if path == ours and other:
            found.append(f"{value / other - 1:+.1%} at {length} ({model}, EP{ep})")
    return ", ".join(found) or NONE_YET


def _between(data: Data) -> str:
    found = {r["path"]: r["between"] for r in data.detail if r["tokens"] == TOKENS and r["ep"] == 1}
    wanted = ("sglang_nonexpanded", "sglang_expanded", "labels", "psum")
    if any(path not in found for path in wanted):
        return NONE_YET
    return ", ".join(f"`{path}` {found[path]}" for path in wanted) + " launches between dispatch and combine"


def _errors(data: Data) -> str:
    found = {r["path"]: r["error"] for r in data.detail if r["tokens"] == TOKENS and r["ep"] == 1}
    wanted = ("sglang_nonexpanded", "sglang_expanded", "labels", "psum")
    if any(found.get(path) is None for path in wanted):
        return NONE_YET
    return "error against float64: " + ", ".join(f"`{path}` {found[path]:.5f}" for path in wanted)


def _weight_pass(data: Data) -> tuple[str, str]:
    """What the pass over the bf16 output must take at the copy bandwidth of the run."""
    rates = [row["copy_gb_s"] for row in data.activation if row["tokens"] == TOKENS]
    if not rates:
        return NONE_YET, "open"
    moved = 2 * ROWS * HIDDEN * 2
    least = moved / rates[-1] / 1e3
    text = f"no path has the pass any more; its {moved / 1e6:.0f} MB take {least:.0f} us at the run's copy bandwidth"
    return text, f"plausible ({least / 112:.2f}x)"


def _accuracy(data: Data) -> str:
    fewest = min((row["ep"] for row in data.accuracy), default=1)
    shares = {row["path"]: row for row in data.accuracy if row["ep"] == fewest}
    wanted = [path for path in ("sglang_nonexpanded", "nonexpanded", "sglang_expanded", "psum") if path in shares]
    if not wanted:
        return NONE_YET
    return "arithmetic problems: " + ", ".join(
        f"`{path}` {shares[path]['correct']} of {shares[path]['total']}" for path in wanted
    )


def _copies(data: Data) -> str:
    if not kernels(data, "sglang_nonexpanded"):
        return NONE_YET
    up = [name for name in kernels(data, "sglang_nonexpanded") if "HtoD" in name]
    down = time_of(data, "sglang_nonexpanded", "DtoH")
    return f"{'present' if up else 'no host-to-device copy'}; device-to-host copies {_us(down)} in `sglang_nonexpanded`"


def rows(data: Data) -> list[list[str]]:
    """The table: claim, its number, what the records here say, verdict."""
    layout = time_of(data, "sglang_nonexpanded", "scatter_psum_init|scatter_1")
    scatter = time_of(data, "sglang_nonexpanded", "scatter_2")
    scatter_left = time_of(data, "psum", "scatter")
    labels = time_of(data, "labels", "fill_m_indices")
    fold = time_of(data, "labels", "scale_(expanded_)?rows|scale_expanded")
    fold_psum = time_of(data, "psum", "scale_(expanded_)?rows|mul")
    passed, passed_verdict = _weight_pass(data)
    open_or = "open" if scatter is None else None
    return [
        ["claim", "its number", "here", "verdict"],
        ["layout kernel of the scatter", "1.7 us", _us(layout), _against(1.7, layout)],
        ["copy kernel of the scatter, `ep_scatter_2`", "58 us", _us(scatter), _against(58, scatter)],
        [
            "the expanded layout needs no scatter",
            "-58 us",
            f"scatter in `psum`: {_us(scatter_left)}",
            open_or or ("reproduced" if scatter_left == 0 else "not reproduced"),
        ],
        [
            "one host-to-device copy of counts less",
            "1 copy",
            _copies(data),
            open_or or "not reproducible: SGLang 0.5.23 no longer has that copy",
        ],
        ["`fill_m_indices_from_psum`", "1.5 us", f"`labels` {_us(labels)}", _against(1.5, labels)],
        [
            "the same in the default pipeline",
            "1.5 us",
            f"`psum` {_us(time_of(data, 'psum', 'fill_m_indices'))}",
            open_or or "improved: DeepGEMM reads the psum itself",
        ],
        ["weighting the bf16 output, [18432, 6144]", "112 us", passed, passed_verdict],
        ["weight folded into the fp32 scale, [18432, 16]", "4 us", f"`labels` {_us(fold)}", _against(4, fold)],
        [
            "the same in the default pipeline",
            "4 us",
            f"`psum` {_us(fold_psum)}",
            open_or or "improved: the activation kernel writes the weighted scale",
        ],
        [
            "bytes that are weighted",
            "453 MB -> 1.2 MB",
            f"{2 * ROWS * HIDDEN * 2 / 1e6:.0f} MB read and written -> a scale of {ROWS * GROUPS * 4 / 1e6:.1f} MB, "
            "itself read and written once (`labels`), or not at all (`psum`)",
            "reproduced (arithmetic)",
        ],
        ["fewer kernels between dispatch and combine", "one pass less", _between(data), open_or or "improved"],
        [
            "identical results, the fold is exact",
            "no number",
            _errors(data),
            "equal error; bits differ from non-expanded (see Numeric rules)",
        ],
        [
            "expanded over the community's non-expanded V2, 8k prompts",
            "+7.7 % end to end",
            f"layer: {_ratio(data, 'sglang_nonexpanded', 'psum')}; "
            f"server: {_server(data, 'psum', 'sglang_nonexpanded')}",
            "other model and size: ratios, not tok/s",
        ],
        [
            "over SGLang 0.5.23's expanded prefill, which the pull request became",
            "none",
            f"layer: {_ratio(data, 'sglang_expanded', 'psum')}; server: {_server(data, 'psum', 'sglang_expanded')}",
            "additional",
        ],
        [
            "non-expanded V2 over V1, 8k to 960k prompts",
            "+2.1 % to +7.7 %",
            _server(data, "sglang_nonexpanded", "deepep_v1"),
            "V1 refuses a single rank; needs two or more GPUs",
        ],
        [
            "expanded V2 over V1, 8k to 960k prompts",
            "+4.3 % to +15.2 %",
            _server(data, "psum", "deepep_v1"),
            "needs two or more GPUs; two nodes for the original",
        ],
        [
            "the gain shrinks with prompt length",
            "+7.7 % at 8k, +2.0 % at 512k",
            _server(data, "psum", "sglang_nonexpanded"),
            "512k needs the original model and 16 GPUs",
        ],
        [
            "GSM8K, MiMoV2, tp 16, dp 2",
            "0.958 (V1), 0.964 (V2)",
            _accuracy(data),
            "not reproducible without those weights; a trained model instead",
        ],
        [
            "symmetric memory allocated at the first request",
            "about 2 GB",
            "at start-up; the log line `DeepEP v2 buffer:` prints the bytes of your configuration",
            "depends on ranks and capacity; that it is prebuilt: `pytest test/srt/test_prebuild.py`",
        ],
    ]
