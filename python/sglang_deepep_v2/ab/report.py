"""What the user sees: progress while servers run, then tables, the differences, and JSON."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_deepep_v2.ab.compare import Comparison
from sglang_deepep_v2.ab.session import REFERENCE, PathResult, Report

_SHOWN_DIFFERENCES = 5


@dataclass
class Verdict:
    """One path's result and how it compares; `comparison` is None for the baseline and for a path that failed."""

    result: PathResult
    comparison: Comparison | None = None
    is_baseline: bool = False

    @property
    def passed(self) -> bool:
        return self.result.error is None and (
            self.is_baseline or (self.comparison is not None and self.comparison.agrees)
        )

    def as_json(self) -> dict:
        compared = asdict(self.comparison) if self.comparison else None
        if compared:
            compared["differences"] = compared["differences"][:_SHOWN_DIFFERENCES]
            compared["num_differences"] = len(self.comparison.differences)
        return self.result.summary() | {"baseline": self.is_baseline, "passed": self.passed, "comparison": compared}


@contextlib.contextmanager
def progress_display(console: Console, model: str) -> Iterator[Report]:
    """Yields a callback `(path, what it does now)`; a live display on a terminal, plain lines elsewhere."""
    begin = time.monotonic()
    if not console.is_terminal:

        def print_line(path: str, status: str) -> None:
            console.print(
                f"[{time.monotonic() - begin:5.0f} s] {model}  {path}: {status}", markup=False, highlight=False
            )

        yield print_line
        return
    columns = (SpinnerColumn(), TextColumn("{task.fields[path]:<20}"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        tasks: dict[str, int] = {}

        def update(path: str, status: str) -> None:
            if path not in tasks:
                tasks[path] = progress.add_task(status, total=None, path=path)
            ended = status.startswith(("done", "failed", "kept"))
            progress.update(tasks[path], description=status, total=1 if ended else None, completed=int(ended))

        yield update


def print_verdicts(console: Console, model: str, baseline: str, verdicts: Sequence[Verdict]) -> None:
    """The table of one checkpoint, followed by every failure and difference in full."""
    table = Table(title=f"{model}: against {baseline}", title_justify="left")
    table.add_column("path", no_wrap=True)
    table.add_column("each process logged", no_wrap=True)
    for heading in ("same greedy", "largest", "median", "bound"):
        table.add_column(heading, justify="right")
    table.add_column("s", justify="right")
    table.add_column("verdict", no_wrap=True)
    for verdict in verdicts:
        comparison = verdict.comparison
        cells = ["", "", "", ""]
        if comparison is not None:
            cells = [
                f"{comparison.greedy_equal}/{comparison.prompts}",
                f"{comparison.largest:.4f}",
                f"{comparison.median:.4f}",
                f"{comparison.bound:g}",
            ]
        seconds = "kept" if verdict.result.resumed else f"{verdict.result.seconds:.0f}"
        table.add_row(verdict.result.path, describe_lines(verdict.result), *cells, seconds, _word(verdict))
    console.print(table)
    for verdict in verdicts:
        if verdict.result.error:
            console.print(f"{verdict.result.path}: {verdict.result.error}", markup=False, highlight=False)
        elif verdict.comparison and verdict.comparison.differences:
            _print_differences(console, verdict)


def describe_lines(result: PathResult) -> str:
    """The pipelines and transports a path's processes logged, equal ones in one line."""
    if result.path == REFERENCE:
        return "fp32, dequantised weights"
    said: dict[str, list[str]] = {}
    for line in result.lines:
        process = line.process.split()[0] if line.process else "rank"
        said.setdefault(f"{line.pipeline}, {line.transport}, {line.sync} sync", []).append(process)
    return "\n".join(f"{', '.join(ranks)}: {what}" for what, ranks in said.items()) or "nothing: SGLang's own path"


def print_throughput(console: Console, rows: Sequence[dict], first: str) -> None:
    """Input token throughput per path and prompt length, relative to the path `first` where that was measured."""
    table = Table(title="Input token throughput (tokens/s)", title_justify="left")
    for heading in ("model", "prompt length", "path", "median", "min", "max", "rounds", f"against {first}"):
        table.add_column(heading, justify="left" if heading in ("model", "path") else "right")
    for length in sorted({row["prompt_len"] for row in rows}):
        group = [row for row in rows if row["prompt_len"] == length]
        base = next((row["input_tok_s_median"] for row in group if row["path"] == first), None)
        for row in group:
            gain = f"{row['input_tok_s_median'] / base - 1:+.1%}" if base else ""
            speeds = [f"{row[f'input_tok_s_{part}']:.0f}" for part in ("median", "min", "max")]
            table.add_row(row["model"], str(length), row["path"], *speeds, str(row["rounds"]), gain)
    console.print(table)


def print_accuracy(console: Console, results: Sequence[PathResult]) -> None:
    """GSM8K answers per path."""
    table = Table(title="GSM8K", title_justify="left")
    for heading in ("model", "path", "correct", "accuracy", "invalid", "seconds"):
        table.add_column(heading, justify="left" if heading in ("model", "path") else "right")
    for result in results:
        if (numbers := result.accuracy) is not None:
            correct = f"{numbers['correct']}/{numbers['total']}"
            rates = [f"{numbers['accuracy']:.3f}", f"{numbers['invalid']:.3f}", f"{numbers['latency_s']:.0f}"]
            table.add_row(result.model, result.path, correct, *rates)
    console.print(table)


def _word(verdict: Verdict) -> str:
    if verdict.result.error:
        return "[red]failed[/red]"
    if verdict.is_baseline:
        return "baseline"
    return "[green]agrees[/green]" if verdict.passed else "[red]differs[/red]"


def _print_differences(console: Console, verdict: Verdict) -> None:
    comparison = verdict.comparison
    count = len(comparison.differences)
    allowed = f", {comparison.outliers:.2%} allowed" if comparison.outliers else ""
    console.print(
        f"{verdict.result.path}: {count} of {comparison.logprobs} logprobs or tokens beyond "
        f"{comparison.bound:g}{allowed}",
        highlight=False,
    )
    for difference in comparison.differences[:_SHOWN_DIFFERENCES]:
        console.print(f"  {difference}", markup=False, highlight=False)
    if count > _SHOWN_DIFFERENCES:
        console.print(f"  and {count - _SHOWN_DIFFERENCES} more", highlight=False)
    if not comparison.agrees:
        console.print(f"  log: {verdict.result.log}", markup=False, highlight=False)
