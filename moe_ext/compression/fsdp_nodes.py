"""A compressed all-reduce between nodes, beside FSDP inside them: `CompressedAllReduce`.

Shape suffixes: as `fsdp`; M nodes, Q elements of the shard that are compressed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from moe_ext.compression._fsdp_internals import shard_group
from moe_ext.compression.fsdp import check_feedback, check_format
from moe_ext.compression.fsdp_feedback import Residual, StepLedger, guard
from moe_ext.compression.fsdp_layout import (
    KeepDense,
    LayoutFinder,
    ShardLayout,
    fill_padding_,
    keep_small_dense,
)
from moe_ext.compression.quantized_reduce import (
    quantized_all_gather,
    quantized_all_reduce_,
    quantized_reduce_scatter,
    shard_numel,
)
from moe_ext.compression.sparse_reduce import sparse_all_reduce
from moe_ext.distributed.collectives import sum_over_ranks_
from moe_ext.ops.topk import topk_compress_

_TOPK = "topk"
_SIGN = "sign"


class CompressedAllReduce:
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
        codec (str): "int8", "int4", "fp8", "sign", "topk", or "none".
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
        codec: str = "int8",
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
        if codec != _TOPK:
            check_format(op, codec, block, also=(_TOPK,))
        elif not error_feedback:
            raise ValueError(f"{op}: expected error_feedback to be on for top-k, got False")
        if not 0.0 < density <= 1.0:
            raise ValueError(f"{op}: expected density to be in (0, 1], got {density}")
        check_feedback(op, codec, error_feedback and codec != "none", module)
        group = node_group if node_group is not None else dist.group.WORLD
        assert group is not None
        self.group: ProcessGroup = group
        self.codec = codec
        self.density = density
        self.block = block
        self.average = average
        self.name = name
        self.finder = LayoutFinder(
            module, name, model, op=op, block=block, keep_dense=keep_dense, min_numel=min_numel
        )
        self.ledger = ledger if ledger is not None else StepLedger()
        self.residual = Residual() if error_feedback and codec != "none" else None
        if self.residual is not None:
            self.ledger.add_residual(self.residual)

    @torch.no_grad()
    def __call__(self, reduce_output: Tensor) -> None:
        """Reduces a shard ``[S]`` over the nodes, in place."""
        layout = None
        if self.codec != "none":
            layout = self.finder.find(reduce_output.numel(), trainable_only=True)
        self.ledger.begin(self, self.name)
        try:
            if layout is None or layout.packed_numel == 0:
                self._all_reduce(reduce_output)
                self.ledger.look_at(self.name, layout, reduce_output, 1)
                self.ledger.leave_out(self.residual)
                return
            packed_1Q, dense_1D = layout.pack(reduce_output, 1, spare=1)
            packed_1Q = guard(self.ledger, layout, reduce_output, packed_1Q, dense_1D)
            self._all_reduce(dense_1D)
            residual_1Q = None
            if self.residual is not None:
                residual_1Q = self.residual.open(layout, 1, reduce_output.device)
            packed_Q = self._reduce_packed(packed_1Q, residual_1Q, layout)
        except BaseException:
            self.ledger.fail()
            raise
        status = dense_1D[0, -1:].isfinite()
        self.ledger.note(status[0])
        packed_Q = torch.where(status, packed_Q, float("nan")).to(reduce_output.dtype)
        layout.unpack_(reduce_output, packed_Q.view(1, -1), dense_1D)

    def _all_reduce(self, x: Tensor) -> None:
        sum_over_ranks_(x, self.group, operation="CompressedAllReduce")
        if self.average:
            x.div_(self.group.size())

    def _reduce_packed(
        self, packed_1Q: Tensor, residual_1Q: Tensor | None, layout: ShardLayout
    ) -> Tensor:
        """Sum or mean over nodes ``[Q]``, float32; changes the residual."""
        if self.ledger.flushing:
            whole_Q = packed_1Q.view(-1).float().clone()
            if residual_1Q is not None:
                whole_Q += residual_1Q.view(-1)
                residual_1Q.zero_()
            self._all_reduce(whole_Q)
            return whole_Q
        if self.codec == _TOPK:
            assert residual_1Q is not None
            return self._reduce_topk(packed_1Q.view(-1), residual_1Q.view(-1))
        if self.codec == _SIGN:
            assert residual_1Q is not None
            return self._reduce_signs(packed_1Q.view(-1), residual_1Q.view(-1), layout)
        return self._reduce_quantized(packed_1Q, residual_1Q)

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

    def _reduce_quantized(self, packed_1Q: Tensor, residual_1Q: Tensor | None) -> Tensor:
        nodes, numel = self.group.size(), packed_1Q.numel()
        whole_Q = packed_1Q.reshape(-1).float().clone()
        second = None
        if residual_1Q is not None:
            second = whole_Q.new_zeros(shard_numel(numel, nodes, self.block))
        quantized_all_reduce_(
            whole_Q,
            format=self.codec,
            block=self.block,
            residual=None if residual_1Q is None else residual_1Q.view(-1),
            server_residual=second,
            group=self.group,
            average=self.average,
            validate=False,
        )
        if residual_1Q is not None and second is not None:
            start = dist.get_rank(self.group) * second.numel()
            mine = residual_1Q.view(-1)[start : start + second.numel()]
            mine.add_(second[: mine.numel()])
        return whole_Q

    def _reduce_signs(self, packed_Q: Tensor, residual_Q: Tensor, layout: ShardLayout) -> Tensor:
        """As `_reduce_quantized`, but padding counts in no scale, neither here nor of the sums."""
        nodes, numel = self.group.size(), packed_Q.numel()
        device, block = packed_Q.device, self.block
        module = self.finder.module
        assert module is not None
        place = dist.get_rank(shard_group(module))
        partial = blocks_K, counts_K = layout.partial_blocks(place, 1, device)
        fill_padding_(packed_Q, residual_Q, partial, block)
        shard = shard_numel(numel, nodes, block)
        whole_Q, owed_Q = torch.zeros((2, nodes * shard), device=device)
        whole_Q[:numel], owed_Q[:numel] = packed_Q, residual_Q
        sum_S = torch.empty(shard, device=device)
        options: dict[str, Any] = {"format": _SIGN, "block": block, "group": self.group}
        quantized_reduce_scatter(
            sum_S, whole_Q, residual=owed_Q, average=False, validate=False, **options
        )
        start = dist.get_rank(self.group) * shard
        here_K = (blocks_K * block >= start) & (blocks_K * block < start + shard)
        mine = blocks_K[here_K] - start // block, counts_K[here_K]
        fill_padding_(torch.zeros_like(sum_S), sum_S, mine, block)
        quantized_all_gather(whole_Q, sum_S, validate=False, **options)
        owed_Q[start : start + shard] += sum_S - whole_Q[start : start + shard]
        residual_Q.copy_(owed_Q[:numel])
        return whole_Q[:numel].div_(nodes if self.average else 1)
