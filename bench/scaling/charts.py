# SPDX-License-Identifier: Apache-2.0
"""The pictures, as SVG whose colours are CSS variables: they follow the reader's light or dark theme."""

import io
import math
import re

from scaling import UserError, plan
from scaling.text import number

try:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
except ImportError:
    matplotlib = None

WIDTH, HEIGHT = 430, 300  # SVG units, which are CSS pixels on a wide page
# name: (light, dark). Charts are drawn in stand-in colours, which become var(--NAME, LIGHT) in the SVG.
PALETTE = {
    "ink": ("#1c2430", "#e6e9ee"),
    "muted": ("#5b6675", "#9aa6b6"),
    "line": ("#dde2e9", "#333c49"),
    "surface": ("#ffffff", "#171c24"),
    "blue": ("#1f63d0", "#74a9ff"),
    "orange": ("#c4560a", "#ffa057"),
    "teal": ("#0b7d71", "#46cdbb"),
    "violet": ("#7a3fc2", "#bf97f5"),
    "grey": ("#a3adbb", "#5d697a"),
    "shade": ("#f1f3f6", "#1f2630"),
}
STAND_IN = {name: f"#0000{index + 1:02x}" for index, name in enumerate(PALETTE)}
C = STAND_IN
SCALING_STYLE = {"weak": ("blue", "o"), "strong": ("orange", "s")}
SIDE_COLOURS = {"A": "blue", "B": "orange"}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def require():
    if matplotlib is None:
        raise UserError("the report needs matplotlib: install it (Debian: python3-matplotlib; pip install matplotlib)")


def css_variables():
    """The palette as CSS, for a page or for an SVG file of its own."""
    light = "".join(f"--{name}:{light};" for name, (light, _) in PALETTE.items())
    dark = "".join(f"--{name}:{dark};" for name, (_, dark) in PALETTE.items())
    return f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def new_figure(height=HEIGHT):
    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",
            "font.size": 12,
            "axes.edgecolor": C["line"],
            "axes.labelcolor": C["muted"],
            "axes.titlesize": 13,
            "axes.titleweight": "bold",
            "axes.titlecolor": C["ink"],
            "axes.titlelocation": "left",
            "axes.titlepad": 12,
            "text.color": C["ink"],
            "xtick.color": C["line"],
            "ytick.color": C["line"],
            "xtick.labelcolor": C["muted"],
            "ytick.labelcolor": C["muted"],
            "axes.facecolor": C["surface"],
            "figure.facecolor": C["surface"],
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "grid.color": C["line"],
            "grid.linewidth": 0.8,
            "axes.axisbelow": True,
            "legend.frameon": False,
            "legend.fontsize": 11,
            "xtick.major.size": 0,
            "ytick.major.size": 0,
            "lines.linewidth": 2.2,
            "lines.markersize": 7,
            "legend.labelcolor": C["ink"],
        }
    )
    figure, axes = pyplot.subplots(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    return figure, axes


def finish(figure, name, description):
    """The figure as SVG for a page. `name` keeps its ids apart from those of other pictures."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    pyplot.close(figure)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(url\(#|xlink:href="#)', rf"\g<1>{name}-", svg)
    for colour, stand_in in STAND_IN.items():
        svg = svg.replace(stand_in, f"var(--{colour}, {PALETTE[colour][0]})")
    svg = re.sub(r"font: ((?:bold |\d+ )?[\d.]+px) [^;\"]*", lambda m: f"font: {m.group(1)} {FONT}", svg)
    width, height = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg).groups()
    svg = re.sub(
        r'width="[\d.]+pt" height="[\d.]+pt"',
        f'width="{width}" height="{height}" role="img" aria-label="{description}"',
        svg,
        count=1,
    )
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip())


def as_file(svg):
    """The picture as a file of its own, with its colours in it."""
    return svg.replace(">", f"><style>{css_variables()}</style>", 1) + "\n"


def rank_axis(axes, ranks, first_oversubscribed):
    """Ranks on a logarithmic axis, the oversubscribed part shaded and named."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_xlim(min(ranks) / 1.2, max(ranks) * 1.2)
    if first_oversubscribed:
        below = [n for n in ranks if n < first_oversubscribed]
        left = math.sqrt(below[-1] * first_oversubscribed) if below else min(ranks) / 1.2
        axes.axvspan(left, max(ranks) * 1.2, color=C["shade"], zorder=0, linewidth=0)
        axes.text(
            max(ranks) * 1.2,
            1.02,
            "oversubscribed",
            transform=axes.get_xaxis_transform(),
            ha="right",
            va="bottom",
            color=C["muted"],
            fontsize=10.5,
            style="italic",
        )


def first_oversubscribed(points):
    return min((p["ranks"] for p in points if p["oversubscribed"]), default=None)


def draw_series(axes, points, value, low, high, colour, marker, label):
    """A line through points with the range of their rounds; hollow markers where the machine is oversubscribed."""
    points = [p for p in points if p[value] is not None]
    if not points:
        return
    x, y = [p["ranks"] for p in points], [p[value] for p in points]
    if low:
        spread = [[max(0.0, p[value] - p[low]) for p in points], [max(0.0, p[high] - p[value]) for p in points]]
        axes.errorbar(
            x, y, yerr=spread, fmt="none", ecolor=C[colour], elinewidth=1.2, capsize=3, capthick=1.2, alpha=0.75
        )
    axes.plot(
        x, y, color=C[colour], zorder=3, label=label, marker=marker, markeredgecolor=C["surface"], markeredgewidth=1.2
    )
    hollow = [(p["ranks"], p[value]) for p in points if p["oversubscribed"]]
    if hollow:
        axes.plot(
            *zip(*hollow),
            linestyle="none",
            marker=marker,
            markerfacecolor=C["surface"],
            markeredgecolor=C[colour],
            markeredgewidth=1.8,
            zorder=4,
        )


def by_scaling(points):
    return {
        scaling: [p for p in points if p["scaling"] == scaling]
        for scaling in ("weak", "strong")
        if any(p["scaling"] == scaling for p in points)
    }


def speedup(points, name):
    """`points`: of one case."""
    figure, axes = new_figure()
    ranks = sorted({p["ranks"] for p in points})
    rank_axis(axes, ranks, first_oversubscribed(points))
    base = ranks[0]
    axes.plot(
        ranks,
        [n / base for n in ranks],
        color=C["muted"],
        linewidth=1.3,
        linestyle=(0, (4, 3)),
        label="ideal",
        marker="",
    )
    for scaling, of_scaling in by_scaling(points).items():
        scaled = [
            {
                **p,
                **{
                    f"speedup_{end}": (p[f"efficiency_{end}"] or 0) * p["ranks"] / p["base_ranks"]
                    for end in ("min", "max")
                },
            }
            for p in of_scaling
        ]
        draw_series(axes, scaled, "speedup", "speedup_min", "speedup_max", *SCALING_STYLE[scaling], scaling)
    axes.set_ylim(bottom=0)
    axes.set_title(f"Speed-up over {plan.count(base, 'rank')}")
    axes.legend(loc="upper left")
    return finish(figure, name, f"Speed-up over ranks, weak and strong scaling, {points[0]['title']}")


def efficiency(points, name):
    figure, axes = new_figure()
    ranks = sorted({p["ranks"] for p in points})
    rank_axis(axes, ranks, first_oversubscribed(points))
    axes.axhline(1, color=C["muted"], linewidth=1.3, linestyle=(0, (4, 3)))
    for scaling, of_scaling in by_scaling(points).items():
        colour, marker = SCALING_STYLE[scaling]
        draw_series(axes, of_scaling, "efficiency", "efficiency_min", "efficiency_max", colour, marker, scaling)
        alone = [p for p in of_scaling if p["efficiency_without_reduction"] is not None]
        axes.plot(
            [p["ranks"] for p in alone],
            [p["efficiency_without_reduction"] for p in alone],
            color=C[colour],
            linewidth=1.3,
            linestyle=(0, (1, 2)),
            marker="",
            label=f"{scaling}, without reduction",
        )
    dotted = max(p["efficiency_without_reduction"] or 0 for p in points)
    percent_axis(axes, max(1.0, *(p["efficiency_max"] or 0 for p in points)), dotted)
    axes.set_title("Efficiency against ideal scaling")
    axes.legend(loc="lower left")
    return finish(figure, name, f"Efficiency over ranks, weak and strong scaling, {points[0]['title']}")


def percent_axis(axes, highest, dotted=0.0):
    """`highest`: of the points; `dotted`: of a line without markers."""
    axes.set_ylim(0, max(1.12 * highest, 1.02 * dotted))
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))


BREAKDOWN = (
    ("ideal_ms", "ideal", "blue"),
    ("cores_ms", "fewer cores than ranks", "grey"),
    ("sharing_ms", "shared machine", "teal"),
    ("reduction_ms", "communication", "orange"),
)


def breakdown(points, scaling, name):
    """What a step's time is made of, one bar for each number of ranks. `points`: of one case and kind of scaling."""
    figure, axes = new_figure()
    width = 0.56
    shown = set()
    for x, p in enumerate(points):
        parts = {"ideal_ms": p["step_ms"]} if p["ideal_ms"] is None else p
        bottom = 0.0
        for key, _, colour in BREAKDOWN:
            # A part may be negative (a gain): what comes before it then fills the bar.
            height = min(max(0.0, parts.get(key) or 0.0), p["step_ms"] - bottom)
            axes.bar(x, height, width, bottom=bottom, color=C[colour], linewidth=0)
            bottom += height
            if height > 1e-6 * p["step_ms"]:  # else rounding
                shown.add(key)
        time = f"{number(p['step_ms'])} ms"
        axes.annotate(time, (x, bottom), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=11)
    handles = [
        matplotlib.patches.Patch(color=C[colour], label=label) for key, label, colour in BREAKDOWN if key in shown
    ]
    top = axes.get_ylim()[1]
    axes.set_ylim(0, top * (1.12 + 0.1 * len(handles)))
    axes.set_xticks(range(len(points)), [f"{p['ranks']}{'*' if p['oversubscribed'] else ''}" for p in points])
    axes.set_xlim(-0.6, max(1, len(points) - 1) + 0.6)
    axes.set_xlabel("ranks" + ("  (* oversubscribed)" if any(p["oversubscribed"] for p in points) else ""))
    axes.set_title(f"Time of a step, {scaling} scaling (ms)")
    axes.legend(handles=handles[::-1], loc="upper left" if scaling == "weak" else "upper right")
    return finish(figure, name, f"What a step's time is made of, {scaling} scaling, {points[0]['title']}")


def timeline(run, name):
    """The buckets of a run's last step."""
    buckets = run["buckets"]
    figure, axes = new_figure(max(190, min(460, 110 + 26 * len(buckets))))
    end = max(b["done_ms"] for b in buckets)
    for y, b in enumerate(buckets):
        if b["launched_ms"] > b["ready_ms"]:
            axes.barh(y, b["launched_ms"] - b["ready_ms"], 0.16, left=b["ready_ms"], color=C["grey"])
        # Too short a bar would not be seen.
        axes.barh(
            y,
            max(b["done_ms"] - b["launched_ms"], 0.006 * end),
            0.52,
            left=b["launched_ms"],
            color=C["violet"],
            linewidth=0,
        )
    ready = max(b["ready_ms"] for b in buckets)
    axes.axvline(ready, color=C["muted"], linewidth=1.3, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(buckets)), [f"{b['mib']:.2f} MiB" for b in buckets])
    axes.set_ylim(len(buckets) - 0.4, -0.6)
    axes.set_xlim(0, 1.04 * end)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("ms since the step's first gradient")
    axes.set_title(
        f"Reduction of each bucket, {plan.count(run['ranks'], 'rank')}"
        + (" (oversubscribed)" if run["oversubscribed"] else "")
    )
    return finish(figure, name, f"When each bucket of gradients was reduced, {plan.count(run['ranks'], 'rank')}")


def exposed_over_buckets(rows, name):
    """`rows`: (label of the bucket size, point) of one model, all else equal."""
    figure, axes = new_figure()
    for x, (_, p) in enumerate(rows):
        axes.bar(x, p["exposed_ms"] or 0, 0.56, color=C["orange"], linewidth=0)
        axes.bar(x, p["hidden_ms"] or 0, 0.56, bottom=p["exposed_ms"] or 0, color=C["violet"], linewidth=0)
    axes.set_xticks(range(len(rows)), [label for label, _ in rows])
    axes.set_xlim(-0.6, max(1, len(rows) - 1) + 0.6)
    axes.set_ylim(0, 1.3 * max(axes.get_ylim()[1], 1e-6))
    axes.set_xlabel("size of buckets")
    p = rows[0][1]
    axes.set_title(
        f"Communication per step, {plan.count(p['ranks'], 'rank')}{' (oversubscribed)' if p['oversubscribed'] else ''}"
        " (ms)"
    )
    axes.legend(
        handles=[
            matplotlib.patches.Patch(color=C["violet"], label="hidden behind backward"),
            matplotlib.patches.Patch(color=C["orange"], label="exposed"),
        ],
        loc="upper right",
    )
    return finish(figure, name, "Exposed and hidden communication over the size of buckets")


def reductions(points, name):
    """What each way to reduce adds to the step without reduction. `points`: of one training, on as many ranks."""
    figure, axes = new_figure()
    for x, p in enumerate(points):
        alone, added = p["step_ms_without_reduction"] or p["step_ms"], p["added_ms"] or 0.0
        axes.bar(x, alone, 0.56, color=C["blue"], linewidth=0)
        axes.bar(x, max(0.0, added), 0.56, bottom=alone, color=C["orange"], linewidth=0)
        if p["added_ms"] is not None:
            spread = [[max(0.0, added - p["added_ms_min"])], [max(0.0, p["added_ms_max"] - added)]]
            axes.errorbar(x, alone + added, yerr=spread, fmt="none", ecolor=C["ink"], elinewidth=1.2, capsize=3)
        top = alone + max(0.0, added, p["added_ms_max"] or 0.0)
        sign = "+" if added >= 0 else "−"
        axes.annotate(
            f"{sign}{number(abs(added))}", (x, top), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=11
        )
    axes.set_xticks(range(len(points)), [p["reduction"] for p in points])
    axes.set_xlim(-0.6, max(1, len(points) - 1) + 0.6)
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])
    axes.set_xlabel("--reduce")
    axes.set_title(f"Time of a step, {plan.count(points[0]['ranks'], 'rank')} (ms)")
    axes.legend(
        handles=[
            matplotlib.patches.Patch(color=C["orange"], label="added by reduction"),
            matplotlib.patches.Patch(color=C["blue"], label="without reduction"),
        ],
        loc="upper left",
    )
    return finish(figure, name, f"What each way to reduce adds to a step, {points[0]['training']}")


def predicted(points, rows, name):
    """Measured efficiency of one training with weak scaling, and, dashed, what the model says of more ranks."""
    figure, axes = new_figure()
    points = [p for p in points if not p["oversubscribed"]]
    axes.set_xscale("log", base=10)
    axes.axhline(1, color=C["muted"], linewidth=1.3, linestyle=(0, (4, 3)))
    draw_series(axes, points, "efficiency", "efficiency_min", "efficiency_max", *SCALING_STYLE["weak"], "measured")
    last = points[-1]
    x = [last["ranks"], *(row["ranks"] for row in rows if row["ranks"] > last["ranks"])]
    y = [last["efficiency"], *(row["efficiency"] for row in rows if row["ranks"] > last["ranks"])]
    axes.plot(x, y, color=C["blue"], linewidth=1.8, linestyle=(0, (5, 3)), marker="", label="predicted")
    percent_axis(axes, 1.0)
    axes.set_xlabel("ranks")
    axes.set_title("Predicted efficiency, weak scaling")
    axes.legend(loc="lower left")
    return finish(figure, name, f"Measured and predicted efficiency, {points[0]['title']}")


def two_sides(sides, value, title, name, percent=False):
    """`sides`: label A or B to points of one case and kind of scaling."""
    figure, axes = new_figure()
    everything = [p for points in sides.values() for p in points]
    rank_axis(axes, sorted({p["ranks"] for p in everything}), first_oversubscribed(everything))
    spread = ("efficiency_min", "efficiency_max") if percent else (None, None)
    for side, points in sides.items():
        draw_series(axes, points, value, *spread, SIDE_COLOURS[side], "o" if side == "A" else "s", side)
    if percent:
        axes.axhline(1, color=C["muted"], linewidth=1.3, linestyle=(0, (4, 3)))
        percent_axis(axes, max(1.0, *(p["efficiency_max"] or 0 for p in everything)))
    else:
        axes.set_ylim(0, 1.15 * max(p[value] or 0 for p in everything))
        axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    axes.set_title(title)
    axes.legend(loc="lower left" if percent else "upper left")
    return finish(figure, name, title)
