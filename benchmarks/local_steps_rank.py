"""Rank of the benchmark of local steps: reads jobs as lines of JSON, answers with results."""

import dataclasses
import logging
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from namespaces import TX_BYTES, address, answer_jobs
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import train_diloco  # noqa: E402

LIGHTHOUSE_PORT = 29510
PEER = "torchft's DiLoCo"


class Torchft:
    """A worker of torchft: a replica group of one rank, and on rank 0 the lighthouse of all."""

    def __init__(self, rank: int) -> None:
        os.environ["RUST_LOG"] = "error"
        # Addresses have no names in a namespace, and torchft takes the host's name for its stores.
        socket.gethostname = lambda: address(rank)
        from torchft.coordination import LighthouseServer

        logging.disable(logging.WARNING)
        self.rank, self.size = rank, dist.get_world_size()
        if rank == 0:
            bind = f"0.0.0.0:{LIGHTHOUSE_PORT}"
            self.lighthouse = LighthouseServer(bind, min_replicas=self.size, join_timeout_ms=10000)
        dist.barrier()

    def diloco(self, model: nn.Module, inner: torch.optim.Optimizer, sync_every: int) -> Any:
        """The rounds of `train_diloco.diloco`, by torchft's class and manager."""
        import torchft
        from torchft.local_sgd import DiLoCo

        here = address(self.rank)
        self.store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=self.size,
            use_async_quorum=False,
            init_sync=False,
            replica_id=f"worker_{self.rank}",
            rank=0,
            world_size=1,
            store_addr=here,
            store_port=self.store.port,
            lighthouse_addr=f"http://{address(0)}:{LIGHTHOUSE_PORT}",
            hostname=here,
        )
        outer = train_diloco.outer_sgd(model)
        return DiLoCo(self.manager, [model], inner, outer, sync_every, use_bucketization=True)


class Rank:
    """Trains by one method after the other."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.data = train_diloco.load_text(None, train_diloco.SIZES.seq_len)
        self.torchft: Torchft | None = None
        self.start: dict[str, torch.Tensor] = {}

    def pretrain(self, **options: int) -> None:
        """Make the weights that all runs begin with."""
        self.start = train_diloco.pretrain(self.data, **options)

    def train(self, *, method: str, **options: Any) -> dict[str, Any]:
        """The example's results, and the bytes that left this namespace."""
        if method == PEER:
            self.torchft = self.torchft or Torchft(self.rank)
            how = dataclasses.replace(train_diloco.METHODS["DiLoCo"], local=self.torchft.diloco)
        else:
            how = train_diloco.METHODS[method]
        dist.barrier()
        before = int(TX_BYTES.read_text())
        found = train_diloco.train(how, self.data, self.start, **options)
        wire = int(TX_BYTES.read_text()) - before
        if method == PEER:
            dist.barrier()
            self.torchft.manager.shutdown()
        return {**found, "wire": wire}


if __name__ == "__main__":
    answer_jobs(Rank)
