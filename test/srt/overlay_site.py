"""A small stand-in SGLang in a virtual environment of its own, with the loader laid out as a wheel lays it."""

import json
import os
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python/sglang_deepep_v2"
VERSION = "7.1"

SGLANG = {
    "__init__.py": "",
    "srt/__init__.py": "",
    "srt/base.py": """
        LIMIT = 1
        def limit():
            return LIMIT
        class Runner:
            def run(self):
                return "sglang"
        def make():
            return Runner()
        """,
    "srt/whole.py": "NAME = 'sglang'",
    "srt/user.py": "from sglang.srt.base import Runner, limit",
}
TREE = {
    "srt/base.py": '''
        """extends: the runner and its limit."""
        import sglang_upstream.srt.base as upstream
        __overrides__ = ("LIMIT", "Runner")
        LIMIT = upstream.LIMIT + 1
        class Runner(upstream.Runner):
            def run(self):
                return "patched " + super().run()
        ''',
    "srt/whole.py": '"""replaces: everything."""\nNAME = "patch"',
    "srt/added.py": '"""new: an addition."""\nNAME = "new"',
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text).lstrip("\n"))


@dataclass
class Site:
    """A virtual environment: the stand-in SGLang, and this package as a wheel lays it out."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    @property
    def packages(self) -> Path:
        return next((self.folder / "lib").glob("python3*")) / "site-packages"

    @property
    def tree(self) -> Path:
        return self.packages / "sglang_deepep_v2/tree/sglang"

    @property
    def lock(self) -> Path:
        return self.packages / "sglang_deepep_v2/overlay.lock"

    def start(self, *args: str, **env: str) -> subprocess.CompletedProcess:
        """Runs the environment's interpreter, without what would change its start or the loader."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SGLANG"))}
        command = [self.python, *args]
        return subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=120)

    def run(self, code: str, *args: str, **env: str) -> subprocess.CompletedProcess:
        return self.start("-c", dedent(code), *args, **env)

    def evaluate(self, code: str, **env: str):
        """Runs statements whose last line prints JSON."""
        done = self.run(code, **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def failure(self, code: str, **env: str) -> str:
        """Runs statements that must raise; returns the traceback from its last frame on."""
        done = self.run(code, **env)
        assert done.returncode != 0, done.stdout
        return done.stderr[done.stderr.rindex("\n  File") :]

    def status(self, *args: str, **env: str) -> tuple[int, str]:
        done = self.run("import typer; from sglang_deepep_v2.status import status; typer.run(status)", *args, **env)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout

    def files(self) -> set[Path]:
        return {file for file in self.packages.rglob("*") if file.is_file()}


def make_environment(folder: Path, outside: bool = True) -> Site:
    """An empty virtual environment; ``outside`` adds the running one's packages, without its .pth files."""
    venv.create(folder, symlinks=True, with_pip=False)
    site = Site(folder)
    if outside:
        (site.packages / "outside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return site


def make_site(folder: Path) -> Site:
    """The stand-in SGLang with the patch of ``TREE`` over it, locked."""
    site = make_environment(folder)
    write(site.packages / "sglang", SGLANG)
    install_version(site, VERSION)
    for name in ("__init__.py", "boot.py", "console.py", "overlay.py", "status.py"):
        write(site.packages / "sglang_deepep_v2", {name: (PACKAGE / name).read_text()})
    (site.packages / "overlay.pth").write_text((ROOT / "sglang_deepep_v2_overlay.pth").read_text())
    write(site.tree, TREE)
    code, out = site.status("--write-lock")
    assert code == 0, out
    return site


def install_version(site: Site, version: str) -> None:
    metadata = f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
    write(site.packages, {"sglang-1.dist-info/METADATA": metadata})


BASE = "import sglang.srt.base"
