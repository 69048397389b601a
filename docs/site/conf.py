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


def _names_of(header):
    """The public names that a header declares, in its order, as pairs of Breathe's directive and the name."""
    found = []
    for entry in xml.parse(_headers / "index.xml").getroot().iter("compound"):
        if entry.get("kind") not in ("class", "struct", "namespace", "file"):
            continue
        compound = xml.parse(_headers / f"{entry.get('refid')}.xml").getroot().find("compounddef")
        name, place = compound.findtext("compoundname"), compound.find("location")
        if entry.get("kind") in ("class", "struct"):
            # Breathe shows a class within another one there.
            if place.get("file") == header and name.count("::") < 2:
                found.append((int(place.get("line")), f"doxygen{entry.get('kind')}", name))
            continue
        for member in compound.iter("memberdef"):
            place, kind = member.find("location"), member.get("kind")
            if place.get("file") != header or (entry.get("kind") == "file") != (kind == "define"):
                continue
            own = (name + "::" if entry.get("kind") == "namespace" else "") + member.findtext("name")
            if member.findtext("name").endswith("_H_"):
                continue  # the guard of the header
            if kind == "function":
                own += "(" + ", ".join("".join(p.find("type").itertext()) for p in member.iter("param")) + ")"
            found.append((int(place.get("line")), f"doxygen{kind}", own))
    return [(directive, name) for _, directive, name in sorted(found)]


def _reference(match):
    """"@names ddp/x.h" in a page becomes a section for each name of that header."""
    text = f"## {match[1]}\n"
    for directive, name in _names_of(match[1]):
        text += f"\n### {name.split('(')[0].removeprefix('ddp::')}\n\n```{{{directive}}} {name}\n```\n"
    return text


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
