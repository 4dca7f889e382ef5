"""Times one MoE layer, the real ``FusedMoE.forward`` after top-k, on every path; prints tables and appends JSONL.

Plain SGLang (overlay off) and this patch run in worker processes of their own on the same GPU(s), with the same seeded
weights and inputs; this process hands the GPU from one side to the other, round by round.

    python3 benchmark/deepep_v2/bench_layer.py                            # one GPU
    python3 benchmark/deepep_v2/bench_layer.py --ep 2                     # two GPUs
    python3 benchmark/deepep_v2/bench_layer.py --device cpu --shapes tiny --tokens 8 --local-experts 8 --out dry

The last is a dry run on a machine without a GPU. Under ``--out``: ``layer.jsonl`` (one record a path and size),
``profile.jsonl`` (kernels per layer), ``detail.jsonl`` (busy, waiting and host time, error, reproducibility, launches),
``activation.jsonl`` (the activation kernel's bandwidth), ``timeline.jsonl`` (one layer's kernels), ``host/*.txt``
(cProfile).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import records
import shapes
import typer
from sides import Side, WorkerError

from sglang_deepep_v2.ab.servers import interrupt_on_sigterm
from sglang_deepep_v2.options import prepare_folder
from sglang_deepep_v2.provenance import commit, now

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
# DeepGEMM's fused kernel has no reference.
GPU_PATHS = ("mega_moe",)
UPSTREAM_PATHS = (
    "sglang_nonexpanded",
    "sglang_expanded",
    "mega_moe",
    "floor",
    "deepep_alone",
    "deepep_alone_sync_free",
)
PATCH_PATHS = ("nonexpanded", "labels", "psum", "psum_sync_free")
SIDES = {"upstream": UPSTREAM_PATHS, "patch": PATCH_PATHS}
ALL_PATHS = UPSTREAM_PATHS + PATCH_PATHS


class Bench:
    """One run: sides, rounds, records. ``deadline``: monotonic seconds after which nothing new starts."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.out = args, Path(args.out)
        self.deadline = time.monotonic() + args.time_budget
        self.sides: dict[str, Side] = {}
        self.new: list[dict] = []
        self.meta: dict = {}
        self.failures: list[str] = []

    def run(self) -> int:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            shapes.write_model_config(folder / "model")
            try:
                self._start(folder)
                for shape in shapes_of(self.args):
                    self._guard(f"shape {shape.label}", lambda shape=shape: self._shape(shape))
            finally:
                for side in self.sides.values():
                    side.stop()
        for shape, by_tokens in records.groups(self.new):
            print(f"\n== ratios, {_describe(shape)}\n{records.ratio_table(shape, by_tokens)}", flush=True)
        if self.failures:
            print(f"\n{len(self.failures)} part(s) failed: " + "; ".join(self.failures), file=sys.stderr, flush=True)
        return 1 if self.failures or not self.new else 0

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def _guard(self, what: str, action) -> None:
        """Runs a section; an error is printed and noted, and the run goes on."""
        if self.left() <= 0:
            print(f"-- skipped {what}: the time budget of {self.args.time_budget:.0f} s is spent", flush=True)
            return
        try:
            action()
        except Exception as error:
            self.failures.append(f"{what}: {str(error).splitlines()[-1][:160] if str(error) else type(error).__name__}")
            print(
                f"-- {what} failed\n{error if isinstance(error, WorkerError) else traceback.format_exc()}", flush=True
            )

    def _start(self, folder: Path) -> None:
        wanted = {name: [p for p in paths if p in self.args.paths] for name, paths in SIDES.items()}
        for name, paths in wanted.items():
            if paths:
                self.sides[name] = Side(name, self.args, folder)
        # Both sides come up at once: most of it is imports.
        for side in self.sides.values():
            side.send("start", max_tokens=max(self.args.tokens))
        for name in list(self.sides):
            try:
                answer = self.sides[name].replies(300)[0]
                self.meta.setdefault("gpu", answer["gpu"])
                self.meta["versions"] = answer["versions"] | self.meta.get("versions", {})
            except WorkerError as error:
                self.failures.append(f"side {name} did not start")
                print(f"-- side {name} did not start\n{error}", flush=True)
                self.sides.pop(name).stop()
        if not self.sides:
            raise SystemExit("no side started")
        self.meta["commit"] = commit()
        print(
            f"{self.meta['gpu']}, ep {self.args.ep}, commit {self.meta['commit']}, {self.meta['versions']}", flush=True
        )

    def _shape(self, shape: shapes.Shape) -> None:
        sums = {}
        for name, side in self.sides.items():
            request = {f: getattr(shape, f) for f in ("hidden", "intermediate", "local_experts", "topk")}
            sums[name] = [answer["checksum"] for answer in side.ask("shape", **request)]
        if len(set(map(str, sums.values()))) != 1:
            raise WorkerError(f"the sides have different weights: {sums}")
        for name, side in self.sides.items():
            size = 1024 if self.args.device == "cuda" else 8
            bandwidth = side.ask("copy_bandwidth", megabytes=size)[0]["gb_s"]
            print(f"copy bandwidth ({name}): {bandwidth / 1e3:.3f} TB/s", flush=True)
        for tokens in self.args.tokens:
            self._guard(f"{shape.label}, {tokens} tokens", lambda tokens=tokens: self._size(shape, tokens))

    def _size(self, shape: shapes.Shape, tokens: int) -> None:
        print(f"\n== {shape.label}, {tokens} tokens per rank, ep {self.args.ep}", flush=True)
        paths = self._prepare(tokens)
        times = self._rounds(tokens, paths)
        self._record(shape, tokens, times)
        detail = {path: {} if self.args.no_inspect else self._inspect(path) for path in times}
        rows = self._details(shape, tokens, times, detail)
        print(records.align(rows), flush=True)
        if "psum" in times and not self.args.no_inspect:
            self._guard("activation kernel", lambda: self._activation(shape, tokens))
        for path in ("psum", "psum_sync_free", "sglang_expanded"):
            if path in times and not (self.args.no_host_profile or self.args.no_inspect):
                self._guard(f"host profile of {path}", lambda path=path: self._host_profile(path, tokens))
        for found, by_tokens in records.groups(r for r in self.new if r["tokens"] == tokens):
            if found["hidden"] == shape.hidden and found["local_experts"] == shape.local_experts:
                print(records.ratio_table(found, by_tokens), flush=True)

    def _prepare(self, tokens: int) -> dict[str, Side]:
        """Builds and warms the paths; returns those that run, with their side."""
        for name in [name for name, side in self.sides.items() if not side.alive()]:
            del self.sides[name]
        for side in self.sides.values():
            side.send("prepare", tokens=tokens, wanted=list(self.args.paths))
        ready: dict[str, Side] = {}
        for name, side in list(self.sides.items()):
            try:
                answers = side.replies(400)
            except WorkerError as error:
                self.failures.append(f"{name} at {tokens} tokens")
                print(f"-- {name} could not prepare {tokens} tokens\n{error}", flush=True)
                if not side.alive():
                    del self.sides[name]
                continue
            for path in SIDES[name]:
                errors = [answer["paths"].get(path, "not wanted") for answer in answers]
                if all(error is None for error in errors):
                    ready[path] = side
                elif "not wanted" not in errors:
                    self.failures.append(f"{path} at {tokens} tokens")
                    print(f"-- {path} is not available: {next(e for e in errors if e)}", flush=True)
            for line in answers[0]["log"]:
                print(f"   log ({name}): {line}", flush=True)
        return ready

    def _rounds(self, tokens: int, paths: dict[str, Side]) -> dict[str, list[float]]:
        """us per layer of every round; the sides alternate, a path that fails drops out."""
        times: dict[str, list[float]] = {path: [] for path in paths}
        dropped: set[str] = set()
        layers = max(4, min(40, 40960 // max(1, tokens))) if self.args.device == "cuda" else 1
        for number in range(self.args.rounds):
            if self.left() <= 0 and number >= 3:
                print(f"-- stopped after {number} rounds: the time budget is spent", flush=True)
                break
            order = list(self.sides.values())
            for side in order if number % 2 == 0 else reversed(order):
                for path in [p for p, owner in paths.items() if owner is side and p not in dropped]:
                    try:
                        answers = side.ask("time", path=path, layers=layers)
                        times[path].append(max(answer["us"] for answer in answers))
                    except WorkerError as error:
                        self.failures.append(f"{path} at {tokens} tokens")
                        print(f"-- {path} dropped out\n{error}", flush=True)
                        dropped |= {path} if side.alive() else {p for p, owner in paths.items() if owner is side}
        return {path: measured for path, measured in times.items() if measured}

    def _key(self, path: str, shape: shapes.Shape, tokens: int) -> dict:
        """What every record of a path begins with."""
        return {
            "path": path,
            "tokens": tokens,
            "ep": self.args.ep,
            "hidden": shape.hidden,
            "intermediate": shape.intermediate,
            "local_experts": shape.local_experts,
            "topk": shape.topk,
        }

    def _record(self, shape: shapes.Shape, tokens: int, times: dict[str, list[float]]) -> None:
        fresh = []
        for path, measured in times.items():
            if path not in records.PATHS:
                continue
            record = {
                **self._key(path, shape, tokens),
                "us_median": round(statistics.median(measured), 2),
                "us_min": round(min(measured), 2),
                "us_max": round(max(measured), 2),
                "rounds": len(measured),
                "gpu": self.meta["gpu"],
                "versions": self.meta["versions"],
                "commit": self.meta["commit"],
                "date": now(),
            }
            fresh.append(records.validate(record))
        self.new += fresh
        records.append(self.out / "layer.jsonl", fresh)

    def _inspect(self, path: str) -> dict:
        side = self.sides.get("upstream" if path in UPSTREAM_PATHS else "patch")
        found: dict = {}
        if side is None:
            return found

        def ask() -> None:
            answers = side.ask("inspect", path=path)
            found.update(answers[0])
            found["bitwise"] = (
                all(answer.get("bitwise", True) for answer in answers) if "bitwise" in answers[0] else None
            )
            if "error" in answers[0]:
                found["error"] = max(answer["error"] for answer in answers)

        self._guard(f"inspection of {path}", ask)
        return found

    def _details(
        self, shape: shapes.Shape, tokens: int, times: dict[str, list[float]], detail: dict[str, dict]
    ) -> list[list[str]]:
        """Writes the detail, profile and timeline records; returns the table's rows."""
        header = ["path", "us", "min", "max", "GPU busy", "waiting", "host", "launches", "between", "error", "bitwise"]
        rows = [header]
        for path, measured in times.items():
            found, median = detail[path], statistics.median(measured)
            busy = found.get("busy_us")
            waiting = None if busy is None else median - busy
            record = {
                **self._key(path, shape, tokens),
                "us_median": round(median, 2),
                "busy_us": busy,
                "waiting_us": waiting,
                **{name: found.get(name) for name in ("host_us", "launches", "between", "error", "bitwise")},
                "gpu": self.meta["gpu"],
                "commit": self.meta["commit"],
                "date": now(),
            }
            if not found:
                rows.append([path, f"{median:.1f}", f"{min(measured):.1f}", f"{max(measured):.1f}", *["-"] * 7])
                continue
            records.append(self.out / "detail.jsonl", [record])
            layer = {f: record[f] for f in ("ep", "hidden", "intermediate", "local_experts")}
            kernels = [{"path": path, "tokens": tokens, **kernel, **layer} for kernel in found.get("kernels", [])]
            records.append(self.out / "profile.jsonl", [records.validate(k, records.PROFILE_FIELDS) for k in kernels])
            timeline = {"path": path, "tokens": tokens, **layer, "kernels": found.get("timeline", [])}
            records.append(self.out / "timeline.jsonl", [timeline])
            cells = [median, min(measured), max(measured), busy, waiting, found.get("host_us")]
            text = ["-" if cell is None else f"{cell:.1f}" for cell in cells]
            count, gap, error, same = (found.get(name) for name in ("launches", "between", "error", "bitwise"))
            text += ["-" if count is None else f"{count:.0f}", "-" if gap is None else str(gap)]
            text += ["-" if error is None else f"{error:.5f}", "-" if same is None else ("yes" if same else "NO")]
            rows.append([path, *text])
        self._judge(rows[1:], times, detail)
        return rows

    def _judge(self, rows: list[list[str]], times: dict[str, list[float]], detail: dict[str, dict]) -> None:
        """Prints which of the layer's conditions hold: waiting, launches, error."""
        waiting = {
            path: statistics.median(times[path]) - detail[path]["busy_us"]
            for path in times
            if detail[path].get("busy_us") is not None
        }
        for path, alone in (("psum", "deepep_alone"), ("psum_sync_free", "deepep_alone_sync_free")):
            extra = records.WAITING_LIMIT_US[path]
            if path in waiting and alone in waiting and self.args.device == "cuda":
                limit = max(0.0, waiting[alone]) + extra if path == "psum" else extra
                verdict = "ok" if waiting[path] <= limit else "MISS"
                print(
                    f"   waiting of {path}: {waiting[path]:.1f} us, limit {limit:.1f} us "
                    f"({alone} waits {waiting[alone]:.1f} us): {verdict}",
                    flush=True,
                )
        for path in ("psum", "psum_sync_free"):
            gap = detail.get(path, {}).get("between")
            if gap is not None and self.args.device == "cuda":
                print(
                    f"   launches of {path} between dispatch and combine: {gap}: {'ok' if gap == 3 else 'MISS'}",
                    flush=True,
                )
            error, theirs = detail.get(path, {}).get("error"), detail.get("sglang_expanded", {}).get("error")
            if error is not None and theirs:
                verdict = "ok" if error <= 1.02 * theirs else "MISS"
                print(f"   error of {path}: {error:.5f}, sglang_expanded {theirs:.5f}: {verdict}", flush=True)

    def _activation(self, shape: shapes.Shape, tokens: int) -> None:
        found = self.sides["patch"].ask("activation")[0]
        share = found["gb_s"] / found["copy_gb_s"]
        print(
            f"   {found['kernel']}: {found['us']:.1f} us, {found['num_bytes'] / 1e6:.1f} MB, "
            f"{found['gb_s'] / 1e3:.3f} TB/s, {100 * share:.1f} % of the copy bandwidth "
            f"{found['copy_gb_s'] / 1e3:.3f} TB/s: {'ok' if share >= 0.9 else 'MISS'}; a copy of as many bytes reaches "
            f"{found['same_size_copy_gb_s'] / 1e3:.3f} TB/s",
            flush=True,
        )
        layer = {f: getattr(shape, f) for f in ("hidden", "intermediate", "local_experts")}
        meta = {"gpu": self.meta["gpu"], "commit": self.meta["commit"], "date": now()}
        records.append(self.out / "activation.jsonl", [{"tokens": tokens, **layer, **found, "share": share, **meta}])

    def _host_profile(self, path: str, tokens: int) -> None:
        side = self.sides["upstream" if path in UPSTREAM_PATHS else "patch"]
        text = side.ask("host_profile", path=path)[0]["text"]
        folder = self.out / "host"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{path}_{tokens}.txt").write_text(text)


def _describe(shape: dict) -> str:
    return (
        f"hidden {shape['hidden']}, intermediate {shape['intermediate']}, {shape['local_experts']} local experts, "
        f"top-{shape['topk']}, ep {shape['ep']}, {shape['gpu']}"
    )


def shapes_of(args: argparse.Namespace) -> list[shapes.Shape]:
    if args.shapes:
        return [shapes.named(name, experts) for name in args.shapes for experts in args.local_experts]
    return [shapes.Shape(args.hidden, args.intermediate, experts, args.topk) for experts in args.local_experts]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2304, 8192], help="tokens per rank")
    parser.add_argument("--hidden", type=int, default=6144)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--local-experts", type=int, nargs="+", default=[16])
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--ep", type=int, default=1, help="ranks, one GPU each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--shapes", nargs="+", choices=list(shapes.WIDTHS), help="instead of --hidden, --intermediate and --topk"
    )
    parser.add_argument(
        "--paths", nargs="+", choices=ALL_PATHS, metavar="PATH", help=f"default: all of {', '.join(ALL_PATHS)}"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: dry run on the reference transport"
    )
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument(
        "--time-budget",
        type=float,
        default=1800,
        help="seconds; a clean stop after them, exit code 0 unless nothing was timed",
    )
    parser.add_argument("--no-host-profile", action="store_true")
    parser.add_argument("--no-inspect", action="store_true", help="times only: no profile, error, host time")
    args = parser.parse_args(arguments)
    if args.device == "cpu" and Path(args.out).resolve() == RESULTS:
        parser.error(f"--device cpu would add to the GPU records in {RESULTS}; name a folder with --out")
    absent = [path for path in GPU_PATHS if args.device == "cpu"]
    if refused := [path for path in args.paths or () if path in absent]:
        parser.error(f"{refused[0]} needs a GPU, --device is cpu")
    for shape in shapes_of(args):
        try:
            shapes.check_experts(shape.topk, shape.local_experts, args.ep)
        except ValueError as refusal:
            parser.error(str(refusal))
    args.paths = args.paths or [path for path in ALL_PATHS if path not in absent]
    return args


def main() -> int:
    args = parse()
    try:
        prepare_folder("--out", Path(args.out))
    except typer.BadParameter as error:
        print(error, file=sys.stderr)
        return 2
    with interrupt_on_sigterm():
        try:
            return Bench(args).run()
        except BrokenPipeError:
            # The reader of the tables is gone; Python would complain again when it flushes at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except KeyboardInterrupt:
            print("interrupted; every worker is ended, what was recorded stays", flush=True)
            return 130


if __name__ == "__main__":
    sys.exit(main())
