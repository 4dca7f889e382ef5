"""`sglang-deepep-v2 upstream`: the patch laid onto a copy of SGLang's source, so that it needs no loader."""

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_deepep_v2 import overlay
from sglang_deepep_v2.source_merge import MergeError, merge, without_kind

_INSTALLED = "installed"
_BASE_BRANCH = "base"
_IDENTITY = ("-c", "user.name=sglang-deepep-v2", "-c", "user.email=sglang-deepep-v2@localhost")
_SORT_IMPORTS = ("--isolated", "--select=I", "--fix", "--quiet", "--config", 'lint.isort.known-first-party=["sglang"]')


@dataclass(frozen=True)
class Concern:
    """One commit: its message, and the module name prefixes (under ``sglang.srt.``) that it carries."""

    message: str
    prefixes: tuple[str, ...]


CONCERNS = (
    Concern("deepep_v2: environment variables of the expanded prefill", ("environ",)),
    Concern("deepep_v2: check token budget, batch layout and model shape at start-up", ("arg_groups.",)),
    Concern("deepep_v2: Triton kernels of the expanded layout, with PyTorch twins", ("layers.moe.ep_moe.",)),
    Concern("deep_gemm: grouped GEMMs in the psum layout, with their warm-up", ("layers.deep_gemm_wrapper.",)),
    Concern(
        "deepep_v2: dispatcher and buffer of the expanded prefill\n\nThe psum pipeline also needs the next commit.",
        ("layers.moe.token_dispatcher.",),
    ),
    Concern("deepep_v2: expanded prefill in the DeepGEMM runner", ("layers.moe.moe_runner.",)),
    Concern("deepep_v2: build the buffer before serving", ("model_executor.",)),
)


@dataclass(frozen=True)
class Laid:
    """A file of the patch as it goes into the tree; ``path`` is relative to the ``sglang`` package."""

    module: overlay.TreeModule
    path: Path
    text: str
    as_locked: bool


def lay(package: Path) -> dict[Concern, list[Laid]]:
    """Every file of the patch merged with the files of ``package``, by concern; writes nothing.

    Args:
        package: an ``sglang`` package folder: the installed one, or a checkout's ``python/sglang``.

    Raises:
        MergeError: the patch does not fit the package; the message names the file and the name in it.
        OverlayError: the patch tree is missing.
    """
    locked = overlay.read_lock().get(overlay.base_version() or "", {})
    plan: dict[Concern, list[Laid]] = {concern: [] for concern in CONCERNS}
    for name, module in overlay.modules().items():
        short = name.removeprefix("sglang.srt.")
        concern = next((c for c in CONCERNS if short.startswith(c.prefixes)), None)
        if concern is None:
            raise MergeError(f"{name}: no commit of {Path(__file__).name} carries this module")
        path = Path(*name.split(".")[1:]).with_suffix(".py")
        base = package / path
        if (module.kind == "new") == base.is_file():
            found = "has" if base.is_file() else "has no"
            raise MergeError(f"{name} is {module.kind} in the patch, and {package} {found} {path}")
        if module.kind == "extends":
            text = merge(base.read_text(), module.file.read_text(), name, style=_format)
        else:
            text = _format(without_kind(module.file.read_text()))
        as_locked = module.kind == "new" or locked.get(name) == hashlib.sha256(base.read_bytes()).hexdigest()
        plan[concern].append(Laid(module, path, _sort_imports(text), as_locked))
    return plan


def write(package: Path, files: list[Laid]) -> None:
    """Put files into an ``sglang`` package; a hard-linked file is replaced, not written through."""
    for laid in files:
        target = package / laid.path
        draft = target.with_name(f".{target.name}.draft")
        draft.write_text(laid.text)
        draft.replace(target)


def _ruff() -> str | None:
    beside = Path(sys.executable).with_name("ruff")
    return str(beside) if beside.is_file() else shutil.which("ruff")


def _through_ruff(text: str, *arguments: str) -> str:
    ruff = _ruff()
    if ruff is None:
        return text
    done = subprocess.run([ruff, *arguments, "-"], input=text, capture_output=True, text=True)
    if done.returncode:
        raise MergeError(f"ruff {arguments[0]} refused a merged file: {done.stderr.strip()}")
    return done.stdout


def _format(text: str) -> str:
    return _through_ruff(text, "format", "--isolated")


def _sort_imports(text: str) -> str:
    return _through_ruff(text, "check", *_SORT_IMPORTS)


def _git(tree: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(tree), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise MergeError(f"git {' '.join(arguments[:3])} failed in {tree}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def _commit(tree: Path, message: str, *paths: str) -> None:
    _git(tree, "add", "--force", "--", *paths)
    known = subprocess.run(["git", "-C", str(tree), "config", "user.email"], capture_output=True).returncode == 0
    _git(tree, *(() if known else _IDENTITY), "commit", "--quiet", "-m", message)


def _is_repository(tree: Path) -> bool:
    done = subprocess.run(["git", "-C", str(tree), "rev-parse", "--show-toplevel"], capture_output=True, text=True)
    return done.returncode == 0 and Path(done.stdout.strip()) == tree.resolve()


def _source_package(source: str) -> Path:
    if source == _INSTALLED:
        package = overlay.base_root()
        if package is None:
            raise MergeError("no SGLang is installed; name a checkout with --from PATH")
        return package
    found = [path for path in (Path(source) / "python/sglang", Path(source)) if (path / "srt").is_dir()]
    if not found:
        raise MergeError(f"--from {source}: neither an SGLang checkout nor an sglang package")
    return found[0]


def _prepare(tree: Path, source: str, branch: str) -> tuple[dict[Concern, list[Laid]], bool]:
    """The plan, and whether ``tree`` (which afterwards holds python/sglang) is a git repository on ``branch``."""
    package = tree / "python/sglang"
    if package.is_dir():
        if source != _INSTALLED:
            raise MergeError(f"{tree} holds python/sglang already: leave --from out, or name an empty --into")
        plan = lay(package)
        if not _is_repository(tree):
            return plan, False
        if _git(tree, "status", "--porcelain", "--untracked-files=no"):
            raise MergeError(f"{tree} has uncommitted changes: commit or stash them first")
        _git(tree, "switch", "--quiet", "-c", branch)
        return plan, True
    if tree.exists() and any(tree.iterdir()):
        raise MergeError(f"{tree} is neither empty nor an SGLang checkout (no python/sglang in it)")
    origin = _source_package(source)
    plan = lay(origin)
    shutil.copytree(origin, package, ignore=shutil.ignore_patterns("__pycache__"))
    _git(tree, "init", "--quiet", "-b", _BASE_BRANCH)
    _commit(tree, f"sglang {overlay.base_version() if source == _INSTALLED else origin.resolve()}", "python")
    _git(tree, "switch", "--quiet", "-c", branch)
    return plan, True


def upstream(
    into: Annotated[
        Path,
        typer.Option(
            "--into",
            metavar="TREE",
            help="An SGLang checkout, or a new or empty folder: it gets a copy of SGLang as python/sglang.",
        ),
    ],
    source: Annotated[
        str,
        typer.Option("--from", metavar="installed|PATH", help="What a new TREE copies: SGLang here, or a checkout."),
    ] = _INSTALLED,
    branch: Annotated[
        str, typer.Option("--branch", help="The git branch to create in TREE; it must not exist.")
    ] = "deepep-v2-expanded-prefill",
) -> None:
    """Lay the patch onto SGLang's source, one commit per concern, so that it runs without the loader.

    New and replaced files are copied. In an extended file, SGLang's definitions that the patch takes over are renamed
    _base_NAME, and the patch's own follow them. A TREE that is no git repository is changed without commits.

    Examples:

    * onto a copy of the installed SGLang: sglang-deepep-v2 upstream --into sglang-with-expand

    * onto a checkout, on a branch of its own: sglang-deepep-v2 upstream --into sglang --branch expand

    Then git -C sglang-with-expand log -p base.. shows what it changed.
    """
    if into.exists() and not into.is_dir():
        raise typer.BadParameter(f"--into {into} is no folder")
    # Before a new TREE is filled: it would stay behind.
    valid = subprocess.run(["git", "check-ref-format", "--branch", branch], capture_output=True).returncode == 0
    if not valid or branch == _BASE_BRANCH:
        raise typer.BadParameter(f"--branch {branch} " + ("is SGLang's own here" if valid else "is no branch name"))
    console = Console()
    try:
        plan, is_repository = _prepare(into, source, branch)
        for concern, files in plan.items():
            write(into / "python/sglang", files)
            if is_repository:
                _commit(into, concern.message, *(str(Path("python/sglang") / laid.path) for laid in files))
    except (MergeError, overlay.OverlayError, OSError) as problem:
        console.print(f"[red]{escape(str(problem))}", soft_wrap=True)
        raise typer.Exit(1) from None
    table = Table("kind", "SGLang's file", "file, in python/sglang")
    for laid in (laid for files in plan.values() for laid in files):
        base = "none" if laid.module.kind == "new" else "the verified one"
        table.add_row(laid.module.kind, base if laid.as_locked else "[yellow]another version: review", str(laid.path))
    console.print(table)
    if _ruff() is None:
        console.print("ruff is not installed: the merged imports are not sorted.")
    console.print(f"Run it with PYTHONPATH={into / 'python'} {overlay.SWITCH}=0.", soft_wrap=True, highlight=False)
