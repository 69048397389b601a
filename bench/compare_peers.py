#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs libddp's benchmarks and those of its peers in turn, and prints tables of medians and ratios. Started by compare_peers.sh.

A round runs everything once, ours before and after the bound and before the peers; a ratio is taken within a round, and its median over the
rounds is printed. A time counts only if the cache-line latency around it (link_ns) was that of the chosen state: on a virtual machine the
processors move, and what passes between two processes is then several times slower.
"""
import argparse
import os
import signal
import sys

import compare_allreduce
import compare_collectives
import compare_training
from peer_tools import Setup, note, parse_state

PARTS = ("allreduce", "ordinary", "collectives", "train", "overhead")


def names(allowed):
    def parse(text):
        values = text.replace(",", " ").split()
        wrong = [v for v in values if v not in allowed]
        if wrong or not values:
            raise argparse.ArgumentTypeError(f"{text!r}: give some of {', '.join(allowed)}, separated by commas")
        return values

    return parse


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--peers", "--peers-build", "--bin", "--mpirun"):
        p.add_argument(name, required=True, help=argparse.SUPPRESS)
    p.add_argument("--part", type=names(PARTS), default=list(PARTS), metavar="LIST", help=f"of {','.join(PARTS)} (all)")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--ranks", type=names(("2", "4")), default=["2", "4"], metavar="LIST", help="all-reduce with so many (2,4)")
    p.add_argument("--modes", type=names(("hot", "fresh")), default=["hot", "fresh"], metavar="LIST", help="(hot,fresh)")
    p.add_argument("--sizes", default="1K,4K,16K,64K,256K,1M,4M,16M,64M,256M", metavar="LIST")
    p.add_argument("--collectives", default="all_gather,reduce_scatter,broadcast,sendrecv,pingpong,all_to_all", metavar="LIST")
    p.add_argument("--batches", default="32,64,512", metavar="LIST", help="samples of a rank in a training step (32,64,512)")
    p.add_argument("--steps", type=int, default=200, help="training steps of a run, after a warm-up of 20 (200)")
    p.add_argument("--full", action="store_true", help="every variant of every peer, not only those that were ever best: hours")
    p.add_argument("--budget", type=float, default=0.2, help="seconds of timed work for a program and size (0.2)")
    p.add_argument("--state", default="near", metavar="NAME|LOW-HIGH", type=lambda t: parse_state(t) and t,
                   help="of the processors: near (a cache line takes 25 to 120 ns), far, smt, or a range in ns")
    p.add_argument("--quiet-wait", type=int, default=5, help="seconds to wait for other processes to rest before a peer (5)")
    p.add_argument("--data", help="folder with MNIST's IDX files (PEERS_FOLDER/../data/mnist)")
    p.add_argument("--json", help="file to write all measured lines to")
    a = p.parse_args()
    if a.data is None:
        a.data = os.path.join(a.peers, "..", "data", "mnist")
    return a


def main():
    a = parse_arguments()
    setup = Setup(a)
    setup.describe()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is ended, and what was measured is shown
    try:
        if "allreduce" in a.part or "ordinary" in a.part:
            compare_allreduce.compare(setup)
        if "collectives" in a.part:
            compare_collectives.compare(setup)
        if "train" in a.part:
            compare_training.run_peers(setup)
        if "overhead" in a.part:
            compare_training.run_overhead(setup)
    except KeyboardInterrupt:
        note("interrupted")
        return 130
    finally:
        setup.write_json()
    return 0


if __name__ == "__main__":
    sys.exit(main())
