#!/usr/bin/env python3
"""A gpt-oss of its published widths, random weights and few layers, with its experts as MXFP4:

    python random_gpt_oss.py FOLDER LAYERS

Needs torch and safetensors. Measurements need sizes, not sense.
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import save_file

HIDDEN = INNER = 2880
EXPERTS, VOCABULARY, HEADS, KEY_HEADS, HEAD = 32, 32000, 64, 8, 64


def main():
    folder, layers = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    normal = lambda *shape, std=0.02: (torch.randn(*shape, generator=generator) * std).bfloat16()
    config = dict(
        architectures=["GptOssForCausalLM"], model_type="gpt_oss", attention_bias=True, head_dim=HEAD, hidden_act="silu",
        hidden_size=HIDDEN, intermediate_size=INNER, max_position_embeddings=131072, num_attention_heads=HEADS, num_experts_per_tok=4,
        num_hidden_layers=layers, num_key_value_heads=KEY_HEADS, num_local_experts=EXPERTS, quantization_config=dict(quant_method="mxfp4"),
        rms_norm_eps=1e-5, rope_theta=150000, sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False, vocab_size=VOCABULARY,
        eos_token_id=2,
    )
    (folder / "config.json").write_text(json.dumps(config))
    files = {}

    def save(name, tensors):
        save_file(tensors, folder / name)
        files.update({tensor: name for tensor in tensors})

    ones = torch.ones(HIDDEN).bfloat16()
    ends = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN), "lm_head.weight": normal(VOCABULARY, HIDDEN)}
    save("model-0.safetensors", ends | {"model.norm.weight": ones})
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors = {
            "input_layernorm.weight": ones.clone(), "post_attention_layernorm.weight": ones.clone(),
            "self_attn.sinks": normal(HEADS, std=1.0), "mlp.router.weight": normal(EXPERTS, HIDDEN), "mlp.router.bias": normal(EXPERTS),
        }
        wide, narrow = HEADS * HEAD, KEY_HEADS * HEAD
        for name, outputs, inputs in [("q", wide, HIDDEN), ("k", narrow, HIDDEN), ("v", narrow, HIDDEN), ("o", HIDDEN, wide)]:
            tensors[f"self_attn.{name}_proj.weight"] = normal(outputs, inputs)
            tensors[f"self_attn.{name}_proj.bias"] = normal(outputs)
        for name, outputs, inputs in [("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)]:
            of_bytes = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
            tensors[f"mlp.experts.{name}_blocks"] = of_bytes(0, 256, EXPERTS, outputs, inputs // 32, 16)
            tensors[f"mlp.experts.{name}_scales"] = of_bytes(119, 122, EXPERTS, outputs, inputs // 32)
            tensors[f"mlp.experts.{name}_bias"] = normal(EXPERTS, outputs)
        save(f"model-{layer + 1}.safetensors", {prefix + name: tensor for name, tensor in tensors.items()})
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=files)))


if __name__ == "__main__":
    main()
