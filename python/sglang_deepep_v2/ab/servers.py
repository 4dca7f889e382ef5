"""Real `sglang.launch_server` processes: started with a path's environment, awaited, ended with all their children."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_deepep_v2.ab.paths import ServePath
from sglang_deepep_v2.cpu_reference import PLATFORM_NAME

CAPACITY = "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
REFERENCE_TRANSPORT = "reference"
_STOP_GRACE_S = 3.0
_KILL_GRACE_S = 5.0
_LOG_TAIL_LINES = 25
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_USAGE_ERROR = re.compile(r"(sglang serve|\S*launch_server(\.py)?): error: ")
_PREFILL_LINE = re.compile(
    r"\[[^\]]*?(?P<process>(?: (?:DP|TP|EP|PP)\d+)+)?\] DeepEP v2 prefill: "
    r"pipeline=(?P<pipeline>\S+) sync=(?P<sync>\S+) transport=(?P<transport>\S+)(?:.*? reason=(?P<reason>.*))?"
)


class ServerFailed(RuntimeError):
    """A server ended or did not answer; the message names its log and shows the end of it."""


@dataclass(frozen=True)
class ServeSettings:
    """What all paths of one A/B share.

    Attributes:
        model: checkpoint directory or Hugging Face name.
        tp: tensor-parallel ranks, which deepep_v2 takes as expert-parallel ranks as well.
        chunk: tokens per prefill chunk.
        cpu: serve on the CPU reference platform.
        extra_args: more arguments for `sglang.launch_server`, given to every path.
        pythonpath: directories put in front of every server's PYTHONPATH.
        ready_timeout_s: longest wait for a server to answer.
    """

    model: str
    tp: int
    chunk: int
    cpu: bool
    extra_args: tuple[str, ...] = ()
    pythonpath: tuple[str, ...] = ()
    ready_timeout_s: float = 900.0


@dataclass(frozen=True)
class PrefillLine:
    """One process's statement of how it runs prefill."""

    process: str
    pipeline: str
    sync: str
    transport: str
    reason: str = ""


@dataclass
class Server:
    """A running server.

    Attributes:
        url: base URL.
        log: file with its output.
        started_s: seconds from launch to the first answer.
    """

    url: str
    log: Path
    process: subprocess.Popen = field(repr=False)
    started_s: float = 0.0

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def post(self, route: str, body: dict, timeout_s: float) -> object:
        """The decoded JSON answer.

        Raises:
            ServerFailed: the server died, refused, or took longer than `timeout_s` seconds.
        """
        request = urllib.request.Request(
            self.url + route, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as exc:
            raise self.failed(f"answered {exc.code} to {route}: {exc.read()[:500].decode(errors='replace')}") from exc
        except (OSError, json.JSONDecodeError) as exc:
            raise self.failed(f"did not answer {route} within {timeout_s:.0f} s ({exc})") from exc

    def failed(self, what: str) -> ServerFailed:
        """An error that says what happened and ends with the log's tail."""
        code = self.process.poll()
        state = "still running" if code is None else f"exit code {code}"
        return ServerFailed(f"server {what}; {state}; log: {self.log}\n{_log_tail(self.log)}")


def launch_command(path: ServePath, settings: ServeSettings, port: int) -> list[str]:
    """The command line of one server."""
    command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", settings.model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--tp-size", str(settings.tp)]
    command += ["--chunked-prefill-size", str(settings.chunk), "--max-prefill-tokens", str(settings.chunk)]
    # Every prompt is computed anew; a cached prefix would hide the prefill.
    command += ["--disable-radix-cache", "--skip-server-warmup", "--moe-a2a-backend", path.a2a]
    if path.a2a != "none":
        command += ["--ep-size", str(settings.tp), "--moe-runner-backend", "deep_gemm"]
    if path.a2a == "deepep":
        command += ["--deepep-mode", "normal"]
    if settings.cpu:
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        command += ["--grammar-backend", "none", "--disable-cuda-graph", "--sleep-on-idle"]
        command += ["--max-total-tokens", "16384", "--max-running-requests", "64", "--mem-fraction-static", "0.3"]
    return command + list(settings.extra_args)


def launch_environment(path: ServePath, settings: ServeSettings) -> dict[str, str]:
    """The environment of one server: the caller's, the path's toggles, and what a CPU server needs."""
    env = dict(os.environ)
    env["SGLANG_OVERLAY"] = "1" if path.overlay else "0"
    env.update(path.env)
    # A number of tokens that every path accepts; SGLang's own check does not divide by the ranks in all releases.
    env.setdefault(CAPACITY, str(settings.chunk))
    # /health would otherwise generate a token, which an interpreted kernel answers too late.
    env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    env["PYTHONUNBUFFERED"] = "1"
    if os.path.isdir(settings.model):
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if settings.cpu:
        env |= {
            # Also on a machine with GPUs: the demo's checkpoints and bounds are made for the CPU reference.
            "SGLANG_PLATFORM": PLATFORM_NAME,
            "CUDA_VISIBLE_DEVICES": "",
            "TRITON_INTERPRET": "1",
            "SGLANG_USE_CPU_ENGINE": "0",
            # A crashed server would wait a minute for dumps of a GPU.
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(_cores_of_ranks(settings.tp)),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
    if settings.pythonpath:
        env["PYTHONPATH"] = os.pathsep.join([*settings.pythonpath, env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return env


def _cores_of_ranks(tp: int) -> list[str]:
    cores = sorted(os.sched_getaffinity(0))
    return [str(cores[rank % len(cores)]) for rank in range(tp)]


class Fleet:
    """The processes that one command started; closing it ends all of them, from any thread."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()
        self._closed = False
        # SGLang's sockets and scratch files have names that another run could take too.
        self._scratch = tempfile.TemporaryDirectory(prefix="ab-", ignore_cleanup_errors=True)

    @contextlib.contextmanager
    def run_server(self, path: ServePath, settings: ServeSettings, log: Path) -> Iterator[Server]:
        """A server that answers; it and all its children end with the block, whatever ends it.

        Raises:
            ServerFailed: it exits or does not answer within `settings.ready_timeout_s`.
        """
        port = free_port()
        command, env = launch_command(path, settings, port), launch_environment(path, settings)
        with self.run_process(command, env, log) as process:
            server = Server(f"http://127.0.0.1:{port}", log, process)
            begin = time.monotonic()
            _wait_until_ready(server, settings.ready_timeout_s)
            server.started_s = time.monotonic() - begin
            yield server

    @contextlib.contextmanager
    def run_process(
        self, command: Sequence[str], env: dict[str, str], log: Path, cwd: Path | None = None, piped: bool = False
    ) -> Iterator[subprocess.Popen]:
        """A process in its own session with its output in `log`; its whole group is ended with the block.

        `piped`: stdin and stdout are text pipes, and only stderr goes to the log.

        Raises:
            ServerFailed: the fleet is closed.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        # An interrupt between the start and the note of it would leave a process that nobody ends.
        with _interrupts_held(), self._lock:
            if self._closed:
                raise ServerFailed("interrupted before it started")
            with log.open("wb") as stream:
                stream.write(("$ " + " ".join(command) + "\n").encode())
                stream.flush()
                process = subprocess.Popen(
                    list(command),
                    env=env | {"TMPDIR": self._scratch.name},
                    cwd=cwd,
                    stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if piped else stream,
                    stderr=stream,
                    text=piped,
                    start_new_session=True,
                )
            self._running.add(process)
        try:
            yield process
        finally:
            _end_group(process)
            with self._lock:
                self._running.discard(process)

    def close(self) -> None:
        """End every running process and refuse new ones; the blocks that hold them fail and unwind."""
        with self._lock:
            self._closed = True
            processes = list(self._running)
        for process in processes:
            _end_group(process)
        self._scratch.cleanup()


def _end_group(process: subprocess.Popen) -> None:
    """Terminate the process group, kill what is left of it, and return when nothing of it runs."""
    # The group outlives its leader, so it is signalled even when the leader is gone.
    for number, grace in ((signal.SIGTERM, _STOP_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + grace
        while _group_runs(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.poll()
    process.wait()


def _group_runs(group: int) -> bool:
    """Whether a process of the group runs; zombies, which nobody may reap in a container, do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = stat.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue
        if int(process_group) == group and state != "Z":
            return True
    return False


def _wait_until_ready(server: Server, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise server.failed("ended before it answered")
        try:
            with urllib.request.urlopen(server.url + "/model_info", timeout=5):
                return
        except OSError:
            time.sleep(0.25)
    raise server.failed(f"did not answer within {timeout_s:.0f} s of its start")


def free_port() -> int:
    """A TCP port that is free on the loopback interface now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read_prefill_lines(log: Path) -> list[PrefillLine]:
    """What each process of a server logged about its prefill, one entry per process, sorted by process."""
    lines: dict[str, PrefillLine] = {}
    for text in log.read_text(errors="replace").splitlines():
        if match := _PREFILL_LINE.search(text):
            found = {name: (value or "").strip() for name, value in match.groupdict().items()}
            lines[found["process"]] = PrefillLine(**found)
    return [lines[process] for process in sorted(lines)]


def check_prefill_lines(path: ServePath, lines: Sequence[PrefillLine], ranks: int, on_gpu: bool = False) -> str | None:
    """Why a server did not run the path it was started for; None when each rank logged that path's pipeline.

    `on_gpu`: the CPU reference transport, which is slow and sends nothing, is another path too.
    """
    if path.pipeline is None:
        return None
    if len(lines) != ranks:
        return f"{len(lines)} of {ranks} ranks logged a prefill pipeline"
    for line in lines:
        if line.pipeline != path.pipeline or (path.sync and line.sync != path.sync):
            return (
                f"{line.process or 'a rank'} ran pipeline={line.pipeline} sync={line.sync} instead of "
                f"pipeline={path.pipeline} sync={path.sync}: {line.reason}"
            )
        if on_gpu and line.transport == REFERENCE_TRANSPORT:
            return f"{line.process or 'a rank'} ran on a GPU with transport={line.transport} instead of DeepEP's"
    return None


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """In the main thread, which alone is interrupted, SIGINT, SIGTERM and SIGHUP take effect after the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = []
    handlers = {number: signal.getsignal(number) for number in _INTERRUPTS}
    # A mask would reach the child; a handler does not outlive its exec.
    for number in handlers:
        if callable(handlers[number]):
            signal.signal(number, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Within the block the first SIGINT, SIGTERM or SIGHUP unwinds the stack as Ctrl-C does; later ones do nothing.

    A second Ctrl-C would cut short what ends the servers, which do not get the terminal's own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum, frame):
        for number in previous:
            signal.signal(number, lambda *_: None)
        raise KeyboardInterrupt

    # What the caller ignores stays ignored: nohup.
    previous = {number: signal.getsignal(number) for number in _INTERRUPTS}
    previous = {number: handler for number, handler in previous.items() if handler is not signal.SIG_IGN}
    for number in previous:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _log_tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    # argparse prints its whole usage before the one line that matters.
    refused = [line for line in lines[-_LOG_TAIL_LINES:] if _USAGE_ERROR.match(line)]
    return "\n".join("  | " + line[:300] for line in refused[-1:] or lines[-_LOG_TAIL_LINES:])
