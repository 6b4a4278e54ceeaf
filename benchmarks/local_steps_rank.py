"""One rank of the benchmark of local steps: reads jobs as lines of JSON, answers with results."""

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from namespaces import TX_BYTES, answer_jobs

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import train_diloco  # noqa: E402


class Rank:
    """Trains by one method after the other."""

    def __init__(self, _rank: int) -> None:
        self.data = train_diloco.load_text(None, train_diloco.SIZES.seq_len)

    def train(self, **options: Any) -> dict[str, Any]:
        """The example's results, and the bytes that left this namespace."""
        dist.barrier()
        before = int(TX_BYTES.read_text())
        found = train_diloco.train(options.pop("method"), self.data, **options)
        return {**found, "wire": int(TX_BYTES.read_text()) - before}


if __name__ == "__main__":
    answer_jobs(Rank)
