"""Where `upstream` puts its result: a new repository, a branch of a checkout, or a plain folder. All or nothing."""

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sglang_deepep_v2.source_merge import MergeError

PACKAGE = Path("python/sglang")
_IDENTITY = {"name": "sglang-deepep-v2", "email": "sglang-deepep-v2@localhost"}
_MOST_OF_A_REASON = 1000


@dataclass(frozen=True)
class Commit:
    """``files``: path in the ``sglang`` package -> new text."""

    message: str
    files: Mapping[Path, str]


def _run_git(tree: Path, arguments: Iterable[str], **env: str) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(
            ["git", "-C", str(tree), *arguments], capture_output=True, text=True, errors="replace", env=os.environ | env
        )
    except FileNotFoundError:
        raise MergeError("git is not on PATH: install it, for example with apt-get install git") from None


def git(tree: Path, *arguments: str, **env: str) -> str:
    """What git prints; MergeError with git's own reason, in one line, where it fails."""
    done = _run_git(tree, arguments, **env)
    if done.returncode:
        reason = " | ".join(line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip())
        cut = reason if len(reason) <= _MOST_OF_A_REASON else reason[:_MOST_OF_A_REASON] + " ..."
        raise MergeError(f"git {arguments[0]}: {cut or f'exit status {done.returncode}'}")
    return done.stdout.strip()


def is_repository(tree: Path) -> bool:
    """Whether git keeps the SGLang in ``tree``: the top of a repository, or a folder of which one tracks files.

    One that git refuses to read is still one.
    """
    if (tree / ".git").exists():
        return True
    if not any((folder / ".git").exists() for folder in tree.resolve().parents):
        return False
    tracked = _run_git(tree, ("ls-files", "--", str(PACKAGE)))
    return tracked.returncode != 0 or bool(tracked.stdout)


def is_branch_name(name: str) -> bool:
    return _run_git(Path(), ("check-ref-format", "--branch", name)).returncode == 0


def _commit(tree: Path, message: str, *paths: str) -> None:
    env = {}
    for key, value in _IDENTITY.items():
        if _run_git(tree, ("config", f"user.{key}")).returncode:
            for role in ("AUTHOR", "COMMITTER"):
                name = f"GIT_{role}_{key.upper()}"
                env[name] = os.environ.get(name) or value
    git(tree, "add", "--force", "--", *paths)
    git(tree, "commit", "--quiet", "-m", message, **env)


def _commit_all(tree: Path, commits: Iterable[Commit]) -> None:
    for commit in commits:
        write(tree / PACKAGE, commit.files)
        _commit(tree, commit.message, *(str(PACKAGE / path) for path in commit.files))


def write(package: Path, files: Mapping[Path, str]) -> None:
    """Put files into an ``sglang`` package, all or none; a hard-linked file is replaced, not written through."""
    drafts = {package / path: (package / path).with_name(f".{path.name}.draft") for path in files}
    try:
        for draft, text in zip(drafts.values(), files.values()):
            draft.write_text(text)
    except BaseException:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
        raise
    for target, draft in drafts.items():
        draft.replace(target)


def fill(tree: Path, origin: Path, title: str, base: str, branch: str, commits: Iterable[Commit]) -> None:
    """Make ``tree`` a repository: ``origin`` copied as python/sglang on branch ``base``, the commits on ``branch``."""
    with _stage(tree) as stage:
        try:
            shutil.copytree(origin, stage / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        except shutil.Error as problem:
            # One entry per file: thousands on a full disk.
            (*_, why), *others = problem.args[0]
            more = f" (and {len(others)} more)" if others else ""
            raise MergeError(f"copying {origin} to {tree}: {why}{more}") from None
        git(stage, "init", "--quiet", "-b", base)
        _commit(stage, title, "python")
        git(stage, "switch", "--quiet", "-c", branch)
        _commit_all(stage, commits)


@contextmanager
def _stage(tree: Path) -> Iterator[Path]:
    """A folder that becomes ``tree`` when the block ends, and is gone when the block fails."""
    tree = tree.resolve()
    # An empty folder that stands may be a mount point, or the caller's own: it is filled, not replaced.
    stands = tree.is_dir()
    parent = tree if stands else tree.parent
    if not parent.is_dir():
        raise MergeError(f"--into {tree}: there is no folder {parent}; mkdir -p {shlex.quote(str(parent))}")
    stage = parent / f".{tree.name}.{os.getpid()}"
    try:
        stage.mkdir()
    except OSError as problem:
        raise MergeError(f"--into {tree}: {parent} cannot be written: {problem.strerror}; name another place") from None
    try:
        yield stage
        if stands:
            for entry in [*stage.iterdir()]:
                entry.rename(tree / entry.name)
            stage.rmdir()
        else:
            stage.rename(tree)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def add_branch(tree: Path, branch: str, known: Iterable[str], commits: Iterable[Commit]) -> None:
    """Put commits on a new branch on top of HEAD, and switch to it.

    They are made in a worktree of their own, so that a hook that fails leaves ``tree`` as it was. Where ``tree`` is a
    folder of a larger repository, the branch is that repository's, all of which must be committed.

    known  files of the package that must be in HEAD as they are in ``tree``
    """
    prefix = git(tree, "rev-parse", "--show-prefix")
    if git(tree, "status", "--porcelain", "--untracked-files=no"):
        changed = git(tree, "rev-parse", "--show-toplevel") if prefix else tree
        raise MergeError(f"{changed} has uncommitted changes: commit or stash them first")
    if _run_git(tree, ("rev-parse", "--verify", "--quiet", "HEAD")).returncode:
        raise MergeError(f"{tree} has no commit yet: commit SGLang first")
    if _run_git(tree, ("rev-parse", "--verify", "--quiet", f"refs/heads/{branch}")).returncode == 0:
        command = shlex.join(["git", "-C", str(tree), "branch", "-D", branch])
        raise MergeError(f"{tree} has a branch {branch} already: name another --branch, or {command}")
    git(tree, "ls-files", "--error-unmatch", "--", *(str(PACKAGE / path) for path in known))
    with tempfile.TemporaryDirectory(prefix="sglang-deepep-v2-", ignore_cleanup_errors=True) as temporary:
        worktree = Path(temporary) / "sglang"
        try:
            git(tree, "worktree", "add", "--quiet", "-b", branch, str(worktree))
            _commit_all(worktree / prefix, commits)
            git(tree, "worktree", "remove", "--force", str(worktree))
            git(tree, "switch", "--quiet", branch)
        except BaseException:
            _run_git(tree, ("worktree", "remove", "--force", str(worktree)))
            _run_git(tree, ("branch", "--quiet", "-D", branch))
            raise
