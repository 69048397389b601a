# SPDX-License-Identifier: Apache-2.0
"""Checks the backend "ddp" on CUDA tensors: collectives, streams, messages, DDP and FSDP; and how fast it is beside NCCL.

    python3 python/tests/cuda_test.py [--gpus 2] [--only NAME,...] [--device cpu]

A line for each step, OK or FAILED with the reason, and then the table. Without a GPU it is skipped. `--device cpu` runs
what does not need one on CPU tensors, beside gloo.
"""

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

try:
    import torch
    import torch.distributed as dist
    import ddp_torch
except ImportError as e:
    print(f"SKIPPED: {e}; pip install torch and ./python")
    sys.exit(77)

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import collectives_test
from collectives_test import equal

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def messages(rank, n):
    """In a ring, and from any rank. On a GPU messages run in the order of the calls: some must receive first."""
    right, left = (rank + 1) % n, (rank - 1) % n
    for size in (1, 1000, 300000):
        x, y = torch.empty(size), torch.full((size,), float(rank))
        first, second = (lambda: dist.isend(y, right)), (lambda: dist.irecv(x, left))
        if rank % 2:
            first, second = second, first
        for work in (first(), second()):
            work.wait()
        equal(x, torch.full((size,), float(left)), "irecv")
    x = torch.full((2,), float(rank))
    if rank == 0:
        for _ in range(n - 1):
            source = dist.recv(x)
            equal(x, torch.full((2,), float(source)), "recv from any rank")
    else:
        dist.send(x, 0)


def busy():
    """Keeps the current stream for about half a second."""
    torch.cuda._sleep(10**9)


def streams(rank, n):
    want = torch.full((1000,), n * (n + 1) / 2)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        busy()
        x = torch.full((1000,), float(rank + 1))
        work = dist.all_reduce(x, async_op=True)
    assert n == 1 or not work.is_completed(), "is_completed() before the stream has come to the operation"
    assert work.get_future().done(), "a future of GPU work is complete when it has been submitted"
    work.wait()  # in the default stream, which goes on after the operation
    equal(x.clone(), want, "wait() has to order the current stream")
    torch.cuda.synchronize()
    assert work.is_completed(), "is_completed() after the operation"

    busy()
    x = torch.full((1000,), float(rank + 1))
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    equal(future.wait(), want * 2, "future")

    busy()
    x = torch.full((1000,), float(rank + 1))
    dist.all_reduce(x)
    equal(x, want, "all_reduce in the current stream")

    busy()
    x = torch.full((1000,), float(rank + 1))
    work = dist.all_reduce(x, async_op=True)
    if n > 1:
        try:
            work.wait(datetime.timedelta(milliseconds=1))
            raise AssertionError("wait(timeout) has to give up")
        except dist.DistBackendError as e:
            assert "Timed out" in str(e), e
    assert work.wait(datetime.timedelta(seconds=20))
    equal(x, want, "wait(timeout)")

    kept = []
    for i in range(40):  # memory that nobody keeps must not be given to others before the operation has ended
        x = torch.full((1 << 18,), float(i))
        work = dist.all_reduce(x, async_op=True)
        if i % 4 == 0:
            kept.append((work, x, i))
        del x, work
    for work, x, i in kept:
        work.wait()
        equal(x, torch.full((1 << 18,), float(i * n)), "asynchronous all_reduce")

    busy()
    dist.barrier()
    assert torch.cuda.current_stream().query(), "barrier() waits for the rank's own stream"
    with torch.cuda.stream(side):
        y = torch.arange(12.0).view(3, 4).t()
        dist.all_reduce(y)
        equal(y, torch.arange(12.0).view(3, 4).t() * n, "with gaps, in another stream")


def both_devices(rank, n):
    """One group for CPU and CUDA tensors."""
    for device in ("cpu", torch.get_default_device(), "cpu"):
        x = torch.ones(3, device=device)
        dist.all_reduce(x)
        equal(x, torch.full((3,), float(n), device=device), f"all_reduce on {device}")
    pair = dist.new_group(list(range(n)))
    x = torch.ones(5)
    dist.all_reduce(x, group=pair)
    equal(x, torch.full((5,), float(n)), "all_reduce of a second group")
    dist.destroy_process_group(pair)


def mlp(width=256, layers=2):
    torch.manual_seed(1)
    stack = [torch.nn.Linear(784, width), torch.nn.ReLU()]
    for _ in range(layers - 1):
        stack += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*stack, torch.nn.Linear(width, 10))


def batch_of(rank, size=32):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(size, 784, generator=generator, device="cpu")
    y = torch.randint(10, (size,), generator=generator, device="cpu")
    return x.to(torch.get_default_device()), y.to(torch.get_default_device())


def losses(model, rank, group, steps):
    """The mean loss of all ranks, step by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = []
    x, y = batch_of(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if group is not None:
            dist.all_reduce(mean, group=group)
            mean /= dist.get_world_size(group)
        result.append(mean.item())
    return result


def losses_alone(n, steps):
    """The same training by one process with the data of all ranks."""
    model, result = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (torch.cat(parts) for parts in zip(*(batch_of(r) for r in range(n))))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


def close(got, want, what):
    worst = max(abs(a - b) for a, b in zip(got, want, strict=True))
    assert worst < 1e-4 and want[-1] < want[0], f"{what}: losses {got} instead of {want}"


def peer_of():
    return "nccl" if torch.get_default_device().type == "cuda" else "gloo"


def ddp(rank, n):
    peer = dist.new_group(backend=peer_of())
    got = {}
    for name, group in (("ddp", dist.group.WORLD), (peer_of(), peer)):
        model = torch.nn.parallel.DistributedDataParallel(mlp(), process_group=group, gradient_as_bucket_view=True,
                                                          bucket_cap_mb=1)
        got[name] = losses(model, rank, group, 10)
    close(got["ddp"], got[peer_of()], f"beside {peer_of()}")
    close(got["ddp"], losses_alone(n, 10), "beside one process")
    model = torch.nn.parallel.DistributedDataParallel(mlp(), static_graph=True)
    close(losses(model, rank, dist.group.WORLD, 10), got["ddp"], "static_graph")
    dist.destroy_process_group(peer)


def fsdp(rank, n):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    device, want = torch.get_default_device(), losses_alone(n, 3)
    mesh = init_device_mesh(device.type, (n,))
    model = mlp()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    close(losses(fully_shard(model, mesh=mesh), rank, dist.group.WORLD, 3), want, "fully_shard")
    if device.type == "cuda":
        model = FullyShardedDataParallel(mlp(), device_id=device, use_orig_params=True)
        close(losses(model, rank, dist.group.WORLD, 3), want, "FullyShardedDataParallel")


def disagreement(rank, n):
    """On a GPU the error is that of the next operation, or of wait with a time-out."""
    try:
        dist.all_reduce(torch.ones(2 + rank), async_op=True).wait(datetime.timedelta(seconds=20))
        torch.cuda.synchronize()
        dist.all_reduce(torch.ones(1))
        raise AssertionError("ranks that disagree were not told")
    except dist.DistBackendError as e:
        assert f"[Rank {rank}] ddp:all_reduce" in str(e), e


def samples_per_second(model, optimizer, batch, steps, n):
    x, y = torch.randn(batch, 784), torch.randint(10, (batch,))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.cuda.synchronize()
    return n * batch * steps / (time.perf_counter() - begin)


def all_reduce_us(x, group, times):
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begin) / times


def table(rank, n):
    """DDP and all-reduce beside NCCL and gloo, in turn, medians."""
    groups = {"ddp": dist.group.WORLD, "nccl": dist.new_group(backend="nccl"), "gloo": dist.new_group(backend="gloo")}
    figures, models = {}, {}
    for title, width, layers, batch in (("MLP 1.9 M, batch 64", 1024, 2, 64), ("MLP 53 M, batch 512", 4096, 4, 512)):
        for name, group in groups.items():
            model = torch.nn.parallel.DistributedDataParallel(mlp(width, layers), process_group=group,
                                                              gradient_as_bucket_view=True)
            models[name] = model, torch.optim.SGD(model.parameters(), lr=0.01), batch
            samples_per_second(*models[name], 2 if name == "gloo" else 10, n)
        for _ in range(3):
            for name in groups:
                steps = 3 if name == "gloo" else 30
                figures.setdefault((title + ", samples/s", name), []).append(
                    samples_per_second(*models[name], steps, n))
    for size in SIZES:
        x = torch.zeros(size // 4)
        for round in range(4):
            for name, group in groups.items():
                times = 2 if name == "gloo" else 50
                us = all_reduce_us(x, group, times)
                if round > 0:
                    figures.setdefault((f"all-reduce {size >> 10} KiB, us", name), []).append(us)
    if rank != 0:
        return
    print(f"TABLE {'over ' + os.environ.get('DDP_BACKEND', 'auto'):32}" + "".join(f"{g:>12}" for g in groups) + "   ddp/nccl")
    for title in dict.fromkeys(t for t, _ in figures):
        row = {name: statistics.median(figures[title, name]) for name in groups}
        print(f"TABLE {title:32}" + "".join(f"{v:12.1f}" for v in row.values()) + f"{row['ddp'] / row['nccl']:11.2f}")


CASES = {f.__name__: f for f in (collectives_test.reductions, collectives_test.moves, messages, streams, both_devices,
                                 collectives_test.groups, ddp, fsdp, disagreement, table)}
ALONE = ["reductions", "moves_of_one", "streams", "both_devices", "ddp", "fsdp"]


def moves_of_one(rank, n):
    x = torch.arange(6.0)
    out = torch.empty(6)
    dist.all_gather_into_tensor(out, x)
    equal(out, x, "all_gather_into_tensor")
    dist.reduce_scatter_tensor(out, x * 2)
    equal(out, x * 2, "reduce_scatter_tensor")
    dist.all_to_all_single(out, x)
    equal(out, x, "all_to_all_single")
    dist.broadcast(out, 0)
    dist.barrier()


CASES["moves_of_one"] = moves_of_one


def rank_main(args):
    """Runs the cases one after another; a failed one gets a new world."""
    n, rank = args.ranks, args.rank
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_default_device(torch.device(args.device, rank) if args.device == "cuda" else "cpu")
    world = 0
    for case in args.only.split(","):
        if not dist.is_initialized():
            dist.init_process_group("ddp", init_method=f"file://{args.store}{world}", rank=rank, world_size=n,
                                    timeout=datetime.timedelta(seconds=20))
        begin = time.perf_counter()
        try:
            CASES[case](rank, n)
            result = "OK"
        except BaseException as e:
            text = str(e).strip() or type(e).__name__
            where = traceback.extract_tb(e.__traceback__)[-1]
            result = f"FAILED {type(e).__name__} at {os.path.basename(where.filename)}:{where.lineno}: {text[:600]}"
        print(f"CASE {case} {result.splitlines()[0]} ({time.perf_counter() - begin:.1f} s)", flush=True)
        # All ranks go on together: one that has failed says so.
        store = dist.FileStore(f"{args.store}{world}-result", n)
        store.set(f"{case}/{rank}", result[:2])
        try:
            store.wait([f"{case}/{r}" for r in range(n)], datetime.timedelta(seconds=45))
            failed = any(store.get(f"{case}/{r}") != b"OK" for r in range(n)) or case == "disagreement"
        except Exception:
            failed = True
        if failed:
            dist.destroy_process_group()
            world += 1
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(step, ranks, cases, device, environment, seconds):
    """Runs the cases in `ranks` processes. Prints a line for each case. True if all passed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.abspath(__file__), "--ranks", str(ranks), "--only", ",".join(cases),
                   "--device", device, "--store", folder + "/store"]
        files = [open(f"{folder}/log{r}", "w+") for r in range(ranks)]
        processes = [subprocess.Popen(command + ["--rank", str(r)], stdout=files[r], stderr=subprocess.STDOUT,
                                      env={**os.environ, **environment}) for r in range(ranks)]
        deadline = time.monotonic() + seconds
        for p in processes:
            try:
                p.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()
        logs = []
        for f in files:
            f.seek(0)
            logs.append(f.read().splitlines())
        passed = True
        for case in cases:
            lines = [next((l for l in log if l.startswith(f"CASE {case} ")), None) for log in logs]
            bad = [(r, l) for r, l in enumerate(lines) if l is None or " OK (" not in l]
            if not bad:
                print(f"{step + ' ' + case:44} OK     {lines[0].rsplit('(', 1)[1][:-1]}", flush=True)
                continue
            passed = False
            for r, line in bad:
                code = processes[r].returncode
                text = line.split(" ", 2)[2] if line else f"FAILED the process did not come to it (exit code {code}): " + (
                    " | ".join(logs[r][-3:])[-500:])
                print(f"{step + ' ' + case:44} {text} (rank {r})", flush=True)
        print("".join(l[6:] + "\n" for log in logs for l in log if l.startswith("TABLE ")), end="", flush=True)
        if not passed or any(p.returncode for p in processes):
            passed = False
            for r, log in enumerate(logs):
                print("".join(f"    rank {r}: {l[:300]}\n" for l in log[-15:] if not l.startswith(("CASE", "TABLE"))), end="")
        return passed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--only", default="")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    args = parser.parse_args()
    if args.rank is not None:
        return rank_main(args)
    on_gpu = args.device == "cuda"
    gpus = min(args.gpus, torch.cuda.device_count()) if on_gpu else 2
    if gpus == 0:
        print("SKIPPED: PyTorch finds no GPU (torch.cuda.device_count() is 0)")
        return 77
    print(f"{'import':44} OK     torch {torch.__version__}, CUDA {torch.version.cuda}, {gpus} of "
          f"{torch.cuda.device_count()} GPUs, {os.path.dirname(ddp_torch.__file__)}", flush=True)
    cpu_cases = [c for c in CASES if c not in ("streams", "disagreement", "table", "moves_of_one", "both_devices")]
    two = [c for c in CASES if c not in ("table", "moves_of_one")] if on_gpu else cpu_cases
    steps = [("1 rank", 1, [c for c in ALONE if on_gpu or c not in ("streams", "both_devices")], {}, 90)]
    if gpus > 1:
        steps += [("2 ranks", 2, two, {}, 90)]
        if on_gpu:
            steps += [("2 ranks", 2, ["table"], {}, 60)]
        steps += [("2 ranks, hierarchical", 2, [c for c in two if c != "groups"], {"DDP_BACKEND": "hierarchical"}, 90)]
        if on_gpu:
            steps += [("2 ranks, hierarchical", 2, ["table"], {"DDP_BACKEND": "hierarchical"}, 60),
                      ("2 ranks, without ddp_probe", 2, ["reductions", "ddp"],
                       {"DDP_PROBE": "/nonexistent", "DDP_PROBE_CACHE": "off"}, 60)]
    failed = []
    for name, ranks, cases, environment, seconds in steps:
        wanted = [c for c in cases if not args.only or c in args.only.split(",")]
        if wanted and not launch(name, ranks, wanted, args.device, environment, seconds):
            failed.append(name)
    print(f"FAILED: {', '.join(failed)}" if failed else "all steps OK")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
