"""The loader: makes the patch tree win over the installed SGLang.

The first word of a tree file's docstring says its kind:

=========  =======================================================================================
new        SGLang has no file of that name.
replaces   SGLang's file is not executed; ``sglang_upstream.<name>`` still imports it, under that name.
extends    SGLang's file runs first, then ours runs in the same namespace, so what ours defines wins
           everywhere, inside SGLang's own functions too. ``sglang_upstream.<name>`` holds the names as
           SGLang's file left them, for subclassing and wrapping.
=========  =======================================================================================

An extends file lists the names it takes over in ``__overrides__``; any other collision is an error.
``SGLANG_OVERLAY=0`` runs plain SGLang. Reloading an extended module is refused; ``inspect.getsource`` and
``python -m`` see only the patch's half of one.
"""

import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec as find_spec_anywhere
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

_PACKAGE = Path(__file__).resolve().parent
# A wheel carries the tree inside the package; a checkout has it beside the package.
TREE = _PACKAGE / "tree" if (_PACKAGE / "tree").is_dir() else _PACKAGE.parent
LOCK = _PACKAGE / "overlay.lock"
SWITCH = "SGLANG_OVERLAY"
WRITE_LOCK = "sglang-deepep-v2 status --write-lock"
_BASE = "sglang"
_UPSTREAM = "sglang_upstream"
_KIND = re.compile(rb'"""(new|replaces|extends)\b')
_DUNDER = re.compile("__.*__")


class OverlayError(RuntimeError):
    """The patch cannot be applied as it was verified. Not an ImportError: no import fallback hides it."""


@dataclass(frozen=True)
class TreeModule:
    """One file of the patch tree: its module name, its kind (new, replaces or extends) and its path."""

    name: str
    kind: str
    file: Path


@dataclass(frozen=True)
class Finding:
    """One tree file held against the installed SGLang; ``problem`` is None where all is as locked."""

    module: TreeModule
    base_file: Path | None
    problem: str | None


@functools.cache
def enabled() -> bool:
    """Whether the overlay is on (``SGLANG_OVERLAY=0``: off); decided once, so no process runs a mixture.

    Raises:
        OverlayError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1", ""):
        raise OverlayError(f"{SWITCH}={value!r}: 0 runs plain SGLang, 1 or nothing runs the patch")
    return value != "0"


@functools.cache
def modules() -> dict[str, TreeModule]:
    """Every tree file by module name. Raises OverlayError for a missing tree or a file without a kind."""
    root = TREE / _BASE
    if not root.is_dir():
        raise OverlayError(
            f"no patch tree at {root}: sglang_deepep_v2 must be installed unpacked (not zipped) and whole. "
            "Run `pip install --force-reinstall --no-deps .` in a checkout of sglang-deepep-v2."
        )
    found = {}
    for file in sorted(root.rglob("*.py")):
        with file.open("rb") as text:
            kind = _KIND.match(text.read(32))
        if kind is None:
            raise OverlayError(f'{file}: the file must begin with """new, """replaces or """extends')
        name = ".".join(file.relative_to(TREE).with_suffix("").parts)
        found[name] = TreeModule(name, kind[1].decode(), file)
    return found


def base_version() -> str | None:
    """The installed SGLang's version, None without one."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(_BASE)
    except PackageNotFoundError:
        return None


def base_root() -> Path | None:
    """The installed SGLang's package folder, None without one. Does not import SGLang."""
    spec = find_spec_anywhere(_BASE)
    # A checkout's python/ is a namespace portion of that name: no origin, so not SGLang itself.
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def base_file(name: str) -> Path | None:
    """SGLang's own file for a module name, None where SGLang has none."""
    root = base_root()
    if root is None:
        return None
    file = root.joinpath(*name.split(".")[1:]).with_suffix(".py")
    return file if file.is_file() else None


def read_lock() -> dict[str, dict[str, str]]:
    """SGLang version -> module name -> SHA-256 of SGLang's file, for each verified version."""
    try:
        lock = json.loads(LOCK.read_text())
        if all(isinstance(hashes, dict) for hashes in lock.values()):
            return lock
        reason = "not a table of versions"
    except FileNotFoundError:
        return {}
    except (AttributeError, OSError, ValueError) as error:
        reason = str(error)
    raise OverlayError(f"{LOCK} cannot be read ({reason}). Restore it, or delete it and run `{WRITE_LOCK}`.")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _problem(module: TreeModule, base: Path | None, locked: dict[str, str]) -> str | None:
    if module.kind == "new":
        parent = base_root().joinpath(*module.name.split(".")[1:-1])
        if base is not None:
            return "SGLang now has a file of this name"
        return None if parent.is_dir() else f"SGLang has no package {module.name.rpartition('.')[0]}"
    if base is None:
        return "no such file in SGLang"
    if module.name not in locked:
        return "not in the lock"
    return None if locked[module.name] == _sha256(base.read_bytes()) else "SGLang's file is not the locked one"


def findings() -> list[Finding]:
    """Holds every tree file against the installed SGLang and the lock.

    Raises OverlayError when SGLang is missing or its version is not in the lock.
    """
    lock, installed = read_lock(), base_version()
    if base_root() is None or installed not in lock:
        verified = ", ".join(lock) or "none yet"
        fix = f"`pip install sglang=={[*lock][-1]}`" if lock else f"`{WRITE_LOCK}`"
        raise OverlayError(
            f"the patch was verified on sglang {verified}; installed: {installed or 'none'}. Run {fix}, "
            f"or after a review `{WRITE_LOCK}`; {SWITCH}=0 runs SGLang without the patch."
        )
    return list(_findings(lock[installed]))


def _findings(locked: dict[str, str]) -> Iterator[Finding]:
    for module in modules().values():
        base = base_file(module.name)
        yield Finding(module, base, _problem(module, base, locked))


def is_active() -> bool:
    """Whether this interpreter has the finder, which the .pth file puts there."""
    # Not by importing boot, which would put it there.
    return any(getattr(finder, "__module__", None) == "sglang_deepep_v2.boot" for finder in sys.meta_path)


def check_in_charge() -> None:
    """Raises OverlayError when the overlay is on and a module of the tree would come, or came, from elsewhere."""
    if not enabled():
        return
    if not is_active():
        raise OverlayError(
            "sglang-deepep-v2 is installed and its loader is not: this interpreter processed no .pth file (python -S, "
            "pip --target or PYTHONPATH do that). Install it into the interpreter's site-packages (`pip install .` in "
            f"its checkout); {SWITCH}=0 runs SGLang without the patch."
        )
    loaded = {name: getattr(sys.modules.get(name), "__spec__", None) for name in modules()}
    foreign = {name: spec.origin for name, spec in loaded.items() if spec and spec.origin != str(modules()[name].file)}
    if foreign:
        lines = "\n".join(f"  {name} from {origin}" for name, origin in foreign.items())
        raise OverlayError(
            "modules of SGLang were imported past sglang-deepep-v2, by an earlier .pth file or another import hook:\n"
            f"{lines}\nRemove that one; {SWITCH}=0 runs SGLang without the patch."
        )


@functools.cache
def verify() -> dict[str, str]:
    """The lock's hashes of the installed SGLang, by module name.

    Raises OverlayError unless all files are as locked: all at once, so no child process fails first.
    """
    check_in_charge()
    wrong = [found for found in findings() if found.problem]
    if not wrong:
        return read_lock()[base_version()]
    lines = "\n".join(f"  {f.module.name} ({f.module.kind}): {f.problem} {f.base_file or ''}" for f in wrong)
    version = base_version()
    raise OverlayError(
        f"the installed sglang {version} is not the one the patch was verified on:\n{lines}\n"
        f"Run `pip install --force-reinstall --no-deps sglang=={version}`, or review the change and run "
        f"`{WRITE_LOCK}`; {SWITCH}=0 runs SGLang without the patch."
    )


def write_lock() -> str:
    """Locks the installed SGLang's files (other versions keep their entries) and returns its version.

    Raises OverlayError when SGLang or a file that the patch needs is missing, OSError when writing fails.
    """
    installed = base_version()
    if installed is None or base_root() is None:
        raise OverlayError("sglang is not installed, so there is nothing to lock")
    based = {name: base_file(name) for name, module in modules().items() if module.kind != "new"}
    missing = [name for name, file in based.items() if file is None]
    if missing:
        raise OverlayError(f"sglang {installed} has no file for {', '.join(missing)}: the patch does not fit it")
    lock = read_lock() | {installed: {name: _sha256(file.read_bytes()) for name, file in based.items()}}
    # Replaced in one step: a server that starts meanwhile reads the old lock or the new one.
    draft = LOCK.with_name(f"{LOCK.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(lock, indent=1) + "\n")
        os.replace(draft, LOCK)
    finally:
        draft.unlink(missing_ok=True)
    verify.cache_clear()
    return installed


class _BaseLoader(SourceFileLoader):
    """Runs SGLang's file of the module ``real`` from the bytes that were verified: a stale .pyc may hold other code."""

    def __init__(self, name: str, real: str):
        super().__init__(name, str(base_file(real)))
        self._locked = verify()[real]

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        if _sha256(source) != self._locked:
            raise OverlayError(f"{self.path} changed while this process ran; start it again")
        return self.source_to_code(source, self.path)


class _ExtendsLoader(SourceFileLoader):
    """Runs SGLang's file, keeps its names as sglang_upstream's, then runs ours in the same namespace."""

    def exec_module(self, module: ModuleType) -> None:
        if "__overrides__" in vars(module):
            raise OverlayError(f"{module.__name__} is an extended module: reloading it is not supported")
        shadow = _UPSTREAM + module.__name__.removeprefix(_BASE)
        base = _BaseLoader(module.__name__, module.__name__)
        module.__file__ = base.path
        try:
            base.exec_module(module)
            module.__file__ = self.path
            theirs = {name: value for name, value in vars(module).items() if not _DUNDER.fullmatch(name)}
            _Shadow.names[shadow] = {**theirs, "__file__": base.path}
            super().exec_module(module)
            self._check_overrides(module, theirs)
        except BaseException:
            # A retry must not find the failed attempt's names.
            sys.modules.pop(shadow, None)
            raise

    def _check_overrides(self, module: ModuleType, theirs: dict[str, object]) -> None:
        declared = vars(module).get("__overrides__")
        if declared is None:
            raise OverlayError(f"{self.path}: an extends file must define __overrides__")
        ours = vars(module)
        taken = {name for name, value in theirs.items() if name not in ours or ours[name] is not value}
        if taken != set(declared):
            raise OverlayError(
                f"{self.path}: __overrides__ names {sorted(declared)}, the file takes over {sorted(taken)}"
            )


class _Shadow:
    """Loads sglang_upstream.<name>: an extended module's names as SGLang's file left them, or a parent."""

    names: dict[str, dict[str, object]] = {}

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType | None:
        return None

    @classmethod
    def exec_module(cls, module: ModuleType) -> None:
        vars(module).update(cls.names.get(module.__name__, {}))


def _find_upstream(name: str) -> ModuleSpec:
    real = _BASE + name.removeprefix(_UPSTREAM)
    module = modules().get(real)
    if module is None or module.kind == "new":
        if real == _BASE or any(other.startswith(real + ".") for other in modules()):
            return ModuleSpec(name, _Shadow, is_package=True)
        raise ModuleNotFoundError(f"{name}: not an overlaid module, import {real}", name=name)
    verify()
    if module.kind == "replaces":
        return spec_from_file_location(name, base_file(real), loader=_BaseLoader(name, real))
    import_module(real)
    if name not in _Shadow.names:
        raise ImportError(f"{name} is imported while SGLang's own file still runs (an import cycle)", name=name)
    return ModuleSpec(name, _Shadow)


def find_spec(name: str) -> ModuleSpec | None:
    """The spec of an overlaid module (or of its sglang_upstream counterpart), None for every other name.

    Raises OverlayError at the first overlaid name when the installed SGLang is not the locked one.
    """
    if not enabled():
        return None
    if name == _UPSTREAM or name.startswith(_UPSTREAM + "."):
        return _find_upstream(name)
    module = modules().get(name)
    if module is None:
        return None
    verify()
    loader = (_ExtendsLoader if module.kind == "extends" else SourceFileLoader)(name, str(module.file))
    return spec_from_file_location(name, module.file, loader=loader)
