"""The rule by which two paths agree, and the prompts and log lines it stands on."""

import math

import pytest

from sglang_deepep_v2.ab.compare import compare_probes
from sglang_deepep_v2.ab.paths import PATHS, select_paths
from sglang_deepep_v2.ab.probe import NUM_PROMPTS, Probe, load_probes, make_prompts, save_probes
from sglang_deepep_v2.ab.servers import PrefillLine, check_prefill_lines, read_prefill_lines

BOUND = 0.1


def probe(prompt=(-1.0, -2.0), tokens=(5, 6, 7), logprobs=(-0.5, -0.6, -0.7), margins=(1.0, 0.05, 1.0)) -> Probe:
    return Probe(list(prompt), list(tokens), list(logprobs), list(margins))


def test_equal_answers_agree():
    result = compare_probes([probe()], [probe()], BOUND)
    assert result.agrees and result.greedy_equal == 1 and result.largest == 0.0 and result.logprobs == 5


@pytest.mark.parametrize(("shift", "agrees"), [(0.09, True), (0.11, False), (-0.11, False), (math.nan, False)])
def test_a_prompt_logprob_may_differ_by_the_bound(shift, agrees):
    result = compare_probes([probe()], [probe(prompt=(-1.0, -2.0 + shift))], BOUND)
    assert result.agrees is agrees
    if not agrees:
        found = result.differences[0]
        assert (found.kind, found.prompt, found.position, found.baseline) == ("logprob", 0, 2, -2.0)


def test_a_logprob_of_the_continuation_counts_too():
    result = compare_probes([probe()], [probe(logprobs=(-0.5, -0.6, -0.9))], BOUND)
    assert not result.agrees and result.differences[0].position == 5
    assert result.largest == pytest.approx(0.2)


def test_a_greedy_token_may_differ_within_the_margin_and_ends_the_comparison():
    # Token 1 was led by 0.05 only; what follows has another context and is not compared.
    result = compare_probes([probe()], [probe(tokens=(5, 9, 9), logprobs=(-0.5, -3.0, -3.0))], BOUND)
    assert result.agrees and result.greedy_equal == 0 and result.logprobs == 3


def test_a_greedy_token_may_not_differ_beyond_the_margin():
    result = compare_probes([probe()], [probe(tokens=(9, 9, 9))], BOUND)
    assert not result.agrees
    found = result.differences[0]
    assert (found.kind, found.position, found.baseline, found.candidate, found.size) == ("token", 3, 5, 9, 1.0)
    assert "prompt 0, token 3: greedy token 9 instead of 5" in str(found)


def test_the_largest_difference_comes_first_and_nan_before_all():
    theirs = probe(prompt=(-1.2, math.nan), logprobs=(-0.9, -0.6, -0.7))
    result = compare_probes([probe()], [theirs], BOUND)
    assert math.isnan(result.differences[0].size) and result.differences[1].size == pytest.approx(0.4)
    assert math.isnan(result.largest)


def test_outliers_are_a_share_of_the_logprobs():
    ours, theirs = [probe()] * 20, [probe(prompt=(-1.5, -2.0))] + [probe()] * 19
    assert not compare_probes(ours, theirs, BOUND).agrees
    assert compare_probes(ours, theirs, BOUND, outliers=0.01).agrees
    assert not compare_probes(ours, theirs, BOUND, outliers=0.009).agrees


def test_dropped_prompts_and_tokens_are_errors():
    with pytest.raises(ValueError, match="2 prompts, the candidate 1"):
        compare_probes([probe()] * 2, [probe()], BOUND)
    with pytest.raises(ValueError, match="prompt 0 has other lengths"):
        compare_probes([probe()], [probe(tokens=(5,), logprobs=(-0.5,), margins=(1.0,))], BOUND)
    with pytest.raises(ValueError, match="no logprob"):
        compare_probes([], [], BOUND)


def test_prompts_are_seeded_and_some_exceed_the_chunk():
    prompts = make_prompts(vocab=512, chunk=256)
    assert len(prompts) == NUM_PROMPTS == 50
    assert prompts == make_prompts(vocab=512, chunk=256) != make_prompts(vocab=512, chunk=256, seed=1)
    assert sum(len(prompt) > 256 for prompt in prompts) >= 3
    assert all(0 < token < 512 for prompt in prompts for token in prompt)


def test_probes_survive_the_disk(tmp_path):
    probes = [probe(), probe(prompt=(-3.25,))]
    save_probes(tmp_path / "p.json", probes)
    assert load_probes(tmp_path / "p.json") == probes


LOG = """\
[2026-11-30 18:50:40] unrelated pipeline=psum
[2026-11-30 18:50:40 TP1 EP1] DeepEP v2 prefill: pipeline=psum sync=cpu transport=reference reason=because; sync: x
[2026-11-30 18:50:41 TP0 EP0] DeepEP v2 prefill: pipeline=labels sync=cpu transport=deep_ep reason=alignment 64
[2026-11-30 18:50:42 TP0 EP0] Prefill batch, #new-seq: 1
"""


def test_prefill_lines_are_read_per_process(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(LOG)
    assert read_prefill_lines(log) == [
        PrefillLine("TP0 EP0", "labels", "cpu", "deep_ep", "alignment 64"),
        PrefillLine("TP1 EP1", "psum", "cpu", "reference", "because; sync: x"),
    ]


def test_a_single_process_logs_without_ranks(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("[2026-11-30] DeepEP v2 prefill: pipeline=psum sync=free transport=deep_ep dtype=bf16 reason=a; b\n")
    assert read_prefill_lines(log) == [PrefillLine("", "psum", "free", "deep_ep", "a; b")]


def test_a_path_must_run_its_pipeline_on_every_rank():
    psum = [PrefillLine(f"TP{rank}", "psum", "cpu", "reference") for rank in range(2)]
    assert check_prefill_lines(PATHS["psum"], psum, 2) is None
    assert "1 of 2 ranks" in check_prefill_lines(PATHS["psum"], psum[:1], 2)
    labels = [psum[0], PrefillLine("TP1", "labels", "cpu", "reference", "alignment 64")]
    assert "TP1 ran pipeline=labels" in check_prefill_lines(PATHS["psum"], labels, 2)
    assert "alignment 64" in check_prefill_lines(PATHS["psum"], labels, 2)
    assert "sync=cpu" in check_prefill_lines(PATHS["psum_sync_free"], psum, 2)
    assert check_prefill_lines(PATHS["none"], [], 2) is None


def test_the_reference_transport_on_a_gpu_is_another_path():
    reference = [PrefillLine("TP0", "psum", "cpu", "reference")]
    assert "TP0 ran on a GPU with transport=reference" in check_prefill_lines(PATHS["psum"], reference, 1, on_gpu=True)
    deep_ep = [PrefillLine("TP0", "psum", "cpu", "deep_ep")]
    assert check_prefill_lines(PATHS["psum"], deep_ep, 1, on_gpu=True) is None


def test_paths_are_selected_in_order_and_refused_with_a_reason():
    assert [path.name for path in select_paths("psum, labels", cpu=True, ranks=2)] == ["psum", "labels"]
    with pytest.raises(ValueError, match="unknown path 'fast'"):
        select_paths("fast", cpu=True, ranks=2)
    with pytest.raises(ValueError, match="sglang_expanded needs a GPU"):
        select_paths("sglang_expanded", cpu=True, ranks=2)
    with pytest.raises(ValueError, match="at least 2 ranks, --tp is 1"):
        select_paths("deepep_v1", cpu=False, ranks=1)
    with pytest.raises(ValueError, match="names no path"):
        select_paths(" ,", cpu=True, ranks=2)
