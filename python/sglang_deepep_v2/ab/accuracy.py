"""GSM8K through SGLang's own `sglang.test.few_shot_gsm8k`, run against a live server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_deepep_v2.ab.servers import Fleet, Server, ServerFailed

_ANSWER = re.compile(r"\d+")
_PRINTED = {
    "accuracy": re.compile(r"^Accuracy: (\S+)", re.MULTILINE),
    "invalid": re.compile(r"^Invalid: (\S+)", re.MULTILINE),
    "latency_s": re.compile(r"^Latency: (\S+) s", re.MULTILINE),
}


@dataclass(frozen=True)
class EvalSettings:
    """Options of the evaluation, as `sglang.test.few_shot_gsm8k` names them."""

    data_path: Path
    num_questions: int = 1319
    num_shots: int = 5
    max_new_tokens: int = 512
    parallel: int = 128
    timeout_s: float = 3600.0


def check_data(settings: EvalSettings) -> int:
    """The number of questions that will be asked.

    Raises:
        ValueError: the file is not in GSM8K's format, or too short for the shots.
    """
    lines = settings.data_path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            usable = isinstance(entry["question"], str) and _ANSWER.search(entry["answer"].replace(",", ""))
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"{settings.data_path}:{number}: not a GSM8K line with question and answer") from exc
        if not usable:
            raise ValueError(f"{settings.data_path}:{number}: the answer has no number in it")
    if len(lines) < max(1, settings.num_shots):
        raise ValueError(f"{settings.data_path} has {len(lines)} questions, --eval-shots needs {settings.num_shots}")
    return min(len(lines), settings.num_questions)


def evaluate_gsm8k(server: Server, settings: EvalSettings, fleet: Fleet, log: Path) -> dict:
    """Correct answers and SGLang's printed numbers: `correct`, `total`, `accuracy`, `invalid`, `latency_s`.

    The evaluation's log is `log`; its transcript lies in the directory `<log's stem>.gsm8k`.

    Raises:
        ServerFailed: the evaluation failed or printed no accuracy.
    """
    total = check_data(settings)
    command = [sys.executable, "-W", "ignore", "-m", "sglang.test.few_shot_gsm8k"]
    command += ["--host", "127.0.0.1", "--port", str(server.port)]
    command += ["--data-path", str(settings.data_path.resolve()), "--num-questions", str(settings.num_questions)]
    command += ["--num-shots", str(settings.num_shots), "--max-new-tokens", str(settings.max_new_tokens)]
    command += ["--parallel", str(settings.parallel)]
    # The module writes its transcript into the working directory under a fixed name.
    workdir = log.parent / (log.stem + ".gsm8k")
    workdir.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"SGLANG_OVERLAY": "0", "NO_PROXY": "127.0.0.1"}
    try:
        with fleet.run_process(command, env, log, cwd=workdir) as process:
            code = process.wait(timeout=settings.timeout_s)
    except subprocess.TimeoutExpired as exc:
        raise server.failed(
            f"took longer than {settings.timeout_s:.0f} s for GSM8K, log of the evaluation {log}"
        ) from exc
    printed = parse_printed(log.read_text(errors="replace"))
    if code or "accuracy" not in printed:
        raise ServerFailed(f"sglang.test.few_shot_gsm8k ended with exit code {code} and no accuracy; log: {log}")
    # It prints three decimals, which is exact to the question up to 1999 of them.
    return {"correct": round(printed["accuracy"] * total), "total": total, **printed, "settings": _plain(settings)}


def parse_printed(text: str) -> dict[str, float]:
    """The numbers that `few_shot_gsm8k` printed; a missing one is left out."""
    return {name: float(match.group(1)) for name, pattern in _PRINTED.items() if (match := pattern.search(text))}


def _plain(settings: EvalSettings) -> dict:
    return asdict(settings) | {"data_path": settings.data_path.name}
