"""`sglang-deepep-v2 doctor`: what is wrong with a machine or a launch command, before a server starts.

Every check stands alone: what may crash or hang runs in a child with a time limit, and a check that fails
itself is a finding like any other. Importing this package imports neither torch nor SGLang.
"""

import json
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated

import typer

from sglang_deepep_v2.ab.servers import interrupt_on_sigterm

from . import hardware, settings, software
from .launch import check_launch, read_command
from .machine import MAX_TIMEOUT_S, Finding, Launch, Machine

__all__ = ["Finding", "Machine", "doctor", "examine"]

_COLOURS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}


def examine(machine: Machine, launch: Launch | None = None) -> list[Finding]:
    """All findings, in the report's order. A check's own exception is a finding too; only KeyboardInterrupt is raised.

    machine  what is examined; its environment should already hold the launch command's assignments
    launch   a launch command taken apart by read_command, or None
    """
    checks: list[Callable[[], Finding | Iterable[Finding]]] = []
    for check in (*software.CHECKS, *hardware.CHECKS):
        checks.append(lambda check=check: check(machine))
    checks.append(lambda: hardware.check_gin(machine, _nnodes(launch)))
    for check in settings.CHECKS:
        checks.append(lambda check=check: check(machine))
    if launch is not None:
        checks.append(lambda: check_launch(machine, launch))
    with ThreadPoolExecutor(max_workers=4) as pool:
        # The children are the slow part, so they start first and at once.
        for name in ("torch", "deep_ep", "deep_gemm", "overlay"):
            pool.submit(machine.probe, name)
        try:
            findings = [finding for found in pool.map(_guarded, checks) for finding in found]
        except KeyboardInterrupt:
            # The pool's end waits for them, and they do not get the terminal's Ctrl-C.
            machine.stop()
            raise
    # Whatever was not waited for, no other remedy is known to help.
    longer = min(MAX_TIMEOUT_S, max(120, 2 * machine.timeout_s))
    words = f"sglang-deepep-v2 doctor --timeout {longer:g}" + (" -- ..." if launch else "")
    return [replace(finding, fix=words) if machine.late in finding.message else finding for finding in findings]


def _guarded(check: Callable[[], Finding | Iterable[Finding]]) -> list[Finding]:
    try:
        found = check()
    except Exception as error:
        return [Finding("doctor", "fail", f"a check failed itself: {type(error).__name__}: {error}")]
    return [found] if isinstance(found, Finding) else list(found)


def _nnodes(launch: Launch | None) -> int:
    """Nodes of the launch command, read from its words: resolution may fail for another reason."""
    argv = launch.argv if launch else []
    for index, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name == "--nnodes":
            value = value or "".join(argv[index + 1 : index + 2])
            return int(value) if value.isdigit() else 1
    return 1


def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="A launch command to check, after `--`: -- python -m sglang.launch_server ...",
            metavar="-- COMMAND",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds one import or command may take.", min=1, max=MAX_TIMEOUT_S)
    ] = 120.0,
) -> None:
    """Check this machine, and a launch command, for the DeepEP V2 backend. Exits 1 when a check fails.

    Examples:

    * this machine: sglang-deepep-v2 doctor

    * a launch command too, for GPUs: sglang-deepep-v2 doctor -- sglang serve MODEL --tp 8 --device cuda

    * with its variables: sglang-deepep-v2 doctor -- NAME=VALUE python -m sglang.launch_server --model-path MODEL
    """
    # A range takes nan, which compares with nothing.
    if math.isnan(timeout):
        raise typer.BadParameter(f"--timeout {timeout} is no number between 1 and {MAX_TIMEOUT_S}")
    launch = read_command(command) if command else None
    machine = Machine(timeout_s=timeout)
    if launch:
        machine.env.update(launch.env)
    try:
        with interrupt_on_sigterm():
            findings = examine(machine, launch)
    except KeyboardInterrupt:
        typer.echo("interrupted; every check is ended", err=True)
        raise typer.Exit(130) from None
    counts = {level: sum(f.level == level for f in findings) for level in ("ok", "warn", "fail")}
    if as_json:
        report = {"ok": not counts["fail"], "counts": counts, "findings": [f.as_dict() for f in findings]}
        typer.echo(json.dumps(report, indent=1))
    else:
        width = max(len(f.check) for f in findings)
        for finding in findings:
            typer.echo(_line(finding, width))
    if counts["fail"]:
        raise typer.Exit(1)


def _line(finding: Finding, width: int) -> str:
    level = typer.style(f"{finding.level:4}", fg=_COLOURS[finding.level], bold=finding.level == "fail")
    fix = f"  -> {finding.fix}" if finding.fix else ""
    return f"{level}  {finding.check:{width}}  {' '.join(finding.message.split())}{fix}"
