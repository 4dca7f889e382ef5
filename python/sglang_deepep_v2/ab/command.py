"""The `ab` command: the embedded CPU demo, or the A/B of a user's model on GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sglang_deepep_v2.ab import report
from sglang_deepep_v2.ab.accuracy import EvalSettings, check_data, evaluate_gsm8k
from sglang_deepep_v2.ab.compare import compare_probes
from sglang_deepep_v2.ab.paths import PATHS, ServePath, select_paths
from sglang_deepep_v2.ab.probe import longest_prompt, make_prompts
from sglang_deepep_v2.ab.reference import supports
from sglang_deepep_v2.ab.servers import Fleet, Server, ServerFailed, ServeSettings, interrupt_on_sigterm
from sglang_deepep_v2.ab.session import REFERENCE, Job, Kept, run_all
from sglang_deepep_v2.ab.throughput import ThroughputPlan, measure_throughput, summarize

if TYPE_CHECKING:
    from sglang_deepep_v2.ab.checkpoints import CheckpointSpec

DEMO_DIR = Path(".demo")
# Twice the largest difference between correct paths of these checkpoints (0.05, and 0.10 from fp32 transformers); a
# dropped router weight makes 0.9 and more.
_DEMO_BOUND = 0.1
_REFERENCE_BOUND = 0.2
_MODEL_BOUND = 0.5
# A model's router has near-ties; two roundings then choose another expert for a few tokens.
_MODEL_OUTLIERS = 0.02
_DEMO_CHUNK, _MODEL_CHUNK = 256, 8192
_DEMO_NEW_TOKENS, _MODEL_NEW_TOKENS = 4, 16
_RANDOM_PREFIX = "random:"
_AGREEMENT = ("prompts", "greedy_equal", "largest", "median", "bound", "outliers")

# Per embedded checkpoint, the baseline first.
_DEMO_PATHS = {
    "qwen3-moe-fp8": "nonexpanded,psum,labels",
    "qwen3-moe-bf16": "nonexpanded,psum,none",
    "mimo-v2-flash-fp8": "nonexpanded,psum",
}
_QUICK = {"qwen3-moe-fp8": "nonexpanded,psum"}
_MODEL_PATHS = "sglang_nonexpanded,sglang_expanded,nonexpanded,psum"
_QUICK_MODEL_PATHS = "nonexpanded,psum"


@dataclass
class Checkpoint:
    """One checkpoint of the A/B: where it is, and the paths to serve it with, the baseline first."""

    name: str
    model: str
    vocab: int
    paths: list[ServePath]
    with_reference: bool


def ab(
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint directory or Hugging Face name; random:qwen3-moe-fp8 and random:mimo-v2-flash-fp8 write "
            "one of realistic layer shapes and few layers. Without it: three tiny checkpoints, on CPU."
        ),
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Ranks (tensor and expert parallel). Demo: 2.")] = None,
    paths: Annotated[
        str | None, typer.Option(help=f"Comma-separated, the baseline first. Known: {', '.join(PATHS)}.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One checkpoint, expanded against non-expanded.")] = False,
    prompt_len: Annotated[
        str | None,
        typer.Option(
            help="Throughput: comma-separated prompt lengths in tokens. Default 1024,8192 with --model; '' for none."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Throughput: alternating rounds.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Throughput: prompt tokens per measurement.")] = 262144,
    together: Annotated[
        bool,
        typer.Option("--together", help="Keep all servers up until the end; needs memory for all (--mem-fraction)."),
    ] = False,
    evaluation: Annotated[
        str | None, typer.Option("--eval", help="gsm8k: SGLang's few_shot_gsm8k on each path.")
    ] = None,
    data_path: Annotated[
        Path | None, typer.Option(help="--eval: questions and answers, JSONL in GSM8K's format.")
    ] = None,
    eval_questions: Annotated[int, typer.Option(min=1, help="--eval: at most this many questions.")] = 1319,
    eval_shots: Annotated[int, typer.Option(min=0, help="--eval: worked examples before each question.")] = 5,
    eval_max_new_tokens: Annotated[int, typer.Option(min=1, help="--eval: longest answer in tokens.")] = 512,
    chunk: Annotated[int | None, typer.Option(min=1, help="Tokens per prefill chunk. Demo: 256, else 8192.")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="Greedy tokens per prompt. Demo: 4, else 16.")] = None,
    bound: Annotated[
        float | None,
        typer.Option(
            min=0,
            help=f"Largest logprob difference that counts as agreement. Demo: {_DEMO_BOUND}, else {_MODEL_BOUND}.",
        ),
    ] = None,
    outliers: Annotated[
        float | None,
        typer.Option(min=0, max=1, help=f"Share of logprobs allowed beyond it. Demo: 0, else {_MODEL_OUTLIERS}."),
    ] = None,
    mem_fraction: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="--mem-fraction-static of every GPU server.")
    ] = None,
    server_args: Annotated[
        str, typer.Option(help="More arguments for every sglang.launch_server, as one string.")
    ] = "",
    server_pythonpath: Annotated[
        list[Path] | None, typer.Option(help="Directory put first on every server's PYTHONPATH; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of results and server logs. Demo: .demo/runs.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what an earlier run with the same options measured.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Servers that start at a time. Demo: 2, else 1.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all results as JSON here; - for stdout.")
    ] = None,
) -> None:
    """Serve one checkpoint by several prefill paths and compare answers, throughput and accuracy.

    Every path gets a real sglang.launch_server and the same 50 seeded prompts, some longer than a prefill chunk.

    Exit code 1: logprobs differ beyond the bound, a greedy token differs where the best one led by more than the bound,
    or a server fails or runs another pipeline than its path's; its log is named. Exit code 130: interrupted.

    Examples:

    * the embedded demo, real servers on CPU: sglang-deepep-v2 ab

    * your model: sglang-deepep-v2 ab --model /models/Qwen3-235B-A22B-FP8 --tp 8 --prompt-len 1024,8192 --rounds 3

    * random weights, servers kept up: sglang-deepep-v2 ab --model random:qwen3-moe-fp8 --together --mem-fraction 0.15

    * accuracy only: sglang-deepep-v2 ab --model MODEL --tp 8 --prompt-len '' --eval gsm8k --data-path test.jsonl
    """
    console = _console(stderr=str(json_file) == "-")
    cpu = model is None or not _has_cuda()
    options = _Options(
        model=model,
        cpu=cpu,
        tp=tp or (2 if cpu else 1),
        chunk=chunk or (_DEMO_CHUNK if cpu else _MODEL_CHUNK),
        new_tokens=new_tokens or (_DEMO_NEW_TOKENS if cpu else _MODEL_NEW_TOKENS),
        bound=bound if bound is not None else (_DEMO_BOUND if cpu else _MODEL_BOUND),
        outliers=outliers if outliers is not None else (0.0 if cpu else _MODEL_OUTLIERS),
        lengths=_parse_lengths(prompt_len if prompt_len is not None else ("" if cpu else "1024,8192")),
        extra_args=(*_words(server_args), *(("--mem-fraction-static", str(mem_fraction)) if mem_fraction else ())),
        pythonpath=tuple(map(_folder, server_pythonpath or ())),
        out=out or (DEMO_DIR / "runs" if cpu else Path("ab-results")),
        jobs=jobs or (2 if cpu else 1),
        resume=resume,
        rounds=rounds,
        tokens=tokens,
        together=together,
        evaluation=_evaluation(evaluation, data_path, eval_questions, eval_shots, eval_max_new_tokens),
    )
    try:
        checkpoints = _checkpoints(options, paths, quick)
    except (ValueError, OSError) as exc:
        raise typer.BadParameter(str(exc)) from exc
    _check_outputs(options.out, json_file)
    fleet, passed, document = Fleet(), True, {"checkpoints": {}, "throughput": []}
    if cpu:
        _explain_cpu(console)
    with interrupt_on_sigterm():
        try:
            for checkpoint in checkpoints:
                passed &= _run_checkpoint(console, options, checkpoint, fleet, document)
        except ServerFailed as exc:
            console.print(str(exc), markup=False, highlight=False)
            passed = False
        except KeyboardInterrupt:
            console.print(f"interrupted; every server is ended; what was measured is in {options.out} (--resume)")
            raise typer.Exit(130) from None
        finally:
            fleet.close()
    document["passed"] = passed
    _write_json(json_file, document)
    console.print("[green]all paths agree[/green]" if passed else "[red]paths do not agree, or a server failed[/red]")
    raise typer.Exit(0 if passed else 1)


def _run_checkpoint(console: Console, options: _Options, checkpoint: Checkpoint, fleet: Fleet, document: dict) -> bool:
    """Compare, evaluate and measure one checkpoint into `document`; whether every path served and agreed."""
    with contextlib.ExitStack() as stack:
        kept = Kept(stack) if options.together and options.lengths else None
        verdicts = _compare(console, options, checkpoint, fleet, kept)
        document["checkpoints"][checkpoint.name] = [verdict.as_json() for verdict in verdicts]
        _write_agreement(options, checkpoint, verdicts)
        if options.evaluation:
            _write_accuracy(options, checkpoint, verdicts)
            report.print_accuracy(console, [verdict.result for verdict in verdicts])
        # A path that does not serve is reported above; the others are still worth their numbers.
        failed = {verdict.result.path for verdict in verdicts if verdict.result.error}
        paths = [path for path in checkpoint.paths if path.name not in failed]
        if options.lengths and paths:
            servers = kept.servers if kept else {}
            document["throughput"] += _measure(console, options, checkpoint, paths, fleet, servers)
    return all(verdict.passed for verdict in verdicts)


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr)
    # A log file has no width; the tables need this much.
    return console if console.is_terminal else Console(stderr=stderr, width=120)


@dataclass
class _Options:
    """The command's options with their defaults filled in."""

    model: str | None
    cpu: bool
    tp: int
    chunk: int
    new_tokens: int
    bound: float
    outliers: float
    lengths: tuple[int, ...]
    extra_args: tuple[str, ...]
    pythonpath: tuple[str, ...]
    out: Path
    jobs: int
    resume: bool
    rounds: int
    tokens: int
    together: bool
    evaluation: EvalSettings | None

    def serve_settings(self, model: str) -> ServeSettings:
        return ServeSettings(model, self.tp, self.chunk, self.cpu, self.extra_args, self.pythonpath)


def _parse_lengths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"--prompt-len takes positive token counts separated by commas, got {text!r}")
    return tuple(map(int, parts))


def _words(server_args: str) -> list[str]:
    try:
        return shlex.split(server_args)
    except ValueError as exc:
        raise typer.BadParameter(f"--server-args {server_args!r} is no shell command line: {exc}") from exc


def _folder(pythonpath: Path) -> str:
    if not pythonpath.is_dir():
        raise typer.BadParameter(f"--server-pythonpath {pythonpath} is no folder")
    return str(pythonpath.resolve())


def _check_outputs(out: Path, json_file: Path | None) -> None:
    """Refuse what could not be written after an hour of measuring, and make the folder of results."""
    if json_file is not None and str(json_file) != "-" and (json_file.is_dir() or not json_file.parent.is_dir()):
        why = "it is a folder" if json_file.is_dir() else f"{json_file.parent} is no folder"
        raise typer.BadParameter(f"--json {json_file} cannot be written: {why}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise typer.BadParameter(f"--out {out} cannot be made a folder of results: {exc.strerror}") from exc


def _evaluation(name, data_path, questions, shots, max_new_tokens) -> EvalSettings | None:
    if name is None:
        if data_path is not None:
            raise typer.BadParameter(f"--data-path {data_path} goes with --eval gsm8k")
        return None
    if name != "gsm8k":
        raise typer.BadParameter(f"--eval knows gsm8k, got {name!r}")
    if data_path is None or not data_path.is_file():
        raise typer.BadParameter(f"--eval gsm8k needs --data-path FILE, an existing JSONL file; got {data_path}")
    settings = EvalSettings(data_path, questions, shots, max_new_tokens)
    try:
        check_data(settings)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    return settings


def _checkpoints(options: _Options, paths: str | None, quick: bool) -> list[Checkpoint]:
    from sglang_deepep_v2.ab.checkpoints import REALISTIC, TINY, ensure_checkpoint

    if options.model is None:
        found = []
        for name, default_paths in (_QUICK if quick else _DEMO_PATHS).items():
            selected = select_paths(default_paths if paths is None else paths, cpu=True, ranks=options.tp)
            _check_fits(TINY[name], options)
            directory = ensure_checkpoint(TINY[name], DEMO_DIR / "checkpoints").resolve()
            found.append(Checkpoint(name, str(directory), TINY[name].vocab, selected, supports(str(directory))))
        return found
    default_paths = _QUICK_MODEL_PATHS if quick or options.cpu else _MODEL_PATHS
    selected = select_paths(default_paths if paths is None else paths, cpu=options.cpu, ranks=options.tp)
    model = options.model
    if model.startswith(_RANDOM_PREFIX):
        name = "random-" + model.removeprefix(_RANDOM_PREFIX)
        if name not in REALISTIC:
            known = ", ".join(_RANDOM_PREFIX + key.removeprefix("random-") for key in REALISTIC)
            raise ValueError(f"--model {model} is unknown; generated ones are {known}")
        _check_fits(REALISTIC[name], options)
        device = "cpu" if options.cpu else "cuda"
        model = str(ensure_checkpoint(REALISTIC[name], DEMO_DIR / "checkpoints", device).resolve())
    return [Checkpoint(Path(model).name, model, _vocabulary(model), selected, False)]


def _check_fits(spec: CheckpointSpec, options: _Options) -> None:
    """Refuse what no server of a generated checkpoint starts with. Raises ValueError."""
    if spec.experts % options.tp or spec.heads % options.tp:
        raise ValueError(
            f"--tp {options.tp} must divide the {spec.experts} experts and {spec.heads} attention heads of {spec.name}"
        )
    longest = longest_prompt(options.chunk) + options.new_tokens
    if longest > spec.max_positions:
        raise ValueError(
            f"--chunk {options.chunk} and --new-tokens {options.new_tokens} make sequences of up to {longest} tokens, "
            f"{spec.name} takes {spec.max_positions}"
        )


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _vocabulary(model: str) -> int:
    """The vocabulary of a checkpoint, from its config file or from transformers for a Hugging Face name."""
    config_file = Path(model) / "config.json"
    if config_file.is_file():
        try:
            config = json.loads(config_file.read_text())
        except ValueError as exc:
            raise ValueError(f"--model {model}: {config_file} is not JSON: {exc}") from exc
    elif Path(model).exists():
        raise ValueError(f"--model {model} is no checkpoint folder: it has no config.json")
    else:
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(model, trust_remote_code=True).to_dict()
        except (ValueError, OSError) as exc:
            reason = str(exc).splitlines()[0]
            raise ValueError(f"--model {model} is no folder here, and as a Hugging Face name: {reason}") from exc
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not size:
        raise ValueError(f"--model {model}: config.json names no vocab_size")
    return size


def _compare(
    console: Console, options: _Options, checkpoint: Checkpoint, fleet: Fleet, kept: Kept | None
) -> list[report.Verdict]:
    prompts = make_prompts(checkpoint.vocab, options.chunk)
    job = Job(
        model=checkpoint.name,
        settings=options.serve_settings(checkpoint.model),
        prompts=prompts,
        new_tokens=options.new_tokens,
        out=options.out,
        fleet=fleet,
        resume=options.resume,
        evaluate=_evaluator(options, checkpoint, fleet),
        evaluation=str(options.evaluation or ""),
        keep=kept,
    )
    with report.progress_display(console, checkpoint.name) as update:
        results = run_all(job, checkpoint.paths, checkpoint.with_reference, options.jobs, update)
    baseline = results[checkpoint.paths[0].name]
    verdicts = []
    for name, result in results.items():
        verdict = report.Verdict(result, is_baseline=result is baseline)
        if not (result.error or baseline.error or verdict.is_baseline):
            bound = max(options.bound, _REFERENCE_BOUND) if name == REFERENCE else options.bound
            verdict.comparison = compare_probes(baseline.probes, result.probes, bound, options.outliers)
        verdicts.append(verdict)
    report.print_verdicts(console, checkpoint.name, baseline.path, verdicts)
    return verdicts


def _evaluator(options: _Options, checkpoint: Checkpoint, fleet: Fleet):
    settings = options.evaluation
    if settings is None:
        return None

    def evaluate(server, path: str) -> dict:
        return evaluate_gsm8k(server, settings, fleet, options.out / f"{checkpoint.name}.{path}.gsm8k.log")

    return evaluate


def _write_agreement(options: _Options, checkpoint: Checkpoint, verdicts: list[report.Verdict]) -> None:
    """One JSON line per compared path: how its answers differ from the baseline's."""
    rows = [
        {
            "path": verdict.result.path,
            "baseline": checkpoint.paths[0].name,
            "model": checkpoint.name,
            "ep": options.tp,
            "server_args": shlex.join(options.extra_args),
            **{name: getattr(verdict.comparison, name) for name in _AGREEMENT},
            "passed": verdict.passed,
            **verdict.result.stamp,
        }
        for verdict in verdicts
        if verdict.comparison is not None
    ]
    file = options.out / f"{checkpoint.name}.agreement.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_accuracy(options: _Options, checkpoint: Checkpoint, verdicts: list[report.Verdict]) -> None:
    """One JSON line per evaluated path: right answers, and the logprob differences from the baseline."""
    rows = []
    for verdict in verdicts:
        if (numbers := verdict.result.accuracy) is None:
            continue
        compared = verdict.comparison
        rows.append(
            {
                "path": verdict.result.path,
                "model": checkpoint.name,
                "correct": numbers["correct"],
                "total": numbers["total"],
                "logprob_diff_p50": compared.median if compared else 0.0,
                "logprob_diff_p99": compared.p99 if compared else 0.0,
                "ep": options.tp,
                **verdict.result.stamp,
            }
        )
    file = options.out / f"{checkpoint.name}.accuracy.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _measure(
    console: Console,
    options: _Options,
    checkpoint: Checkpoint,
    paths: list[ServePath],
    fleet: Fleet,
    servers: dict[str, Server],
) -> list[dict]:
    plan = ThroughputPlan(
        model=checkpoint.name,
        settings=options.serve_settings(checkpoint.model),
        prompt_lengths=options.lengths,
        tokens=options.tokens,
        rounds=options.rounds,
        together=options.together,
        out=options.out,
        fleet=fleet,
        resume=options.resume,
        jobs=options.jobs,
        servers=servers,
    )
    try:
        with report.progress_display(console, checkpoint.name) as update:
            measure_throughput(plan, paths, update)
    finally:
        # An interrupted run has measured something too.
        rows = summarize(plan.read_rows(), plan.model, options.tp)
        if rows:
            file = options.out / f"{checkpoint.name}.server.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            report.print_throughput(console, rows)
    return rows


def _explain_cpu(console: Console) -> None:
    console.print(
        "Real sglang.launch_server on CPU, expert parallel. Expanded and non-expanded prefill of this patch "
        "run its reference transport (DeepEP has no CPU build) and PyTorch grouped GEMMs; Triton kernels, SGLang's own "
        "among them, run interpreted. Plain SGLang's deepep_v2 cannot start here: it imports deep_ep. Its MoE without "
        "an all-to-all (none) and Hugging Face transformers are the independent answers.",
        highlight=False,
    )


def _write_json(file: Path | None, document: dict) -> None:
    if file is None:
        return
    text = json.dumps(document, indent=1) + os.linesep
    if str(file) == "-":
        print(text, end="")
    else:
        file.write_text(text)
