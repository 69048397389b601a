# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for mpirun and the trainers, which print what the real ones print without training anything."""

import json
import os
import stat
import sys

# Prints the version, else starts the program once and tells it the number of ranks.
MPIRUN = """#!/bin/sh
case $1 in --version) echo 'mpirun (Open MPI) 4.1.4'; exit 0 ;; esac
while [ $# -gt 0 ]; do
  case $1 in
    -n) FAKE_RANKS=$2; export FAKE_RANKS; shift 2 ;;
    --bind-to) shift 2 ;;
    --mca) shift 3 ;;
    --oversubscribe) shift ;;
    *) exec "$@" ;;
  esac
done
"""

# A step takes 10 ms of computation, 1 ms more for each other rank (the shared machine), and 2 ms of communication, of
# which half is exposed. Other ways to reduce take longer and expose it all.
# FAKE_BEHAVIOUR says what goes wrong and at how many ranks: "fail:2", "hang:2", "not_json:2", "no_number:2", "loss:2";
# with one way to reduce only: "fail_end:2", "loss_end:2". "noise:2": the last loss differs, by
# little. "metered": it measures energy and operations; "empty": its buckets hold nothing.
TRAINER = """#!{python} -SE
import json, os, sys, time
if "--environment" in sys.argv:
    print(json.dumps({{
        "date": "2026-01-01 00:00:00 +0000", "system": "Linux 6.1", "numa_nodes": 1, "memory_mib": 2048, "gpus": [],
        "cpu": {{"model": "Fake CPU", "sockets": 1, "cores": 2, "hardware_threads": 2, "caches": ["L2 1M"]}},
        "libraries": {{"onednn": "3.7.2"}}, "build": {{"version": "0.1.0", "build_type": "Release"}}, "variables": {{}}}}))
    sys.exit(0)
flags = dict(word.lstrip("-").split("=", 1) if "=" in word else (word.lstrip("-"), "") for word in sys.argv[1:])
ranks, batch, steps = int(os.environ["FAKE_RANKS"]), int(flags["batch"]), int(flags["steps"])
name = os.path.basename(sys.argv[0])
what, _, at = os.environ.get("FAKE_BEHAVIOUR", "").partition(":")
wrong = what if at and int(at) == ranks else ""
if wrong == "fail" or wrong == "fail_" + flags.get("reduce", "overlap"):
    print("-----", "Primary job terminated", name + ": rank 1: the link is broken", sep="\\n", file=sys.stderr)
    sys.exit(3)
if wrong == "hang":
    time.sleep(60)
if wrong == "slow":
    time.sleep(0.5)
communication = {{"overlap": 2.0, "end": 4.0, "each": 5.0, "gather": 6.0, "none": 0.0}}[flags.get("reduce", "overlap")]
communicates = ranks > 1 and communication > 0
step = 10.0 * batch / 64 + (ranks - 1) + (communication if communicates else 0.0)
print("model: fake; 1000000 parameters; sgd, learning rate 0.01")
if communicates:
    mib = "0.00" if what == "empty" else "1.91"
    print(f"       0       {{mib}}      4.000      4.000      5.000")
    print(f"       1       {{mib}}      4.000      4.000      6.000")
loss = 1.5 if wrong in ("loss", "loss_" + flags.get("reduce", "overlap")) else 1.25
summary = {{
    "samples_per_second": 1000 * ranks * batch / step, "step_ms": {{"median": step, "min": step, "max": step}},
    "exposed_comm_ms": 0.0 if not communicates else 1.0 if communication == 2 else communication,
    "overlap": 0.5 if communicates and communication == 2 else 0.0,
    "mean_communication_ms": communication if communicates else 0.0,
    "mean_exposed_ms": 0.0 if not communicates else 1.0 if communication == 2 else communication,
    "final_loss": 0.0012 if wrong == "noise" else 0.001, "first_step_losses": [2 * loss - 0.5, 0.5],
    "peak_rss_mb": 100 + ranks, "world_size": ranks, "steps": steps}}
if what == "metered":
    summary["energy"] = {{"joules_per_sample": 0.125 * ranks, "contains": "processors only"}}
    summary["operations"] = {{"share_of_products": 0.75}}
if wrong == "no_number":
    del summary["overlap"]
with open(flags["summary-json"], "w") as file:
    file.write("not JSON" if wrong == "not_json" else json.dumps(summary))
"""

# A machine with 2 us and 2 GB/s within a node, 20 us and 1 GB/s between nodes. FAKE_BEHAVIOUR: "rough" is a machine
# whose times follow no model, "no_bench" one where the program fails.
ALL_REDUCE_BENCH = """#!{python} -SE
import json, math, os, sys
flags = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:] if "=" in word)
ranks = int(os.environ["FAKE_RANKS"])
local = int(os.environ["DDP_NODE_SIZE"])
behaviour = os.environ.get("FAKE_BEHAVIOUR", "")
if behaviour == "no_bench":
    print("ddp_perf: no memory", file=sys.stderr)
    sys.exit(1)
def level(members, size, latency, cost):
    return 0 if members == 1 else math.ceil(math.log2(members)) * latency + 2 * (members - 1) / members * size * cost
def time(size):
    rough = 2 if behaviour == "rough" and size.bit_length() % 2 == 0 else 1
    return rough * (level(local, size, 2, 5e-4) + level(ranks // local, size, 20, 1e-3))
with open(flags["json"], "w") as file:
    rows = [{{"bytes": size, "time_us": time(size)}} for size in map(int, flags["sizes"].split(","))]
    json.dump({{"ranks": ranks, "rows": rows}}, file)
"""

NVIDIA_SMI = """#!/bin/sh
case $1 in
  topo) printf '\\t\\033[4mGPU0\\tGPU1\\033[0m\\nGPU0\\t X \\tNV18\\n\\n' ;;
  *) for gpu in 0 1; do echo 'NVIDIA H200, 580.1, 143771 MiB, 1980 MHz, 700.00 W'; done ;;
esac
"""


def write_program(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
    return path


def make_programs(folder):
    """Puts the programs into `folder`. Returns the flags that make ddp-scaling use them."""
    for trainer in ("train_mlp", "train_cnn"):
        write_program(os.path.join(folder, trainer), TRAINER.format(python=sys.executable))
    write_program(os.path.join(folder, "ddp_perf"), ALL_REDUCE_BENCH.format(python=sys.executable))
    return [f"--bin={folder}", f"--mpirun={write_program(os.path.join(folder, 'mpirun'), MPIRUN)}"]


def edit_result(folder, change):
    """Rewrites the scaling.json of a folder after `change(result)`."""
    path = os.path.join(folder, "scaling.json")
    with open(path, encoding="utf-8") as file:
        result = json.load(file)
    change(result)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(result, file)
