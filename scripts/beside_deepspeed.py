#!/usr/bin/env python3
"""Fine-tuning beside DeepSpeed ZeRO-3, in turn, as a Markdown table of every round.

    cargo build --release
    python3 scripts/beside_deepspeed.py PEER --terrace target/release/terrace --size 97m --rounds 2

PEER is a script that trains the same Llama with DeepSpeed and prints `tokens_per_second` and `peak_rss_gb` as JSON in its last line; it is
called with `none` or `nvme`, `--hidden`, `--layers`, `--batch`, `--seq`, `--steps` and `--dir`. It needs deepspeed; torch and
transformers make the weights that ours begins with. Nothing else may run meanwhile.

Each row of `--rows` is a run of ours: an offload, a state format and flags after them, such as `disk split --host-memory 1GB`. Our
figures are medians from the third step on, and the peak of the resident set as the kernel counts it.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

# hidden, layers, intermediate, vocabulary, sequences, positions
SIZES = {"97m": (768, 12, 2048, 8192, 4, 256), "315m": (1024, 24, 2688, 8192, 2, 512)}
ROWS = ["none fp32", "disk split --disk-cache none", "disk bf16 --disk-cache none", "disk compact --disk-cache none"]


def make_inputs(folder, shape, steps):
    """A model folder with random weights, and rows of random tokens."""
    hidden, layers, intermediate, vocab, sequences, positions = shape
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64, vocab_size=vocab, max_position_embeddings=positions, tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(f"{folder}/model")
    rng = random.Random(0)
    with open(f"{folder}/data.jsonl", "w") as file:
        for _ in range(sequences * steps):
            file.write(json.dumps({"input_ids": [rng.randrange(vocab) for _ in range(positions)]}) + "\n")


def peak_resident(pid):
    """Bytes of the largest resident set so far; 0 once the process has ended."""
    try:
        with open(f"/proc/{pid}/status") as file:
            found = [line.split()[1] for line in file if line.startswith("VmHWM:")]
    except OSError:
        return 0
    return int(found[0]) * 1024 if found else 0


def ours(terrace, row, folder, shape, steps, threads):
    offload, state, *flags = row.split()
    *_, sequences, positions = shape
    output, disk = f"{folder}/out", f"{folder}/disk"
    for place in (output, disk):
        shutil.rmtree(place, ignore_errors=True)
    command = [
        terrace, "finetune", "--model", f"{folder}/model", "--data", f"{folder}/data.jsonl", "--output", output,
        "--steps", str(steps), "--batch-size", str(sequences), "--seq-len", str(positions),
        "--learning-rate", "1e-3", "--betas", "0.9,0.95", "--weight-decay", "0.1", "--no-shuffle", "--state", state,
        *([] if "--clip" in flags else ["--clip", "1.0"]), "--offload", offload, "--threads", str(threads),
        *(["--disk", disk] if offload == "disk" else []), *flags,
    ]
    peak = 0
    with tempfile.TemporaryFile() as errors:
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        # Not the peak that is told when it ends: what this process had at the fork counts there as well.
        while run.poll() is None:
            peak = max(peak, peak_resident(run.pid))
            time.sleep(0.1)
        if run.returncode:
            errors.seek(0)
            sys.exit(f"{' '.join(command)}\n{errors.read().decode()}")
    with open(f"{output}/metrics.jsonl") as file:
        lines = [json.loads(line) for line in file][2:]
    rate = statistics.median(line["tokens_per_second"] for line in lines)
    share = statistics.median(line["floor_fraction"] or float("nan") for line in lines)
    return rate, peak / 1e9, f"{share:.2f} of floor, {lines[-1]['bound_by']}"


def peers(script, offload, folder, shape, steps, threads):
    hidden, layers, _, vocab, sequences, positions = shape
    command = [
        sys.executable, script, offload, "--hidden", str(hidden), "--layers", str(layers), "--vocab", str(vocab),
        "--batch", str(sequences), "--seq", str(positions), "--steps", str(steps), "--dir", f"{folder}/swap",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode:
        sys.exit(f"{' '.join(command)}\n{run.stderr[-4000:]}")
    found = json.loads(run.stdout.strip().splitlines()[-1])
    return found["tokens_per_second"], found["peak_rss_gb"], ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer")
    parser.add_argument("--terrace", default="target/release/terrace")
    parser.add_argument("--size", choices=SIZES, default="97m")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--peer-steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--offloads", nargs="*", default=["none", "nvme"], help="what the peer is run with")
    parser.add_argument("--rows", nargs="*", default=ROWS)
    parser.add_argument("--dir", default=None, help="where disks are")
    arguments = parser.parse_args()
    shape = SIZES[arguments.size]
    folder = tempfile.mkdtemp(dir=arguments.dir)
    try:
        make_inputs(folder, shape, arguments.steps)
        print("| round | | tokens/s | peak memory, GB | |\n|---|---|---|---|---|", flush=True)
        for number in range(1, arguments.rounds + 1):
            found = [(f"DeepSpeed `{offload}`", *peers(arguments.peer, offload, folder, shape, arguments.peer_steps,
                                                       arguments.threads)) for offload in arguments.offloads]
            shutil.rmtree(f"{folder}/swap", ignore_errors=True)
            for row in arguments.rows:
                found.append((f"`{row}`", *ours(arguments.terrace, row, folder, shape, arguments.steps,
                                                arguments.threads)))
            for name, rate, memory, note in found:
                print(f"| {number} | {name} | {rate:.0f} | {memory:.2f} | {note} |", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
