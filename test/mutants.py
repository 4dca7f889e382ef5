"""Breaks the feature one line at a time and runs the tests that must notice; ``make mutants``.

Every mutant is applied to a copy of ``python/`` in a temporary folder that comes first on the path, so the working
files stay as they are. First the tests run against an unchanged copy: a test that fails there proves nothing.
Arguments choose mutants by parts of their names. Exits 1 when a mutant survives, 2 when the unchanged copy fails or a
mutant no longer fits its file.
"""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from mutants_compute import COMPUTE
from mutants_serving import SERVING
from mutants_startup import STARTUP

ROOT = Path(__file__).resolve().parents[1]
TREE = "python/sglang/srt"
TIMEOUT_S = 300
WORKERS = min(2, os.cpu_count() or 1)


@dataclass(frozen=True)
class Mutant:
    """One line of one file, changed.

    Attributes:
        name: what is broken.
        file: path under ``python/sglang/srt``.
        before: text that occurs exactly once in the file.
        after: what replaces it.
        tests: pytest node ids under ``test/srt``.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Change the copy under ``root``. Raises ValueError when the mutant does not fit the file."""
        file = root / TREE / self.file
        source = file.read_text()
        if source.count(self.before) != 1:
            raise ValueError(
                f"{self.name}: {self.file} holds {source.count(self.before)} times, not once:\n{self.before}"
            )
        mutated = source.replace(self.before, self.after)
        ast.parse(mutated)
        file.write_text(mutated)

    def line(self) -> int:
        """The line of the unchanged file where the mutation starts."""
        source = (ROOT / TREE / self.file).read_text()
        return source[: source.find(self.before)].count("\n") + 1


MUTANTS = tuple(Mutant(*row) for row in (*COMPUTE, *SERVING, *STARTUP))


@dataclass(frozen=True)
class Verdict:
    """How one run of pytest ended: ``killed``, ``survived`` or ``broken`` (no test ran, or none could)."""

    status: str
    seconds: float
    detail: str


@contextmanager
def copy_of_tree():
    """A folder that holds a copy of ``python/``; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="deepep-v2-mutant-") as folder:
        root = Path(folder)
        shutil.copytree(ROOT / "python", root / "python", ignore=shutil.ignore_patterns("__pycache__"))
        yield root


def run_tests(root: Path, tests: tuple[str, ...]) -> Verdict:
    """Run the tests of this checkout against the tree under ``root``."""
    selection = [str(ROOT / "test/srt" / test) for test in tests]
    paths = [str(root / "python"), os.environ.get("PYTHONPATH")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_DATABASE_FILE": str(root / "hypothesis"),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *selection]
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Verdict("killed", TIMEOUT_S, "hung")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    detail = failed[0].partition("::")[2].partition(" - ")[0] if failed else done.stdout[-2000:] + done.stderr[-2000:]
    status = {0: "survived", 1: "killed"}.get(done.returncode, "broken")
    return Verdict(status, time.monotonic() - began, detail)


def run_mutant(mutant: Mutant) -> Verdict:
    with copy_of_tree() as root:
        mutant.apply(root)
        return run_tests(root, mutant.tests)


def run_unchanged(tests: tuple[str, ...]) -> Verdict:
    with copy_of_tree() as root:
        return run_tests(root, tests)


def main(names: list[str]) -> int:
    """Run the mutants whose name contains one of ``names`` (all without any) and print the table."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=180)
    chosen = [m for m in MUTANTS if not names or any(name in m.name for name in names)]
    node_ids = sorted({test for mutant in chosen for test in mutant.tests})
    selections = [tuple(group) for _, group in groupby(node_ids, key=lambda node_id: node_id.partition("::")[0])]
    table = Table("mutant", "where", "changed to", "noticed by", "s", title="One line broken at a time")
    counts = {"killed": 0, "survived": 0, "broken": 0}
    with Progress(console=console, transient=True) as progress, ThreadPoolExecutor(WORKERS) as pool:
        bar = progress.add_task("unchanged copy", total=len(selections) + len(chosen))
        for tests, verdict in zip(selections, pool.map(run_unchanged, selections)):
            progress.advance(bar)
            if verdict.status != "survived":
                console.print(f"[red]the unchanged tree fails {' '.join(tests)}[/]\n{verdict.detail}")
                return 2
        progress.update(bar, description="mutants")
        running = {pool.submit(run_mutant, mutant): mutant for mutant in chosen}
        verdicts = {}
        for future in as_completed(running):
            verdicts[running[future]] = future.result()
            progress.advance(bar)
    for mutant in chosen:
        verdict = verdicts[mutant]
        counts[verdict.status] += 1
        noticed = verdict.detail if verdict.status == "killed" else f"[red]{verdict.status}[/]"
        table.add_row(
            mutant.name,
            f"{Path(mutant.file).name}:{mutant.line()}",
            mutant.after.strip(),
            noticed,
            f"{verdict.seconds:.0f}",
        )
    console.print(table)
    console.print(f"{counts['killed']} of {len(chosen)} mutants killed")
    for mutant, verdict in verdicts.items():
        if verdict.status == "broken":
            console.print(f"[red]{mutant.name}: its tests did not run[/]\n{verdict.detail}")
    if counts["broken"]:
        return 2
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
