"""Merges an extends file of the patch tree into the SGLang file that it extends, as source text.

Positions come from ``ast``, so comments and formatting of everything that stays are kept.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_KIND = re.compile(r'\A"""(?:new|replaces|extends):\s*(\S)')
_UPSTREAM = "sglang_upstream"
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITION = (*_FUNCTION, ast.ClassDef)


class MergeError(RuntimeError):
    """The patch does not fit the source that it is laid onto."""


def base_name(name: str) -> str:
    """What SGLang's own definition of an overridden name is called after the merge."""
    return f"_base_{name}"


def without_kind(text: str) -> str:
    """A tree file's text without the first docstring word that tells the loader its kind."""
    return _KIND.sub(lambda match: f'"""{match[1].upper()}', text, count=1)


class _Source:
    """A file's text, its module node, and edits of it that do not overlap."""

    def __init__(self, text: str):
        self.data = text.encode()
        self.tree = ast.parse(text)
        self._lines = [0]
        for line in self.data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._edits: list[tuple[int, int, bytes]] = []

    def offset(self, line: int, column: int) -> int:
        """Byte offset of a 1-based line and a byte column, as ``ast`` counts them."""
        return self._lines[line - 1] + column

    def replace(self, node: ast.expr, expected: str, new: str) -> None:
        """Replace an expression whose text must be ``expected``."""
        start, end = self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)
        # Before Python 3.12, positions inside an f-string may be off.
        if self.data[start:end] != expected.encode():
            raise MergeError(f"line {node.lineno}: cannot locate {expected!r} (inside an f-string?)")
        self._edits.append((start, end, new.encode()))

    def rename(self, node: ast.stmt, name: str, new: str) -> None:
        """Rename a definition at its ``def`` or ``class``."""
        start = self.offset(node.lineno, node.col_offset)
        match = re.compile(rb"(?:async\s+def|def|class)\s+(%s)\b" % name.encode()).match(self.data, start)
        self._edits.append((*match.span(1), new.encode()))

    def delete_lines(self, first: int, last: int) -> None:
        """Delete whole lines, both included."""
        self._edits.append((self._lines[first - 1], self._lines[last], b""))

    def insert_after(self, line: int, text: str) -> None:
        """Insert whole lines after a line; 0 inserts at the top."""
        self._edits.append((self._lines[line], self._lines[line], text.encode()))

    def first_line(self, node: ast.stmt) -> int:
        """The first line of a statement with its decorators and the comment lines right above it."""
        line = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        while line > 1 and self.data[self._lines[line - 2] : self._lines[line - 1]].startswith(b"#"):
            line -= 1
        return line

    def text(self) -> str:
        data = self.data
        for start, end, new in sorted(self._edits, reverse=True):
            data = data[:start] + new + data[end:]
        return data.decode()


@dataclass(frozen=True)
class _Import:
    """One imported name; ``module`` is None for a plain ``import``."""

    module: str | None
    name: str
    asname: str | None
    type_checking: bool

    @property
    def local(self) -> str:
        return self.asname or (self.name if self.module else self.name.partition(".")[0])

    @property
    def line(self) -> str:
        alias = f" as {self.asname}" if self.asname else ""
        return f"from {self.module} import {self.name}{alias}" if self.module else f"import {self.name}{alias}"


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imports(body: list[ast.stmt], type_checking: bool = False) -> Iterator[_Import]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (_Import(None, a.name, a.asname, type_checking) for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            module = "." * node.level + (node.module or "")
            yield from (_Import(module, a.name, a.asname, type_checking) for a in node.names)
        elif _is_type_checking(node):
            yield from _imports(node.body, True)


def _has_future_annotations(tree: ast.Module) -> bool:
    return any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body)


def _assigned(node: ast.stmt) -> list[ast.Name]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = (n for target in targets if target is not None for n in ast.walk(target))
    return [n for n in names if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def _definitions(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """Top-level definitions and assignments by name."""
    found: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        if isinstance(node, _DEFINITION):
            found.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for name in _assigned(node):
                found.setdefault(name.id, []).append(node)
    return found


def _run_at_import(node: ast.AST, lazy_annotations: bool) -> Iterator[ast.Name]:
    """Names that running a module's body reads, function bodies left out."""
    if isinstance(node, ast.Name):
        yield node
        return
    if isinstance(node, ast.Lambda):
        children = [node.args]
    elif isinstance(node, _FUNCTION):
        children = [*node.decorator_list, node.args, *([] if lazy_annotations else [node.returns])]
    elif isinstance(node, ast.arg):
        children = [] if lazy_annotations else [node.annotation]
    elif isinstance(node, ast.AnnAssign) and lazy_annotations:
        children = [node.target, node.value]
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        if child is not None:
            yield from _run_at_import(child, lazy_annotations)


def _is_registration(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name.startswith("register")


def _overrides(tree: ast.Module, module: str) -> tuple[str, ...]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [n.id for n in _assigned(node)] == ["__overrides__"]:
            return ast.literal_eval(node.value)
    raise MergeError(f"{module}: an extends file must define __overrides__")


def _set_base_aside(base: _Source, overrides: tuple[str, ...], module: str) -> None:
    """Rename SGLang's definitions of the overridden names; their registrations go, ours register instead."""
    definitions = _definitions(base.tree)
    for name in overrides:
        nodes = definitions.get(name, [])
        if len(nodes) != 1:
            raise MergeError(f"{module}: SGLang defines {name} {len(nodes)} times at the top level, expected once")
        node = nodes[0]
        if isinstance(node, _DEFINITION):
            base.rename(node, name, base_name(name))
            for decorator in filter(_is_registration, node.decorator_list):
                base.delete_lines(decorator.lineno, decorator.end_lineno)
    # What SGLang's file reads while it runs is its own definition; ours comes later.
    for name in _run_at_import(base.tree, _has_future_annotations(base.tree)):
        if name.id in overrides:
            base.replace(name, name.id, base_name(name.id))


def _upstream_aliases(ours: _Source, module: str) -> set[str]:
    """Local names of ``sglang_upstream.<this module>`` in our file."""
    twin = _UPSTREAM + module.removeprefix("sglang")
    aliases = set()
    for imported in _imports(ours.tree.body):
        source = imported.module or imported.name
        if source.partition(".")[0] != _UPSTREAM:
            continue
        if source != twin or (imported.module is None and imported.asname is None):
            raise MergeError(f"{module}: only `import {twin} as NAME` or `from {twin} import ...` can be merged")
        if imported.module is None:
            aliases.add(imported.asname)
        elif imported.asname or imported.name in _overrides(ours.tree, module):
            raise MergeError(f"{module}: `{imported.line}`: import the module for an overridden or renamed name")
    return aliases


def _rewrite_upstream(ours: _Source, overrides: tuple[str, ...], module: str) -> None:
    """``upstream.NAME`` becomes ``_base_NAME`` where NAME is overridden, else NAME."""
    aliases = _upstream_aliases(ours, module)
    rewritten, plain = set(), set()
    for node in ast.walk(ours.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            new = base_name(node.attr) if node.attr in overrides else node.attr
            ours.replace(node, f"{node.value.id}.{node.attr}", new)
            rewritten.add(node.value)
            plain.add(new)
    for node in ast.walk(ours.tree):
        if isinstance(node, ast.Name) and node.id in aliases and node not in rewritten:
            raise MergeError(f"{module}:{node.lineno}: `{node.id}` is used other than as `{node.id}.NAME`")
        bound = node.arg if isinstance(node, ast.arg) else getattr(node, "id", None)
        if bound in plain and not isinstance(getattr(node, "ctx", None), ast.Load):
            raise MergeError(f"{module}:{node.lineno}: the local `{bound}` would hide SGLang's {bound}")


def _goes(node: ast.stmt) -> bool:
    """Whether a top-level statement of ours serves the loader only, or is an import, which is hoisted."""
    if isinstance(node, ast.Import | ast.ImportFrom) or _is_type_checking(node):
        return True
    # SGLang's registrations are dropped where they stand, so nothing is left to take out of a pool.
    if isinstance(node, ast.Delete) and all(isinstance(target, ast.Subscript) for target in node.targets):
        return True
    return isinstance(node, ast.Assign) and [n.id for n in _assigned(node)] == ["__overrides__"]


def _needed_imports(base: _Source, ours: _Source, kept: list[ast.stmt], module: str) -> list[_Import]:
    """Our imports that the kept statements use and SGLang's file does not have."""
    used = {n.id for node in kept for n in ast.walk(node) if isinstance(n, ast.Name)}
    present = {imported.local: imported for imported in _imports(base.tree.body)}
    defined = _definitions(base.tree)
    needed = []
    for imported in _imports(ours.tree.body):
        if imported.local not in used or (imported.module or imported.name).partition(".")[0] == _UPSTREAM:
            continue
        there = present.get(imported.local)
        if there is None and imported.local not in defined:
            needed.append(imported)
        elif there is None or (there.module, there.name) != (imported.module, imported.name):
            raise MergeError(f"{module}: `{imported.line}`: SGLang's file uses {imported.local} for something else")
        elif there.type_checking and not imported.type_checking:
            raise MergeError(f"{module}: `{imported.line}`: SGLang's file imports it under TYPE_CHECKING only")
    return needed


def _add_imports(base: _Source, needed: list[_Import]) -> None:
    runtime = [imported.line + "\n" for imported in needed if not imported.type_checking]
    checking = [f"    {imported.line}\n" for imported in needed if imported.type_checking]
    is_import = [isinstance(node, ast.Import | ast.ImportFrom) for node in base.tree.body]
    if not any(is_import):
        raise MergeError(f"SGLang's file imports nothing: no place for `{needed[0].line}`")
    first = is_import.index(True)
    last = next((i for i in range(first, len(is_import)) if not is_import[i]), len(is_import)) - 1
    block = next((node for node in base.tree.body if _is_type_checking(node)), None)
    if checking and block is not None:
        base.insert_after(block.body[-1].end_lineno, "".join(checking))
        checking = []
    if checking:
        runtime.append("from typing import TYPE_CHECKING\n")
        checking = ["\nif TYPE_CHECKING:\n", *checking]
    base.insert_after(base.tree.body[last].end_lineno, "".join(runtime + checking))


def _docstring_as_comment(tree: ast.Module) -> str:
    text = without_kind(f'"""{ast.get_docstring(tree)}"""').strip('"')
    return "".join(f"# {line}".rstrip() + "\n" for line in text.strip().splitlines())


def merge(base_text: str, our_text: str, module: str, style: Callable[[str], str] = str) -> str:
    """One file that does without the loader what the loader makes of the two.

    SGLang's definitions of the names in ``__overrides__`` are renamed ``_base_NAME`` and lose their ``@register...``
    decorators; ours follow at the end, with ``upstream.NAME`` pointing at them. Imports join SGLang's.

    Args:
        base_text: SGLang's file.
        our_text: the extends file.
        module: the module's name, ``sglang.srt...``.
        style: formats the part that is ours.

    Raises:
        MergeError: the files do not fit; the message names the name at fault.
    """
    base, ours = _Source(base_text), _Source(our_text)
    overrides = _overrides(ours.tree, module)
    kept = [node for node in ours.tree.body[1:] if not _goes(node)]
    redefined = {name for node in kept for name in _definitions(ast.Module([node], []))}
    taken = redefined & {*_definitions(base.tree), *(i.local for i in _imports(base.tree.body))}
    if taken != set(overrides):
        raise MergeError(f"{module}: __overrides__ names {sorted(overrides)}, the file takes over {sorted(taken)}")
    needed = _needed_imports(base, ours, kept, module)

    _set_base_aside(base, overrides, module)
    if _has_future_annotations(ours.tree) and not _has_future_annotations(base.tree):
        docstring = base.tree.body[0].end_lineno if ast.get_docstring(base.tree) else 0
        base.insert_after(docstring, "from __future__ import annotations\n\n")
    if needed:
        _add_imports(base, needed)

    _rewrite_upstream(ours, overrides, module)
    for node in ours.tree.body:
        if node not in kept:
            ours.delete_lines(ours.first_line(node), node.end_lineno)
    own = style(_docstring_as_comment(ours.tree) + "\n" + ours.text().strip() + "\n")
    merged = base.text().rstrip() + "\n\n\n" + own
    if _UPSTREAM in merged:
        raise MergeError(f"{module}: {_UPSTREAM} is left in the merged file")
    compile(merged, module, "exec", dont_inherit=True)
    return merged
