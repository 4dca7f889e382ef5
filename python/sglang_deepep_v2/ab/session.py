"""One A/B of one checkpoint: a server per path, the same prompts to each, results kept so that a run resumes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sglang_deepep_v2.ab.fingerprint import fingerprint
from sglang_deepep_v2.ab.paths import ServePath
from sglang_deepep_v2.ab.probe import Probe, load_probes, probe_server, save_probes
from sglang_deepep_v2.ab.servers import (
    Fleet,
    PrefillLine,
    Server,
    ServerFailed,
    ServeSettings,
    check_prefill_lines,
    launch_environment,
    read_prefill_lines,
)
from sglang_deepep_v2.provenance import stamp

REFERENCE = "transformers"
_PROBE_TIMEOUT_S = 1200.0
_REFERENCE_TIMEOUT_S = 600.0

Report = Callable[[str, str], None]


@dataclass
class PathResult:
    """What one path did with one checkpoint.

    Attributes:
        model: the checkpoint's name.
        path: the path's name, or `transformers`.
        lines: what each process logged about its prefill.
        error: why the path failed; None when it answered.
        start_s, probe_s: seconds until the server answered, and for all prompts.
        log: the server's log.
        accuracy: the evaluation's numbers, when one was asked for.
        stamp: the machine, versions, commit and date of the measurement.
        probes: the answers, kept in a file of their own.
    """

    model: str
    path: str
    lines: list[PrefillLine] = field(default_factory=list)
    error: str | None = None
    start_s: float = 0.0
    probe_s: float = 0.0
    log: str = ""
    accuracy: dict | None = None
    resumed: bool = False
    stamp: dict = field(default_factory=dict)
    probes: list[Probe] = field(default_factory=list, repr=False)

    @property
    def seconds(self) -> float:
        return self.start_s + self.probe_s

    def summary(self) -> dict:
        """Everything but the answers, ready for JSON."""
        return {key: value for key, value in asdict(self).items() if key != "probes"}


@dataclass(frozen=True)
class Kept:
    """Servers that outlive their comparison, by path; `stack` ends them."""

    stack: contextlib.ExitStack
    servers: dict[str, Server] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What every path of one checkpoint is asked.

    Attributes:
        model: the checkpoint's name in tables and file names.
        settings: how its servers are started.
        prompts: token ids, all sent to each path.
        new_tokens: greedy tokens per prompt.
        out: directory for results and logs.
        fleet: holds the processes.
        resume: take over the results of an earlier run with the same question.
        evaluate: called with each live server and the path's name; returns the accuracy to record.
        evaluation: what `evaluate` asks, so that another evaluation is not taken for this one.
        keep: takes every server that answered, instead of ending it.
    """

    model: str
    settings: ServeSettings
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    out: Path
    fleet: Fleet
    resume: bool = False
    evaluate: Callable[[Server, str], dict] | None = None
    evaluation: str = ""
    keep: Kept | None = None

    def file(self, path: str, suffix: str) -> Path:
        return self.out / f"{self.model}.{path}{suffix}"

    def fingerprint(self, path: ServePath | None) -> str:
        """Changes with anything that may change the answer of a path."""
        served = asdict(path) if path is not None else None
        environment = launch_environment(path, self.settings) if path is not None else {}
        question = (served, list(map(list, self.prompts)), self.new_tokens, self.evaluation)
        return fingerprint(self.settings, environment, *question)


def run_path(job: Job, path: ServePath, report: Report) -> PathResult:
    """Serve, probe and stop one path; a failure becomes the result's `error`."""
    if (kept := resumed(job, path.name, path, report)) is not None:
        report(path.name, "kept from the earlier run")
        return kept
    log = job.file(path.name, ".log")
    result = PathResult(job.model, path.name, log=str(log))
    report(path.name, "starting")
    try:
        with contextlib.ExitStack() as own:
            server = own.enter_context(job.fleet.run_server(path, job.settings, log))
            result.start_s = server.started_s
            report(path.name, f"up after {server.started_s:.0f} s, {len(job.prompts)} prompts")
            begin = time.monotonic()
            result.probes = probe_server(server, job.prompts, job.new_tokens, _PROBE_TIMEOUT_S)
            result.probe_s = time.monotonic() - begin
            if job.evaluate is not None:
                report(path.name, "evaluating")
                result.accuracy = job.evaluate(server, path.name)
            if job.keep is not None:
                job.keep.servers[path.name] = server
                job.keep.stack.push(own.pop_all())
        result.lines = read_prefill_lines(log)
        if wrong := check_prefill_lines(path, result.lines, job.settings.tp, not job.settings.cpu):
            result.error = f"{wrong}; log: {log}"
    except ServerFailed as exc:
        result.error = str(exc)
    _keep(job, result, path)
    report(path.name, "failed" if result.error else f"done in {result.seconds:.0f} s")
    return result


def run_reference(job: Job, report: Report) -> PathResult:
    """The transformers oracle, in a process of its own."""
    if (kept := resumed(job, REFERENCE, None, report)) is not None:
        report(REFERENCE, "kept from the earlier run")
        return kept
    log, answers, prompts = (job.file(REFERENCE, suffix) for suffix in (".log", ".probes.json", ".prompts.json"))
    result = PathResult(job.model, REFERENCE, log=str(log))
    job.out.mkdir(parents=True, exist_ok=True)
    prompts.write_text(json.dumps(job.prompts))
    report(REFERENCE, "running")
    begin = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-m", "sglang_deepep_v2.ab.reference", job.settings.model]
    command += [str(prompts), str(answers), str(job.new_tokens)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SGLANG_OVERLAY": "0"}
    try:
        with job.fleet.run_process(command, env, log) as process:
            code = process.wait(timeout=_REFERENCE_TIMEOUT_S)
        if code:
            raise ServerFailed(f"transformers ended with exit code {code}")
        result.probes = load_probes(answers)
    except subprocess.TimeoutExpired:
        result.error = f"transformers took longer than {_REFERENCE_TIMEOUT_S:.0f} s; log: {log}"
    except ServerFailed as exc:
        result.error = f"{exc}; log: {log}"
    result.probe_s = time.monotonic() - begin
    _keep(job, result, None)
    report(REFERENCE, "failed" if result.error else f"done in {result.seconds:.0f} s")
    return result


def run_all(
    job: Job, paths: Sequence[ServePath], with_reference: bool, jobs: int, report: Report
) -> dict[str, PathResult]:
    """Every path's result by name, `jobs` of them at a time, the slowest kinds first."""
    tasks: list[tuple[str, Callable[[], PathResult]]] = []
    # Interpreted scatter and gather kernels make non-expanded prefill the longest on CPU.
    for path in sorted(paths, key=lambda path: path.pipeline != "non-expanded"):
        tasks.append((path.name, lambda path=path: run_path(job, path, report)))
    if with_reference:
        tasks.append((REFERENCE, lambda: run_reference(job, report)))
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = {name: pool.submit(task) for name, task in tasks}
        try:
            results = {name: future.result() for name, future in futures.items()}
        except BaseException:
            # The threads wait for their servers; without servers they end.
            job.fleet.close()
            raise
    order = [path.name for path in paths] + [REFERENCE] * with_reference
    return {name: results[name] for name in order}


def _keep(job: Job, result: PathResult, path: ServePath | None) -> None:
    result.stamp = stamp()
    if result.error is not None:
        job.file(result.path, ".json").unlink(missing_ok=True)
        return
    save_probes(job.file(result.path, ".probes.json"), result.probes)
    record = {"fingerprint": job.fingerprint(path), "result": result.summary()}
    scratch = job.file(result.path, ".json.tmp")
    scratch.write_text(json.dumps(record, indent=1))
    scratch.replace(job.file(result.path, ".json"))


def resumed(
    job: Job, name: str, path: ServePath | None, report: Report = lambda path, status: None
) -> PathResult | None:
    """The earlier run's result; None without one, with another question, or with damaged files, which is reported."""
    file = job.file(name, ".json")
    if not job.resume or not file.is_file():
        return None
    try:
        record = json.loads(file.read_text())
        if record["fingerprint"] != job.fingerprint(path):
            return None
        fields = record["result"] | {"resumed": True}
        fields["lines"] = [PrefillLine(**line) for line in fields["lines"]]
        return PathResult(**fields, probes=load_probes(job.file(name, ".probes.json")))
    except (ValueError, KeyError, TypeError, OSError) as exc:
        report(name, f"not kept, {file} or its .probes.json is damaged ({type(exc).__name__}): measured again")
        return None
