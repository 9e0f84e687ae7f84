#!/usr/bin/env python3
"""Trains one small language model with each state format and compares the losses.

    cargo build --release
    scripts/convergence.py --text some.txt

Bytes of the text are the tokens. Every run starts from the same weights and sees the same rows in the same order; only
`--state` differs. Writes OUTPUT/convergence.svg and OUTPUT/convergence.md. Needs nothing but Python's standard library.
A run that is already in the work directory is not repeated; one that was interrupted goes on.
"""

import argparse
import array
import json
import math
import pathlib
import random
import subprocess
import zlib

SEQ_LEN, BATCH = 128, 8
COLORS = {"fp32": "#444444", "split": "#2a9d8f", "bf16": "#1f77b4", "compact": "#d62728"}
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 224,
    "intermediate_size": 608, "num_hidden_layers": 6, "num_attention_heads": 7, "num_key_value_heads": 7,
    "head_dim": 32, "hidden_act": "silu", "max_position_embeddings": SEQ_LEN, "initializer_range": 0.02,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "torch_dtype": "bfloat16",
}
NOTES = """
`split` is `fp32` bit by bit. A seed changes the order of the rows alone; what it changes in the loss of `fp32` is as large as the
differences between formats, so one run says little about half a percent of the loss on held-out text.

Where the smaller formats can be expected to fail, from how they store things (not measured here):

- `compact` keeps 8 bits of what a bf16 weight loses, rounded at random. Steps that are far below a 2⁻¹⁷th of the weight arrive on
  average, but as noise: with learning rates far below usual ones (1e-7 and less) noise is all there is, and `split` is the choice.
- Its 64 parameters of a block share the scale of a moment. Where one of them has gradients thousands of times those of its
  neighbours, as rows of an embedding that are rarely looked up can, the small ones lose their moments.
- `bf16` and `compact` round the second moment at random because its usual change is less than half a unit in the last place. With a
  beta2 much above 0.999 the noise grows against what is averaged.
"""
REGIMES = {
    "warm-up and weight decay": ["--scheduler", "cosine", "--weight-decay", "0.1", "--betas", "0.9,0.95", "--warmup-steps"],
    "constant rate": ["--scheduler", "constant", "--weight-decay", "0", "--betas", "0.9,0.999", "--warmup-steps"],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=pathlib.Path)
    parser.add_argument("--terrace", default="target/release/terrace")
    parser.add_argument("--work", default="target/convergence", type=pathlib.Path)
    parser.add_argument("--output", default="docs", type=pathlib.Path)
    parser.add_argument("--steps", default=2000, type=int)
    parser.add_argument("--rate", default="1e-3")
    parser.add_argument("--formats", default="fp32,split,bf16,compact")
    parser.add_argument("--regimes", default=",".join(REGIMES))
    parser.add_argument("--seeds", default="1", help="orders of the rows; the picture shows the first")
    parser.add_argument("--threads", default="2")
    args = parser.parse_args()
    if "fp32" not in args.formats.split(","):
        parser.error("--formats: fp32 is what the others are compared with")
    train, held_out = write_data(args)
    results = {}
    for regime in args.regimes.split(","):
        for seed in args.seeds.split(","):
            for state in args.formats.split(","):
                results[regime, seed, state] = run(args, regime, seed, state, train, held_out)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "convergence.svg").write_text(picture(results))
    (args.output / "convergence.md").write_text(page(args, results))
    print((args.output / "convergence.md").read_text())


def write_data(args):
    """The last twentieth of the text is held out."""
    (args.work / "model").mkdir(parents=True, exist_ok=True)
    (args.work / "model/config.json").write_text(json.dumps(MODEL, indent=1))
    write_weights(args.work / "model/model.safetensors")
    text = args.text.read_bytes()
    rows = [list(text[i : i + SEQ_LEN]) for i in range(0, len(text) - SEQ_LEN + 1, SEQ_LEN)]
    cut = len(rows) * 19 // 20
    paths = args.work / "train.jsonl", args.work / "held_out.jsonl"
    for path, part in zip(paths, (rows[:cut], rows[cut:])):
        path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in part))
    return paths


def write_weights(path):
    """Normal with a deviation of 0.02, as Hugging Face initializes; norms are 1."""
    hidden, inner, vocab = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["vocab_size"]
    shapes = {"model.embed_tokens.weight": [vocab, hidden]}
    for layer in range(MODEL["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + f"self_attn.{name}_proj.weight": [hidden, hidden] for name in "qkvo"}
        shapes |= {prefix + f"mlp.{name}_proj.weight": [inner, hidden] for name in ("gate", "up")}
        shapes[prefix + "mlp.down_proj.weight"] = [hidden, inner]
        shapes |= {prefix + f"{name}_layernorm.weight": [hidden] for name in ("input", "post_attention")}
    shapes |= {"model.norm.weight": [hidden], "lm_head.weight": [vocab, hidden]}
    generator, header, data = random.Random(1), {}, bytearray()
    for name, shape in shapes.items():
        count = math.prod(shape)
        values = array.array("f", [1.0] * count if len(shape) == 1 else (generator.gauss(0, 0.02) for _ in range(count)))
        start = len(data)
        # The upper halves of the floats are their bf16, truncated.
        data += array.array("H", array.array("H", values.tobytes())[1::2]).tobytes()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def run(args, regime, seed, state, train, held_out):
    """The loss of every step, and the loss on the held-out rows."""
    # Of other rows or another rate it is another run.
    rows = zlib.crc32(pathlib.Path(train).read_bytes() + pathlib.Path(held_out).read_bytes())
    folder = args.work / f"{regime.replace(' ', '-')}-{args.steps}-{args.rate}-{rows:08x}-seed{seed}-{state}"
    metrics, evaluation = folder / "metrics.jsonl", folder / "held_out.json"
    if not evaluation.exists():
        command = [args.terrace, "finetune", "--model", args.work / "model", "--data", train, "--output", folder]
        command += ["--steps", args.steps, "--seq-len", SEQ_LEN, "--batch-size", BATCH, "--learning-rate", args.rate]
        command += [*REGIMES[regime], args.steps // 20, "--seed", seed, "--state", state, "--threads", args.threads]
        command += ["--resume"] if (folder / ".terrace").exists() else []
        subprocess.run([str(word) for word in command], check=True)
        command = [args.terrace, "eval", "--model", folder, "--data", held_out, "--seq-len", SEQ_LEN, "--json"]
        evaluation.write_text(subprocess.run([str(w) for w in command], check=True, stdout=subprocess.PIPE).stdout.decode())
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert len(losses) == args.steps, f"{folder} holds {len(losses)} steps"
    return losses, json.loads(evaluation.read_text())["nll"]


def final(losses):
    last = losses[-len(losses) // 10 :]
    return sum(last) / len(last)


def page(args, results):
    lines = [
        "# State formats and the loss",
        "",
        f"A Llama of {parameters() / 1e6:.1f} million parameters on the bytes of `{args.text.name}`, {args.steps} steps of "
        f"{BATCH} × {SEQ_LEN} tokens, weights and gradients in bf16, AdamW with a rate of {args.rate}, gradients clipped to 1. All",
        "runs start from the same weights; those of one seed see the same rows in the same order. `scripts/convergence.py`",
        "made the table and the picture, which shows the first seed.",
        "",
        "![Loss by step](convergence.svg)",
        "",
        "| | seed | state | mean loss of the last tenth | beside `fp32` | loss on held-out text | beside `fp32` |",
        "|---|---|---|---|---|---|---|",
    ]
    for (regime, seed, state), (losses, held_out) in results.items():
        reference = results[regime, seed, "fp32"]
        relative = [f"{100 * (a / b - 1):+.2f} %" for a, b in ((final(losses), final(reference[0])), (held_out, reference[1]))]
        lines.append(f"| {regime} | {seed} | `{state}` | {final(losses):.4f} | {relative[0]} | {held_out:.4f} | {relative[1]} |")
    lines += ["", *means(results)]
    return "\n".join(lines) + "\n" + NOTES


def means(results):
    """What is left of the differences over all regimes and seeds, beside what a seed alone changes."""
    pairs = list(dict.fromkeys((regime, seed) for regime, seed, _ in results))
    values = {key: (final(losses), held_out) for key, (losses, held_out) in results.items()}
    lines = ["| over all of them | mean of the last tenth beside `fp32` | held out |", "|---|---|---|"]
    for state in dict.fromkeys(state for _, _, state in results):
        rows = [[values[*pair, state][i] / values[*pair, "fp32"][i] - 1 for i in (0, 1)] for pair in pairs]
        mean = [100 * sum(row[i] for row in rows) / len(rows) for i in (0, 1)]
        if state != "fp32":
            lines.append(f"| `{state}`, mean | {mean[0]:+.2f} % | {mean[1]:+.2f} % |")
    spreads = []
    for regime in dict.fromkeys(regime for regime, _ in pairs):
        of = [values[r, seed, "fp32"] for r, seed in pairs if r == regime]
        spreads.append([100 * (max(v[i] for v in of) / min(v[i] for v in of) - 1) for i in (0, 1)])
    widest = [max(spread[i] for spread in spreads) for i in (0, 1)]
    lines.append(f"| `fp32` with another seed, at most | {widest[0]:.2f} % | {widest[1]:.2f} % |")
    return lines


def parameters():
    hidden, inner = MODEL["hidden_size"], MODEL["intermediate_size"]
    layer = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    return MODEL["num_hidden_layers"] * layer + 2 * MODEL["vocab_size"] * hidden + hidden


def picture(results):
    """One panel for each regime: smoothed losses above, differences to fp32 below."""
    regimes = list(dict.fromkeys(regime for regime, _, _ in results))
    first = next(iter(results))[1]
    width, left, top = 460, 56, 40
    parts = []
    for index, regime in enumerate(regimes):
        x0 = left + index * (width + 70)
        curves = {state: smooth(losses) for (r, seed, state), (losses, _) in results.items() if (r, seed) == (regime, first)}
        steps = len(next(iter(curves.values())))
        parts.append(f'<text x="{x0}" y="16" font-size="15">{regime}</text>')
        highest = max(curve[steps // 50] for curve in curves.values())
        lowest = min(min(curve) for curve in curves.values())
        parts += panel(curves, x0, top, width, 260, lowest - 0.05, highest, "loss, mean of 50 steps", "{:.1f}")
        differences = {
            state: [100 * (a / b - 1) for a, b in zip(curve, curves["fp32"])] for state, curve in curves.items()
        }
        parts += panel(differences, x0, top + 310, width, 130, -1.5, 1.5, "% beside fp32", "{:+.1f}")
        parts.append(f'<text x="{x0 + width}" y="{top + 466}" text-anchor="end">{steps} steps</text>')
        for row, state in enumerate(curves):
            y = top + 18 + 18 * row
            parts.append(f'<line x1="{x0 + width - 96}" x2="{x0 + width - 72}" y1="{y}" y2="{y}" stroke="{COLORS[state]}" stroke-width="2"/>')
            parts.append(f'<text x="{x0 + width - 66}" y="{y + 4}">{state}</text>')
    total = left + len(regimes) * (width + 70)
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="520" {style}>\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"


def smooth(losses, width=50):
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    return [(sums[i + 1] - sums[max(0, i + 1 - width)]) / (i + 1 - max(0, i + 1 - width)) for i in range(len(losses))]


def panel(curves, x0, y0, width, height, low, high, label, form):
    parts = [f'<rect x="{x0}" y="{y0}" width="{width}" height="{height}" fill="none" stroke="#999"/>']
    parts.append(f'<text x="{x0}" y="{y0 - 5}" fill="#666">{label}</text>')
    for tick in range(5):
        value, y = low + (high - low) * tick / 4, y0 + height * (1 - tick / 4)
        parts.append(f'<line x1="{x0}" x2="{x0 + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{x0 - 5}" y="{y + 4:.1f}" text-anchor="end" fill="#666">{form.format(value)}</text>')
    for state, curve in curves.items():
        points = []
        for i in range(0, len(curve), max(1, len(curve) // 400)):
            value = min(max(curve[i], low), high)
            points.append(f"{x0 + width * i / (len(curve) - 1):.1f},{y0 + height * (high - value) / (high - low):.1f}")
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{COLORS[state]}" stroke-width="1.3"/>')
    return parts


if __name__ == "__main__":
    main()
