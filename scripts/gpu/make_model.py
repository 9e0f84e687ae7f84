"""Makes a Llama folder with random bf16 weights, rows of random tokens, and prompts: enough to train and to generate.

The geometry follows from --hidden: heads of 64, feed-forward 8/3 of the width in multiples of 64, as many key heads as heads.
"""

import argparse
import array
import json
import math
import random
import struct
from pathlib import Path

# Random values that are drawn: larger tensors repeat them.
DRAWN = (1 << 20) - 3


def tensors(hidden, wide, layers, vocabulary):
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}self_attn.{name}.weight", (hidden, hidden)
        yield f"{prefix}mlp.gate_proj.weight", (wide, hidden)
        yield f"{prefix}mlp.up_proj.weight", (wide, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, wide)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def bf16(values):
    """The upper halves of float32, rounded towards zero, which random weights do not mind."""
    return array.array("H", (word >> 16 for word in array.array("I", array.array("f", values).tobytes())))


def write_weights(path, shapes, source):
    drawn = memoryview(bf16(source.gauss(0.0, 0.02) for _ in range(DRAWN)))
    header, offset, at = {"__metadata__": {"format": "pt"}}, 0, 0
    for name, shape in shapes:
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, shape in shapes:
            if len(shape) == 1:
                bf16([1.0] * shape[0]).tofile(file)
                continue
            left = math.prod(shape)
            while left:
                part = drawn[at : at + left]
                file.write(part)
                left, at = left - len(part), (at + len(part)) % DRAWN
    return offset // 2


def make(folder, hidden, layers, vocabulary, seq_len, rows):
    """Returns the number of parameters."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    wide = hidden * 8 // 3 // 64 * 64
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    source = random.Random(0)
    count = write_weights(folder / "model.safetensors", list(tensors(hidden, wide, layers, vocabulary)), source)
    ids = lambda length: [source.randrange(3, vocabulary) for _ in range(length)]
    with open(folder / "rows.jsonl", "w") as file:
        file.writelines(json.dumps({"input_ids": ids(seq_len)}) + "\n" for _ in range(rows))
    with open(folder / "prompts.jsonl", "w") as file:
        file.writelines(json.dumps({"prompt_ids": ids(16)}) + "\n" for _ in range(16))
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    for name, default in (("hidden", 768), ("layers", 12), ("vocabulary", 8192), ("seq-len", 256), ("rows", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    count = make(
        options.folder, options.hidden, options.layers, options.vocabulary, options.seq_len, options.rows
    )
    print(f"{count} parameters in {options.folder}")
