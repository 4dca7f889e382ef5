"""Records, ratios and the regression check of the layer benchmark. Plain Python: no torch, no sglang.

``layer.jsonl`` holds one object a line with exactly the fields of ``LAYER_FIELDS``:
``path`` one of ``PATHS``; ``tokens`` per rank; ``ep`` ranks; ``hidden``, ``intermediate``, ``local_experts``, ``topk``
the layer; ``us_median``, ``us_min``, ``us_max`` microseconds per layer over ``rounds`` rounds (each round's slowest
rank); ``gpu`` the device's name; ``versions`` package -> version; ``commit``; ``date`` (UTC, ISO 8601).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path

PATHS = (
    "sglang_nonexpanded",
    "sglang_expanded",
    "nonexpanded",
    "labels",
    "psum",
    "psum_sync_free",
    "mega_moe",
    "floor",
)
LAYER_FIELDS = (
    "path",
    "tokens",
    "ep",
    "hidden",
    "intermediate",
    "local_experts",
    "topk",
    "us_median",
    "us_min",
    "us_max",
    "rounds",
    "gpu",
    "versions",
    "commit",
    "date",
)
# What the plots need of the other files.
DETAIL_FIELDS = ("path", "tokens", "ep", "hidden", "intermediate", "local_experts", "waiting_us")
TIMELINE_FIELDS = ("path", "tokens", "ep", "hidden", "intermediate", "local_experts", "kernels")
PROFILE_FIELDS = ("path", "tokens", "kernel", "us", "count", "ep", "hidden", "intermediate", "local_experts")
TARGET = {"hidden": 6144, "intermediate": 2048, "local_experts": 16, "topk": 8}
KEY_FIELDS = ("path", "tokens", "ep", "hidden", "intermediate", "local_experts", "topk", "gpu")
SHAPE_FIELDS = ("ep", "hidden", "intermediate", "local_experts", "topk", "gpu")
REGRESSION_LIMIT = 1.15
# Records of one run and size that lie further apart belong to two runs.
PAUSE_S = 60.0

# (slower path, ours) -> ep -> tokens -> least ratio to reach on H200 at ``is_target_shape``.
RATIOS: dict[tuple[str, str], dict[int, dict[int, float]]] = {
    ("sglang_expanded", "psum"): {1: {512: 1.25, 2304: 1.12, 8192: 1.05}, 2: {512: 1.3, 2304: 1.1, 8192: 1.03}},
    ("sglang_nonexpanded", "psum"): {1: {512: 1.4, 2304: 1.18, 8192: 1.05}, 2: {512: 1.4, 2304: 1.2, 8192: 1.06}},
    ("sglang_expanded", "psum_sync_free"): {1: {512: 1.35, 2304: 1.18, 8192: 1.05}},
    ("sglang_nonexpanded", "psum_sync_free"): {1: {512: 1.5, 2304: 1.25, 8192: 1.05}},
    ("mega_moe", "psum"): {1: {512: 1.0, 2304: 1.2, 8192: 1.0}, 2: {512: 1.0, 2304: 1.0, 8192: 1.0}},
}
# A launch's waiting may exceed that of DeepEP's dispatch + combine alone by this much, us.
WAITING_LIMIT_US = {"psum": 30.0, "psum_sync_free": 20.0}


def _is_number(value: object, least: float = -math.inf) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= least


def _is_time(value: object) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


def _is_span(value: object) -> bool:
    """Whether it is one kernel of a timeline."""
    named = isinstance(value, dict) and isinstance(value.get("kernel"), str)
    return named and _is_number(value.get("start_us")) and _is_number(value.get("us"), 0)


# What a field must hold, in words, and the test of it.
_COUNT = ("a whole number above 0", lambda value: type(value) is int and value > 0)
_TEXT = ("a text", lambda value: isinstance(value, str))
KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys(("tokens", "ep", "hidden", "intermediate", "local_experts", "topk", "rounds"), _COUNT),
    **dict.fromkeys(("path", "kernel", "gpu", "commit"), _TEXT),
    **dict.fromkeys(("us_median", "us_min", "us_max", "us"), ("a number of at least 0", lambda v: _is_number(v, 0))),
    "waiting_us": ("a number or null", lambda value: value is None or _is_number(value)),
    "kernels": ("a list of kernels", lambda value: isinstance(value, list) and all(map(_is_span, value))),
    "versions": ("an object", lambda value: isinstance(value, dict)),
    "date": ("a time with its zone", _is_time),
}


def require(record: dict, fields: tuple[str, ...]) -> dict:
    """Returns ``record``; raises ValueError when one of ``fields`` is missing, or a field holds what it cannot."""
    if not isinstance(record, dict):
        raise ValueError(f"record {record!r} is no object")
    if missing := sorted(set(fields) - set(record)):
        raise ValueError(f"record has missing fields {missing}")
    for field, value in record.items():
        kind, fits = KINDS.get(field, ("", None))
        if fits and not fits(value):
            raise ValueError(f"{field} {str(value)[:80]!r} is not {kind}")
    return record


def validate(record: dict, fields: tuple[str, ...] = LAYER_FIELDS) -> dict:
    """Returns ``record``; raises ValueError when its fields are not ``fields`` or a layer record is not sane."""
    if isinstance(record, dict) and set(record) != set(fields):
        missing, extra = sorted(set(fields) - set(record)), sorted(set(record) - set(fields))
        raise ValueError(f"record has missing fields {missing} and unknown fields {extra}")
    require(record, fields)
    if fields is LAYER_FIELDS:
        if record["path"] not in PATHS:
            raise ValueError(f"path {record['path']!r} is not one of {', '.join(PATHS)}")
        if not 0 < record["us_min"] <= record["us_median"] <= record["us_max"]:
            raise ValueError(
                f"us_min {record['us_min']}, us_median {record['us_median']}, us_max {record['us_max']} are not ordered"
            )
    return record


def append(file: Path, records: Iterable[dict]) -> None:
    """Appends records to a JSONL file, one line at a time, flushed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        for record in records:
            stream.write(json.dumps(record) + "\n")
            stream.flush()


def read(file: Path, check: Callable[[dict], object] = lambda record: record) -> list[dict]:
    """The records of a JSONL file, or none without the file.

    A line that is broken, or for which ``check`` raises ValueError, raises ValueError with its number.
    """
    if not file.is_file():
        return []
    records = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{file}:{number}: not JSON: {error}") from error
            try:
                check(records[-1])
            except ValueError as error:
                raise ValueError(f"{file}:{number}: {error}") from error
    return records


def key(record: dict) -> tuple:
    return tuple(record[field] for field in KEY_FIELDS)


def latest(records: Iterable[dict]) -> dict[tuple, dict]:
    """The last record of each key, in file order."""
    return {key(record): record for record in records}


def regressions(new: Iterable[dict], baseline: Iterable[dict], limit: float = REGRESSION_LIMIT) -> list[str]:
    """One line for each new record slower than ``limit`` times the baseline's last record of the same key."""
    known = latest(baseline)
    lines = []
    for record in new:
        old = known.get(key(record))
        if old is not None and record["us_median"] > limit * old["us_median"]:
            lines.append(
                f"{record['path']} at {record['tokens']} tokens, ep {record['ep']}: {record['us_median']:.1f} us, "
                f"was {old['us_median']:.1f} us ({record['us_median'] / old['us_median']:.2f}x, limit {limit:.2f}x)"
            )
    return lines


def compared(new: Iterable[dict], baseline: Iterable[dict]) -> int:
    """How many new records have a baseline."""
    known = latest(baseline)
    return sum(key(record) in known for record in new)


def groups(records: Iterable[dict]) -> Iterator[tuple[dict, dict[int, dict[str, dict]]]]:
    """Yields (shape, tokens -> path -> last record) for every shape."""
    shapes: dict[tuple, dict[int, dict[str, dict]]] = {}
    for record in records:
        shape = tuple(record[field] for field in SHAPE_FIELDS)
        shapes.setdefault(shape, {}).setdefault(record["tokens"], {})[record["path"]] = record
    for shape, by_tokens in shapes.items():
        yield dict(zip(SHAPE_FIELDS, shape)), {tokens: by_tokens[tokens] for tokens in sorted(by_tokens)}


def runs(rows: Iterable[dict], size: Callable[[dict], tuple], key: Callable[[dict], object]) -> list[list[list[dict]]]:
    """Of each size its runs, in file order: a key that comes again, or a pause, starts the next one.

    Records carry a date or not; those of one run of one size are written within a moment.
    """
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        of_size = found.setdefault(size(row), [{}])
        last = next(reversed(of_size[-1].values()), None)
        if key(row) in of_size[-1] or (last and "date" in row and _pause(last["date"], row["date"])):
            of_size.append({})
        of_size[-1][key(row)] = row
    return [[list(run.values()) for run in of_size] for of_size in found.values()]


def _pause(earlier: str, later: str) -> bool:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds() > PAUSE_S


def newest_runs(rows: list[dict]) -> list[dict]:
    """Of each shape and number of tokens, one run: the last that has a peer of plain SGLang, else the last."""
    chosen = []
    fields = (*SHAPE_FIELDS, "tokens")
    for of_size in runs(rows, lambda row: tuple(row[f] for f in fields), lambda row: row["path"]):
        with_peer = [run for run in of_size if any(row["path"].startswith("sglang_") for row in run)]
        chosen += (with_peer or of_size)[-1]
    return chosen


def last_runs(rows: list[dict], size: tuple[str, ...], key: tuple[str, ...]) -> list[dict]:
    """Of each size, the last run."""
    found = runs(rows, lambda row: tuple(row.get(f) for f in size), lambda row: tuple(row[f] for f in key))
    return [row for of_size in found for row in of_size[-1]]


def is_target_shape(shape: dict) -> bool:
    """Whether ``RATIOS`` was set for this shape."""
    return has_target_widths(shape) and "H200" in shape["gpu"]


def has_target_widths(record: dict) -> bool:
    """Whether a record or shape is of the layer that ``RATIOS`` speaks of; a width that it does not name counts."""
    return all(record.get(field, value) == value for field, value in TARGET.items())


def ratio_rows(shape: dict, by_tokens: dict[int, dict[str, dict]]) -> list[tuple[str, int, float, float | None]]:
    """(name, tokens, ratio of medians, least ratio to reach or None) for every pair of ``RATIOS`` that was measured."""
    rows = []
    for (slow, ours), required in RATIOS.items():
        for tokens, by_path in by_tokens.items():
            if slow in by_path and ours in by_path:
                ratio = by_path[slow]["us_median"] / by_path[ours]["us_median"]
                least = required.get(shape["ep"], {}).get(tokens) if is_target_shape(shape) else None
                rows.append((f"{slow} / {ours}", tokens, ratio, least))
    return rows


def align(rows: list[list[str]]) -> str:
    """Rows of cells as aligned lines: the first column left, the others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )


def ratio_table(shape: dict, by_tokens: dict[int, dict[str, dict]]) -> str:
    """The ratios: one row a pair, one column a number of tokens, with the least ratio and whether it is reached."""
    rows = ratio_rows(shape, by_tokens)
    if not rows:
        return "no pair of paths to compare"
    columns = sorted({tokens for _, tokens, _, _ in rows})
    table = [["ratio of medians", *(f"{tokens} tokens" for tokens in columns)]]
    for name in dict.fromkeys(name for name, *_ in rows):
        cells = {tokens: (ratio, least) for row, tokens, ratio, least in rows if row == name}
        line = [name]
        for tokens in columns:
            ratio, least = cells.get(tokens, (None, None))
            if ratio is None:
                line.append("-")
            elif least is None:
                line.append(f"{ratio:.3f}")
            else:
                line.append(f"{ratio:.3f} {'ok' if ratio >= least else 'MISS'} (>= {least:.2f})")
        table.append(line)
    return align(table)
