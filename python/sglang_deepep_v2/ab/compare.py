"""The rule that decides whether two paths agree.

Two correct paths round differently, so logprobs may differ by a stated bound. A greedy token may differ only where the
baseline's own lead of the best token over the second is within that bound; after such a token the contexts differ and
nothing more is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_deepep_v2.ab.probe import Probe


@dataclass(frozen=True)
class Difference:
    """One place where two paths disagree beyond the bound.

    Attributes:
        kind: `logprob` or `token`.
        prompt: index of the prompt.
        position: token index in prompt plus continuation.
        baseline, candidate: the two logprobs, or the two token ids.
        size: the logprob difference, or the baseline's margin at the differing token.
    """

    kind: str
    prompt: int
    position: int
    baseline: float
    candidate: float
    size: float

    def __str__(self) -> str:
        where = f"prompt {self.prompt}, token {self.position}"
        if self.kind == "token":
            return (
                f"{where}: greedy token {self.candidate:.0f} instead of {self.baseline:.0f}, leading by {self.size:.4f}"
            )
        return f"{where}: logprob {self.candidate:.4f} instead of {self.baseline:.4f}, apart by {self.size:.4f}"


@dataclass
class Comparison:
    """How a candidate's answers relate to the baseline's.

    Attributes:
        bound: largest logprob difference, and largest margin of a differing greedy token, that counts as agreement.
        outliers: share of the logprobs that may lie beyond the bound, for models whose router has near-ties.
        prompts: how many prompts were compared.
        greedy_equal: how many continuations are equal token by token.
        logprobs: how many logprobs were compared.
        largest, median, p99: of the absolute logprob differences.
        differences: everything beyond the bound, the largest first.
    """

    bound: float
    outliers: float
    prompts: int
    greedy_equal: int
    logprobs: int
    largest: float
    median: float
    p99: float
    differences: list[Difference] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return len(self.differences) <= self.outliers * self.logprobs


def compare_probes(
    baseline: Sequence[Probe], candidate: Sequence[Probe], bound: float, outliers: float = 0.0
) -> Comparison:
    """Compare two paths' answers to the same prompts.

    Raises:
        ValueError: the two do not hold the same prompts, or there is nothing to compare.
    """
    if len(baseline) != len(candidate):
        raise ValueError(f"baseline answered {len(baseline)} prompts, the candidate {len(candidate)}")
    found: list[Difference] = []
    sizes: list[float] = []
    greedy_equal = 0

    def note_logprobs(prompt: int, offset: int, ours: Sequence[float], theirs: Sequence[float]) -> None:
        for index, (expected, got) in enumerate(zip(ours, theirs, strict=True)):
            size = abs(expected - got)
            # A NaN compares false with everything, and is never agreement.
            if not size <= bound:
                found.append(Difference("logprob", prompt, offset + index, expected, got, size))
            sizes.append(size)

    for prompt, (ours, theirs) in enumerate(zip(baseline, candidate, strict=True)):
        if len(ours.prompt_logprobs) != len(theirs.prompt_logprobs) or len(ours.tokens) != len(theirs.tokens):
            raise ValueError(f"prompt {prompt} has other lengths in the candidate's answers")
        note_logprobs(prompt, 1, ours.prompt_logprobs, theirs.prompt_logprobs)
        start = len(ours.prompt_logprobs) + 1
        pairs = list(zip(ours.tokens, theirs.tokens, strict=True))
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        note_logprobs(prompt, start, ours.logprobs[:common], theirs.logprobs[:common])
        if common == len(pairs):
            greedy_equal += 1
        elif not ours.margins[common] <= bound:
            token = Difference("token", prompt, start + common, *pairs[common], ours.margins[common])
            found.append(token)
    if not sizes:
        raise ValueError("there is no logprob to compare")
    ordered = sorted(sizes, key=_nan_last)
    return Comparison(
        bound=bound,
        outliers=outliers,
        prompts=len(baseline),
        greedy_equal=greedy_equal,
        logprobs=len(sizes),
        largest=ordered[-1],
        median=ordered[len(ordered) // 2],
        p99=ordered[int(0.99 * (len(ordered) - 1))],
        differences=sorted(found, key=lambda difference: _nan_last(difference.size), reverse=True),
    )


def _nan_last(value: float) -> float:
    return float("inf") if value != value else value
