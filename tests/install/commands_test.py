# SPDX-License-Identifier: Apache-2.0
"""Checks the commands that the documentation shows: shell and Python blocks parse, and the scripts, programs, flags, presets, CMake options and
variables that they name exist.

Usage: python3 commands_test.py SOURCE_FOLDER PROGRAM_FOLDER
"""
import functools
import json
import pathlib
import re
import subprocess
import sys

root, programs = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
PAGES = ["README.md", "CONTRIBUTING.md", "docs/*.md", "docs/guide/*.md", "docs/performance/*.md", "examples/**/*.md", "python/*.md"]
PROGRAM = re.compile(r"(?:^|[\s/])((?:train|ddp|nn|p2p|device|internode|record|startup|unscale)_\w+)(?=\s|$)")
problems, checked = [], 0


@functools.cache
def help_of(command):
    """What a script or program says to --help, or None if this build has no such program, or the script lacks a package."""
    command, *arguments = command.split()
    path = root / command if "/" in command else programs / command
    if "/" not in command and not path.exists():
        return None
    shell = {".sh": ["bash"], ".py": [sys.executable]}.get(path.suffix, [])
    done = subprocess.run([*shell, str(path), *arguments, "--help"], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        return None
    return (done.stdout + done.stderr).replace("_", "-")


def commands_of(text):
    """Shell blocks, indented commands and `code` of a page, one logical line each, with the number of the line where each begins."""
    lines, fence = text.splitlines(), None
    for number, line in enumerate(lines, 1):
        mark = re.match(r"\s*```(\w*)", line)
        if mark:
            fence = None if fence is not None else mark[1]
        elif fence == "sh" or (fence is None and line.startswith("    ")):
            while line.endswith("\\") and number < len(lines):
                line = line[:-1] + lines[number]
                number += 1
            yield number, line.split(" # ")[0]
        elif fence is None:
            for code in re.findall(r"`([^`]+)`", line):
                yield number, code


def check(where, good, problem):
    global checked
    checked += 1
    if not good:
        problems.append(f"{where}: {problem}")


def check_flags(where, command, rest):
    text = help_of(command)
    if text is None:
        return
    if command == "scripts/demo.sh" or " -- " in rest:  # passes flags on
        text += help_of("train_mlp") or rest
    if command == "bench/scaling.py" and rest.lstrip().startswith("compare "):
        text += help_of(command + " compare")
    for flag in re.findall(r"(?:^|\s)--([a-z][\w-]*)", re.split(r"[;|&\"'()]", rest)[0]):
        known = re.search(rf"--(?:\[?no-?\]?)?{re.escape(flag.removeprefix('no-').replace('_', '-'))}\b", text)
        check(where, known or flag == "help", f"{command} has no flag --{flag}")


def check_line(where, line, presets, options, variables):
    for script in re.finditer(r"\b((?:scripts|bench|python/tests)/[\w/]+\.(?:sh|py))", line):
        check(where, (root / script[1]).exists(), f"there is no {script[1]}")
        if (root / script[1]).exists() and re.search(r"(?:bash|python3) $", line[: script.start()]):
            check_flags(where, script[1], line[script.end():])
    for program in PROGRAM.finditer(line):
        check_flags(where, program[1], line[program.end():])
    for preset in re.findall(r"--preset[ =](\w+)", line):
        check(where, preset in presets, f"there is no preset {preset}")
    for option in re.findall(r"-D(DDP_\w+)", line):
        check(where, option in options, f"there is no CMake option {option}")
    # DDP_DISABLE_COMM_MEM is PyTorch's.
    for variable in re.findall(r"(?:^|\s)(DDP_\w+)=", line):
        check(where, variable in variables or variable in options or variable == "DDP_DISABLE_COMM_MEM", f"there is no variable {variable}")


presets = {preset["name"] for preset in json.loads((root / "CMakePresets.json").read_text())["configurePresets"]}
options = set(re.findall(r"\bDDP_\w+", "".join(path.read_text() for path in [root / "CMakeLists.txt", *root.glob("cmake/*.cmake")])))
variables = set(re.findall(r"\bDDP_\w+", (root / "libddp/base/env.cc").read_text() + (root / "docs/environment.md").read_text()))
variables |= set(re.findall(r"\bDDP_TEST_\w+", (root / "tests/unit/CMakeLists.txt").read_text()))
for page in sorted({page for pattern in PAGES for page in root.glob(pattern)}):
    text, name = page.read_text(), page.relative_to(root)
    for block in re.finditer(r"^```sh\n(.*?)^```", text, re.M | re.S):
        parsed = subprocess.run(["bash", "-n"], input=block[1], capture_output=True, text=True, check=False)
        check(f"{name}:{text.count(chr(10), 0, block.start()) + 1}", parsed.returncode == 0, parsed.stderr)
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S):
        compile(block[1], f"{name}: a Python block", "exec")
    for number, line in commands_of(text):
        check_line(f"{name}:{number}", line, presets, options, variables)
print("\n".join(problems + [f"{checked} checks, {len(problems)} failed"]))
sys.exit(1 if problems or checked < 100 else 0)
