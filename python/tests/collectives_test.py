# SPDX-License-Identifier: Apache-2.0
"""Checks every collective operation of the backend "ddp" against what it has to give, at 2 and 3 ranks.

Usage: python3 collectives_test.py [PART...], where a part is one of those that PARTS lists; without one: all
"""

import datetime
import os
import random
import socket
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

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
          torch.int64]


def equal(got, want, what):
    assert torch.equal(got, want), f"{what}: {got} instead of {want}"


def reductions(rank, n):
    total, product = n * (n + 1) // 2, [1, 1, 2, 6, 24][n]
    ops = {dist.ReduceOp.SUM: total, dist.ReduceOp.MIN: 1, dist.ReduceOp.MAX: n, dist.ReduceOp.PRODUCT: product}
    for dtype in DTYPES:
        for op, want in ops.items():
            x = torch.full((3, 5), rank + 1, dtype=dtype)
            dist.all_reduce(x, op)
            equal(x, torch.full((3, 5), want, dtype=dtype), f"all_reduce {dtype} {op}")
    for op, fold in ((dist.ReduceOp.BAND, torch.bitwise_and), (dist.ReduceOp.BOR, torch.bitwise_or),
                     (dist.ReduceOp.BXOR, torch.bitwise_xor)):
        want = torch.tensor([1, 4])
        for r in range(1, n):
            want = fold(want, torch.tensor([r + 1, 4 + r]))
        x = torch.tensor([rank + 1, 4 + rank])
        dist.all_reduce(x, op)
        equal(x, want, f"all_reduce {op}")
    x = torch.full((4,), float(rank))
    dist.all_reduce(x, dist.ReduceOp.AVG)
    equal(x, torch.full((4,), (n - 1) / 2), "all_reduce AVG")
    x = torch.full((4,), complex(rank, 1))
    dist.all_reduce(x)
    equal(x, torch.full((4,), complex(n * (n - 1) / 2, n)), "all_reduce complex")
    x = torch.tensor([rank == 0, False])
    dist.all_reduce(x, dist.ReduceOp.MAX)
    equal(x, torch.tensor([True, False]), "all_reduce bool")
    mine = torch.tensor([-2 if rank == 0 else 1 + rank])  # as uint64: 2^64 - 2, 2, 3
    for op, want in ((dist.ReduceOp.MAX, -2), (dist.ReduceOp.MIN, 2)):
        want = torch.tensor([want])
        x = mine.clone()
        dist.all_reduce(x.view(torch.uint64), op)
        equal(x, want, f"all_reduce uint64 {op}")
        dist.reduce_scatter(x.view(torch.uint64), [mine.view(torch.uint64)] * n, op)
        equal(x, want, f"reduce_scatter uint64 {op}")
        x = mine.clone()
        dist.reduce(x.view(torch.uint64), 1, op)
        equal(x, want if rank == 1 else mine, f"reduce uint64 {op}")
    for dtype in (torch.bool, torch.uint64):
        raises(ValueError, "cannot be averaged", lambda: dist.all_reduce(torch.ones(2, dtype=dtype), dist.ReduceOp.AVG))
    x = torch.full((6, 4), 1.0).t()[:, 1:4]
    dist.all_reduce(x)
    equal(x, torch.full((4, 3), float(n)), "all_reduce with gaps")
    for root in range(n):
        x = torch.full((5,), float(rank + 1))
        dist.reduce(x, root)
        if rank == root:
            equal(x, torch.full((5,), float(total)), "reduce")
    x = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (8,))
    dist.all_reduce(x)
    want = torch.zeros(8)
    want[:n] = 1
    want[3] += 2 * n
    equal(x.to_dense(), want, "sparse all_reduce")
    ys = [torch.full((1000 + i,), float(i)) for i in range(20)]
    work = [dist.all_reduce(y, async_op=True) for y in ys]
    for w in work:
        w.wait()
    for i, y in enumerate(ys):
        equal(y, torch.full((1000 + i,), float(i * n)), "asynchronous all_reduce")
    future = dist.all_reduce(torch.ones(7), async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    equal(future.wait(), torch.full((7,), 2.0 * n), "future")


def uneven_reduce_scatter(rank, n):
    """Rank r gets r + 1 elements of what the ranks have together, by every operation."""
    def mine(r, dtype):
        return torch.stack([torch.arange(6), torch.arange(6) + r]).flatten()[: n * (n + 1) // 2].add(1 + r).to(dtype)

    folds = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.PRODUCT: torch.mul, dist.ReduceOp.MIN: torch.minimum,
             dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.AVG: torch.add, dist.ReduceOp.BAND: torch.bitwise_and,
             dist.ReduceOp.BOR: torch.bitwise_or, dist.ReduceOp.BXOR: torch.bitwise_xor}
    bitwise = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
    sizes = [r + 1 for r in range(n)]
    for op, fold in folds.items():
        dtype = torch.float32 if op == dist.ReduceOp.AVG else torch.int64
        want = mine(0, dtype)
        for r in range(1, n):
            want = fold(want, mine(r, dtype))
        if op == dist.ReduceOp.AVG:
            want /= n
        out = torch.empty(rank + 1, dtype=dtype)
        dist.reduce_scatter(out, list(mine(rank, dtype).split(sizes)), op)
        equal(out, want.split(sizes)[rank], f"uneven reduce_scatter {op}")
        gaps = torch.empty(rank + 1, 2, dtype=dtype)[:, 0]
        dist.reduce_scatter(gaps, list(mine(rank, dtype).split(sizes)), op)
        equal(gaps, want.split(sizes)[rank], f"uneven reduce_scatter {op} with gaps")
    for op in bitwise:
        try:
            dist.reduce_scatter(torch.empty(9, dtype=torch.int64), list(mine(rank, torch.int64).split(sizes)), op)
            raise AssertionError(f"uneven reduce_scatter {op} of a wrong size was not refused")
        except ValueError as e:
            assert "the output needs" in str(e), e
        x = torch.empty(2, dtype=torch.int64)
        dist.reduce_scatter(x, [torch.full((2,), 3 * r + rank + 1) for r in range(n)], op)
        want = torch.full((2,), 3 * rank + 1)
        for r in range(1, n):
            want = folds[op](want, torch.full((2,), 3 * rank + r + 1))
        equal(x, want, f"reduce_scatter {op}")


def moves(rank, n):
    for dtype in DTYPES + [torch.bool, torch.complex64]:
        x = torch.full((2, 3), rank, dtype=dtype)
        dist.broadcast(x, n - 1)
        equal(x, torch.full((2, 3), n - 1, dtype=dtype), f"broadcast {dtype}")
        out = [torch.empty(2, 3, dtype=dtype) for _ in range(n)]
        dist.all_gather(out, torch.full((2, 3), rank, dtype=dtype))
        for r in range(n):
            equal(out[r], torch.full((2, 3), r, dtype=dtype), f"all_gather {dtype}")
    out = torch.empty(n, 3)
    dist.all_gather_into_tensor(out, torch.full((3,), float(rank)))
    equal(out, torch.arange(float(n)).unsqueeze(1).expand(n, 3), "all_gather_into_tensor")
    out = [torch.empty(r) for r in range(n)]
    dist.all_gather(out, torch.full((rank,), float(rank)))
    for r in range(n):
        equal(out[r], torch.full((r,), float(r)), "uneven all_gather")
    out = [torch.empty(2) for _ in range(n)]
    dist.gather(torch.full((2,), float(rank)), out if rank == 1 else None, dst=1)
    if rank == 1:
        equal(torch.stack(out), torch.arange(float(n)).unsqueeze(1).expand(n, 2), "gather")
    x = torch.empty(2)
    dist.scatter(x, [torch.full((2,), float(r)) for r in range(n)] if rank == 0 else None, src=0)
    equal(x, torch.full((2,), float(rank)), "scatter")
    x = torch.empty(2)
    dist.reduce_scatter(x, [torch.full((2,), float(r)) for r in range(n)])
    equal(x, torch.full((2,), float(rank * n)), "reduce_scatter")
    x = torch.empty(2)
    dist.reduce_scatter_tensor(x, torch.arange(2.0 * n))
    equal(x, torch.tensor([2.0 * rank, 2.0 * rank + 1]) * n, "reduce_scatter_tensor")
    x = torch.empty(n)
    dist.all_to_all_single(x, torch.full((n,), float(rank)))
    equal(x, torch.arange(float(n)), "all_to_all_single")
    x = torch.empty(sum(range(1, n + 1)))
    dist.all_to_all_single(x, torch.full(((rank + 1) * n,), float(rank)), list(range(1, n + 1)), [rank + 1] * n)
    equal(x, torch.cat([torch.full((r + 1,), float(r)) for r in range(n)]), "uneven all_to_all_single")
    out = [torch.empty(r + 1) for r in range(n)]
    dist.all_to_all(out, [torch.full((rank + 1,), float(rank)) for _ in range(n)])
    equal(torch.cat(out), torch.cat([torch.full((r + 1,), float(r)) for r in range(n)]), "all_to_all")
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(n)], "all_gather_object"


def messages(rank, n):
    right, left = (rank + 1) % n, (rank - 1) % n
    for size in (1, 1000, 300000):
        x = torch.empty(size)
        work = [dist.irecv(x, left), dist.isend(torch.full((size,), float(rank)), right)]
        for w in work:
            w.wait()
        equal(x, torch.full((size,), float(left)), "irecv")
    if rank == 0:
        seen = set()
        for _ in range(n - 1):
            x = torch.empty(2)
            source = dist.recv(x)
            equal(x, torch.full((2,), float(source)), "recv from any rank")
            seen.add(source)
        assert seen == set(range(1, n)), seen
    else:
        dist.send(torch.full((2,), float(rank)), 0)


def raises(error, words, call):
    try:
        call()
    except error as e:
        assert words in str(e), e
        return
    raise AssertionError(f"no error with: {words}")


def waits_with_limits(rank, n):
    """While a future waits for a message, others can ask for it, and give up."""
    if rank == 1:
        for receive in (lambda x: dist.irecv(x, 0, tag=7), lambda x: dist.irecv(x, tag=8)):
            x = torch.zeros(3)
            work = receive(x)
            future = work.get_future()
            time.sleep(0.1)  # the future's thread waits now
            begin = time.monotonic()
            assert not work.is_completed()
            raises(dist.DistBackendError, "Timed out", lambda: work.wait(datetime.timedelta(milliseconds=200)))
            took = time.monotonic() - begin
            assert 0.15 < took < 30, f"wait(0.2 s) took {took} s"
            dist.send(torch.ones(1), 0)
            equal(future.wait()[0], torch.full((3,), 5.0), "future of a message")
            assert work.wait() and work.is_completed()
            equal(x, torch.full((3,), 5.0), "irecv with a future")
    if rank == 0:
        for tag in (7, 8):
            # Late at the latest: a receiver that does not give up fails by its clock, and does not hang.
            go = dist.irecv(torch.empty(1), 1)
            for _ in range(400):
                if go.is_completed():
                    break
                time.sleep(0.1)
            dist.send(torch.full((3,), 5.0), 1, tag=tag)
            go.wait()
    dist.barrier()


def first_of_two(rank, n):
    """wait() on an operation does not wait for a later one, which the peers may not have begun."""
    group = dist.new_group(range(n), timeout=datetime.timedelta(seconds=20))
    for _ in range(20):
        first, second = torch.ones(3), torch.ones(5)
        if rank == 0:
            works = [dist.all_reduce(x, group=group, async_op=True) for x in (first, second)]
            time.sleep(0.002)  # the group's thread executes the first one, and waits for the others
            works[0].wait()
            for r in range(1, n):
                dist.send(torch.ones(1), r)
            works[1].wait()
        else:
            time.sleep(0.01)
            dist.all_reduce(first, group=group)
            dist.recv(torch.empty(1), 0)
            dist.all_reduce(second, group=group)
        equal(first, torch.full((3,), float(n)), "the first all_reduce")
        equal(second, torch.full((5,), float(n)), "the second all_reduce")
    dist.destroy_process_group(group)


def groups(rank, n):
    pair = dist.new_group([0, 1])
    if rank < 2:
        x = torch.ones(3)
        dist.all_reduce(x, group=pair)
        equal(x, torch.full((3,), 2.0), "all_reduce of a subgroup")
        dist.destroy_process_group(pair)
    dist.barrier()
    try:
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))
    except ValueError as e:  # PyTorch 2.11 asks for gloo by its name
        assert "only implemented for GLOO" in str(e), e
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2, bias=False))
    model(torch.full((1, 3), float(rank))).sum().backward()
    equal(model.module.weight.grad, torch.full((2, 3), (n - 1) / 2), "gradient")


def late_ranks(rank, n):
    for late in range(3):
        time.sleep(0.1 * ((rank + late) % n))
        group = dist.new_group()
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        equal(x, torch.full((3,), float(n)), "all_reduce of ranks that came late")
        dist.destroy_process_group(group)


def shared_memory(rank, n):
    x = dist.group.WORLD._get_backend(torch.device("cpu")).allocate_tensor(1 << 16, dtype=torch.float32, device=torch.device("cpu"))
    x.fill_(rank + 1)
    work = [dist.all_reduce(x[i::2].clone() if i else x[: 1 << 15], async_op=True) for i in range(2)]
    for w in work:
        w.wait()
    equal(x, torch.cat([torch.full((1 << 15,), n * (n + 1) / 2), torch.full((1 << 15,), rank + 1.0)]), "shared memory")


def more_than_can_be_shared(rank, n):
    """The machine has memory for one rank, and not for all."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    x = dist.group.WORLD._get_backend(torch.device("cpu")).allocate_tensor(
        memory * 7 // 10, dtype=torch.uint8, device=torch.device("cpu"))[:100]
    x.fill_(1)
    dist.all_reduce(x)
    equal(x, torch.full((100,), n, dtype=torch.uint8), "all_reduce in memory that is not shared")


def growing_tags(rank, n):
    """Nothing is kept of a tag whose messages have been received."""
    def exchange(tags):
        x = torch.zeros(1)
        for tag in tags:
            if rank == 0:
                dist.send(x, 1, tag=tag)
            elif rank == 1:
                dist.recv(x, 0, tag=tag)
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = exchange(range(5000))
    after = exchange(range(5000, 45000))
    assert after - before < 40000 * 40, f"{(after - before) / 40000} bytes of each tag are left"
    dist.barrier()


def disagreement(rank, n):
    try:
        dist.all_reduce(torch.ones(2 + rank))
        raise AssertionError("ranks that disagree were not told")
    except dist.DistBackendError as e:
        assert f"[Rank {rank}] ddp:all_reduce" in str(e), e


PARTS = (reductions, uneven_reduce_scatter, moves, messages, waits_with_limits, first_of_two, groups, late_ranks,
         shared_memory, more_than_can_be_shared, growing_tags, disagreement)


def main(rank, n, store):
    torch.set_num_threads(1)
    dist.init_process_group("ddp", init_method=store, rank=rank, world_size=n,
                            timeout=datetime.timedelta(seconds=60))
    for part in PARTS:
        if part.__name__ in sys.argv[1:] or len(sys.argv) == 1:
            part(rank, n)
    dist.destroy_process_group()


def free_port():
    """A TCP port that nobody has, below those that the system gives to clients; and a socket that keeps it.

    The socket has the UDP port of the same number, which another test would try to get, too.
    """
    while True:
        port = random.randrange(15000, 20000)
        kept = socket.socket(type=socket.SOCK_DGRAM)
        try:
            kept.bind(("127.0.0.1", port))
            with socket.socket() as s:
                s.bind(("127.0.0.1", port))
            return port, kept
        except OSError:
            kept.close()


def start(n, over_tcp):
    pids = []
    with tempfile.TemporaryDirectory() as folder:
        port, _kept = free_port()
        store = f"tcp://127.0.0.1:{port}" if over_tcp else f"file://{folder}/store"
        for rank in range(n):
            pid = os.fork()
            if pid == 0:
                try:
                    main(rank, n, store)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            pids.append(pid)
        return [os.waitpid(pid, 0)[1] for pid in pids]


if __name__ == "__main__":
    if "--help" in sys.argv[1:]:
        sys.exit(print(__doc__))
    if set(sys.argv[1:]) - {part.__name__ for part in PARTS}:
        sys.exit(f"no such part; there are {', '.join(part.__name__ for part in PARTS)}")
    for ranks in (2, 3):
        if any(start(ranks, over_tcp=ranks == 2)):
            sys.exit(f"failed at {ranks} ranks")
        print(f"passed at {ranks} ranks")
