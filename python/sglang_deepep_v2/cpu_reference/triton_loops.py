"""Triton's interpreter hands `range` loop variables over as Python ints; compiled kernels see int32 scalars.

SGLang's scatter and gather kernels cast them with `.to(tl.int64)`, which only the scalar has. `install()` makes the
interpreter convert the variable at the top of such a loop, so these kernels run interpreted as they are.
"""

from __future__ import annotations

import ast


def install() -> None:
    """Convert loop variables of `range` and `tl.range` in every kernel interpreted from now on. Idempotent.

    `tl.static_range` is left alone: its variable is a compile-time constant in compiled kernels too.
    """
    from triton.runtime.interpreter import ASTTransformer

    if getattr(ASTTransformer, "visit_For", None) is not _visit_for:
        ASTTransformer.visit_For = _visit_for


def _visit_for(transformer: ast.NodeTransformer, node: ast.For) -> ast.For:
    transformer.generic_visit(node)
    if isinstance(node.target, ast.Name) and _is_range(node.iter):
        to_tensor = ast.Attribute(ast.Name("interpreter_semantic", ast.Load()), "to_tensor", ast.Load())
        scalar = ast.Call(to_tensor, [ast.Name(node.target.id, ast.Load()), ast.Constant(False)], [])
        convert = ast.Assign([ast.Name(node.target.id, ast.Store())], scalar)
        node.body.insert(0, ast.copy_location(convert, node))
        ast.fix_missing_locations(node)
    return node


def _is_range(call: ast.expr) -> bool:
    if not isinstance(call, ast.Call):
        return False
    name = call.func
    return (isinstance(name, ast.Name) and name.id == "range") or (
        isinstance(name, ast.Attribute) and name.attr == "range"
    )
