"""What torch does with the shapes of `kernels/benches/cuda.rs`, under the same names: one JSON object a line.

A sample is as many calls in a row as make the card's events exact, the median of samples counts, and operands are random,
as there. Bytes per second count what the fused operation has to move, so torch's eager chains show what they move on top.
`--device cpu --sizes tiny` shows that the script works, nothing else.
"""

import argparse
import json
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

PARTS = ["copies", "matmul", "attention", "rows", "quantized", "adamw"]


class Bench:
    def __init__(self, options):
        self.tiny = options.sizes == "tiny"
        self.device = torch.device(options.device)
        self.card = self.device.type == "cuda"
        self.samples = options.samples

    def size(self, full, tiny):
        return tiny if self.tiny else full

    def random(self, *dims, dtype=torch.bfloat16, grad=False):
        return torch.randn(*dims, device=self.device, dtype=dtype).requires_grad_(grad)

    def sample(self, calls, call):
        if not self.card:
            began = time.perf_counter()
            for _ in range(calls):
                call()
            return time.perf_counter() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def measure(self, part, name, variant, amount, unit, call):
        """Times `call` and prints its rate; `amount` is in operations or bytes."""
        enough, budget = self.size((5e-3, 1.0), (0.0, 0.0))
        self.sample(1, call)
        calls, taken = 1, self.sample(1, call)
        while taken < enough and calls < 1024:
            calls *= 2
            taken = self.sample(calls, call)
        count = min(self.samples, max(3, int(budget / max(taken, 1e-9))))
        samples = sorted(self.sample(calls, call) / calls for _ in range(count))
        median = samples[count // 2]
        line = {
            "source": "torch",
            "part": part,
            "name": name,
            "variant": variant,
            "value": amount / max(median, 1e-12) / (1e12 if unit == "TFLOP/s" else 1e9),
            "unit": unit,
            "milliseconds": 1e3 * median,
            "least": 1e3 * samples[0],
            "most": 1e3 * samples[-1],
            "samples": count,
        }
        print(json.dumps(line), flush=True)


def copies(bench):
    count = bench.size(256 << 20, 1 << 20)
    host = [torch.zeros(count, dtype=torch.uint8, pin_memory=bench.card) for _ in range(2)]
    card = [torch.zeros(count, dtype=torch.uint8, device=bench.device) for _ in range(2)]
    up = lambda: card[0].copy_(host[0], non_blocking=True)
    down = lambda: host[1].copy_(card[1], non_blocking=True)
    bench.measure("copies", "host to device", "pinned", count, "GB/s", up)
    bench.measure("copies", "device to host", "pinned", count, "GB/s", down)
    bench.measure("copies", "within the device", "copy_", 2 * count, "GB/s", lambda: card[1].copy_(card[0]))
    if not bench.card:
        return
    other = torch.cuda.Stream()

    def both():
        other.wait_stream(torch.cuda.current_stream())
        up()
        with torch.cuda.stream(other):
            down()
        torch.cuda.current_stream().wait_stream(other)

    bench.measure("copies", "both at once", "pinned", 2 * count, "GB/s", both)


def matmul(bench):
    full = [(4096, 4096, 4096), (8192, 8192, 4096), (8192, 14336, 4096)]
    for m, n, l in bench.size(full, [(64, 64, 64), (128, 96, 64), (96, 160, 64)]):
        operations = 2 * m * n * l
        a, b, bt, at = bench.random(m, l), bench.random(l, n), bench.random(n, l), bench.random(l, m)
        out = torch.empty(m, n, device=bench.device, dtype=torch.bfloat16)
        # Ours adds to f32 in TN; torch's gradient of a weight is bf16, so that is what it is measured with.
        calls = {"NT": (a, bt.t()), "NN": (a, b), "TN": (at.t(), b)}
        for layout, (left, right) in calls.items():
            call = lambda: torch.mm(left, right, out=out)
            bench.measure("matmul", f"{layout} {m}x{n}x{l}", "mm", operations, "TFLOP/s", call)


def attention(bench):
    s, heads, kv_heads = bench.size((4096, 32, 8), (96, 4, 1))
    backends = [("flash", SDPBackend.FLASH_ATTENTION)]
    if bench.card:
        backends.append(("cudnn", SDPBackend.CUDNN_ATTENTION))
    for size in (128, 64):
        shape = f"S{s} H{heads} G{kv_heads} K{size}"
        operations = 4 * heads * (s * (s + 1) // 2) * size
        q = bench.random(1, heads, s, size, grad=True)
        k, v = (bench.random(1, kv_heads, s, size, grad=True) for _ in range(2))
        dout = bench.random(1, heads, s, size)
        for variant, backend in backends:
            try:
                with sdpa_kernel(backend):
                    run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                    with torch.no_grad():
                        bench.measure("attention", f"forward {shape}", variant, operations, "TFLOP/s", run)
                    out = run()
                    back = lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
                    bench.measure("attention", f"backward {shape}", variant, operations * 5 // 2, "TFLOP/s", back)
            except RuntimeError as error:
                print(f"attention {shape} with {variant}: not measured: {error}", file=sys.stderr)


def rows(bench):
    tokens, hidden, wide = bench.size((8192, 4096, 14336), (64, 128, 256))
    size, shape = 2 * tokens * hidden, f"{tokens}x{hidden}"

    def pair(name, variant, amount, back_amount, inputs, run):
        with torch.no_grad():
            bench.measure("rows", name, variant, amount, "GB/s", run)
        out = run()
        dout = torch.randn_like(out)
        back = lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
        first, rest = name.split(" ", 1)
        bench.measure("rows", f"{first} backward {rest}", variant, back_amount, "GB/s", back)

    x, weight = bench.random(tokens, hidden, grad=True), bench.random(hidden, grad=True)
    norm = lambda: F.rms_norm(x, (hidden,), weight, 1e-5)
    pair(f"rms_norm {shape}", "F.rms_norm", 2 * size, 3 * size, (x, weight), norm)
    gate, up = (bench.random(tokens, wide, grad=True) for _ in range(2))
    unit = 2 * tokens * wide
    swiglu = lambda: F.silu(gate) * up
    pair(f"swiglu {tokens}x{wide}", "eager", 3 * unit, 5 * unit, (gate, up), swiglu)
    del gate, up
    with torch.no_grad():
        a, b, out = bench.random(tokens, hidden), bench.random(tokens, hidden), bench.random(tokens, hidden)
        single = torch.zeros(tokens, hidden, device=bench.device)
        add = lambda: torch.add(a, b, out=out)
        bench.measure("rows", f"add {shape}", "add", 3 * size, "GB/s", add)
        bench.measure("rows", f"cast f32 to bf16 {shape}", "copy_", 3 * size, "GB/s", lambda: out.copy_(single))
        bench.measure("rows", f"add bf16 to f32 {shape}", "add_", 5 * size, "GB/s", lambda: single.add_(a))
        total = lambda: a.sum(0, dtype=torch.float32)
        bench.measure("rows", f"sum_rows {shape}", "sum", size, "GB/s", total)
        del a, b, out, single
    tokens, words = bench.size((4096, 128256), (16, 512))
    logits = bench.random(tokens, words, grad=True)
    labels = torch.arange(tokens, device=bench.device)
    size, shape = 2 * tokens * words, f"{tokens}x{words}"
    loss = lambda: F.cross_entropy(logits, labels)
    with torch.no_grad():
        bench.measure("rows", f"cross_entropy {shape}", "eager", size, "GB/s", loss)
    both = lambda: torch.autograd.grad(loss(), logits)
    bench.measure("rows", f"cross_entropy and gradient {shape}", "eager", 2 * size, "GB/s", both)


def quantized(bench):
    """Products of a few rows with bf16 weights, one matrix after another so that none is in a cache."""
    n, l = bench.size((14336, 4096), (64, 256))
    weights = [bench.random(n, l) for _ in range(4)]
    for m in (1, 8, 16):
        x, turn = bench.random(m, l), [0]

        def call():
            turn[0] += 1
            torch.mm(x, weights[turn[0] % len(weights)].t())

        bench.measure("quantized", f"bf16 m{m} {n}x{l}", "mm", 2 * n * l, "GB/s", call)


def adamw(bench):
    count = bench.size(1 << 27, 1 << 16)
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        parameter = torch.nn.Parameter(torch.zeros(count, device=bench.device, dtype=dtype))
        parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW([parameter], lr=1e-5, fused=True)
        # Parameter and both moments are read and written, the gradient is read.
        moved = 7 * count * parameter.element_size()
        bench.measure("adamw", f"{name} {count}", "fused", moved, "GB/s", optimizer.step)
        del parameter, optimizer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--sizes", choices=["full", "tiny"], default="full")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(options)
    for part in options.only.split(","):
        if part not in PARTS:
            parser.error(f"there is no part `{part}`")
        globals()[part](bench)


if __name__ == "__main__":
    main()
