# SPDX-License-Identifier: Apache-2.0
"""How Sphinx makes the documentation site of README.md, docs/ and the public headers. scripts/site.sh runs it."""
import re
import xml.etree.ElementTree as xml
from pathlib import Path

_root = Path(__file__).resolve().parents[2]
_headers = _root / "build/site/doxygen/xml"


def _version():
    text = (_root / "include/ddp/version.h").read_text()
    return ".".join(re.search(rf"DDP_VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))


project = "libddp"
version = release = _version()
copyright = "the authors of libddp, Apache License 2.0"
extensions = ["breathe", "myst_parser"]
exclude_patterns = ["docs/site/contents.md"]
if not (_root / "include/ddp/ddp_c.h").exists():
    exclude_patterns.append("docs/site/reference/c.md")
html_theme = "furo"
html_title = f"libddp {version}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
highlight_language = "text"
myst_heading_anchors = 6
suppress_warnings = ["myst.header"]
breathe_projects = {"libddp": str(_headers)}
breathe_default_project = "libddp"
breathe_default_members = ("members",)
breathe_show_include = False
breathe_show_define_initializer = True

# Pages with further ones below them in the contents.
_below = {"docs/performance": "performance/*", "docs/decisions/README": "[0-9]*"}


def _text(element):
    """What a comment in Doxygen's output says, in one line."""
    return " ".join("".join(element.find(part).itertext()).strip() for part in ("briefdescription", "detaileddescription")).strip()


def _shown(directive, name):
    return f"\n### {name.split('(')[0].removeprefix('ddp::')}\n\n```{{{directive}}} {name}\n```\n"


def _constants(member):
    """An enum without a name, as C's constants are: a table, because Breathe has no directive for it."""
    rows, next_value = "", 0
    for constant in member.iter("enumvalue"):
        initializer = constant.findtext("initializer")
        value = int(initializer.lstrip("= ")) if initializer else next_value
        rows += f"| `{constant.findtext('name')}` | {value} | {_text(constant)} |\n"
        next_value = value + 1
    first = member.find("enumvalue").findtext("name")
    return f"\n### {first}, ...\n\n{_text(member)}\n\n| constant | value | |\n| --- | --- | --- |\n{rows}"


def _of_c(member, structs):
    """A name of the headers for C, whose names are in no namespace. None for that of a struct, which is shown as one."""
    kind, name = member.get("kind"), member.findtext("name")
    if kind == "enum":
        return _constants(member)
    if kind == "typedef":
        declared = f"```c\n{member.findtext('definition')};\n```"
        return None if name in structs else f"\n### {name}\n\n{declared}\n\n{_text(member)}\n"
    return _shown(f"doxygen{kind}", name)


def _names_of(header):
    """The public names that a header declares, in its order: a section of a page for each."""
    found, compounds, in_c = [], [], header.startswith("ddp/c/")
    for entry in xml.parse(_headers / "index.xml").getroot().iter("compound"):
        if entry.get("kind") in ("class", "struct", "namespace", "file"):
            compound = xml.parse(_headers / f"{entry.get('refid')}.xml").getroot().find("compounddef")
            compounds.append((entry.get("kind"), compound, compound.findtext("compoundname")))
    structs = {name for kind, _, name in compounds if kind == "struct"}
    for kind, compound, name in compounds:
        if kind in ("class", "struct"):
            place = compound.find("location")
            # Breathe shows a class within another one there.
            if place.get("file") == header and name.count("::") < 2:
                found.append((int(place.get("line")), _shown(f"doxygen{kind}", name)))
            continue
        for member in compound.iter("memberdef"):
            place, member_kind, own = member.find("location"), member.get("kind"), member.findtext("name")
            if place.get("file") != header or own.endswith("_H_"):  # the guard of the header
                continue
            if kind == "file" and in_c:
                section = _of_c(member, structs)
            elif (kind == "file") != (member_kind == "define"):
                continue
            else:
                own = (name + "::" if kind == "namespace" else "") + own
                if member_kind == "function":
                    own += "(" + ", ".join("".join(p.find("type").itertext()) for p in member.iter("param")) + ")"
                section = _shown(f"doxygen{member_kind}", own)
            if section:
                found.append((int(place.get("line")), section))
    return [section for _, section in sorted(found)]


def _reference(match):
    """"@names ddp/x.h" in a page becomes a section for each name of that header."""
    return f"## {match[1]}\n" + "".join(_names_of(match[1]))


def _change_page(app, docname, source):
    """What a page says on the site and cannot say in Markdown: generated parts, and links that only a browser of files follows."""
    text = re.sub(r"^@names (\S+)$", _reference, source[0], flags=re.M)
    folder = Path(app.srcdir, docname).parent
    if docname == "index":  # the contents may name pages that are yet to come
        text = re.sub(r"^((?:\w+ <)?(?:docs|examples|python)/[\w/-]+>?)\n",
                      lambda entry: entry[0] if entry[1].split("<")[-1].rstrip(">") in app.env.found_docs else "", text, flags=re.M)

    def link(match):
        target = match[2]
        if re.fullmatch(r"(?:\.\./)+README\.md(?:#.*)?", target):
            target = target.replace("README.md", "index.md")
        elif target.endswith("/") and (folder / target / "README.md").exists():
            target += "README.md"
        elif target.endswith("/") and ":" not in target:
            return match[1]
        return f"[{match[1]}]({target})"

    text = re.sub(r"(?<!!)\[([^\[\]]+)\]\(([^)\s]+)\)", link, text)
    if docname in _below:
        text += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{_below[docname]}\n```\n"
    if not docname.startswith("docs/"):  # may be outside the contents
        text = "---\norphan: true\n---\n" + text
    source[0] = text


def setup(app):
    app.connect("source-read", _change_page)
