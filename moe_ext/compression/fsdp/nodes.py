"""A compressed all-reduce between nodes, beside FSDP inside them: `CompressedAllReduce`.

Shape suffixes: as `fsdp`; M nodes, Q elements of the shard that are compressed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from moe_ext.compression.codecs import PayloadCodec
from moe_ext.compression.collectives.padding import padded_all_reduce_
from moe_ext.compression.collectives.quantized import States, shard_numel, start_all_reduce
from moe_ext.compression.collectives.sparse import sparse_all_reduce
from moe_ext.compression.fsdp.layout import (
    KeepDense,
    ShardLayout,
    keep_small_dense,
)
from moe_ext.compression.fsdp.ledger import StepLedger
from moe_ext.compression.fsdp.messages import FORMATS, GradientMessage
from moe_ext.distributed.comm import all_reduce_
from moe_ext.distributed.fsdp_state import shard_group
from moe_ext.distributed.groups import group_rank, resolve_group
from moe_ext.ops.topk import topk_compress_

_TOPK = "topk"


class CompressedAllReduce(GradientMessage):
    """Averages the gradients of an FSDP module over nodes, compressed; a hook for FSDP2.

    FSDP shards and reduces inside a node, over its fast links; each rank then holds a shard of the
    node's gradient, and this hook reduces it with the ranks of the same place in the other nodes::

        mesh = init_device_mesh("cpu", (nodes, 8), mesh_dim_names=("node", "local"))
        fully_shard(block, mesh=mesh["local"])
        hook = CompressedAllReduce("topk", mesh["node"].get_group(), density=0.01, module=block)
        block.set_all_reduce_hook(hook)

    The mesh that is given to FSDP has one dimension: with two, FSDP reduces between the nodes
    itself, densely, before it calls a hook. Every node must start from the same weights.

    Residuals are kept by parameter and sharded as it is (4 bytes for an element of the shard, and
    as much again during a backward pass). What the second rounding of a quantised all-reduce loses
    is added to the residual of the rank that did it. Nothing is lost: the sum over steps of what
    was applied, plus the mean over nodes of the residuals, is the sum of the dense means.

    Gradients that are not finite: as `CompressedReduceScatter`.

    Args:
        codec: "int8", "int4", "fp8", "sign", "bf16", "topk", "none", or a `PayloadCodec`, also by
            the name that it was registered with.
        node_group (ProcessGroup): the ranks that hold the same shard, one in each node.
        density (float): share of the shard's elements that top-k sends, in (0, 1].
        block (int): elements that share a scale.
        error_feedback (bool): keep residuals; signs and top-k cannot do without.
        average (bool): mean over nodes, else sum.
        ledger (StepLedger): as `CompressedReduceScatter`.
        module (FSDPModule): what it is set on; None takes a shard as one tensor, and cannot keep
            residuals.
        name (str): as `CompressedAllGather`.
        model (nn.Module): as `CompressedAllGather`.
        keep_dense (callable): as `CompressedAllGather`.
        min_numel (int): as `CompressedAllGather`.

    Raises:
        ValueError: an unknown codec, block or density; no error feedback where it is needed.
    """

    def __init__(
        self,
        codec: str | PayloadCodec = "int8",
        node_group: ProcessGroup | None = None,
        *,
        density: float = 0.01,
        block: int = 256,
        error_feedback: bool = True,
        average: bool = True,
        ledger: StepLedger | None = None,
        module: FSDPModule | None = None,
        name: str = "",
        model: nn.Module | None = None,
        keep_dense: KeepDense = keep_small_dense,
        min_numel: int = 1024,
    ) -> None:
        op = "CompressedAllReduce"
        if codec == _TOPK and not error_feedback:
            raise ValueError(f"{op}: expected error_feedback to be on for top-k, got False")
        if not 0.0 < density <= 1.0:
            raise ValueError(f"{op}: expected density to be in (0, 1], got {density}")
        super().__init__(
            op,
            codec,
            error_feedback,
            ledger,
            block=block,
            module=module,
            name=name,
            model=model,
            keep_dense=keep_dense,
            min_numel=min_numel,
            known=(*FORMATS, _TOPK),
        )
        group = resolve_group(node_group, op)
        assert group is not None
        self.group: ProcessGroup = group
        self.density, self.average = density, average

    @torch.no_grad()
    def __call__(self, reduce_output: Tensor) -> None:
        """Reduces a shard ``[S]`` over the nodes, in place."""
        self._reduce(reduce_output, reduce_output, 1)

    def _send_whole(self, out: Tensor, flat: Tensor, layout: ShardLayout | None) -> None:
        self._reduce_dense(out)
        self.ledger.watch_whole(self.name, layout, out, 1)

    def _reduce_dense(self, part: Tensor) -> Tensor:
        all_reduce_(part, self.group, operation=self.op)
        return (part.div_(self.group.size()) if self.average else part).view(-1)

    def _reduce_packed(
        self, packed_PQ: Tensor, owed_PQ: Tensor | None, layout: ShardLayout
    ) -> Tensor:
        if self.codec == _TOPK:
            assert owed_PQ is not None
            return self._reduce_topk(packed_PQ.view(-1), owed_PQ.view(-1))
        return self._reduce_quantized(packed_PQ, owed_PQ, layout)

    def _reduce_topk(self, packed_Q: Tensor, residual_Q: Tensor) -> Tensor:
        numel = packed_Q.numel()
        k = max(1, round(self.density * numel))
        # The message has just been checked.
        chosen = topk_compress_(packed_Q, residual_Q, k, check_finite=False)
        found = sparse_all_reduce(
            chosen.values,
            chosen.indices,
            numel,
            residual=residual_Q,
            group=self.group,
            average=self.average,
            validate=False,
        )
        assert isinstance(found, Tensor)
        return found

    def _reduce_quantized(
        self, packed_1Q: Tensor, residual_1Q: Tensor | None, layout: ShardLayout
    ) -> Tensor:
        nodes, numel = self.group.size(), packed_1Q.numel()
        whole_Q = packed_1Q.reshape(-1).float().clone()
        second = None
        if residual_1Q is not None:
            second = whole_Q.new_zeros(shard_numel(numel, nodes, self.block))
        assert self.coding is not None
        states = States(None if residual_1Q is None else residual_1Q.view(-1), second)
        how: dict[str, Any] = {"group": self.group, "average": self.average, "operation": self.op}
        if self.fills_padding:
            module = self.finder.module
            assert module is not None
            place = group_rank(shard_group(module))
            partial = layout.partial_blocks(place, 1, whole_Q.device)
            padded_all_reduce_(whole_Q, self.coding, states, partial, **how)
        else:
            start_all_reduce(whole_Q, self.coding, states, async_op=False, **how).wait()
        if residual_1Q is not None and second is not None:
            start = group_rank(self.group) * second.numel()
            mine = residual_1Q.view(-1)[start : start + second.numel()]
            mine.add_(second[: mine.numel()])
        return whole_Q
