"""What share of a server's prefill GPU time the MoE layer takes on each path, from SGLang's own profiler.

    python3 benchmark/deepep_v2/server_profile.py --model random:qwen3-moe-fp8 --prompt-len 8192 --mem-fraction 0.3

Starts a path's server, warms it up, profiles some prompts, and appends one record a path to
``--out``/server_profile.jsonl. ``moe_share_busy``, ``attention_share``, ``dense_share`` and ``other_share`` divide the
time in which rank 0's GPU ran anything and add up to 1; ``moe_share_busy`` counts a layer from its quantiser on.
``moe_span_us`` is the mean time from a layer's first dispatch kernel to its last combine kernel, ``moe_busy_us`` the
part of it in which a kernel ran, ``moe_share_wall`` all spans over the time from the first kernel to the last.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import re
import shlex
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import records
from profiling import category, is_gemm, short_name

from sglang_deepep_v2.ab import servers
from sglang_deepep_v2.ab.checkpoints import REALISTIC, ensure_checkpoint
from sglang_deepep_v2.ab.paths import PATHS, select_paths
from sglang_deepep_v2.provenance import commit, now

HERE = Path(__file__).resolve().parent
DEFAULT_PATHS = ("sglang_nonexpanded", "sglang_expanded", "psum", "psum_sync_free")
PARTS = ("moe", "attention", "dense", "other")
FIELDS = ("path", "model", "prompt_len", "ep", "layers_seen", "moe_share_busy", "moe_share_wall", "moe_span_us")
FIELDS += ("moe_busy_us", "attention_share", "dense_share", "other_share", "gpu", "commit", "date")
# Shared with `sglang-deepep-v2 ab`, so that a checkpoint is written once.
CHECKPOINTS = Path(".demo/checkpoints")
_RANDOM = "random:"
_PROFILED_CHUNKS, _WARMUP_ROUNDS = 6, 2
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
# FlashInfer's namespace also holds norms and activations, so "flash" alone would match too much.
_ATTENTION = re.compile(r"attn|attention|fmha|flash::|flash_fwd|kvcachekernel|merge_?state", re.IGNORECASE)
_TRITON_ATTENTION = re.compile(r"_fwd(_grouped)?_kernel(_stage\d|_unified|_dense_prefill)?$")
_DENSE = re.compile(r"nvjet|gemv|matmul|xmma|splitk", re.IGNORECASE)


def part_outside(name: str) -> str:
    """The part of a kernel that stands in no MoE layer."""
    if _ATTENTION.search(name) or _TRITON_ATTENTION.match(short_name(name)):
        return "attention"
    return "dense" if is_gemm(name) or _DENSE.search(name) else "other"


def find_layers(names: list[str]) -> tuple[list[tuple[int, int, int]], int]:
    """The MoE layers among kernel names in time order, as indices (start, dispatch, end).

    A layer is [start, end): ``start`` its quantiser, ``dispatch`` its first dispatch kernel, ``end`` one past its last
    combine kernel. The second value is where an unfinished last layer starts, or the number of names.
    """
    kinds = ["attention" if part_outside(name) == "attention" else category(short_name(name)) for name in names]
    layers: list[tuple[int, int, int]] = []
    first = last = None

    def start(dispatch: int) -> int:
        floor = layers[-1][2] if layers else 0
        while dispatch > floor and kinds[dispatch - 1] in ("quantise", "copies and fills"):
            dispatch -= 1
        return dispatch

    for index, (name, kind) in enumerate(zip([*names, ""], [*kinds, "end"])):
        between_combines = kind in ("combine", "copies and fills") or "barrier" in name.lower()
        if last is not None and not between_combines:
            layers.append((start(first), first, last + 1))
            first = last = None
        if kind == "dispatch" and first is None:
            first = index
        elif kind == "combine" and first is not None:
            last = index
    return layers, len(names) if first is None else start(first)


def exclusive_us(events: list[dict]) -> list[float]:
    """Each event's time that no earlier one covers, us; together the time in which the GPU ran anything."""
    covered, own = -math.inf, []
    for event in events:
        end = event["ts"] + event["dur"]
        own.append(max(0.0, end - max(event["ts"], covered)))
        covered = max(covered, end)
    return own


def analyse(events: list[dict]) -> dict:
    """The measured fields of a record. ``events``: device activities (name, ts, dur in us) in any order.

    An unfinished last layer and what follows it count nowhere. Raises ValueError without a finished layer.
    """
    events = sorted(events, key=lambda event: event["ts"])
    layers, kept = find_layers([event["name"] for event in events])
    if not layers:
        found = "a dispatch kernel but no combine kernel" if kept < len(events) else "no dispatch kernel"
        raise ValueError(f"{found} among the trace's {len(events)} device activities")
    events = events[:kept]
    own, ends = exclusive_us(events), [event["ts"] + event["dur"] for event in events]
    in_layer = {index for start, _, end in layers for index in range(start, end)}
    sums = dict.fromkeys(PARTS, 0.0)
    for index, (event, us) in enumerate(zip(events, own)):
        sums["moe" if index in in_layer else part_outside(event["name"])] += us
    busy, wall = sum(own), max(ends) - events[0]["ts"]
    spans = [max(ends[dispatch:end]) - events[dispatch]["ts"] for _, dispatch, end in layers]
    return {
        "layers_seen": len(layers),
        "moe_share_busy": sums["moe"] / busy,
        "moe_share_wall": sum(spans) / wall,
        "moe_span_us": sum(spans) / len(layers),
        "moe_busy_us": sum(sum(own[dispatch:end]) for _, dispatch, end in layers) / len(layers),
        **{f"{part}_share": sums[part] / busy for part in PARTS[1:]},
    }


def read_trace(folder: Path, profile_id: str) -> tuple[list[dict], str]:
    """(device activities with name, ts and dur in us, the GPU's name) of rank 0. Raises FileNotFoundError."""
    files = sorted(folder.glob(f"{profile_id}-TP-0[.-]*trace.json.gz"))
    if not files:
        raise FileNotFoundError(f"the profiler wrote no trace of rank 0 ({profile_id}-TP-0*.trace.json.gz) to {folder}")
    with gzip.open(files[0], "rt") as stream:
        trace = json.load(stream)
    chosen = (e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in _DEVICE_CATEGORIES)
    devices = trace.get("deviceProperties") or [{}]
    events = [{"name": e["name"], "ts": float(e["ts"]), "dur": float(e["dur"])} for e in chosen]
    return events, devices[0].get("name", "unknown")


def post_text(server: servers.Server, route: str, body: dict, timeout_s: float) -> None:
    """POST to a route that answers in plain text, within ``timeout_s`` seconds. Raises ServerFailed."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + route, data, headers), timeout=timeout_s) as r:
            r.read()
    except OSError as error:
        raise server.failed(f"did not accept {route}: {error}") from error


def send_prompts(server: servers.Server, args: argparse.Namespace, seed: int) -> None:
    """One request of several random prompts, so that the server is never idle between two."""
    # More than one new token would bring decode steps, whose layers would count.
    rng, count = random.Random(seed), max(2, _PROFILED_CHUNKS * args.chunk // args.prompt_len)
    ids = [[rng.randrange(args.vocab) for _ in range(args.prompt_len)] for _ in range(count)]
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    server.post("/generate", {"input_ids": ids, "sampling_params": sampling}, args.timeout)


def start_warm(name: str, args: argparse.Namespace, fleet: servers.Fleet, stack: ExitStack) -> servers.Server:
    """A path's server after its warm-up; it ends with ``stack``. Raises RuntimeError when it runs another path."""
    if time.monotonic() > args.deadline:
        raise TimeoutError(f"not started: the time budget of {args.time_budget:.0f} s is spent")
    memory = ("--mem-fraction-static", str(args.mem_fraction)) if args.mem_fraction else ()
    extra = (*shlex.split(args.server_args), *memory)
    settings = servers.ServeSettings(str(args.model), args.tp, args.chunk, False, extra, ready_timeout_s=args.timeout)
    server = stack.enter_context(fleet.run_server(PATHS[name], settings, args.logs / f"{name}.log"))
    for seed in range(_WARMUP_ROUNDS):
        send_prompts(server, args, seed)
    if wrong := servers.check_prefill_lines(PATHS[name], servers.read_prefill_lines(server.log), args.tp):
        raise RuntimeError(f"{wrong}; log: {server.log}")
    return server


def profile(name: str, server: servers.Server, args: argparse.Namespace) -> dict:
    """The record of a warm server."""
    folder, profile_id = args.logs / f"{name}-trace", f"{name}-{time.time_ns()}"
    body = {"output_dir": str(folder), "profile_id": profile_id, "activities": ["GPU"], "with_stack": False}
    post_text(server, "/start_profile", body | {"record_shapes": False}, args.timeout)
    send_prompts(server, args, seed=_WARMUP_ROUNDS)
    # Answers after every rank has written its trace.
    post_text(server, "/stop_profile", {}, args.timeout)
    events, gpu = read_trace(folder, profile_id)
    try:
        measured = analyse(events)
    except ValueError as error:
        raise ValueError(f"{error}; trace {profile_id} in {folder}") from error
    record = {"path": name, "model": args.model.name, "prompt_len": args.prompt_len, "ep": args.tp, **measured}
    return records.validate(record | {"gpu": gpu, "commit": commit(), "date": now()}, FIELDS)


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    os.environ.setdefault("EP_DISABLE_GIN", "1")
    # Sync-free prefill falls back by free memory unless a limit is set.
    os.environ.setdefault("SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES", str(32 << 30))
    # The second profiler of SGLang starts and stops by stages only.
    os.environ["SGLANG_PROFILE_V2"] = "0"
    args.deadline, fleet, done, failed = time.monotonic() + args.time_budget, servers.Fleet(), [], []

    def attempt(name: str, call):
        try:
            return call()
        except Exception as error:
            failed.append(name)
            print(f"-- {name} failed: {type(error).__name__}: {error}", flush=True)

    for group in (args.paths[i : i + args.jobs] for i in range(0, len(args.paths), args.jobs)):
        with ThreadPoolExecutor(args.jobs) as pool, ExitStack() as stack:
            try:
                jobs = {name: pool.submit(start_warm, name, args, fleet, stack) for name in group}
                # Nothing is profiled before all of the group are warm: another server's kernels would slow it.
                warm = {name: attempt(name, job.result) for name, job in jobs.items()}
                for name, server in warm.items():
                    if server and (record := attempt(name, lambda n=name, s=server: profile(n, s, args))):
                        records.append(args.out / "server_profile.jsonl", [record])
                        done.append(record)
            except BaseException:
                # Leaving the pool waits for its threads, which wait for servers.
                fleet.close()
                raise
    print(table(done) if done else "no path was measured", flush=True)
    return 1 if failed or not done else 0


def table(found: list[dict]) -> str:
    """Records as aligned lines: shares in %, times in us."""
    rows = [["path", "layers", "MoE us", "busy us", "MoE % wall", "MoE % busy", "attention %", "dense %", "other %"]]
    shares = ("moe_share_wall", "moe_share_busy", "attention_share", "dense_share", "other_share")
    for r in found:
        times = (str(r["layers_seen"]), f"{r['moe_span_us']:.1f}", f"{r['moe_busy_us']:.1f}")
        rows.append([r["path"], *times, *(f"{100 * r[share]:.1f}" for share in shares)])
    return records.align(rows)


def resolve_model(model: str) -> tuple[Path, int]:
    """(checkpoint folder, vocabulary size). Raises ValueError for what is neither a folder nor a generated one."""
    if (file := Path(model) / "config.json").is_file():
        config = json.loads(file.read_text())
        return file.parent.resolve(), config.get("vocab_size") or config["text_config"]["vocab_size"]
    known = {_RANDOM + name.removeprefix("random-"): spec for name, spec in REALISTIC.items()}
    if (spec := known.get(model)) is None:
        raise ValueError(f"--model {model} is no checkpoint folder; generated ones are {', '.join(known)}")
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return ensure_checkpoint(spec, CHECKPOINTS, device).resolve(), spec.vocab


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help=f"checkpoint folder, or {_RANDOM}qwen3-moe-fp8")
    served = [name for name, path in PATHS.items() if path.a2a != "none"]
    parser.add_argument("--paths", nargs="+", choices=served, default=list(DEFAULT_PATHS), metavar="PATH")
    parser.add_argument("--prompt-len", type=int, default=8192, help="tokens per prompt")
    parser.add_argument("--tp", type=int, default=1, help="ranks")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens per prefill chunk")
    parser.add_argument("--jobs", type=int, default=1, help="servers that are up at once; they are profiled in turns")
    parser.add_argument("--mem-fraction", type=float, help="--mem-fraction-static of every server")
    parser.add_argument("--server-args", default="", help="more arguments for every sglang.launch_server, one string")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--logs", type=Path, default=Path("server-profile-logs"), help="server logs and traces")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a server's start and for each request")
    parser.add_argument("--time-budget", type=float, default=1800, help="seconds after which no path starts")
    args = parser.parse_args(arguments)
    try:
        for flag in ("prompt_len", "tp", "chunk", "jobs"):
            if getattr(args, flag) < 1:
                raise ValueError(f"--{flag.replace('_', '-')} {getattr(args, flag)} is less than 1")
        select_paths(",".join(args.paths), cpu=False, ranks=args.tp)
        args.model, args.vocab = resolve_model(args.model)
    except ValueError as error:
        parser.error(str(error))
    # The server writes its trace there; its working folder may be another.
    args.logs = args.logs.resolve()
    return args


if __name__ == "__main__":
    with servers.interrupt_on_sigterm():
        sys.exit(run(parse()))
