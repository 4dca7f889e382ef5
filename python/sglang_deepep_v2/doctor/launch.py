"""Check of a launch command: SGLang's own parsing and resolution, token budget included."""

import re
import shlex
from collections.abc import Sequence

from .machine import USE_REFERENCE, Finding, Launch, Machine

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_LIMIT = "SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES"
_CAPACITY = "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"


def read_command(words: Sequence[str]) -> Launch:
    """Takes `[NAME=VALUE ...] python -m sglang.launch_server ARGS` or `sglang serve ARGS` apart."""
    launch = Launch()
    for index, word in enumerate(words):
        if _ASSIGNMENT.match(word):
            name, _, value = word.partition("=")
            launch.env[name] = value
        elif word.endswith(("sglang.launch_server", "sglang/launch_server.py")):
            launch.argv = list(words[index + 1 :])
            return launch
        elif word == "serve" and index and words[index - 1].endswith("sglang"):
            launch.argv = list(words[index + 1 :])
            if launch.argv and not launch.argv[0].startswith("-"):
                launch.argv.insert(0, "--model-path")
            return launch
    launch.problem = f"no `sglang.launch_server` or `sglang serve` in: {' '.join(words)}"
    return launch


def check_launch(machine: Machine, launch: Launch) -> Finding:
    """What the server would say about this command before it loads anything, in its own words."""
    if launch.problem:
        fix = "sglang-deepep-v2 doctor -- python -m sglang.launch_server --model-path MODEL ..."
        return Finding("launch", "fail", launch.problem, fix)
    # A check must not download: the model's config has to be here already.
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    device = _device(launch.argv)
    if device == "cuda" and not machine.has_gpu:
        # A command for another machine is held against that machine's transport, not this one's.
        env[USE_REFERENCE] = "0"
    reply = machine.probe("launch", *launch.argv, env={**env, **launch.env})
    note = ""
    if device is None and not machine.has_gpu:
        note = "; checked as a CPU server, add --device cuda to check it for GPUs"
    if "error" in reply:
        return _refused(reply, note)
    if reply["backend"] != "deepep_v2":
        problem = f"the command resolves to --moe-a2a-backend {reply['backend']}: this backend takes no part"
        return Finding("launch", "warn", problem, "add --moe-a2a-backend deepep_v2")
    local = reply["tp"] * reply["pp"] // reply["nnodes"]
    if machine.gpus and local > len(machine.gpus):
        return Finding(
            "launch",
            "fail",
            f"the command needs {local} GPUs on this node, {len(machine.gpus)} visible",
            "lower --tp",
        )
    where = f"{reply['device']}, tp {reply['tp']}, {reply['nnodes']} node(s), {reply['mode']}"
    if reply["device"] == "cuda" and not machine.has_gpu:
        note = "; no GPU is here"
    bytes_ = reply.get("sync_free")
    if bytes_ and bytes_["needed"] is None:
        note += f"; {_LIMIT}={bytes_['limit']} was not checked: the model's config does not name its widths"
    elif bytes_ and bytes_["needed"] > bytes_["limit"]:
        problem = f"sync-free prefill needs {bytes_['needed']} bytes per layer ({bytes_['rows']} rows), {_LIMIT} allows"
        return Finding("launch", "fail", f"{problem} {bytes_['limit']}", f"export {_LIMIT}={bytes_['needed']}")
    if "required" not in reply:
        return Finding("launch", "ok", f"{where}, decode role, capacity {reply['capacity']} tokens per rank{note}")
    budget = f"a prefill dispatches up to {reply['required']} tokens per rank, capacity {reply['capacity']}"
    return Finding("launch", "ok", f"{where}; {budget}{note}")


def _device(argv: Sequence[str]) -> str | None:
    """The value of the last --device, as SGLang's parser reads it; None without one."""
    device = None
    for word, following in zip(argv, [*argv[1:], ""]):
        name, equals, value = word.partition("=")
        if name == "--device":
            device = value if equals else following
    return device


def _refused(reply: dict, note: str) -> Finding:
    kind, text, stage = reply["error_type"], reply["error"], reply.get("stage", "start")
    if stage == "parse":
        return Finding("launch", "fail", text, "python -m sglang.launch_server --help")
    if stage == "given":
        return Finding("launch", "fail", text)
    if stage == "import":
        return Finding("launch", "fail", f"SGLang does not import: {kind}: {text}", "pip install sglang")
    if stage == "start":
        return Finding("launch", "fail", f"the command could not be examined: {kind}: {text}")
    if reply.get("absent"):
        problem = f"capacity was not checked, the config of {reply['model']} is not on this machine: {text}"
        return Finding("launch", "warn", problem, f"hf download {shlex.quote(reply['model'])} config.json")
    # SGLang's refusals are ValueErrors and bare assertions; anything else is named by its class as well.
    said = text if kind in ("ValueError", "AssertionError") else f"{kind}: {text}"
    return Finding("launch", "fail", f"{said.rstrip('.')}{note}" if note else said, _fix(text))


def _fix(text: str) -> str | None:
    """The setting that answers one of the server's refusals, where the text alone does not name it."""
    required = re.search(r"required=(\d+), capacity=\d+", text)
    if required and _CAPACITY in text:
        return f"export {_CAPACITY}={required[1]}"
    passed = re.search(r"[Pp]ass (--deepep-v2-mode \w+|--disable-cuda-graph\b)", text)
    return passed and f"add {passed[1]}"
