#!/usr/bin/env python3
"""Draws a part of a timeline that `terrace finetune --trace FILE.json` wrote, as an SVG for documentation.

    python3 scripts/timeline_svg.py trace.json docs/timeline.svg --step 2

The part is one step: from the first forward of the step to that of the next. Lanes of disk and link that only hold what was in flight
beside the first are drawn as one lane, the darker the more was in flight.
"""

import argparse
import html
import json

ORDER = ["compute", "compute waits", "optimizer", "optimizer waits", "commit", "uploads", "downloads", "disk read", "disk write", "disk sync"]
COLOURS = {"waits": "#d9534f", "forward": "#7cb87c", "backward": "#3f8f5f", "optimizer": "#9b7fc0", "commit": "#7f6000"}
SHARED = {"uploads": "#4aa3a2", "downloads": "#c2779a", "disk read": "#2f6fb5", "disk write": "#d9822b", "disk sync": "#555555"}
WIDTH, LEFT, ROW, TOP = 1000, 120, 24, 28


def lane_of(event):
    name = event["tid"]
    return next((lane for lane in reversed(ORDER) if name == lane or name.startswith(lane + " ")), name)


def colour(lane, name):
    if lane in SHARED:
        return SHARED[lane]
    for word, value in COLOURS.items():
        if word in lane or name.startswith(word):
            return value
    return "#999999"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("output")
    parser.add_argument("--step", type=int, default=2, help="counted from 1 [default: 2]")
    args = parser.parse_args()
    written = json.load(open(args.trace))
    lane = {e["tid"]: e["args"]["name"] for e in written if e["name"] == "thread_name"}
    events = [{**e, "tid": lane[e["tid"]]} for e in written if e["ph"] == "X"]
    compute = sorted((e for e in events if e["tid"] == "compute"), key=lambda e: e["ts"])
    first = next(e["name"] for e in compute if e["name"].startswith("forward"))
    starts = [e["ts"] for e in compute if e["name"] == first] + [compute[-1]["ts"] + compute[-1]["dur"]]
    begin, end = starts[args.step - 1], starts[args.step]
    lanes = [lane for lane in ORDER if any(lane_of(e) == lane for e in events)]
    scale = (WIDTH - LEFT - 10) / (end - begin)
    height = TOP + ROW * len(lanes) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    seconds = (end - begin) / 1e6
    unit = next(u for u in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if seconds / u <= 10)
    for tick in range(int(seconds / unit) + 1):
        x = LEFT + tick * unit * 1e6 * scale
        parts.append(f'<path d="M{x:.1f} {TOP - 8}V{height - 8}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x + 3:.1f}" y="{TOP - 12}" fill="#666666">{tick * unit:g} s</text>')
    for row, lane in enumerate(lanes):
        y = TOP + row * ROW
        parts.append(f'<text x="4" y="{y + 15}">{lane}</text>')
        for event in sorted((e for e in events if lane_of(e) == lane), key=lambda e: e["ts"]):
            left, right = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
            if right <= left:
                continue
            width = max((right - left) * scale, 0.3)
            title = html.escape(f'{event["name"]}, {event["dur"] / 1e3:.1f} ms')
            opacity = 0.35 if lane in SHARED else 1
            parts.append(
                f'<rect x="{LEFT + (left - begin) * scale:.2f}" y="{y + 2}" width="{width:.2f}" height="{ROW - 6}" '
                f'fill="{colour(lane, event["name"])}" opacity="{opacity}"><title>{title}</title></rect>'
            )
    parts.append("</svg>\n")
    with open(args.output, "w") as file:
        file.write("\n".join(parts))


if __name__ == "__main__":
    main()
