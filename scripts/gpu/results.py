"""Reads the JSON lines of a run and prints its tables: stages, comparisons with torch's results, measurements with their ratio
to the peer's, and the ratios that are aimed at."""

import json
import math
import re
import sys

PEERS = ("torch", "deepspeed")


def columns(rows, header):
    rows = [header, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return [lines[0], "-|-".join("-" * width for width in widths), *lines[1:]]


def median(values):
    return sorted(values)[len(values) // 2]


def number(value):
    return f"{value:.0f}" if 1000 <= value < 1e9 else f"{value:.3g}"


def stages(lines):
    cell = lambda line: [line["stage"], line["status"], f"{line['seconds']:.0f} s", line.get("detail", "")]
    return columns([cell(line) for line in lines if "stage" in line], ["stage", "status", "time", "detail"])


def comparisons(lines):
    """One row an operation and variant of results that torch computed, too; every wrong one below."""
    groups, notes = {}, []
    for line in lines:
        if line.get("check") != "torch":
            continue
        groups.setdefault((line["op"], line["variant"]), []).append(line)
        if line["verdict"] != "ok":
            words = (line["verdict"], line["op"], line["variant"], f"{line['name']}: {line.get('detail', '')}")
            notes.append(" ".join(filter(None, words)))
    rows = []
    for (op, variant), cases in groups.items():
        wrong = sum(case["verdict"] != "ok" for case in cases)
        most = lambda key: number(max((case[key] for case in cases if key in case), default=math.inf))
        rows.append([op, variant, str(len(cases)), str(wrong), most("worst"), most("rms")])
    header = ["against torch", "variant", "cases", "wrong", "error / allowed", "r.m.s. error"]
    table = columns(rows, header) if rows else []
    return table + [""] * bool(notes) + notes


def rates_of(lines):
    """Rates and units by part and name, then by source and variant, in their order; and what was not measured."""
    rates, notes = {}, []
    for line in lines:
        if "part" not in line:
            continue
        if line.get("value") is None:
            notes.append(f"{line['source']}: {line['part']}: {line['name']}: {line['variant']}")
            continue
        of_name = rates.setdefault((line["part"], line["name"]), {})
        of_name.setdefault((line["source"], line["variant"]), []).append((line["value"], line["unit"]))
    return rates, notes


def measurements(lines):
    """One row a name and variant of ours; the peer's best variant beside it. Several rounds are one median."""
    rates, notes = rates_of(lines)
    order = list(rates)
    parts = [part for part, _ in order]
    order.sort(key=lambda key: parts.index(key[0]))
    rows = []
    for part, name in order:
        values = {who: (median([v for v, _ in all_]), all_[0][1]) for who, all_ in rates[part, name].items()}
        theirs = {who: rate for who, rate in values.items() if who[0] in PEERS}
        best = max(theirs, key=lambda who: theirs[who][0], default=None)
        beside = f"{number(theirs[best][0])} ({' '.join(best)})" if best else ""
        ours = {who: rate for who, rate in values.items() if who[0] not in PEERS}
        for (_, variant), (value, unit) in ours.items():
            ratio = f"{value / theirs[best][0]:.2f}" if best else ""
            rows.append([part, name, variant, number(value), unit, beside, ratio])
        if not ours:
            rows.append([part, name, "", "", theirs[best][1], beside, ""])
    table = columns(rows, ["part", "name", "variant", "terrace", "unit", "peer", "ratio"]) if rows else []
    return table + [""] * bool(notes) + notes


# What is aimed at, the least ratio, and the part, pattern of names and variants of ours that count, then the source, pattern
# of names and variants that they are divided by: of the same name where that pattern is none. Of variants the first that was
# measured is taken, which is what the engine would use.
TARGETS = [
    ("products / torch", 0.85, ("matmul", r"(NT|NN|TN) .*", ["cublaslt", "own"]), ("torch", None, ["mm"])),
    ("attention / torch's flash, S 4096, head 128", 0.6, ("attention", r"forward S4096 .*K128", ["own"]), ("torch", None, ["flash"])),
    ("its backward", 0.5, ("attention", r"backward S4096 .*K128", ["own"]), ("torch", None, ["flash"])),
    # The bandwidth is that of a copy: what the driver says it could be is not known here.
    ("AdamW / copy within the device", 0.85, ("adamw", r"fp32 .*", ["own"]), ("terrace", ("copies", "within the device"), ["plain"])),
    ("the engine's copies / plain ones", 0.95, ("copies", r".*", ["transfers"]), ("terrace", None, ["plain"])),
]  # fmt: skip


def targets(lines):
    """The least ratio of every target, and of which name it is."""
    rates, _ = rates_of(lines)

    def rate(key, source, variants):
        found = rates.get(key, {})
        variant = next((variant for variant in variants if (source, variant) in found), None)
        return median([value for value, _ in found[source, variant]]) if variant else None

    rows = []
    for what, least, (part, pattern, variants), (source, other, peers) in TARGETS:
        ratios = []
        for key in rates:
            if key[0] != part or not re.fullmatch(pattern, key[1]):
                continue
            ours, theirs = rate(key, "terrace", variants), rate(other or key, source, peers)
            if ours is not None and theirs:
                ratios.append((ours / theirs, key[1]))
        ratio, name = min(ratios, default=(None, ""))
        verdict = "not measured" if ratio is None else "met" if ratio >= least else "MISSED"
        rows.append([what, f"{least:.2f}", "" if ratio is None else f"{ratio:.2f}", verdict, name])
    return columns(rows, ["target", "at least", "measured", "", "least of all"])


def main():
    lines = []
    for text in open(sys.argv[1]):
        try:
            lines.append(json.loads(text))
        except ValueError:
            print(f"not JSON: {text.rstrip()}", file=sys.stderr)
    blocks = stages(lines), comparisons(lines), measurements(lines), targets(lines)
    print("\n\n".join("\n".join(block) for block in blocks if block))


if __name__ == "__main__":
    main()
