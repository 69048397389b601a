# SPDX-License-Identifier: Apache-2.0
"""Finds the trainers and mpirun, starts one run, and reads what it printed."""

import ctypes
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import tempfile
import time

from scaling import UserError, plan
from scaling.environment import first_line, read_text
from scaling.result import SUMMARY_KEYS

ALL_REDUCE_BENCH = "ddp_perf"
KILL_AFTER = 10  # seconds that mpirun has to end its ranks


def find_bin(given, programs):
    """The folder of the trainers. Raises UserError."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    builds = [os.path.join(os.path.dirname(here), "build", name, "bin") for name in ("release", "cuda", "dev")]
    installed = os.path.join(os.path.dirname(os.path.dirname(here)), "libexec", "ddp")
    folders = [given] if given else [*builds, installed]
    for folder in folders:
        if all(os.access(os.path.join(folder, program), os.X_OK) for program in programs):
            return os.path.abspath(folder)
    raise UserError(
        f"no {' and '.join(programs)} in {', '.join(map(os.path.normpath, folders))}: build them "
        "(cmake --preset release && cmake --build build/release), or give their folder with --bin"
    )


class Launcher:
    """mpirun, with the arguments that the user gave to it."""

    def __init__(self, command):
        try:
            self.words = shlex.split(command) or ["mpirun"]
        except ValueError as error:
            raise UserError(f"--mpirun={command}: {error}") from error
        if shutil.which(self.words[0]) is None:
            raise UserError(
                f"{self.words[0]} is not a program: install an MPI (Debian: openmpi-bin), or give the path of "
                "mpirun with --mpirun"
            )
        self.version = first_line(self.words[0], "--version") or "unknown"
        self.is_open_mpi = bool(re.search("Open MPI|OpenRTE|Open Run-Time", self.version))

    def command(self, ranks, oversubscribed, threads):
        words = [*self.words, "-n", str(ranks)]
        if self.is_open_mpi and oversubscribed:
            # The ranks move between processors, and who waits gives its processor away.
            words += ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        elif self.is_open_mpi and threads > 1:
            words += ["--bind-to", "none"]
        return words

    def environment(self):
        if self.is_open_mpi and os.geteuid() == 0:
            return {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return dict(os.environ)


def end(process):
    """Ends a program and all that it started, at first in a way that lets them clean up."""
    for how, patience in ((signal.SIGTERM, KILL_AFTER), (signal.SIGKILL, KILL_AFTER)):
        try:
            os.killpg(process.pid, how)
            process.communicate(timeout=patience)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            pass


def busy_seconds():
    """Processor time of all programs of the machine and of a virtual machine's neighbours; None if it is unknown."""
    fields = read_text("/proc/stat").splitlines()[:1]
    if not fields or not fields[0].startswith("cpu "):
        return None
    ticks = [int(word) for word in fields[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # all but idle and iowait


def own_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def error_line(program, returncode, err):
    """The line of standard error that says most: the trainer's own, else what mpirun says of the rank that ended first.

    mpirun stops the other ranks then, and that they were stopped is not the reason."""
    lines = [line.strip(" =\t") for line in err.splitlines() if line.strip(" -=\t")]
    own = [line for line in lines if line.startswith(f"{program}:")]
    reasons = [line for line in own if not re.search(r": stopped by SIG[A-Z]", line)]
    ended = [line for line in lines if re.search(r"exited on signal|EXIT STRING: .*signal", line)]
    first = re.search(r"Process name: +\[\[\d+,\d+\],(\d+)\]\s+Exit code: +(\d+)", err)
    if first:
        ended.append(f"rank {first.group(1)} ended first, with exit code {first.group(2)}")
    if ended and not reasons:
        words = "; ".join([*own[:1], ended[0]])
    else:
        words = (reasons or own or lines or ["it printed nothing on standard error"])[0]
    return f"{words} (exit code {returncode})"


def check_ranks(ranks, found):
    """A launcher that is not of the programs' MPI starts each rank as a job of its own. Raises ValueError."""
    if found != ranks:
        raise ValueError(
            f"ran as {plan.count(found, 'rank') if isinstance(found, int) else 'an unknown number of ranks'} instead of"
            f" {ranks}: give the launcher of the MPI that it was built with (--mpirun)"
        )


def read_summary(path, ranks):
    """The trainer's summary, with the numbers that the report needs. Raises ValueError."""
    try:
        with open(path, encoding="utf-8") as file:
            summary = json.load(file)
    except OSError as error:
        raise ValueError(f"wrote no summary: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"wrote a summary that is not JSON: {error}") from None
    if not isinstance(summary, dict):
        raise ValueError("wrote a summary that is not an object")
    for name in SUMMARY_KEYS:
        if isinstance(summary.get(name), bool) or not isinstance(summary.get(name), (int, float)):
            raise ValueError(f"wrote a summary without the number {name}")
    check_ranks(ranks, summary.get("world_size"))
    if summary["samples_per_second"] <= 0:
        raise ValueError("measured no step: give it more steps")
    return summary


def read_output(out):
    """The number of parameters, and the times of the buckets in the last step, from what the trainer printed."""
    parameters = re.search(r"(\d+) parameters;", out)
    buckets = [
        {
            "bucket": int(bucket),
            "mib": float(mib),
            "ready_ms": float(ready),
            "launched_ms": float(launched),
            "done_ms": float(done),
        }
        for bucket, mib, ready, launched, done in re.findall(
            r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", out, re.MULTILINE
        )
    ]
    return {"parameters": int(parameters.group(1)) if parameters else None, "buckets": buckets}


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class HeldStops:
    """Holds back the signals that stop the program until `release`.

    Their handler raises an exception. Within Popen that would leave a program running that nobody knows of.
    """

    def __init__(self):
        self.held = []
        self.before = {}
        for number in STOPS:
            if signal.getsignal(number) != signal.SIG_IGN:  # a program that is started is to ignore it, too
                self.before[number] = signal.signal(number, lambda held, _: self.held.append(held))

    def release(self):
        before, self.before = self.before, {}
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in self.held:
            signal.raise_signal(number)


def start(command, timeout, environment):
    """Exit code (None: the time was up), standard output, standard error."""
    stops = HeldStops()
    try:
        process = launch(command, environment)
    except BaseException:
        stops.release()
        raise
    with process:
        try:
            stops.release()
            out, err = process.communicate(timeout=timeout)
            return process.returncode, out, err
        except subprocess.TimeoutExpired:
            end(process)
            return None, "", ""
        except BaseException:
            end(process)
            raise


LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def launch(command, environment):
    """Starts a program, to which the kernel sends SIGTERM if this one is killed, which then cannot do so itself."""
    parent = os.getpid()

    def end_with_parent():
        LIBC.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
        if os.getppid() != parent:  # killed before that
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )


def time_all_reduces(launcher, bin_folder, ranks, nodes, sizes, timeout, device="cpu"):
    """Times of all-reduces of `sizes` bytes as {bytes: us}, over so many nodes of this host. Raises UserError."""
    with tempfile.TemporaryDirectory(prefix="ddp-scaling-") as scratch:
        path = os.path.join(scratch, "rows.json")
        command = [
            *launcher.command(ranks, False, 1),
            os.path.join(bin_folder, ALL_REDUCE_BENCH),
            "--placement=in",
            *(["--device=cuda"] if device == "cuda" else ["--fresh", "--budget=0.05"]),
            f"--sizes={','.join(map(str, sizes))}",
            f"--json={path}",
        ]
        environment = {**launcher.environment(), "DDP_NODE_SIZE": str(ranks // nodes)}
        try:
            returncode, _, err = start(command, timeout, environment)
            if returncode == 0:
                with open(path, encoding="utf-8") as file:
                    found = json.load(file)
                check_ranks(ranks, found["ranks"])
                return {row["bytes"]: row["time_us"] for row in found["rows"]}
            why = "it took too long" if returncode is None else error_line(ALL_REDUCE_BENCH, returncode, err)
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            why = f"it wrote no times: {error}"
        except ValueError as error:
            why = f"it {error}"
        raise UserError(f"{ALL_REDUCE_BENCH} on {ranks} ranks failed: {why}")


def run(launcher, bin_folder, program, flags, ranks, oversubscribed, threads, timeout):
    """Makes one run. Returns its status ("ok", "failed", "timeout"), error, times and what the trainer measured."""
    with tempfile.TemporaryDirectory(prefix="ddp-scaling-") as scratch:
        path = os.path.join(scratch, "summary.json")
        shown = [*launcher.command(ranks, oversubscribed, threads), program, *flags]
        command = [*shown[: -len(flags) - 1], os.path.join(bin_folder, program), *flags, f"--summary-json={path}"]
        record = {
            "command": shlex.join(shown),
            "status": "ok",
            "error": None,
            "summary": None,
            "parameters": None,
            "buckets": [],
        }
        began, busy, own = time.monotonic(), busy_seconds(), own_seconds()
        try:
            returncode, out, err = start(command, timeout, launcher.environment())
        except OSError as error:
            returncode, out, err = 127, "", f"{error.strerror}: {command[0]}"
        seconds = time.monotonic() - began
        record["wall_s"] = round(seconds, 3)
        if busy is not None:  # cores that others kept busy meanwhile, on average
            record["other_cores"] = round(max(0.0, busy_seconds() - busy - (own_seconds() - own)) / seconds, 2)
        if returncode is None:
            record.update(
                status="timeout", error=f"{program}: took more than {timeout:g} s and was ended (see --timeout)"
            )
        elif returncode != 0:
            record.update(status="failed", error=error_line(program, returncode, err))
        else:
            try:
                record.update(summary=read_summary(path, ranks), **read_output(out))
                record["summary"].pop("environment", None)  # the result has it once
            except ValueError as error:
                record.update(status="failed", error=f"{program}: {error}")
        return record
