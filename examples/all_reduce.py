"""All-reduce by its classic algorithms, out of messages between two ranks, with their bytes.

    torchrun --standalone --nproc-per-node 4 examples/all_reduce.py

The file is for reading and comparing; in training, call `torch.distributed.all_reduce`.

Output: a line for each rank and algorithm, with the bytes that the rank sends. The last line names
the algorithm by which rank 0 sends least.
"""

import argparse
import sys

import torch
import torch.distributed as dist
from torch import Tensor

import moe_ext
from moe_ext.comm.traffic import record_traffic
from moe_ext.distributed import count_traffic


def exchange(sent: Tensor, to: int, received: Tensor, source: int) -> None:
    """Send to one rank while receiving from one."""
    record_traffic("send", sent.numel() * sent.element_size())
    messages = (dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source))
    for work in dist.batch_isend_irecv(list(messages)):
        work.wait()


def reduce_scatter_ring(chunks: list[Tensor], ranks: list[int]) -> Tensor:
    """Reduce-scatter in place; returns the chunk of the next place, which holds the sum."""
    place, size = ranks.index(dist.get_rank()), len(ranks)
    for step in range(size - 1):
        mine, theirs = chunks[(place - step) % size], chunks[(place - step - 1) % size]
        received = torch.empty_like(theirs)
        exchange(mine, ranks[(place + 1) % size], received, ranks[place - 1])
        theirs += received
    return chunks[(place + 1) % size]


def all_gather_ring(chunks: list[Tensor], ranks: list[int]) -> None:
    """Every chunk from the rank that has its sum, in place."""
    place, size = ranks.index(dist.get_rank()), len(ranks)
    for step in range(size - 1):
        mine, theirs = chunks[(place + 1 - step) % size], chunks[(place - step) % size]
        exchange(mine, ranks[(place + 1) % size], theirs, ranks[place - 1])


def ring(x: Tensor) -> None:
    """Ring: each rank sends 2 (N - 1) / N of the tensor, in 2 (N - 1) steps."""
    ranks = list(range(dist.get_world_size()))
    chunks = list(x.tensor_split(len(ranks)))
    reduce_scatter_ring(chunks, ranks)
    all_gather_ring(chunks, ranks)


def halving_doubling(x: Tensor) -> None:
    """Halving, doubling: each rank sends 2 (N - 1) / N in 2 log2(N) steps; N is a power of two."""
    size = dist.get_world_size()
    if size & (size - 1):
        raise ValueError(f"halving_doubling: expected a power of two of ranks, got {size}")
    rank, distance, parts = dist.get_rank(), size // 2, []
    while distance:
        low, high = x.tensor_split(2)
        mine, theirs = (high, low) if rank & distance else (low, high)
        received = torch.empty_like(mine)
        exchange(theirs, rank ^ distance, received, rank ^ distance)
        mine += received
        parts.append((mine, theirs, rank ^ distance))
        x, distance = mine, distance // 2
    for mine, theirs, partner in reversed(parts):
        exchange(mine, partner, theirs, partner)


def tree(x: Tensor) -> None:
    """The whole tensor up and down a binomial tree: 2 log2(N) steps, 2 (N - 1) tensors in all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    distances = [2**i for i in range((size - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            send(x, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < size:
            received = torch.empty_like(x)
            dist.recv(received, rank + distance)
            x += received
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            dist.recv(x, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < size:
            send(x, rank + distance)


def send(x: Tensor, to: int) -> None:
    """A message that is counted."""
    record_traffic("send", x.numel() * x.element_size())
    dist.send(x, to)


def start_send(x: Tensor, to: int) -> dist.Work:
    """A message underway that is counted."""
    record_traffic("send", x.numel() * x.element_size())
    return dist.isend(x, to)


def two_levels(x: Tensor, node_size: int) -> None:
    """Two levels: a ring inside each node, then one between nodes for each rank's part.

    With M nodes of L ranks, a rank sends 2 (L - 1) / L of the tensor inside its node, and
    2 (M - 1) / M of a part of 1 / L between nodes.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if node_size < 1 or size % node_size:
        raise ValueError(f"two_levels: expected node_size to divide {size} ranks, got {node_size}")
    first = rank - rank % node_size
    node, peers = range(first, first + node_size), range(rank % node_size, size)
    chunks = list(x.tensor_split(node_size))
    mine = reduce_scatter_ring(chunks, list(node))
    ranks = list(peers)[::node_size]
    parts = list(mine.tensor_split(len(ranks)))
    reduce_scatter_ring(parts, ranks)
    all_gather_ring(parts, ranks)
    all_gather_ring(chunks, list(node))


def servers(x: Tensor, num_servers: int) -> None:
    """Sum over workers by k servers, the last ranks: each server sums 1 / k of the tensor.

    With N workers, a worker sends the tensor once, less than the 2 (N - 1) / N of a ring. A server
    sends N / k of it, the tensor once if there are as many servers as workers. Tensors of
    servers are not summed: the sum is written into them.
    """
    rank, num_workers = dist.get_rank(), dist.get_world_size() - num_servers
    if not 0 < num_servers <= num_workers:
        raise ValueError(
            f"servers: expected num_servers to be in [1, half of {num_workers + num_servers} "
            f"ranks], got {num_servers}"
        )
    parts = x.tensor_split(num_servers)
    if rank < num_workers:
        for message in [start_send(part, num_workers + i) for i, part in enumerate(parts)]:
            message.wait()
        for message in [dist.irecv(part, num_workers + i) for i, part in enumerate(parts)]:
            message.wait()
        return
    part = parts[rank - num_workers]
    received = [torch.empty_like(part) for _ in range(num_workers)]
    for message in [dist.irecv(theirs, i) for i, theirs in enumerate(received)]:
        message.wait()
    part.copy_(torch.stack(received).sum(0))
    for message in [start_send(part, i) for i in range(num_workers)]:
        message.wait()


def measured(algorithm, x: Tensor, *args) -> int:
    """Bytes that this rank sends; the tensor becomes the sum."""
    with count_traffic() as traffic:
        algorithm(x, *args)
    return traffic.total_bytes


def main(argv: list[str] | None = None) -> int:
    """Print the bytes of each algorithm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--numel", type=int, default=250_000, help="numbers in float32 (%(default)s)"
    )
    parser.add_argument("--node-size", type=int, default=2, help="ranks of a node (%(default)s)")
    parser.add_argument("--servers", type=int, default=2, help="ranks that only add (%(default)s)")
    args = parser.parse_args(argv)
    moe_ext.reuse_memory()
    dist.init_process_group("gloo")
    least: tuple[int, str] | None = None
    for algorithm, *options in (
        (ring,),
        (halving_doubling,),
        (tree,),
        (two_levels, args.node_size),
        (servers, args.servers),
    ):
        sent = measured(algorithm, torch.ones(args.numel), *options)
        print(f"rank {dist.get_rank()}: {algorithm.__name__} {sent} bytes", flush=True)
        least = min(least or (sent, algorithm.__name__), (sent, algorithm.__name__))
    dist.barrier()  # behind the lines of the others
    if dist.get_rank() == 0:
        print(f"result: rank 0 sends least by {least[1]}, {least[0]} bytes")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
