"""Server arguments of a tiny Qwen3-MoE, resolved by SGLang's own pipeline; no weights and no server."""

import json
import os
from pathlib import Path
from typing import Any

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write_config(folder: Path, **overrides: Any) -> Path:
    """Write the model's config.json, with ``overrides`` applied, into ``folder``; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # Ranks that share a folder read it while another writes: never half a file.
    draft = folder / f"config.json.{os.getpid()}"
    draft.write_text(json.dumps(QWEN3_MOE | overrides))
    draft.replace(folder / "config.json")
    return folder


def unresolved(model: Path, **arguments: Any):
    """``ServerArgs`` for the deepep_v2 backend on CPU; ``arguments`` are its fields and win."""
    from sglang.srt.server_args import ServerArgs

    defaults = {
        "device": "cpu",
        "moe_a2a_backend": "deepep_v2",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
    }
    return ServerArgs(model_path=str(model), **(defaults | arguments))


def resolve(model: Path, **arguments: Any):
    """The same, resolved: every start-up check has run."""
    server_args = unresolved(model, **arguments)
    server_args.resolve_once()
    return server_args
