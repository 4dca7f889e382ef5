"""The same seeded prompts for every path: greedy tokens, and the logprob of each given token (teacher forcing)."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_deepep_v2.ab.servers import Server

NUM_PROMPTS = 50
FIRST_TOKEN = 10
_LONG_EVERY = 20
_LONGER_BY = 32


@dataclass
class Probe:
    """What one path answered to one prompt.

    Attributes:
        prompt_logprobs: of each prompt token but the first, given the true tokens before it.
        tokens: the greedy continuation.
        logprobs: of each of `tokens`.
        margins: by how much each of `tokens` led the second-best token, in logprob.
    """

    prompt_logprobs: list[float]
    tokens: list[int]
    logprobs: list[float]
    margins: list[float]


def longest_prompt(chunk: int) -> int:
    """Most tokens of a prompt that `make_prompts` makes."""
    return chunk + _LONGER_BY


def make_prompts(vocab: int, chunk: int, seed: int = 0, num_prompts: int = NUM_PROMPTS) -> list[list[int]]:
    """`num_prompts` token-id prompts; every twentieth is longer than `chunk` tokens, the others 4 to 24 tokens long."""
    rng = random.Random(seed)
    prompts = []
    for index in range(num_prompts):
        length = chunk + rng.randint(1, _LONGER_BY) if index % _LONG_EVERY == 0 else rng.randint(4, 24)
        prompts.append([rng.randrange(FIRST_TOKEN, vocab) for _ in range(length)])
    return prompts


def probe_server(
    server: Server, prompts: Sequence[Sequence[int]], max_new_tokens: int, timeout_s: float
) -> list[Probe]:
    """All prompts in one batch request, so that every path sees the same batches.

    Raises:
        ServerFailed: the server failed, or dropped a prompt or a token.
    """
    body = {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    answers = server.post("/generate", body, timeout_s)
    if len(answers) != len(prompts):
        raise server.failed(f"answered {len(answers)} of {len(prompts)} prompts")
    probes = [_parse_answer(answer["meta_info"]) for answer in answers]
    for index, (prompt, probe) in enumerate(zip(prompts, probes, strict=True)):
        if len(probe.prompt_logprobs) != len(prompt) - 1 or len(probe.tokens) != max_new_tokens:
            raise server.failed(
                f"returned {len(probe.prompt_logprobs)} logprobs and {len(probe.tokens)} tokens for prompt {index} of "
                f"{len(prompt)} tokens and {max_new_tokens} new ones"
            )
    return probes


def _parse_answer(meta: dict) -> Probe:
    # Entries are (logprob, token id, text); a prompt's first token has no logprob.
    given, output = meta["input_token_logprobs"], meta["output_token_logprobs"]
    return Probe(
        prompt_logprobs=[entry[0] for entry in given if entry[0] is not None],
        tokens=[entry[1] for entry in output],
        logprobs=[entry[0] for entry in output],
        margins=[best[0][0] - best[1][0] for best in meta["output_top_logprobs"]],
    )


def save_probes(file: Path, probes: Sequence[Probe]) -> None:
    """Write probes as JSON, whole or not at all."""
    scratch = file.with_suffix(".tmp")
    scratch.write_text(json.dumps([asdict(probe) for probe in probes]))
    scratch.replace(file)


def load_probes(file: Path) -> list[Probe]:
    """Read what `save_probes` wrote."""
    return [Probe(**entry) for entry in json.loads(file.read_text())]
