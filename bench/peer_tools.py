# SPDX-License-Identifier: Apache-2.0
"""What the comparisons share: running programs, medians, tables."""
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time

from scaling.trainers import Launcher


def note(text):
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def end(process):
    """Ends a program and all that it started: at first so that they can clear up behind them."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.communicate(timeout=5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def run(command, timeout, env=None):
    """Standard output of a command, or None, with its last words on our standard error. Ends all of its processes when time is up."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process)
        note(f"took more than {timeout} s: {' '.join(command)}")
        return None
    except BaseException:
        end(process)
        raise
    for line in (err or "").splitlines():
        if line.startswith("run.sh:"):
            note(line)
    if process.returncode != 0:
        words = [line for line in (err or out).splitlines() if line.strip()]
        note(f"exit {process.returncode}: {' '.join(command)}: {words[0] if words else ''}")
        return None
    return out


FAR_NS = 1_000_000  # longer than any cache line takes
STATES = {"smt": (0, 25), "near": (25, 120), "far": (120, FAR_NS)}


def parse_state(text):
    """The lowest and the highest latency of a cache line, in ns, that a state of the processors stands for: a name or LOW-HIGH."""
    if text in STATES:
        return STATES[text]
    low, _, high = text.partition("-")
    return float(low), float(high)


def median_ratio(above, below):
    """Median over the rounds in which both were measured, as text with its spread, and as a number."""
    ratios = [above[r] / below[r] for r in above if r in below]
    if not ratios:
        return None
    return statistics.median(ratios), min(ratios), max(ratios)


def show_ratio(ratio):
    return "-" if ratio is None else f"{ratio[0]:.2f} ({ratio[1]:.2f}-{ratio[2]:.2f})"


def show_us(v):
    return f"{v:.2f}" if v < 10 else f"{v:.1f}" if v < 1000 else f"{v:.0f}"


def show_size(b):
    return f"{b >> 20} MiB" if b >= 1 << 20 else f"{b >> 10} KiB" if b >= 1024 else f"{b} B"


def parse_size(text):
    units = {"K": 10, "M": 20, "G": 30}
    return int(text[:-1]) << units[text[-1].upper()] if text[-1].upper() in units else int(text)


def print_table(head, rows):
    print("| " + " | ".join(head) + " |")
    print("| " + " | ".join("---" for _ in head) + " |")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


class Setup:
    def __init__(self, arguments):
        self.arguments = arguments
        self.launcher = Launcher(shlex.quote(arguments.mpirun))
        self.cpus = os.cpu_count() or 1
        self.lines = []

    def describe(self):
        model = "unknown processor"
        with open("/proc/cpuinfo") as cpuinfo:
            for line in cpuinfo:
                if line.startswith("model name"):
                    model = line.split(":", 1)[1].strip()
                    break
        print(f"{model}, {self.cpus} processors, {os.uname().sysname} {os.uname().release}, "
              f"{self.arguments.rounds} rounds, processors {self.arguments.state}\n", flush=True)

    def mpirun(self, ranks):
        return self.launcher.command(ranks, oversubscribed=ranks > self.cpus, threads=1)

    def keep(self, kind, line):
        self.lines.append({"kind": kind, **line})

    def write_json(self):
        if self.arguments.json:
            with open(self.arguments.json, "w") as file:
                json.dump(self.lines, file, indent=1)
