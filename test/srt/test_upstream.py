"""The patch laid onto SGLang's source: the same names, registrations and outputs as through the loader, ruff-clean."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from sglang_deepep_v2 import overlay, upstream
from sglang_deepep_v2.ab.servers import free_port
from sglang_deepep_v2.source_merge import MergeError, merge, without_kind
from upstream_trees import lay, make_checkout, one_line, tree_file

pytestmark = pytest.mark.loader

TESTS = Path(__file__).parent
RULES = ("--isolated", "--select=F,I,E4,E7,E9", "--config", 'lint.isort.known-first-party=["sglang"]')
NAME = "sglang.srt.part"


def link_sglang(root: Path) -> None:
    """SGLang under ``root/python``: links to the installed one, real folders only where a file of the patch goes."""
    installed = overlay.base_root()
    real = {Path()}
    for module in overlay.modules().values():
        real.update(Path(*module.name.split(".")[1:]).parents)
    for folder in real:
        target = root / "python/sglang" / folder
        target.mkdir(parents=True, exist_ok=True)
        for entry in (installed / folder).iterdir():
            if folder / entry.name not in real and entry.name != "__pycache__":
                (target / entry.name).symlink_to(entry)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("sglang")
    link_sglang(root)
    done = lay("--into", root)
    assert done.exit_code == 0, done.output
    return root


def findings(*files: Path) -> Counter:
    command = [sys.executable, "-m", "ruff", "check", *RULES, "--output-format=json", "--no-cache", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    return Counter((Path(found["filename"]).name, found["code"]) for found in json.loads(done.stdout))


def test_the_installed_files_are_left_alone(tree):
    overlay.verify.cache_clear()
    overlay.verify()


def test_ruff_finds_nothing_that_is_not_sglangs(tree):
    for module in overlay.modules().values():
        merged = tree_file(tree, module)
        theirs = findings(overlay.base_file(module.name)) if module.kind == "extends" else Counter()
        assert findings(merged) - theirs == Counter(), merged


def test_the_merged_files_name_no_loader(tree):
    for module in overlay.modules().values():
        text = tree_file(tree, module).read_text()
        assert "sglang_upstream" not in text and "__overrides__" not in text
        assert not text.startswith(('"""new', '"""replaces', '"""extends'))


def test_comments_of_both_files_stay(tree):
    for module in overlay.modules().values():
        if module.kind == "extends":
            merged = tree_file(tree, module).read_text()
            theirs = overlay.base_file(module.name).read_text()
            assert [c for c in theirs.splitlines() if c.lstrip().startswith("#") and c not in merged] == []


PROBE = """
import json, os, sys
from importlib import import_module

import torch
from moe_layer import PATHS, Batch, Shape, Weights, build_layer, forward, initialize, relative_error, truth, variables

initialize(0, 1, int(sys.argv[1]))
from sglang.srt.environ import envs
from sglang.srt.layers.moe.moe_runner import deep_gemm
from sglang.srt.layers.moe.moe_runner.base import PermuteMethodPool

report = {"files": {}, "taken": {}, "outputs": {}, "errors": {}}
for name, names in json.loads(sys.argv[2]).items():
    module = import_module(name)
    report["files"][name] = module.__file__
    for taken in names:
        ours, base = getattr(module, taken), getattr(module, "_base_" + taken, None)
        report["taken"][taken] = base is not None and ours is not base
pool = PermuteMethodPool
report["pre"] = pool._pre_permute_methods["deepep_v2", "deep_gemm"] is deep_gemm.pre_permute_deepep_v2_to_deep_gemm
report["post"] = pool._post_permute_methods["deep_gemm", "deepep_v2"] is deep_gemm.post_permute_deep_gemm_to_deepep_v2
report["expand"] = envs.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND.get()
report["upstream"] = sorted(name for name in sys.modules if name.startswith("sglang_upstream"))
for fp8 in (True, False):
    shape = Shape()
    weights, batch = Weights.make(shape, fp8), Batch.make(shape, 24, seed=3)
    for path, toggles in PATHS.items():
        for extend in (True, False) if path == "psum" else (True,):
            with variables(**toggles), torch.inference_mode():
                out = forward(build_layer(shape, weights, 0), batch, extend)
            key = f"{path} fp8={fp8} extend={extend}"
            report["outputs"][key] = out.contiguous().view(torch.int16).tolist()
            report["errors"][key] = relative_error(out, truth(batch, weights))
print("REPORT" + json.dumps(report))
"""


def start_probe(port: int, **env: str) -> subprocess.Popen:
    overrides = {}
    for module in overlay.modules().values():
        parsed = ast.parse(module.file.read_text())
        assigned = {ast.unparse(n.targets[0]): n.value for n in parsed.body if isinstance(n, ast.Assign)}
        overrides[module.name] = ast.literal_eval(assigned["__overrides__"]) if module.kind == "extends" else ()
    return subprocess.Popen(
        [sys.executable, "-c", PROBE, str(port), json.dumps(overrides)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"} | env,
    )


def finish(probe: subprocess.Popen) -> dict:
    out, err = probe.communicate(timeout=250)
    lines = [line for line in out.splitlines() if line.startswith("REPORT")]
    assert lines, err[-3000:]
    return json.loads(lines[0].removeprefix("REPORT"))


@pytest.mark.slow
def test_it_computes_without_the_loader_what_the_loader_computes(tree):
    laid = start_probe(free_port(), SGLANG_OVERLAY="0", PYTHONPATH=f"{tree / 'python'}:{TESTS}")
    loaded = start_probe(free_port(), PYTHONPATH=str(TESTS))
    laid, loaded = finish(laid), finish(loaded)

    assert {*laid["files"].values()} == {str(tree_file(tree, m)) for m in overlay.modules().values()}
    assert {*loaded["files"].values()} == {str(m.file) for m in overlay.modules().values()}
    assert len(laid["taken"]) >= 8 and all(laid["taken"].values())
    assert (laid["pre"], laid["post"], laid["expand"]) == (True, True, True)
    assert laid["upstream"] == [] and loaded["upstream"] != []
    assert laid["outputs"] == loaded["outputs"]
    assert max(laid["errors"].values()) < 0.06 and len(laid["errors"]) == 10


@pytest.fixture
def checkout(tmp_path) -> Path:
    return make_checkout(tmp_path / "checkout")


def test_a_moved_sglang_is_marked_or_refused(checkout):
    hook = checkout / "python/sglang/srt/arg_groups/moe_hook.py"
    hook.write_text(text := hook.read_text() + "\n# moved on\n")
    dispatcher = checkout / "python/sglang/srt/layers/moe/token_dispatcher/deepep_v2.py"
    hook.write_text(text.replace("def validate_deepep_v2_model_architecture", "def validate_deepep_v2_model"))
    refused = lay("--into", checkout)
    assert refused.exit_code == 1 and "validate_deepep_v2_model_architecture" in refused.output.replace("\n", "")
    assert dispatcher.read_bytes() == overlay.base_file("sglang.srt.layers.moe.token_dispatcher.deepep_v2").read_bytes()

    hook.write_text(text)
    done = lay("--into", checkout)
    assert done.exit_code == 0 and done.output.count("another version") == 1


def test_an_sglang_without_a_folder_of_the_patch_is_refused(checkout):
    shutil.rmtree(checkout / "python/sglang/srt/layers/deep_gemm_wrapper")
    done = lay("--into", checkout)
    assert done.exit_code == 1 and "has no folder srt/layers/deep_gemm_wrapper" in one_line(done)


def test_without_ruff_the_files_are_merged_all_the_same(checkout, monkeypatch):
    monkeypatch.setattr(upstream, "_ruff", lambda: None)
    done = lay("--into", checkout)
    assert done.exit_code == 0 and "imports are not sorted" in done.output.replace("\n", " ")
    for module in overlay.modules().values():
        merged = tree_file(checkout, module)
        compile(merged.read_text(), merged, "exec")
        if module.kind == "new":
            assert merged.read_text() == without_kind(module.file.read_text())


BASE = '''"""Theirs."""

import os
from registry import register_thing

LIMIT = 1  # bytes


@register_thing("a")
@register_thing(
    "b",
)
def taken(x):
    return helper(x) + LIMIT


class Taken:
    pass


table = {"taken": taken, "Taken": [Taken]}


def helper(x):
    # Looked up when called: ours.
    return Taken, LIMIT
'''

OURS = '''"""extends: ours.

With a second paragraph.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import sglang_upstream.srt.part as upstream
from registry import pool, register_thing

if TYPE_CHECKING:
    from elsewhere import Type

__overrides__ = ("LIMIT", "Taken", "taken")

# Their registration stands in the way.
del pool["a"]

# In bytes.
LIMIT = upstream.LIMIT * 2


class Taken(upstream.Taken):
    home = os.sep


@register_thing("a")
def taken(x: Type):
    # Once more.
    return upstream.taken(x), upstream.helper(x)
'''


def test_merge_by_the_letter():
    assert (
        merge(BASE, OURS, NAME)
        == '''"""Theirs."""
from __future__ import annotations


import os
from registry import register_thing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elsewhere import Type

_base_LIMIT = 1  # bytes


def _base_taken(x):
    return helper(x) + LIMIT


class _base_Taken:
    pass


table = {"taken": _base_taken, "Taken": [_base_Taken]}


def helper(x):
    # Looked up when called: ours.
    return Taken, LIMIT


# Ours.
#
# With a second paragraph.

# In bytes.
LIMIT = _base_LIMIT * 2


class Taken(_base_Taken):
    home = os.sep


@register_thing("a")
def taken(x: Type):
    # Once more.
    return _base_taken(x), helper(x)
'''
    )


@pytest.mark.parametrize(
    ("base", "ours", "reason"),
    [
        ("class Taken", "class Token", "SGLang defines Taken 0 times|takes over"),
        ("def helper(x):", "class Taken:\n    y = 1\n\n\ndef helper(x):", "SGLang defines Taken 2 times"),
        ("def helper(x):", "def os_(x):", None),
        ("import os", "import posix as os", "uses os for something else"),
        ("import os\nfrom registry import register_thing\n", "", "imports nothing"),
    ],
)
def test_merge_refuses_a_base_that_moved(base, ours, reason):
    moved = BASE.replace(base, ours, 1)
    if reason is None:
        assert "def os_" in merge(moved, OURS, NAME)
        return
    with pytest.raises(MergeError, match=reason):
        merge(moved, OURS, NAME)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('("LIMIT", "Taken", "taken")', '("Taken", "taken")', "the file takes over"),
        ("upstream.helper(x)", "print(upstream)", "used other than"),
        ("def taken(x: Type):", "def taken(x: Type, helper=1):", "would hide"),
        ("import sglang_upstream.srt.part as upstream", "import sglang_upstream.srt.other as upstream", "only `import"),
        ("import sglang_upstream.srt.part as upstream", "from sglang_upstream.srt.part import taken", "overridden"),
        ("__overrides__ =", "overrides =", "must define __overrides__"),
    ],
)
def test_merge_refuses_what_it_cannot_carry_over(old, new, reason):
    with pytest.raises(MergeError, match=reason):
        merge(BASE, OURS.replace(old, new), NAME)


def test_the_kind_leaves_the_docstring():
    assert without_kind('"""new: the kernels, new: too."""\n') == '"""The kernels, new: too."""\n'
    assert without_kind('"""Plain."""\n') == '"""Plain."""\n'
