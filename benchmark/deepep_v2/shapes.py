"""MoE layer shapes of public model configurations, and the model configuration a worker's SGLang starts from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """One rank's MoE layer: hidden and expert-intermediate width, local experts, experts a token selects."""

    hidden: int
    intermediate: int
    local_experts: int
    topk: int

    @property
    def label(self) -> str:
        return f"H{self.hidden} I{self.intermediate} E{self.local_experts} top{self.topk}"


# hidden, moe_intermediate_size and num_experts_per_tok of each model's config.json.
WIDTHS = {
    "seed": (6144, 2048, 8),
    "mimo-v2-flash": (4096, 2048, 8),
    "deepseek-v3": (7168, 2048, 8),
    "qwen3-235b": (4096, 1536, 8),
    "glm": (5120, 1536, 8),
    "tiny": (256, 256, 2),
}


def named(name: str, local_experts: int) -> Shape:
    """The shape of a named model with ``local_experts`` experts on a rank. Raises ValueError for an unknown name."""
    if name not in WIDTHS:
        raise ValueError(f"unknown shape {name!r}; known: {', '.join(WIDTHS)}")
    hidden, intermediate, topk = WIDTHS[name]
    return Shape(hidden, intermediate, local_experts, topk)


def check_experts(topk: int, local_experts: int, ep: int) -> None:
    """Raises ValueError where ``ep`` ranks together have fewer experts than the ``topk`` that a token selects."""
    if (experts := ep * local_experts) < topk:
        raise ValueError(
            f"--ep {ep} times --local-experts {local_experts} makes {experts} expert(s), fewer than the top-{topk} "
            "that a token selects"
        )


def name_of(record: dict) -> str | None:
    """The name in ``WIDTHS`` of a record's ``hidden``, ``intermediate`` and ``topk``, or None."""
    widths = tuple(record[field] for field in ("hidden", "intermediate", "topk"))
    return next((name for name, known in WIDTHS.items() if known == widths), None)


def write_model_config(folder: Path) -> Path:
    """A small FP8 Qwen3-MoE config.json, for SGLang to resolve its arguments from; the layer's shape is set apart."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder
