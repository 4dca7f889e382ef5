"""`sglang-deepep-v2 upstream`: the patch laid onto a copy of SGLang's source, so that it needs no loader."""

import hashlib
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from sglang_deepep_v2 import overlay, target_tree
from sglang_deepep_v2.ab.servers import interrupt_on_sigterm
from sglang_deepep_v2.console import make_console
from sglang_deepep_v2.source_merge import MergeError, merge, without_kind
from sglang_deepep_v2.target_tree import Commit

_INSTALLED = "installed"
_BASE_BRANCH = "base"
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


Plan = dict[Concern, list[Laid]]


def lay(package: Path) -> Plan:
    """Every file of the patch merged with the files of ``package``, by concern; writes nothing.

    Args:
        package: an ``sglang`` package folder: the installed one, or a checkout's ``python/sglang``.

    Raises:
        MergeError: the patch does not fit the package; the message names the file and the name in it.
        OverlayError: the patch tree is missing.
    """
    locked = overlay.read_lock().get(overlay.base_version() or "", {})
    plan: Plan = {concern: [] for concern in CONCERNS}
    for name, module in overlay.modules().items():
        short = name.removeprefix("sglang.srt.")
        concern = next((c for c in CONCERNS if short.startswith(c.prefixes)), None)
        if concern is None:
            raise MergeError(f"{name}: no commit of {Path(__file__).name} carries this module")
        path = _relative(name)
        base = package / path
        if not base.parent.is_dir():
            raise MergeError(f"{name} is {module.kind} in the patch, and {package} has no folder {path.parent}")
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


def holds_patch(package: Path) -> bool:
    """Whether every file that is new in the patch lies in an ``sglang`` package already."""
    new = [name for name, module in overlay.modules().items() if module.kind == "new"]
    return all((package / _relative(name)).is_file() for name in new)


def _relative(name: str) -> Path:
    return Path(*name.split(".")[1:]).with_suffix(".py")


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


def _commits(plan: Plan) -> list[Commit]:
    return [Commit(concern.message, {laid.path: laid.text for laid in files}) for concern, files in plan.items()]


def _into_new(tree: Path, source: str, branch: str) -> Plan:
    """Fill a new or empty folder with a repository: a copy of SGLang on one branch, the patch on another."""
    origin = _source_package(source)
    if tree.resolve().is_relative_to(origin.resolve()):
        raise MergeError(f"--into {tree} is inside {origin}, which it would copy")
    plan = lay(origin)
    title = f"sglang {overlay.base_version() if source == _INSTALLED else origin.resolve()}"
    target_tree.fill(tree, origin, title, _BASE_BRANCH, branch, _commits(plan))
    return plan


def _into_existing(tree: Path, branch: str) -> Plan:
    """Lay the patch onto the SGLang in ``tree``: on a branch of a repository, else in place."""
    package, is_repository = tree / target_tree.PACKAGE, target_tree.is_repository(tree)
    if holds_patch(package):
        where, other = "", "name another --into"
        if is_repository:
            where = f" (branch {target_tree.git(tree, 'branch', '--show-current') or 'none: detached HEAD'})"
            other += ", or switch to SGLang's own branch and name another --branch"
        raise MergeError(f"{tree} already holds the patch{where}: {other}")
    plan = lay(package)
    if is_repository:
        known = [str(laid.path) for files in plan.values() for laid in files if laid.module.kind != "new"]
        target_tree.add_branch(tree, branch, known, _commits(plan))
    else:
        target_tree.write(package, {laid.path: laid.text for files in plan.values() for laid in files})
    return plan


def upstream(
    ctx: typer.Context,
    into: Annotated[
        str,
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
    _base_NAME, and the patch's own follow them. A TREE that no git repository tracks is changed without commits.

    Examples:

    * onto a copy of the installed SGLang: sglang-deepep-v2 upstream --into sglang-with-expand

    * onto a checkout, on a branch of its own: sglang-deepep-v2 upstream --into sglang --branch expand

    Then git -C sglang-with-expand log -p base.. shows what it changed.
    """
    for option, value in (("--into", into), ("--from", source)):
        if not value:
            raise typer.BadParameter(f"{option} '' names no folder")
    tree = Path(into)
    if tree.exists() and not tree.is_dir():
        raise typer.BadParameter(f"--into {tree} is no folder")
    exists = (tree / target_tree.PACKAGE).is_dir()
    errors = make_console(stderr=True)
    try:
        with interrupt_on_sigterm():
            if not exists and tree.exists() and any(tree.iterdir()):
                raise MergeError(f"{tree} is neither empty nor an SGLang checkout (no python/sglang in it)")
            has_git = not exists or target_tree.is_repository(tree)
            if not has_git and ctx.get_parameter_source("branch").name == "COMMANDLINE":
                raise typer.BadParameter(f"--branch {branch}: no git repository tracks {tree}, leave --branch out")
            if has_git and (branch == _BASE_BRANCH or not target_tree.is_branch_name(branch)):
                problem = "is SGLang's own here" if branch == _BASE_BRANCH else "is no branch name"
                raise typer.BadParameter(f"--branch {branch} {problem}")
            if exists and source != _INSTALLED:
                raise MergeError(f"{tree} holds python/sglang already: leave --from out, or name an empty --into")
            plan = _into_existing(tree, branch) if exists else _into_new(tree, source, branch)
    except (MergeError, overlay.OverlayError, OSError) as problem:
        errors.print(f"[red]{escape(str(problem))}", soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        errors.print(f"interrupted: {tree} is as it was", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    _report(plan, tree, branch if has_git else None)


def _report(plan: Plan, tree: Path, branch: str | None) -> None:
    console = make_console()
    table = Table("kind", "SGLang's file", Column("file, in python/sglang", overflow="fold"))
    for laid in (laid for files in plan.values() for laid in files):
        base = "none" if laid.module.kind == "new" else "the verified one"
        table.add_row(laid.module.kind, base if laid.as_locked else "[yellow]another version: review", str(laid.path))
    console.print(table)
    if _ruff() is None:
        console.print("ruff is not installed: the merged imports are not sorted.")
    # Absolute and quoted: the line is for pasting, in any folder.
    path = shlex.quote(str(tree.resolve() / "python"))
    done = f"{len(plan)} commits on branch {branch}." if branch else "no git here: files changed without commits."
    run = f"Run it: PYTHONPATH={path} {overlay.SWITCH}=0 python -m sglang.launch_server ..."
    console.print(f"{done}\n{run}", soft_wrap=True, highlight=False, markup=False)
