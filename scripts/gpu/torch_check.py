"""Computes with torch what `kernel-dump` wrote down, and compares: every operation of the kernels against another implementation.

A reference is torch's own function (matmul, F.rms_norm, F.scaled_dot_product_attention, F.cross_entropy, torch.optim.AdamW, …
and autograd for gradients) in float64 on the very operands that the kernel had. An element may differ from it by one rounding
to the result's dtype, u·|reference|, plus the bound that each function below states for what the kernel computes in float32:
u is 2⁻²⁴ for f32, 2⁻⁸ for bf16, 2⁻¹¹ for f16. Copies and casts must have the very bits.

Prints a line a case on the standard error and one JSON object a case on the standard output. The exit status is 1 if a result
is wrong, cannot be read, or there is none. `--device cpu` needs no card.
"""

import argparse
import json
import math
import struct
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
# What float16 cannot hold any closer.
LEAST = {torch.float16: 2.0**-25}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64, "I32": torch.int32}
SINGLE = UNITS[torch.float32]

# A reference without a bound: the result has the reference's bits once that is rounded.
EXACT = None


class Case:
    """A file: parameters as text, operands before the operation (`case["x"]` in float64), and results."""

    def __init__(self, path, device):
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        self.facts = header.pop("__metadata__")
        self.operands, self.results = {}, {}
        for name, about in header.items():
            start, end = about["data_offsets"]
            piece = bytearray(data[8 + size + start : 8 + size + end])
            tensor = torch.frombuffer(piece, dtype=DTYPES[about["dtype"]]).reshape(about["shape"]).to(device)
            kind, name = name.split(".", 1)
            {"in": self.operands, "out": self.results}[kind][name] = tensor

    def __getitem__(self, name):
        return self.operands[name].double()

    def __contains__(self, name):
        return name in self.operands

    def integers(self, name):
        return self.operands[name].long()

    def number(self, fact):
        return float(self.facts[fact])

    def is_set(self, fact):
        return self.facts[fact] == "true"


def sums(count, magnitude):
    """Bound of a float32 sum of `count` terms of random signs whose magnitudes add up to `magnitude`, in any order.

    Rounding errors of partial sums, which grow with √count, add up with random signs or, where tensor cores cut off, all of one."""
    return (math.sqrt(count) + 8) * SINGLE * magnitude


def matmul(case):
    """Bound: `sums` of all L products and what is added; cuBLASLt may round before it adds each of them."""
    a, b = case["a"], case["b"]
    a = a.t() if case.is_set("trans_a") else a
    b = b.t() if case.is_set("trans_b") else b
    more = [case[name] for name in ("bias", "residual") if name in case]
    reference = sum(more, a @ b)
    magnitude = sum((term.abs() for term in more), a.abs() @ b.abs())
    bound = sums(a.shape[1], magnitude)
    if case.facts["variant"] == "cublaslt" and case.results["out"].dtype != torch.float32:
        rounded = len(more) * (a @ b).abs() + sum(term.abs() for term in more) * (len(more) > 1)
        bound = bound + 1.01 * UNITS[case.results["out"].dtype] * rounded
    return {"out": (reference, bound)}


def quantized(case):
    """Bound: `sums` as of a product; and elements of a of 16 bits may be off by 2⁻¹⁵ of the largest of 128, six deviations."""
    a, b = case["a"], case["b"].t()
    more = [case[name] for name in ("bias", "residual") if name in case]
    reference = sum(more, a @ b)
    bound = sums(a.shape[1], sum((term.abs() for term in more), a.abs() @ b.abs()))
    if case.operands["a"].dtype != torch.float32:
        bound = bound + 6 * 2.0**-15 * a.abs().amax(1, keepdim=True) * (b * b).sum(0).sqrt()
    return {"out": (reference, bound)}


def rms_norm(case):
    """Bound: 2⁻²¹ of the result, for a mean, a root and two products."""
    x, weight, eps = case["x"], case["weight"], case.number("eps")
    out = F.rms_norm(x, weight.shape, weight, eps)
    rstd = (x.square().mean(1) + eps).rsqrt()
    return {"out": (out, 2.0**-21 * out.abs()), "rstd": (rstd, 2.0**-21 * rstd)}


def rms_norm_backward(case):
    """Bound: 2⁻²¹ of both terms of dx, the second with magnitudes summed; `sums` over rows for dweight."""
    x, weight = case["x"].requires_grad_(), case["weight"].requires_grad_()
    dout, eps, (rows, width) = case["dout"], case.number("eps"), x.shape
    dx, dweight = torch.autograd.grad(F.rms_norm(x, (width,), weight, eps), (x, weight), dout)
    x, weight = x.detach(), weight.detach()
    rstd = (x.square().mean(1, keepdim=True) + eps).rsqrt()
    term = (dout * weight).abs()
    magnitude = rstd * term + x.abs() * rstd**3 * (term * x.abs()).mean(1, keepdim=True)
    of_weight = (dout * x * rstd).abs().sum(0)
    if "dx" in case:
        dx, magnitude = dx + case["dx"], magnitude + case["dx"].abs()
    of_weight = sums(4 * rows, of_weight + case["dweight"].abs())
    return {"dx": (dx, 2.0**-21 * magnitude), "dweight": (dweight + case["dweight"], of_weight)}


def rope(case):
    """Bound: 2⁻²² of both elements of a pair. Angles are float32 products, as in transformers."""
    x, scale = case["x"], case.number("scale")
    angles = case.operands["positions"].float()[:, None] * case.operands["inv_freq"][None]
    angles = angles.double()[:, None] * (1 if case.facts["direction"] == "forward" else -1)
    # A pair is one complex number.
    before, turning, after = x.tensor_split((int(case.facts["first"]), int(case.facts["first"]) + 2 * angles.shape[-1]), -1)
    neighbours = case.facts["pairs"] == "Neighbours"
    first, second = turning.unflatten(-1, (-1, 2)).unbind(-1) if neighbours else turning.chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.full_like(angles, scale), angles)
    bound = 2.0**-22 * scale * (first.abs() + second.abs())

    def joined(pair):
        return torch.stack(pair, -1).flatten(-2) if neighbours else torch.cat(pair, -1)

    bounds = torch.cat([torch.zeros_like(before), joined([bound, bound]), torch.zeros_like(after)], -1)
    return {"x": (torch.cat([before, joined([turned.real, turned.imag]), after], -1), bounds)}


def columns(case, moved):
    """`out` with other columns in some places."""
    out, to = case["out"].clone(), int(case.facts["to"])
    out[:, to : to + int(case.facts["width"])] = moved
    return out


def columns_copy(case):
    """The very bits."""
    start, width = int(case.facts["from"]), int(case.facts["width"])
    moved = case["x"][:, start : start + width].repeat_interleave(int(case.facts["group"]), 0)
    return {"out": (columns(case, moved), EXACT)}


def columns_fold(case):
    """Bound: `sums` over the rows of a group; the very bits elsewhere."""
    start, width, group = int(case.facts["from"]), int(case.facts["width"]), int(case.facts["group"])
    terms = case["x"][:, start : start + width].unflatten(0, (-1, group))
    out, allowed = columns(case, terms.sum(1)), torch.zeros_like(case["out"])
    to = int(case.facts["to"])
    allowed[:, to : to + width] = sums(group, terms.abs().sum(1))
    return {"out": (out, allowed)}


def columns_clear(case):
    """The very bits."""
    return {"out": (columns(case, 0), EXACT)}


class Scores:
    """Which keys a query sees, the scale, and keys and values, in rows."""

    def __init__(self, case):
        self.scale, window = case.number("scale"), int(case.facts["window"])
        # To [B, heads, positions, K].
        self.q, k, v = case["q"].transpose(1, 2), case["k"], case["v"]
        batch, _, queries, _ = self.q.shape
        if "pages" in case:
            # Where there is no page nobody looks.
            pages = case.integers("pages").clamp(min=0)
            k, v = (rows[pages].reshape(batch, -1, *rows.shape[2:]) for rows in (k, v))
        self.k, self.v = k.transpose(1, 2), v.transpose(1, 2)
        starts = case.integers("starts")
        position = (starts[:, None] + torch.arange(queries, device=starts.device))[:, None, :, None]
        key = torch.arange(self.k.shape[2], device=starts.device)
        self.sees = (key <= position) & (key > position - window if window else True)
        # Kernels for tensor cores round probabilities to the dtype of operands; else exponentials and sums in float32.
        dtype = case.operands["q"].dtype
        self.unit = UNITS[dtype] if dtype != torch.float32 else 2.0**-20

    def attention(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, self.sees, scale=self.scale, enable_gqa=True)

    def wide(self, keys):
        """Keys or values, each as often as queries share it."""
        return keys.repeat_interleave(self.q.shape[1] // keys.shape[1], 1)

    def narrow(self, squares):
        """The other way round: sums over the queries that share a key."""
        batch, _, positions, size = squares.shape
        return squares.reshape(batch, self.k.shape[1], -1, positions, size).sum(2)

    def logits(self):
        logits = self.q @ self.wide(self.k).transpose(2, 3) * self.scale
        return logits.masked_fill(~self.sees, -math.inf)


def attention(case):
    """Bound: probabilities off by a unit of the operands' dtype (of 2⁻²⁰ in f32) each, six deviations of their sum; 10⁻⁵ of lse."""
    scores = Scores(case)
    out, logits = scores.attention(scores.q, scores.k, scores.v), scores.logits()
    p, v, lse = logits.softmax(-1), scores.wide(scores.v), logits.logsumexp(-1)
    bound = 6 * scores.unit * (p.square() @ v.square()).sqrt() + 2.0**-18 * out.abs()
    return {"out": (out.transpose(1, 2), bound.transpose(1, 2)), "lse": (lse, 1e-5 * (1 + lse.abs()))}


def attention_backward(case):
    """Bound: as of the forward for probabilities and their gradients, six deviations of each sum; and the output of the forward
    was rounded to the results' dtype, which moves all gradients of a row together."""
    case.operands["starts"] = torch.zeros_like(case.operands["starts"])
    scores = Scores(case)
    leaves = [leaf.detach().contiguous().requires_grad_() for leaf in (scores.q, scores.k, scores.v)]
    dout = case["dout"].transpose(1, 2)
    out = scores.attention(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    out, (q, k, v) = out.detach(), (scores.q, scores.wide(scores.k), scores.wide(scores.v))
    p = scores.logits().softmax(-1)
    ds = p * (dout @ v.transpose(2, 3) - (out * dout).sum(-1, keepdim=True)) * scores.scale
    of_out = max(scores.unit, UNITS[case.results["dq"].dtype])
    delta = of_out * (out * dout).square().sum(-1, keepdim=True).sqrt() * scores.scale
    # Squares of deviations of every term.
    of_ds = (scores.unit * ds).square() + (2.0**-20 * scores.scale * p).square() * (dout.abs() @ v.abs().transpose(2, 3)).square()
    of_q = 6 * ((of_ds @ k.square()).sqrt() + delta * (p @ k).abs())
    of_k = 6 * scores.narrow((of_ds + (p * delta).square()).transpose(2, 3) @ q.square()).sqrt()
    of_v = 6 * scores.unit * scores.narrow(p.square().transpose(2, 3) @ dout.square()).sqrt()
    results = {"dq": (dq, of_q), "dk": (dk, of_k), "dv": (dv, of_v)}
    more = lambda value, bound: (value.transpose(1, 2), (bound + 2.0**-18 * value.abs() + 1e-6).transpose(1, 2))
    return {name: more(*result) for name, result in results.items()}


def with_sinks(out, lse, sinks):
    """out `[B, S, H, K]` and lse `[B, H, S]` of rows that have one more score each, without a value."""
    joined = torch.logaddexp(lse, sinks[:, None])
    return out * (lse - joined).exp().transpose(1, 2)[..., None], joined


def sinks(case):
    """Bound: 2⁻²⁰ of the result, for an exponential and a quotient; of lse 2⁻²² of itself and of a logarithm."""
    out, lse = with_sinks(case["out"], case["lse"], case["sinks"])
    return {"out": (out, 2.0**-20 * out.abs()), "lse": (lse, 2.0**-22 * (lse.abs() + 1))}


def sinks_backward(case):
    """Bound: `sums` over the products of all rows, 2⁻¹⁸ of each for lse in float32 and an exponential, and six deviations of what
    the rounding of out moves them."""
    sinks, dout = case["sinks"].requires_grad_(), case["dout"]
    out, lse = with_sinks(case["out"], case["lse"], sinks)
    (dsinks,) = torch.autograd.grad(out, sinks, dout)
    share = (sinks.detach()[:, None] - lse.detach()).exp().transpose(1, 2)[..., None]
    products, old = (share * out.detach() * dout).abs(), case["dsinks"]
    magnitude, squares = products.sum((0, 1, 3)), products.square().sum((0, 1, 3))
    bound = sums(out[:, :, 0].numel(), magnitude + old.abs()) + 2.0**-18 * magnitude
    return {"dsinks": (old + dsinks, bound + 6 * UNITS[case.operands["out"].dtype] * squares.sqrt())}


def append(case):
    """The very bits: rows of k and v at their places in the pages, everything else as it was."""
    starts, pages, results = case.integers("starts"), case.integers("pages"), {}
    for name in ("k", "v"):
        rows, cache = case.operands[name], case.operands[f"to_{name}"].clone()
        for b, start in enumerate(starts.tolist()):
            for i in range(rows.shape[1]):
                page = pages[b, (start + i) // cache.shape[1]]
                if page >= 0:
                    cache[page, (start + i) % cache.shape[1]] = rows[b, i].to(cache.dtype)
        results[f"to_{name}"] = cache.double(), EXACT
    return results


def clamped_swish(x):
    x = x.clamp(max=7.0)
    return x * torch.sigmoid(1.702 * x)


GATES = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clamped_swish": clamped_swish,
    "sigmoid": torch.sigmoid,
}


def factor(function, up):
    """What the function of the gate is multiplied by."""
    return up.clamp(-7.0, 7.0) + 1 if function == "clamped_swish" else up


def gate_errors(function, gate):
    """Relative error of a share, and what torch's own `1 + erf` and `1 + tanh` in float64 lose where they are small."""
    if function in ("silu", "clamped_swish", "sigmoid"):
        return 2.0**-19, 0
    return 2.0**-15, 2.0**-50 * (1 + gate.abs()) ** 3


def gated(case):
    """Bound: 2⁻¹⁹ of the result, for an exponential, a quotient and products; of GELU 2⁻¹⁵, since the exponents of its smallest
    shares, up to 88, have rounding errors of their own."""
    gate, up = case["gate"], factor(case.facts["function"], case["up"])
    out = GATES[case.facts["function"]](gate) * up
    relative, least = gate_errors(case.facts["function"], gate)
    return {"out": (out, relative * out.abs() + least * up.abs())}


def gated_backward(case):
    """Bound: as of `gated` of dup, and of dgate with the magnitudes of its two terms."""
    function = GATES[case.facts["function"]]
    gate, up, dout = case["gate"].requires_grad_(), case["up"].requires_grad_(), case["dout"]
    dgate, dup = torch.autograd.grad(function(gate) * factor(case.facts["function"], up), (gate, up), dout)
    (slope,) = torch.autograd.grad(function(gate).sum(), gate)
    gate, up = gate.detach(), factor(case.facts["function"], up.detach())
    relative, least = gate_errors(case.facts["function"], gate)
    share = function(gate) / torch.where(gate == 0, 1, gate)
    magnitude = share.abs() + (slope - share).abs()
    return {
        "dgate": (dgate, (relative * magnitude + least) * (dout * up).abs()),
        "dup": (dup, relative * dup.abs() + least * dout.abs()),
    }


def gather(case):
    """The very bits."""
    return {"out": (F.embedding(case.integers("ids"), case["table"]), EXACT)}


def scatter_add(case):
    """Bound: `sums` over the tokens that share a row."""
    ids, dout, before = case.integers("ids"), case["dout"], case["dtable"]
    table = torch.zeros_like(before).requires_grad_()
    (gradient,) = torch.autograd.grad(F.embedding(ids, table), table, dout)
    magnitude = before.abs().index_add(0, ids, dout.abs())
    return {"dtable": (before + gradient, sums(ids.bincount().max().item(), magnitude))}


def cross_entropy(case):
    """Bound of the loss: 2⁻²¹ of what each row's is the difference of. Of gradients: 2⁻²⁰ of probabilities, times their logarithms."""
    logits, labels, scale = case["logits"].requires_grad_(), case.integers("labels"), case.number("scale")
    loss = F.cross_entropy(logits, labels.where(labels >= 0, -100), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, logits)
    logits = logits.detach()
    counted, lse = (labels >= 0)[:, None], logits.logsumexp(1, keepdim=True)
    of_rows = (lse.abs() + logits.gather(1, labels.clamp(min=0)[:, None]).abs() + 1) * counted
    results = {"loss": (loss.detach() + case["loss"], 2.0**-21 * of_rows.sum())}
    if case.facts["name"].endswith("gradient"):
        hot = F.one_hot(labels.clamp(min=0), logits.shape[1])
        bound = 2.0**-20 * scale * counted * ((logits - lse).exp() * (1 + (logits - lse).abs()) + hot)
        results["logits"] = scale * gradient, bound
    else:
        results["logits"] = logits, EXACT
    return results


def chosen_and_scores(case, logits, choices):
    """Experts by descending logit, or score and bias, and all scores."""
    p = logits.sigmoid() if case.facts["scores"] == "Sigmoid" else logits.softmax(1)
    compared = p.detach() + case["bias"] if "bias" in case else logits
    if "groups" in case.facts:
        grouped = compared if case.facts["by"] == "Largest" or "bias" in case else p.detach()
        grouped = grouped.unflatten(1, (int(case.facts["groups"]), -1))
        scores = grouped.topk(1 if case.facts["by"] == "Largest" else 2, 2).values.sum(2)
        kept = scores.sort(dim=1, descending=True, stable=True).indices[:, : int(case.facts["kept"])]
        of_experts = torch.arange(logits.shape[1], device=logits.device) // grouped.shape[2]
        is_kept = (of_experts[:, None] == kept[:, None]).any(2)
        compared = compared.masked_fill(~is_kept, -math.inf)
    return compared.sort(dim=1, descending=True, stable=True).indices[:, :choices], p


def route(case):
    """The very experts, rows and starts. Bound of weights: 2⁻²⁰ of themselves, times the logarithm of the scores."""
    logits = case["logits"]
    chosen, p = chosen_and_scores(case, logits, int(case.facts["choices"]))
    p = p.gather(1, chosen)
    weights = (p / p.sum(1, keepdim=True) if case.is_set("normalize") else p) * case.number("scale")
    rows = torch.empty_like(chosen).flatten()
    rows[chosen.flatten().argsort(stable=True)] = torch.arange(chosen.numel(), device=chosen.device)
    starts = F.pad(chosen.flatten().bincount(minlength=logits.shape[1]).cumsum(0), (1, 0))
    bound = 2.0**-20 * weights * (1 - p.log())
    return {"weights": (weights, bound)} | {
        name: (value.double(), EXACT) for name, value in {"chosen": chosen, "rows": rows, "starts": starts}.items()
    }


def route_backward(case):
    """Bound: 2⁻²⁰ of probabilities times the magnitudes of what they are multiplied by, and times their logarithms."""
    logits, dweights = case["logits"].requires_grad_(), case["dweights"]
    chosen, p = chosen_and_scores(case, logits, dweights.shape[1])
    weights = p.gather(1, chosen)
    total = weights.sum(1, keepdim=True) if case.is_set("normalize") else torch.ones_like(weights[:, :1])
    weights, dweights = weights / total, case.number("scale") * dweights
    (dlogits,) = torch.autograd.grad(weights, logits, dweights)
    p, weights, total = p.detach(), weights.detach(), total.detach()
    mean = (weights * dweights.abs()).sum(1, keepdim=True)
    magnitude = torch.zeros_like(p).scatter(1, chosen, (dweights.abs() + mean) / total)
    magnitude = magnitude + (p * magnitude).sum(1, keepdim=True)
    return {"dlogits": (dlogits, 2.0**-20 * p * magnitude * (1 - p.log()))}


def spread(case):
    """The very bits."""
    x, rows = case["x"], case.integers("rows")
    out = torch.empty(rows.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    out[rows] = x[:, None].expand(-1, rows.shape[1], -1)
    return {"out": (out, EXACT)}


def collect(case):
    """Bound: `sums` over choices and the residual."""
    terms = case["x"][case.integers("rows")]
    if "residual" in case:
        terms = torch.cat([terms, case["residual"][:, None]], 1)
    return {"out": (terms.sum(1), sums(terms.shape[1], terms.abs().sum(1)))}


def weighed(x, rows, weights):
    """Each row of x multiplied by the weight of the choice that names it."""
    return x * torch.zeros_like(x[:, 0]).index_put((rows.flatten(),), weights.flatten())[:, None]


def weigh(case):
    """Bound: a rounding to f32 before that to the result's dtype."""
    out = weighed(case["x"], case.integers("rows"), case["weights"])
    return {"out": (out, SINGLE * out.abs())}


def weigh_backward(case):
    """Bound: as of `weigh` of d; `sums` over a row for gradients of weights."""
    x, weights, rows, d = case["x"].requires_grad_(), case["weights"].requires_grad_(), case.integers("rows"), case["d"]
    dx, dweights = torch.autograd.grad(weighed(x, rows, weights), (x, weights), d)
    magnitude = (d * x.detach()).abs().sum(1)[rows]
    return {"d": (dx, SINGLE * dx.abs()), "dweights": (dweights, sums(x.shape[1], magnitude))}


def add(case):
    """Bound: a rounding to f32 before that to the result's dtype."""
    out = case["a"] + case["b"]
    return {"out": (out, SINGLE * out.abs())}


def cast(case):
    """The very bits."""
    return {"out": (case["x"], EXACT)}


def sum_rows(case):
    """Bound: `sums` over rows."""
    x, before = case["x"], case["out"]
    return {"out": (before + x.sum(0), sums(x.shape[0], before.abs() + x.abs().sum(0)))}


def zero(case):
    """The very bits."""
    return {"out": (torch.zeros_like(case.results["out"]).double(), EXACT)}


def adam(case):
    """Bound: 2⁻²² of a moment and what is added to it; of a weight 2⁻²³, 2⁻²⁰ of its change, and how far the moments move it.
    A weight with a master is that, rounded, in bf16 with ties away from zero (`optimizer/src/split.rs`): the very bits."""
    master, gradient = case["master"], case["gradient"] * case.number("grad_scale")
    parameter = torch.nn.Parameter(master.clone())
    parameter.grad = gradient.clone()
    decoupled, (beta1, beta2) = case.is_set("decoupled"), (case.number("beta1"), case.number("beta2"))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([parameter], lr=case.number("lr"), betas=(beta1, beta2), eps=case.number("eps"),
                     weight_decay=case.number("decay"), foreach=False)
    step = torch.tensor(case.number("step") - 1)
    optimizer.state[parameter] = {"step": step, "exp_avg": case["m"], "exp_avg_sq": case["v"]}
    optimizer.step()
    state, now = optimizer.state[parameter], parameter.detach()
    decay = 0 if decoupled else case.number("decay") * master
    whole, seen = (gradient + decay).abs(), gradient.abs() + abs(decay)
    m, v = state["exp_avg"], state["exp_avg_sq"]
    of_m, of_v = 2.0**-22 * (case["m"].abs() + seen), 2.0**-22 * (v + (1 - beta2) * whole * seen)
    # A moment that nearly cancels moves the weight by what its terms are off.
    change = (now - master).abs()
    moved = change * (of_m / m.abs() + of_v / v).nan_to_num(0, 0)
    results = {"m": (m, of_m), "v": (v, of_v), "master": (now, 2.0**-23 * master.abs() + 2.0**-20 * change + moved)}
    if "weight" in case.results:
        found = case.results["master"]
        if case.results["weight"].dtype == torch.bfloat16:
            found = (found.view(torch.int32) + 0x8000 >> 16 << 16).view(torch.float32)
        results["weight"] = found.double(), EXACT
    return results


def sum_of_squares(case):
    """Bound: 2⁻⁴⁵ of the sum, which is of float64."""
    total = case["total"] + case["gradient"].square().sum()
    return {"total": (total, 2.0**-45 * total)}


def before_sequences(case, size):
    """The states of sequences, of `size` trailing dimensions, or zeros; which slots they are; how many positions are no padding."""
    state, starts = case["state"], case.integers("starts")
    held = state[case.integers("slots")]
    held = torch.where((starts == 0).reshape(-1, *[1] * size), 0.0, held)
    return held, case.integers("slots"), case.integers("last")


def convolved(x, before, weight):
    """The sums of a convolution over positions of x `[B, S, C]` behind `before`, for weights `[C, W]`."""
    inputs = torch.cat([before, x], 1)
    return sum(inputs[:, w : w + x.shape[1]] * weight[:, w] for w in range(weight.shape[1]))


def convolve(case):
    """Bound: `sums` over taps with the slope of SiLU, at most 1.1, and 2⁻²⁰ of the result for an exponential; states have the very bits."""
    x, weight = case["x"], case["weight"]
    taps, results = weight.shape[1], {}
    before = torch.zeros_like(x[:, :1]).repeat(1, taps - 1, 1)
    if "state" in case:
        before, slots, last = before_sequences(case, 2)
        state, inputs = case["state"], torch.cat([before, x], 1)
        for b, (slot, row) in enumerate(zip(slots.tolist(), last.tolist())):
            valid = row + 1 - b * x.shape[1]
            state[slot] = inputs[b, valid : valid + taps - 1]
        results["state"] = state, EXACT
    out = F.silu(convolved(x, before, weight))
    magnitude = convolved(x.abs(), before.abs(), weight.abs())
    return results | {"out": (out, 1.1 * sums(taps, magnitude) + 2.0**-20 * out.abs())}


def convolve_backward(case):
    """Bound: of each gradient before the SiLU 2⁻²⁰ and what the sum is off times the slope's, at most 0.5; `sums` over taps or rows."""
    x, weight = case["x"].requires_grad_(), case["weight"].requires_grad_()
    dout, taps, old = case["dout"], case["weight"].shape[1], case["dweight"]
    before = torch.zeros_like(x[:, :1]).repeat(1, taps - 1, 1).detach()
    total = convolved(x, before, weight)
    dx, dweight, dtotal = torch.autograd.grad(F.silu(total), (x, weight, total), dout)
    x, weight = x.detach(), weight.detach()
    off = 2.0**-20 * (1 + dtotal.abs()) + dout.abs() * 0.5 * sums(taps, convolved(x.abs(), before.abs(), weight.abs()))
    shifted = lambda of, w: F.pad(of, (0, 0, 0, taps - 1 - w))[:, taps - 1 - w :]
    inputs = torch.cat([before, x], 1).abs()
    of_x = sum(shifted(off + SINGLE * 12 * dtotal.abs(), w) * weight[:, w].abs() for w in range(taps))
    seen = lambda of: torch.stack([(inputs[:, w : w + x.shape[1]] * of).sum((0, 1)) for w in range(taps)], 1)
    of_weight = seen(off) + sums(x.shape[0] * x.shape[1], seen(dtotal.abs()) + old.abs())
    return {"dx": (dx, of_x), "dweight": (old + dweight, of_weight)}


def gates_of(case):
    a, b, a_log, dt_bias = leaves = [case[name].requires_grad_() for name in ("a", "b", "a_log", "dt_bias")]
    return leaves, -a_log.exp() * F.softplus(a + dt_bias), b.sigmoid()


def gates(case):
    """Bound: 2⁻²⁰ of a decay and what a sum in float32 moves it by; 2⁻²¹ of beta."""
    (a, _, a_log, dt_bias), decay, beta = gates_of(case)
    moved = SINGLE * a_log.exp() * (a.abs() + dt_bias.abs())
    return {"decay": (decay.detach(), (2.0**-20 * decay.abs() + moved).detach()), "beta": (beta.detach(), 2.0**-21 * beta.detach())}


def gates_backward(case):
    """Bound: 2⁻¹⁹ of the rate, for a sum in float32 and two exponentials; 2⁻²¹ without a rate; `sums` over rows."""
    (a, b, a_log, dt_bias), decay, beta = leaves, *_ = gates_of(case)
    ddecay, dbeta, (old, old_bias) = case["ddecay"], case["dbeta"], (case["da_log"], case["ddt_bias"])
    da, db, da_log, ddt_bias = torch.autograd.grad((decay, beta), leaves, (ddecay, dbeta))
    rate, decay = a_log.exp().detach(), decay.detach()
    of_a, of_rate = 2.0**-19 * rate * ddecay.abs(), 2.0**-19 * (decay.abs() + rate) * ddecay.abs()
    more = lambda terms, old: sums(len(terms), terms.abs().sum(0) + old.abs())
    return {
        "da": (da, of_a), "db": (db, 2.0**-21 * dbeta.abs()),
        "da_log": (old + da_log, of_rate.sum(0) + more(decay * ddecay, old)),
        "ddt_bias": (old_bias + ddt_bias, of_a.sum(0) + more(da, old_bias)),
    }  # fmt: skip


def scanned(case, qkv, decay, beta, state):
    """What comes out of every position, and the states after it, by the rule as its article has it."""
    out, states, heads = [], [], decay.shape[2]
    key_heads, size = int(case.number("key_heads")), int(case.number("key_size"))
    q, k, v = qkv.split([key_heads * size, key_heads * size, qkv.shape[2] - 2 * key_heads * size], 2)
    unit = lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    shared = lambda x: unit(x.unflatten(2, (key_heads, size))).repeat_interleave(heads // key_heads, 2)
    q, k, v = shared(q) * size**-0.5, shared(k), v.unflatten(2, (heads, -1))
    for s in range(qkv.shape[1]):
        state = state * decay[:, s, :, None, None].exp()
        delta = beta[:, s, :, None] * (v[:, s] - torch.einsum("bhkv,bhk->bhv", state, k[:, s]))
        state = state + k[:, s, :, :, None] * delta[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, s]))
        states.append(state)
    return torch.stack(out, 1), torch.stack(states, 1)


def first_state(case, values):
    batch, _, heads = case["decay"].shape
    return torch.zeros(batch, heads, int(case.number("key_size")), values, dtype=torch.float64, device=case["qkv"].device)


def scan(case):
    """Bound: 2⁻²¹ of the largest value or element of a state; zeros behind the last token."""
    qkv, decay, beta = (case[name] for name in ("qkv", "decay", "beta"))
    batch, length, _ = qkv.shape
    if "state" not in case:
        out, _ = scanned(case, qkv, decay, beta, first_state(case, case.results["out"].shape[3]))
        return {"out": (out, torch.full_like(out, 2.0**-21 * qkv.abs().max().item()))}
    held, slots, last = before_sequences(case, 3)
    out, states = scanned(case, qkv, decay, beta, held)
    state, allowed = case["state"], 2.0**-21 * max(qkv.abs().max().item(), held.abs().max().item())
    of_state = torch.zeros_like(state)
    for b, (slot, row) in enumerate(zip(slots.tolist(), last.tolist())):
        valid = row + 1 - b * length
        out[b, valid:] = 0
        state[slot], of_state[slot] = states[b, valid - 1], allowed
    return {"out": (out, torch.full_like(out, allowed)), "state": (state, of_state)}


def scan_backward(case):
    """Bound: 2⁻²⁰·√S of the largest gradient of its kind, with queries and keys that are not near zero."""
    leaves = [case[name].requires_grad_() for name in ("qkv", "decay", "beta")]
    out, _ = scanned(case, *leaves, first_state(case, case["dout"].shape[3]))
    gradients = torch.autograd.grad(out, leaves, case["dout"])
    part = 2.0**-20 * math.sqrt(out.shape[1])
    return {
        name: (gradient, torch.full_like(gradient, part * gradient.abs().max().item()))
        for name, gradient in zip(("dqkv", "ddecay", "dbeta"), gradients)
    }


OPERATIONS = [
    matmul, quantized, attention, attention_backward, sinks, sinks_backward, append, rms_norm, rms_norm_backward, rope,
    columns_copy, columns_fold, columns_clear, gated,
    gated_backward, gather, scatter_add, cross_entropy, route, route_backward, spread, collect, weigh, weigh_backward, add, cast,
    sum_rows, zero, adam, sum_of_squares, convolve, convolve_backward, gates, gates_backward, scan, scan_backward,
]  # fmt: skip
BY_NAME = {operation.__name__: operation for operation in OPERATIONS}


def compare(found, reference, bound):
    """The largest error as a part of what is allowed, and where; and the errors' root mean square relative to the reference's."""
    reference = reference.reshape(found.shape)
    exact = bound is EXACT
    if exact:
        reference, allowed = reference.to(found.dtype).double(), torch.zeros_like(reference)
    else:
        allowed = 1.01 * UNITS[found.dtype] * reference.abs() + bound.reshape(found.shape) + LEAST.get(found.dtype, 0)
    error = (found.double() - reference).abs()
    # Where nothing is allowed an error is infinitely much of it; so is not-a-number.
    parts = torch.where(error <= 0, 0.0, error / allowed).nan_to_num(math.inf, math.inf)
    worst, at = parts.flatten().max(0)
    rms = (error.square().mean() / reference.square().mean().clamp(min=1e-300)).sqrt()
    place = list(map(int, torch.unravel_index(at, found.shape)))
    there = f"{found.double().flatten()[at]:.9g} at {place} instead of {reference.flatten()[at]:.9g} ± {allowed.flatten()[at]:.3g}"
    return worst.item(), rms.item(), there


def check(path, device):
    """The line of a case."""
    line = {"source": "terrace", "check": "torch", "op": "unknown", "name": path.name, "variant": ""}
    try:
        case = Case(path, device)
        line.update({key: case.facts[key] for key in ("op", "name", "variant")})
        references = BY_NAME[case.facts["op"]](case)
        missing = references.keys() ^ case.results.keys()
        if missing:
            raise ValueError(f"results without a reference, or the other way round: {', '.join(sorted(missing))}")
        parts = {name: compare(case.results[name], *reference) for name, reference in references.items()}
    except Exception as error:
        return line | {"verdict": "UNREADABLE", "detail": f"{type(error).__name__}: {error}"}
    name = max(parts, key=lambda name: parts[name][0])
    worst, _, there = parts[name]
    # JSON has no infinity.
    line.update(worst=min(worst, 1e300), rms=min(max(rms for _, rms, _ in parts.values()), 1e300))
    if math.isnan(line["rms"]):
        line["rms"] = 1e300
    return line | ({"verdict": "ok"} if worst <= 1 else {"verdict": "WRONG", "detail": f"{name}: {there}"})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what kernel-dump wrote")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where torch computes")
    options = parser.parse_args()
    count, wrong = 0, 0
    for path in sorted(options.folder.glob("*.safetensors")):
        line = check(path, options.device)
        print(json.dumps(line), flush=True)
        count, wrong = count + 1, wrong + (line["verdict"] != "ok")
        figures = f"{line['worst']:.3g} of what is allowed, r.m.s. {line['rms']:.1e}" if "worst" in line else ""
        words = [f"{line['verdict']:5}", line["op"], line["variant"], line["name"], figures, line.get("detail", "")]
        print("  ".join(filter(None, words)), file=sys.stderr, flush=True)
    print(f"{count} cases, {wrong} wrong, torch {torch.__version__} on {options.device}", file=sys.stderr)
    return 1 if wrong or not count else 0


if __name__ == "__main__":
    sys.exit(main())
