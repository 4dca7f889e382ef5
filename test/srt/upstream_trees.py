"""Small SGLang checkouts for the tests of `upstream`, and the command itself."""

import subprocess
from pathlib import Path

from typer.testing import CliRunner

from sglang_deepep_v2 import overlay
from sglang_deepep_v2.cli import app


def tree_file(root: Path, module: overlay.TreeModule) -> Path:
    return root.joinpath("python", *module.name.split(".")).with_suffix(".py")


def lay(*arguments: object):
    return CliRunner().invoke(app, ["upstream", *map(str, arguments)], catch_exceptions=False)


def one_line(done) -> str:
    (line,) = done.output.splitlines()
    return line


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def make_checkout(root: Path) -> Path:
    """A checkout that holds only the files of SGLang that the patch reads, beside the folders it writes to."""
    for module in overlay.modules().values():
        target = tree_file(root, module)
        target.parent.mkdir(parents=True, exist_ok=True)
        (target.parent / "__init__.py").touch()
        if module.kind != "new":
            target.write_bytes(overlay.base_file(module.name).read_bytes())
    return root
