"""Generated multi-step arithmetic word problems and their tokenizer. Seeded: every process makes the same ones.

A problem tells a story of two to four changes to a count, among facts that do not matter; its solution writes one
equation a change (two where a product comes first) and ends with ``answer N .``. Numbers are written digit by digit.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SEED = 20260
NUM_HELD_OUT = 1319
MAX_VALUE = 199

NAMES = "Ada Ben Cleo Dan Eva Finn Gia Hugo Iris Jon Kim Leo Mia Noa Omar Pia Rosa Sam Tess Uma Vic Wen Zoe".split()
ITEMS = "apples books coins cards shells stamps marbles pencils stones tickets beads eggs".split()
_PHRASES = (
    "has . finds more gives to loses buys boxes with each gets as many again so the number doubles keeps only one of "
    "equal parts sells bags how does have now ? in total question solution answer away"
)
_SYMBOLS = "0 1 2 3 4 5 6 7 8 9 + - * / =".split()
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(4)
WORDS = [*SPECIALS, *_SYMBOLS, *dict.fromkeys(_PHRASES.split()), *ITEMS, *NAMES]
IDS = {word: index for index, word in enumerate(WORDS)}
# Rounded up: tensor-parallel vocabularies are padded to a multiple of 64.
VOCAB_SIZE = -(-len(WORDS) // 64) * 64


@dataclass(frozen=True)
class Problem:
    """Words of the question (ends with ``solution``) and of the solution (ends with ``answer N .``), and the answer."""

    question: tuple[str, ...]
    solution: tuple[str, ...]
    answer: int

    def prompt_ids(self) -> list[int]:
        return [BOS, *encode(self.question)]

    def solution_ids(self) -> list[int]:
        return [*encode(self.solution), EOS]


def encode(words) -> list[int]:
    return [IDS[word] for word in words]


def digits(number: int) -> list[str]:
    return list(str(number))


def make_problem(rng: random.Random, max_value: int = MAX_VALUE) -> Problem:
    """One problem; every intermediate value lies in 0..max_value."""
    name, friend = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    value = rng.randint(2, max(3, max_value // 4))
    story = [name, "has", *digits(value), item, "."]
    solution: list[str] = []

    def equation(left: int, sign: str, right: int, result: int) -> None:
        solution.extend([*digits(left), sign, *digits(right), "=", *digits(result), "."])

    if rng.random() < 0.4:
        story += [friend, "has", *digits(rng.randint(2, max_value)), item, "."]
    steps = rng.randint(2, 4)
    while steps:
        kind = rng.choice(("find", "give", "lose", "boxes", "double", "share", "bags"))
        small, group = rng.randint(2, 9), rng.randint(2, 9)
        if kind == "find" and value + 2 <= max_value:
            amount = rng.randint(1, min(99, max_value - value))
            story += [name, "finds", *digits(amount), "more", "."]
            equation(value, "+", amount, value + amount)
            value += amount
        elif kind in ("give", "lose") and value >= 2:
            amount = rng.randint(1, min(99, value - 1))
            story += [name, "gives", *digits(amount), "to", friend, "."] if kind == "give" else []
            story += [name, "loses", *digits(amount), "."] if kind == "lose" else []
            equation(value, "-", amount, value - amount)
            value -= amount
        elif kind == "boxes" and value + small * group <= max_value:
            story += [name, "buys", *digits(small), "boxes", "with", *digits(group), "each", "."]
            equation(small, "*", group, small * group)
            equation(value, "+", small * group, value + small * group)
            value += small * group
        elif kind == "bags" and small * group < value:
            story += [name, "sells", *digits(small), "bags", "with", *digits(group), "each", "."]
            equation(small, "*", group, small * group)
            equation(value, "-", small * group, value - small * group)
            value -= small * group
        elif kind == "double" and 2 <= value <= max_value // 2:
            story += [name, "gets", "as", "many", "again", "so", "the", "number", "doubles", "."]
            equation(value, "+", value, 2 * value)
            value *= 2
        elif kind == "share" and value % small == 0 and value > small:
            story += [name, "keeps", "only", "one", "of", *digits(small), "equal", "parts", "."]
            equation(value, "/", small, value // small)
            value //= small
        else:
            continue
        steps -= 1
    question = ["question", *story, "how", "many", item, "does", name, "have", "now", "?", "solution"]
    solution += ["answer", *digits(value), "."]
    return Problem(tuple(question), tuple(solution), value)


def held_out(count: int = NUM_HELD_OUT, max_value: int = MAX_VALUE) -> list[Problem]:
    """The evaluation problems: distinct, from their own seed; ``training`` never yields one of their questions."""
    rng, seen, problems = random.Random(HELD_OUT_SEED), set(), []
    while len(problems) < count:
        problem = make_problem(rng, max_value)
        if problem.question not in seen:
            seen.add(problem.question)
            problems.append(problem)
    return problems


def training(seed: int, count: int, max_value: int = MAX_VALUE) -> Iterator[Problem]:
    """``count`` training problems of a seed, none of them held out."""
    excluded = {problem.question for problem in held_out(max_value=max_value)}
    rng = random.Random(seed)
    while count:
        problem = make_problem(rng, max_value)
        if problem.question not in excluded:
            count -= 1
            yield problem


def read_answer(tokens: list[int]) -> int | None:
    """The number that generated token ids give as the answer, or None."""
    return read_answer_text(" ".join(WORDS[token] if token < len(WORDS) else "<unk>" for token in tokens))


def read_answer_text(text: str) -> int | None:
    """The number after ``answer``, its digits apart or not, or None."""
    found = re.search(r"answer((?: ?\d)+)", text)
    return int(found[1].replace(" ", "")) if found else None


def write_tokenizer(folder: Path) -> None:
    """A word-level tokenizer that splits numbers into digits; ``encode`` gives the same ids."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel(vocab=IDS, unk_token="<unk>"))
    split = pre_tokenizers.Split(Regex(r"<\w+>|[A-Za-z]+|\d|[^\w\s]"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": 2048,
        "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_problems(file: Path, problems: list[Problem]) -> None:
    """JSONL: question, solution (words joined by blanks) and answer."""
    lines = [
        json.dumps({"question": " ".join(p.question), "solution": " ".join(p.solution), "answer": p.answer})
        for p in problems
    ]
    file.write_text("\n".join(lines) + "\n")
