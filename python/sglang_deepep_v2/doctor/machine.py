"""What every check reads: the environment, proc and sys, and child processes with a time limit."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Level = Literal["ok", "warn", "fail"]
REFERENCE = "the CPU reference transport will be used"
USE_REFERENCE = "SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT"
MAX_TIMEOUT_S = 86400
# How long a killed child's pipes may stay open.
_PIPES_S = 2.0
_PROBES = Path(__file__).with_name("probes.py")
_MARK = "@doctor "
_TRUE = {"1", "true", "yes", "y"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``fix`` is a command or a setting, None where nothing is to be done."""

    check: str
    level: Level
    message: str
    fix: str | None = None

    def as_dict(self) -> dict[str, str | None]:
        return asdict(self)


@dataclass(frozen=True)
class Completed:
    """A finished child: ``code`` is its exit status, negative for a signal, None past the limit."""

    code: int | None
    out: str
    err: str


@dataclass(frozen=True)
class Gpu:
    """One visible GPU as nvidia-smi names it; ``capability`` is (major, minor) or None."""

    index: int
    name: str
    capability: tuple[int, int] | None
    driver: str


class Machine:
    """The machine under examination. Tests hand in an environment and file trees of their own.

    env        the environment that the children get and the checks read
    proc, sys  roots of the proc and sys file systems
    python     the interpreter whose packages are examined
    timeout_s  limit of one child, in seconds
    """

    def __init__(
        self,
        env: Mapping[str, str] | None = None,
        proc: Path = Path("/proc"),
        sys_root: Path = Path("/sys"),
        python: str = sys.executable,
        timeout_s: float = 120.0,
    ):
        self.env = dict(os.environ if env is None else env)
        self.proc, self.sys, self.python, self.timeout_s = proc, sys_root, python, timeout_s
        self._memory: dict[Any, Any] = {}
        self._locks: dict[Any, threading.Lock] = {}
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen] = set()
        self._stopped = False

    def run(
        self, argv: Sequence[str], timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> Completed:
        """Runs a command in its own process group, killed as a whole at the limit. Never raises."""
        try:
            child = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=dict(env or self.env),
                start_new_session=True,
            )
        except OSError as error:
            return Completed(127, "", str(error))
        self._children.add(child)
        try:
            if self._stopped:
                os.killpg(child.pid, signal.SIGKILL)
            out, err = child.communicate(timeout=timeout_s or self.timeout_s)
            return Completed(child.returncode, out, err)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            return Completed(None, *self._rest(child))
        finally:
            self._children.discard(child)

    @staticmethod
    def _rest(child: subprocess.Popen) -> tuple[str, str]:
        """What a killed child wrote. A grandchild in a session of its own outlives it and may hold the pipes."""
        try:
            return child.communicate(timeout=_PIPES_S)
        except subprocess.TimeoutExpired as held:
            child.stdout.close()
            child.stderr.close()
            # Bytes, though the child's pipes are text.
            return (held.output or b"").decode(errors="replace"), (held.stderr or b"").decode(errors="replace")

    def stop(self) -> None:
        """Ends every child, those included that other threads start from now on."""
        self._stopped = True
        for child in list(self._children):
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    def which(self, name: str) -> str | None:
        """The command's path on this environment's PATH, None without one."""
        import shutil

        return shutil.which(name, path=self.env.get("PATH", os.defpath))

    def probe(self, name: str, *args: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The answer of one probe of probes.py, run once in a child.

        A child that fails answers {"error": text, "error_type": exception class, "signal" or "timeout"}.
        """
        return self.once(("probe", name, args), lambda: self._probe(name, args, {**self.env, **(env or {})}))

    def _probe(self, name: str, args: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
        done = self.run([self.python, "-P", "-W", "ignore", str(_PROBES), name, *args], env=env)
        lines = [line for line in done.out.splitlines() if line.startswith(_MARK)]
        if lines:
            return json.loads(lines[-1].removeprefix(_MARK))
        if done.code is None:
            return {"error": self.late, "error_type": "timeout"}
        tail = done.err.strip().splitlines()[-1:] or ["no message"]
        if done.code < 0:
            name = signal.Signals(-done.code).name
            return {"error": f"killed by {name}: {tail[0]}", "error_type": "signal"}
        return {"error": f"exit status {done.code}: {tail[0]}", "error_type": "exit"}

    def once(self, key: Any, compute: Any) -> Any:
        """compute(), run once per key however many threads ask."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._memory:
                self._memory[key] = compute()
            return self._memory[key]

    @property
    def late(self) -> str:
        """What is said of a child that was killed at the limit."""
        return f"no answer within {self.timeout_s:g} s"

    @property
    def gpus(self) -> list[Gpu]:
        """The GPUs nvidia-smi lists, narrowed by CUDA_VISIBLE_DEVICES where that holds indices."""
        return self.once("gpus", self._gpus)

    def _gpus(self) -> list[Gpu]:
        fields = "index,name,compute_cap,driver_version"
        smi = self.which("nvidia-smi")
        done = smi and self.run(
            [smi, f"--query-gpu={fields}", "--format=csv,noheader"], timeout_s=min(30, self.timeout_s)
        )
        if not done or done.code != 0:
            return []
        found = []
        for line in done.out.splitlines():
            index, name, capability, driver = [part.strip() for part in line.split(",")]
            match = re.fullmatch(r"(\d+)\.(\d+)", capability)
            found.append(Gpu(int(index), name, match and (int(match[1]), int(match[2])), driver))
        visible = self.env.get("CUDA_VISIBLE_DEVICES")
        if visible is None or not re.fullmatch(r"[\d,\s-]*", visible):
            return found
        wanted = [int(part) for part in visible.split(",") if re.fullmatch(r"\s*\d+\s*", part)]
        return [gpu for gpu in found if gpu.index in wanted]

    @property
    def has_gpu(self) -> bool:
        """Whether a GPU is there for use, by nvidia-smi or by torch (a container can lack nvidia-smi)."""
        return bool(self.gpus) or bool(self.probe("torch").get("devices"))

    def flag(self, name: str) -> bool:
        """Whether a boolean variable is on, by SGLang's own spelling rules."""
        return self.env.get(name, "").lower() in _TRUE

    @property
    def needs_gpu_stack(self) -> bool:
        """Whether a missing GPU library is a failure: a GPU is there, no reference transport asked for."""
        return self.has_gpu and not self.flag(USE_REFERENCE)

    def unavailable(self, check: str, problem: str, fix: str) -> Finding:
        """A part of the GPU stack is missing or broken: a failure where it would be used, else a warning."""
        if self.needs_gpu_stack:
            return Finding(check, "fail", problem, fix)
        return Finding(check, "warn", f"{problem}; {REFERENCE}", None)


@dataclass
class Launch:
    """A launch command taken apart: assignments before it, and the arguments SGLang's parser gets."""

    env: dict[str, str] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)
    problem: str | None = None
