"""The loader: kinds, guards, switch and clean-up, on a small stand-in SGLang in its own environment."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from textwrap import dedent

import pytest

from overlay_site import BASE, ROOT, SGLANG, VERSION, Site, install_version, make_environment, make_site, write
from sglang_deepep_v2 import overlay

pytestmark = pytest.mark.loader


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_site(tmp_path / "env")


def test_each_kind_does_what_it_says(site: Site):
    code = """
        import json
        from sglang.srt import added, base, user, whole
        import sglang_upstream.srt.base as upstream
        import sglang_upstream.srt.whole as upstream_whole
        print(json.dumps({
            "extended": [base.LIMIT, base.limit(), base.make().run(), user.Runner is base.Runner],
            "as sglang left it": [upstream.LIMIT, upstream.Runner().run(), upstream.limit is base.limit],
            "replaced": [whole.NAME, upstream_whole.NAME],
            "new": added.NAME,
            "files": [m.__file__ for m in (added, base, whole, upstream, upstream_whole, user)],
        }))
        """
    theirs = site.packages / "sglang/srt"
    expected = {
        "extended": [2, 2, "patched sglang", True],
        "as sglang left it": [1, "sglang", True],
        "replaced": ["patch", "sglang"],
        "new": "new",
        "files": [
            *(str(site.tree / f"srt/{name}.py") for name in ("added", "base", "whole")),
            *(str(theirs / f"{name}.py") for name in ("base", "whole", "user")),
        ],
    }
    # The second process reads the bytecode cache of the tree's file.
    for _ in range(2):
        assert site.evaluate(code) == expected
    assert len([*(site.tree / "srt/__pycache__").glob("base.*.pyc")]) == 1


def test_a_spawned_process_gets_the_same_classes(site: Site, tmp_path: Path):
    script = tmp_path / "main.py"
    script.write_text(
        dedent("""
        import json, multiprocessing
        def child(runner, queue):
            import sglang.srt.base as base
            queue.put([type(runner) is base.Runner, runner.run(), base.__file__])
        if __name__ == "__main__":
            import sglang.srt.base as base
            spawn = multiprocessing.get_context("spawn")
            queue = spawn.Queue()
            process = spawn.Process(target=child, args=(base.Runner(), queue))
            process.start()
            print(json.dumps(queue.get(timeout=60)))
            process.join()
        """)
    )
    done = site.start(str(script))
    assert json.loads(done.stdout or done.stderr) == [True, "patched sglang", str(site.tree / "srt/base.py")]


def test_switched_off_it_is_plain_sglang(site: Site):
    site.lock.write_text("{}")
    code = """
        import importlib.util, json
        from sglang.srt import base, whole
        names = "sglang.srt.added", "sglang_upstream"
        absent = [importlib.util.find_spec(name) is None for name in names]
        print(json.dumps([base.LIMIT, whole.NAME, *absent]))
        """
    assert site.evaluate(code, SGLANG_OVERLAY="0") == [1, "sglang", True, True]
    assert "overlay off" in site.status(SGLANG_OVERLAY="0")[1]


@pytest.mark.parametrize("first", ["base", "whole", "added"])
def test_any_changed_file_fails_the_first_overlaid_import(site: Site, first: str):
    changed = site.packages / "sglang/srt/whole.py"
    changed.write_text("NAME = 'other'")
    failure = site.failure(f"import sglang.srt.{first}")
    assert "OverlayError: the installed sglang 7.1 is not the one" in failure
    assert f"sglang.srt.whole (replaces): SGLang's file is not the locked one {changed}" in failure
    assert "sglang.srt.base" not in failure
    for fix in (
        "pip install --force-reinstall --no-deps sglang==7.1",
        "status --write-lock",
        "SGLANG_OVERLAY=0",
    ):
        assert fix in failure
    code, out = site.status("--json")
    problems = {m["name"]: m["problem"] for m in json.loads(out)["modules"]}
    assert (code, problems["sglang.srt.whole"]) == (1, "SGLang's file is not the locked one")
    assert problems["sglang.srt.base"] is None
    # A review accepts it.
    assert site.status("--write-lock")[0] == 0
    assert site.evaluate("import json, sglang.srt.whole as w; print(json.dumps(w.NAME))") == "patch"


def test_an_import_fallback_does_not_hide_the_error(site: Site):
    (site.packages / "sglang/srt/base.py").write_text("")
    code = f"try:\n    {BASE}\nexcept ImportError:\n    pass\n"
    assert "OverlayError" in site.failure(code)


def test_another_version_is_refused(site: Site):
    install_version(site, "7.2")
    failure = site.failure(BASE)
    assert "verified on sglang 7.1; installed: 7.2" in failure
    assert "pip install sglang==7.1" in failure
    code, out = site.status()
    assert code == 1 and "installed: 7.2" in out


def test_the_lock_may_name_several_versions(site: Site):
    install_version(site, "7.2")
    with (site.packages / "sglang/srt/base.py").open("a") as base:
        base.write("LATER = True\n")
    assert site.status("--write-lock")[0] == 0
    lock = json.loads(site.lock.read_text())
    assert lock["7.1"]["sglang.srt.base"] != lock["7.2"]["sglang.srt.base"]
    assert lock["7.1"]["sglang.srt.whole"] == lock["7.2"]["sglang.srt.whole"]
    assert site.run(BASE).returncode == 0
    # The files of 7.2 under the number 7.1 are neither.
    install_version(site, "7.1")
    assert "sglang.srt.base (extends)" in site.failure(BASE)
    assert [*site.lock.parent.glob("overlay.lock?*")] == []


def test_without_sglang(site: Site):
    (site.packages / "sglang-1.dist-info/METADATA").unlink()
    (site.packages / "outside.pth").unlink()
    assert "installed: none" in site.failure(BASE)


@pytest.mark.parametrize(
    ("theirs", "ours", "problem"),
    [
        ({"srt/added.py": ""}, {}, "sglang.srt.added (new): SGLang now has a file of this name"),
        ({}, {"srt/more.py": '"""extends: x."""'}, "sglang.srt.more (extends): no such file in SGLang"),
        ({}, {"srt/user.py": '"""replaces: x."""'}, "sglang.srt.user (replaces): not in the lock"),
        ({}, {"srt/far/away.py": '"""new: x."""'}, "SGLang has no package sglang.srt.far"),
        ({}, {"srt/vague.py": '"""Improves things."""'}, 'must begin with """new, """replaces or """extends'),
    ],
)
def test_a_tree_that_does_not_fit_is_refused(site: Site, theirs: dict, ours: dict, problem: str):
    write(site.packages / "sglang", theirs)
    write(site.tree, ours)
    assert problem in site.failure(BASE)
    code, out = site.status("--json")
    report = json.loads(out)
    problems = [f"{m['name']} ({m['kind']}): {m['problem']}" for m in report["modules"]]
    assert code == 1 and problem in "\n".join([*problems, report["error"] or ""])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("__overrides__ = ()\nLIMIT = 3", "__overrides__ names [], the file takes over ['LIMIT']"),
        ("__overrides__ = ('LIMIT',)", "__overrides__ names ['LIMIT'], the file takes over []"),
        ("__overrides__ = ()\ndel make", "__overrides__ names [], the file takes over ['make']"),
        ("LIMIT = 3", "an extends file must define __overrides__"),
    ],
)
def test_an_unlisted_collision_is_an_error(site: Site, text: str, problem: str):
    write(site.tree, {"srt/base.py": f'"""extends: x."""\n{text}\n'})
    failure = site.failure(BASE)
    assert "OverlayError" in failure and problem in failure


def test_a_failed_import_leaves_nothing_behind(site: Site):
    with (site.tree / "srt/base.py").open("a") as base:
        base.write("import os\nif os.environ.pop('FAIL', None): raise ValueError('once')\n")
    code = """
        import json, sys
        try:
            import sglang.srt.base
        except ValueError:
            left = [name for name in sys.modules if name.endswith("srt.base")]
        import sglang.srt.base as base
        import sglang_upstream.srt.base as upstream
        print(json.dumps([left, base.Runner().run(), base.Runner.__mro__[1] is upstream.Runner]))
        """
    assert site.evaluate(code, FAIL="1") == [[], "patched sglang", True]


def test_upstream_names_only_what_is_overlaid(site: Site):
    for name in ("user", "added"):
        failure = site.failure(f"import sglang_upstream.srt.{name}")
        assert f"ModuleNotFoundError: sglang_upstream.srt.{name}: not an overlaid module" in failure


def test_an_import_cycle_through_upstream_is_named(site: Site):
    write(
        site.packages / "sglang",
        {"srt/base.py": SGLANG["srt/base.py"] + "\n        import sglang.srt.user\n"},
    )
    write(site.packages / "sglang", {"srt/user.py": "import sglang_upstream.srt.base"})
    assert site.status("--write-lock")[0] == 0
    assert "an import cycle" in site.failure(BASE)


@pytest.mark.parametrize("text", ["{", "[]", '{"7.1": 3}', None])
def test_a_damaged_lock_is_named(site: Site, text: str | None):
    site.lock.unlink()
    site.lock.write_text(text) if text else site.lock.mkdir()
    failure = site.failure(BASE)
    assert f"OverlayError: {site.lock} cannot be read" in failure


def test_a_lock_entry_without_a_tree_file_is_reported(site: Site):
    (site.tree / "srt/whole.py").unlink()
    code, out = site.status("--json")
    assert code == 1 and "sglang.srt.whole" in json.loads(out)["error"]
    assert site.status("--write-lock")[0] == 0
    assert [*json.loads(site.lock.read_text())[VERSION]] == ["sglang.srt.base"]


def test_a_zipped_package_is_refused_not_ignored(site: Site, tmp_path: Path):
    archive = tmp_path / "package.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for file in (site.packages / "sglang_deepep_v2").rglob("*.*"):
            packed.write(file, file.relative_to(site.packages))
    (site.packages / "overlay.pth").unlink()
    code = f"import sys; sys.path.insert(0, {str(archive)!r}); import sglang_deepep_v2.boot\n{BASE}"
    assert "must be installed unpacked" in site.failure(code)


def test_interpreter_start_imports_nothing_heavy(site: Site):
    code = "import json, sys; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    loaded = site.evaluate(code)
    assert "sglang_deepep_v2" in loaded
    assert not {"sglang", "torch", "typer", "rich", "json5", "hashlib"} & set(loaded)
    # Microseconds that the .pth line adds, as the interpreter itself accounts them; the best of five.
    spent = []
    for _ in range(5):
        done = site.start("-X", "importtime", "-c", "")
        rows = [line.split("|") for line in done.stderr.splitlines() if "sglang_deepep_v2" in line]
        assert {row[2].strip() for row in rows} == {"sglang_deepep_v2", "sglang_deepep_v2.boot"}
        spent.append(sum(int(row[0].rpartition(":")[2]) for row in rows))
    assert min(spent) < 5_000


def pip(*args: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_install_and_uninstall(tmp_path: Path, editable: bool):
    """A real install over the real SGLang: the tree wins, entry points are there, nothing stays behind."""
    site = make_environment(tmp_path / "env")
    before = site.files()
    build = ("--no-deps", "--no-build-isolation", "--quiet")
    if editable:
        source, tree = ("--editable", str(ROOT)), ROOT / "python"
    else:
        pip("wheel", *build, "--wheel-dir", str(tmp_path), str(ROOT))
        source, tree = tuple(map(str, tmp_path.glob("*.whl"))), site.packages / "sglang_deepep_v2/tree"
    pip("--python", str(site.python), "install", *build, *source)
    code = """
        import importlib.metadata, json
        from sglang_deepep_v2 import overlay
        points = importlib.metadata.distribution("sglang-deepep-v2").entry_points
        overlay.verify()
        print(json.dumps([str(overlay.TREE), sorted(overlay.modules()), sorted(p.group for p in points)]))
        """
    groups = ["console_scripts", "sglang.srt.platforms", "sglang.srt.plugins"]
    assert site.evaluate(code) == [str(tree), sorted(overlay.modules()), groups]
    # SGLang's package without its __init__, which imports torch and transformers.
    code = """
        import importlib.util, json, sys
        sys.modules["sglang"] = importlib.util.module_from_spec(importlib.util.find_spec("sglang"))
        from sglang.srt import environ
        names = [environ.__file__, sys.modules["sglang_upstream.srt.environ"].__file__]
        print(json.dumps([*names, type(environ.envs.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND.get()).__name__]))
        """
    ours, theirs, kind = site.evaluate(code)
    assert (ours, kind) == (str(tree / "sglang/srt/environ.py"), "bool")
    assert theirs == str(overlay.base_file("sglang.srt.environ"))
    pip("--python", str(site.python), "uninstall", "--yes", "--quiet", "sglang-deepep-v2")
    assert site.files() == before
    assert [*site.packages.glob("sglang_deepep_v2*")] == []
    done = site.run("import sys; print(sys.meta_path)")
    assert (done.stderr, "OverlayFinder" in done.stdout) == ("", False)


def test_the_lock_names_exactly_the_overlaid_files():
    based = {name for name, module in overlay.modules().items() if module.kind != "new"}
    for version, hashes in overlay.read_lock().items():
        assert set(hashes) == based, f"{version}: run `{overlay.WRITE_LOCK}`"
    assert [*(ROOT / "python/sglang").rglob("__init__.py")] == []


@pytest.mark.parametrize("name", sorted(overlay.modules()))
def test_this_process_runs_the_tree(name: str):
    module = __import__(name, fromlist=["_"])
    assert Path(module.__file__) == overlay.modules()[name].file
