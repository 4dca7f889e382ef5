"""The `ab` command: the embedded CPU demo, or the A/B of a user's model on GPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sglang_deepep_v2.ab import report
from sglang_deepep_v2.ab.accuracy import evaluate_gsm8k
from sglang_deepep_v2.ab.compare import compare_probes
from sglang_deepep_v2.ab.fingerprint import file_hash
from sglang_deepep_v2.ab.options import (
    DEMO_DIR,
    Checkpoint,
    Options,
    find_checkpoints,
    has_cuda,
    locked_folder,
    parse_evaluation,
    parse_folder,
    parse_lengths,
    parse_words,
    write_checkpoint,
)
from sglang_deepep_v2.ab.paths import PATHS, ServePath
from sglang_deepep_v2.ab.probe import make_prompts
from sglang_deepep_v2.ab.servers import Fleet, Server, ServerFailed, interrupt_on_sigterm
from sglang_deepep_v2.ab.session import REFERENCE, Job, Kept, resumed, run_all
from sglang_deepep_v2.ab.throughput import MIN_PROMPTS, ThroughputPlan, measure_throughput, summarize
from sglang_deepep_v2.options import prepare_file, prepare_folder, refuse_ignored

# Twice the largest difference between correct paths of these checkpoints (0.05, and 0.10 from fp32 transformers); a
# dropped router weight makes 0.9 and more.
_DEMO_BOUND = 0.1
_REFERENCE_BOUND = 0.2
_MODEL_BOUND = 0.5
# A model's router has near-ties; two roundings then choose another expert for a few tokens.
_MODEL_OUTLIERS = 0.02
_DEMO_CHUNK, _MODEL_CHUNK = 256, 8192
_DEMO_NEW_TOKENS, _MODEL_NEW_TOKENS = 4, 16
_ONLY_THROUGHPUT = ("rounds", "tokens", "together")
_ONLY_EVAL = ("data_path", "eval_questions", "eval_shots", "eval_max_new_tokens")
_AGREEMENT = ("prompts", "greedy_equal", "largest", "median", "bound", "outliers")


def ab(
    ctx: typer.Context,
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
    tokens: Annotated[
        int, typer.Option(min=1, help=f"Throughput: prompt tokens per measurement, at least {MIN_PROMPTS} prompts.")
    ] = 262144,
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
        list[str] | None, typer.Option(help="Directory put first on every server's PYTHONPATH; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of results and server logs. Demo: .demo/runs.")] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Keep what was measured with the same options, patch, versions, GPU, steering variables (SGLANG_*, "
            "EP_*, NCCL_*, DG_*, TRITON_*, CUDA_VISIBLE_DEVICES, PYTHONPATH) and files (local model, --data-path, "
            "--server-pythonpath).",
        ),
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
    if evaluation is None:
        refuse_ignored(ctx, "ab without --eval", _ONLY_EVAL)
    if model is not None and paths is not None:
        refuse_ignored(ctx, "ab with --model and --paths", ("quick",))
    cpu = model is None or not has_cuda()
    if model is not None and cpu:
        refuse_ignored(ctx, "ab with --model on a machine without a GPU", ("quick",))
    options = Options(
        model=model,
        cpu=cpu,
        tp=tp or (2 if cpu else 1),
        chunk=chunk or (_DEMO_CHUNK if cpu else _MODEL_CHUNK),
        new_tokens=new_tokens or (_DEMO_NEW_TOKENS if cpu else _MODEL_NEW_TOKENS),
        bound=bound if bound is not None else (_DEMO_BOUND if cpu else _MODEL_BOUND),
        outliers=outliers if outliers is not None else (0.0 if cpu else _MODEL_OUTLIERS),
        lengths=parse_lengths(prompt_len if prompt_len is not None else ("" if cpu else "1024,8192")),
        extra_args=(*parse_words(server_args), *(("--mem-fraction-static", str(mem_fraction)) if mem_fraction else ())),
        pythonpath=tuple(map(parse_folder, server_pythonpath or ())),
        out=out or (DEMO_DIR / "runs" if cpu else Path("ab-results")),
        jobs=jobs or (2 if cpu else 1),
        resume=resume,
        rounds=rounds,
        tokens=tokens,
        together=together,
        evaluation=parse_evaluation(evaluation, data_path, eval_questions, eval_shots, eval_max_new_tokens),
    )
    if not options.lengths:
        refuse_ignored(ctx, "ab without --prompt-len", _ONLY_THROUGHPUT)
    fleet, checkpoints, passed, document = Fleet(), [], True, {"checkpoints": {}, "throughput": []}
    with interrupt_on_sigterm(), contextlib.ExitStack() as held:
        try:
            try:
                checkpoints = find_checkpoints(options, paths, quick)
                prepare_folder("--out", options.out)
                held.enter_context(locked_folder("--out", options.out))
                if json_file is not None and str(json_file) != "-":
                    prepare_file("--json", json_file)
                for checkpoint in checkpoints:
                    write_checkpoint(checkpoint, options)
            except (ValueError, OSError) as exc:
                raise typer.BadParameter(str(exc)) from exc
            if cpu:
                _explain_cpu(console)
            for checkpoint in checkpoints:
                passed &= _run_checkpoint(console, options, checkpoint, fleet, document)
        except ServerFailed as exc:
            console.print(str(exc), markup=False, highlight=False)
            passed = False
        except KeyboardInterrupt:
            kept = sum(_count_kept(options, checkpoint, fleet) for checkpoint in checkpoints)
            left = f"{kept} result(s) in {options.out} for --resume" if kept else "no result was finished"
            console.print(f"interrupted; every server is ended; {left}", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(130) from None
        finally:
            fleet.close()
    document["passed"] = passed
    _write_json(json_file, document)
    console.print("[green]all paths agree[/green]" if passed else "[red]paths do not agree, or a server failed[/red]")
    raise typer.Exit(0 if passed else 1)


def _run_checkpoint(console: Console, options: Options, checkpoint: Checkpoint, fleet: Fleet, document: dict) -> bool:
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


def _job(options: Options, checkpoint: Checkpoint, fleet: Fleet, kept: Kept | None = None) -> Job:
    return Job(
        model=checkpoint.name,
        settings=options.serve_settings(checkpoint.model),
        prompts=make_prompts(checkpoint.vocab, options.chunk),
        new_tokens=options.new_tokens,
        out=options.out,
        fleet=fleet,
        resume=options.resume,
        evaluate=_evaluator(options, checkpoint, fleet),
        evaluation=f"{options.evaluation} {file_hash(options.evaluation.data_path)}" if options.evaluation else "",
        keep=kept,
    )


def _plan(options: Options, checkpoint: Checkpoint, fleet: Fleet, servers: dict[str, Server]) -> ThroughputPlan:
    return ThroughputPlan(
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


def _count_kept(options: Options, checkpoint: Checkpoint, fleet: Fleet) -> int:
    """How many results on disk a run with --resume takes over."""
    job = dataclasses.replace(_job(options, checkpoint, fleet), resume=True)
    served = [path for path in checkpoint.paths if resumed(job, path.name, path)]
    reference = checkpoint.with_reference and resumed(job, REFERENCE, None)
    rows = _plan(options, checkpoint, fleet, {}).read_rows(checkpoint.paths) if options.lengths else []
    return len(served) + bool(reference) + len(rows)


def _compare(
    console: Console, options: Options, checkpoint: Checkpoint, fleet: Fleet, kept: Kept | None
) -> list[report.Verdict]:
    job = _job(options, checkpoint, fleet, kept)
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


def _evaluator(options: Options, checkpoint: Checkpoint, fleet: Fleet):
    settings = options.evaluation
    if settings is None:
        return None

    def evaluate(server, path: str) -> dict:
        return evaluate_gsm8k(server, settings, fleet, options.out / f"{checkpoint.name}.{path}.gsm8k.log")

    return evaluate


def _write_agreement(options: Options, checkpoint: Checkpoint, verdicts: list[report.Verdict]) -> None:
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


def _write_accuracy(options: Options, checkpoint: Checkpoint, verdicts: list[report.Verdict]) -> None:
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
    options: Options,
    checkpoint: Checkpoint,
    paths: list[ServePath],
    fleet: Fleet,
    servers: dict[str, Server],
) -> list[dict]:
    plan = _plan(options, checkpoint, fleet, servers)
    try:
        with report.progress_display(console, checkpoint.name) as update:
            measure_throughput(plan, paths, update)
    finally:
        # An interrupted run has measured something too.
        rows = summarize(plan.read_rows(paths), plan.model, options.tp)
        if rows:
            file = options.out / f"{checkpoint.name}.server.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            report.print_throughput(console, rows, paths[0].name)
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
