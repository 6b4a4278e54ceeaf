"""Several pipelines of the same model, whose updates reach each other with a bounded delay."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext._checks import check_numbers, check_sizes
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.collectives import start_all_reduce_
from moe_ext.comm.groups import check_group
from moe_ext.comm.pending import Pending
from moe_ext.distributed.gradients import fingerprint


class WaveUpdates:
    """Exchanges updates of a stage's weights between several pipelines (HetPipe's virtual workers).

    Each pipeline updates its own weights. After every `wave` updates it gives their sum to the
    others, and takes the sums of all pipelines up to `staleness` waves before. The weights are then
    the first ones, with these sums and the pipeline's own later updates. With a staleness of 0 the
    weights of all pipelines are the same after each wave, in every bit. Sums travel while the next
    waves compute.

    Args:
        parameters: parameters of the stage, of one dtype and device. All pipelines begin with the
            same values.
        group: the ranks that hold the stage; all take the same number of updates.
        wave: number of updates that are summed, such as the micro-batches underway in a pipeline.
        staleness: number of waves of the other pipelines that may be missing.

    Raises:
        ValueError: a number is out of range, or there is no parameter.

    Reference:
        HetPipe (arXiv:2005.14038), section 5: wave synchronous parallel, at its largest delay.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: ProcessGroup | None,
        *,
        wave: int,
        staleness: int = 0,
    ) -> None:
        check_group(group, "WaveUpdates", name="group")
        check_sizes("WaveUpdates", wave=wave)
        check_numbers("WaveUpdates", WaveUpdates.__init__.__annotations__, locals(), ["staleness"])
        self._parameters = [p for p in parameters if p.requires_grad]
        if not self._parameters:
            raise ValueError("WaveUpdates: expected parameters to be at least one, got none")
        self._group, self._wave, self._staleness = group, wave, staleness
        self._count = 0
        self._compared = False
        # The first weights and the sums of all pipelines so far, the same in all pipelines.
        self._common = self._flat()
        # The weights of this pipeline after its last wave.
        self._after_wave = self._common
        # For each wave whose sum has not been taken: the updates of this pipeline, and that sum.
        self._underway: deque[tuple[Tensor, Pending[Tensor]]] = deque()

    def updated(self) -> None:
        """Note an update of the parameters. At the end of a wave, exchange the sums."""
        self._count += 1
        if self._count % self._wave == 0:
            self._exchange(self._staleness)

    def finish(self) -> None:
        """Take all missing sums, so that all pipelines have the same weights; all must call it."""
        self._exchange(0)

    def _exchange(self, missing: int) -> None:
        if not self._compared:
            facts = {
                "wave": self._wave,
                "staleness": self._staleness,
                "the values of the parameters at first (seed every pipeline alike)": fingerprint(
                    [("", self._common)]
                ),
            }
            Agreement("WaveUpdates", self._group, self._common.device).compare(facts)
            self._compared = True
        own = self._flat() - self._after_wave
        total = start_all_reduce_(own.clone(), self._group, operation="WaveUpdates")
        self._underway.append((own, total))
        while len(self._underway) > missing:
            self._common = self._common + self._underway.popleft()[1].wait()
        now = self._common
        for since, _ in self._underway:
            now = now + since
        parts = now.split([p.numel() for p in self._parameters])
        with torch.no_grad():
            for p, part in zip(self._parameters, parts, strict=True):
                p.copy_(part.view_as(p))
        self._after_wave = now

    def _flat(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self._parameters])
