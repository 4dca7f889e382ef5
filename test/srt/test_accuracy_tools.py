"""The accuracy experiment's tools: problems, tokenizer, the trained model's checkpoint, scoring, the planted fault."""

import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ACCURACY = ROOT / "benchmark" / "deepep_v2" / "accuracy"
sys.path.insert(0, str(ACCURACY.parent))
sys.path.insert(0, str(ACCURACY))

import eval_paths  # noqa: E402
import problems  # noqa: E402


def number(words):
    return int("".join(words))


def test_every_equation_and_answer_is_right():
    rng = random.Random(3)
    for _ in range(300):
        problem = problems.make_problem(rng)
        *equations, final = " ".join(problem.solution).removesuffix(" .").split(" . ")
        for line in equations:
            left, sign, right, result = re.fullmatch(r"([\d ]+) ([-+*/]) ([\d ]+) = ([\d ]+)", line).groups()
            left, right, result = (number(part.split()) for part in (left, right, result))
            assert {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[sign] == result
            assert 0 <= result <= problems.MAX_VALUE
        assert result == problem.answer and final == "answer " + " ".join(str(problem.answer))
        assert 2 <= len(equations) <= 8


def test_held_out_problems_are_fixed_distinct_and_never_trained_on():
    tests = problems.held_out()
    assert len(tests) == len({p.question for p in tests}) == 1319
    assert tests[:50] == problems.held_out(50)
    # Small values make collisions likely.
    excluded = {p.question for p in problems.held_out(max_value=9)}
    found = [p.question for p in problems.training(1, 3000, max_value=9)]
    assert len(found) == 3000 and not excluded & set(found)


@pytest.mark.parametrize(
    ("text", "answer"),
    [("4 + 3 = 7 . answer 1 2 7 .", 127), ("answer 12 .", 12), ("4 + 3 = 7 .", None), ("answer . 3", None), ("", None)],
)
def test_answer_is_read_from_text(text, answer):
    assert problems.read_answer_text(text) == answer


def test_tokenizer_gives_the_training_ids(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    problems.write_tokenizer(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for problem in problems.held_out(30):
        text = " ".join(problem.question + problem.solution)
        ids = problems.encode(problem.question + problem.solution)
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.encode(re.sub(r"(?<=\d) (?=\d)", "", text)).ids == ids
        assert problems.read_answer_text(tokenizer.decode(ids)) == problem.answer
    assert max(problems.IDS.values()) < problems.VOCAB_SIZE and problems.VOCAB_SIZE % 64 == 0


def micro_config():
    import moe_model

    return moe_model.Config(
        problems.VOCAB_SIZE, hidden=256, expert=256, layers=1, heads=4, kv_heads=2, experts=4, topk=2
    )


def test_widths_that_deepep_or_the_blocks_cannot_take_are_refused():
    import moe_model

    for sizes in ({"hidden": 384}, {"expert": 128}, {"expert": 320}):
        with pytest.raises(ValueError, match="must divide"):
            moe_model.Config(64, **sizes)


def test_checkpoint_is_transformers_own_model(tmp_path):
    import moe_model
    import torch
    from safetensors.torch import load_file
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = moe_model.MoeLM(micro_config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
            parameter.copy_(parameter.to(torch.bfloat16))
    moe_model.quantise_experts_(model)
    for name, fp8 in (("fp8", True), ("bf16", False)):
        moe_model.write_checkpoint(model, tmp_path / name, fp8, problems.BOS, problems.EOS, problems.PAD)
    ids = torch.tensor([problems.held_out(1)[0].prompt_ids()])
    theirs = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32).eval()
    with torch.no_grad():
        wanted, ours = theirs(ids).logits, model(ids)
    # The bf16 checkpoint rounds the dequantised experts once more.
    assert float((ours - wanted).norm() / wanted.norm()) < 1e-2
    assert float((ours.argmax(-1) == wanted.argmax(-1)).float().mean()) > 0.95
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    assert stored[name].dtype == torch.float8_e4m3fn
    back = moe_model.dequantise_block(stored[name], stored[name + "_scale_inv"])
    assert torch.equal(back, model.layers[0].mlp.gate_up[3, 256:].detach())
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_training_lowers_the_loss_and_writes_what_is_served(tmp_path):
    import train_arithmetic_moe as training

    sizes = "--hidden 256 --layers 1 --experts 2 --topk 1 --problems 40 --processes 1 --batch 2 --max-value 9"
    arguments = (
        f"--out {tmp_path} --device cpu --steps 12 --seconds 60 --report 6 --probe 1 --skip-eval --lr 0.02 {sizes}"
    )
    report = training.train(training.parse(arguments.split()))
    assert report["steps"] == 12 and report["losses"][-1] < report["losses"][0] - 0.3
    assert report["losses"][0] == pytest.approx(math.log(problems.VOCAB_SIZE), rel=0.1)
    assert {p.name for p in tmp_path.iterdir()} == {"fp8", "bf16", "held_out.jsonl", "train.json"}
    assert len((tmp_path / "held_out.jsonl").read_text().splitlines()) == 1319


def test_quantiles_of_logprob_differences():
    assert eval_paths.quantiles([0.0] * 100, [i / 100 for i in range(100)]) == (0.495, 0.99)
    assert eval_paths.quantiles([-1.0], [-1.0]) == (0.0, 0.0)
    with pytest.raises(ValueError, match="1 logprobs, the reference has 2"):
        eval_paths.quantiles([0.0, 1.0], [0.0])


def test_paths_that_finished_are_recorded_when_others_fail_or_the_run_ends(tmp_path, monkeypatch):
    def evaluate(name, args, tests, fleet):
        if name == "labels":
            raise TimeoutError("too late")
        if name == "psum":
            raise KeyboardInterrupt
        outcomes = {"nonexpanded": (7, 6, [-1.0, -2.0], 3.0), "psum_sync_free": (5, 4, [-1.0, -2.5], 3.0)}
        return eval_paths.Outcome(*outcomes[name])

    monkeypatch.setattr(eval_paths, "evaluate", evaluate)
    date = "2026-01-01T00:00:00+00:00"
    monkeypatch.setattr(eval_paths, "stamp", lambda: dict(gpu="g", versions={}, commit="c", date=date))
    order = ["psum_sync_free", "labels", "nonexpanded"]
    common = ["--model", str(tmp_path / "fp8"), "--limit", "10", "--parallel", "1", "--device", "cpu"]

    def rows(out):
        lines = (tmp_path / out / "accuracy.jsonl").read_text().splitlines()
        names = ("path", "correct", "correct_prefill", "total", "logprob_diff_p99")
        return [tuple(r[name] for name in names) for r in map(json.loads, lines)]

    arguments = eval_paths.parse([*common, "--out", str(tmp_path / "a"), "--paths", *order])
    assert eval_paths.run(arguments) == 1
    assert rows("a") == [("psum_sync_free", 5, 4, 10, 0.0), ("nonexpanded", 7, 6, 10, 0.5)]
    arguments = eval_paths.parse([*common, "--out", str(tmp_path / "b"), "--paths", "nonexpanded", "psum"])
    with pytest.raises(KeyboardInterrupt):
        eval_paths.run(arguments)
    assert rows("b") == [("nonexpanded", 7, 6, 10, 0.0)]


def test_a_solution_counts_when_prefill_ranks_every_token_of_it_first(tmp_path):
    tests = problems.held_out(3, max_value=99)

    class Server:
        """Answers as SGLang does: one entry a prompt token, none for the first; the second problem has one miss."""

        def post(self, where, body, timeout_s):
            replies = []
            for number, ids in enumerate(body["input_ids"]):
                given = [[None, ids[0], None], *([-0.5, token, None] for token in ids[1:])]
                best = [None, *([[-0.5, token, None]] for token in ids[1:])]
                if number == 1:
                    best[-2] = [[-0.1, ids[-2] + 1, None]]
                replies.append({"meta_info": {"input_token_logprobs": given, "input_top_logprobs": best}})
            return replies

    ranked_first, logprobs = eval_paths.score_solutions(Server(), tests, 1.0)
    assert ranked_first == 2
    assert logprobs == [-0.5] * sum(len(test.solution_ids()) for test in tests)


def test_the_planted_fault_has_to_lose_answers_and_prefill_alike(capsys):
    outcomes = {"psum": (95, 90, [], 1.0), eval_paths.BROKEN: (90, 60, [], 1.0)}
    eval_paths.print_drop({name: eval_paths.Outcome(*o) for name, o in outcomes.items()}, 100)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("correct: broken fold loses 5.0 points") and first.endswith("MISS")
    assert second.startswith("correct_prefill: broken fold loses 30.0 points") and second.endswith("ok")


@pytest.mark.slow
def test_planted_fault_drops_the_row_weights():
    code = (
        "import demo_break_fold; demo_break_fold.register(); import torch; "
        "from sglang.srt.layers.moe.ep_moe import kernels, kernels_reference; "
        "x = torch.ones(128, 512, dtype=torch.bfloat16); w = torch.full((128,), 0.5); "
        "p = torch.tensor([128], dtype=torch.int32); "
        "print(*[float(k.swiglu_quant_expanded(x, w, p, 128)[1][0, 0]) for k in (kernels, kernels_reference)])"
    )
    env = os.environ | {"PYTHONPATH": str(eval_paths.PLANTED_FAULT), "SGLANG_OVERLAY": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    faulty, right = map(float, run.stdout.split()[-2:])
    assert "broken fold" in run.stderr and faulty == pytest.approx(2 * right)
