"""SGLang's own serving benchmark in one process that imports it once and then runs it per request.

``python -m sglang_deepep_v2.ab.serving_bench`` is that process: a JSON list of command-line arguments per line of
stdin, a JSON object (``error``: text or null) per line of stdout; what the benchmark prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from sglang_deepep_v2.ab.servers import Fleet, ServerFailed


class ServingBench:
    """The client side: ``run`` is one benchmark run. Made by :func:`start_serving_bench`."""

    def __init__(self, process: subprocess.Popen, log: Path):
        self._process, self.log = process, log

    def run(self, arguments: Sequence[str], timeout_s: float) -> None:
        """One run of ``sglang.benchmark.serving`` with these command-line arguments.

        Raises:
            ServerFailed: it failed, its process ended, or it took longer than ``timeout_s`` seconds.
        """
        try:
            self._process.stdin.write(json.dumps(list(arguments)) + "\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
            reply = self._process.stdout.readline() if ready else None
        except OSError as exc:
            raise ServerFailed(f"sglang.benchmark.serving is gone: {exc}; log: {self.log}") from exc
        if reply is None:
            raise ServerFailed(f"sglang.benchmark.serving took longer than {timeout_s:.0f} s; log: {self.log}")
        if not reply:
            code = self._process.wait()
            raise ServerFailed(f"sglang.benchmark.serving ended with exit code {code}; log: {self.log}")
        if error := json.loads(reply)["error"]:
            raise ServerFailed(f"sglang.benchmark.serving failed: {error}; log: {self.log}")


@contextlib.contextmanager
def start_serving_bench(fleet: Fleet, log: Path) -> Iterator[ServingBench]:
    """The benchmark's process, ended with the block; its output is in ``log``."""
    command = [sys.executable, "-W", "ignore", "-m", "sglang_deepep_v2.ab.serving_bench"]
    env = os.environ | {"SGLANG_OVERLAY": "0", "PYTHONUNBUFFERED": "1"}
    with fleet.run_process(command, env, log, piped=True) as process:
        yield ServingBench(process, log)


def _stand_in_for_datasets() -> None:
    """The benchmark imports every dataset reader at its start; random token ids need none of them."""
    if importlib.util.find_spec("datasets") is not None:
        return

    def load_dataset(*args, **kwargs):
        raise RuntimeError("the package datasets is not installed: pip install datasets")

    module = ModuleType("datasets")
    # transformers asks for the spec of what is in sys.modules.
    module.__spec__ = ModuleSpec("datasets", None)
    module.load_dataset = load_dataset
    sys.modules["datasets"] = module


def _refuse_failures(calculate: Callable) -> Callable:
    """The benchmark's `calculate_metrics`, which takes requests that failed for none, preceded by a check for them."""

    def checked(*args, outputs: Sequence, **kwargs):
        # A time to first token of 0 is no failure: a token may have no text, and the benchmark then records none.
        if failed := [output for output in outputs if not output.success]:
            reason = failed[0].error.strip()[-500:]
            raise RuntimeError(f"{len(failed)} of {len(outputs)} requests were not answered: {reason}")
        return calculate(*args, outputs=outputs, **kwargs)

    return checked


def main() -> None:
    # Replies keep the real stdout to themselves.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _stand_in_for_datasets()
    from sglang.benchmark import serving

    serving.calculate_metrics = _refuse_failures(serving.calculate_metrics)
    for line in sys.stdin:
        sys.argv = ["sglang.benchmark.serving", *json.loads(line)]
        print(time.strftime("%H:%M:%S"), *sys.argv, flush=True)
        error = None
        try:
            serving.cli_main()
        except SystemExit as exc:
            error = f"exit code {exc.code}" if exc.code else None
        except Exception as exc:
            traceback.print_exc()
            error = f"{type(exc).__name__}: {exc}"
        print(json.dumps({"error": error}), file=replies, flush=True)


if __name__ == "__main__":
    main()
