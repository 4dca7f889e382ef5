"""Checkpoints with seeded random weights: tiny ones for the CPU demo, realistic layer shapes for a GPU A/B.

Every part of a tiny checkpoint bears on the logits, so a wrong expert, row or weight shows. Each token's embedding
leans towards the router rows of two experts of its own: the router's choice then has a wide margin, and two correct
paths that round differently do not choose differently.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 4
FP8_BLOCK = 128
_FP8_MAX = 448.0
_STAMP = "generated.json"


@dataclass(frozen=True)
class CheckpointSpec:
    """One generated checkpoint.

    Attributes:
        name: directory name.
        arch: `Qwen3MoeForCausalLM` or `MiMoV2FlashForCausalLM`.
        fp8: expert weights in FP8 with 128x128 block scales.
        fp8_dense: the attention's projections and dense MLPs as well, which needs a GPU to serve.
        router_scale: length of a router row; larger makes the two chosen experts' weights more unequal.
        affinity: how far a token's embedding leans towards its experts' router rows, in standard deviations of a logit.
        expert_gain: factor on the experts' weights, so that the MoE output weighs beside the residual.
    """

    name: str
    arch: str
    vocab: int = 512
    hidden: int = 256
    intermediate: int = 256
    moe_intermediate: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    swa_kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 64
    experts: int = 8
    topk: int = 2
    max_positions: int = 2048
    fp8: bool = False
    fp8_dense: bool = False
    router_scale: float = 0.4
    affinity: float = 16.0
    expert_gain: float = 1.2
    seed: int = 0

    @property
    def is_mimo(self) -> bool:
        return self.arch == "MiMoV2FlashForCausalLM"


_QWEN, _MIMO = "Qwen3MoeForCausalLM", "MiMoV2FlashForCausalLM"

TINY: dict[str, CheckpointSpec] = {
    spec.name: spec
    for spec in (
        CheckpointSpec("qwen3-moe-bf16", _QWEN),
        CheckpointSpec("qwen3-moe-fp8", _QWEN, fp8=True),
        CheckpointSpec("mimo-v2-flash-fp8", _MIMO, fp8=True, router_scale=0.15),
    )
}

# Layer shapes of Qwen3-235B-A22B and MiMo-V2-Flash; experts and layers cut so that one GPU loads them in seconds.
REALISTIC: dict[str, CheckpointSpec] = {
    spec.name: spec
    for spec in (
        CheckpointSpec(
            "random-qwen3-moe-fp8",
            _QWEN,
            vocab=32000,
            hidden=4096,
            intermediate=12288,
            moe_intermediate=1536,
            layers=4,
            heads=64,
            kv_heads=4,
            head_dim=128,
            v_head_dim=128,
            experts=64,
            topk=8,
            max_positions=131072,
            fp8=True,
            fp8_dense=True,
            affinity=0.0,
            router_scale=1.0,
            expert_gain=1.0,
        ),
        CheckpointSpec(
            "random-mimo-v2-flash-fp8",
            _MIMO,
            vocab=32000,
            hidden=4096,
            intermediate=16384,
            moe_intermediate=2048,
            layers=4,
            heads=64,
            kv_heads=4,
            swa_kv_heads=8,
            head_dim=192,
            v_head_dim=128,
            experts=64,
            topk=8,
            max_positions=131072,
            fp8=True,
            affinity=0.0,
            router_scale=1.0,
            expert_gain=1.0,
        ),
    )
}


def ensure_checkpoint(spec: CheckpointSpec, root: Path, device: str = "cpu") -> Path:
    """The checkpoint's directory under `root`, written the first time and whenever the generator or spec changed."""
    target = root / spec.name
    stamp = json.dumps({"format": FORMAT_VERSION, "device": device, "spec": asdict(spec)}, sort_keys=True)
    if (target / _STAMP).is_file() and (target / _STAMP).read_text() == stamp:
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{spec.name}-", dir=root))
    try:
        write_checkpoint(spec, scratch, device)
        (scratch / _STAMP).write_text(stamp)
        shutil.rmtree(target, ignore_errors=True)
        try:
            os.replace(scratch, target)
        except OSError:
            # Another process wrote the same checkpoint meanwhile.
            if not (target / _STAMP).is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def write_checkpoint(spec: CheckpointSpec, directory: Path, device: str = "cpu") -> None:
    """Write config, tokenizer and one safetensors shard per layer into `directory`; weights are drawn on `device`."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model_config(spec), indent=1))
    _write_tokenizer(directory)
    weight_map: dict[str, str] = {}
    for index, tensors in enumerate(_shards(spec, device)):
        shard = f"model-{index:05d}.safetensors"
        save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, directory / shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, shard))
    index_file = directory / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def model_config(spec: CheckpointSpec) -> dict:
    """The checkpoint's `config.json`."""
    config = dict(
        architectures=[spec.arch],
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        moe_intermediate_size=spec.moe_intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        num_experts_per_tok=spec.topk,
        norm_topk_prob=True,
        hidden_act="silu",
        max_position_embeddings=spec.max_positions,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        attention_bias=False,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=259,
        torch_dtype="bfloat16",
    )
    if spec.is_mimo:
        config |= dict(
            model_type="mimo_v2_flash",
            v_head_dim=spec.v_head_dim,
            swa_num_attention_heads=spec.heads,
            swa_num_key_value_heads=spec.swa_kv_heads,
            swa_head_dim=spec.head_dim,
            swa_v_head_dim=spec.v_head_dim,
            n_routed_experts=spec.experts,
            n_shared_experts=None,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            n_group=1,
            topk_group=1,
            routed_scaling_factor=None,
            moe_layer_freq=[int(_is_moe(spec, layer)) for layer in range(spec.layers)],
            hybrid_layer_pattern=[layer % 2 for layer in range(spec.layers)],
            sliding_window_size=128,
            sliding_window=128,
            layernorm_epsilon=1e-6,
            swa_rope_theta=10000.0,
            partial_rotary_factor=1.0 if spec.head_dim == spec.v_head_dim else 64 / spec.head_dim,
            add_swa_attention_sink_bias=False,
            add_full_attention_sink_bias=False,
            attention_value_scale=1.0,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        )
    else:
        config |= dict(
            model_type="qwen3_moe",
            num_experts=spec.experts,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            rms_norm_eps=1e-6,
            use_sliding_window=False,
        )
    if spec.fp8:
        config["quantization_config"] = dict(
            quant_method="fp8",
            activation_scheme="dynamic",
            weight_block_size=[FP8_BLOCK, FP8_BLOCK],
            modules_to_not_convert=_unquantised_modules(spec),
        )
    return config


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values `[rows, columns]` and fp32 scales `[rows/128, columns/128]` of a weight whose sizes divide by 128."""
    import torch

    rows, columns = weight.shape
    blocks = weight.float().view(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-8) / _FP8_MAX
    values = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.view(rows, columns), scale


def dequantize_blocks(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 `[rows, columns]`, the inverse of `quantize_blocks` up to the FP8 rounding."""
    rows, columns = values.shape
    blocks = values.float().view(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    return (blocks * scale[:, None, :, None]).view(rows, columns)


def _is_moe(spec: CheckpointSpec, layer: int) -> bool:
    # MiMo-V2-Flash's first layer is dense.
    return not (spec.is_mimo and layer == 0)


def _unquantised_modules(spec: CheckpointSpec) -> list[str]:
    modules = ["lm_head", "embed_tokens", "model.embed_tokens"]
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        modules.append(prefix + "mlp.gate")
        if not spec.fp8_dense:
            projections = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
            modules += [f"{prefix}self_attn.{projection}" for projection in projections]
            if not _is_moe(spec, layer):
                projections = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
                modules += [f"{prefix}mlp.{projection}" for projection in projections]
    return modules


def _shards(spec: CheckpointSpec, device: str) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of the model, first those outside the layers, then layer by layer."""
    import torch

    generator = torch.Generator(device=device).manual_seed(spec.seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32) * std

    def linear(name: str, rows: int, columns: int, fp8: bool, gain: float = 1.0) -> dict[str, torch.Tensor]:
        weight = normal(rows, columns, std=gain * columns**-0.5)
        if not fp8:
            return {f"{name}.weight": weight.bfloat16()}
        values, scale = quantize_blocks(weight)
        return {f"{name}.weight": values, f"{name}.weight_scale_inv": scale}

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    # One set of orthonormal router directions for all layers, so that the lean of the embedding reaches each of them.
    directions = torch.linalg.qr(normal(spec.hidden, spec.experts, std=1.0)).Q.T.contiguous()
    embedding = normal(spec.vocab, spec.hidden, std=1.0)
    if spec.affinity:
        chosen = normal(spec.vocab, spec.experts, std=1.0).topk(spec.topk, dim=1).indices
        strength = spec.affinity * torch.linspace(1.0, 0.8, spec.topk, device=device)
        embedding += torch.einsum("k,vkh->vh", strength, directions[chosen])
    yield {
        "model.embed_tokens.weight": embedding.bfloat16(),
        "lm_head.weight": normal(spec.vocab, spec.hidden, std=spec.hidden**-0.5).bfloat16(),
        "model.norm.weight": ones(spec.hidden),
    }
    router = directions * spec.router_scale if spec.affinity else None
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        # The hybrid pattern of MiMo gives sliding-window layers their own number of key and value heads.
        kv_heads = spec.swa_kv_heads if spec.is_mimo and layer % 2 else spec.kv_heads
        tensors = {prefix + "input_layernorm.weight": ones(spec.hidden)}
        tensors[prefix + "post_attention_layernorm.weight"] = ones(spec.hidden)
        tensors |= linear(attention + "q_proj", spec.heads * spec.head_dim, spec.hidden, spec.fp8_dense)
        tensors |= linear(attention + "k_proj", kv_heads * spec.head_dim, spec.hidden, spec.fp8_dense)
        tensors |= linear(attention + "v_proj", kv_heads * spec.v_head_dim, spec.hidden, spec.fp8_dense)
        tensors |= linear(attention + "o_proj", spec.hidden, spec.heads * spec.v_head_dim, spec.fp8_dense)
        if not spec.is_mimo:
            tensors[attention + "q_norm.weight"] = ones(spec.head_dim)
            tensors[attention + "k_norm.weight"] = ones(spec.head_dim)
        if not _is_moe(spec, layer):
            tensors |= linear(mlp + "gate_proj", spec.intermediate, spec.hidden, spec.fp8_dense)
            tensors |= linear(mlp + "up_proj", spec.intermediate, spec.hidden, spec.fp8_dense)
            tensors |= linear(mlp + "down_proj", spec.hidden, spec.intermediate, spec.fp8_dense)
            yield tensors
            continue
        gate = router if router is not None else normal(spec.experts, spec.hidden, std=spec.hidden**-0.5)
        tensors[mlp + "gate.weight"] = gate.bfloat16()
        if spec.is_mimo:
            tensors[mlp + "gate.e_score_correction_bias"] = torch.zeros(spec.experts, dtype=torch.float32)
        for expert in range(spec.experts):
            name, gain = f"{mlp}experts.{expert}.", spec.expert_gain
            tensors |= linear(name + "gate_proj", spec.moe_intermediate, spec.hidden, spec.fp8, gain)
            tensors |= linear(name + "up_proj", spec.moe_intermediate, spec.hidden, spec.fp8, gain)
            tensors |= linear(name + "down_proj", spec.hidden, spec.moe_intermediate, spec.fp8, gain)
        yield tensors


def _write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer of 260 entries: every text has a tokenisation, at one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ("<bos>", "<eos>", "<unk>", "<pad>")
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *specials]
    tokenizer = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            dict(
                tokenizer_class="PreTrainedTokenizerFast",
                bos_token="<bos>",
                eos_token="<eos>",
                unk_token="<unk>",
                pad_token="<pad>",
                model_max_length=1 << 20,
                chat_template="{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
            )
        )
    )
