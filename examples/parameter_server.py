"""A recommender with a parameter server: workers pull rows of a table and push their gradients.

    torchrun --standalone --nproc-per-node 3 examples/parameter_server.py

Rank 0 keeps the table of embeddings and the weights; the others take batches of (user, item,
whether it was clicked) in steps together. Bytes that a worker sends and gets grow with its batch,
not with the table.

Output: the loss of worker 1 every 10 steps. The last line has the bytes that it sent and got, and
their share of the whole table's.
"""

import argparse
import os
import sys
import threading

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

ROWS, DIM, BATCH = 10_000, 16, 64


class Server:
    """The table and the weights; a step waits for the pushes of all workers."""

    def __init__(self, num_workers: int, lr: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(ROWS, DIM, generator=generator)
        self.weight = torch.randn(DIM, generator=generator)
        self.num_workers, self.lr = num_workers, lr
        self.pushed: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.stepped: Future[None] = Future()
        self.lock = threading.Lock()

    def pull(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the table, and the weights."""
        return self.table[rows], self.weight

    def push(self, worker: int, rows: Tensor, of_rows: Tensor, of_weight: Tensor) -> Future[None]:
        """Add a worker's gradients; the future is ready when the step is taken."""
        with self.lock:
            self.pushed[worker] = (rows, of_rows, of_weight)
            stepped = self.stepped
            if len(self.pushed) == self.num_workers:
                self._step()
                self.pushed, self.stepped = {}, Future()
                stepped.set_result(None)
        return stepped

    def _step(self) -> None:
        # Summed in the workers' order, so that runs agree bitwise.
        scale = -self.lr / self.num_workers
        for _, (rows, of_rows, of_weight) in sorted(self.pushed.items()):
            self.table.index_add_(0, rows, of_rows, alpha=scale)
            self.weight = self.weight.add(of_weight, alpha=scale)


_server: Server | None = None


def serve(num_workers: int, lr: float) -> None:
    """Begin to serve; once, on rank 0."""
    global _server
    _server = Server(num_workers, lr)


def pull(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`Server.pull`, called by workers."""
    assert _server is not None
    return _server.pull(rows)


@rpc.functions.async_execution
def push(worker: int, rows: Tensor, of_rows: Tensor, of_weight: Tensor) -> Future[None]:
    """`Server.push`, called by workers: the thread that runs it does not wait for the others."""
    assert _server is not None
    return _server.push(worker, rows, of_rows, of_weight)


def batch(step: int, worker: int) -> tuple[Tensor, Tensor]:
    """Rows of the table, a user's and an item's, and clicks."""
    generator = torch.Generator().manual_seed(1000 * step + worker)
    pairs = torch.randint(ROWS, (BATCH, 2), generator=generator)
    return pairs, (pairs.sum(1) % 2).float()


def loss_of(embedded: Tensor, weight: Tensor, clicks: Tensor) -> Tensor:
    """Loss of the products of users and items, `[B, 2, D]`."""
    scores = (embedded[:, 0] * embedded[:, 1]) @ weight
    return F.binary_cross_entropy_with_logits(scores, clicks)


def work(worker: int, steps: int) -> int:
    """Train; the bytes of tensors that this worker sent and got."""
    moved = 0
    for step in range(steps):
        pairs, clicks = batch(step, worker)
        rows, place = pairs.unique(return_inverse=True)
        pulled, weight = rpc.rpc_sync("server", pull, (rows,))
        pulled, weight = pulled.requires_grad_(), weight.requires_grad_()
        loss = loss_of(pulled[place], weight, clicks)
        loss.backward()
        rpc.rpc_sync("server", push, (worker, rows, pulled.grad, weight.grad))
        moved += 2 * (rows.nbytes + pulled.nbytes + weight.nbytes)
        if worker == 1 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    return moved


def run(rank: int, world_size: int, init_method: str, steps: int, lr: float = 1.0):
    """One rank: the server's table and weights, or the bytes of a worker."""
    if rank == 0:
        serve(world_size - 1, lr)  # before anyone can call
    name = f"worker{rank}" if rank else "server"
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    moved = work(rank, steps) if rank else 0
    rpc.shutdown()  # the server stays until all workers are done
    return moved if rank else (_server.table, _server.weight)


def main(argv: list[str] | None = None) -> int:
    """Train on the ranks of torchrun, and print what moved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50, help="of training (%(default)s)")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"expected --steps to be at least 1, got {args.steps}")
    rank = int(os.environ["RANK"])
    found = run(rank, int(os.environ["WORLD_SIZE"]), "env://", args.steps)
    if rank == 1:
        share = found / (2 * args.steps * 4 * DIM * (ROWS + 1))
        print(f"result: worker 1 moved {found} bytes, {share:.4f} of the whole table's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
