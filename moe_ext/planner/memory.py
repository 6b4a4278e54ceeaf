"""Bytes of the fullest rank when it is fullest, on the processor and on its host."""

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

# Memory that formulas do not see, fragments and buffers of libraries, over what they see.
MARGIN = 1.1


class StepMemory(CostPart):
    """Memory of candidates."""

    def __init__(self, sizes: Sizes, loads: RankLoads) -> None:
        super().__init__(sizes)
        self.loads = loads

    def fullest(self, c: Columns) -> Tensor:
        """Bytes of the fullest rank, with the margin."""
        return MARGIN * total(self.terms(c))

    def fits(self, c: Columns, memory: Tensor | None = None) -> Tensor:
        """True for candidates that fit into the memory of processor and host.

        Args:
            c: candidates.
            memory: of them, if it is known.
        """
        found = self.fullest(c) if memory is None else memory
        here, host = found <= self.cluster.memory, self.cluster.host
        return here if host is None else here & (self.host(c) <= host.memory)

    def may_fit(self, c: Columns) -> Tensor:
        """False for pipelines that do not fit, whatever layers their stages have.

        Some stage takes the mean or more of weights, their states, and activations of as many
        micro-batches as the last stage holds, which holds the fewest.
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
        """Memory that is taken over the memory that there is, of processor or host, the larger."""
        over, host = memory / self.cluster.memory, self.cluster.host
        return over if host is None else over.maximum(self.host(c) / host.memory)

    def host(self, c: Columns) -> Tensor:
        """Bytes on the host of the fullest rank, with the margin."""
        held = torch.where(self.sizes.is_offloaded(c), self.sizes.stepped(c)[0], 0.0)
        return MARGIN * HOST_STATE * held

    def in_flight(self, c: Columns, rank: Tensor | int = 0) -> Tensor:
        """Micro-batches whose activations a rank holds, in stages of a rank."""
        pp, micro = c["pp"].double(), self.sizes.num_micro_batches(c)
        # In turn it holds one more.
        more = c["turns"] * (pp > 1)
        chunks = (2 * (pp - 1 - rank) + (CHUNKS - 1) * pp + 1 + more) / CHUNKS
        found = torch.where(runs(c, "interleaved"), chunks, pp - rank + more)
        found = torch.where(runs(c, "zb-h1"), pp + more, found)
        return torch.where(runs(c, "gpipe"), micro, found.minimum(micro))

    def terms(self, c: Columns) -> Columns:
        """Bytes of the fullest rank when it is fullest, by what they are for.

        That is at the loss, in the backward pass of the last or the first layer, where gradients
        are averaged, or in the optimizer's step, whichever takes most.
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
        # A bucket of gradients is copied for its message, and AdamW takes a root of each moment.
        groups = torch.maximum(dense, experts) if m.num_experts else dense
        averages = (copies > 1) & ~is_fsdp & (self.job.local_steps == 1)
        bucket = torch.where(averages, (size * groups).clamp(max=BUCKET), 0.0)
        # Messages with a codec are all under way at once.
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
        """Bytes that local steps keep from round to round, and those of the end of a round."""
        numel, size = self.sizes.averaged(c), self.job.itemsize
        if self.job.local_steps == 1:
            return torch.zeros_like(numel), torch.zeros_like(numel)
        codec, ranks = round_codec(self.job.local_codec), self.sizes.data_ranks(c)
        owed = by_values([ranks.long()], lambda count: [codec.owed(count)])[:, 0] * numel
        # Weights of the last round, and the outer momentum.
        kept = (1 + codec.has_momentum) * size * numel + owed
        # Beside the mean there are the worker's own weights, and the mean in 16 bits.
        own = (1 + (size < 4)) * size
        return kept, max(codec.making, codec.travelling + own) * numel

    def _phases(self, c: Columns, weights: Tensor, held: Tensor) -> list[Columns]:
        """Bytes at the loss, when FSDP2 gathers, and in the last layer's and the first's backward.

        Args:
            c: candidates.
            weights: bytes of a rank's weights before ZeRO.
            held: of those that it holds.
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
        # The layer that keeps most, of those that the stage has.
        one = torch.zeros_like(kept)
        for kind in self.model.kinds:
            has = torch.ones_like(kept, dtype=torch.bool)
            for there, part in zip(here, kind, strict=True):
                has = has & (there > 0) if part else has
            one = torch.where(has, one.maximum(_sum(kind, numbers)), one)
        # In turn two passes may be underway, each with a layer that it computes again.
        run = torch.where(as_one, kept, one) * (again > 0) * (1 + c["turns"])
        # Between the two parts of a backward pass all activations are there, and the gradients of
        # what products gave.
        in_flight = c["in_flight"] if "in_flight" in c else self.in_flight(c)
        most = in_flight.minimum(c["pp"].double())
        late = c.get("late", torch.where(in_two & (c["pp"] > 1), most, 0.0))
        due = kept + self._due(here, c)
        due = due + tokens * c["tp"] * m.vocab_size * size * is_last
        every = (in_flight - late) * each + late * due
        first = every - each + torch.where(again > 0, run + stream, one)
        first = torch.where(late > 0, every, first)
        run = torch.where(late > 0, 0.0, run)
        # Embedding and output are whole from the forward pass to the end of the backward pass.
        words = m.model_dim * m.vocab_size * size / c["tp"]
        ends = words * sizes.word_matrices(c)
        output = words * (sizes.word_matrices(c) > 0)
        layer = (weights - ends) / layers
        up = 1 + (m.gated_experts if m.num_experts else m.gated)
        # Gradients of a layer's down projection are there when its up projection's are made.
        made = layer * moe / layers / (1 + up)
        accumulates = sizes.num_micro_batches(c) > 1
        before = torch.where(accumulates, held, 0.0)
        # FSDP2 has a layer's weights, those of the next one on their way, which Gloo has twice as
        # they arrive, and later a copy of the last one's gradients on theirs; with ZeRO 2 the
        # weights of all.
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
                # Logarithms of probabilities, their gradients and those of logits, in float32.
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
        """Bytes of the hidden states of a micro-batch, which ranks of a tp group have whole."""
        return self.sizes.tokens(c) * c["tp"] * self.model.model_dim * self.job.itemsize

    def _each(self, c: Columns, kept: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        """Bytes that a stage holds of a micro-batch, of those that its layers keep.

        Layers that run again keep their inputs, and run one by one. Where the backward pass is in
        two, a stage keeps its input and runs again whole.
        """
        rerun, stream = self.sizes.again(c), self._stream(c)
        each = kept - _sum(rerun, numbers) + rerun.layers * stream
        return torch.where(runs(c, "zb-h1") & (rerun.layers > 0), stream, each)

    def _due(self, here: LayerParts, c: Columns) -> Tensor:
        """Bytes of the gradients of what a stage's products and norms gave, of a micro-batch."""
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
        """Rows of the fullest rank for each of its tokens, and shards of an expert."""
        shards = self.sizes.width(c) / c["ep"]
        return self.model.top_k * shards * self.loads.of(c, "peak_rows"), shards

    def _layer_numbers(self, c: Columns) -> tuple[tuple[Tensor, ...], Tensor]:
        """Bytes that a layer keeps for its backward pass, and by how much that pass rises above.

        Of norms of each layer and of each of its parts; it rises by that of experts where there are
        any.
        """
        m, size, tokens = self.model, self.job.itemsize, self.sizes.tokens(c)
        rows, shards = self._rows(c)
        ffn_dim = m.ffn_dim / shards
        # Rows that come back are kept to be weighted, or are weighted where the experts are.
        back = torch.where(c["combine"] == COMBINES.index("reduced"), rows, m.top_k * shards)
        up = 1 + m.gated_experts
        moe = rows * ((m.model_dim + (up + 1) * ffn_dim) * size + 28)
        moe = moe + back * m.model_dim * size
        # Unfused: gate, up, activation and product.
        moe = moe + 2 * up * m.shared_ffn_dim * size + 4.0 * m.num_experts
        ffn = 2 * (1 + m.gated) * (m.dense_ffn_dim or m.ffn_dim) * size
        # Norms of three numbers each, in 16 bits with their input in float32; queries, keys,
        # values, what attention gives and a float32 of each head; a gate, and what it lets through.
        norms = (3 * m.model_dim * size + (4 * m.model_dim if size < 4 else 0)) * c["tp"]
        norms = self.sizes.norms(m.parts[0]) * norms
        attention = (2 * m.heads_dim + 2 * m.kv_dim) * size + 4 * m.num_heads
        attention = attention + (2 * m.gate_dim + m.attention_gate * m.heads_dim) * size
        recurrent = 0.0
        if m.recurrent is not None:
            # A convolution, its input and its activation; the recurrence in float32; its gate, the
            # gate's activation, a norm, and what the gate lets through.
            recurrent = 4.0 * m.recurrent.state_numbers
            recurrent += (3 * m.recurrent.channels + 4 * m.recurrent.width) * size
        # Gradients of up projection and activation; the activation and what came back are gone.
        if not m.num_moe_layers and not m.all_parts.dense:
            rise = tokens * recurrent
        elif m.num_moe_layers:
            rise = tokens * (rows * up * ffn_dim - back * m.model_dim) * size
        else:
            rise = tokens * (1 + m.gated) * (m.dense_ffn_dim or m.ffn_dim) * size
        # Weights of experts that came lie behind a copy of a rank's own.
        came = self.loads.of(c, "peak_moved")
        held = torch.where(came > 0, came + m.num_experts / c["ep"], 0.0)
        copies = held * m.expert_parameters * size
        parts = (norms, attention, recurrent, ffn, moe)
        kept = [tokens * part for part in parts]
        return (*kept[:-1], kept[-1] + copies), rise

    @functools.cached_property
    def _coded(self) -> Tensor:
        """`[2, codecs]`: bytes that are kept of what a gradient is owed, and of it on its way.

        On its way it is copied with others, and coded beside that: as counted on two ranks.
        """
        rows, size = [(0.0, 0.0)], self.job.itemsize
        for name in GRADIENTS[1:]:
            codec = codec_of(name)
            if codec.feeds_back:
                # The residual of this step and that of the step before, in float32.
                rows.append((8.0, 8.0))
            elif codec.plain:
                rows.append((0.0, 10.0 if size == 4 else 4.0))
            else:
                rows.append((0.0, 2.0 * size + 0.5))
        return torch.tensor(rows, dtype=torch.float64).T


def _sum(parts: LayerParts, numbers: Sequence[Tensor]) -> Tensor:
    """The sum of a number of each part over all of them."""
    found = torch.zeros_like(numbers[0])
    for count, number in zip(parts, numbers, strict=True):
        found = found + count * number
    return found


def _owed(numel: Tensor, ranks: Tensor) -> Tensor:
    """Numbers that a rank owes, to its gradients and to its shard of the sum over ranks."""
    return torch.where(ranks > 1, numel * (1 + 1 / ranks), 0.0)
