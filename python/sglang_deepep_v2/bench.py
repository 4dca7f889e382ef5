"""`sglang-deepep-v2 bench`: the layer benchmark, its regression check, its plots. Imports torch only to count GPUs."""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from sglang_deepep_v2.ab.servers import interrupt_on_sigterm
from sglang_deepep_v2.options import prepare_folder, refuse_ignored

# The benchmark is part of the repository, not of the wheel.
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmark" / "deepep_v2"
# A bench_layer.py that ended by itself, whether or not a part of it failed.
_RAN = (0, 1)


def bench(
    ctx: typer.Context,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the committed records: exit 1 beyond 15 % slower.")
    ] = False,
    plot: Annotated[
        bool,
        typer.Option(
            "--plot",
            help="Draw and stop: the committed records into docs/figures, or with --out that folder's records into it.",
        ),
    ] = False,
    records: Annotated[
        Path | None, typer.Option(help="With --check: compare these layer.jsonl records instead of measuring.")
    ] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Tokens per rank; repeat for several.")] = None,
    path: Annotated[list[str] | None, typer.Option(help="Only these paths; repeat for several.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Named model shapes; repeat for several.")] = None,
    local_experts: Annotated[
        list[int] | None, typer.Option(min=1, help="Experts per rank; repeat for several.")
    ] = None,
    ep: Annotated[int, typer.Option(min=1, help="Ranks, one GPU each.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the sides alternate in each.")] = 7,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run without a GPU.")] = "cuda",
    time_budget: Annotated[
        float, typer.Option(min=1, help="Seconds after which nothing new starts; what is skipped is named.")
    ] = 1800.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the JSONL files (default: the committed results; not for --device cpu)."),
    ] = None,
) -> None:
    """Time one MoE layer on every path: plain SGLang, this patch, DeepGEMM's fused kernel, and the floor.

    Exit code 0: every part ran, or --time-budget skipped parts, which are named, after others were timed.
    Exit code 1: a part failed, which is named, nothing was timed, or with --check a path is slower than its record.
    Exit code 2: a refused option or record, or nothing to compare.

    Examples:

    * every path and size on one GPU, added to the committed results: sglang-deepep-v2 bench

    * two ranks, two sizes, results elsewhere: sglang-deepep-v2 bench --ep 2 --tokens 512 --tokens 8192 --out bench-ep2

    * a regression check of two paths: sglang-deepep-v2 bench --check --path psum --path psum_sync_free

    * without a GPU: sglang-deepep-v2 bench --device cpu --shape tiny --tokens 8 --local-experts 8 --out bench-dry
    """
    if not BENCHMARK.is_dir():
        typer.echo(f"bench runs from a checkout of the repository: {BENCHMARK} does not exist", err=True)
        raise typer.Exit(2)
    committed = BENCHMARK / "results"
    if out is not None and out.exists() and not out.is_dir():
        raise typer.BadParameter(f"--out {out} is no folder")
    if plot:
        refuse_ignored(ctx, "--plot", allowed=("plot", "out"))
        if out is None:
            raise typer.Exit(_run("plot.py"))
        if not out.exists():
            raise typer.BadParameter(f"--plot draws the records in --out {out}, which does not exist")
        prepare_folder("--out", out)
        raise typer.Exit(_run("plot.py", "--results", out, "--out", out))
    if records is not None and not check:
        typer.echo("--records goes with --check", err=True)
        raise typer.Exit(2)
    if records is not None and not records.is_file():
        raise typer.BadParameter(f"--records {records} is no file")
    if records is not None:
        refuse_ignored(ctx, "--check --records", allowed=("check", "records"))
        raise typer.Exit(compare(_read(records), records, committed / "layer.jsonl"))
    _check_choices(path, shape, device, ep)
    _check_experts(shape, local_experts, ep)
    if device == "cpu" and (gpu_only := set(path or ()) & set(_module("bench_layer").GPU_PATHS)):
        raise typer.BadParameter(f"--path {gpu_only.pop()} needs a GPU, --device is cpu")
    if device == "cpu" and check:
        raise typer.BadParameter("--check compares with records of GPUs, --device cpu makes none")
    if device == "cpu" and (out or committed).resolve() == committed.resolve():
        raise typer.BadParameter(f"--device cpu would add to the GPU records in {committed}; name a folder with --out")
    if out or not check:
        prepare_folder("--out", out or committed)
    command: list = ["bench_layer.py", "--ep", ep, "--rounds", rounds, "--device", device, "--time-budget", time_budget]
    named = {"--tokens": tokens, "--paths": path, "--shapes": shape, "--local-experts": local_experts}
    for option, values in named.items():
        if values:
            command += [option, *values]
    if not check:
        raise typer.Exit(_run(*command, "--out", out or committed))
    with tempfile.TemporaryDirectory() as temporary:
        # A check compares, it does not add to the committed records.
        folder = out or Path(temporary)
        file = folder / "layer.jsonl"
        before = len(_read(file))
        status = _run(*command, "--no-host-profile", "--out", folder)
        slower = compare(_read(file)[before:], file, committed / "layer.jsonl") if status in _RAN else 0
        raise typer.Exit(status or slower)


def _check_choices(paths: list[str] | None, names: list[str] | None, device: str, ep: int) -> None:
    """Refuse names that the benchmark does not know, and more ranks than there are GPUs."""
    layer = _module("bench_layer")
    for option, values, known in (
        ("--path", paths or (), layer.ALL_PATHS),
        ("--shape", names or (), tuple(layer.shapes.WIDTHS)),
        ("--device", (device,), ("cuda", "cpu")),
    ):
        for value in values:
            if value not in known:
                raise typer.BadParameter(f"{option} {value} is unknown; it takes {', '.join(known)}")
    if device == "cuda" and (visible := _gpus()) < ep:
        raise typer.BadParameter(f"--ep {ep} needs {ep} GPU(s), {visible} visible; --device cpu makes a dry run")


def _check_experts(names: list[str] | None, local_experts: list[int] | None, ep: int) -> None:
    """Refuse a rank count and expert count that together have fewer experts than a token of a shape selects."""
    layer = _module("bench_layer")
    usual = layer.parse([])
    usual.shapes, usual.local_experts = names, local_experts or usual.local_experts
    for shape in layer.shapes_of(usual):
        try:
            layer.shapes.check_experts(shape.topk, shape.local_experts, ep)
        except ValueError as refusal:
            raise typer.BadParameter(str(refusal)) from refusal


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _read(file: Path) -> list[dict]:
    """The layer records of a file; a broken one is refused with its line and field."""
    module = _module("records")
    try:
        return module.read(file, module.validate)
    except (ValueError, OSError) as problem:
        raise typer.BadParameter(str(problem)) from problem


def compare(new: list[dict], source: Path, baseline: Path) -> int:
    """Prints how the last of each kind of the ``new`` records compares. Returns 0, 1 with a regression, 2 with none.

    ``source``: where they come from; ``baseline``: the file to hold them against.
    """
    module = _module("records")
    fresh, known = list(module.latest(new).values()), _read(baseline)
    count = module.compared(fresh, known)
    if not count:
        typer.echo(f"nothing to compare: no record of {source} has its path, size and GPU in {baseline}", err=True)
        return 2
    lines = module.regressions(fresh, known)
    for line in lines:
        typer.echo(f"REGRESSION {line}")
    typer.echo(f"{count} of {len(fresh)} records compared, {len(lines)} slower than {module.REGRESSION_LIMIT:.2f}x")
    return 1 if lines else 0


def _run(script: str, *arguments) -> int:
    """The script's exit status; it ends its own processes when this one is interrupted."""
    with interrupt_on_sigterm():
        process = subprocess.Popen([sys.executable, str(BENCHMARK / script), *map(str, arguments)])
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            return 130


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"deepep_v2_{name}", BENCHMARK / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
