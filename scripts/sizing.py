#!/usr/bin/env python3
"""Writes docs/sizing.md: what `terrace plan` says of models, budgets and drives, and how that compares with published runs.

    python3 scripts/sizing.py --terrace target/release/terrace > docs/sizing.md
"""

import argparse
import json
import subprocess

# Sustained figures that the plans below assume, and where they come from.
CARD = {"--tflops": "140", "--link": "25GB", "--dram": "80GB", "--gpu-memory": "24GiB"}
DRIVE = (7.0, 5.0)

# LoHan (arXiv 2403.06504): RTX 4090, 13B, batch 64, 1024 tokens, drives of 6.5 GB/s read and 3.4 GB/s written (data sheet of
# the Intel D7-P5510). Its best figure, 156, stands for what the card sustains there.
LOHAN = [(1, 70), (2, 112), (3, 136), (6, 152)]
# DeepSpeed ZeRO-3 with state in host memory, RTX 4090, 8B, 1024 tokens a sequence: tokens/s at batches of 8, 16 and 32, as
# published with SlideFormer.
ZERO3 = [(8, 914), (16, 1373), (32, 1791)]
# ZeRO-Inference with GPUDirect Storage, Llama-3-70B, batch 96: drives, what DeepNVMe reads from them in GB/s, tokens/s. Neither the
# lengths nor the card are part of the figures; a card is planned that leaves hardly any room for weights to stay.
INFERENCE = [("4 Gen4 drives", 10, 7), ("4 Gen5 drives", 27, 17), ("8 Gen5 drives", 48, 26)]
# ZeRO-Infinity (arXiv 2104.07857): parameters, nodes, TFLOPS a card as published: over 25 PFLOPS on 512 cards.
INFINITY = [("1t", 32, 25e15 / 512 / 1e12)]
# A DGX-2: 16 V100, 1.5 TB, NVLink of 150 GB/s each way, eight adapters of 100 Gbit/s; host memory of 12 channels DDR4-2666. What a V100
# sustains (70), the link's part of a card where all 16 use theirs (3 GB/s) and the drives' 25 GB/s are assumptions.
DGX2 = {"tflops": 70, "link": "3GB", "dram": "256GB", "host_memory": "1.5TB", "peer_bandwidth": "150GB", "network_bandwidth": "100GB",
        "disk_read": "25GB", "disk_write": "25GB"}
DGX2_CARDS = 16
# Sequences of 1024 tokens per card: not part of the figures above, so that it is an assumption.
INFINITY_BATCH = 8
# Blocks of 1T are too large for 32 GB; see below the table.
INFINITY_MEMORY = {"1t": "64GiB"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terrace", default="target/release/terrace")
    args = parser.parse_args()

    def plan(**flags):
        words = [word for flag, value in flags.items() for word in ("--" + flag.replace("_", "-"), str(value))]
        words = [word for word in words if word != "True"]
        done = subprocess.run([args.terrace, "plan", "--json", *words], capture_output=True, text=True, timeout=600)
        return json.loads(done.stdout)["plan"] if done.returncode == 0 else None

    card = {flag.strip("-"): value for flag, value in CARD.items()}

    def drives(count, read=DRIVE[0], write=DRIVE[1]):
        return {"disk_read": f"{read * count:g}GB", "disk_write": f"{write * count:g}GB"}

    print("# Sizing\n")
    print("Both tables are made by `scripts/sizing.py`, which asks `terrace plan`. The *floor* of a step is the time of the busiest resource,")
    print("with all others perfectly hidden behind it. What is *expected* is found by playing the schedule of a step in virtual time, with the")
    print("update where it has it: with clipping, which is the default, beside the next forward, as it is while steps are clipped.\n")
    print("## What a step takes\n")
    print("A card with 24 GiB that sustains 140 · 10¹² operations a second behind a link of 25 GB/s each way, host memory of 80 GB/s, drives")
    print("of 7 GB/s read and 5 GB/s written. 16 sequences of 1024 tokens a step, bf16, AdamW, state on disk, with copies")
    print("of it in the memory that is left. Blocks have their activations on the card, in host memory or on disk, or compute them again, whichever is expected to")
    print("be faster. No such machine was at hand: these are predictions.\n")
    print("| model | host memory | drives | state | host used | state on disk | floor s | bound by | expected s | tokens/s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for model in ("8b", "13b", "40b", "70b"):
        for host, count, state in (("64GiB", 1, "split"), ("64GiB", 1, "compact"), ("64GiB", 4, "split"), ("256GiB", 4, "compact")):
            found = plan(params=model, batch_size=4, grad_accum=4, seq_len=1024, offload="disk", state=state,
                         host_memory=host, **card, **drives(count))
            head = f"| {model.upper()} | {host.replace('GiB', ' GiB')} | {count} | {state} "
            if found is None:
                print(head + "| does not fit | | | | | |")
                continue
            print(head + f"| {found['host_bytes'] / 2**30:.0f} GiB | {found['disk_bytes'] / 1e12:.2f} TB | {found['step_seconds']:.0f} "
                  f"| {found['bound_by']} | {found['expected_seconds']:.0f} | {found['tokens_per_second']:.0f} |")

    print()
    print("The state on disk is there twice. With `--durability none`, which does not survive a crash ([durability](durability.md)), it is there")
    print("once: 40B takes 0.56 TB instead of 1.04 TB with `split` (0.48 TB of state, the rest is gradients that wait on disk), 70B 0.98 TB")
    print("instead of 1.81 TB. Steps are expected to take a few percent less, since copies are written by saves alone.")
    print("\n## Beside published runs\n")
    print("What the same arithmetic gives for machines that others have measured. The systems are not Terrace, so a difference is the")
    print("distance of that system from ours as much as an error of the plan. LoHan updates beside backward, as Terrace does without clipping.\n")
    print("| system | run | published | floor by `plan` | expected by `plan` | difference |")
    print("|---|---|---|---|---|---|")
    for count, published in LOHAN:
        found = plan(params="13b", batch_size=64, seq_len=1024, offload="disk", state="fp32", host_memory="768GiB",
                     disk_cache="none", clip=0, **{**card, "tflops": 156}, **drives(count, 6.5, 3.4))
        # Its operations are counted with recomputation: 8 per parameter and token.
        floor, expected = (
            min(8 * 13e9 * found["tokens"] / found[name] / 1e12, 156) for name in ("step_seconds", "expected_seconds")
        )
        print(f"| LoHan (arXiv 2403.06504) | 13B, RTX 4090, batch 64, {count} SSD{'s' if count > 1 else ''} | {published} TFLOPS "
              f"| {floor:.0f} TFLOPS, {found['bound_by']} | {expected:.0f} TFLOPS | {(expected / published - 1) * 100:+.0f} % |")
    for batch, published in ZERO3:
        found = plan(params="8b", batch_size=batch, seq_len=1024, offload="host", state="fp32", host_memory="256GiB",
                     activations="recompute", **card)
        if found is None:
            print(f"| DeepSpeed ZeRO-3, CPU offload | 8B, RTX 4090, batch {batch} | {published} tok/s | does not fit | | |")
            continue
        floor, expected = found["tokens"] / found["step_seconds"], found["tokens_per_second"]
        print(f"| DeepSpeed ZeRO-3, CPU offload | 8B, RTX 4090, batch {batch} | {published} tok/s "
              f"| {floor:.0f} tok/s, {found['bound_by']} | {expected:.0f} tok/s | {(expected / published - 1) * 100:+.0f} % |")
    for what, read, published in INFERENCE:
        found = plan(params="70b", generate=True, batch_size=96, seq_len=32, max_new_tokens=32, offload="disk", disk_cache="none",
                     gpu_memory="13GiB", gpu_bandwidth="2TB", link="55GB", tflops=300, dram="300GB", host_memory="64GiB",
                     disk_read=f"{read}GB", disk_write=f"{read}GB")
        speed = found["tokens_per_second"]
        print(f"| ZeRO-Inference, GDS | 70B, batch 96, {what} ({read} GB/s) | {published} tok/s | {speed:.1f} tok/s, {found['bound_by']} "
              f"| | {(speed / published - 1) * 100:+.0f} % |")
    for params, nodes, published in INFINITY:
        cards = nodes * DGX2_CARDS
        found = plan(params=params, ranks=cards, nodes=nodes, batch_size=INFINITY_BATCH, seq_len=1024, offload="disk", state="fp32",
                     activations="recompute", clip=0, disk_cache="none", gpu_memory=INFINITY_MEMORY[params], **DGX2)
        size = float(params[:-1]) * {"b": 1e9, "t": 1e12}[params[-1]]
        if found is None:
            print(f"| ZeRO-Infinity (arXiv 2104.07857) | {params.upper()}, {nodes} DGX-2 | {published:.0f} TFLOPS a card | does not fit | | |")
            continue
        floor, expected = (
            min(8 * size * found["tokens"] / found[name] / cards / 1e12, DGX2["tflops"]) for name in ("step_seconds", "expected_seconds")
        )
        print(f"| ZeRO-Infinity (arXiv 2104.07857) | {params.upper()}, {nodes} DGX-2 of 16 V100, batch {INFINITY_BATCH} a card | {published:.0f} TFLOPS a card "
              f"| {floor:.0f} TFLOPS, {found['bound_by']} | {expected:.0f} TFLOPS | {(expected / published - 1) * 100:+.0f} % |")
    print("\nLoHan's figures are read as operations with recomputation (8 per parameter and token); it also moves activations to its")
    print("drives, which the plan leaves in 768 GiB of host memory where that pays (and is asked for no copies of state in it). DeepSpeed's runs are planned")
    print("with `--activations recompute`, as they compute. LoHan's figures for one and for six drives lie near the floor; with two,")
    print("disk and compute are equally long, which is where overlap matters most. DeepSpeed's small batches are far from theirs:")
    print("it computes and updates one after the other. ZeRO-Inference is planned with a card that leaves hardly any room for weights to")
    print("stay, and with short prompts: neither was published, and its rate of four Gen5 drives and eight is what its disk tool reads.")
    print("\nZeRO-Infinity is planned with `--ranks`: 16 V100 a node, each taken to sustain 70 TFLOPS behind 3 GB/s of link while")
    print("all 16 use theirs, 25 GB/s of drives, 100 GB/s of network and 150 GB/s of NVLink, without clipping and without copies of state.")
    print("Published is over 25 PFLOPS on 512 cards, 49 a card; the rates and the batch are assumptions, with which compute hides the rest,")
    print("so that the plan says no more than the 70. The run is not at the floor: DeepSpeed updates after backward, not beside it.")
    print("Terrace keeps whole blocks on a card, for which 1T does not fit into the 32 GB of a V100 and is refused; the row is of a card")
    print("with 64 GiB.")


if __name__ == "__main__":
    main()
