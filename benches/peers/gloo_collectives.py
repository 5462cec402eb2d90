#!/usr/bin/env python3
"""One rank of a torch.distributed world over gloo that runs collectives on command.

The driver, collectives.py, starts one such process per rank. Rank 0 reads commands from standard
input, `OP BYTES ITERATIONS` one a line, and answers each with a line of JSON. OP is all_gather or
reduce_scatter of f32, BYTES the size of the full tensor. Kiln's side of the same protocol is
benches/src/bin/collectives_peer.

The calls are those that PyTorch's FSDP makes: all_gather_into_tensor and reduce_scatter_tensor.
Gloo has no reduce-scatter of its own in PyTorch: its process group runs an all-reduce of the whole
tensor and keeps a slice, so it sends twice the bytes. That is what FSDP over gloo pays as well.
"""

import argparse
import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as dist

COMMAND_LENGTH = 64
OPS = ("all_gather", "reduce_scatter")


def value(rank, index):
    """Returns the input of `rank` at `index` (a tensor of indices): small integers, so that sums are
    exact in any order."""
    return ((index * 31 + rank * 7) % 1021).to(torch.float32)


class Exercise:
    """One operation with buffers that are reused in every iteration, as in a trainer."""

    def __init__(self, op, size, rank, ranks):
        if size == 0 or size % (4 * ranks):
            raise ValueError(f"{size} bytes do not divide into f32 on {ranks} ranks")
        full, shard = size // 4, size // 4 // ranks
        self.op = op
        if op == "all_gather":
            self.input = value(rank, torch.arange(shard))
            self.output = torch.full((full,), -1.0)
            expected = torch.cat([value(peer, torch.arange(shard)) for peer in range(ranks)])
        else:
            self.input = value(rank, torch.arange(full))
            self.output = torch.full((shard,), -1.0)
            own = torch.arange(rank * shard, (rank + 1) * shard)
            expected = sum(value(peer, own) for peer in range(ranks))
        self.run()
        if not torch.equal(self.output, expected):
            sys.exit(f"{op} of {size} bytes over gloo is wrong on rank {rank}")

    def run(self):
        if self.op == "all_gather":
            dist.all_gather_into_tensor(self.output, self.input)
        else:
            dist.reduce_scatter_tensor(self.output, self.input)


def next_line(rank):
    """Returns the next command, the same on every rank; empty at the end of input."""
    message = torch.full((COMMAND_LENGTH,), ord(" "), dtype=torch.uint8)
    if rank == 0:
        line = sys.stdin.readline().encode("ascii", "ignore")[:COMMAND_LENGTH]
        message[: len(line)] = torch.tensor(list(line), dtype=torch.uint8)
    dist.broadcast(message, 0)
    return bytes(message.tolist()).decode("ascii").strip()


def seconds(exercise, iterations):
    """Returns the time of the slowest rank from a barrier on. One iteration before it is not counted."""
    exercise.run()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        exercise.run()
    elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def answer(line, exercises, rank, ranks):
    words = line.split()
    try:
        op, size, iterations = words[0], int(words[1]), int(words[2])
        if op not in OPS or iterations < 1 or len(words) != 3:
            raise ValueError
    except (IndexError, ValueError):
        return {"error": f"`{line}` is not a command; send `OP BYTES ITERATIONS`"}
    try:
        if (op, size) not in exercises:
            exercises[op, size] = Exercise(op, size, rank, ranks)
    except ValueError as error:
        return {"error": str(error)}
    elapsed = seconds(exercises[op, size], iterations)
    return {
        "op": op,
        "bytes": size,
        "iterations": iterations,
        "seconds_per_iteration": elapsed / iterations,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks in the world")
    parser.add_argument("--rank", type=int, required=True, help="number of this rank, from 0")
    parser.add_argument("--host", default="127.0.0.1", help="address of rank 0's store")
    parser.add_argument("--port", type=int, required=True, help="port of the store")
    arguments = parser.parse_args()
    rank, ranks = arguments.rank, arguments.ranks

    torch.set_num_threads(1)
    # By default, gloo binds to the address to which the host name resolves.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{arguments.host}:{arguments.port}",
        rank=rank,
        world_size=ranks,
        # Ranks wait in a broadcast while the driver times the other system.
        timeout=datetime.timedelta(hours=1),
    )
    exercises = {}
    while line := next_line(rank):
        result = answer(line, exercises, rank, ranks)
        if rank == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
