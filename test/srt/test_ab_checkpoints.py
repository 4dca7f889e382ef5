"""Generated checkpoints: what is written, when it is written again, and that transformers reads it back."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from sglang_deepep_v2.ab import checkpoints
from sglang_deepep_v2.ab.checkpoints import REALISTIC, TINY, dequantize_blocks, ensure_checkpoint, quantize_blocks


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def weights_of(directory) -> dict[str, torch.Tensor]:
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {shard: load_file(directory / shard) for shard in set(index.values())}
    return {name: shards[shard][name] for name, shard in index.items()}


def test_block_quantisation_round_trip():
    weight = torch.randn(256, 384) * torch.logspace(-3, 3, 256)[:, None]
    values, scale = quantize_blocks(weight)
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (2, 3) and scale.dtype == torch.float32
    restored = dequantize_blocks(values, scale)
    largest = weight.view(2, 128, 3, 128).abs().amax((1, 3))
    error = (restored - weight).view(2, 128, 3, 128).abs().amax((1, 3))
    # e4m3 has three mantissa bits: half a step of the largest value is 1/28 of it.
    assert (error <= largest / 28).all()
    assert torch.equal(quantize_blocks(restored)[0].float(), values.float())


@pytest.mark.parametrize("name", TINY)
def test_tiny_checkpoints_have_the_tensors_their_config_names(root, name):
    spec = TINY[name]
    weights = weights_of(ensure_checkpoint(spec, root))
    moe_layers = [layer for layer in range(spec.layers) if not (spec.is_mimo and layer == 0)]
    for layer in moe_layers:
        for expert in range(spec.experts):
            down = f"model.layers.{layer}.mlp.experts.{expert}.down_proj"
            assert weights[f"{down}.weight"].shape == (spec.hidden, spec.moe_intermediate)
            assert weights[f"{down}.weight"].dtype == (torch.float8_e4m3fn if spec.fp8 else torch.bfloat16)
            assert (f"{down}.weight_scale_inv" in weights) is spec.fp8
    assert all(torch.isfinite(tensor.float()).all() for tensor in weights.values())
    ids = {name: tensor for name, tensor in weights.items() if "experts.0.gate_proj.weight" in name}
    assert len({tensor.float().sum().item() for tensor in ids.values()}) == len(ids), "layers must differ"


def test_the_router_of_a_tiny_checkpoint_decides_clearly(root):
    """Two experts per token whose logits lead the third by far more than bf16 rounding: no path may flip a choice."""
    weights = weights_of(ensure_checkpoint(TINY["qwen3-moe-fp8"], root))
    embedding = weights["model.embed_tokens.weight"].float()
    normed = embedding * torch.rsqrt(embedding.square().mean(1, keepdim=True) + 1e-6)
    logits = normed @ weights["model.layers.0.mlp.gate.weight"].float().T
    best = logits.topk(3, dim=1).values
    assert (best[:, 1] - best[:, 2]).min() > 1.0
    assert len(set(map(tuple, logits.topk(2, dim=1).indices.sort(1).values.tolist()))) > 20, "all experts are used"


def test_written_once_and_again_when_the_spec_changes(root):
    spec = TINY["mimo-v2-flash-fp8"]
    directory = ensure_checkpoint(spec, root)
    before = (directory / "config.json").stat().st_mtime_ns
    assert ensure_checkpoint(spec, root) == directory
    assert (directory / "config.json").stat().st_mtime_ns == before
    first = weights_of(directory)["lm_head.weight"]
    ensure_checkpoint(dataclasses.replace(spec, seed=1), root)
    assert not torch.equal(first, weights_of(directory)["lm_head.weight"])
    assert not list(root.glob(".*")), "no scratch directory stays behind"


def test_an_interrupted_write_leaves_nothing(root, monkeypatch):
    def interrupted(spec, directory, device):
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "write_checkpoint", interrupted)
    spec = dataclasses.replace(TINY["qwen3-moe-fp8"], name="interrupted")
    with pytest.raises(KeyboardInterrupt):
        ensure_checkpoint(spec, root)
    assert not list(root.glob("*interrupted*"))


def test_transformers_reads_the_dequantised_checkpoint_and_continues_greedily(root):
    from sglang_deepep_v2.ab.reference import probe_reference, supports

    directory = ensure_checkpoint(TINY["qwen3-moe-fp8"], root)
    assert supports(str(directory)) and not supports(str(ensure_checkpoint(TINY["mimo-v2-flash-fp8"], root)))
    prompt = [104, 101, 108, 108, 111]
    (with_cache,) = probe_reference(directory, [prompt], max_new_tokens=3)
    (teacher_forced,) = probe_reference(directory, [prompt + with_cache.tokens], max_new_tokens=1)
    # The logprobs of the greedy continuation are those of the same tokens given as a prompt.
    expected = with_cache.prompt_logprobs + with_cache.logprobs
    assert teacher_forced.prompt_logprobs == pytest.approx(expected, abs=1e-4)
    assert all(margin >= 0 for margin in with_cache.margins)


def test_the_tokenizer_takes_every_byte(root):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure_checkpoint(TINY["qwen3-moe-bf16"], root))
    text = "Natalia sold 48 clips; 3 × 4 = 12, 日本.\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.bos_token_id == 256 and tokenizer.eos_token_id == 257


@pytest.mark.parametrize("name", REALISTIC)
def test_realistic_specs_keep_what_deepep_and_deepgemm_need(name):
    spec = REALISTIC[name]
    sizes = (spec.hidden, spec.intermediate, spec.moe_intermediate, spec.heads * spec.v_head_dim)
    assert all(size % 256 == 0 for size in sizes) and spec.experts % 8 == 0 and spec.topk == 8
    config = checkpoints.model_config(spec)
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    if spec.is_mimo:
        assert config["moe_layer_freq"][0] == 0 and sum(config["moe_layer_freq"]) == spec.layers - 1
        assert config["partial_rotary_factor"] * spec.head_dim == 64


def test_a_realistic_layout_scaled_down_is_written(root):
    spec = dataclasses.replace(
        REALISTIC["random-mimo-v2-flash-fp8"],
        name="scaled",
        vocab=256,
        hidden=256,
        intermediate=256,
        moe_intermediate=256,
        heads=2,
        kv_heads=1,
        swa_kv_heads=2,
        experts=8,
        layers=2,
    )
    weights = weights_of(ensure_checkpoint(spec, root))
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (192, 256)
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (384, 256)
    assert weights["model.layers.1.self_attn.v_proj.weight"].shape == (256, 256)
    assert weights["model.layers.1.mlp.experts.0.down_proj.weight"].dtype == torch.float8_e4m3fn
