#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the links of all Markdown files to files and headings of this project, and the pages of docs/ that sources name.

Usage: python3 scripts/check_links.py [FOLDER]    (default: this project)

Prints each dead link as FILE:LINE and ends with 1 if there is one. Uses no network: links to other sites are not checked.
"""
import pathlib
import re
import subprocess
import sys
from urllib.parse import unquote

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
HTML = re.compile(r"<(?:a|img|source)\s[^>]*?(?:href|src|srcset)=\"([^\"]+)\"")
PAGE = re.compile(r"\b((?:docs|examples|python)/[\w./-]+\.md)\b")


def files_of(root):
    """The files of the project: those that Git knows of or would add, or, without Git, all but those of build folders."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return [root / name for name in listed.stdout.split("\0") if name and (root / name).is_file()]
    return [path for path in root.rglob("*") if path.is_file() and "build" not in path.relative_to(root).parts[:1]]


def lines_outside_code(text):
    """Numbers and texts of the lines that are not in a fenced block, with `code` blanked out."""
    fence = None
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and (fence is None or line.strip().startswith(fence)):
            fence = mark[1] if fence is None else None
        elif fence is None:
            yield number, line


def anchors_of(text):
    """The anchors that GitHub and Sphinx make of the headings, and those that the page sets itself."""
    anchors, seen = set(), {}
    for _, line in lines_outside_code(text):
        anchors.update(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", line))
        heading = re.match(r"#{1,6}\s+(.*?)\s*#*$", line)
        if heading:
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            count = seen.get(slug, 0)
            seen[slug] = count + 1
            anchors.add(f"{slug}-{count}" if count else slug)
    return anchors


def problem_of(root, page, target, anchors):
    """What is wrong with the link `target` of `page`, or None."""
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None
    name, _, anchor = unquote(target).partition("#")
    path = (page.parent / name).resolve() if name else page.resolve()
    if not path.is_relative_to(root):
        return "leaves the project"
    if not path.exists():
        return "there is no such file"
    if anchor and path.suffix == ".md":
        if path not in anchors:
            anchors[path] = anchors_of(path.read_text())
        if anchor not in anchors[path]:
            return "the page has no such heading"
    return None


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    anchors, problems, links = {}, [], 0
    for path in files_of(root):
        name = path.relative_to(root)
        if path.suffix == ".md":
            for number, line in lines_outside_code(path.read_text()):
                line = re.sub(r"`[^`]*`", lambda code: "`" + "x" * (len(code[0]) - 2) + "`", line)
                for target in LINK.findall(line) + HTML.findall(line):
                    links += 1
                    problem = problem_of(root, path, target, anchors)
                    if problem:
                        problems.append(f"{name}:{number}: {target}: {problem}")
        elif path.suffix in (".h", ".cc", ".cu", ".cmake", ".in", ".sh", ".py", ".txt", ".c"):
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                for target in PAGE.findall(line):
                    if not (root / target).exists():
                        problems.append(f"{name}:{number}: {target}: there is no such page")
    print("\n".join(problems + [f"{links} links, {len(problems)} dead"]))
    return 1 if problems or not links else 0


if __name__ == "__main__":
    sys.exit(main())
