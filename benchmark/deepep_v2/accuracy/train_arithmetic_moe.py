"""Trains a small Qwen3-MoE to solve generated word problems, and writes it with FP8 experts for serving.

    python3 benchmark/deepep_v2/accuracy/train_arithmetic_moe.py --out /opt/arithmetic-moe

About four minutes on one H200. Writes ``OUT/fp8`` (what is served), ``OUT/bf16`` (the same function with dequantised
experts), ``OUT/held_out.jsonl`` and ``OUT/train.json`` (accuracy of both on the held-out problems, in plain PyTorch).
Every step draws its batch from a seed; the learning rate follows whichever of steps and seconds is used up first.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import problems
import torch
import torch.nn.functional as F
from moe_model import Config, MoeLM, quantise_experts_, write_checkpoint


def _rows(task: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(all token ids one after another, tokens of each problem, tokens of its question) of (seed, count, max_value)."""
    flat: list[int] = []
    totals, questions = [], []
    for problem in problems.training(*task):
        question, solution = problem.prompt_ids(), problem.solution_ids()
        flat += question
        flat += solution
        totals.append(len(question) + len(solution))
        questions.append(len(question))
    return np.array(flat, dtype=np.int16), np.array(totals), np.array(questions)


def training_data(seed: int, count: int, max_value: int, processes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [count, length] int16 padded on the right, prompt lengths [count]) of ``count`` problems."""
    share = -(-count // max(1, processes))
    tasks = [(seed * 1000 + i, min(share, count - i * share), max_value) for i in range(processes) if i * share < count]
    if processes > 1:
        # Forked before the device is touched.
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            parts = pool.map(_rows, tasks)
    else:
        parts = [_rows(task) for task in tasks]
    flat, totals, questions = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts))
    ids = torch.full((len(totals), int(totals.max())), problems.PAD, dtype=torch.int16)
    ids[torch.arange(ids.shape[1]) < totals[:, None]] = flat
    return ids, questions


def loss_of(
    model: MoeLM, ids: torch.Tensor, prompts: torch.Tensor, balance: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss to minimise, mean cross entropy of the solution's tokens)."""
    length = int((ids != problems.PAD).sum(1).max())
    ids = ids[:, :length].long()
    states = model.hidden_states(ids[:, :-1])
    targets = ids[:, 1:]
    positions = torch.arange(length - 1, device=ids.device)
    wanted = (positions >= prompts[:, None] - 1) & (targets != problems.PAD)
    logits = model.lm_head(states[wanted]).float()
    entropy = F.cross_entropy(logits, targets[wanted])
    return entropy + balance * model.balance(), entropy.detach()


GENERATE_BATCH = 512


def _mixed_precision(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def generate(model: MoeLM, prompts: list[list[int]], max_new: int, device: torch.device) -> list[list[int]]:
    """Greedy continuations, without a key-value cache. Padding is on the right, out of causal attention's sight."""
    answers: list[list[int]] = []
    for begin in range(0, len(prompts), GENERATE_BATCH):
        batch = prompts[begin : begin + GENERATE_BATCH]
        lengths = torch.tensor([len(prompt) for prompt in batch], device=device)
        ids = torch.full((len(batch), int(lengths.max()) + max_new), problems.PAD, device=device)
        for row, prompt in zip(ids, batch):
            row[: len(prompt)] = torch.tensor(prompt, device=device)
        rows, done = torch.arange(len(batch), device=device), torch.zeros(len(batch), dtype=torch.bool, device=device)
        for _ in range(max_new):
            with _mixed_precision(device):
                states = model.hidden_states(ids[:, : int(lengths.max())])[rows, lengths - 1]
                token = model.lm_head(states).float().argmax(-1)
            ids[rows, lengths] = torch.where(done, ids[rows, lengths], token)
            lengths = lengths + (~done).long()
            done |= token == problems.EOS
            if bool(done.all()):
                break
        answers += [row[len(prompt) : end] for row, prompt, end in zip(ids.tolist(), batch, lengths.tolist())]
    return answers


def accuracy(model: MoeLM, tests: list[problems.Problem], device: torch.device) -> float:
    """Share of problems whose greedy answer is exactly right."""
    model.eval()
    found = generate(model, [p.prompt_ids() for p in tests], max(len(p.solution) for p in tests) + 4, device)
    model.train()
    return sum(problems.read_answer(tokens) == p.answer for tokens, p in zip(found, tests)) / len(tests)


def train(args: argparse.Namespace) -> dict:
    torch.manual_seed(args.seed)
    # cuDNN of torch 2.14.1 rejects the backward of causal attention at this head size.
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device(args.device)
    started = time.monotonic()
    ids, prompts = training_data(args.seed, args.problems, args.max_value, args.processes)
    ids, prompts = ids.to(device), prompts.to(device)
    print(f"{len(ids)} problems of up to {ids.shape[1]} tokens in {time.monotonic() - started:.1f} s", flush=True)
    config = Config(
        problems.VOCAB_SIZE,
        hidden=args.hidden,
        expert=args.expert,
        layers=args.layers,
        experts=args.experts,
        topk=args.topk,
    )
    model = MoeLM(config).to(device)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    tests = problems.held_out(max_value=args.max_value)
    generator = torch.Generator().manual_seed(args.seed)
    begin, step, losses = time.monotonic(), 0, []
    while True:
        progress = max(step / args.steps, (time.monotonic() - begin) / args.seconds)
        if progress >= 1:
            break
        rate = args.lr * min(1.0, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = torch.randint(len(ids), (args.batch,), generator=generator).to(device)
        with _mixed_precision(device):
            loss, entropy = loss_of(model, ids[rows], prompts[rows], args.balance)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % args.report == 0 or step == 1:
            losses.append(float(entropy))
            balance = float(model.balance().detach())
            line = f"step {step} {time.monotonic() - begin:.0f} s loss {losses[-1]:.4f} balance {balance:.3f}"
            if step % (args.report * 5) == 0:
                line += f" exact {accuracy(model, tests[: args.probe], device):.3f}"
            print(line, flush=True)
    report = {"steps": step, "seconds": time.monotonic() - begin, "losses": losses, "seed": args.seed}
    out = Path(args.out)
    if not args.skip_eval:
        report["accuracy_bf16"] = accuracy(model, tests, device)
    quantise_experts_(model)
    if not args.skip_eval:
        report["accuracy_fp8_experts"] = accuracy(model, tests, device)
    for name, fp8 in (("fp8", True), ("bf16", False)):
        write_checkpoint(model, out / name, fp8, problems.BOS, problems.EOS, problems.PAD)
        problems.write_tokenizer(out / name)
    problems.write_problems(out / "held_out.jsonl", tests)
    report["total_seconds"] = time.monotonic() - started
    (out / "train.json").write_text(json.dumps(report) + "\n")
    print({k: v for k, v in report.items() if k != "losses"}, flush=True)
    return report


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seconds", type=float, default=190, help="training time, without data and evaluation")
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--problems", type=int, default=500_000)
    parser.add_argument("--max-value", type=int, default=problems.MAX_VALUE)
    parser.add_argument("--processes", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the router's balance loss")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--expert", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--report", type=int, default=100)
    parser.add_argument("--probe", type=int, default=200, help="problems of the accuracy printed while training")
    parser.add_argument("--skip-eval", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
