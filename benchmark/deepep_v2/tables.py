"""The tables of the documentation, from the benchmarks' records: prints them, or writes them between their markers.

    python3 benchmark/deepep_v2/tables.py            # print every table
    python3 benchmark/deepep_v2/tables.py --write    # put each between its markers in README.md and docs/*.md
    python3 benchmark/deepep_v2/tables.py --check    # exit 1 when the pages' tables are not those of the records

A marked block is ``<!-- table:NAME -->`` ... ``<!-- /table:NAME -->``, each on a line of its own. Numbers of one row or
ratio always come from one run: the newest of that size that measured plain SGLang too. Plain Python: neither torch nor
sglang.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import records
import seed_claims
import shapes
from server_tables import accuracy, agreement, answers, server, server_profile
from table_format import markdown, missing, span

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "deepep_v2.md", ROOT / "docs" / "measurements.md")
MARKED = re.compile(r"(<!-- table:(\w+) -->\n)(.*?)(<!-- /table:\2 -->)", re.S)

# What the patch does now, per measurement of bench_variants.py; the other variants are held against it.
KEPT = {
    "multiple_reduction": "allow_multiple_reduction=True",
    "combine_bias": "addition afterwards",
    "half_batches": "whole batch",
    "gemm_options": "psum",
    "row_alignment": "128 rows",
    "scale_layout": "column-major out of dispatch",
    "activation_order": "first rows first",
    "communication_sms": "num_sms=0",
    "swiglu_tiles": None,
}
OUR_PATHS = ("psum", "psum_sync_free")
SIZES = (512, 2304, 8192)


def run_ratios(data: seed_claims.Data) -> dict[tuple, dict]:
    """Of every run of the target shape, (ep, date, commit): rounds of each size, sglang_expanded over each of ours."""
    of_target = [row for row in data.layer_runs if records.has_target_widths(row)]
    ratios: dict[tuple, dict] = {}
    for of_size in records.runs(of_target, lambda row: (row["ep"], row["tokens"]), lambda row: row["path"]):
        for run in of_size:
            by_path = {row["path"]: row for row in run}
            theirs, ours = by_path.get("sglang_expanded"), [by_path[path] for path in OUR_PATHS if path in by_path]
            if theirs and ours:
                found = ratios.setdefault((theirs["ep"], theirs["date"][:10], theirs["commit"]), {"rounds": []})
                found["rounds"].append(theirs["rounds"])
                found |= {(row["path"], row["tokens"]): theirs["us_median"] / row["us_median"] for row in ours}
    return dict(sorted(ratios.items()))


def headline(data: seed_claims.Data) -> str:
    """One sentence for the README: how many times as fast a layer is as SGLang's own expanded prefill."""
    on_one = [of_run for (ep, _, _), of_run in run_ratios(data).items() if ep == 1]

    def ranges(path: str) -> str:
        cells = []
        for tokens in SIZES:
            found = [of_run[path, tokens] for of_run in on_one if (path, tokens) in of_run]
            if found:
                cells.append(f"{span(found, '{:.2f}'.format)} at {tokens}")
        return ", ".join(cells)

    count = "the one recorded run" if len(on_one) == 1 else f"{len(on_one)} recorded runs"
    sync, free = ranges("psum"), ranges("psum_sync_free")
    if not sync:
        return missing("sglang-deepep-v2 bench")
    return (
        f"Time of one MoE layer on one {data.layer[0]['gpu']}, SGLang 0.5.23's expanded prefill over this patch's in "
        f"the same run, {count}: {sync} tokens per rank{f'; without a host sync {free}' if free else ''} "
        "(`sglang-deepep-v2 bench`)."
    )


def environment(data: seed_claims.Data) -> str:
    if not data.layer:
        return missing("sglang-deepep-v2 bench")
    lines = {}
    for record in data.layer:
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        commit = f", commit {record['commit'][:12]}" if record["commit"] not in ("", "unknown") else ""
        lines.setdefault(f"{record['gpu']}; {versions}{commit}", []).append(record["date"][:10])
    return "\n".join(f"- {line}; {' to '.join(sorted({min(d), max(d)}))}" for line, d in lines.items())


def _spread(record: dict) -> str:
    return f"{record['us_median']:.0f} ({record['us_min']:.0f}-{record['us_max']:.0f})"


def _target_groups(layer: list[dict]):
    for shape, by_tokens in records.groups(layer):
        if records.has_target_widths(shape):
            yield shape, by_tokens


def layer(data: seed_claims.Data) -> str:
    blocks = []
    for shape, by_tokens in sorted(_target_groups(data.layer), key=lambda group: group[0]["ep"]):
        rows = [["us per layer: median (min-max)", *(f"{tokens} tokens" for tokens in by_tokens)]]
        for path in records.PATHS:
            cells = [_spread(by_path[path]) if path in by_path else "" for by_path in by_tokens.values()]
            if any(cells):
                rows.append([f"`{path}`", *cells])
        names = dict.fromkeys(name for name, *_ in records.ratio_rows(shape, by_tokens))
        for name in names:
            ratios = {tokens: ratio for row, tokens, ratio, _ in records.ratio_rows(shape, by_tokens) if row == name}
            cells = [f"**{ratios[tokens]:.2f}**" if tokens in ratios else "" for tokens in by_tokens]
            rows.append([f"ratio {name.replace(' / ', ' : ')}", *cells])
        rounds = sorted({r["rounds"] for by_path in by_tokens.values() for r in by_path.values()})
        head = (
            f"EP{shape['ep']}, hidden {shape['hidden']}, intermediate {shape['intermediate']}, "
            f"{shape['local_experts']} local experts, top-{shape['topk']}, {shape['gpu']}, "
            f"{' or '.join(map(str, rounds))} rounds, tokens per rank:"
        )
        blocks.append(f"{head}\n\n{markdown(rows)}")
    return "\n\n".join(blocks) or missing("sglang-deepep-v2 bench")


def ratios(data: seed_claims.Data) -> str:
    """The ratios of ``layer`` alone: a row each pair of paths and number of ranks."""
    found, sizes = {}, set()
    for shape, by_tokens in _target_groups(data.layer):
        for name, tokens, ratio, _ in records.ratio_rows(shape, by_tokens):
            found.setdefault((shape["ep"], *name.split(" / ")), {})[tokens] = ratio
            sizes.add(tokens)
    if not found:
        return missing("sglang-deepep-v2 bench")
    rows = [["EP", "peer", "over", *(f"{tokens} tokens" for tokens in sorted(sizes))]]
    for (ep, peer, ours), of_pair in sorted(found.items(), key=lambda item: item[0][0]):
        cells = [f"{of_pair[tokens]:.2f}" if tokens in of_pair else "-" for tokens in sorted(sizes)]
        rows.append([str(ep), f"`{peer}`", f"`{ours}`", *cells])
    return markdown(rows, left=3)


def other_shapes(data: seed_claims.Data) -> str:
    slower = ("sglang_expanded", "sglang_nonexpanded", "mega_moe")
    found, sizes = {}, set()
    for shape, by_tokens in records.groups(data.layer):
        name = shapes.name_of(shape)
        if name in (None, "seed"):
            continue
        for tokens, by_path in by_tokens.items():
            if "psum" not in by_path:
                continue
            ours = by_path["psum"]["us_median"]
            ratios = [f"{by_path[path]['us_median'] / ours:.2f}" if path in by_path else "-" for path in slower]
            row = found.setdefault((name, shape["ep"], shape["local_experts"]), {})
            row[tokens] = " / ".join(ratios)
            sizes.add(tokens)
    if not found:
        command = "python3 benchmark/deepep_v2/bench_layer.py --no-inspect --shapes mimo-v2-flash deepseek-v3"
        return missing(f"{command} qwen3-235b glm --local-experts 8 16 32")
    rows = [["widths of", "EP", "local experts", *(f"{tokens} tokens" for tokens in sorted(sizes))]]
    for (name, ep, experts), row in sorted(found.items()):
        rows.append([name, str(ep), str(experts), *(row.get(tokens, "-") for tokens in sorted(sizes))])
    return markdown(rows)


def detail(data: seed_claims.Data) -> str:
    blocks = []
    for ep in sorted({record["ep"] for record in data.detail}):
        rows = [["path", "GPU busy us", "waiting us", "host us", "launches", "between", "error", "same bits twice"]]
        for record in data.detail:
            if record["ep"] != ep or record["tokens"] != seed_claims.TOKENS:
                continue
            between = "-" if record["between"] is None else str(record["between"])
            error = "-" if record["error"] is None else f"{record['error']:.5f}"
            rows.append(
                [f"`{record['path']}`"]
                + [f"{record[field]:.0f}" for field in ("busy_us", "waiting_us", "host_us", "launches")]
                + [between, error, {True: "yes", False: "no", None: "-"}[record["bitwise"]]]
            )
        if len(rows) > 1:
            blocks.append(f"EP{ep}, {seed_claims.TOKENS} tokens per rank:\n\n{markdown(rows)}")
    return "\n\n".join(blocks) or missing("sglang-deepep-v2 bench")


def spread(data: seed_claims.Data) -> str:
    """Every recorded run of the target shape: how far hosts and clocks move the ratios to SGLang's expanded path."""
    columns = [(path, tokens) for path in OUR_PATHS for tokens in SIZES]
    rows = [["EP", "date", "commit", "rounds", *(f"`{path}` {tokens}" for path, tokens in columns)]]
    for (ep, date, commit), of_run in run_ratios(data).items():
        cells = [f"{of_run[column]:.2f}" if column in of_run else "-" for column in columns]
        rows.append([str(ep), date, commit, span(of_run["rounds"]), *cells])
    return markdown(rows, left=3) if len(rows) > 1 else missing("sglang-deepep-v2 bench")


def activation(data: seed_claims.Data) -> str:
    """The activation kernel alone at the target shape, of each size its last record."""
    of_target = {row["tokens"]: row for row in data.activation if records.has_target_widths(row)}
    if not of_target:
        return missing("sglang-deepep-v2 bench")
    rows = [["tokens per rank", "rows", "us", "TB/s", "of a large copy", "of a copy of as many bytes"]]
    for tokens, row in sorted(of_target.items()):
        same = row.get("same_size_copy_gb_s")
        against = f"{row['gb_s'] / same:.0%}" if same else "-"
        rows.append(
            [
                str(tokens),
                str(row["rows"]),
                f"{row['us']:.1f}",
                f"{row['gb_s'] / 1e3:.2f}",
                f"{row['share']:.0%}",
                against,
            ]
        )
    return markdown(rows, left=0)


def kept_tile() -> str:
    """The activation kernel's tile as bench_variants.py names it, from the kernel's own constants."""
    source = (ROOT / "python/sglang/srt/layers/moe/ep_moe/kernels.py").read_text()
    names = ("BLOCK_M", "GROUPS", "WARPS", "MAX_PROGRAMS")
    values = [re.search(rf"^SWIGLU_{name} = (\d+)$", source, re.M)[1] for name in names]
    return "BM {} G {} W {} P {}".format(*values)


def variants(data: seed_claims.Data) -> str:
    blocks = []
    for name, kept in KEPT.items():
        kept = kept or kept_tile()
        for ep in sorted({row["ep"] for row in data.variants if row["name"] == name}):
            of_name = [row for row in data.variants if (row["name"], row["ep"]) == (name, ep)]
            sizes = sorted({row["tokens"] for row in of_name})
            cells = {(row["variant"], row["tokens"]): row for row in of_name}
            shown = list(dict.fromkeys(row["variant"] for row in of_name))
            if name == "swiglu_tiles":
                # The whole sweep is in the records; the kept tile, the fastest ones and the slowest tell enough.
                shown = _notable_tiles(of_name, kept)
            rows = [[f"{name}, EP{ep}", *(f"{tokens} tokens" for tokens in sizes)]]
            for variant in shown:
                line = [_variant_cell(cells, variant, tokens, kept) for tokens in sizes]
                rows.append([f"{variant}{' (kept)' if variant == kept else ''}", *line])
            blocks.append(markdown(rows))
    return "\n\n".join(blocks) or missing("python3 benchmark/deepep_v2/bench_variants.py")


def _notable_tiles(rows: list[dict], kept: str) -> list[str]:
    shown = [kept]
    for tokens in sorted({row["tokens"] for row in rows}):
        timed = sorted((r for r in rows if r["tokens"] == tokens and r["us"] is not None), key=lambda r: r["us"])
        shown += [row["variant"] for row in (timed[0], timed[-1])] if timed else []
    return list(dict.fromkeys(shown))


def _variant_cell(cells: dict[tuple, dict], variant: str, tokens: int, kept: str) -> str:
    """``us (x times the kept variant, figure)``."""
    row, base = cells.get((variant, tokens)), cells.get((kept, tokens))
    if row is None:
        return "-"
    if row["us"] is None:
        return "not accepted"
    notes = []
    if base and base["us"] and variant != kept and row["what"].startswith("both") == base["what"].startswith("both"):
        notes.append(f"{row['us'] / base['us']:.2f}x")
    notes += [f"{word} {row[field]:.2g}" for field, word in _FIGURES.items() if row.get(field) is not None]
    return f"{row['us']:.1f} us" + (f" ({', '.join(notes)})" if notes else "")


_FIGURES = {"error": "error", "difference": "difference", "share_of_copy": "share of copy"}
TABLES: dict[str, Callable[[seed_claims.Data], str]] = {
    "headline": headline,
    "environment": environment,
    "layer": layer,
    "ratios": ratios,
    "other_shapes": other_shapes,
    "detail": detail,
    "activation": activation,
    "spread": spread,
    "server": server,
    "server_profile": server_profile,
    "agreement": agreement,
    "accuracy": accuracy,
    "answers": answers,
    "variants": variants,
    "seed": lambda data: markdown(seed_claims.rows(data), left=4),
}


def load(results: Path) -> seed_claims.Data:
    """The records of one folder, of each measurement the newest run."""
    read = {
        name: records.read(results / f"{name}.jsonl")
        for name in (
            "layer",
            "detail",
            "profile",
            "activation",
            "server",
            "server_profile",
            "accuracy",
            "agreement",
            "variants",
        )
    }
    inspected = [row for row in read["detail"] if row["busy_us"] is not None and records.has_target_widths(row)]
    of_target = [row for row in read["variants"] if row["hidden"] == records.TARGET["hidden"]]
    return seed_claims.Data(
        layer=records.newest_runs(read["layer"]),
        layer_runs=read["layer"],
        detail=records.newest_runs(inspected),
        profile=read["profile"],
        activation=read["activation"],
        server=records.last_runs(read["server"], ("model", "ep", "prompt_len"), ("path",)),
        server_profile=records.last_runs(read["server_profile"], ("model", "ep", "prompt_len"), ("path",)),
        # Each run serves a model of its own training.
        accuracy=read["accuracy"],
        agreement=records.last_runs(read["agreement"], ("model", "ep", "server_args"), ("path",)),
        variants=records.last_runs(of_target, ("name", "ep", "tokens", "local_experts"), ("variant",)),
    )


def fill(page: str, data: seed_claims.Data) -> str:
    """``page`` with every marked block replaced. Raises ValueError for an unknown or unclosed block."""
    opened = re.findall(r"^<!-- table:(\w+) -->$", page, re.M)
    closed = [match[2] for match in MARKED.finditer(page)]
    ends = page.count("<!-- /table:")
    if opened != closed or len(closed) != ends or not set(closed) <= set(TABLES):
        raise ValueError(f"blocks {opened} are opened, {closed} whole, {ends} closed; tables: {sorted(TABLES)}")
    return MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]](data)}\n{match[4]}", page)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--pages", type=Path, nargs="+", default=list(PAGES))
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    parser.add_argument("--check", action="store_true", help="exit 1 when a page differs from the records")
    args = parser.parse_args(arguments)
    data = load(args.results)
    if not (args.write or args.check):
        for name, table in TABLES.items():
            print(f"== {name}\n{table(data)}\n")
        return 0
    stale = [page for page in args.pages if fill(page.read_text(), data) != page.read_text()]
    for page in stale:
        if args.write:
            page.write_text(fill(page.read_text(), data))
        print(f"{page}: {'written' if args.write else 'stale, run with --write'}")
    if not stale:
        print("the pages hold the records' tables")
    return int(bool(stale) and args.check)


if __name__ == "__main__":
    sys.exit(main())
