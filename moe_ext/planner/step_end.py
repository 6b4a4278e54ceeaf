"""Seconds of a step after its passes: messages between copies, rounds, and the optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext.compression import codec_of
from moe_ext.dispatch.wire import LOSSLESS
from moe_ext.planner.axes import GRADIENTS, Columns, by_values
from moe_ext.planner.codec_times import CodecTimes
from moe_ext.planner.passes import Passes
from moe_ext.planner.rounds import round_codec
from moe_ext.planner.sizes import HOST_STATE, CostPart, Sizes, state_bytes


class StepEnd(CostPart):
    """Averages of gradients, rounds of local steps, and the optimizer on device or host."""

    def __init__(self, sizes: Sizes, codecs: CodecTimes, passes: Passes) -> None:
        super().__init__(sizes)
        self.codecs, self.passes = codecs, passes

    def seconds(self, c: Columns) -> Tensor:
        """Return the seconds of a step after its passes."""
        return self.gradients(c) + self.rounds(c) + self.update(c) + self.offload(c)

    def gradients(self, c: Columns) -> Tensor:
        """Return the seconds of a step's messages of gradients and weights between copies."""
        sizes = self.sizes
        dense, experts = sizes.parameters(c)
        if self.job.local_steps > 1:
            return torch.zeros_like(dense)
        copies, edp = sizes.copies(c)
        size = float(self.job.itemsize)
        of_dense = sizes.ring(copies, c["tp"], dense * size)
        of_experts = sizes.ring(edp, sizes.width(c), experts * size)
        # For each micro-batch FSDP2 reduces gradients and gathers weights, once with ZeRO 2 and in
        # both passes with ZeRO 3.
        times = sizes.measured("fsdp") * c["zero"] * sizes.num_micro_batches(c)
        times = torch.where(c["zero"] >= 2, times, 2.0 * sizes.measured("all_reduce"))
        # With ZeRO 1, weights of expert-parallel experts are not sent, because their own ranks
        # update them.
        sent = of_dense + torch.where(sizes.width(c) > 1, 0.0, of_experts)
        behind = torch.where(c["zero"] == 1, sent, 0.0) * sizes.measured("broadcast", 0.0)
        messages = (of_dense + of_experts) * times
        codecs = c["gradients"]
        if bool(codecs.any()):
            coded = self._coded_messages(codecs, dense, copies, c["tp"])
            coded = coded + self._coded_messages(codecs, experts, edp, sizes.width(c))
            messages = torch.where(codecs > 0, coded, messages)
        sent = messages + behind
        if not self.job.hidden_gradients:
            return sent
        each = self.passes.seconds(c)
        work = torch.where(c["zero"] >= 2, sizes.num_micro_batches(c), 1.0) * each
        return (sent - work).clamp(min=0.0)

    def _coded_messages(
        self, codecs: Tensor, numel: Tensor, ranks: Tensor, stride: Tensor
    ) -> Tensor:
        """Return the seconds to average `numel` gradients over ranks by `codecs`."""
        sizes = self.sizes
        num_bytes, encode, decode = self.codecs.gradient_rates[:, codecs]
        rings = sizes.ring(ranks, stride, numel * num_bytes)
        # Ranks exchange the lengths of lossless messages first, because they depend on the data.
        lengths = sizes.ring(ranks, stride, torch.zeros_like(numel))
        rings = rings + torch.where(codecs == GRADIENTS.index(LOSSLESS), lengths, 0.0)
        counts = ranks.round().long()
        passes = by_values(
            [codecs, counts],
            lambda i, size: codec_of(GRADIENTS[i]).passes(max(size, 1)),
            dtype=torch.float32,
        )
        encodes, decodes = passes.unbind(1)
        coding = numel * (encodes * encode + decodes * decode)
        return 2.0 * sizes.measured("all_reduce") * rings + torch.where(counts > 1, coding, 0.0)

    def rounds(self, c: Columns) -> Tensor:
        """Return the seconds of a round of local steps, per step."""
        sizes = self.sizes
        dense, experts = sizes.parameters(c)
        found = torch.zeros_like(dense)
        if self.job.local_steps == 1:
            return found
        codec, size = round_codec(self.job.local_codec), self.job.itemsize
        reduction = 2.0 * (sizes.measured("all_reduce") if codec.codec.plain else 1.0)
        for numel, ranks, stride in (
            (dense, sizes.data_ranks(c), torch.ones_like(c["ep"])),
            (experts, sizes.stage_ranks(c) / sizes.width(c), sizes.width(c)),
        ):
            # With an all-gather, a rank receives the payloads of all ranks. Otherwise shards are
            # reduced and then gathered.
            num_bytes = codec.sent * numel * (ranks if codec.gathers else 1.0)
            found = found + sizes.ring(ranks, stride, num_bytes) * (
                1.0 if codec.gathers else reduction
            )
            found = found + self.codecs.round(codec, numel, ranks)
        # Float32 pseudo-gradients, weights, weights of the last round and the outer momentum are
        # each read and written.
        numbers = sizes.averaged(c) * (8.0 + 2.0 * (2 + codec.has_momentum) * size)
        return (found + numbers / self.cluster.memory_bandwidth) / self.job.local_steps

    def update(self, c: Columns) -> Tensor:
        """Return the seconds of the optimizer's step, at the bandwidth of the memory."""
        sizes = self.sizes
        dense, experts = sizes.parameters(c)
        copies, edp = sizes.copies(c)
        own = torch.where(c["zero"] >= 1, dense / copies + experts / edp, dense + experts)
        size = self.job.itemsize
        # AdamW reads and writes its state, reads the gradient and writes the weight.
        num_bytes = own * (2 * state_bytes(size) + 2 * size) * sizes.measured("update")
        return torch.where(sizes.is_offloaded(c), 0.0, num_bytes / self.cluster.memory_bandwidth)

    def offload(self, c: Columns) -> Tensor:
        """Return the seconds to copy gradients to the host, update there, and copy weights back."""
        sizes = self.sizes
        shared, own = sizes.optimized(c)
        host, size = self.cluster.host, self.job.itemsize
        if host is None:
            return torch.zeros_like(shared)
        copies = torch.where(c["zero"] == 1, sizes.data_ranks(c) * c["cp"], 1.0)
        stepped = shared / copies + own
        # Copies and updates of parameters follow each other without overlap.
        moved = 2.0 * size / host.bandwidth
        worked = (2.0 * HOST_STATE + 2.0 * size) / host.rate
        return torch.where(sizes.is_offloaded(c), stepped * (moved + worked), 0.0)
