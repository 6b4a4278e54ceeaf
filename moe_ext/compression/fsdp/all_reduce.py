"""A compressed all-reduce between nodes, beside FSDP inside them: `CompressedAllReduce`.

Shape suffixes: as `fsdp`; M nodes, Q elements of the shard that are compressed.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from moe_ext._checks import check_numbers
from moe_ext.comm.collectives import all_reduce_
from moe_ext.comm.groups import group_rank, resolve_group
from moe_ext.compression.codecs import Codec, PayloadCodec
from moe_ext.compression.collectives.padding import padded_all_reduce_
from moe_ext.compression.collectives.quantized import States, shard_numel
from moe_ext.compression.feedback import CodecMemory, committing
from moe_ext.compression.fsdp.layout import (
    KeepDense,
    ShardLayout,
    keep_small_dense,
)
from moe_ext.compression.fsdp.ledger import StepLedger
from moe_ext.compression.fsdp.messages import GradientMessage
from moe_ext.distributed.fsdp_state import shard_group


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
    as much again during a backward pass). The loss of the second rounding of a quantised all-reduce
    is added to the residual of the rank that did it. Nothing is lost: the sum over steps of what
    was applied, plus the mean over nodes of the residuals, is the sum of the dense means.

    Gradients that are not finite: as `CompressedReduceScatter`.

    Args:
        codec: "int8", "int6", "int4", "int3", "int2", "fp8", "sign", "bf16", "topk", "none", or a
            `PayloadCodec`, also by the name that it was registered with.
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
        check_numbers(op, CompressedAllReduce.__init__.__annotations__, locals())
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
            density=density,
        )
        group = resolve_group(node_group, op)
        assert group is not None
        self.group: ProcessGroup = group
        self.average = average
        del self._options["format"]
        self._options.update(codec=codec, average=average)

    @torch.no_grad()
    def __call__(self, reduce_output: Tensor) -> None:
        """Reduces a shard ``[S]`` over the nodes, in place."""
        self._compare_options(self.group)
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
        whole_Q = packed_PQ.reshape(-1).float().clone()
        owed_Q = None if owed_PQ is None else owed_PQ.view(-1)
        if self.fills_padding:
            assert owed_Q is not None
            return self._reduce_signs(whole_Q, owed_Q, layout)
        assert self.codec is not None
        codec: Codec = self.codec
        numel = whole_Q.numel()
        if codec.density is not None:
            # The nearest number of elements, at least one.
            codec = codec.with_density((max(1, round(codec.density * numel)) - 0.5) / numel)
        # Equal elements of two modules must not be rounded alike.
        key = zlib.crc32(self.name.encode()) & 0xFFFF
        memory = CodecMemory([whole_Q.shape], whole_Q.device, key=key)
        memory.put("residual", owed_Q)
        how: dict[str, Any] = {"group": self.group, "average": self.average, "step": self.step}
        with committing(memory):
            found_Q = codec.start(whole_Q, memory, **how).wait()
        self.step += 1
        owed_now_Q = memory.whole("residual")
        if owed_Q is not None and owed_now_Q is not None:
            owed_Q.copy_(owed_now_Q)
        return found_Q

    def _reduce_signs(self, whole_Q: Tensor, owed_Q: Tensor, layout: ShardLayout) -> Tensor:
        module = self.finder.module
        assert module is not None and self.coding is not None
        second = whole_Q.new_zeros(shard_numel(whole_Q.numel(), self.group.size(), self.block))
        partial = layout.partial_blocks(group_rank(shard_group(module)), 1, whole_Q.device)
        padded_all_reduce_(
            whole_Q,
            self.coding,
            States(owed_Q, second),
            partial,
            self.group,
            self.average,
            operation=self.op,
        )
        start = group_rank(self.group) * second.numel()
        mine = owed_Q[start : start + second.numel()]
        mine.add_(second[: mine.numel()])
        return whole_Q
