"""The patch's environment variables: types, defaults, and SGLang's own registry left as it was."""

import importlib.util
import sys
from pathlib import Path

import pytest
import sglang
from sglang.srt.environ import EnvBool, EnvField, EnvInt, Envs, envs

OURS = {
    "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND": (EnvBool, True),
    "SGLANG_DEEPEP_V2_ENABLE_PSUM_PIPELINE": (EnvBool, True),
    "SGLANG_DEEPEP_V2_ENABLE_SYNC_FREE_PREFILL": (EnvBool, False),
    "SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES": (EnvInt, None),
    "SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT": (EnvBool, False),
}
CAPACITY = "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"


def declared(registry) -> dict[str, tuple[str, object]]:
    """Type name and default of every variable; a computed default counts as "computed"."""
    return {
        name: (type(field).__name__, "computed" if callable(field.default) else field.default)
        for name, field in vars(registry).items()
        if any(base.__name__ == "EnvField" for base in type(field).__mro__)
    }


@pytest.fixture(scope="module")
def plain_environ():
    """SGLang's environ.py executed by itself, from its own file."""
    file = Path(sglang.__path__[0]) / "srt" / "environ.py"
    spec = importlib.util.spec_from_file_location("plain_sglang_environ", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


@pytest.mark.parametrize("name", OURS)
def test_declaration(name, monkeypatch):
    kind, default = OURS[name]
    monkeypatch.delenv(name, raising=False)
    field = vars(Envs)[name]
    assert type(field) is kind
    assert field.name == name
    assert field.get() is default


@pytest.mark.parametrize("name", [name for name, (kind, _) in OURS.items() if kind is EnvBool])
def test_switches_read_both_ways(name, monkeypatch):
    monkeypatch.setenv(name, "0")
    assert getattr(envs, name).get() is False
    monkeypatch.setenv(name, "true")
    assert getattr(envs, name).get() is True


def test_byte_limit_tells_unset_from_zero(monkeypatch):
    monkeypatch.setenv("SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES", "0")
    assert envs.SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES.get() == 0
    monkeypatch.delenv("SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES")
    assert envs.SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES.get() is None


def test_override_restores(monkeypatch):
    monkeypatch.delenv("SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND", raising=False)
    with envs.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND.override(False):
        assert envs.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND.get() is False
    assert envs.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND.get() is True


@pytest.mark.loader
def test_everything_else_is_as_sglang_declares_it(plain_environ):
    theirs = declared(plain_environ.Envs)
    ours = declared(Envs)
    assert len(theirs) > 100
    changed = {name for name in ours if ours[name] != theirs.get(name)}
    assert changed == set(OURS)
    assert not set(theirs) - set(ours)


def test_capacity_is_unchanged_and_no_timeout_is_added(plain_environ):
    assert declared(Envs)[CAPACITY] == declared(plain_environ.Envs)[CAPACITY] == ("EnvInt", 128)
    added = set(declared(Envs)) - set(declared(plain_environ.Envs))
    assert not [name for name in added if "TIMEOUT" in name]


def test_registry_is_closed_again():
    with pytest.raises((AssertionError, RuntimeError)):
        type("Stray", (), {"SGLANG_STRAY": EnvBool(False)})
    assert EnvField._allow_set_name is False


def test_variables_reach_the_exported_environment(monkeypatch):
    from sglang.srt.environ import exportable_env_vars

    monkeypatch.setenv("SGLANG_DEEPEP_V2_ENABLE_PSUM_PIPELINE", "0")
    assert exportable_env_vars()["SGLANG_DEEPEP_V2_ENABLE_PSUM_PIPELINE"] == "0"
