# SPDX-License-Identifier: Apache-2.0
"""train_mlp beside PyTorch's DistributedDataParallel, and beside itself without ours."""
import collections
import json
import os
import shutil
import statistics
import subprocess
import tempfile

from peer_tools import median_ratio, note, print_table, run, show_ratio

WARMUP = 20
# Samples per second against PyTorch, by ranks and batch.
TARGETS = {2: {32: 3.0, 64: 2.2, 512: 1.3}, 1: {32: 1.4, 64: 1.3, 512: 1.1}}
OVERHEAD_TARGET = 1.02
# PyTorch's best settings on CPUs: products by oneDNN, which F.linear uses on some processors only. The MLP has no
# convolution, so that the memory format (--channels-last) changes nothing; the optimizer is fused always.
TORCH_BEST = ("--onednn-linear",)
TORCH_COLUMNS = ("peer,model,device,dtype,mode,ranks,threads,batch,params,steps,median_ms,min_ms,max_ms,samples_per_s,"
                 "nosync_ms,exposed_ms,peak_rss_mb").split(",")


def steps_of(setup, batch):
    # Large batches take long and vary little.
    return setup.arguments.steps if batch < 256 else max(20, setup.arguments.steps // 2)


def train(setup, ranks, batch, *flags):
    """The summary of one run of train_mlp, or None."""
    a = setup.arguments
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "summary.json")
        command = [*setup.mpirun(ranks), os.path.join(a.bin, "train_mlp"), f"--data={a.data}", f"--batch={batch}",
                   "--hidden=1024,1024", "--optimizer=sgd", "--lr=0.01", "--threads=1", f"--warmup={WARMUP}",
                   f"--steps={WARMUP + steps_of(setup, batch)}", f"--summary-json={path}", *flags]
        if run(command, 300) is None:
            return None
        with open(path) as file:
            summary = json.load(file)
    setup.keep("train_mlp", {"batch": batch, "flags": list(flags), **summary})
    return summary


def find_torch():
    """The interpreter that has PyTorch (TORCH_PYTHON, else python3), or None, said why."""
    python = os.environ.get("TORCH_PYTHON", "python3")
    if shutil.which(python) is None:
        note(f"PyTorch is left out: TORCH_PYTHON={python} is not a program")
        return None
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode != 0:
        note(f"PyTorch is left out: {python} has no module torch; set TORCH_PYTHON to an interpreter that has it")
        return None
    return python


def train_torch(setup, python, ranks, batch):
    """The faster one, by samples per second, of PyTorch's default and best settings, as torch_ddp.py prints it; or None.

    One rank: without DistributedDataParallel. Which settings are best depends on the processor, so both are run.
    """
    command = [*setup.mpirun(ranks), python, os.path.join(setup.arguments.peers, "torch_ddp.py"), "--model=mlp", f"--batch={batch}",
               "--threads=1", f"--warmup={WARMUP}", f"--steps={steps_of(setup, batch)}"] + (["--no-ddp"] if ranks == 1 else [])
    rows = []
    for flags in ((), TORCH_BEST):
        out = run([*command, *flags], 300)
        lines = [line for line in (out or "").splitlines() if line.startswith("torch-")]
        if lines:
            rows.append({**dict(zip(TORCH_COLUMNS, lines[-1].split(","))), "flags": " ".join(flags)})
            setup.keep("torch", rows[-1])
    return max(rows, key=lambda row: float(row["samples_per_s"]), default=None)


class Rounds:
    """Figures by name and round."""

    def __init__(self):
        self.by_name = collections.defaultdict(dict)

    def add(self, round_, **figures):
        for name, value in figures.items():
            self.by_name[name][round_] = value

    def median(self, name, digits=2):
        values = self.by_name[name].values()
        return f"{statistics.median(values):.{digits}f}" if values else "-"

    def ratio(self, above, below):
        return median_ratio(self.by_name[above], self.by_name[below])

    def difference(self, name, less):
        both = [self.by_name[name][r] - self.by_name[less][r] for r in self.by_name[name] if r in self.by_name[less]]
        return f"{statistics.median(both):.2f}" if both else "-"


def one_round(setup, figures, round_, python, ranks, batch):
    ours = train(setup, ranks, batch)
    if ours:
        figures.add(round_, ours_rate=ours["samples_per_second"], ours_ms=ours["step_ms"]["median"])
    theirs = train_torch(setup, python, ranks, batch) if python else None
    if theirs:
        figures.add(round_, torch_rate=float(theirs["samples_per_s"]), torch_ms=float(theirs["median_ms"]),
                    torch_nosync_ms=float(theirs["nosync_ms"]))
    if ranks > 1:
        alone = train(setup, ranks, batch, "--reduce=none")
        if alone:
            figures.add(round_, ours_nosync_ms=alone["step_ms"]["median"])


def run_peers(setup):
    a = setup.arguments
    python = find_torch()
    batches = [int(b) for b in a.batches.split(",")]
    figures = {(ranks, batch): Rounds() for ranks in (2, 1) for batch in batches}
    for round_ in range(a.rounds):
        for (ranks, batch), of_case in figures.items():
            note(f"round {round_ + 1} of {a.rounds}: training, {ranks} ranks, batch {batch}")
            one_round(setup, of_case, round_, python, ranks, batch)
    print("### Training an MLP 784-1024-1024-10, one thread a rank, beside PyTorch\n")
    print(f"PyTorch: in each round the faster one of its default settings and {' '.join(TORCH_BEST)}\n")
    rows = []
    for (ranks, batch), f in figures.items():
        ratio, wanted = f.ratio("ours_rate", "torch_rate"), TARGETS[ranks].get(batch)
        target = "-" if ratio is None or wanted is None else "met" if ratio[0] >= wanted else f"missed: {ratio[0]:.2f} < {wanted}"
        exposed = ("-", "-") if ranks == 1 else (f.difference("ours_ms", "ours_nosync_ms"), f.difference("torch_ms", "torch_nosync_ms"))
        rows.append([str(ranks), str(batch), f.median("ours_rate", 0), f.median("torch_rate", 0), show_ratio(ratio),
                     f.median("ours_ms"), f.median("torch_ms"), *exposed, target])
    print_table(["ranks", "batch", "ours (samples/s)", "PyTorch (samples/s)", "ours / PyTorch", "ours (ms a step)", "PyTorch (ms a step)",
                 "ours exposed (ms)", "PyTorch exposed (ms)", "target"], rows)


def run_overhead(setup):
    """Single steps vary by more than what is looked for: many short runs, in turn."""
    a = setup.arguments
    rows = []
    for batch in [int(b) for b in a.batches.split(",")]:
        f = Rounds()
        for round_ in range(2 * a.rounds + 1):
            note(f"round {round_ + 1} of {2 * a.rounds + 1}: one rank with and without DistributedDataParallel, batch {batch}")
            for name, flags in (("with_ms", ()), ("without_ms", ("--no-ddp",))):
                summary = train(setup, 1, batch, *flags)
                if summary:
                    f.add(round_, **{name: summary["step_ms"]["median"]})
        ratio = f.ratio("with_ms", "without_ms")
        target = "-" if ratio is None else "met" if ratio[0] <= OVERHEAD_TARGET else f"missed: {ratio[0]:.3f} > {OVERHEAD_TARGET}"
        rows.append([str(batch), f.median("with_ms", 3), f.median("without_ms", 3),
                     "-" if ratio is None else f"{ratio[0]:.3f} ({ratio[1]:.3f}-{ratio[2]:.3f})", target])
    print("### DistributedDataParallel at one rank\n")
    print_table(["batch", "with (ms a step)", "without (ms a step)", "with / without", "target"], rows)
