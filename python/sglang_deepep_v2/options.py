"""What a command checks of its options before it starts: nothing ignored, every output writable."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection
from pathlib import Path

import typer


def refuse_ignored(ctx: typer.Context, mode: str, ignored: Collection[str] = (), allowed: Collection[str] = ()) -> None:
    """Refuse the options given that ``mode`` has no use for: those in ``ignored``, or without it all but ``allowed``.

    Both hold parameter names.
    """
    given = [p for p in ctx.command.params if ctx.get_parameter_source(p.name).name == "COMMANDLINE"]
    useless = [max(p.opts, key=len) for p in given if (p.name in ignored if ignored else p.name not in allowed)]
    if useless:
        raise typer.BadParameter(f"{mode} has no use for {', '.join(useless)}: leave it out")


def prepare_folder(option: str, folder: Path) -> None:
    """Make the folder, and refuse one in which no file can be written or whose records cannot be added to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        raise typer.BadParameter(f"{option} {folder} is no folder that can be written to: {exc.strerror}") from exc
    for file in sorted(folder.glob("*.json*")):
        _refuse_unwritable(option, file)


def prepare_file(option: str, file: Path) -> None:
    """Refuse a file that cannot be written; nothing of it changes."""
    if not file.parent.is_dir():
        raise typer.BadParameter(f"{option} {file} cannot be written: {file.parent} is no folder")
    if file.exists():
        _refuse_unwritable(option, file)
        return
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as exc:
        raise typer.BadParameter(f"{option} {file} cannot be written: {exc.strerror}") from exc


def _refuse_unwritable(option: str, file: Path) -> None:
    if file.is_dir() or not os.access(file, os.W_OK):
        why = "it is a folder" if file.is_dir() else "it is read-only"
        raise typer.BadParameter(f"{option}: {file} cannot be written: {why}")
