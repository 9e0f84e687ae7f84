"""Large products and attention of the CPU kernels beside torch's, in turn, as a Markdown table of medians.

    cargo bench -p terrace-kernels --bench roofline --no-run      # prints the path of the executable
    python3 scripts/beside_torch.py EXECUTABLE [--rounds 5] [--threads 2] [--seconds 1] [--rows REGEX]

Rows are those of `kernels/benches/roofline.rs`; torch multiplies row-major operands in the same layouts and runs
`scaled_dot_product_attention` with a causal mask. Nothing else may run meanwhile. `--rows` matches a row's name with the type behind,
such as `512x2048x2048 NT bf16`: without AVX-512, torch needs minutes for the larger products of bf16.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import time

import torch

PRODUCTS = [(4096, 4096, 4096), (512, 2048, 2048)]
ATTENTIONS = [(2048, 64), (2048, 128)]
COLUMNS = 1024
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def median_seconds(work, seconds):
    """The median of as many passes as there is time for, three at least after a first; of one that takes a second, that one."""
    start = time.perf_counter()
    work()
    began, passes = time.perf_counter(), []
    if began - start > 1.0:
        return began - start
    while len(passes) < 3 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        work()
        passes.append(time.perf_counter() - start)
    return statistics.median(passes)


def product(m, n, l, dtype, layout, seconds):
    def new(*dims):
        return (torch.rand(dims) - 0.5).to(DTYPES[dtype])

    if layout == "NT":
        a, b = new(m, l), new(n, l)
        return median_seconds(lambda: a @ b.t(), seconds)
    if layout == "NN":
        a, b = new(m, l), new(l, n)
        return median_seconds(lambda: a @ b, seconds)
    a, b = new(l, m), new(l, n)
    return median_seconds(lambda: a.t() @ b, seconds)


def attention(positions, head, dtype, seconds):
    """Seconds of forward, and of forward and backward."""
    heads = COLUMNS // head

    def new():
        return (torch.rand(1, heads, positions, head) - 0.5).to(DTYPES[dtype])

    q, k, v = (new().requires_grad_() for _ in range(3))
    grad = new()

    def forward():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both():
        q.grad = k.grad = v.grad = None
        forward().backward(grad)

    with torch.no_grad():
        alone = median_seconds(forward, seconds)
    return alone, median_seconds(both, seconds)


def torch_rows(wanted, seconds):
    """GFLOP/s by row and dtype."""
    rows = {}

    def row(name, dtype, operations, measure):
        if wanted(name, dtype):
            rows[name, dtype] = operations / measure() / 1e9

    for dtype in DTYPES:
        for m, n, l in PRODUCTS:
            for layout in ("NT", "NN", "TN"):
                row(f"{m}x{n}x{l} {layout}", dtype, 2 * m * n * l, lambda: product(m, n, l, dtype, layout, seconds))
        for positions, head in ATTENTIONS:
            pairs = COLUMNS * positions * (positions + 1) / 2
            for name, part, operations in (("forward", 0, 4), ("both", 1, 14)):
                row(f"attention {positions}x{head} {name}", dtype, operations * pairs,
                    lambda: attention(positions, head, dtype, seconds)[part])
    return rows


def own_rows(executable, wanted, threads, seconds):
    environment = dict(os.environ, THREADS=str(threads), SECONDS=str(seconds))
    out = subprocess.run([executable, "json"], env=environment, check=True, capture_output=True, text=True)
    found = [json.loads(line) for line in out.stdout.splitlines()]
    return {(row["row"], row["dtype"]): row for row in found if wanted(row["row"], row["dtype"])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("executable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rows", default="")
    args = parser.parse_args()

    def wanted(name, dtype):
        return re.search(args.rows, f"{name} {dtype}")

    torch.set_num_threads(args.threads)
    rounds = []
    for _ in range(args.rounds):
        own = own_rows(args.executable, wanted, args.threads, args.seconds)
        rounds.append((own, torch_rows(wanted, args.seconds)))
    print(f"torch {torch.__version__}, {args.threads} threads, {args.rounds} rounds")
    print("| row | dtype | GFLOP/s | of peak | torch GFLOP/s | ratio (each round) |")
    print("|---|---|---|---|---|---|")
    for key in rounds[0][0]:
        own = statistics.median(ours[key]["gflops"] for ours, _ in rounds)
        share = statistics.median(ours[key]["share_of_peak"] for ours, _ in rounds)
        other = statistics.median(theirs[key] for _, theirs in rounds)
        ratios = sorted(ours[key]["gflops"] / theirs[key] for ours, theirs in rounds)
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {key[0]} | {key[1]} | {own:.1f} | {share:.2f} | {other:.1f} | {spread} |")


if __name__ == "__main__":
    main()
