"""Compressed messages for FSDP2: weights, gradients, and gradients between nodes.

Shape suffixes: P ranks of the group, S elements of a rank's shard, Q elements of its packed part,
which is compressed, D elements of its dense part, which is not.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.fsdp import FSDPModule

from moe_ext._checks import check_kind, check_numbers, check_rule
from moe_ext.comm import collectives
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import group_rank, resolve_group
from moe_ext.comm.pending import Pending, PendingWork
from moe_ext.compression.codecs import (
    Codec,
    PayloadCodec,
    Quantize,
    Rounded,
    codec_names,
    codec_of,
)
from moe_ext.compression.collectives.coding import FORMATS as QUANTIZED
from moe_ext.compression.collectives.lossless import start_all_gather as start_lossless
from moe_ext.compression.collectives.padding import padded_all_reduce_
from moe_ext.compression.collectives.quantized import (
    BLOCKS,
    States,
    shard_numel,
    start_all_gather,
    start_reduce_scatter,
)
from moe_ext.compression.feedback import CodecMemory, committing
from moe_ext.compression.fsdp.layout import (
    KeepDense,
    LayoutFinder,
    ShardLayout,
    keep_small_dense,
)
from moe_ext.compression.fsdp.ledger import StepLedger, is_finite
from moe_ext.distributed.fsdp_state import AllGather, ReduceScatter, shard_group

FORMATS = ("none", "bf16", *QUANTIZED, "topk")
_CODED = (torch.float32, torch.bfloat16, torch.float16)


class _Message:
    """Base of the messages of one FSDP module.

    Args:
        made: class of the message, which error messages name.
        format: format of the compressed part.
        given: arguments of the constructor by name, including the arguments of `LayoutFinder`.
    """

    def __init__(self, made: type, format: str | PayloadCodec, given: Mapping[str, Any]) -> None:
        op, block, density = made.__name__, given["block"], given.get("density", 0.01)
        annotations = vars(made)["__init__"].__annotations__
        check_numbers(op, annotations, given, ["min_numel"])
        check_rule(op, "density", density, "in (0, 1]", 0.0 < density <= 1.0)
        check_rule(op, "block", block, "a power of two in [64, 1024]", block in BLOCKS)
        feedback = given.get("error_feedback", False)
        self.op, self.name = op, given["name"]
        # Groups whose ranks have compared their options.
        self._compared: set[ProcessGroup] = set()
        self.codec = _codec_of(op, format, block, density, feedback)
        self.coding = None if self.codec is None else self.codec.coding()
        # A codec with a density takes its share of parameters that are padded to whole `block`s.
        takes_share = self.codec is None or self.codec.density is not None
        self.block = block if self.coding is None or takes_share else self.coding.align
        self.fills_padding = self.coding is not None and self.coding.means_of_blocks
        names = ("module", "name", "model", "keep_dense", "min_numel")
        where = {name: given[name] for name in names}
        self.finder = LayoutFinder(op=op, block=self.block, **where)
        # Arguments that `_options` leaves out, because ranks may differ in them or compare them in
        # another way.
        apart = {"module", "name", "model", "ledger", "node_group", "return"}
        options = {name: given[name] for name in annotations if name not in apart}
        self._options: dict[str, object] = {**options, **self.finder.options}

    def _compare_options(self, group: ProcessGroup) -> None:
        """Compare options before a group's first message; they determine the length of messages."""
        if group not in self._compared:
            Agreement(self.op, group).compare({"name": self.name, "options": self._options})
            self._compared.add(group)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate a buffer that FSDP sends from or receives into."""
        return torch.empty(*size, dtype=dtype, device=device)


def _codec_of(
    op: str, format: str | PayloadCodec, block: int, density: float, feedback: bool
) -> PayloadCodec | None:
    """Make a codec that accepts any part of a gradient; None if messages are not compressed."""
    codec: object = format
    if isinstance(format, str):
        if format == "none":
            return None
        if format in QUANTIZED:
            codec = Quantize(format, block, feedback=feedback or format == "sign")
        elif format == "bf16":
            codec = Rounded(feedback)
        elif format in codec_names() and format != "auto":
            codec = codec_of(format, density)
    if isinstance(codec, PayloadCodec) and codec.shardable:
        return codec
    raise ValueError(
        f"{op}: expected format to be one of {FORMATS}, or a codec that takes any part of a "
        f"gradient, got {format!r}"
    )


class GradientMessage(_Message):
    """Base of gradient messages: residual, ledger, and the steps that all of them share."""

    def __init__(self, made: type, format: str | PayloadCodec, given: Mapping[str, Any]) -> None:
        super().__init__(made, format, given)
        codec, op, error_feedback = self.codec, self.op, given["error_feedback"]
        if codec is not None and codec.needs_feedback and not error_feedback:
            raise ValueError(f"{op}: expected error_feedback to be on for {format!r}, got False")
        keeps = error_feedback and codec is not None and codec.feeds_back
        if keeps and self.finder.module is None:
            raise ValueError(
                f"{op}: expected module to be given with error feedback, got None; residuals are "
                "kept by parameter"
            )
        ledger: StepLedger | None = given["ledger"]
        check_kind(op, "ledger", ledger, StepLedger)
        self.ledger = ledger if ledger is not None else StepLedger()
        self.residual = self.ledger.new_residual() if keeps else None
        # The random stream depends on the module's name, so that equal elements of two modules are
        # not rounded alike.
        self.step, self._key = 0, zlib.crc32(self.name.encode()) & 0xFFFF

    def _reduce(self, out: Tensor, flat: Tensor, num_shards: int) -> None:
        """Reduce consecutive shards, ``[P * S]``, to one, ``[S]``."""
        layout = None
        if self.codec is not None and flat.dtype in _CODED:
            layout = self.finder.find(out.numel(), trainable_only=True)
        self.ledger.begin(self, self.name)
        try:
            if layout is None or layout.packed_numel == 0:
                self.ledger.leave_out(self.residual)
                self._send_whole(out, flat, layout)
            else:
                self._send_parts(out, flat, num_shards, layout)
        except BaseException:
            self.ledger.fail()
            raise

    def _send_parts(self, out: Tensor, flat: Tensor, num_shards: int, layout: ShardLayout) -> None:
        packed_PQ, dense_PD = layout.pack(flat, num_shards)
        packed_PQ = self.ledger.guard(layout, flat, packed_PQ, dense_PD)
        dense_D = self._reduce_dense(dense_PD)
        owed_PQ = None
        if self.residual is not None:
            owed_PQ = self.residual.open(layout, num_shards, flat.device)
        if self.ledger.flushing:
            whole_PQ = packed_PQ.to(torch.float32, copy=True)
            if owed_PQ is not None:
                whole_PQ += owed_PQ
                owed_PQ.zero_()
            packed_Q = self._reduce_dense(whole_PQ)
        else:
            packed_Q = self._reduce_packed(packed_PQ, owed_PQ, layout)
        status = dense_D[-1:].isfinite()
        self.ledger.note(status[0])
        packed_Q = torch.where(status, packed_Q, float("nan")).to(out.dtype)
        layout.unpack_(out, packed_Q.view(1, -1), dense_D.view(1, -1))

    @abstractmethod
    def _send_whole(self, out: Tensor, flat: Tensor, layout: ShardLayout | None) -> None:
        """Reduce a whole message uncompressed, and have the ledger check that it is finite."""

    @abstractmethod
    def _reduce_dense(self, part: Tensor) -> Tensor:
        """Reduce a part of every shard uncompressed, ``[P, n]`` to ``[n]``; may overwrite it."""

    @abstractmethod
    def _reduce_packed(
        self, packed_PQ: Tensor, owed_PQ: Tensor | None, layout: ShardLayout
    ) -> Tensor:
        """Reduce the packed parts, compressed, to ``[Q]`` float32; update the residual in place."""


class CompressedAllGather(_Message, AllGather):
    """Gathers the weights of an FSDP module in 8 or 4 bits per element (qwZ of ZeRO++).

    Every rank computes with the same decoded weights, also for its own shard. The shards that the
    optimizer updates stay exact, and each step encodes them again, so errors do not pile up.

    Set a separate object on each module::

        block.set_custom_all_gather(CompressedAllGather("int8", module=block))

    Norms, biases and routers (``keep_dense``) are sent uncompressed in a second message. Two
    parameters never share a scale. If FSDP gathers over fewer ranks than it shards over
    (``reshard_after_forward=<int>``, hpZ), the gather for the backward pass stays inside a node. It
    is not compressed, so that the backward pass sees the bits of the forward pass. Messages in
    other dtypes than float32, bfloat16 and float16 are not compressed.

    Args:
        format: "int8", "int6", "int4", "int3", "int2", "fp8", "bf16", or a `PayloadCodec` or its
            registered name. "lossless" keeps every bit of the whole message (see
            `lossless_all_gather`), "none" is FSDP's own message.
        block (int): elements that share a scale.
        module (FSDPModule): the module whose messages these are; None treats a message as one
            tensor.
        name (str): name of the module, for error messages.
        model (nn.Module): gives parameters their names; None is ``module``.
        keep_dense (callable): (name, owner, parameter) to bool, True for parameters that are not
            compressed; default `keep_small_dense`.
        min_numel (int): parameters of fewer elements are not compressed either.
        frozen_only (bool): compress only parameters that do not train
            (``zero_quantized_nontrainable_weights``).

    Raises:
        ValueError: the format or block is unknown, or the format needs error feedback.
    """

    def __init__(
        self,
        format: str | PayloadCodec = "int8",
        block: int = 256,
        *,
        module: FSDPModule | None = None,
        name: str = "",
        model: nn.Module | None = None,
        keep_dense: KeepDense = keep_small_dense,
        min_numel: int = 1024,
        frozen_only: bool = False,
    ) -> None:
        coded = "none" if format == "lossless" else format
        super().__init__(CompressedAllGather, coded, locals())
        fits = self.codec is None or not self.codec.needs_feedback
        check_rule(self.op, "format", format, "one of those that need no error feedback", fits)
        self.frozen_only = frozen_only
        self.lossless = format == "lossless"

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        """Gather ``[S]`` of every rank into ``[P * S]``. The input may be a view of the output."""
        self._compare_options(group)
        layout = None
        module = self.finder.module
        inside = module is not None and group.size() != shard_group(module).size()
        coded = input_tensor.dtype in _CODED and not inside
        if coded and self.coding is not None:
            layout = self.finder.find(
                input_tensor.numel(), trainable_only=False, frozen_only=self.frozen_only
            )
        if coded and self.lossless:
            found = start_lossless(output_tensor, input_tensor, group, operation=self.op)
        elif layout is None or layout.packed_numel == 0:
            found = collectives.start_all_gather(
                input_tensor, group, operation=self.op, out=output_tensor
            )
        else:
            found = self._start(output_tensor, input_tensor, group, layout, async_op)
        if async_op:
            return PendingWork(found.wait)
        found.wait()
        return None

    def _start(
        self, out: Tensor, shard: Tensor, group: ProcessGroup, layout: ShardLayout, async_op: bool
    ) -> Pending[Tensor]:
        packed_1Q, dense_1D = layout.pack(shard, 1)
        if not shard.is_cuda and not bool(is_finite(shard)):
            # The encoder would raise on this rank alone, and the other ranks would wait. They learn
            # of it from NaN in the dense part.
            packed_1Q, dense_1D[:, -1] = torch.zeros_like(packed_1Q), float("nan")
        packed_PQ = shard.new_empty((group.size(), layout.packed_numel))
        beside = collectives.start_all_gather(dense_1D, group, operation=self.op)
        assert self.coding is not None
        coded = start_all_gather(
            packed_PQ.view(-1),
            packed_1Q.reshape(-1),
            self.coding,
            None,
            group,
            operation=self.op,
            async_op=async_op,
        )

        def finish(_: Tensor) -> Tensor:
            dense_PD = beside.wait()
            finite_P1 = dense_PD[:, -1:].isfinite()
            if not shard.is_cuda and not bool(finite_P1.all()):
                packed_PQ.masked_fill_(~finite_P1, float("nan"))
            layout.unpack_(out, packed_PQ, dense_PD)
            return out

        return coded.then(finish)


class CompressedReduceScatter(GradientMessage, ReduceScatter):
    """Reduces the gradients of an FSDP module, compressed (qgZ of ZeRO++).

    Each rank sends every other rank the encoded shard that the other rank owns. The owner sums in
    float32 in rank order, with the same bits in every run, and rounds once to the dtype of the
    message. AVG, SUM and PREMUL_SUM are supported, so that FSDP's divide factors keep their
    meaning.

    **Error feedback** keeps rounding errors for the next step. It takes 4 bytes for each element of
    the whole (not the sharded) parameter on every rank, and as much again during a backward pass.

    **Gradients that are not finite** on any rank make the message's whole result NaN on every rank,
    as a sum would. Residuals return to their state before the backward pass
    (`FSDPCompression.finite`).

    Set a separate object on each module::

        block.set_custom_reduce_scatter(CompressedReduceScatter("int8", module=block))

    If a parameter took no part in the backward pass, FSDP leaves it out of the message and does not
    say which it was. That message is not compressed, and a warning says so once
    (``set_reduce_scatter_unused_params`` of torch 2.13 avoids it).

    Args:
        format: as `CompressedAllGather`; with error feedback also "sign" and "topk", the largest
            elements of each shard (1 %; ``TopK(density)`` for another share).
        block (int): elements that share a scale.
        error_feedback (bool): keep residuals; needs ``module``.
        stochastic (bool): round at random, so that the expected result is exact.
        seed (int): seed of the random numbers.
        ledger (StepLedger): shared by the messages of one model; None makes one.
        module (FSDPModule): as `CompressedAllGather`.
        name (str): as `CompressedAllGather`.
        model (nn.Module): as `CompressedAllGather`.
        keep_dense (callable): as `CompressedAllGather`.
        min_numel (int): as `CompressedAllGather`.

    Raises:
        ValueError: the format or block is unknown; signs or top-k have no error feedback; error
            feedback has no module; the reduction is none of the three above.

    Reference: Wang et al., ZeRO++, 2023 (arXiv 2306.10209), section 3.3.
    """

    def __init__(
        self,
        format: str | PayloadCodec = "int8",
        block: int = 256,
        *,
        error_feedback: bool = False,
        stochastic: bool = False,
        seed: int = 0,
        ledger: StepLedger | None = None,
        module: FSDPModule | None = None,
        name: str = "",
        model: nn.Module | None = None,
        keep_dense: KeepDense = keep_small_dense,
        min_numel: int = 1024,
    ) -> None:
        super().__init__(CompressedReduceScatter, format, locals())
        self.stochastic = stochastic or (self.codec is not None and self.codec.stochastic)
        self.seed = seed

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce ``[P * S]`` of every rank to this rank's ``[S]``."""
        self._compare_options(group)
        self._group, self._reduce_op = group, op
        self._scale = collectives.reduce_scale(op, group.size(), self.op)
        self._reduce(output_tensor, input_tensor, group.size())
        return PendingWork(lambda: None) if async_op else None

    def _send_whole(self, out: Tensor, flat: Tensor, layout: ShardLayout | None) -> None:
        self.ledger.watch_whole(self.name, layout, flat, self._group.size())
        # An uncompressed message has no status for other ranks, so the group agrees on it at the
        # end of the pass.
        self.ledger.add_group(self._group)
        collectives.reduce_scatter(
            flat, self._group, operation=self.op, op=self._reduce_op, out=out
        )

    def _reduce_dense(self, part: Tensor) -> Tensor:
        return collectives.reduce_scatter(part.view(-1), self._group, operation=self.op).mul_(
            self._scale
        )

    def _reduce_packed(
        self, packed_PQ: Tensor, owed_PQ: Tensor | None, layout: ShardLayout
    ) -> Tensor:
        if owed_PQ is not None and self.fills_padding:
            partial = layout.partial_blocks(0, packed_PQ.shape[0], packed_PQ.device)
            partial.fill_(owed_PQ, packed_PQ)
        rng_state = None
        if self.stochastic:
            numbers = [self.seed, self._key, self.step, group_rank(self._group)]
            rng_state = torch.tensor(numbers, device=packed_PQ.device)
        self.step += 1
        packed_Q = torch.empty(packed_PQ.shape[1], device=packed_PQ.device, dtype=torch.float32)
        assert self.coding is not None
        start_reduce_scatter(
            packed_Q,
            packed_PQ.reshape(-1),
            self.coding,
            States(residual=owed_PQ, rng_state=rng_state),
            self._group,
            False,
            operation=self.op,
            async_op=False,
        ).wait()
        return packed_Q.mul_(self._scale)


class CompressedAllReduce(GradientMessage):
    """Averages the gradients of an FSDP module over nodes, compressed; a hook for FSDP2.

    FSDP shards and reduces inside a node, over its fast links, so that each rank holds a shard of
    the node's gradient. This hook reduces the shard over the ranks that hold it in all nodes::

        mesh = init_device_mesh("cpu", (nodes, 8), mesh_dim_names=("node", "local"))
        fully_shard(block, mesh=mesh["local"])
        hook = CompressedAllReduce("topk", mesh["node"].get_group(), density=0.01, module=block)
        block.set_all_reduce_hook(hook)

    The mesh that is given to FSDP must have one dimension. With two, FSDP reduces between the nodes
    itself, densely, before it calls a hook. Every node must start from the same weights.

    Residuals are kept by parameter, and sharded like the parameter: 4 bytes for each element of the
    shard, and as much again during a backward pass. A quantised all-reduce rounds a second time;
    the rank that does it adds the error to its residual. Nothing is lost: the applied gradients,
    summed over steps, plus the mean over nodes of the residuals equal the sum of the dense means.

    Gradients that are not finite are treated as by `CompressedReduceScatter`.

    Args:
        codec: "int8", "int6", "int4", "int3", "int2", "fp8", "sign", "bf16", "topk", "none", or a
            `PayloadCodec` or its registered name.
        node_group (ProcessGroup): the ranks that hold the same shard, one in each node.
        density (float): share of the shard's elements that top-k sends, in (0, 1].
        block (int): elements that share a scale.
        error_feedback (bool): keep residuals; signs and top-k need them.
        average (bool): take the mean over nodes; if False, the sum.
        ledger (StepLedger): as `CompressedReduceScatter`.
        module (FSDPModule): the module whose gradients these are; None treats a shard as one
            tensor, and cannot keep residuals.
        name (str): as `CompressedAllGather`.
        model (nn.Module): as `CompressedAllGather`.
        keep_dense (callable): as `CompressedAllGather`.
        min_numel (int): as `CompressedAllGather`.

    Raises:
        ValueError: codec, block or density is unknown or out of range; the codec needs error
            feedback.
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
        super().__init__(CompressedAllReduce, codec, locals())
        group = resolve_group(node_group, self.op)
        assert group is not None
        self.group: ProcessGroup = group
        self.average = average

    @torch.no_grad()
    def __call__(self, reduce_output: Tensor) -> None:
        """Reduce a shard ``[S]`` over the nodes, in place."""
        self._compare_options(self.group)
        self._reduce(reduce_output, reduce_output, 1)

    def _send_whole(self, out: Tensor, flat: Tensor, layout: ShardLayout | None) -> None:
        self._reduce_dense(out)
        self.ledger.watch_whole(self.name, layout, out, 1)

    def _reduce_dense(self, part: Tensor) -> Tensor:
        collectives.all_reduce_(part, self.group, operation=self.op)
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
            # The share is rounded to the nearest number of elements, at least one. Codecs round
            # up, so half an element is subtracted.
            codec = codec.with_density((max(1, round(codec.density * numel)) - 0.5) / numel)
        memory = CodecMemory([whole_Q.shape], whole_Q.device, key=self._key)
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
