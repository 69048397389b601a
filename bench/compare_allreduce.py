# SPDX-License-Identifier: Apache-2.0
"""All-reduce beside Open MPI, MPICH, Gloo and the bound."""
import collections
import csv
import json
import os
import statistics
import tempfile

from peer_tools import (FAR_NS, median_ratio, note, parse_size, parse_state, print_table, run, show_ratio, show_size,
                        show_us)

KIB, MIB = 1 << 10, 1 << 20
# Variants that were best of their kind at some size in the peers' own sweep.
BOUNDS = "shm_bound/(direct|direct-huge|direct-flags|direct-futex|direct-nt|cyclic64k|oneshot)|shm_staged/(256K|1M)-huge"
OPEN_MPI = "openmpi/(ucx-thp|ucx-alg5-seg1024k-thp|bigeager-cma-thp|keep-thp|alg5-seg1024k-thp|alg5-seg4096k-thp)"
PEERS = {2: OPEN_MPI + "|mpich/(reduce_scatter_allgather-thp|nolocal-shm-thp|recursive_doubling-thp)|gloo/hd-sync",
         4: OPEN_MPI + "|gloo/bcube-thp"}
EVERY = {2: "openmpi/.*|mpich/.*|gloo/.*", 4: "openmpi/.*|gloo/.*"}  # MPICH spins: meaningless with more ranks than processors
IN_PLACE = ("direct", "cyclic", "oneshot")


class Times:
    """Times by (ranks, mode, program, bytes) and round, in microseconds; those of another state of the machine are only counted."""

    def __init__(self, state):
        self.state = state
        self.range = parse_state(state)
        self.by_key = collections.defaultdict(lambda: collections.defaultdict(list))
        self.left_out = 0
        self.wrong = 0

    def add(self, ranks, mode, program, size, round_, time_us, link_ns, wrong):
        self.wrong += wrong
        if not self.range[0] <= link_ns <= self.range[1]:
            self.left_out += 1
            return
        self.by_key[ranks, mode, program, size][round_].append(time_us)

    def of(self, *key):
        """{round: time}"""
        return {r: statistics.mean(v) for r, v in self.by_key[key].items()} if key in self.by_key else {}

    def best(self, ranks, mode, size, wanted):
        """(name, {round: time}) of the program with the smallest median."""
        found = [(statistics.median(self.of(*key).values()), key[2]) for key in list(self.by_key)
                 if key[:2] == (ranks, mode) and key[3] == size and wanted(key[2])]
        if not found:
            return None, {}
        name = min(found)[1]
        return name, self.of(ranks, mode, name, size)


def run_ours(setup, times, ranks, mode, buffers, round_):
    a = setup.arguments
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "rows.json")
        command = [*setup.mpirun(ranks), os.path.join(a.bin, "ddp_perf"), "--placement=in", f"--sizes={a.sizes}",
                   f"--json={path}", f"--budget={a.budget}"]
        command += [f"--near={times.range[1]}", "--near-wait=4"] if times.range[1] < FAR_NS else []
        command += ["--fresh"] if mode == "fresh" else []
        command += ["--ordinary"] if buffers == "ordinary" else []
        if run(command, 600) is None:
            return
        with open(path) as file:
            rows = json.load(file)["rows"]
    for row in rows:
        setup.keep("allreduce", {"round": round_, "ranks": ranks, "mode": mode, "buffers": buffers, **row})
        times.add(ranks, mode, f"ours/{buffers}", row["bytes"], round_, row["time_us"], row["link_ns"], row["wrong"])
        times.add(ranks, mode, f"column/{buffers}", row["bytes"], round_, row["bound_us"], row["link_ns"], 0)


def run_peers(setup, times, ranks, mode, only, round_):
    a = setup.arguments
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "lines.csv")
        env = dict(os.environ, RUNS="1", RANKS=str(ranks), MODES=mode, SIZES=f"--sizes={a.sizes}", BUDGET=str(a.budget),
                   ONLY=f"^({only})$", QUIET_WAIT=str(a.quiet_wait), RETRY="0", NEAR_WAIT="4", DEADLINE="25",
                   NEAR=str(int(times.range[1])))
        run([os.path.join(a.peers, "run.sh"), a.peers_build, path, "table"], 3600, env)
        if not os.path.exists(path):
            return
        with open(path) as file:
            lines = list(csv.DictReader(file))
    for line in lines:
        setup.keep("peer", {"round": round_, **line})
        times.add(ranks, mode, f"{line['peer']}/{line['variant']}", int(line["bytes"]), round_, float(line["median_us"]),
                  float(line["link_ns"]), int(line["wrong"]))


def measure(setup, times):
    a = setup.arguments
    buffers = [b for part, b in (("allreduce", "allocated"), ("ordinary", "ordinary")) if part in a.part]
    for round_ in range(a.rounds):
        for ranks in map(int, a.ranks):
            for mode in a.modes:
                note(f"round {round_ + 1} of {a.rounds}: {ranks} ranks, {mode}")
                for kind in buffers:
                    run_ours(setup, times, ranks, mode, kind, round_)
                run_peers(setup, times, ranks, mode, "shm_.*" if a.full else BOUNDS, round_)
                for kind in buffers[:1]:
                    run_ours(setup, times, ranks, mode, kind, round_)
                run_peers(setup, times, ranks, mode, EVERY[ranks] if a.full else PEERS[ranks], round_)


def target_of_bound(ranks, size):
    """At most so many times the bound; None where that is not asked for."""
    if ranks == 2:
        return 1.15 if size >= 64 * KIB else None
    return 1.15 if size >= 4 * MIB else 1.5 if size >= 64 * KIB else None


def target_of_peer(ranks, size, bound_allows):
    """At least so many times as fast as the best peer."""
    if ranks == 2:
        return min(2.0, bound_allows) if size >= 64 * KIB else 1.0
    return None if size >= 64 * KIB else 1.0


def verdict(bound_ratio, peer_ratio, want_bound, want_peer):
    if (want_bound is None or bound_ratio is None) and (want_peer is None or peer_ratio is None):
        return "-"
    missed = []
    if want_bound is not None and bound_ratio is not None and bound_ratio[0] > want_bound:
        missed.append(f"bound: {bound_ratio[0]:.2f} > {want_bound}")
    if want_peer is not None and peer_ratio is not None and peer_ratio[0] < want_peer:
        missed.append(f"peer: {peer_ratio[0]:.2f} < {want_peer:.2f}")
    return "; ".join(missed) or "met"


def show(name_and_times):
    name, times = name_and_times
    return f"{show_us(statistics.median(times.values()))} {name.split('/', 1)[1]}" if times else "-"


def show_peer(name_and_times):
    name, times = name_and_times
    return f"{show_us(statistics.median(times.values()))} {name}" if times else "-"


def is_peer(name):
    return name.startswith(("openmpi/", "mpich/", "gloo/"))


def table_allocated(times, ranks, mode, sizes):
    rows = []
    for size in sizes:
        ours = times.of(ranks, mode, "ours/allocated", size)
        if not ours:
            rows.append([show_size(size)] + ["-"] * 7)
            continue
        bound = times.best(ranks, mode, size, lambda n: n.startswith("shm_bound/") and n.split("/")[1].startswith(IN_PLACE))
        peer = times.best(ranks, mode, size, is_peer)
        column = times.of(ranks, mode, "column/allocated", size)
        to_bound, to_peer = median_ratio(ours, bound[1]), median_ratio(peer[1], ours)
        allows = median_ratio(peer[1], bound[1])
        rows.append([show_size(size), show_us(statistics.median(ours.values())), show(bound), show_ratio(to_bound),
                     show_ratio(median_ratio(ours, column)), show_peer(peer), show_ratio(to_peer),
                     verdict(to_bound, to_peer, target_of_bound(ranks, size),
                             target_of_peer(ranks, size, allows[0] if allows else 2.0))])
    print_table(["size", "ours (us)", "best in-place bound", "ours / bound", "ours / own bound column", "best peer",
                 "peer / ours", "target"], rows)


def table_ordinary(times, ranks, mode, sizes):
    rows = []
    for size in sizes:
        ours = times.of(ranks, mode, "ours/ordinary", size)
        if not ours:
            rows.append([show_size(size)] + ["-"] * 5)
            continue
        staged = times.best(ranks, mode, size, lambda n: n.startswith("shm_staged/"))
        peer = times.best(ranks, mode, size, is_peer)
        to_peer = median_ratio(peer[1], ours)
        rows.append([show_size(size), show_us(statistics.median(ours.values())), show(staged), show_peer(peer),
                     show_ratio(to_peer), verdict(None, to_peer, None, 1.0 if size >= 64 * KIB else None)])
    print_table(["size", "ours (us)", "staged bound", "best peer", "peer / ours", "target"], rows)


def print_tables(setup, times):
    a = setup.arguments
    sizes = [parse_size(s) for s in a.sizes.split(",")]
    for part, kind, table in (("allreduce", "Allocate'd", table_allocated), ("ordinary", "ordinary", table_ordinary)):
        if part not in a.part:
            continue
        for ranks in map(int, a.ranks):
            for mode in a.modes:
                print(f"### AllReduce, float32, in place, {kind} buffers, {ranks} ranks, {mode}\n")
                table(times, ranks, mode, sizes)
    print(f"Wrong elements: {times.wrong}. Lines left out because the processors were not {times.state}: {times.left_out}.\n", flush=True)


def compare(setup):
    times = Times(setup.arguments.state)
    try:
        measure(setup, times)
    finally:
        print_tables(setup, times)
