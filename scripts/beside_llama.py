#!/usr/bin/env python3
"""Generation with resident weights beside transformers and llama.cpp, on made weights.

Makes a Llama of about a billion parameters (random weights: speed does not depend on them) as a Hugging Face folder and as GGUF
files, then lets the programs take turns. A figure is the time of a token after the first ones: the difference of a long and a short
run over the difference of their tokens, so that loading and the prompt cancel. The share of memory bandwidth is the bytes of
weights that a token reads over that time, as a part of what a plain read of memory reaches in the same run.

    pip install torch==2.11.0 transformers safetensors numpy gguf llama-cpp-python
    scripts/beside_llama.py --terrace target/release/terrace --dir /tmp/billion [--rounds 3] [--small]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

PROMPT = list(range(5, 37))
LONG, SHORT = 40, 8


def made(folder, small):
    """The folder of the model, made if it is not there."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if os.path.exists(f"{folder}/config.json"):
        return
    hidden, layers, inner, vocab = (256, 2, 768, 1024) if small else (2048, 18, 5632, 32000)
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, vocab_size=vocab,
                         num_attention_heads=hidden // 64, num_key_value_heads=hidden // 256, max_position_embeddings=2048,
                         tie_word_embeddings=False)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def gguf_file(folder, kind):
    """The weights as a GGUF file without a vocabulary: matrices as `kind`, norms as f32."""
    import gguf
    import torch
    from safetensors.torch import load_file

    path = f"{folder}/{kind}.gguf"
    if os.path.exists(path):
        return path
    config = json.load(open(f"{folder}/config.json"))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(64)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    types = {"bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}
    files = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    for name, tensor in (item for file in files for item in load_file(f"{folder}/{file}").items()):
        stem = name.removesuffix(".weight")
        if stem in whole:
            new = whole[stem]
        else:
            _, _, layer, rest = stem.split(".", 3)
            new = f"blk.{layer}.{names[rest]}"
        values = tensor.to(torch.float32).numpy()
        if values.ndim == 1:
            writer.add_tensor(f"{new}.weight", values)
        else:
            data = gguf.quants.quantize(values, types[kind])
            writer.add_tensor(f"{new}.weight", data, raw_dtype=types[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def per_token(run):
    """Seconds of a token: `run` takes a number of tokens and gives seconds."""
    return (run(LONG) - run(SHORT)) / (LONG - SHORT)


def terrace(binary, folder, weights, batch):
    rows = f"{folder}/prompts-{batch}.jsonl"
    with open(rows, "w") as file:
        for index in range(batch):
            file.write(json.dumps({"prompt_ids": [token + index for token in PROMPT]}) + "\n")

    def run(tokens):
        command = [binary, "generate", "--model", folder, "--prompts", rows, "--batch-size", str(batch), "--threads", "2",
                   "--max-new-tokens", str(tokens), "--ignore-eos", "--weights", weights, "--offload", "none", "--device", "cpu",
                   "--json"]
        done = subprocess.run(command, check=True, capture_output=True)
        # Of generating alone; loading is not in it.
        return max(row["seconds"] for row in json.loads(done.stdout))

    return lambda: per_token(run)


def transformers(folder, dtype, batch):
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(2)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    ids = torch.tensor([[token + index for token in PROMPT] for index in range(batch)])

    def run(tokens):
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                           pad_token_id=0)
        return time.perf_counter() - began

    return lambda: per_token(run)


def llama_cpp(folder, kind, batch):
    import llama_cpp as api

    api.llama_backend_init()
    model = api.llama_model_load_from_file(gguf_file(folder, kind).encode(), api.llama_model_default_params())
    settings = api.llama_context_default_params()
    settings.n_ctx, settings.n_threads, settings.n_threads_batch = 2048, 2, 2
    settings.n_batch, settings.n_seq_max, settings.kv_unified = 2048, batch, True
    context = api.llama_init_from_model(model, settings)
    slots = api.llama_batch_init(2048, 0, 1)

    def decode(rows, start):
        count = 0
        for index, row in enumerate(rows):
            for offset, token in enumerate(row):
                slots.token[count], slots.pos[count] = token, start + offset
                slots.n_seq_id[count], slots.seq_id[count][0] = 1, index
                slots.logits[count] = offset + 1 == len(row)
                count += 1
        slots.n_tokens = count
        if api.llama_decode(context, slots) != 0:
            sys.exit("llama.cpp refuses the batch")
        api.llama_get_logits(context)

    def run(tokens):
        api.llama_memory_clear(api.llama_get_memory(context), True)
        began = time.perf_counter()
        decode([[token + index for token in PROMPT] for index in range(batch)], 0)
        for step in range(tokens - 1):
            decode([[7 + step % 90]] * batch, len(PROMPT) + step)
        return time.perf_counter() - began

    return lambda: per_token(run)


def has_bf16():
    """Whether the processor multiplies bf16."""
    return "avx512_bf16" in open("/proc/cpuinfo").read()


def read_bandwidth():
    """Bytes per second of summing memory far larger than the caches, on two threads."""
    import torch

    torch.set_num_threads(2)
    values = torch.ones(1 << 28, dtype=torch.float32)
    best = 0.0
    for _ in range(4):
        began = time.perf_counter()
        values.sum()
        best = max(best, values.numel() * 4 / (time.perf_counter() - began))
    return best


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--terrace", default="target/release/terrace")
    parser.add_argument("--dir", default="/tmp/billion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="names that begin so")
    args = parser.parse_args()
    made(args.dir, args.small)
    config = json.load(open(f"{args.dir}/config.json"))
    hidden, layers, inner, vocab = (config[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"))
    matrices = layers * (hidden * hidden * 5 // 2 + 3 * hidden * inner) + vocab * hidden
    runs = {}
    for batch in (1, 16):
        for weights, size in (("bf16", 2), ("int8", 34 / 32)):
            runs[f"terrace {weights}", batch] = (terrace(args.terrace, args.dir, weights, batch), size)
        for kind, size in (("bf16", 2), ("q8_0", 34 / 32)):
            runs[f"llama.cpp {kind}", batch] = (lambda kind=kind, batch=batch: llama_cpp(args.dir, kind, batch)(), size)
        # bfloat16 takes many times as long where the processor has no instructions for it.
        for dtype, size in (("bfloat16", 2), ("float32", 4)) if has_bf16() else (("float32", 4),):
            runs[f"transformers {dtype}", batch] = (lambda dtype=dtype, batch=batch: transformers(args.dir, dtype, batch)(), size)
    runs = {key: run for key, run in runs.items() if key[0].startswith(args.only)}
    found = {key: [] for key in runs}
    for number in range(args.rounds):
        for key, (run, size) in runs.items():
            # Before each, for a shared machine's memory changes its pace.
            bandwidth = read_bandwidth()
            seconds = run()
            found[key].append((seconds, matrices * size / seconds / bandwidth))
            print(f"round {number}: {key[0]}, batch {key[1]}: {seconds * 1e3:.1f} ms a token", file=sys.stderr, flush=True)
    print(f"{matrices / 1e9:.2f}e9 parameters in matrices")
    print("| program | batch | ms a token | tokens/s | share of read bandwidth |\n|---|---|---|---|---|")
    for (name, batch), values in found.items():
        seconds = statistics.median(value[0] for value in values)
        share = statistics.median(value[1] for value in values)
        print(f"| {name} | {batch} | {seconds * 1e3:.1f} | {batch / seconds:.1f} | {share:.2f} |")


if __name__ == "__main__":
    main()
