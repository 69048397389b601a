# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of the documentation as they stand, each page's in a folder of its own, which looks like a clone with this build's
programs in build/release/bin. A command that is not run stands in NOT_RUN, and a snippet that no test compiles in SNIPPETS, with the
reason; a new one that stands nowhere fails. Of commands in tables and in running text, install.commands looks up programs and flags.

Usage: python3 documented_test.py SOURCE_FOLDER PROGRAM_FOLDER quick|slow|build

quick: what the guide shows. slow: the measurements of docs/performance. build: builds, installs and consumes the library as README.md says.
"""
import gzip
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile

root, programs, part = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve(), sys.argv[3]
PAGES = ["*.md", "docs/**/*.md", "examples/**/*.md", "python/*.md"]
COMMAND = re.compile(r"(?:\w+=\S+ )*(?:[\w./]*/)?(?:bash|cmake|ddp[_-]\w+|g\+\+|mpirun|pip|apt-get|python3|srun|taskset|torchrun|train_\w+|\w+_bench)\s")

# Pages whose commands the part "build" runs, one after the other in one clone, and their blocks there.
BUILD = {
    "README.md": ["cmake --preset release", "cmake --preset cuda"],
    "docs/guide/build.md": ["g++ -O2 train.cc"],
    "docs/guide/run.md": ["mpirun -n 2 ./train"],
    "docs/guide/failures.md": ["DDP_CHECK_REPLICAS=100 mpirun -n 2 ./train"],
}

# Commands that are not run here, and why.
NOT_RUN = [
    (r"bash scripts/(demo|test|lint)\.sh|bash \.ci/run", ".ci/run runs them, the demo from a fresh clone"),
    (r"bash scripts/packages\.sh|apt-get install \./build/packages", ".ci/run packs its own build and tries that by scripts/check_packages.sh"),
    (r"cmake --(preset release +# or|build build/release$|install build/release --prefix \"\$HOME/ddp\"$)",
     "README.md's commands are the same with fewer targets, and are run"),
    (r"PEERS_FOLDER|--peers=FOLDER", "needs builds of PyTorch, NCCL's tests, MPICH and Gloo (bench/compare_peers.sh --help)"),
    (r"torch_ddp\.py|torchrun", "a program of PyTorch's side of a comparison, from PEERS_FOLDER"),
    (r"--device=cuda|cuda_test\.py", "needs GPUs; scripts/gpu_verify.sh runs the same"),
    (r"gpu_bundle\.sh|gpu_verify\.sh", "needs CUDA and some GB; its parts are tests"),
    (r"pip install|python/tests/", "needs PyTorch; the tests python.* run where it is installed"),
    (r"scaling\.py report", "needs a measurement with --predict, which takes minutes; unit.scaling draws such a report"),
    (r"scaling\.py (--quick )?--out|scaling\.py --(reduce|predict)|scaling\.py --out=docs", "minutes on an idle machine; install.scaling and unit.scaling run the program"),
    (r"internode_namespaces\.sh", "needs the right to make network namespaces"),
    (r"make_digits\.py", "needs scikit-learn's file; its result is the committed digits_data.inc, which unit tests read"),
]

# Who compiles or checks a block of another language, by page and language; "*" stands for all pages.
SNIPPETS = {
    ("README.md", "cpp"): "install.static and install.shared build and run it",
    ("README.md", "cmake"): "install.static and install.shared build it",
    ("docs/c.md", "c"): "install.static and install.shared build and run it",
    ("docs/c.md", "cmake"): "install.static and install.shared build it",
    ("docs/guide/build.md", "cmake"): "the part build",
    ("docs/guide/libtorch.md", "cmake"): "install.torch",
    ("docs/guide/trainers.md", "python"): "needs PyTorch and its safetensors; unit.safetensors reads and writes the format",
    ("docs/torch-backend.md", "python"): "python.collectives makes the same call",
    ("python/README.md", "python"): "python.collectives makes the same call",
    ("docs/site/reference/c.md", "{literalinclude} /include/ddp/ddp_c.h"): "the site includes a header",
    ("docs/site/contents.md", "{toctree}"): "the site's contents",
}

# What the reader puts in.
READERS = {"MODEL": "lenet", "AMP": "bf16", "BATCH": "64", "N": "2", "FOLDER": "mnist", "MNIST": "mnist"}
problems, ran = [], 0


def blocks_of(text):
    """Pairs of language and text: fenced blocks, and of indented lines each command, as a block of the shell."""
    fence, lines, page = None, [], text.splitlines()
    for number, line in enumerate(page):
        mark = re.match(r" *```(.*)", line)
        if mark and fence is None:
            fence, lines = mark[1].strip(), []
        elif mark:
            yield fence, "\n".join(lines) + "\n"
            fence = None
        elif fence is not None:
            lines.append(line)
        elif re.match(r" {4}", line) and COMMAND.match(line.strip() + " "):
            command = line.strip()
            while command.endswith("\\"):
                number += 1
                command = command[:-1] + page[number].strip()
            yield "sh", command + "\n"


def reason_of(command):
    return next((why for pattern, why in NOT_RUN if re.search(pattern, command)), None)


def commands_of(block):
    """The lines of a block, or all of it if it is a script."""
    if re.search(r"^#!|'[^'\n]*\n", block):
        return [block]
    return [line for line in block.replace("\\\n", "").splitlines() if line.strip()]


def run(where, command, folder, limit=300, codes=(0,)):
    global ran
    ran += 1
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=limit, check=False)
    if done.returncode not in codes:
        problems.append(f"{where}: {command}\nended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout + done.stderr


def write_data(folder):
    """Pictures of noise in place of those that have to be downloaded, in the formats of MNIST and CIFAR-10."""
    (folder / "mnist").mkdir()
    for name, count in ("train", 1280), ("t10k", 128):
        (folder / "mnist" / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + os.urandom(count * 784))
        with gzip.open(folder / "mnist" / f"{name}-labels-idx1-ubyte.gz", "wb") as labels:
            labels.write(struct.pack(">2i", 2049, count) + bytes(i % 10 for i in range(count)))
    (folder / "cifar").mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / "cifar" / f"{name}.bin").write_bytes(b"".join(bytes([i % 10]) + os.urandom(3072) for i in range(32)))


def make_clone(folder):
    """What the commands take for a clone that is built."""
    for path in root.iterdir():
        if path.name not in (".git", "build"):
            (folder / path.name).symlink_to(path)
    for preset in "release", "cuda", "dev":
        (folder / "build" / preset).mkdir(parents=True)
        (folder / "build" / preset / "bin").symlink_to(programs)
    write_data(folder)
    bin_folder = folder / "bin"  # a Slurm with one task
    bin_folder.mkdir()
    (bin_folder / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (bin_folder / "srun").chmod(0o755)
    (folder / "A").mkdir()
    shutil.copy(root / "docs/results/two-cores/scaling.json", folder / "A")
    shutil.copytree(folder / "A", folder / "B")
    for python in "python3", "/usr/bin/python3":
        if subprocess.run([python, "-c", "import matplotlib"], capture_output=True, check=False).returncode == 0:
            (bin_folder / "python3").symlink_to(shutil.which(python))
            break
    else:
        NOT_RUN.append((r"bench/scaling\.py", "no python3 has matplotlib here"))
    os.environ["PATH"] = f"{bin_folder}:{programs}:{os.environ['PATH']}"
    run("a checkpoint", "train_mlp --steps=20 --save=mlp.ckpt", folder)


def run_block(name, block, folder):
    for command in commands_of(block):
        if not reason_of(command) and not any(command.startswith(first) for first in BUILD.get(name, [])):
            words = READERS if "scaling.py" not in command else {"FOLDER": "A"}
            command = re.sub(r"\b[A-Z]+\b(?![_/=])", lambda word: words.get(word[0], word[0]), command)
            # A doctor may find fault with this machine.
            run(name, command, folder, codes=(0, 1) if "ddp_doctor" in command else (0,))


def check_covered(name, language, block):
    """Says which block no test runs."""
    if language == "sh":
        return
    if language == "":
        if any(COMMAND.match(line + " ") and not re.match(r"[\w_]+: ", line) for line in block.splitlines()):
            problems.append(f"{name}: a block of commands has no language, sh: {block}")
    elif language == "cpp" and re.fullmatch(r"docs/(guide/)?[\w-]+\.md", name):
        pass  # install.guide compiles it; install.torch that of LibTorch
    elif (name, language) not in SNIPPETS:
        problems.append(f"{name}: no test runs this block; add one, or the reason to SNIPPETS:\n{block}")


def build(folder, pages):
    """README.md's way from a clone to a program that runs, and what other pages do with it."""
    files = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=False).stdout.split("\0")
    for path in files if len(files) > 1 else []:
        if path and (root / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / path, folder / path)
    if len(files) == 1:  # an unpacked archive
        shutil.copytree(root, folder, ignore=shutil.ignore_patterns("build"), dirs_exist_ok=True)
    os.environ.update(HOME=str(folder / "home"), CUDAARCHS="80-real")
    of = {name: list(blocks_of(text)) for name, text in pages.items()}

    def first(name, language, begin=""):
        return next(block for kind, block in of[name] if kind == language and block.startswith(begin))

    for command in commands_of(first("README.md", "sh", "cmake --preset release")):
        run("README.md", command, folder, limit=2400)
    consumer = folder / "consumer"
    consumer.mkdir()
    (consumer / "main.cc").write_text(first("README.md", "cpp"))
    for page, lines in ("README.md", ""), ("docs/guide/build.md", "cmake_minimum_required(VERSION 3.22)\nproject(train LANGUAGES CXX)\nadd_executable(train main.cc)\n"):
        (consumer / "CMakeLists.txt").write_text(lines + first(page, "cmake"))
        out = run(page, "cmake -B . -DCMAKE_PREFIX_PATH=$HOME/ddp . && cmake --build . && ./train", consumer)
        if "rank 0 of 1: 0.000" not in out:
            problems.append(f"{page}: the program prints {out}")
    if re.search(r"^DDP_HAVE_MPI|MPIEXEC_EXECUTABLE:[A-Z]*=/", (folder / "build/release/CMakeCache.txt").read_text(), re.M):
        for page, command in ("docs/guide/run.md", "mpirun -n 2 ./train"), ("docs/guide/failures.md", "DDP_CHECK_REPLICAS=100 mpirun -n 2 ./train"):
            if first(page, "sh", command).strip() != command or run(page, command, consumer).count(": 0.500") != 2:
                problems.append(f"{page}: {command} does not print 0.500 from both ranks")
    (consumer / "train.cc").write_text(first("README.md", "cpp"))
    run("docs/guide/build.md", "export PKG_CONFIG_PATH=$HOME/ddp/lib/pkgconfig\n" + first("docs/guide/build.md", "sh", "g++ -O2 train.cc"), consumer)
    build_for_gpus(first("README.md", "sh", "cmake --preset cuda"), folder)


def build_for_gpus(block, folder):
    """The quick start on GPUs, where there is CUDA; without a GPU the trainer has to say so."""
    if not (shutil.which("nvcc") or pathlib.Path("/usr/local/cuda/bin/nvcc").exists()):
        print("not run: README.md, On GPUs: there is no CUDA")
        return
    gpus = subprocess.run(["bash", "-c", "nvidia-smi -L | grep -c ^GPU"], capture_output=True, text=True, check=False).stdout.strip()
    for command in commands_of(block):
        if "--device=cuda" not in command:
            run("README.md", command, folder, limit=2400, codes=(0, 1) if "ddp_doctor" in command else (0,))
        elif int(gpus or 0) < 2:
            out = run("README.md", command, folder, codes=range(1, 256))
            if "GPU" not in out and "CUDA" not in out:
                problems.append(f"README.md: without GPUs {command} says {out}")
        else:
            run("README.md", command, folder)


def main():
    # As root Open MPI asks for these, and for the third with fewer cores than ranks.
    for name in "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe":
        os.environ[name] = "1"
    names = sorted({str(path.relative_to(root)) for pattern in PAGES for path in root.glob(pattern) if "build" not in path.relative_to(root).parts})
    pages = {name: (root / name).read_text() for name in names}
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        if part == "build":
            build(folder, pages)
        else:
            make_clone(folder)
        for name, text in pages.items():
            for language, block in blocks_of(text):
                check_covered(name, language, block)
                if language == "sh" and part == ("slow" if name.startswith("docs/performance/") else "quick"):
                    run_block(name, block, folder)
    for pattern, why in NOT_RUN:
        if not any(re.search(pattern, command) for text in pages.values() for _, block in blocks_of(text) for command in commands_of(block)):
            problems.append(f"no command matches '{pattern}' any more ({why}): remove it from NOT_RUN")
    print("\n".join(problems + [f"{ran} commands run, {len(problems)} failed"]))
    sys.exit(1 if problems or ran < 5 else 0)


main()
