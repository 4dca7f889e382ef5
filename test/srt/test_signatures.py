"""Overlaid modules beside SGLang's own: no name that SGLang imports is lost, signatures and fields fit."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest
import sglang
from sglang.srt.layers.moe.moe_runner import deep_gemm as runner
from sglang.srt.layers.moe.moe_runner.base import PermuteMethodPool
from sglang.srt.layers.moe.token_dispatcher import deepep_v2
from sglang_upstream.srt.layers.moe.moe_runner import deep_gemm as upstream_runner
from sglang_upstream.srt.layers.moe.token_dispatcher import deepep_v2 as upstream_dispatcher

from sglang_deepep_v2 import overlay

OVERLAID = sorted(name for name, module in overlay.modules().items() if module.kind != "new")
EXTENDED = sorted(name for name, module in overlay.modules().items() if module.kind == "extends")


def imports_from(names: list[str]) -> set[tuple[str, str]]:
    """Every (module, name) that SGLang's sources import from one of the modules."""
    statement = re.compile(rf"^[ \t]*from ({'|'.join(map(re.escape, names))}) import (\([^)]*\)|.*)$", re.MULTILINE)
    found = set()
    for file in Path(sglang.__path__[0]).rglob("*.py"):
        for module, imported in statement.findall(file.read_text()):
            bare = re.sub(r"#.*", "", imported).strip("() \n")
            found |= {(module, name.split()[0]) for name in bare.split(",") if name.strip()}
    return found


def test_every_name_that_sglang_imports_is_there():
    imports = imports_from(OVERLAID)
    assert {module for module, _ in imports} == set(OVERLAID)
    assert not [(module, name) for module, name in imports if not hasattr(importlib.import_module(module), name)]


def test_public_names_of_the_replaced_dispatcher():
    theirs = {
        name
        for name, value in vars(upstream_dispatcher).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == upstream_dispatcher.__name__
    }
    assert theirs == {"DeepEPv2Buffer", "DeepEPv2CombineInput", "DeepEPv2Dispatcher", "DeepEPv2DispatchOutput"}
    assert not [name for name in theirs if not hasattr(deepep_v2, name)]
    assert isinstance(deepep_v2.use_deepep_v2, bool)


def parameters(function) -> list[tuple]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def public_methods(cls) -> dict:
    return {
        name: getattr(cls, name)
        for name, value in vars(cls).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod)))
    }


@pytest.mark.parametrize("name", ["DeepEPv2Buffer", "DeepEPv2Dispatcher"])
def test_methods_of_the_replaced_classes(name):
    ours, theirs = getattr(deepep_v2, name), getattr(upstream_dispatcher, name)
    methods = public_methods(theirs)
    assert methods
    for method, function in methods.items():
        assert parameters(getattr(ours, method)) == parameters(function), method


def test_constructor_of_the_replaced_dispatcher():
    ours = parameters(deepep_v2.DeepEPv2Dispatcher.__init__)
    assert ours == parameters(upstream_dispatcher.DeepEPv2Dispatcher.__init__)


@pytest.mark.parametrize("name", ["DeepEPv2DispatchOutput", "DeepEPv2CombineInput"])
def test_fields_extend_at_the_end(name):
    ours, theirs = getattr(deepep_v2, name), getattr(upstream_dispatcher, name)
    assert ours._fields[: len(theirs._fields)] == theirs._fields
    added = ours._fields[len(theirs._fields) :]
    assert {field: ours._field_defaults.get(field) for field in theirs._field_defaults} == theirs._field_defaults
    assert not [field for field in added if field not in ours._field_defaults]
    assert ours.format.fget(None) == theirs.format.fget(None)


def test_runner_input_extends_at_the_end():
    ours, theirs = (
        [(field.name, field.default) for field in dataclasses.fields(module.DeepGemmRunnerInput)]
        for module in (runner, upstream_runner)
    )
    assert ours[: len(theirs)] == theirs
    assert all(default is not dataclasses.MISSING for _, default in ours[len(theirs) :])


@pytest.mark.parametrize("module_name", EXTENDED)
def test_signatures_of_what_extends_files_take_over(module_name):
    module = importlib.import_module(module_name)
    upstream = importlib.import_module("sglang_upstream" + module_name.removeprefix("sglang"))
    for name in module.__overrides__:
        ours, theirs = getattr(module, name), getattr(upstream, name)
        assert ours.__name__ == theirs.__name__
        if inspect.isclass(theirs):
            assert issubclass(ours, theirs)
            for method, function in public_methods(theirs).items():
                assert parameters(getattr(ours, method)) == parameters(function), method
        else:
            assert parameters(ours) == parameters(theirs), name


def test_runner_core_is_a_subclass_with_the_same_constructor():
    assert issubclass(runner.DeepGemmRunnerCore, upstream_runner.DeepGemmRunnerCore)
    assert parameters(runner.DeepGemmRunnerCore.__init__) == parameters(upstream_runner.DeepGemmRunnerCore.__init__)


def test_permute_pool_holds_ours_and_keeps_theirs():
    pre, post = PermuteMethodPool._pre_permute_methods, PermuteMethodPool._post_permute_methods
    assert pre["deepep_v2", "deep_gemm"] is runner.pre_permute_deepep_v2_to_deep_gemm
    assert post["deep_gemm", "deepep_v2"] is runner.post_permute_deep_gemm_to_deepep_v2
    for other in ("standard", "deepep_normal", "deepep_ll"):
        assert pre[other, "deep_gemm"].__module__ == runner.__name__
        assert post["deep_gemm", other].__module__ == runner.__name__
        assert pre[other, "deep_gemm"] is vars(upstream_runner)[pre[other, "deep_gemm"].__name__]
