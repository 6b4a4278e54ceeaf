"""Peak memory of the fullest rank, on the processor and on its host."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ext.compression import codec_of
from moe_ext.planner.axes import CHUNKS, COMBINES, GRADIENTS, Columns, by_values, runs, total
from moe_ext.planner.presets import LayerParts
from moe_ext.planner.rank_loads import RankLoads
from moe_ext.planner.rounds import round_codec
from moe_ext.planner.sizes import BUCKET, HOST_STATE, CostPart, Sizes, state_bytes

# Factor on the memory of the formulas for memory that they omit, such as fragmentation and buffers
# of libraries.
MARGIN = 1.1


class StepMemory(CostPart):
    """Peak memory of candidates."""

    def __init__(self, sizes: Sizes, loads: RankLoads) -> None:
        super().__init__(sizes)
        self.loads = loads

    def fullest(self, c: Columns) -> Tensor:
        """Return the bytes of the fullest rank, with the margin."""
        return MARGIN * total(self.terms(c))

    def fits(self, c: Columns, memory: Tensor | None = None) -> Tensor:
        """Return True for candidates that fit into the memory of processor and host.

        Args:
            c: candidates.
            memory: result of `fullest`, if it is known.
        """
        found = self.fullest(c) if memory is None else memory
        here, host = found <= self.cluster.memory, self.cluster.host
        return here if host is None else here & (self.host(c) <= host.memory)

    def may_fit(self, c: Columns) -> Tensor:
        """Return False for pipelines that do not fit with any division into stages.

        Some stage has at least the mean of weights, states, and activations. Activations are
        counted for the number of micro-batches in flight on the last rank, which is the smallest.
        """
        sizes, size = self.sizes, self.job.itemsize
        mean = sizes.alike(c, c["recompute"].double())
        shared, own = sizes.optimized(mean)
        stepped = torch.where(c["zero"] == 1, shared / sizes.copies(c)[0], shared) + own
        on_host = sizes.is_offloaded(c)
        (dense, experts), host = sizes.parameters(mean), self.cluster.host
        numel = dense + experts
        numbers, _ = self._layer_numbers(mean)
        each = self._each(mean, _sum(sizes.layers(mean), numbers), numbers)
        before = torch.where(sizes.num_micro_batches(c) > 1, size * numel, 0.0)
        held = before + self.in_flight(c, c["pp"] - 1) * each
        held = held.maximum(size * numel) + size * numel + state_bytes(size) * stepped * ~on_host
        found = MARGIN * held <= self.cluster.memory
        most = torch.inf if host is None else host.memory
        return found & (MARGIN * HOST_STATE * stepped * on_host <= most)

    def over(self, c: Columns, memory: Tensor) -> Tensor:
        """Return used over available memory, of processor or host, whichever is larger."""
        over, host = memory / self.cluster.memory, self.cluster.host
        return over if host is None else over.maximum(self.host(c) / host.memory)

    def host(self, c: Columns) -> Tensor:
        """Return the bytes on the host of the fullest rank, with the margin."""
        held = torch.where(self.sizes.is_offloaded(c), self.sizes.stepped(c)[0], 0.0)
        return MARGIN * HOST_STATE * held

    def in_flight(self, c: Columns, rank: Tensor | int = 0) -> Tensor:
        """Return the micro-batches in flight on a rank, counted in all stages of the rank."""
        pp, micro = c["pp"].double(), self.sizes.num_micro_batches(c)
        # With "turns" a rank holds one more micro-batch, to compute during exchanges.
        more = c["turns"] * (pp > 1)
        chunks = (2 * (pp - 1 - rank) + (CHUNKS - 1) * pp + 1 + more) / CHUNKS
        found = torch.where(runs(c, "interleaved"), chunks, pp - rank + more)
        found = torch.where(runs(c, "zb-h1"), pp + more, found)
        return torch.where(runs(c, "gpipe"), micro, found.minimum(micro))

    def terms(self, c: Columns) -> Columns:
        """Return the peak bytes of the fullest rank, by purpose.

        The peak is at the loss, when FSDP2 gathers, in the backward pass of the last or first
        layer, when gradients are averaged, or in the optimizer's step.
        """
        sizes = self.sizes
        m, size = self.model, self.job.itemsize
        dense, experts = sizes.parameters(c)
        copies, edp = sizes.copies(c)
        is_fsdp = c["zero"] >= 2
        whole = torch.where(is_fsdp, dense / copies + experts / edp, dense + experts)
        here = ~sizes.is_offloaded(c)
        stepped, one_by_one = (numel * here for numel in sizes.stepped(c))
        fixed = {"weights": size * whole, "optimizer": state_bytes(size) * stepped}
        kept, copied = self._coded[:, c["gradients"]]
        if bool(kept.any()):
            fixed["feedback"] = kept * (_owed(dense, copies) + _owed(experts, edp))
        phases = self._phases(c, size * (dense + experts), size * whole)
        # A bucket of gradients is copied for its message. AdamW allocates the root of each second
        # moment.
        groups = torch.maximum(dense, experts) if m.num_experts else dense
        averages = (copies > 1) & ~is_fsdp & (self.job.local_steps == 1)
        bucket = torch.where(averages, (size * groups).clamp(max=BUCKET), 0.0)
        # With a codec all buckets are underway at once.
        bucket = torch.where(c["gradients"] > 0, copied * (dense + experts), bucket)
        fixed["last round"], travelling = self._rounds(c)
        for temporary in (bucket, size * one_by_one, travelling):
            phases.append({"gradients": size * whole, "temporary": temporary})
        names = ("gradients", "gathered", "activations", "temporary", "logits")
        none = torch.zeros_like(dense)
        table = torch.stack(
            [torch.stack([phase.get(name, none) for name in names]) for phase in phases]
        )
        fullest = table.sum(1).argmax(0)
        found = table.gather(0, fullest.expand(1, len(names), -1))[0]
        return fixed | dict(zip(names, found, strict=True))

    def _rounds(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Return the bytes that local steps keep between rounds, and bytes at the end of one."""
        numel, size = self.sizes.averaged(c), self.job.itemsize
        if self.job.local_steps == 1:
            return torch.zeros_like(numel), torch.zeros_like(numel)
        codec, ranks = round_codec(self.job.local_codec), self.sizes.data_ranks(c)
        owed = by_values([ranks.long()], lambda count: [codec.owed(count)])[:, 0] * numel
        # A rank keeps the weights of the last round, the outer momentum and residuals.
        kept = (1 + codec.has_momentum) * size * numel + owed
        # After a message the worker's own weights are also there, and a 16-bit copy of the mean for
        # 16-bit parameters.
        own = (1 + (size < 4)) * size
        return kept, max(codec.making, codec.travelling + own) * numel

    def _phases(self, c: Columns, weights: Tensor, held: Tensor) -> list[Columns]:
        """Return the bytes, by purpose, of four phases of a step.

        The phases are the loss, gathers of FSDP2, and the backward passes of the last layer and of
        the first layer.

        Args:
            c: candidates.
            weights: bytes of a rank's weights before ZeRO.
            held: bytes of the weights that the rank holds.
        """
        sizes = self.sizes
        m, size, tokens = self.model, self.job.itemsize, sizes.tokens(c)
        here, rerun = sizes.layers(c), sizes.again(c)
        layers, moe, again = here.layers, here.moe, rerun.layers
        is_fsdp = c["zero"] >= 2
        is_last = c.get("loss", torch.ones_like(layers))
        numbers, rise = self._layer_numbers(c)
        kept = _sum(here, numbers)
        stream, in_two = self._stream(c), runs(c, "zb-h1")
        each, as_one = self._each(c, kept, numbers), in_two & (again > 0)
        # Bytes of the stage's layer that keeps most.
        one = torch.zeros_like(kept)
        for kind in self.model.kinds:
            has = torch.ones_like(kept, dtype=torch.bool)
            for there, part in zip(here, kind, strict=True):
                has = has & (there > 0) if part else has
            one = torch.where(has, one.maximum(_sum(kind, numbers)), one)
        # With "turns" two passes may be underway, each with a recomputed layer.
        run = torch.where(as_one, kept, one) * (again > 0) * (1 + c["turns"])
        # Between the two parts of a backward pass a stage holds all activations, and the gradients
        # of results of products.
        in_flight = c["in_flight"] if "in_flight" in c else self.in_flight(c)
        most = in_flight.minimum(c["pp"].double())
        late = c.get("late", torch.where(in_two & (c["pp"] > 1), most, 0.0))
        due = kept + self._due(here, c)
        due = due + tokens * c["tp"] * m.vocab_size * size * is_last
        every = (in_flight - late) * each + late * due
        first = every - each + torch.where(again > 0, run + stream, one)
        first = torch.where(late > 0, every, first)
        run = torch.where(late > 0, 0.0, run)
        # FSDP2 keeps embedding and output gathered from the forward pass to the end of the backward
        # pass.
        words = m.model_dim * m.vocab_size * size / c["tp"]
        ends = words * sizes.word_matrices(c)
        output = words * (sizes.word_matrices(c) > 0)
        layer = (weights - ends) / layers
        up = 1 + (m.gated_experts if m.num_experts else m.gated)
        # The gradient of a layer's down projection exists when that of its up projection is made.
        made = layer * moe / layers / (1 + up)
        accumulates = sizes.num_micro_batches(c) > 1
        before = torch.where(accumulates, held, 0.0)
        # With ZeRO 3, FSDP2 holds the weights of a layer and of the next layer, which Gloo holds
        # twice while they arrive. Later it holds a copy of the previous layer's gradients for their
        # message. With ZeRO 2 it holds the weights of all layers.
        is_whole = c["zero"] == 2
        arriving = torch.where(is_whole, weights, ends + 3 * layer)
        moving = torch.where(is_whole, weights + layer, ends + layers.clamp(max=3) * layer)
        at_loss = torch.where(is_whole, weights, ends)
        new = torch.where(accumulates & ~is_fsdp, 0.0, output + made)
        all_but = torch.where(accumulates | is_fsdp, held, held - up * made)
        return [
            {
                "gradients": before,
                "gathered": at_loss * is_fsdp,
                "activations": every + 3 * stream,
                # The loss holds three float32 tensors: log-probabilities, their gradients, and
                # gradients of logits.
                "logits": 12.0 * tokens * c["tp"] * m.vocab_size * is_last,
            },
            {
                "gradients": before + output,
                "gathered": arriving * is_fsdp,
                "activations": every,
                "temporary": 2 * stream,
            },
            {
                "gradients": before + new,
                "gathered": moving * is_fsdp,
                "activations": every + run,
                "temporary": rise + 2 * stream,
            },
            {
                "gradients": all_but + torch.where(is_fsdp, output + made, 0.0),
                "gathered": (ends + 2 * layer) * is_fsdp,
                "activations": first,
                "temporary": rise + 2 * stream,
            },
        ]

    def _stream(self, c: Columns) -> Tensor:
        """Return the bytes of a micro-batch's hidden states, which are not divided over tp."""
        return self.sizes.tokens(c) * c["tp"] * self.model.model_dim * self.job.itemsize

    def _each(self, c: Columns, kept: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        """Return the bytes of activations that a stage holds per micro-batch.

        Recomputed layers keep only their inputs, and run again one by one. If the backward pass is
        in two parts, a stage keeps only its input and runs again as a whole.
        """
        rerun, stream = self.sizes.again(c), self._stream(c)
        each = kept - _sum(rerun, numbers) + rerun.layers * stream
        return torch.where(runs(c, "zb-h1") & (rerun.layers > 0), stream, each)

    def _due(self, here: LayerParts, c: Columns) -> Tensor:
        """Return the bytes of gradients of a stage's product and norm outputs, per micro-batch."""
        m, size, tokens = self.model, self.job.itemsize, self.sizes.tokens(c)
        rows, shards = self._rows(c)
        experts = (1 + m.gated_experts) * m.ffn_dim / shards + m.model_dim
        experts = rows * experts + m.num_experts
        experts = experts + (1 + m.gated_experts) * m.shared_ffn_dim
        ffn = (1 + m.gated) * (m.dense_ffn_dim or m.ffn_dim) + m.model_dim
        attention = m.heads_dim + m.gate_dim + 2 * m.kv_dim
        norms = 3 * m.model_dim * c["tp"]
        recurrent = m.recurrent.channels + 2 * m.recurrent.width if m.recurrent else 0
        numbers = (norms, attention, recurrent, ffn, experts)
        return tokens * size * _sum(here, tuple(each + 0 * tokens for each in numbers))

    def _rows(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Return the fullest rank's rows per token, and the number of shards of an expert."""
        shards = self.sizes.width(c) / c["ep"]
        return self.model.top_k * shards * self.loads.of(c, "peak_rows"), shards

    def _layer_numbers(self, c: Columns) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the bytes that a layer keeps for its backward pass, and the rise in that pass.

        The first number is that of norms in each layer, the others are those of the layer's parts.
        The rise is that of experts if there are any.
        """
        m, size, tokens = self.model, self.job.itemsize, self.sizes.tokens(c)
        rows, shards = self._rows(c)
        ffn_dim = m.ffn_dim / shards
        # With "reduced", rows are weighed on the ranks of the experts. Otherwise the returned rows
        # are weighed here, and are kept for the backward pass.
        back = torch.where(c["combine"] == COMBINES.index("reduced"), rows, m.top_k * shards)
        up = 1 + m.gated_experts
        moe = rows * ((m.model_dim + (up + 1) * ffn_dim) * size + 28)
        moe = moe + back * m.model_dim * size
        # A shared expert is not fused: it keeps gate, up, activation and product.
        moe = moe + 2 * up * m.shared_ffn_dim * size + 4.0 * m.num_experts
        ffn = 2 * (1 + m.gated) * (m.dense_ffn_dim or m.ffn_dim) * size
        # Norms keep three numbers per element, and for 16 bits also their input in float32.
        # Attention keeps queries, keys, values, results and one float32 per head, and with a gate
        # the gate and the gated result.
        norms = (3 * m.model_dim * size + (4 * m.model_dim if size < 4 else 0)) * c["tp"]
        norms = self.sizes.norms(m.parts[0]) * norms
        attention = (2 * m.heads_dim + 2 * m.kv_dim) * size + 4 * m.num_heads
        attention = attention + (2 * m.gate_dim + m.attention_gate * m.heads_dim) * size
        recurrent = 0.0
        if m.recurrent is not None:
            # A recurrent layer keeps the input, result and activation of its convolution, the
            # float32 tensors of the recurrence, its gate and the gate's activation, a norm, and the
            # gated result.
            recurrent = 4.0 * m.recurrent.state_numbers
            recurrent += (3 * m.recurrent.channels + 4 * m.recurrent.width) * size
        # The backward pass adds gradients of up projection and activation, after it has freed the
        # activation and the returned rows.
        if not m.num_moe_layers and not m.all_parts.dense:
            rise = tokens * recurrent
        elif m.num_moe_layers:
            rise = tokens * (rows * up * ffn_dim - back * m.model_dim) * size
        else:
            rise = tokens * (1 + m.gated) * (m.dense_ffn_dim or m.ffn_dim) * size
        # Moved experts are stored in one tensor, after a copy of the rank's own experts.
        came = self.loads.of(c, "peak_moved")
        held = torch.where(came > 0, came + m.num_experts / c["ep"], 0.0)
        copies = held * m.expert_parameters * size
        parts = (norms, attention, recurrent, ffn, moe)
        kept = [tokens * part for part in parts]
        return (*kept[:-1], kept[-1] + copies), rise

    @functools.cached_property
    def _coded(self) -> Tensor:
        """Numbers `[2, codecs]`: bytes per element of residuals, and of gradients in a message.

        A message has a copy of the gradients and their encoded form, as counted with two ranks.
        """
        rows, size = [(0.0, 0.0)], self.job.itemsize
        for name in GRADIENTS[1:]:
            codec = codec_of(name)
            if codec.feeds_back:
                # There are float32 residuals of this step and of the step before.
                rows.append((8.0, 8.0))
            elif codec.plain:
                rows.append((0.0, 10.0 if size == 4 else 4.0))
            else:
                rows.append((0.0, 2.0 * size + 0.5))
        return torch.tensor(rows, dtype=torch.float64).T


def _sum(parts: LayerParts, numbers: Sequence[Tensor]) -> Tensor:
    """Return the sum of numbers per part, each times the count of the part."""
    found = torch.zeros_like(numbers[0])
    for count, number in zip(parts, numbers, strict=True):
        found = found + count * number
    return found


def _owed(numel: Tensor, ranks: Tensor) -> Tensor:
    """Return the elements of a rank's residuals: of its gradients, and of its shard of the sum."""
    return torch.where(ranks > 1, numel * (1 + 1 / ranks), 0.0)
