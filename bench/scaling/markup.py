# SPDX-License-Identifier: Apache-2.0
"""Parts of a page that reports and comparisons share. Pure functions from data to HTML."""

import html
import os
import re

from scaling import charts


def escape(text):
    return html.escape(str(text), quote=True)


def file_stem(text):
    """`text` as part of a file's name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower())


def page(title, body):
    """One page without any file beside it."""
    with open(os.path.join(os.path.dirname(__file__), "page.css"), encoding="utf-8") as file:
        style = file.read()
    bad = ":root{--bad:#c02b2b}@media(prefers-color-scheme:dark){:root{--bad:#ff8080}}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>\n{charts.css_variables()}\n{bad}\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def table(head, rows, text_columns=(0,), wrapped=()):
    """A table of `rows`: lists of cells in HTML, or (class of the row, cells).

    A row of the class "case" is a heading over all columns. `wrapped`: columns whose text may take several lines.
    """

    def cells(row, tag):
        kinds = [["text"] * (i in text_columns) + ["wrap"] * (i in wrapped and tag == "td") for i in range(len(row))]
        return "".join(
            f"<{tag} class=\"{' '.join(kind)}\">{cell}</{tag}>" if kind else f"<{tag}>{cell}</{tag}>"
            for kind, cell in zip(kinds, row)
        )

    lines = [f"<div class=\"table\"><table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>"]
    for row in rows:
        kind, row = row if isinstance(row, tuple) else ("", row)
        if kind == "case":
            lines.append(f"<tr class=case><td colspan={len(head)}><span>{row[0]}</span></td></tr>")
        else:
            lines.append(f"<tr{f' class={kind}' if kind else ''}>{cells(row, 'td')}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


def value_html(value):
    """Several lines stand as they are, such as a matrix."""
    return f"<pre>{escape(value)}</pre>" if "\n" in value else escape(value)


def definitions(pairs):
    items = "".join(f"<dt>{escape(name)}</dt><dd>{value_html(value)}</dd>" for name, value in pairs if value)
    return f"<dl>{items}</dl>"


def figure(svg, caption):
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def notices(found):
    names = {"bad": "Error:", "warn": "Note:"}
    return "\n".join(f'<p class="notice {kind}"><b>{names[kind]}</b>{escape(text)}</p>' for kind, text in found)


def percent(value):
    if value is None:
        return "–"
    whole = round(100 * value)
    return f"{'−' if whole < 0 else ''}{abs(whole)}&nbsp;%"


def percent_range(point, name):
    """The median and, smaller, the range of the rounds."""
    if point[name] is None:
        return "–"
    text = percent(point[name])
    if point["rounds"] > 1 and point["ranks"] != point["base_ranks"]:
        text += f" <span class=range>{100 * point[name + '_min']:.0f}–{100 * point[name + '_max']:.0f}</span>"
    return text


def bad_badge(text):
    return f'<span class="badge bad">{escape(text)}</span>'


def oversubscribed_badge(point):
    return " <span class=badge>oversubscribed</span>" if point["oversubscribed"] else ""


def ranks_cell(point):
    return f"{point['ranks']}{oversubscribed_badge(point)}"


def machine(environment):
    """The machine in a few words."""
    cpu = environment["cpu"]
    words = [
        cpu["model"],
        f"{cpu['cores']} cores" if cpu["cores"] != 1 else "1 core",
        f"{environment['memory_mib'] / 1024:.0f} GiB",
    ]
    if environment["gpus"]:
        words.append(f"{len(environment['gpus'])} x {environment['gpus'][0].get('name', 'GPU')}")
    return ", ".join(words)


def clock(environment):
    cpu = environment["cpu"]
    words = [
        environment.get("cpu_mhz") and f"{environment['cpu_mhz']} MHz before",
        cpu.get("max_mhz") and f"at most {cpu['max_mhz']} MHz",
        cpu.get("governor") and f"governor {cpu['governor']}",
    ]
    return ", ".join(filter(None, words))


def environment_pairs(environment):
    cpu, build, launcher = environment["cpu"], environment["build"], environment["launcher"]
    gpus = environment["gpus"]
    return [
        ("Measured", environment["date"]),
        ("Processor", cpu["model"] + (", virtual machine" if cpu.get("virtual_machine") else "")),
        (
            "Cores",
            (
                f"{cpu['cores']} (hardware threads: {cpu['hardware_threads']}; sockets: {cpu['sockets']}; NUMA nodes: "
                f"{environment['numa_nodes']})"
            ),
        ),
        ("Caches", "; ".join(cpu["caches"])),
        ("Clock", clock(environment)),
        ("Memory", f"{environment['memory_mib']:,} MiB"),
        ("GPUs", "; ".join(", ".join(map(str, gpu.values())) for gpu in gpus)),
        ("Links of the GPUs", "\n".join(environment.get("gpu_topology", []))),
        ("Libraries", ", ".join(f"{name} {version}" for name, version in environment["libraries"].items())),
        ("System", environment["system"]),
        ("Launcher", f"{launcher['program']}: {launcher['version']}"),
        ("libddp", " ".join(filter(None, [build.get("version"), build.get("revision")]))),
        (
            "Build",
            ", ".join(
                filter(
                    None,
                    [
                        build.get("build_type"),
                        build.get("compiler"),
                        build.get("flags"),
                        build.get("cuda_toolkit") and f"CUDA {build['cuda_toolkit']}",
                        build.get("sanitizers") and f"sanitizers {build['sanitizers']}",
                    ],
                )
            ),
        ),
        ("Variables", "; ".join(f"{name}={value}" for name, value in environment["variables"].items())),
        ("Load before", f"{environment['load_at_start']}"),
        ("Python", environment["python"]),
    ]
