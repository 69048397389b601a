# SPDX-License-Identifier: Apache-2.0
"""What compressing gradients costs in accuracy: the trainers with and without --compress, seed by seed.

  python3 bench/compression_accuracy.py --bin=build/release/bin --data=FOLDER     # MNIST's four IDX files
  python3 bench/compression_accuracy.py --bin=build/release/bin                   # images of CIFAR's size, made here

Prints the mean accuracy over the seeds, the mean of the paired differences from float32, and its 95 % interval. Flags
behind -- go to the trainer.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile

from scaling import UserError
from scaling.trainers import Launcher

MODES = ["off", "bf16", "int8", "fp8"]
# Two-sided 95 % quantiles of Student's t distribution, by degrees of freedom.
QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
CLASSES, SIDE, CELL = 10, 32, 4
IMAGES = 1000  # in each of the six files


def write_images(folder):
    """A set in the files of CIFAR-10, the same every time: a pattern for each class, shifted by up to 15 pixels, under noise."""
    source = random.Random(1)
    cells = SIDE // CELL
    patterns = [[[[source.randrange(256) for _ in range(cells)] for _ in range(cells)] for _ in range(3)]
                for _ in range(CLASSES)]
    for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
        with open(os.path.join(folder, name), "wb") as file:
            for _ in range(IMAGES):
                label = source.randrange(CLASSES)
                down, right = source.randrange(SIDE // 2), source.randrange(SIDE // 2)
                image = bytearray()
                for plane in patterns[label]:
                    rows = [[value for value in row for _ in range(CELL)] for row in plane]
                    rows = [row[right:] + row[:right] for row in rows]
                    for y in range(SIDE):
                        image += bytes(rows[(y + down) % SIDE // CELL])
                noise = source.randbytes(len(image))
                file.write(bytes([label]) + bytes((value + 3 * other) // 4 for value, other in zip(image, noise)))


def accuracy(arguments, launcher, data, mode, seed):
    """Test accuracy of one training, in percent. `launcher`: None for one rank, which needs none."""
    with tempfile.TemporaryDirectory() as scratch:
        summary = os.path.join(scratch, "summary.json")
        words, environment = [], None
        if launcher is not None:
            # As if there were too few processors: how long it takes does not matter, and no rank is then refused.
            words, environment = launcher.command(arguments.ranks, True, 1), launcher.environment()
        command = [*words, os.path.join(arguments.bin, arguments.program), f"--data={data}", f"--seed={seed}",
                   f"--compress={mode}", f"--summary_json={summary}", *arguments.flags]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\nfailed:\n{done.stderr}")
        with open(summary) as file:
            return 100 * json.load(file)["test_accuracy"]


def report(results):
    """One line of a table for each mode."""
    print("| gradients travel as | accuracy | difference from float32, points | 95 % interval |")
    print("| --- | --- | --- | --- |")
    for mode, values in results.items():
        mean = f"{statistics.mean(values):.3f} %"
        if mode == "off":
            print(f"| float32 | {mean} | - | - |")
            continue
        differences = [value - reference for value, reference in zip(values, results["off"])]
        middle = statistics.mean(differences)
        half = QUANTILES[len(values) - 1] * statistics.stdev(differences) / len(values) ** 0.5
        print(f"| {mode} | {mean} | {middle:+.3f} | {middle - half:+.3f} to {middle + half:+.3f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, help="the folder of the programs")
    parser.add_argument("--program", default="train_mlp", help="train_mlp or train_cnn")
    parser.add_argument("--data", help="a folder that --data of the trainer takes; default: images made here")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mpirun", default="mpirun", help="the launcher, and flags of yours for it")
    parser.add_argument("--seeds", type=int, default=5, choices=range(2, 11))
    parser.add_argument("--modes", default=",".join(MODES[1:]), help="what --compress is compared with off")
    parser.add_argument("flags", nargs="*")
    arguments = parser.parse_args()
    try:
        launcher = Launcher(arguments.mpirun) if arguments.ranks > 1 else None
    except UserError as error:
        sys.exit(f"compression_accuracy.py: {error}")
    with tempfile.TemporaryDirectory() as made:
        if arguments.data is None:
            write_images(made)
        results = {"off": []}
        results.update((mode, []) for mode in arguments.modes.split(","))
        for seed in range(1, arguments.seeds + 1):
            for mode in results:
                results[mode].append(accuracy(arguments, launcher, arguments.data or made, mode, seed))
                print(f"seed {seed}, {mode}: {results[mode][-1]:.2f} %", file=sys.stderr)
    report(results)


if __name__ == "__main__":
    main()
