# SPDX-License-Identifier: Apache-2.0
"""Collective operations and messages beside Open MPI's, in the same processes."""
import collections
import json
import os
import statistics
import tempfile

from peer_tools import FAR_NS, note, parse_state, print_table, run, show_size, show_us

# The settings of the peers' run.sh that were ever best: environment and options of mpirun. What malloc frees it keeps, in both.
KEEP = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=67108864"
THP = {"GLIBC_TUNABLES": f"glibc.malloc.hugetlb=1:{KEEP}"}
BIG_EAGER = {"btl_vader_eager_limit": 65536, "btl_vader_rndv_eager_limit": 65536, "btl_vader_max_send_size": 262144,
             "btl_vader_segment_size": 67108864}
UCX = {"pml": "ucx", "pml_ucx_tls": "any", "pml_ucx_devices": "any", "opal_common_ucx_tls": "any", "opal_common_ucx_devices": "any"}
VARIANTS = {"default": ({}, {}), "bigeager-cma-thp": (THP, BIG_EAGER), "ucx-thp": ({**THP, "UCX_TLS": "self,posix,cma"}, UCX)}


def run_once(setup, ranks, variant, buffers, round_):
    """Lines of one program: collective, bytes, ours, theirs."""
    a = setup.arguments
    env, mca = VARIANTS[variant]
    options = [word for key, value in mca.items() for word in ("--mca", key, str(value))]
    low, high = parse_state(a.state)
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "rows.json")
        command = [*setup.mpirun(ranks), *options, os.path.join(a.bin, "ddp_perf"), "--peer", "--placement=out", f"--json={path}",
                   f"--sizes={a.sizes}", f"--budget={a.budget}", f"--collectives={a.collectives}"]
        command += [f"--near={high}", "--near-wait=4"] if high < FAR_NS else []
        command += ["--ordinary"] if buffers == "ordinary" else []
        if run(command, 600, dict(os.environ, **env)) is None:
            return
        with open(path) as file:
            rows = json.load(file)["rows"]
    for row in rows:
        setup.keep("collective", {"round": round_, "ranks": ranks, "variant": variant, "buffers": buffers, **row})
        if low <= row["link_ns"] <= high and "peer_us" in row:
            yield row["collective"], row["bytes"], row["time_us"], row["peer_us"]


def show(times, buffers, ranks):
    rows = []
    for name, size in sorted({(n, s) for b, r, n, s, _ in times if (b, r) == (buffers, ranks)}):
        lines = {v: times[buffers, ranks, name, size, v] for v in VARIANTS if times.get((buffers, ranks, name, size, v))}
        best = min(lines, key=lambda v: statistics.median(theirs for _, theirs in lines[v]))
        ours = statistics.median(o for line in lines.values() for o, _ in line)
        ratios = [theirs / o for o, theirs in lines[best]]
        rows.append([name, show_size(size), show_us(ours), show_us(statistics.median(t for _, t in lines[best])), best,
                     f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
                     "-" if size < 4096 else "met" if statistics.median(ratios) > 1 else "missed"])
    print(f"{ranks} ranks, {buffers} buffers, hot\n")
    print_table(["collective", "size", "ours (us)", "Open MPI (us)", "its best setting", "Open MPI / ours (range)", "faster"], rows)


def compare(setup):
    a = setup.arguments
    times = collections.defaultdict(list)
    variants = list(VARIANTS) if setup.launcher.is_open_mpi else ["default"]  # the others are settings of Open MPI
    for round_ in range(a.rounds):
        for ranks in map(int, a.ranks):
            for buffers in ("allocated", "ordinary"):
                for variant in variants:
                    note(f"round {round_ + 1} of {a.rounds}: {ranks} ranks, {buffers} buffers, {variant}")
                    for name, size, ours, theirs in run_once(setup, ranks, variant, buffers, round_):
                        times[buffers, ranks, name, size, variant].append((ours, theirs))
    for buffers in ("allocated", "ordinary"):
        for ranks in map(int, a.ranks):
            show(times, buffers, ranks)
