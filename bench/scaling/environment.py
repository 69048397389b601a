# SPDX-License-Identifier: Apache-2.0
"""The machine, the build and the launcher that figures depend on. No names of hosts, users or files."""

import json
import os
import platform
import re
import subprocess

from scaling import UserError

GPU_FIELDS = "name,driver_version,memory.total,clocks.max.sm,power.limit"


def lines_of(*command):
    """What a program prints, without colours and empty lines; nothing if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout) if done.returncode == 0 else ""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def first_line(*command):
    """The first line that a program prints, or None."""
    return next(iter(lines_of(*command)), None)


def read_text(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def gpus():
    """One dictionary per GPU that may be used; none without nvidia-smi."""
    fields = GPU_FIELDS.split(",")
    rows = [
        dict(zip(fields, map(str.strip, line.split(","))))
        for line in lines_of("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader")
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return rows if visible is None else rows[: len([v for v in visible.split(",") if v.strip() not in ("", "-1")])]


def of_trainer(program, device, environ):
    """What a trainer says of its machine, libraries and build. Raises UserError."""
    command = [program, "--environment", f"--device={device}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
        return json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    except json.JSONDecodeError:
        why = next(iter(done.stderr.splitlines()), "it printed no JSON")
    raise UserError(f"{os.path.basename(program)} --environment failed: {why}; build the trainers of this version")


def snapshot(program, device, launcher):
    """`program`: a trainer. `launcher`: see trainers.Launcher."""
    found = gpus() if device == "cuda" else []
    described = of_trainer(program, device, launcher.environment())
    return {
        **described,
        # nvidia-smi knows more of GPUs: their limits, and, line by line, how they are linked.
        "gpus": found or described["gpus"],
        "gpu_topology": lines_of("nvidia-smi", "topo", "-m") if found else [],
        "launcher": {"program": os.path.basename(launcher.words[0]), "version": launcher.version},
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 2),
    }
