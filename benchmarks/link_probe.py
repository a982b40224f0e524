"""The ranks of a cluster -> the rates that gloo reaches between them; run it on every rank.

Each message goes to the next rank of a ring while one comes from the rank before, so
links carry their load both ways at once. It imports nothing of the package: run by its path, it
starts as fast as torch does.
"""

import argparse
import json
import time
from collections.abc import Sequence
from os import environ
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist


def measure(rings: Sequence[Sequence[int]], *, size: int, rounds: int) -> list[float]:
    """Pass `size` bytes one step around all rings at once; ranks in none wait.

    Args:
        rings (`Sequence[Sequence[int]]`): Disjoint ranks in the order of their ring.
        size (`int`): Bytes that each rank sends, and receives.
        rounds (`int`): How often.

    Returns:
        Megabits per second each way, by rank: the median over the rounds; 0 outside the rings.
    """
    rank = dist.get_rank()
    ring = next((ring for ring in rings if rank in ring), None)
    sent, received = torch.zeros(2, size, dtype=torch.uint8)
    rates = torch.zeros(rounds, dist.get_world_size())
    for number in range(rounds):
        dist.barrier()
        started = time.perf_counter()
        dist.barrier()  # every clock runs before any byte travels: no rate is above the link's
        if ring:
            place = ring.index(rank)
            works = [
                dist.irecv(received, src=ring[place - 1]),
                dist.isend(sent, dst=ring[(place + 1) % len(ring)]),
            ]
            for work in works:
                assert work is not None
                work.wait()
            rates[number, rank] = 8e-6 * size / (time.perf_counter() - started)
    dist.all_reduce(rates)  # every rank filled its own column
    return [median(column) for column in rates.T.tolist()]


def main() -> None:
    """Measure inside nodes and across them; rank 0 shows what the slowest rank reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=8, help="of each message (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="the median counts (default: 3)")
    parser.add_argument("--json", type=Path, help="write each rank's rates there as one object")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    world, size = dist.get_world_size(), int(environ["LOCAL_WORLD_SIZE"])
    rails = [range(local, world, size) for local in range(size)]
    cases = {
        "inside nodes": [range(first, first + size) for first in range(0, world, size)],
        "across nodes": rails,
        "across nodes, one rank each": rails[:1],
    }
    rates = {}
    for name, rings in cases.items():
        if len(rings[0]) > 1:
            rates[name] = measure(
                rings, size=round(arguments.megabytes * 1e6), rounds=arguments.rounds
            )
    if dist.get_rank() == 0:
        for name, found in rates.items():
            print(f"{name:<28} {min(filter(None, found)):8.0f} Mbit/s a rank, both ways at once")
        if arguments.json:
            arguments.json.write_text(json.dumps(rates, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
