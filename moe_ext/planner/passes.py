"""Seconds of the passes of a micro-batch through a stage, by purpose."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext.planner.axes import AGAIN, PARTS, Columns, total
from moe_ext.planner.compute import Compute
from moe_ext.planner.exchange import LayerExchange
from moe_ext.planner.sizes import CostPart, Sizes

# Number of passes through a layer in a step without recompute, for each kind of work or message.
_PASSES = {"compute": 3, "elementwise": 3, "tensor": 2, "context": 3, "experts": 2}
_PASSES |= {"heads": 1, "states": 2, "moved experts": 2}


class Passes(CostPart):
    """Forward and backward passes of a micro-batch through a stage."""

    def __init__(self, sizes: Sizes, compute: Compute, exchange: LayerExchange) -> None:
        super().__init__(sizes)
        self.compute, self.exchange = compute, exchange

    def terms(self, c: Columns) -> Columns:
        """Return the seconds of a micro-batch's passes on a stage, by purpose.

        The output is left out, because only the last stage has it. With "turns", exchanges count
        only as far as they are longer than all work that can overlap with them.
        """
        return self._shown(c, *self._parts(c))

    def _shown(self, c: Columns, found: Columns, launches: Tensor) -> Columns:
        """Convert the terms of `_parts` to those of `terms`, by hiding overlapped time."""
        found, experts = dict(found), found["experts"]
        if self.job.hidden_exchanges:
            work = found["compute"] + found["elementwise"]
            found["experts"] = (experts - work).clamp(min=0.0)
        work = sum(found.values()) - experts
        shown = (experts - work).clamp(min=0.0)
        found["experts"] = torch.where(c["turns"] > 0, shown, found["experts"])
        return {**found, "launches": (launches - sum(found.values())).clamp(min=0.0)}

    def apart(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Return the seconds of a micro-batch's work on a stage, and of its exchanges.

        The output is left out, because only the last stage has it.
        """
        return self._apart(*self._parts(c))

    @staticmethod
    def _apart(found: Columns, launches: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the terms of `_parts` to the work and exchanges of `apart`."""
        work = total({name: value for name, value in found.items() if name != "experts"})
        return launches.maximum(work), found["experts"]

    def _parts(self, c: Columns) -> tuple[Columns, Tensor]:
        """Return a micro-batch's terms without overlap of exchanges, and seconds of launches."""
        sizes = self.sizes
        here, again = sizes.layers(c), sizes.again(c)
        if not bool((again.layers > 0).any()):
            once = self._once(c)
            more = dict.fromkeys(once, torch.zeros_like(once["compute"]))
        elif AGAIN[0] in c:
            # First passes and recomputation share a call, because with few candidates its time does
            # not depend on their number.
            count = len(here.layers)
            both = {name: column.expand(count).repeat(2) for name, column in c.items()}
            both |= {n: torch.cat(each) for n, *each in zip(PARTS, here, again, strict=True)}
            halves = {name: value.split(count) for name, value in self._once(both).items()}
            once, more = ({name: each[i] for name, each in halves.items()} for i in (0, 1))
        else:
            once = self._once(c)
            more = {name: c["recompute"] * value for name, value in once.items()}
        found = {name: _PASSES[name] * value + more[name] for name, value in once.items()}
        swaps = self.exchange.swaps_heads(c)
        back = torch.where(swaps, here.attention * self.exchange.heads(c)[1], 0.0)
        found["context"] = found["context"] + found.pop("heads") + back
        if not self.job.eager_attention:
            # The backward pass of a fused kernel computes scores again: five products for two of
            # the forward pass, instead of four.
            scores = self.compute.scores(sizes.tokens(c))
            found["compute"] = found["compute"] + 0.5 * here.attention * scores
        if self.job.hidden_tensor:
            found["tensor"] = (found["tensor"] - found["compute"]).clamp(min=0.0)
        if bool(c["kv_wire"].any()):
            # The backward pass also sends gradients of keys and values, which are not rounded, so
            # one of the three passes is that of plain rows.
            plain = self.exchange.key_ring({**c, "kv_wire": torch.zeros_like(c["kv_wire"])})
            found["context"] = found["context"] + here.attention * plain - once["context"]
        # A device that is quicker than launches waits for them. Embedding, loss, messages and the
        # schedule together have about as many launches as one layer.
        launches = (3.0 + again.layers / here.layers) * (here.layers + 1)
        launches = launches * self.cluster.layer_seconds
        node = self.cluster.levels[0].size
        launches = launches * (1.0 + self.cluster.node_launches * (c["tp"] >= max(node, 2)))
        return found, launches

    def _once(self, c: Columns) -> Columns:
        """Return the seconds of a single pass of a micro-batch through a stage's layers."""
        sizes = self.sizes
        m, size, tokens = self.model, self.job.itemsize, sizes.tokens(c)
        here = sizes.layers(c)
        one = torch.ones_like(c["pp"])
        # With sequence parallelism, activations are gathered before a column-parallel product and
        # scattered after a row-parallel product.
        whole = tokens * c["tp"] * m.model_dim * size
        tensor = 2.0 * (here.attention + here.dense) * sizes.ring(c["tp"], one, whole)
        tensor = tensor * sizes.measured("tensor")
        swaps = self.exchange.swaps_heads(c)
        context = torch.where(swaps, 0.0, here.attention * self.exchange.key_ring(c))
        heads = torch.where(swaps, here.attention * self.exchange.heads(c)[0], 0.0)
        experts = torch.zeros_like(context)
        if m.num_experts:
            experts = here.moe * self.exchange.rows(c)
        found = {
            "compute": self.compute.products(c),
            "elementwise": self.compute.elementwise(c),
            "tensor": tensor,
        }
        found |= {"context": context, "heads": heads, "experts": experts}
        if m.recurrent is not None:
            found["states"] = here.recurrent * self.exchange.states(c)
        return {**found, "moved experts": here.moe * self.exchange.loads.of(c, "moved")}

    def seconds(self, c: Columns) -> Tensor:
        """Return the seconds of a micro-batch's passes on a stage, without the output."""
        return total(self.terms(c))

    def split(self, c: Columns) -> tuple[Tensor, Tensor, Tensor]:
        """Return the seconds of a stage's forward pass, gradients of inputs, gradients of weights.

        The output is left out; each of its three passes takes `Compute.output`. The numbers include
        waits for exchanges, except with "turns", where exchanges are left out.
        """
        parts = self._parts(c)
        whole = total(self._shown(c, *parts))
        if bool(c["turns"].any()):
            whole = torch.where(c["turns"] > 0, self._apart(*parts)[0], whole)
        forward = whole / (3.0 + self.sizes.again(c).layers / self.sizes.layers(c).layers)
        return forward, whole - 2.0 * forward, forward
