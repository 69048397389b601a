# SPDX-License-Identifier: Apache-2.0
"""Runs PyTorch's own distributed_test.py over the backends gloo and ddp, and compares them case by case.

    python3 python/tests/acceptance.py [--ranks 3] [--limit 60] [--only REGEX] [--budget SECONDS] [--json FILE]

The file comes with PyTorch. What it runs for gloo it runs for ddp too: the name of the backend that it asks for equals
both. Every case has a time limit. The ranks are forked from a process that has imported PyTorch already. Ends with 0 if
at least 95 % of the cases that gloo passes pass over ddp.
"""

import argparse
import faulthandler
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

PASSED, SKIPPED, FAILED, TIMED_OUT = "passed", "skipped", "failed", "timed out"


class Both(str):
    """The name of the backend, which equals "gloo" wherever the file asks whether it is gloo."""

    def __eq__(self, other):
        return str.__eq__(self, other) or str.__eq__("gloo", other)

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash("gloo")


def load(backend):
    """The test class of the file, for this backend."""
    found = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    with open(found.origin) as f:
        text = f.read()
    line = 'BACKEND = os.environ["BACKEND"]'
    if text.count(line) != 1:
        sys.exit(f"{found.origin} is not the file that this program knows: it lacks the line {line}")
    if backend != "gloo":
        import ddp_torch
        from torch.testing._internal.common_distributed import DistTestCases

        DistTestCases.backend_feature["plugin"].add(backend)
        # `get_backend() in LIST`: the cases ask so whether there are profiles of the operations.
        text = text.replace(line, f"BACKEND = Both({backend!r})").replace(
            "    dist.Backend.GLOO,\n", f"    dist.Backend.GLOO,\n    {backend!r},\n")
    module = importlib.util.module_from_spec(found)
    module.__dict__["Both"] = Both
    sys.modules[found.name] = module
    exec(compile(text, found.origin, "exec"), module.__dict__)

    class Cases(module.TestDistBackend, module.DistributedTest._DistTestBase):
        pass

    return module, Cases


def run_rank(Cases, case, rank, path):
    """In a process of its own."""
    import torch

    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    parent, child = torch.multiprocessing.Pipe()
    Cases._run(rank, case, path, child, fake_pg=False)
    os._exit(0)


def run_case(module, Cases, case, ranks, limit):
    """The outcome of one case, and what its ranks printed."""
    from torch.testing._internal.common_distributed import TEST_SKIPS, cleanup_temp_dir

    module.initialize_temp_directories()
    module.Barrier.init()
    skips = {s.exit_code for s in TEST_SKIPS.values()}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryDirectory() as folder:
        pids = {}
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                os.setpgrp()
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                code = 1
                try:
                    run_rank(Cases, case, rank, folder + "/store")
                except SystemExit as e:
                    code = e.code if isinstance(e.code, int) else 1
                except BaseException:
                    import traceback

                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            pids[pid] = rank
        codes, end = wait_for(pids, time.monotonic() + limit)
        cleanup_temp_dir()
        output.seek(0)
        text = output.read()
    if end:
        return TIMED_OUT, text
    if all(c == 0 for c in codes.values()):
        return PASSED, text
    if codes[0] in skips or all(c in skips for c in codes.values()):
        return SKIPPED, text
    return FAILED, text


def wait_for(pids, deadline):
    """The exit codes by rank; and whether the time was over, and the rest were killed."""
    codes, late = {}, False
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pids[pid]] = os.waitstatus_to_exitcode(status)
            continue
        if time.monotonic() > deadline and not late:
            late = True
            for p, rank in pids.items():
                if rank not in codes:
                    os.kill(p, signal.SIGUSR1)
            time.sleep(0.3)
            for p, rank in pids.items():
                if rank not in codes:
                    os.kill(p, signal.SIGKILL)
        time.sleep(0.005)
    return codes, late


def worker(args):
    """Runs cases that come as lines on the input, over one backend. Prints a line of JSON for each."""
    os.environ.update(BACKEND=args.worker, WORLD_SIZE=str(args.ranks), TEMP_DIR=tempfile.mkdtemp(),
                      INIT_METHOD="file://" + tempfile.mktemp(), MASTER_ADDR="localhost", MASTER_PORT="29500")
    sys.argv = sys.argv[:1]
    module, Cases = load(args.worker)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    names = sorted(n for n in dir(Cases) if n.startswith("test_"))
    print(json.dumps(names), file=answers, flush=True)
    for line in sys.stdin:
        case = line.strip()
        # Marked to be skipped as a whole.
        if getattr(getattr(Cases, case), "__unittest_skip__", False):
            outcome, text = SKIPPED, str(getattr(getattr(Cases, case), "__unittest_skip_why__", ""))
        else:
            outcome, text = run_case(module, Cases, case, args.ranks, args.limit)
        print(json.dumps([outcome, text[-6000:]]), file=answers, flush=True)


class Worker:
    def __init__(self, backend, args):
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--worker", backend, "--ranks", str(args.ranks), "--limit",
             str(args.limit)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("a worker has ended; is PyTorch with the package expecttest installed?")
        return json.loads(line)

    def ask(self, case):
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()


def reason(text):
    errors = [line for line in text.splitlines() if re.match(r"\s*(\w+\.)*\w*(Error|Exception)\b", line)]
    return (errors[0] if errors else (text.strip().splitlines() or ["no output"])[-1]).strip()[:160]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60, help="seconds for a case")
    parser.add_argument("--only", default="", help="only cases whose name has this regular expression")
    parser.add_argument("--budget", type=float, default=0, help="seconds after which no further case begins")
    parser.add_argument("--json", default="", help="write all outcomes to this file; cases that it already has are not run again")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    workers = {b: Worker(b, args) for b in ("gloo", "ddp")}
    names = [w.read() for w in workers.values()][0]
    cases = [n for n in names if re.search(args.only, n)]
    results, begin = {}, time.monotonic()
    if args.json and os.path.exists(args.json):
        with open(args.json) as f:
            results = json.load(f)
    for case in cases:
        if case in results:
            continue
        if args.budget and time.monotonic() - begin > args.budget:
            break
        results[case] = {}
        for backend, w in workers.items():
            # What gloo does not pass says nothing about ddp.
            if backend == "ddp" and results[case]["gloo"][0] != PASSED:
                continue
            w.ask(case)
            results[case][backend] = w.read()
        r = results[case]
        if args.json:
            with open(args.json + ".new", "w") as f:
                json.dump(results, f, indent=1)
            os.replace(args.json + ".new", args.json)
    for w in workers.values():
        w.process.stdin.close()
        w.process.wait()
    for case, r in results.items():
        if "ddp" in r and r["ddp"][0] != PASSED:
            print(f"{case}: {r['ddp'][0]}: {reason(r['ddp'][1])}")
    gloo = [c for c, r in results.items() if r["gloo"][0] == PASSED]
    ddp = [c for c in gloo if results[c]["ddp"][0] == PASSED]
    share = 100 * len(ddp) / len(gloo) if gloo else 0
    print(f"{len(results)} of {len(names)} cases run at {args.ranks} ranks: gloo passes {len(gloo)}, of which ddp passes {len(ddp)} ({share:.1f} %)")
    return 0 if share >= 95 else 1


if __name__ == "__main__":
    sys.exit(main())
