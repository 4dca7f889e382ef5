"""Hugging Face transformers on the same weights, FP8 dequantised, in fp32: an oracle that shares no code with SGLang.

Run as a program, so that the command line itself never imports torch:
`python -m sglang_deepep_v2.ab.reference MODEL PROMPTS.json OUT.json NEW_TOKENS`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sglang_deepep_v2.ab.checkpoints import dequantize_blocks
from sglang_deepep_v2.ab.probe import Probe, save_probes


def supports(model: str) -> bool:
    """Whether transformers has the architecture in its own code."""
    config = Path(model) / "config.json"
    return config.is_file() and json.loads(config.read_text()).get("model_type") == "qwen3_moe"


def probe_reference(model: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Probe]:
    """What transformers answers to each prompt: greedy tokens and teacher-forced logprobs, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        _write_dequantized(model, Path(scratch))
        network = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()
    probes = []
    with torch.inference_mode():
        for prompt in prompts:
            ids, tokens, logprobs, margins = list(prompt), [], [], []
            output = network(torch.tensor([ids]), use_cache=True)
            given = output.logits[0].log_softmax(-1)
            prompt_logprobs = given[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
            last = given[-1]
            for step in range(max_new_tokens):
                best = last.topk(2)
                tokens.append(int(best.indices[0]))
                logprobs.append(float(best.values[0]))
                margins.append(float(best.values[0] - best.values[1]))
                if step + 1 < max_new_tokens:
                    output = network(
                        torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True
                    )
                    last = output.logits[0, -1].log_softmax(-1)
            probes.append(Probe(prompt_logprobs, tokens, logprobs, margins))
    return probes


def _write_dequantized(model: Path, target: Path) -> None:
    """The checkpoint in fp32 without its quantisation, as transformers reads it."""
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    weights = {
        name: tensor for shard in sorted(model.glob("*.safetensors")) for name, tensor in load_file(shard).items()
    }
    plain = {}
    for name, tensor in weights.items():
        if name.endswith("_scale_inv"):
            continue
        scale = weights.get(name + "_scale_inv")
        plain[name] = tensor.float() if scale is None else dequantize_blocks(tensor, scale)
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Read prompts, write probes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("new_tokens", type=int)
    args = parser.parse_args()
    save_probes(args.out, probe_reference(args.model, json.loads(args.prompts.read_text()), args.new_tokens))


if __name__ == "__main__":
    main()
