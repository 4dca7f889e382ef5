"""`sglang-deepep-v2 status`: what the patch overlays, and whether SGLang is the verified one."""

import json
import sys
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from sglang_deepep_v2 import overlay
from sglang_deepep_v2.console import make_console

_PARENT = "sglang.srt"
_INACTIVE = "the loader is not active in this interpreter, so it runs SGLang without the patch"
_WHY_INACTIVE = (
    "Its .pth file was not processed, as with `python -S`, a folder of PYTHONPATH or `pip install --target`: "
    "install into the interpreter's own site-packages."
)


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    write_lock: Annotated[
        bool,
        typer.Option("--write-lock", help="First lock the installed SGLang's files."),
    ] = False,
) -> None:
    """List every overlaid module.

    Exit code 1: the installed SGLang is not the verified one, or the loader is not active in this interpreter.

    Examples:

    * what is overlaid, and on what: sglang-deepep-v2 status

    * after a review of another SGLang's files: sglang-deepep-v2 status --write-lock
    """
    try:
        enabled = overlay.enabled()
    except overlay.OverlayError as refusal:
        raise typer.BadParameter(str(refusal)) from refusal
    active = overlay.is_active()
    errors = [] if active or not enabled else [f"{_INACTIVE} ({sys.executable}). {_WHY_INACTIVE}"]
    found: list[overlay.Finding] = []
    lock: dict[str, dict[str, str]] = {}
    installed = overlay.base_version()
    try:
        if write_lock:
            overlay.write_lock()
        lock = overlay.read_lock()
        found = overlay.findings()
        stale = set(lock[installed]) - {f.module.name for f in found if f.module.kind != "new"}
        if stale:
            names = ", ".join(sorted(stale))
            errors.append(f"the lock names what the tree lacks: {names}; run `{overlay.WRITE_LOCK}`")
    except (overlay.OverlayError, OSError) as problem:
        errors.append(str(problem))
    error = "\n".join(errors) or None
    report = {
        "enabled": enabled,
        "active": active,
        "sglang": installed,
        "verified": [*lock],
        "tree": str(overlay.TREE),
        "error": error,
        "modules": [
            {
                "name": f.module.name,
                "kind": f.module.kind,
                "file": str(f.module.file),
                "base_file": str(f.base_file) if f.base_file else None,
                "problem": f.problem,
            }
            for f in found
        ],
    }
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)
    if error or any(f.problem for f in found):
        raise typer.Exit(1)


def _print(report: dict) -> None:
    console = make_console()
    switch = "on" if report["active"] else "without its loader"
    if not report["enabled"]:
        switch = f"off ({overlay.SWITCH}=0)"
    console.print(
        f"overlay {switch}, sglang {report['sglang'] or 'not installed'}, verified on "
        f"{', '.join(report['verified']) or 'none'}\ntree {escape(report['tree'])}",
        highlight=False,
        soft_wrap=True,
    )
    if report["modules"]:
        table = Table("kind", "SGLang's own file", Column(f"module, in {_PARENT}", overflow="fold"))
        for row in report["modules"]:
            expected = "[green]none, as expected" if row["kind"] == "new" else "[green]as locked"
            found = f"[red]{escape(row['problem'])}" if row["problem"] else expected
            table.add_row(row["kind"], found, row["name"].removeprefix(f"{_PARENT}."))
        console.print(table)
    if report["error"]:
        console.print(f"[red]{escape(report['error'])}", soft_wrap=True)
