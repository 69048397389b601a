# SPDX-License-Identifier: Apache-2.0
"""The page of two results side by side: two machines, builds or settings. Pure functions, but for `write`."""

import os

from scaling import analysis, charts, markup, plan, result as result_file
from scaling.markup import escape, file_stem, percent_range
from scaling.text import number


def pairs(points_a, points_b):
    """Points of A and B for the same case, scaling and number of ranks; and the titles of those without a match.

    Where each side has just one case of a model, that may differ: two settings, or a CPU and a GPU.
    """

    def cases(model, scaling, points):
        return {p["case"] for p in points if (p["model"], p["scaling"]) == (model, scaling)}

    def key(p):
        single = all(len(cases(p["model"], p["scaling"], points)) == 1 for points in (points_a, points_b))
        return p["model"] if single else p["case"], p["scaling"], p["ranks"]

    by_key = {key(p): p for p in points_b}
    matched = [(p, by_key[key(p)]) for p in points_a if key(p) in by_key]
    found = {key(a) for a, _ in matched}
    alone = {
        side: [f"{p['title']}, {p['scaling']}, {plan.count(p['ranks'], 'rank')}" for p in points if key(p) not in found]
        for side, points in (("A", points_a), ("B", points_b))
    }
    return matched, alone


def title(a, b):
    return a["title"] if a["title"] == b["title"] else f"A: {a['title']}; B: {b['title']}"


def cost_per_million(point, price_per_hour):
    return None if price_per_hour is None else price_per_hour / 3600 / point["samples_per_second"] * 1e6


def table(matched, prices):
    priced = any(price is not None for price in prices)
    head = [
        "ranks",
        "batch",
        "A samples/s",
        "B samples/s",
        "B / A",
        "A efficiency",
        "B efficiency",
        "A exposed (ms)",
        "B exposed (ms)",
    ]
    metered = any(p["joules_per_sample"] is not None for pair in matched for p in pair)
    if metered:
        head += ["A energy (J a sample)", "B energy (J a sample)"]
    rows, last = [], None
    for a, b in matched:
        if (a["case"], a["scaling"]) != last:
            last = a["case"], a["scaling"]
            rows.append(("case", [f"{escape(title(a, b))} – {a['scaling']}"]))
        over = [side for side, p in (("A", a), ("B", b)) if p["oversubscribed"]]
        badge = f" <span class=badge>oversubscribed{'' if len(over) == 2 else ' on ' + over[0]}</span>" if over else ""
        batch = str(a["batch"]) if a["batch"] == b["batch"] else f"{a['batch']} and {b['batch']}"
        row = [
            f"{a['ranks']}{badge}",
            batch,
            number(a["samples_per_second"], 4),
            number(b["samples_per_second"], 4),
            f"{b['samples_per_second'] / a['samples_per_second']:.2f}",
            percent_range(a, "efficiency"),
            percent_range(b, "efficiency"),
            number(a["exposed_ms"]),
            number(b["exposed_ms"]),
        ]
        if metered:
            row += [number(a["joules_per_sample"]), number(b["joules_per_sample"])]
        if priced:
            costs = [cost_per_million(p, price) for p, price in zip((a, b), prices)]
            ratio = "–" if None in costs else f"{costs[1] / costs[0]:.2f}"
            row += [number(costs[0]), number(costs[1]), ratio]
        rows.append(("over" if over else "", row))
    return markup.table(head + (["A cost", "B cost", "B / A cost"] if priced else []), rows)


def pictures(matched):
    """(file name, SVG, caption) of every case and kind of scaling."""
    found = []
    for case, scaling in dict.fromkeys((a["case"], a["scaling"]) for a, _ in matched):
        both = [(a, b) for a, b in matched if (a["case"], a["scaling"]) == (case, scaling)]
        sides = {"A": [a for a, _ in both], "B": [b for _, b in both]}
        stem = "compare-" + file_stem(f"{case}-{scaling}")
        caption = f"{title(*both[0])}, {scaling} scaling."
        found.append(
            (
                f"{stem}-rate",
                charts.two_sides(sides, "samples_per_second", "Samples per second", f"{stem}-rate"),
                caption,
            )
        )
        found.append(
            (
                f"{stem}-efficiency",
                charts.two_sides(sides, "efficiency", "Efficiency", f"{stem}-efficiency", percent=True),
                caption,
            )
        )
    return found


def environments(a, b):
    rows = []
    for (name, in_a), (_, in_b) in zip(
        markup.environment_pairs(a["environment"]), markup.environment_pairs(b["environment"])
    ):
        if in_a or in_b:
            rows.append([escape(name), markup.value_html(in_a or "–"), markup.value_html(in_b or "–")])
    rows.insert(0, ["Command", escape(a["command"]), escape(b["command"])])
    return markup.table(["", "A", "B"], rows, (0, 1, 2), wrapped=(1, 2))


# What changes figures but is not in the key of a case, and its name; see settings_of in main.py.
SETTINGS = {"threads": "threads of a rank", "data": "data", "seconds": "seconds of a run"}


def differences(a, b, matched):
    """Sentences about what makes figures in one row differ beside what is compared. `a`, `b`: settings."""
    found = []
    other = [(p, q) for p, q in matched if p["base_ranks"] != q["base_ranks"]]
    if other:
        p, q = other[0]
        found.append(
            f"The efficiencies have different bases, and cannot be compared, first for {title(p, q)}, {p['scaling']}:"
            f" those of A are relative to {plan.count(p['base_ranks'], 'rank')}, those of B to"
            f" {plan.count(q['base_ranks'], 'rank')}."
        )
    for name, words in SETTINGS.items():
        if matched and a.get(name) != b.get(name):
            # No data set means random images.
            in_a, in_b = (settings.get(name) or "not given" for settings in (a, b))
            found.append(f"The two were measured with other {words}: {in_a} in A, {in_b} in B.")
    return found


def notices(a, b, matched, alone):
    found = []
    for side, result in (("A", a), ("B", b)):
        found += [(kind, f"{side}: {text}") for kind, text in analysis.notices(result, analysis.points(result))]
    if not matched:
        found.append(("bad", "The results have no case, kind of scaling and number of ranks in common."))
    elif any(p["batch"] != q["batch"] for p, q in matched):
        found.append(("warn", "The batches differ, so the rates compare different work."))
    found += [("warn", text) for text in differences(a["settings"], b["settings"], matched)]
    found += [
        ("warn", f"Only in {side}: {'; '.join(titles[:6])}{' and more' if len(titles) > 6 else ''}.")
        for side, titles in alone.items()
        if titles
    ]
    return found


def render(a, b, names, prices):
    """The page, and the pictures as {file name: SVG}."""
    matched, alone = pairs(analysis.points(a), analysis.points(b))
    drawn = pictures(matched)
    costs = "; ".join(f"{side} costs {price:g} an hour" for side, price in zip("AB", prices) if price is not None)
    body = [
        "<h1>Scaling of training: two results</h1>",
        (
            f"<p><b>A</b>: {escape(names[0])}, {escape(markup.machine(a['environment']))}<br>"
            f"<b>B</b>: {escape(names[1])}, {escape(markup.machine(b['environment']))}</p>"
        ),
        markup.notices(notices(a, b, matched, alone)),
    ]
    if matched:
        body += ["<h2>Rates</h2>", table(matched, prices)]
        if costs:
            body.append(f"<p class=muted>Cost: of a million samples. {escape(costs)}.</p>")
        body.append(
            "<p class=muted>The two were measured at different times, so unlike the points of one result they did not"
            " take turns.</p>"
        )
        body.append(
            '<div class="grid">' + "\n".join(markup.figure(svg, caption) for _, svg, caption in drawn) + "</div>"
        )
    body += ["<h2>Machines and programs</h2>", environments(a, b)]
    return markup.page("Scaling of training: two results", "\n".join(body)), {name: svg for name, svg, _ in drawn}


def write(a, b, names, prices, folder):
    """compare.html and its pictures. Returns the path of the page."""
    charts.require()
    page, svgs = render(a, b, names, prices)
    for name, svg in svgs.items():
        result_file.write_text(os.path.join(folder, f"{name}.svg"), charts.as_file(svg))
    path = os.path.join(folder, "compare.html")
    result_file.write_text(path, page)
    return path


def speed_line(matched):
    """One line for the terminal: the range of B over A."""
    ratios = [b["samples_per_second"] / a["samples_per_second"] for a, b in matched]
    if not ratios:
        return "nothing in common"
    return (
        f"B is {min(ratios):.2f} to {max(ratios):.2f} times as fast as A"
        if len(ratios) > 1
        else f"B is {ratios[0]:.2f} times as fast as A"
    )
