"""Qwen3-MoE in plain PyTorch for training: the forward pass of transformers' Qwen3MoeForCausalLM, same weight names.

All experts run on all tokens and the router's weight is zero for those not chosen: at this size that is faster than
moving rows, and the result is the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

FP8_MAX = 448.0


@dataclass(frozen=True)
class Config:
    """Sizes. hidden: a multiple of 256 (DeepEP); expert: at least 256 and a multiple of 128 (FP8 blocks)."""

    vocab: int
    hidden: int = 512
    expert: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    experts: int = 16
    topk: int = 4
    rope_theta: float = 10000.0
    eps: float = 1e-6

    def __post_init__(self):
        if self.hidden % 256 or self.expert % 128 or self.expert < 256:
            raise ValueError(
                f"hidden {self.hidden} must divide by 256; expert {self.expert} by 128, and be at least 256"
            )


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(variance + self.eps)).to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        hidden, size = config.hidden, config.head_dim
        self.q_proj = nn.Linear(hidden, config.heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, config.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, config.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(config.heads * size, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(size, config.eps), RMSNorm(size, config.eps)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = lambda y: y.view(batch, length, -1, self.config.head_dim)  # noqa: E731
        q = _rotate(self.q_norm(heads(self.q_proj(x))).transpose(1, 2), rope)
        k = _rotate(self.k_norm(heads(self.k_proj(x))).transpose(1, 2), rope)
        v = heads(self.v_proj(x)).transpose(1, 2)
        repeats = self.config.heads // self.config.kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Experts(nn.Module):
    """Router and experts. gate_up: [experts, 2 * expert, hidden]; down: [experts, hidden, expert]."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden, config.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.expert, config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.expert))
        self.balance: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        probabilities = self.gate(x).float().softmax(-1)
        top, chosen = probabilities.topk(config.topk, -1)
        top = top / top.sum(-1, keepdim=True)
        weights = torch.zeros_like(probabilities).scatter(1, chosen, top)
        # Share of tokens an expert gets, times its mean probability: least when all are used alike.
        self.balance = config.experts * ((weights > 0).float().mean(0) * probabilities.mean(0)).sum() / config.topk
        both = F.linear(x, self.gate_up.to(x.dtype).flatten(0, 1)).view(-1, config.experts, 2, config.expert)
        routed = F.silu(both[:, :, 0]) * both[:, :, 1] * weights[:, :, None].to(both.dtype)
        down = self.down.to(x.dtype).permute(1, 0, 2).reshape(config.hidden, -1)
        return F.linear(routed.flatten(1), down).view(shape)


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(config.hidden, config.eps) for _ in range(2))
        self.self_attn, self.mlp = Attention(config), Experts(config)

    def forward(self, x, rope):
        x = x + self.self_attn(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class MoeLM(nn.Module):
    """Token ids [batch, length] -> fp32 logits [batch, length, vocab]."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                depth = (2 * config.layers) ** -0.5 if name.endswith(("o_proj.weight", "down")) else 1.0
                nn.init.normal_(parameter, std=0.02 * depth)

    def hidden_states(self, ids: torch.Tensor) -> torch.Tensor:
        rope = _rope(ids.shape[1], self.config, ids.device)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, rope)
        return self.norm(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.hidden_states(ids)).float()

    def balance(self) -> torch.Tensor:
        return torch.stack([layer.mlp.balance for layer in self.layers]).mean()


def _rope(length: int, config: Config, device) -> tuple[torch.Tensor, torch.Tensor]:
    steps = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * config.rope_theta**-steps
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    return x.float() * rope[0] + torch.cat([-second, first], -1) * rope[1]


def quantise_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(FP8 [rows, columns], fp32 scales [rows/128, columns/128]) of a weight in 128x128 blocks."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // 128, 128, columns // 128, 128)
    scale = blocks.abs().amax((1, 3)).clamp_min(1e-8) / FP8_MAX
    return (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(rows, columns), scale


def dequantise_block(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    blocks = weight.float().view(rows // 128, 128, columns // 128, 128)
    return (blocks * scale[:, None, :, None]).view(rows, columns)


def quantise_experts_(model: MoeLM) -> None:
    """Replaces every expert weight by what its FP8 blocks hold."""
    with torch.no_grad():
        for layer in model.layers:
            for stacked in (layer.mlp.gate_up, layer.mlp.down):
                for expert in stacked:
                    for part in expert.chunk(2, 0) if stacked is layer.mlp.gate_up else (expert,):
                        part.copy_(dequantise_block(*quantise_block(part)))


def checkpoint_tensors(model: MoeLM, fp8: bool) -> dict[str, torch.Tensor]:
    """The model's tensors under transformers' names, one expert at a time; experts in FP8 blocks with ``fp8``."""
    tensors: dict[str, torch.Tensor] = {}

    def expert_weight(name: str, weight: torch.Tensor) -> None:
        if fp8:
            tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = quantise_block(weight)
        else:
            tensors[f"{name}.weight"] = weight.to(torch.bfloat16)

    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate_up"):
            prefix = "model." + name.removesuffix("gate_up") + "experts."
            for expert, both in enumerate(parameter.detach()):
                for part, weight in zip(("gate_proj", "up_proj"), both.chunk(2, 0)):
                    expert_weight(f"{prefix}{expert}.{part}", weight)
        elif name.endswith("mlp.down"):
            prefix = "model." + name.removesuffix("down") + "experts."
            for expert, weight in enumerate(parameter.detach()):
                expert_weight(f"{prefix}{expert}.down_proj", weight)
        else:
            target = name if name.startswith("lm_head") else f"model.{name}"
            tensors[target] = parameter.detach().to(torch.bfloat16)
    return {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}


def hf_config(config: Config, fp8: bool, bos: int, eos: int, pad: int) -> dict:
    """config.json of a Qwen3MoeForCausalLM."""
    found = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": 2 * config.hidden,
        "moe_intermediate_size": config.expert,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "num_experts": config.experts,
        "num_experts_per_tok": config.topk,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
    }
    if fp8:
        parts = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
        attention = [f"model.layers.{i}.self_attn.{part}" for i in range(config.layers) for part in parts]
        gates = [f"model.layers.{i}.mlp.gate" for i in range(config.layers)]
        found["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "embed_tokens", "model.embed_tokens", *attention, *gates],
        }
    return found


def write_checkpoint(model: MoeLM, folder: Path, fp8: bool, bos: int, eos: int, pad: int) -> None:
    """model.safetensors and config.json; the tokenizer is the caller's."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint_tensors(model, fp8), str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = hf_config(model.config, fp8, bos, eos, pad)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "training_config.json").write_text(json.dumps(asdict(model.config), indent=1) + "\n")
