# SPDX-License-Identifier: Apache-2.0
"""PyTorch's DDP and all-reduce over the backend ddp beside gloo: 2 ranks on the CPU, interleaved, medians.

    python3 python/tests/speed.py [--rounds 7] [--steps 30]
"""

import argparse
import datetime
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist

import ddp_torch

# Also in memory that ddp's ranks share, where DistributedDataParallel keeps its buckets.
SIZES = [(size, shared) for shared in (False, True) for size in (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)]
BATCHES = [32, 64]


def samples_per_second(model, optimizer, batch, steps):
    x, y = torch.randn(batch, 784), torch.randint(10, (batch,))
    begin = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return 2 * batch * steps / (time.perf_counter() - begin)


def all_reduce_seconds(x, group, times):
    dist.barrier(group)
    begin = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(x, group=group)
    return (time.perf_counter() - begin) / times


def rank_main(rank, path, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=120))
    groups = {"gloo": dist.group.WORLD, "ddp": dist.new_group(backend="ddp")}
    models = {}
    for name, group in groups.items():
        torch.manual_seed(1)
        mlp = torch.nn.Sequential(torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024),
                                  torch.nn.ReLU(), torch.nn.Linear(1024, 10))
        model = torch.nn.parallel.DistributedDataParallel(mlp, process_group=group, gradient_as_bucket_view=True)
        models[name] = model, torch.optim.SGD(model.parameters(), lr=0.01)
        samples_per_second(*models[name], 32, 5)
    backend = groups["ddp"]._get_backend(torch.device("cpu"))
    shared_tensors = {size: backend.allocate_tensor(size // 4, dtype=torch.float32, device=torch.device("cpu"))
                      for size, shared in SIZES if shared}
    figures = {}
    for _ in range(args.rounds):
        for name in groups:
            for batch in BATCHES:
                figures.setdefault((name, f"MLP, batch {batch}, samples/s"), []).append(
                    samples_per_second(*models[name], batch, args.steps))
            for size, shared in SIZES:
                x = shared_tensors[size] if shared and name == "ddp" else torch.zeros(size // 4)
                times = max(5, (8 << 20) // size)
                all_reduce_seconds(x, groups[name], 2)
                figures.setdefault((name, f"all-reduce {size >> 10} KiB{', shared' * shared}, us"), []).append(
                    1e6 * all_reduce_seconds(x, groups[name], times))
    if rank == 0:
        print(f"{'':32}{'gloo':>10}{'ddp':>10}{'ratio':>8}")
        for what in dict.fromkeys(w for _, w in figures):
            gloo, ddp = (statistics.median(figures[name, what]) for name in ("gloo", "ddp"))
            print(f"{what:32}{gloo:10.0f}{ddp:10.0f}{(gloo / ddp if what.endswith('us') else ddp / gloo):8.2f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    rank_main(rank, folder + "/store", args)
                    code = 0
                except BaseException:
                    import traceback

                    traceback.print_exc()
                os._exit(code)
            children.append(pid)
        if any([os.waitpid(pid, 0)[1] for pid in children]):
            raise SystemExit("a rank has failed")


if __name__ == "__main__":
    main()
