"""Where `upstream` puts the patch: new repositories, branches, plain folders; all or nothing, one line on failure."""

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from child_signals import heed_signals
from sglang_deepep_v2 import overlay
from sglang_deepep_v2.upstream import CONCERNS
from upstream_trees import git, lay, make_checkout, one_line, tree_file

pytestmark = pytest.mark.loader


@pytest.fixture
def checkout(tmp_path) -> Path:
    return make_checkout(tmp_path / "checkout")


def test_a_new_tree_is_a_repository_with_one_commit_per_concern(checkout, tmp_path):
    root = tmp_path / "new"
    done = lay("--into", root, "--from", checkout, "--branch", "expand")
    assert done.exit_code == 0, done.output
    assert git(root, "branch", "--show-current") == "expand"
    subjects = git(root, "log", "--reverse", "--format=%s", "base..").splitlines()
    assert subjects == [concern.message.splitlines()[0] for concern in CONCERNS]
    changed = git(root, "diff", "--name-only", "base..").splitlines()
    assert {root / name for name in changed} == {tree_file(root, m) for m in overlay.modules().values()}
    assert git(root, "status", "--porcelain") == ""


def test_a_checkout_keeps_its_history_and_its_changes(checkout):
    git(checkout, "init", "--quiet", "-b", "main")
    git(checkout, "add", ".")
    git(checkout, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "theirs")
    file = checkout / "python/sglang/srt/environ.py"
    file.write_text(before := file.read_text() + "\n# theirs\n")
    refused = lay("--into", checkout)
    assert refused.exit_code == 1 and "uncommitted changes" in refused.output
    assert file.read_text() == before and git(checkout, "branch", "--show-current") == "main"

    git(checkout, "checkout", "--quiet", ".")
    assert lay("--into", checkout).exit_code == 0
    assert git(checkout, "log", "--format=%s", "main") == "theirs"
    assert int(git(checkout, "rev-list", "--count", "main..")) == len(CONCERNS)


@pytest.fixture
def vendored(tmp_path) -> Path:
    """A checkout in a folder of a larger repository."""
    root = tmp_path / "outer"
    make_checkout(root / "third party/sglang")
    (root / "notes").write_text("theirs\n")
    git(root, "init", "--quiet", "-b", "main")
    git(root, "add", ".")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "theirs")
    return root / "third party/sglang"


@pytest.mark.parametrize("changed", ["notes", "third party/sglang/python/sglang/srt/environ.py"])
def test_a_folder_of_a_larger_repository_gets_a_branch_of_that_one(vendored, changed):
    outer = vendored.parents[1]
    file = outer / changed
    file.write_text((before := file.read_text()) + "# theirs\n")
    refused = lay("--into", vendored)
    assert refused.exit_code == 1 and one_line(refused).startswith(f"{outer} has uncommitted changes")
    assert git(outer, "status", "--porcelain").count("\n") == 0 and git(outer, "branch") == "* main"

    file.write_text(before)
    done = lay("--into", vendored, "--branch", "expand")
    assert done.exit_code == 0 and f"{len(CONCERNS)} commits on branch expand." in done.output
    assert git(outer, "branch", "--show-current") == "expand" and git(outer, "status", "--porcelain") == ""
    names = git(outer, "-c", "core.quotePath=off", "diff", "--name-only", "main..").splitlines()
    assert {outer / name for name in names} == {tree_file(vendored, m) for m in overlay.modules().values()}
    assert git(outer, "log", "--format=%s", "main") == "theirs"


def test_a_commit_that_fails_leaves_a_larger_repository_as_it_was(vendored):
    outer = vendored.parents[1]
    write_hook(outer / ".git/hooks", REFUSING)
    done = lay("--into", vendored)
    assert done.exit_code == 1 and one_line(done) == "git commit: a line is | too long"
    assert git(outer, "status", "--porcelain", "--branch") == "## main" and git(outer, "branch") == "* main"
    assert len(git(outer, "worktree", "list").splitlines()) == 1


def test_a_folder_that_the_repository_around_it_does_not_track_is_changed_without_commits(tmp_path):
    git(tmp_path, "init", "--quiet", "-b", "main")
    root = make_checkout(tmp_path / "scratch")
    done = lay("--into", root)
    assert done.exit_code == 0 and "no git here: files changed without commits" in done.output


def test_a_branch_where_no_git_is_is_refused(checkout, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    done = lay("--into", checkout, "--branch", "expand")
    assert done.exit_code == 2 and f"--branch expand: no git repository tracks {checkout}" in done.output
    assert {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()} == before


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    assert "neither empty nor an SGLang checkout" in lay("--into", tmp_path).output.replace("\n", " ")


def test_a_plain_folder_is_changed_without_commits_once(checkout):
    done = lay("--into", checkout)
    assert done.exit_code == 0 and "no git here: files changed without commits" in done.output
    again = lay("--into", checkout)
    assert again.exit_code == 1 and one_line(again) == f"{checkout} already holds the patch: name another --into"


def test_a_second_run_names_the_branch_and_the_remedy(checkout, tmp_path):
    root = tmp_path / "new"
    assert lay("--into", root, "--from", checkout).exit_code == 0
    held = lay("--into", root)
    assert held.exit_code == 1 and "already holds the patch (branch deepep-v2-expanded-prefill)" in one_line(held)
    git(root, "switch", "--quiet", "base")
    branched = lay("--into", root)
    assert branched.exit_code == 1 and "has a branch deepep-v2-expanded-prefill already: name another" in one_line(
        branched
    )
    assert lay("--into", root, "--branch", "again").exit_code == 0


def git_setting(monkeypatch, key: str, value: object) -> None:
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", key)
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", str(value))


def write_hook(folder: Path, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "pre-commit").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "pre-commit").chmod(0o755)


REFUSING = "git diff --cached --name-only | grep -q moe_runner || exit 0\necho 'a line is\ntoo long' >&2; exit 1"


def test_a_commit_that_fails_leaves_a_checkout_as_it_was(checkout):
    git(checkout, "init", "--quiet", "-b", "main")
    git(checkout, "add", ".")
    git(checkout, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "theirs")
    (checkout / "notes").write_text("untracked")
    write_hook(checkout / ".git/hooks", REFUSING)

    def state():
        files = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file() and ".git" not in path.parts}
        return files, git(checkout, "status", "--porcelain"), git(checkout, "branch", "-a"), git(checkout, "log")

    before = state()
    done = lay("--into", checkout)
    assert done.exit_code == 1 and one_line(done) == "git commit: a line is | too long"
    assert state() == before
    assert len(git(checkout, "worktree", "list").splitlines()) == 1
    (checkout / ".git/hooks/pre-commit").unlink()
    assert lay("--into", checkout).exit_code == 0


@pytest.mark.parametrize("stands", [False, True], ids=["new", "empty"])
def test_a_commit_that_fails_leaves_no_new_tree(checkout, tmp_path, monkeypatch, stands):
    parent = tmp_path / "parent"
    root = parent / "new"
    (root if stands else parent).mkdir(parents=True)
    write_hook(tmp_path / "hooks", REFUSING)
    git_setting(monkeypatch, "core.hooksPath", tmp_path / "hooks")
    done = lay("--into", root, "--from", checkout)
    assert done.exit_code == 1 and one_line(done) == "git commit: a line is | too long"
    assert [*parent.rglob("*")] == [root] * stands
    monkeypatch.delenv("GIT_CONFIG_COUNT")
    assert lay("--into", root, "--from", checkout).exit_code == 0
    assert sorted(entry.name for entry in root.iterdir()) == [".git", "python"]


def test_files_that_cannot_be_copied_are_one_line_and_leave_nothing(checkout, tmp_path):
    for name in "abc":
        (checkout / "python/sglang" / name).symlink_to("nowhere")
    done = lay("--into", tmp_path / "new", "--from", checkout)
    assert done.exit_code == 1 and "No such file" in one_line(done) and "(and 2 more)" in one_line(done)
    assert [*tmp_path.iterdir()] == [checkout]


@pytest.mark.parametrize("into", ["new", "checkout"])
def test_ctrl_c_in_a_commit_leaves_nothing_behind(checkout, tmp_path, monkeypatch, into):
    if into == "checkout":
        git(checkout, "init", "--quiet", "-b", "main")
        git(checkout, "add", ".")
        git(checkout, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "theirs")
    started = tmp_path / "started"
    write_hook(tmp_path / "hooks", f"touch '{started}'; exec sleep 20")
    git_setting(monkeypatch, "core.hooksPath", tmp_path / "hooks")
    source = () if into == "checkout" else ("--from", str(checkout))
    child = subprocess.Popen(
        [sys.executable, "-m", "sglang_deepep_v2", "upstream", "--into", into, *source],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=heed_signals,
    )
    try:
        for _ in range(600):
            if started.exists() or child.poll() is not None:
                break
            time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=30) == 130
        # Not to the end: the hook keeps the pipe open.
        assert child.stdout.readline() == f"interrupted: {into} is as it was\n"
    finally:
        child.kill()
        child.stdout.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkout", "hooks", "started"]
    if into == "checkout":
        assert git(checkout, "status", "--porcelain", "--branch") == "## main"
        assert git(checkout, "branch") == "* main" and len(git(checkout, "worktree", "list").splitlines()) == 1


def test_a_name_without_an_address_is_an_identity(checkout, tmp_path, monkeypatch):
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, str(tmp_path / "gitconfig"))
    (tmp_path / "gitconfig").write_text("[user]\n\tname = Their Name\n\tuseConfigOnly = true\n")
    assert lay("--into", tmp_path / "new", "--from", checkout).exit_code == 0
    assert git(tmp_path / "new", "log", "-1", "--format=%an <%ae>") == "Their Name <sglang-deepep-v2@localhost>"


def test_without_git_a_new_tree_is_refused_and_a_plain_one_is_not(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = lay("--into", tmp_path / "new", "--from", checkout)
    assert refused.exit_code == 1 and "git is not on PATH" in one_line(refused)
    assert lay("--into", checkout).exit_code == 0


def test_a_repository_that_git_refuses_to_read_is_not_taken_for_a_plain_folder(checkout):
    (checkout / ".git").mkdir()
    done = lay("--into", checkout)
    assert done.exit_code == 1 and "not a git repository" in one_line(done)
    assert not tree_file(checkout, next(m for m in overlay.modules().values() if m.kind == "new")).exists()


def test_a_write_that_fails_changes_no_file(checkout):
    # A folder where the last draft goes.
    last = [*overlay.modules().values()][-1]
    target = tree_file(checkout, last)
    target.with_name(f".{target.name}.draft").mkdir()
    before = {path for path in checkout.rglob("*")}
    done = lay("--into", checkout)
    assert done.exit_code == 1 and "Is a directory" in one_line(done)
    assert {path for path in checkout.rglob("*")} == before


def test_the_printed_line_runs_from_any_folder(checkout, tmp_path, monkeypatch):
    root = tmp_path / "two words"
    monkeypatch.chdir(tmp_path)
    done = lay("--into", "two words", "--from", checkout)
    line = next(line for line in done.output.splitlines() if "PYTHONPATH" in line)
    assert shlex.split(line.removeprefix("Run it: "))[:2] == [f"PYTHONPATH={root / 'python'}", "SGLANG_OVERLAY=0"]


def test_a_copy_into_itself_is_refused(checkout):
    done = lay("--into", checkout / "python/sglang/srt/new", "--from", checkout)
    assert done.exit_code == 1 and "is inside" in one_line(done)


def test_a_folder_that_does_not_exist_is_named_with_the_command(tmp_path):
    done = lay("--into", tmp_path / "a b" / "new")
    assert done.exit_code == 1 and one_line(done).endswith(
        f"there is no folder {tmp_path}/a b; mkdir -p '{tmp_path}/a b'"
    )
