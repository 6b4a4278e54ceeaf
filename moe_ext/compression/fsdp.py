"""Compressed messages for FSDP2: `CompressedAllGather` and `CompressedReduceScatter`.

Shape suffixes: P ranks of the group, S elements of a rank's shard, Q of its packed part that is
compressed, D of the part that is sent as it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from moe_ext.compression._fsdp_internals import (
    AllGather,
    ReduceScatter,
    reduce_scale,
    shard_group,
)
from moe_ext.compression.fsdp_feedback import Residual, StepLedger, guard, is_finite
from moe_ext.compression.fsdp_layout import (
    KeepDense,
    LayoutFinder,
    ShardLayout,
    fill_padding_,
    keep_small_dense,
)
from moe_ext.compression.quantized_reduce import quantized_all_gather, quantized_reduce_scatter
from moe_ext.distributed.comm import Pending
from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.traffic import record_traffic

FORMATS = ("none", "int8", "int4", "fp8", "sign")
_CODED = (torch.float32, torch.bfloat16, torch.float16)


def check_format(
    op: str, format: str, block: int, *, without: Sequence[str] = (), also: Sequence[str] = ()
) -> None:
    """ValueError for a format or block that the quantisers do not know."""
    known = tuple(name for name in (*FORMATS, *also) if name not in without)
    if format not in known:
        raise ValueError(f"{op}: expected format to be one of {known}, got {format!r}")
    if not 64 <= block <= 1024 or block & (block - 1):
        raise ValueError(f"{op}: expected block to be a power of two in [64, 1024], got {block}")


class _Finishing(dist.Work):
    """A message whose result is put together when it is waited for."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: Any = None) -> bool:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True


class _Message:
    """What the messages of one FSDP module have in common."""

    def __init__(
        self,
        op: str,
        format: str,
        *,
        block: int,
        module: FSDPModule | None,
        name: str,
        model: nn.Module | None,
        keep_dense: KeepDense,
        min_numel: int,
        without: Sequence[str] = (),
    ) -> None:
        check_format(op, format, block, without=without)
        self.format = format
        self.block = block
        self.name = name
        self.finder = LayoutFinder(
            module, name, model, op=op, block=block, keep_dense=keep_dense, min_numel=min_numel
        )

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A buffer for FSDP to send from or receive in."""
        return torch.empty(*size, dtype=dtype, device=device)


class CompressedAllGather(_Message, AllGather):
    """Gathers the weights of an FSDP module as codes of 8 or 4 bits (qwZ of ZeRO++).

    Every rank computes with the same bits, those that the codes stand for, its own shard included;
    the shards themselves, which the optimizer changes, stay as they are. Weights are coded again
    from them in every step, hence errors do not pile up.

    Set it on each module by itself::

        block.set_custom_all_gather(CompressedAllGather("int8", module=block))

    Norms, biases and routers (``keep_dense``) travel beside the codes as they are, and a parameter
    never shares a scale with another one. Where FSDP gathers over fewer ranks than it shards over
    (``reshard_after_forward=<int>``, hpZ), the second gather stays inside a node and is not
    compressed: the backward pass sees the bits of the forward pass. Messages in other dtypes than
    float32, bfloat16 and float16 are not compressed.

    Args:
        format (str): "int8", "int4", "fp8", or "none" for FSDP's own message.
        block (int): elements that share a scale.
        module (FSDPModule): what it is set on; None takes a message as one tensor.
        name (str): the module's, for messages of errors.
        model (nn.Module): gives parameters their names; None is ``module``.
        keep_dense (callable): (name, owner, parameter) to bool, what is not compressed; default
            `keep_small_dense`.
        min_numel (int): parameters of fewer elements are not compressed either.
        frozen_only (bool): compress only parameters that do not train
            (``zero_quantized_nontrainable_weights``).

    Raises:
        ValueError: an unknown format or block.
    """

    def __init__(
        self,
        format: str = "int8",
        block: int = 256,
        *,
        module: FSDPModule | None = None,
        name: str = "",
        model: nn.Module | None = None,
        keep_dense: KeepDense = keep_small_dense,
        min_numel: int = 1024,
        frozen_only: bool = False,
    ) -> None:
        super().__init__(
            "CompressedAllGather",
            format,
            block=block,
            module=module,
            name=name,
            model=model,
            keep_dense=keep_dense,
            min_numel=min_numel,
            without=("sign",),
        )
        self.frozen_only = frozen_only

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gathers ``[S]`` of every rank into ``[P * S]``, of which the former may be a part."""
        layout = None
        module = self.finder.module
        inside = module is not None and group.size() != shard_group(module).size()
        if self.format != "none" and input_tensor.dtype in _CODED and not inside:
            layout = self.finder.find(
                input_tensor.numel(), trainable_only=False, frozen_only=self.frozen_only
            )
        if layout is None or layout.packed_numel == 0:
            return all_gather(output_tensor, input_tensor, group, async_op)
        work = self._start(output_tensor, input_tensor, group, layout, async_op)
        if async_op:
            return work
        work.wait()
        return None

    def _start(
        self, out: Tensor, shard: Tensor, group: ProcessGroup, layout: ShardLayout, async_op: bool
    ) -> dist.Work:
        ranks = group.size()
        packed_1Q, dense_1D = layout.pack(shard, 1, spare=1)
        if not shard.is_cuda and not bool(is_finite(shard)):
            # The coder would refuse it on this rank alone, and the others would wait.
            packed_1Q, dense_1D[:, -1] = torch.zeros_like(packed_1Q), float("nan")
        packed_PQ = shard.new_empty((ranks, layout.packed_numel))
        dense_PD = shard.new_empty((ranks, layout.dense_numel + 1))
        beside = all_gather(dense_PD.view(-1), dense_1D.view(-1), group, True)
        coded = quantized_all_gather(
            packed_PQ.view(-1),
            packed_1Q.reshape(-1),
            format=self.format,
            block=self.block,
            group=group,
            validate=False,
            async_op=async_op,
        )

        def finish() -> None:
            if isinstance(coded, Pending):
                coded.wait()
            assert beside is not None
            beside.wait()
            finite_P1 = dense_PD[:, -1:].isfinite()
            if not shard.is_cuda and not bool(finite_P1.all()):
                packed_PQ.masked_fill_(~finite_P1, float("nan"))
            layout.unpack_(out, packed_PQ, dense_PD)

        return _Finishing(finish)


class CompressedReduceScatter(_Message, ReduceScatter):
    """Reduces the gradients of an FSDP module as codes (qgZ of ZeRO++).

    Each rank sends to each other one the codes of its shard, which sums them in float32 in rank
    order: the same bits in every run, and one rounding to the dtype of the message at the end.
    AVG, SUM and PREMUL_SUM are understood, so that FSDP's own divide factors keep their meaning.

    **Error feedback** keeps what rounding loses for the next step: 4 bytes for each element of the
    whole (not the sharded) parameter on every rank, and as much again during a backward pass.

    **Gradients that are not finite** on any rank make the message's whole result NaN on every rank,
    as a sum would, and leave every residual as it was before the backward pass
    (`FSDPCompression.finite`).

    Set it on each module by itself::

        block.set_custom_reduce_scatter(CompressedReduceScatter("int8", module=block))

    Where a parameter took no part in the backward pass, FSDP leaves it out of its message without
    saying which; that message is not compressed, and a warning tells so once
    (``set_reduce_scatter_unused_params`` of torch 2.13 avoids it).

    Args:
        format (str): "int8", "int4", "fp8", "sign" (with error feedback), or "none".
        block (int): elements that share a scale.
        error_feedback (bool): keep residuals; needs ``module``.
        stochastic (bool): round at random, so that the expected result is exact.
        seed (int): of the random numbers.
        ledger (StepLedger): shared by the messages of one model, None for one of its own.
        module (FSDPModule): as `CompressedAllGather`.
        name (str): as `CompressedAllGather`.
        model (nn.Module): as `CompressedAllGather`.
        keep_dense (callable): as `CompressedAllGather`.
        min_numel (int): as `CompressedAllGather`.

    Raises:
        ValueError: an unknown format or block; signs without error feedback; error feedback
            without a module; another reduction than those above.

    Reference: Wang et al., ZeRO++, 2023 (arXiv 2306.10209), section 3.3.
    """

    def __init__(
        self,
        format: str = "int8",
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
        super().__init__(
            "CompressedReduceScatter",
            format,
            block=block,
            module=module,
            name=name,
            model=model,
            keep_dense=keep_dense,
            min_numel=min_numel,
        )
        check_feedback("CompressedReduceScatter", format, error_feedback, module)
        self.ledger = ledger if ledger is not None else StepLedger()
        self.residual = Residual() if error_feedback and format != "none" else None
        if self.residual is not None:
            self.ledger.add_residual(self.residual)
        self.stochastic = stochastic
        self.seed = seed
        self.step = 0

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces ``[P * S]`` of every rank to its ``[S]``."""
        layout = None
        if self.format != "none" and input_tensor.dtype in _CODED:
            layout = self.finder.find(output_tensor.numel(), trainable_only=True)
        scale = reduce_scale(op, group.size())
        self.ledger.begin(self, self.name)
        try:
            if layout is None or layout.packed_numel == 0:
                self.ledger.look_at(self.name, layout, input_tensor, group.size())
                self.ledger.leave_out(self.residual)
                # Nothing in this message tells other ranks.
                self.ledger.add_group(group)
                return _reduce_dense(output_tensor, input_tensor, group, op, async_op)
            self._reduce(output_tensor, input_tensor, group, scale, layout)
        except BaseException:
            self.ledger.fail()
            raise
        return _Finishing(lambda: None) if async_op else None

    def _reduce(
        self, out: Tensor, flat: Tensor, group: ProcessGroup, scale: float, layout: ShardLayout
    ) -> None:
        ranks = group.size()
        packed_PQ, dense_PD = layout.pack(flat, ranks, spare=1)
        packed_PQ = guard(self.ledger, layout, flat, packed_PQ, dense_PD)
        dense_D = flat.new_empty(layout.dense_numel + 1)
        reduce_scatter(dense_D, dense_PD.view(-1), group, dist.ReduceOp.SUM, False)
        dense_D *= scale
        residual_PQ = None
        if self.residual is not None:
            residual_PQ = self.residual.open(layout, ranks, flat.device)
            if self.format == "sign":
                partial = layout.partial_blocks(0, ranks, flat.device)
                fill_padding_(packed_PQ, residual_PQ, partial, self.block)
        packed_Q = self._reduce_packed(packed_PQ, residual_PQ, group)
        packed_Q *= scale
        status = dense_D[-1:].isfinite()
        self.ledger.note(status[0])
        packed_Q = torch.where(status, packed_Q, float("nan")).to(out.dtype)
        layout.unpack_(out, packed_Q.view(1, -1), dense_D.view(1, -1))

    def _reduce_packed(
        self, packed_PQ: Tensor, residual_PQ: Tensor | None, group: ProcessGroup
    ) -> Tensor:
        """Sum over ranks ``[Q]``, float32."""
        packed_Q = torch.empty(packed_PQ.shape[1], device=packed_PQ.device)
        if self.ledger.flushing:
            whole_PQ = packed_PQ.float()
            if residual_PQ is not None:
                whole_PQ = whole_PQ + residual_PQ
                residual_PQ.zero_()
            reduce_scatter(packed_Q, whole_PQ.reshape(-1), group, dist.ReduceOp.SUM, False)
            return packed_Q
        rng_state = None
        if self.stochastic:
            # Equal elements of two modules must not be rounded alike.
            tensor_id = zlib.crc32(self.name.encode()) & 0xFFFF
            numbers = [self.seed, tensor_id, self.step, dist.get_rank(group)]
            rng_state = torch.tensor(numbers, device=packed_PQ.device)
        self.step += 1
        quantized_reduce_scatter(
            packed_Q,
            packed_PQ.reshape(-1),
            format=self.format,
            block=self.block,
            residual=None if residual_PQ is None else residual_PQ.view(-1),
            rng_state=rng_state,
            group=group,
            average=False,
            validate=False,
        )
        return packed_Q


def _reduce_dense(
    out: Tensor, flat: Tensor, group: ProcessGroup, op: Any, async_op: bool
) -> dist.Work | None:
    if out.is_cuda or op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        return reduce_scatter(out, flat, group, op, async_op)
    # Gloo does not know PREMUL_SUM.
    reduce_scatter(out, flat, group, dist.ReduceOp.SUM, False)
    out.mul_(reduce_scale(op, group.size()))
    return _Finishing(lambda: None) if async_op else None


def check_feedback(op: str, format: str, error_feedback: bool, module: FSDPModule | None) -> None:
    """ValueError for signs without error feedback, and for feedback that no module can be kept."""
    if format == "sign" and not error_feedback:
        raise ValueError(f"{op}: expected error_feedback to be on for signs, got False")
    if error_feedback and module is None:
        raise ValueError(
            f"{op}: expected module to be given with error feedback, got None; residuals are kept "
            "by parameter"
        )


# torch 2.13 warns of the names that earlier versions have.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(out: Tensor, shard: Tensor, group: ProcessGroup, async_op: bool) -> dist.Work | None:
    """FSDP's own message, counted."""
    record_traffic("all_gather", (group.size() - 1) * shard.nbytes)
    with naming_failed_ranks(group, "CompressedAllGather"):
        work: dist.Work | None = _gather(out, shard, group=group, async_op=async_op)
        return work


def reduce_scatter(
    out: Tensor, flat: Tensor, group: ProcessGroup, op: Any, async_op: bool
) -> dist.Work | None:
    """FSDP's own message, counted."""
    record_traffic("reduce_scatter", (group.size() - 1) * out.nbytes)
    with naming_failed_ranks(group, "CompressedReduceScatter"):
        work: dist.Work | None = _scatter(out, flat, op=op, group=group, async_op=async_op)
        return work
