# SPDX-License-Identifier: Apache-2.0
"""The page, the pictures and the CSV file of one result. Pure functions over scaling.json, but for `write`."""

import os

from scaling import analysis, charts, markup, model, plan, result as result_file
from scaling.markup import bad_badge, escape, file_stem, oversubscribed_badge, percent, percent_range, ranks_cell
from scaling.text import number


def pictures(result, points):
    """For every case a list of (file name, SVG, caption). Of the ways to reduce, the first stands for all."""
    found = {}
    for case in dict.fromkeys(p["case"] for p in analysis.headline(result, points)):
        of_case = [p for p in points if p["case"] == case]
        stem = file_stem(case)
        spread = "Bars: range of the rounds." if max(p["rounds"] for p in of_case) > 1 else ""
        found[case] = [
            (
                f"{stem}-speedup",
                charts.speedup(of_case, f"{stem}-speedup"),
                f"Rate of all ranks together over the rate of {plan.count(of_case[0]['base_ranks'], 'rank')}. {spread}",
            ),
            (
                f"{stem}-efficiency",
                charts.efficiency(of_case, f"{stem}-efficiency"),
                f"Dotted: without reduction, so what lies between dotted and solid line is communication. {spread}",
            ),
        ]
        for scaling, of_scaling in charts.by_scaling(of_case).items():
            name = f"{stem}-step-{scaling}"
            found[case].append((name, charts.breakdown(of_scaling, scaling, name), breakdown_caption(scaling)))
        run = analysis.timeline(result, case)
        if run:
            found[case].append(
                (
                    f"{stem}-buckets",
                    charts.timeline(run, f"{stem}-buckets"),
                    (
                        f"Last step of one {run['scaling']} run, on rank 0. A bucket's bar begins when its reduction is"
                        " started and includes the time in which this rank waits for the others. Dashed: the end of"
                        " the backward pass. What lies right of it is exposed."
                    ),
                )
            )
    return found


def breakdown_caption(scaling):
    more = ", and the effect of smaller batches" if scaling == "strong" else ""
    return (
        f"Ideal: the step of the fewest ranks{', divided' if scaling == 'strong' else ''}. Shared machine: caches,"
        f" memory bandwidth and cores{more}, from the run without reduction. Communication: the rest."
    )


def bucket_pictures(points):
    """Exposed communication over bucket size, where several sizes were measured with all else equal."""
    groups = {}
    for p in analysis.largest(points, "weak") or analysis.largest(points, "strong"):
        if p["reduction"] == "overlap":
            groups.setdefault(p["case_without_reduction"], []).append((p["bucket"], p))
    return [
        (
            f"{stem}-bucket-sizes",
            charts.exposed_over_buckets(rows, f"{stem}-bucket-sizes"),
            (
                f"{rows[0][1]['training']}: communication per step that the backward pass hides and that it does not, by"
                " bucket size."
            ),
        )
        for stem, rows in groups.items()
        if len(rows) > 1 and rows[0][1]["ranks"] > 1
    ]


def overview(points, failed):
    """`failed`: see analysis.failures. Their rows stand among those of the points."""
    losses = [("lost_to_sharing", "lost: shared machine"), ("lost_to_communication", "lost: communication")]
    if any(p["oversubscribed"] for p in points):
        losses.insert(0, ("lost_to_cores", "lost: fewer cores than ranks"))
    rows = []
    for case, scaling in dict.fromkeys((p["case"], p["scaling"]) for p in points):
        here = [p for p in points if (p["case"], p["scaling"]) == (case, scaling)]
        rows.append(("case", [f"{escape(here[0]['title'])} – {scaling}"]))
        lines = [(p["ranks"], overview_row(p, [key for key, _ in losses])) for p in here]
        for f in failed:
            shared = f["ranks"] == 1 and f["case_without_reduction"] == here[0]["case_without_reduction"]
            if (f["case"] == case or shared) and f["scaling"] == scaling:
                cells = [ranks_cell(f), *["–"] * (3 + len(losses)), bad_badge(f["status"])]
                lines.append((f["ranks"], ("over", cells)))
        rows += [row for _, row in sorted(lines, key=lambda line: line[0])]
    head = ["ranks", "samples/s", "speed-up", "efficiency (range)", *(title for _, title in losses), "same loss?"]
    return markup.table(head, rows, text_columns=(0, len(head) - 1))


def lost(p, key):
    noise = key == "lost_to_communication" and p[key] is not None and not p["communication_sure"]
    return percent(p[key]) + (" <span class=range>noise</span>" if noise else "")


def overview_row(p, losses):
    bad = p["loss_check"].startswith("differs")
    return (
        "over" if p["oversubscribed"] else "",
        [
            ranks_cell(p),
            number(p["samples_per_second"], 4),
            "–" if p["speedup"] is None else f"{p['speedup']:.2f}",
            percent_range(p, "efficiency"),
            *(lost(p, key) for key in losses),
            bad_badge(p["loss_check"]) if bad else escape(p["loss_check"]),
        ],
    )


def details(points):
    columns = (
        ("ranks", lambda p: f"{p['scaling']}, {ranks_cell(p)}"),
        ("batch of a rank", lambda p: str(p["batch"])),
        ("rounds", lambda p: str(p["rounds"])),
        ("step (ms)", lambda p: number(p["step_ms"])),
        ("step without reduction (ms)", lambda p: number(p["step_ms_without_reduction"])),
        ("communication (ms)", lambda p: number(p["communication_ms"])),
        ("exposed (ms)", lambda p: number(p["exposed_ms"])),
        ("hidden (ms)", lambda p: number(p["hidden_ms"])),
        ("communication / computation", lambda p: number(p["communication_to_computation"], 2)),
        ("bus bandwidth (GB/s)", lambda p: number(p["bus_bandwidth_gb_s"])),
        ("peak memory of a rank, or of its GPU (MiB)", lambda p: number(p["peak_memory_mib"])),
        ("loss", lambda p: f"{p['loss']:.5g}"),
    )
    measured = (  # by some trainers, on some machines
        ("share_of_products", "share of the rate of large products", lambda p: percent(p["share_of_products"])),
        ("joules_per_sample", "energy of a sample (J)", lambda p: number(p["joules_per_sample"])),
    )
    columns += tuple((title, show) for key, title, show in measured if any(p[key] is not None for p in points))
    rows = [("over" if p["oversubscribed"] else "", [show(p) for _, show in columns]) for p in points]
    contents = {p["energy_contains"] for p in points if p["energy_contains"] is not None}
    notes = "".join(f"<p>Energy: {escape(text)}.</p>" for text in sorted(contents))
    return markup.table([title for title, _ in columns], rows) + notes


def case_section(case, points, drawn):
    of_case = [p for p in points if p["case"] == case]
    sentences = [
        f"<b>{p['scaling'].capitalize()}:</b> {escape(analysis.verdict(p))}"
        for scaling in ("weak", "strong")
        for p in analysis.largest(of_case, scaling)
        if p["ranks"] > p["base_ranks"]
    ]
    figures = "\n".join(markup.figure(svg, caption) for _, svg, caption in drawn)
    return "\n".join(
        [
            f"<h2>{escape(of_case[0]['title'])}</h2>",
            '<div class="verdicts">' + "".join(f"<p>{s}</p>" for s in sentences) + "</div>",
            f'<div class="grid">{figures}</div>',
            f"<details open><summary>All figures</summary>{details(of_case)}</details>",
        ]
    )


def choices_section(points, drawn):
    gains = analysis.choices(points)
    if not gains:
        return ""
    rows = [
        [
            escape(g["title"]),
            escape(g["over"]),
            str(g["ranks"]),
            "–" if g["gain"] is None else f"{g['gain']:.2f}",
            number(g["base_exposed_ms"]),
            number(g["exposed_ms"]),
        ]
        for g in gains
    ]
    figures = "".join(markup.figure(svg, caption) for _, svg, caption in drawn)
    return (
        "<h2>What each choice gains</h2><p>Weak scaling, on the most ranks that have a core or GPU each. Ratios"
        " are those of the rates within a round; the median of the rounds.</p>"
        + markup.table(
            ["choice", "beside", "ranks", "rate over rate", "exposed before (ms)", "exposed (ms)"], rows, (0, 1)
        )
        + (f'<div class="grid">{figures}</div>' if figures else "")
    )


def reduction_pictures(points):
    """For every training that was reduced in several ways: its points, and (file name, SVG, caption)."""
    found = []
    for group in analysis.reductions(points):
        name = file_stem(f"{group[0]['case_without_reduction']}-reductions")
        caption = (
            f"{group[0]['training']}: the step without reduction, and what each way to reduce adds to it. Bars: range"
            " of the rounds."
        )
        found.append((group, (name, charts.reductions(group, name), caption)))
    return found


def reduction_row(p, group):
    end = next((q for q in group if q["reduction"] == "end"), None)
    comparable = end and p["added_ms"] is not None and (end["added_ms"] or 0) > 0
    same = analysis.same_training(p, group[0])
    way = plan.REDUCTIONS[p["reduction"]] + ("" if p["bucket"] == "default" else f", {p['bucket']}")
    added = number(p["added_ms"])
    if p["added_ms"] is not None and p["rounds"] > 1:
        added += f" <span class=range>{number(p['added_ms_min'])}–{number(p['added_ms_max'])}</span>"
    return [
        f"{escape(p['reduction'])} <span class=range>{escape(way)}</span>",
        number(p["samples_per_second"], 4),
        number(p["step_ms"]),
        added,
        number(p["added_ms"] / end["added_ms"], 2) if comparable else "–",
        number(p["exposed_ms"]),
        number(p["hidden_ms"]),
        "equal" if same else bad_badge(f"differs: {p['early_loss']:.5g}"),
    ]


def reductions_section(drawn):
    if not drawn:
        return ""
    head = [
        "--reduce",
        "samples/s",
        "step (ms)",
        "added by reduction (ms)",
        "beside what end adds",
        "exposed (ms)",
        "hidden (ms)",
        "same loss?",
    ]
    rows = []
    for group, _ in drawn:
        p = group[0]
        alone = number(p["step_ms_without_reduction"])
        rows.append(("case", [f"{escape(p['training'])}, {p['ranks']} ranks: {alone} ms without reduction"]))
        rows += [reduction_row(p, group) for p in group]
    figures = "".join(markup.figure(svg, caption) for _, (_, svg, caption) in drawn)
    return (
        f"<h2>What overlap and buckets are worth</h2><p>{drawn[0][0][0]['scaling'].capitalize()} scaling, on the most"
        " ranks that have a core or GPU each. All ways to reduce train the same model. They differ in when gradients"
        " travel, and which way.</p>"
        + markup.table(head, rows, (0, len(head) - 1))
        + f'<div class="grid">{figures}</div>'
    )


SHOWN_RANKS = (4, 8, 16, 64, 256, 1024, 8192, 65536, model.MOST_RANKS)


def prediction_pictures(predicted, points):
    if not predicted or not predicted["good"]:
        return []
    found = []
    for case, training in predicted["trainings"].items():
        name = file_stem(f"{case}-predicted")
        of_case = [p for p in points if p["case"] == case and p["scaling"] == "weak"]
        title = training["point"]["title"]
        caption = f"{title}. Dashed: what the model of the machine says; nothing was measured there."
        found.append((name, charts.predicted(of_case, training["rows"], name), caption))
    return found


def prediction_section(predicted, drawn):
    if not predicted:
        return ""
    inside, between = predicted["machine"].inside, predicted["machine"].between
    text = (
        "<h2>What more ranks would do</h2><p>The model of the machine was fitted to all-reduces: within a node"
        f" {inside.text('µ')}, between nodes {between.text('µ')}. {escape(model.verdict(predicted)).capitalize()}.</p>"
    )
    if not predicted["good"]:
        return text
    links = (
        "of the given latency and bandwidth"
        if predicted["links"] == "given"
        else "as measured between the processes of this host, which no network is: give --link-gb-s"
    )
    text += (
        f"<p>Weak scaling on nodes of {plan.count(predicted['node_size'], 'rank')}, with links {links}. Each rank"
        " computes as long as in the measured training without reduction on the most ranks; each bucket is ready when"
        " it was there.</p>"
    )
    lines = []
    for training in predicted["trainings"].values():
        lines.append(("case", [escape(training["point"]["title"])]))
        lines += [
            [
                f"{row['ranks']:,}",
                f"{row['nodes']:,}",
                number(row["step_ms"]),
                number(row["exposed_ms"]),
                percent(row["efficiency"]),
            ]
            for row in training["rows"]
            if row["ranks"] in SHOWN_RANKS
        ]
    figures = "".join(markup.figure(svg, caption) for _, svg, caption in drawn)
    head = ["ranks (predicted)", "nodes", "step (ms)", "exposed (ms)", "efficiency"]
    return text + markup.table(head, lines) + f'<div class="grid">{figures}</div>'


def failures_section(result):
    failed = analysis.failures(result)
    if not failed:
        return ""
    rows = [
        [
            escape(f["title"]) + oversubscribed_badge(f),
            bad_badge(f["status"]),
            f"{escape(f['error'])}<br><code class=muted>{escape(f['command'])}</code>",
        ]
        for f in failed
    ]
    return "<h2>Failed runs</h2>" + markup.table(["run", "", "error and command"], rows, (0, 1, 2), wrapped=(2,))


METHOD = """
<h2>How to read this</h2>
<ul>
<li><b>Rate</b>: samples per second of all ranks, over all steps of a run after its warm-up. <b>Efficiency</b>: the rate
of N ranks divided by N times the rate of one rank; both from the same round, then the median of the rounds. In a round
every run is made once (A B A B).</li>
<li><b>Weak scaling</b> keeps the batch of each rank, <b>strong scaling</b> that of all ranks together.</li>
<li><b>Shared machine</b>: how much a run without reduction falls short. Its ranks train apart and exchange no
gradients, so what they lose is caches, memory bandwidth, clock frequency and cores (on GPUs the host, power and
links), and with strong scaling what smaller batches cost. <b>Communication</b>: the difference between that and the
real training. It includes waiting for slower ranks and the cores that reduction itself needs. “Noise”: the rounds do
not agree on its sign, or there is only one round.</li>
<li><b>Communication</b> time of a step: that in which at least one bucket is under way, waiting included.
<b>Exposed</b>: the part of it that the step waits for after its backward pass. Both are measured on rank 0, means over
the measured steps of a run; <b>hidden</b> is the difference. <b>Bus bandwidth</b>: bytes of all gradients x
2 (N - 1) / N over the communication time, so less than a benchmark of all-reduce alone shows.</li>
<li><b>Added by reduction</b>: the step with reduction minus the step without, in the same round, then the median.</li>
<li><b>Share of the rate of large products</b>: multiplications and additions of the model's products and convolutions
per second, beside those of large matrix products on all ranks at once, measured after each training. None where the
products were slower.</li>
<li><b>Same loss?</b> Strong scaling computes the same training for every N, so the mean loss of its first 20 steps must
agree. With weak scaling the rounds must agree. With batch normalisation (resnet20, resnet50) each rank normalises its
own part of a batch, so the losses of other N differ a little (5 % of the first 5 steps' mean are allowed).</li>
<li><b>Oversubscribed</b>: more ranks than cores or GPUs. Such points say nothing about scaling.</li>
</ul>
"""


def render(result):
    """The page, and the pictures as {file name: SVG}."""
    points = analysis.points(result)
    predicted = model.prediction(result, points)
    forecasts = prediction_pictures(predicted, points)
    drawn, buckets, reductions = pictures(result, points), bucket_pictures(points), reduction_pictures(points)
    environment = result["environment"]
    body = [
        (
            "<h1>Scaling of training over ranks</h1><p"
            f" class=muted>{escape(markup.machine(environment))}<br>{escape(environment['date'])}</p>"
        ),
        markup.notices(analysis.notices(result, points)),
    ]
    if points:
        body += ["<h2>At a glance</h2>", overview(analysis.headline(result, points), analysis.failures(result))]
    else:
        body.append("<p class=notice>Nothing was measured.</p>")
    body += [case_section(case, points, drawn[case]) for case in drawn]
    body += [
        reductions_section(reductions),
        choices_section(points, buckets),
        prediction_section(predicted, forecasts),
        METHOD,
        "<h2>Machine and programs</h2>",
        markup.definitions([("Command", result["command"]), *markup.environment_pairs(environment)]),
        failures_section(result),
    ]
    groups = [*drawn.values(), buckets, forecasts, [picture for _, picture in reductions]]
    svgs = {name: svg for group in groups for name, svg, _ in group}
    return markup.page("Scaling of training over ranks", "\n".join(body)), svgs


def write(result, folder):
    """report.html, scaling.csv and the pictures. Returns the path of the page."""
    charts.require()
    page, svgs = render(result)
    for name, svg in svgs.items():
        result_file.write_text(os.path.join(folder, f"{name}.svg"), charts.as_file(svg))
    result_file.write_csv(analysis.points(result), folder)
    path = os.path.join(folder, "report.html")
    result_file.write_text(path, page)
    return path
