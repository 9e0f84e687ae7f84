"""Reads the JSON lines of a run and prints its tables: stages, and measurements with their ratio to the peer's."""

import json
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
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def stages(lines):
    cell = lambda line: [line["stage"], line["status"], f"{line['seconds']:.0f} s", line.get("detail", "")]
    return columns([cell(line) for line in lines if "stage" in line], ["stage", "status", "time", "detail"])


def measurements(lines):
    """One row a name and variant of ours; the peer's best variant beside it. Several rounds are one median."""
    rates, notes, order = {}, [], []
    for line in lines:
        if "part" not in line:
            continue
        key = line["part"], line["name"]
        if line.get("value") is None:
            notes.append(f"{line['source']}: {line['part']}: {line['name']}: {line['variant']}")
            continue
        if key not in order:
            order.append(key)
        of_name = rates.setdefault(key, {}).setdefault((line["source"], line["variant"]), [])
        of_name.append((line["value"], line["unit"]))
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


def main():
    lines = []
    for text in open(sys.argv[1]):
        try:
            lines.append(json.loads(text))
        except ValueError:
            print(f"not JSON: {text.rstrip()}", file=sys.stderr)
    print("\n".join([*stages(lines), "", *measurements(lines)]))


if __name__ == "__main__":
    main()
