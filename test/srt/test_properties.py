"""Random layers: expanded prefill equals the dense float64 computation and the non-expanded path, whatever the sizes.

Ranks stay alive over all examples, as a server's do, so what one example leaves behind would show in the next.
"""

from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from layer_cases import Case, check_case
from moe_layer import Shape
from rank_processes import RankPool

WORLDS = (1, 2, 4)
# Interpreted, SGLang's own permutes of FP8 rows take seconds: few FP8 examples take every path.
EVERY_PATH = ("nonexpanded", "labels", "psum", "psum_sync_free")
FP8_PATHS = ("psum", "psum_sync_free")


@pytest.fixture(scope="module")
def pools():
    with ExitStack() as stack:
        yield {world: stack.enter_context(RankPool(world)) for world in WORLDS}


@st.composite
def cases(draw, fp8):
    world = draw(st.sampled_from(WORLDS))
    # Distinct (experts, topk, alignment) need layers of their own, so few of them are drawn.
    experts, topk = draw(st.sampled_from(((4, 1), (8, 2), (8, 5), (16, 8))))
    tokens = draw(st.lists(st.sampled_from((0, 1, 2, 3, 5, 8, 13)), min_size=world, max_size=world))
    return Case(
        shape=Shape(experts=experts, topk=topk),
        fp8=fp8,
        alignment=draw(st.sampled_from((64, 128, 256))),
        tokens=tuple(tokens),
        drop=draw(st.sampled_from((0.0, 0.3, 0.9, 1.0))),
        routing=draw(st.sampled_from(("spread", "one_expert", "one_rank"))),
        weights=draw(st.sampled_from(("plain", "signed", "zeros", "tiny", "large"))),
        seed=draw(st.integers(0, 10_000)),
    )


def examples(count):
    """A fixed set of examples, so that a run can be repeated, shrunk to the smallest that fails."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def check(pools, case, paths):
    # SGLang's own scatter takes segments of whole 128-row blocks only.
    paths = tuple(path for path in paths if path != "nonexpanded" or case.alignment % 128 == 0)
    pools[len(case.tokens)].run(check_case, case, paths)


@examples(25)
@given(case=cases(fp8=False))
def test_bf16_layers(pools, case):
    check(pools, case, EVERY_PATH)


@examples(25)
@given(case=cases(fp8=True))
def test_fp8_layers(pools, case):
    check(pools, case, FP8_PATHS)


@examples(3)
@given(case=cases(fp8=True))
def test_fp8_layers_on_every_path(pools, case):
    check(pools, case, EVERY_PATH)
