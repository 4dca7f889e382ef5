"""The cases that must hold, and that each is a test: ``k3`` and ``r11`` in a test's name stand for these lines."""

import ast
import re
from pathlib import Path

import pytest

KERNELS = {
    "k1": "empty experts first, in the middle and last; no rows at all launch nothing",
    "k2": "half-tile and tile edges: 64, 65, 128, multiples of 128 and one more; a partial alignment is an assertion",
    "k3": "offsets past 2^31, of rows and of scales",
    "k4": "scales row-major, column-major, transposed, or a slice of something larger",
    "k5": "weights 0, negative, subnormal, above 1; 0 x Inf stays in its own token",
    "k6": "NaN and Inf in padding rows, scales and weights change no bit of a valid row, through both GEMMs",
    "k7": "a row count that is no multiple of 4, so the aligned scale has a tail",
    "k8": "intermediate sizes of odd and uneven group counts; hidden sizes 256 to 7168",
    "k9": "SGLang's scatter without its optional arguments",
}
DISPATCH_AND_RUNNER = {
    "r1": "one dispatch, one combine: anything else is a RuntimeError, and a failed combine still frees the handle",
    "r2": "an idle rank at EP2 to EP8 joins, returns no rows, and changes no bit of the others'",
    "r3": "all routes of a token dropped, uneven tokens, everything to one expert, everything to one rank",
    "r4": "more tokens than the buffer holds is an error before DeepEP; the capacity passed on never varies",
    "r5": "sizes that DeepEP cannot take are refused, dtypes and strides that it cannot take are cast",
    "r6": "another alignment of the GEMM turns the psum pipeline off, with a reason",
    "r7": "raw rows for a routewise finaliser stay unweighted",
    "r8": "deep_ep missing or asserting: SGLang imports, the first use says why and what fixes it",
    "r9": "EP_REUSE_NCCL_COMM and GIN are set for the user, unless the user set them",
    "r10": "direct mode across nodes is refused; hybrid exactly when asked for",
    "r11": "the buffer is built once before serving, unless a captured decode graph built it",
    "r12": "the prefill budget of a rank, against what forwards dispatch",
    "r13": "architectures, drafts, overlap modes and fused shared experts that are not validated are refused",
}


def names_of_tests() -> set[str]:
    """Every test function of this folder."""
    trees = [ast.parse(file.read_text()) for file in Path(__file__).parent.glob("test_*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {node.name for node in nodes if node.name.startswith("test_")}


NAMES = names_of_tests()


@pytest.mark.parametrize("case", [*KERNELS, *DISPATCH_AND_RUNNER])
def test_is_a_test(case):
    assert [name for name in NAMES if re.search(rf"_{case}(_|$)", name)], case


def test_no_other_case_is_named():
    named = {match[1] for name in NAMES for match in re.finditer(r"_([kr]\d+)(?=_|$)", name)}
    assert named == {*KERNELS, *DISPATCH_AND_RUNNER}
