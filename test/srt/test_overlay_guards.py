"""What the loader refuses to run: code that is not what was verified, or that came past it."""

import importlib.util
import py_compile
from pathlib import Path

import pytest

from overlay_site import BASE, Site, make_site, write

pytestmark = pytest.mark.loader


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_site(tmp_path / "env")


@pytest.mark.parametrize("name", ["base", "whole"])
def test_a_stale_bytecode_cache_is_not_run(site: Site, name: str):
    """A cache that Python would take although its source says something else."""
    file = site.packages / f"sglang/srt/{name}.py"
    edited = file.with_name("edited.py")
    edited.write_text(file.read_text().replace('"sglang"', '"EDITED"').replace("'sglang'", "'EDITED'"))
    py_compile.compile(
        str(edited),
        importlib.util.cache_from_source(str(file)),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    said = {"base": "m.make().run()", "whole": "m.NAME"}[name]
    plain = f"import json; from sglang.srt import {name} as m; print(json.dumps({said}))"
    assert site.evaluate(plain, SGLANG_OVERLAY="0") == "EDITED"
    theirs = plain.replace("sglang.srt", "sglang_upstream.srt") if name == "whole" else plain
    assert site.evaluate(theirs) == ("sglang" if name == "whole" else "patched sglang")


def test_a_file_that_changes_after_the_check_is_not_run(site: Site):
    file = site.packages / "sglang/srt/base.py"
    code = f"import sglang.srt.whole; open({str(file)!r}, 'a').write('# edited'); import sglang.srt.base"
    assert f"OverlayError: {file} changed while this process ran" in site.failure(code)


def test_a_reload_is_refused_and_breaks_nothing(site: Site):
    code = """
        import importlib, json
        from sglang.srt import base
        try:
            importlib.reload(base)
        except RuntimeError as error:
            print(json.dumps([str(error), base.LIMIT, base.make().run()]))
        """
    said, *values = site.evaluate(code)
    assert said == "sglang.srt.base is an extended module: reloading it is not supported"
    assert values == [2, "patched sglang"]


def test_a_module_that_was_imported_past_the_loader_is_named(site: Site):
    write(site.packages, {"a_first.pth": "import sglang.srt.whole"})
    failure = site.failure(BASE)
    assert "imported past sglang-deepep-v2" in failure
    assert f"sglang.srt.whole from {site.packages / 'sglang/srt/whole.py'}" in failure
    assert site.run(BASE, SGLANG_OVERLAY="0").returncode == 0


CHARGE = "import json; from sglang_deepep_v2 import overlay; print(json.dumps(overlay.check_in_charge()))"


def test_another_finder_in_front_of_the_loader_is_named(site: Site):
    code = f"""
        import importlib.machinery, sys
        sys.meta_path.insert(0, importlib.machinery.PathFinder)
        import sglang.srt.base
        {CHARGE}
        """
    assert f"sglang.srt.base from {site.packages / 'sglang/srt/base.py'}" in site.failure(code)
    assert site.evaluate(f"import sglang.srt.base; {CHARGE}") is None


def test_a_loader_that_no_pth_file_started_is_named(site: Site):
    (site.packages / "overlay.pth").unlink()
    assert "its loader is not" in site.failure(CHARGE)
    assert site.evaluate(CHARGE, SGLANG_OVERLAY="0") is None
