"""Input token throughput per path and prompt length, by `sglang.benchmark.serving`, in alternating rounds."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from sglang_deepep_v2.ab.fingerprint import fingerprint
from sglang_deepep_v2.ab.paths import ServePath
from sglang_deepep_v2.ab.servers import (
    Fleet,
    Server,
    ServerFailed,
    ServeSettings,
    check_prefill_lines,
    read_prefill_lines,
)
from sglang_deepep_v2.ab.serving_bench import ServingBench, start_serving_bench
from sglang_deepep_v2.ab.session import Report
from sglang_deepep_v2.provenance import stamp

_WARMUP_PROMPTS = 2
MIN_PROMPTS = 4
_TIMEOUT_S = 1800.0
_ROW = ("path", "prompt_len", "round", "input_tok_s", "settings", "stamp")


@dataclass(frozen=True)
class ThroughputPlan:
    """What is measured.

    Attributes:
        model: the checkpoint's name in the results.
        settings: how the servers are started.
        prompt_lengths: tokens per prompt.
        tokens: prompt tokens of one measurement; the number of prompts follows from it, at least `MIN_PROMPTS`.
        rounds: measurements per path and length; paths alternate within a round.
        together: keep all servers up and alternate between them, instead of one server at a time.
        jobs: servers that start at the same time, when they are kept up together.
        servers: those that are up already, by path.
        out: directory for logs and single measurements.
        resume: keep the measurements that `out` already has.
    """

    model: str
    settings: ServeSettings
    prompt_lengths: tuple[int, ...]
    tokens: int
    rounds: int
    together: bool
    out: Path
    fleet: Fleet
    resume: bool = False
    jobs: int = 1
    servers: dict[str, Server] = field(default_factory=dict)

    @property
    def raw_file(self) -> Path:
        return self.out / f"{self.model}.throughput.jsonl"

    def read_rows(self, paths: Sequence[ServePath]) -> list[dict]:
        """The single measurements on disk that this plan asks of `paths`, in their order, taken with its settings."""
        settings, order = self.fingerprint(), [path.name for path in paths]
        asked = [
            row
            for row in self._rows()[0]
            if row["settings"] == settings
            and row["path"] in order
            and row["prompt_len"] in self.prompt_lengths
            and row["round"] < self.rounds
        ]
        return sorted(
            asked,
            key=lambda row: (order.index(row["path"]), self.prompt_lengths.index(row["prompt_len"]), row["round"]),
        )

    def drop_damaged_rows(self) -> int:
        """Rewrite the file without the lines that an interruption cut; how many there were."""
        rows, damaged = self._rows()
        if damaged:
            self.raw_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return damaged

    def _rows(self) -> tuple[list[dict], int]:
        """The whole rows on disk, and the number of damaged lines."""
        rows, damaged = [], 0
        for line in self.raw_file.read_bytes().splitlines() if self.raw_file.is_file() else []:
            try:
                row = json.loads(line)
                rows.append({name: row[name] for name in _ROW})
            except (ValueError, KeyError, TypeError):
                damaged += 1
        return rows, damaged

    def fingerprint(self) -> str:
        """Changes with anything that makes two measurements incomparable."""
        return fingerprint(self.settings, os.environ, self.tokens, self.together)


def measure_throughput(plan: ThroughputPlan, paths: Sequence[ServePath], report: Report) -> list[dict]:
    """One row per path and prompt length, as `summarize` makes them.

    Raises:
        ServerFailed: a server or a measurement failed, or a server ran another pipeline than its path's.
    """
    plan.out.mkdir(parents=True, exist_ok=True)
    if not plan.resume:
        plan.raw_file.unlink(missing_ok=True)
    elif damaged := plan.drop_damaged_rows():
        report("throughput", f"{damaged} damaged line(s) dropped from {plan.raw_file}: measured again")
    done = {(row["path"], row["prompt_len"], row["round"]) for row in plan.read_rows(paths)}

    def missing(path: ServePath, round_index: int) -> list[int]:
        return [length for length in plan.prompt_lengths if (path.name, length, round_index) not in done]

    with contextlib.ExitStack() as shared:
        bench = shared.enter_context(start_serving_bench(plan.fleet, plan.out / f"{plan.model}.bench.log"))
        servers: dict[str, Server] = {}
        if plan.together:
            wanted = [path for path in paths if any(missing(path, index) for index in range(plan.rounds))]
            servers = _start_all(plan, bench, wanted, shared, report)
        for round_index in range(plan.rounds):
            # Every other round backwards, so that drift of the clocks favours no path.
            for path in list(paths)[:: 1 if round_index % 2 == 0 else -1]:
                lengths = missing(path, round_index)
                if not lengths:
                    continue
                with contextlib.ExitStack() as own:
                    if not plan.together:
                        report(path.name, f"round {round_index + 1}: starting")
                        servers[path.name] = _start(plan, path, own)
                        _warm_up(plan, bench, servers[path.name], path)
                    for length in lengths:
                        report(path.name, f"round {round_index + 1}: prompts of {length} tokens")
                        speed = run_bench(plan, bench, servers[path.name], path, length)
                        _append_row(plan, path, length, round_index, speed)
                report(path.name, f"round {round_index + 1} done")
    return summarize(plan.read_rows(paths), plan.model, plan.settings.tp)


def _start(plan: ThroughputPlan, path: ServePath, stack: contextlib.ExitStack) -> Server:
    log = plan.out / f"{plan.model}.{path.name}.throughput-server.log"
    return stack.enter_context(plan.fleet.run_server(path, plan.settings, log))


def _start_all(
    plan: ThroughputPlan, bench: ServingBench, paths: Sequence[ServePath], shared: contextlib.ExitStack, report: Report
) -> dict[str, Server]:
    """All servers up and warm; they start at the same time, `jobs` of them."""
    servers, absent = dict(plan.servers), [path for path in paths if path.name not in plan.servers]
    with ThreadPoolExecutor(max_workers=plan.jobs) as pool:
        for path in absent:
            report(path.name, "starting")
        started = {path.name: pool.submit(_start, plan, path, shared) for path in absent}
        try:
            for name, future in started.items():
                servers[name] = future.result()
        except BaseException:
            # Leaving the pool waits for its threads, which wait for servers.
            plan.fleet.close()
            raise
    for path in paths:
        report(path.name, "warming up")
        _warm_up(plan, bench, servers[path.name], path)
    return servers


def _warm_up(plan: ThroughputPlan, bench: ServingBench, server: Server, path: ServePath) -> None:
    """Every shape once: kernels are compiled at their first use.

    Raises:
        ServerFailed: a rank runs another pipeline than the path's.
    """
    for length in plan.prompt_lengths:
        run_bench(plan, bench, server, path, length, warm_up=True)
    lines = read_prefill_lines(server.log)
    if wrong := check_prefill_lines(path, lines, plan.settings.tp, not plan.settings.cpu):
        raise server.failed(f"of path {path.name}: {wrong}")


def run_bench(
    plan: ThroughputPlan, bench: ServingBench, server: Server, path: ServePath, length: int, warm_up: bool = False
) -> float:
    """Input tokens per second of one run of SGLang's serving benchmark.

    Args:
        warm_up: send a few prompts only.

    Raises:
        ServerFailed: it failed, or the server did not answer every request.
    """
    prompts = _WARMUP_PROMPTS if warm_up else max(MIN_PROMPTS, plan.tokens // length)
    output = plan.out / f".{plan.model}.{path.name}.bench.jsonl"
    output.unlink(missing_ok=True)
    arguments = ["--backend", "sglang", "--host", "127.0.0.1", "--port", str(server.port)]
    arguments += ["--dataset-name", "random-ids", "--tokenize-prompt", "--random-input-len", str(length)]
    arguments += ["--random-output-len", "1", "--random-range-ratio", "1.0", "--num-prompts", str(prompts)]
    # A stream reports a rejected prompt under HTTP 200, which the benchmark counts as completed.
    arguments += ["--disable-stream", "--warmup-requests", "0", "--disable-tqdm", "--output-file", str(output)]
    try:
        bench.run(arguments, _TIMEOUT_S)
    except ServerFailed as exc:
        raise ServerFailed(f"path {path.name}, prompts of {length} tokens: {exc}, {server.log}") from exc
    if not output.is_file():
        raise ServerFailed(f"sglang.benchmark.serving wrote no result; logs: {bench.log}, {server.log}")
    result = json.loads(output.read_text().splitlines()[-1])
    output.unlink()
    if result["completed"] != prompts:
        raise server.failed(f"completed {result['completed']} of {prompts} requests of {bench.log}")
    return float(result["input_throughput"])


def summarize(rows: Sequence[dict], model: str, ep: int) -> list[dict]:
    """Median and spread of single measurements, in the order in which paths and lengths first appear.

    `path`, `model`, `prompt_len`, `input_tok_s_median`, `_min`, `_max`, `rounds`, `ep`, and the last one's stamp.
    """
    speeds: dict[tuple[str, int], list[float]] = defaultdict(list)
    stamps: dict[tuple[str, int], dict] = {}
    for row in rows:
        speeds[row["path"], row["prompt_len"]].append(row["input_tok_s"])
        stamps[row["path"], row["prompt_len"]] = row["stamp"]
    return [
        {
            "path": path,
            "model": model,
            "prompt_len": length,
            "input_tok_s_median": round(statistics.median(values), 1),
            "input_tok_s_min": round(min(values), 1),
            "input_tok_s_max": round(max(values), 1),
            "rounds": len(values),
            "ep": ep,
            **stamps[path, length],
        }
        for (path, length), values in speeds.items()
    ]


def _append_row(plan: ThroughputPlan, path: ServePath, length: int, round_index: int, speed: float) -> None:
    row = {"path": path.name, "prompt_len": length, "round": round_index, "input_tok_s": speed}
    row |= {"settings": plan.fingerprint(), "stamp": stamp()}
    with plan.raw_file.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
