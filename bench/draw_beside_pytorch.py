#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/results/beside-pytorch.svg: training on two CPU ranks beside PyTorch, from the tables of docs/performance/training-cpu.md.

Usage: python3 bench/draw_beside_pytorch.py [--check]    (--check: ends with 1 if the committed picture is another one)
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/performance/training-cpu.md"
PICTURE = ROOT / "docs/results/beside-pytorch.svg"

LEFT, WIDTH, BAR, GAP, TOP = 190, 640, 22, 16, 62
STYLE = """
  .ground { fill: #ffffff } .ink { fill: #1c2430 } .muted { fill: #5b6675 } .bar { fill: #6d9ee8 }
  .range { stroke: #1c2430; stroke-width: 1.5 } .one { stroke: #c4560a; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #171c24 } .ink { fill: #e6e9ee } .muted { fill: #9aa6b6 } .bar { fill: #2f66b8 }
    .range { stroke: #e6e9ee } .one { stroke: #ffa057 }
  }
  text { font: 14px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif }
  .title { font-weight: 600; font-size: 16px } .small { font-size: 12px }
"""


def rows(text, pattern, names):
    """(name, factor, lowest, highest) of the lines of a table that match; `names` maps what they begin with to what the picture says."""
    for match in re.finditer(pattern, text, re.M):
        if match["name"] in names:
            yield names[match["name"]], match


def measured():
    text = PAGE.read_text().partition("\n## Beside PyTorch at its best\n")[2].partition("\n## ")[0]
    found = []
    mlp = r"^\| 2 \| (?P<name>\d+) \| (?P<median>[\d.]+) \((?P<low>[\d.]+)-(?P<high>[\d.]+)\) \| [\d.]+, met"
    for name, match in rows(text, mlp, {"32": "MLP, batch 32", "64": "MLP, batch 64", "512": "MLP, batch 512"}):
        found.append((name, float(match["median"]), float(match["low"]), float(match["high"])))
    nets = r"^\| (?P<name>\w+, 2 ranks) \| [^|]+ \| [^|]+ \| (?P<rounds>[\d., ]+) \| (?P<median>[\d.]+) \|"
    for name, match in rows(text, nets, {"lenet, 2 ranks": "LeNet, batch 64", "resnet20, 2 ranks": "ResNet-20, batch 64"}):
        rounds = [float(value) for value in match["rounds"].split(",")]
        found.append((name, float(match["median"]), min(rounds), max(rounds)))
    if len(found) != 5:
        sys.exit(f"error: {PAGE} has {len(found)} of the 5 rows that the picture shows; change the patterns in {__file__}")
    return found


def picture(found):
    scale = (WIDTH - LEFT - 60) / max(high for _, _, _, high in found)
    height = TOP + len(found) * (BAR + GAP) + 48
    one = LEFT + scale
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img"',
        '  aria-label="Speed of training on two CPU ranks, as a multiple of PyTorch\'s DistributedDataParallel">',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
        '<text class="ink title" x="16" y="28">Training on 2 CPU ranks, PyTorch with Gloo = 1</text>',
        f'<text class="muted small" x="{one:.1f}" y="52" text-anchor="middle">PyTorch</text>',
    ]
    for index, (name, median, low, high) in enumerate(found):
        top = TOP + index * (BAR + GAP)
        middle = top + BAR / 2
        lines += [
            f'<text class="ink" x="{LEFT - 12}" y="{middle + 5}" text-anchor="end">{name}</text>',
            f'<rect class="bar" x="{LEFT}" y="{top}" width="{median * scale:.1f}" height="{BAR}" rx="2"/>',
            f'<path class="range" d="M{LEFT + low * scale:.1f} {middle}H{LEFT + high * scale:.1f}"/>',
            f'<text class="ink" x="{LEFT + high * scale + 8:.1f}" y="{middle + 5}">{median:.2f}</text>',
        ]
    lines += [
        f'<path class="one" d="M{one:.1f} {TOP - 6}V{height - 48}"/>',
        f'<text class="muted small" x="16" y="{height - 26}">MLP: samples per second. LeNet and ResNet-20: steps per second. '
        "Intel-2, PyTorch's best settings.</text>",
        f'<text class="muted small" x="16" y="{height - 10}">Bars: medians of three rounds. Lines: their range.</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main():
    drawn = picture(measured())
    if sys.argv[1:] == ["--check"]:
        if not PICTURE.exists() or PICTURE.read_text() != drawn:
            sys.exit(f"error: {PICTURE.relative_to(ROOT)} is not what the tables say; run python3 bench/draw_beside_pytorch.py")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        PICTURE.write_text(drawn)


if __name__ == "__main__":
    main()
