"""Reductions of quantised tensors: quantise, all-to-all, sum in float32, quantise, all-gather.

Shapes: N elements, P ranks, M elements of a shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.compression.agreement import check_call, non_finite, resolve
from moe_ext.compression.quantized_stages import (
    Plan,
    all_gather_stages,
    all_reduce_stages,
    chunk_numel,
    payload_bytes,
    piece_numel,
    reduce_scatter_stages,
)
from moe_ext.compression.reduction import Reduction, run
from moe_ext.distributed.comm import Pending
from moe_ext.distributed.groups import group_rank, group_size

FORMATS = ("int8", "int4", "fp8", "sign")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class States(NamedTuple):
    """What a reduction reads and writes beside its tensor; see `quantized_all_reduce_`."""

    residual: Tensor | None = None
    server_residual: Tensor | None = None
    rng_state: Tensor | None = None
    residual_in: Tensor | None = None
    server_residual_in: Tensor | None = None

    def given(self) -> dict[str, Tensor]:
        """Those that are there, flat, by name."""
        return {name: x.view(-1) for name, x in self._asdict().items() if x is not None}


def shard_numel(numel: int, world_size: int, block: int = 256) -> int:
    """Elements of a rank's shard in `quantized_all_reduce_`: whole blocks, the same for all.

    Args:
        numel (int): N.
        world_size (int): P.
        block (int): as there.

    Returns:
        int: M, with P M at least N; the last shards may lie behind the end.
    """
    return -(-numel // (world_size * block)) * block


def quantized_all_reduce_bytes(numel: int, world_size: int, format: str, block: int = 256) -> int:
    """What leaves a rank in one `quantized_all_reduce_`: two rounds of a payload for each other."""
    shard = shard_numel(numel, world_size, block)
    return 2 * (world_size - 1) * payload_bytes(shard, format, block)


def _tensor_problem(x: Tensor, name: str) -> str | None:
    if x.dtype not in _DTYPES or not x.is_contiguous():
        return (
            f"expected {name} to be contiguous float32, bfloat16 or float16, got {x.dtype} of "
            f"shape {tuple(x.shape)} and strides {x.stride()}"
        )
    return None


def _state_problem(x: Tensor | None, name: str, numel: int) -> str | None:
    if x is None:
        return None
    if x.dtype != torch.float32 or x.numel() != numel or not x.is_contiguous():
        return (
            f"expected {name} to be contiguous float32 of {numel} elements, got {x.dtype} of "
            f"shape {tuple(x.shape)}"
        )
    return None


def _elsewhere_problem(old: Tensor | None, new: Tensor | None, name: str) -> str | None:
    """What is wrong with the residual that another one is made from."""
    if old is None:
        return None
    if new is None:
        return f"expected {name} to be given with {name}_in, which is only read, got None"
    if old.numel() and old.untyped_storage().data_ptr() == new.untyped_storage().data_ptr():
        return f"expected {name}_in to be in memory of its own, got a part of {name}'s"
    return _state_problem(old, f"{name}_in", new.numel())


def _option_problem(format: str, block: int, rng_state: Tensor | None) -> str | None:
    if format not in FORMATS:
        return f"expected format to be one of {FORMATS}, got {format!r}"
    if block not in (64, 128, 256, 512, 1024):
        return f"expected block to be a power of two from 64 to 1024, got {block}"
    if rng_state is not None and format == "sign":
        return "expected rng_state to be None for signs, which are not rounded, got one"
    if rng_state is not None and (rng_state.dtype != torch.int64 or rng_state.shape != (4,)):
        return (
            f"expected rng_state to be int64 of shape (4,), got {rng_state.dtype} of shape "
            f"{tuple(rng_state.shape)}"
        )
    return None


def _states_problem(states: States, numel: int, size: int, block: int) -> str | None:
    residual, server = states.residual, states.server_residual
    return (
        _state_problem(residual, "residual", numel)
        or _state_problem(server, "server_residual", shard_numel(numel, size, block))
        or _elsewhere_problem(states.residual_in, residual, "residual")
        or _elsewhere_problem(states.server_residual_in, server, "server_residual")
    )


def _finite_problem(x: Tensor, name: str) -> str | None:
    return f"expected {name} to be finite, got NaN or infinity" if non_finite(x) else None


def quantized_all_reduce_(
    x: Tensor,
    *,
    format: str = "int8",
    block: int = 256,
    residual: Tensor | None = None,
    server_residual: Tensor | None = None,
    rng_state: Tensor | None = None,
    residual_in: Tensor | None = None,
    server_residual_in: Tensor | None = None,
    group: ProcessGroup | None = None,
    average: bool = True,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Reduction:
    r"""The mean over ranks, in place, of which only codes travel.

    Every rank quantises its tensor (with ``residual``) and sends each shard to its owner, who adds
    them up in float32, quantises the sum (with ``server_residual``) and sends it to all. On a CPU a
    large shard goes in up to 8 pieces, some of which travel while others are coded. What both
    residuals keep is in units of the sum: :math:`P` times the mean, plus all residuals and server
    residuals, is conserved up to the rounding of float32.

    Args:
        x (Tensor): float32, bfloat16 or float16, contiguous, of any shape; changed in place.
        format (str): "int8", "int4", "fp8" or "sign", see `quantize_blockwise`.
        block (int): elements that share a scale, a power of two from 64 to 1024.
        residual (Tensor[N]): float32, contiguous: what this rank owes; changed in place.
        server_residual (Tensor[M]): float32, of `shard_numel` elements: what the owner of a shard
            owes; changed in place.
        rng_state (Tensor[4]): int64, as `quantize_blockwise`: rounds at random. Its rank must
            differ between ranks for the errors to be independent.
        residual_in (Tensor[N]): what this rank owes is read here, and not changed; ``residual`` is
            only written. No copy has to be made then to put it back after an error.
        server_residual_in (Tensor[M]): the same for ``server_residual``.
        group: the ranks; None is the default group.
        average (bool): divide by P.
        validate (bool): compare the arguments of all ranks first, and look for NaN and infinity.
            False is for layouts that were agreed on, and numbers that were checked: a block that
            holds NaN or infinity comes back as NaN on all ranks, and so do the residuals.
        async_op (bool): return a `Reduction` at once. Nothing may touch the tensors before its end.

    Returns:
        Tensor: x, with the same bits on all ranks; or a `Reduction` of it. A rank alone sends
        nothing and loses nothing: x plus both residuals, which become zero.

    Raises:
        ValueError: on every rank (of the others only with ``validate``): an argument has the wrong
            dtype, shape or value, or differs between ranks; the message names them.
        RankFailureError: a rank died or did not answer; x and what is owed are as they were.

    Deterministic: shards are added in the order of the ranks.

    Reference: Tang et al., 1-bit Adam, 2021 (arXiv 2102.02888), figure 3; Wang et al., ZeRO++, 2023
    (arXiv 2306.10209), section 3.3.
    """
    name = "quantized_all_reduce_"
    ranks = resolve(group, name)
    size, numel = group_size(ranks), x.numel()
    problem = _tensor_problem(x, "x") or _option_problem(format, block, rng_state)
    states = States(residual, server_residual, rng_state, residual_in, server_residual_in)
    problem = problem or _states_problem(states, numel, size, block)
    if problem is None and validate:
        problem = _finite_problem(x, "x")
    facts = {
        "numel": numel,
        "dtype": x.dtype,
        "format": format,
        "block": block,
        "average": average,
        "having a residual": residual is not None,
        "having a server_residual": server_residual is not None,
    }
    check_call(name, facts, problem, ranks, x.device, validate=validate)
    underway = start_all_reduce(x, states, format, block, ranks, average, async_op=async_op)
    return underway if async_op else underway.wait()


def start_all_reduce(
    x: Tensor,
    states: States,
    format: str,
    block: int,
    group: ProcessGroup | None,
    average: bool,
    *,
    async_op: bool = True,
    restores: bool = True,
    on_nonfinite: Callable[[Tensor], None] | None = None,
) -> Reduction:
    """`quantized_all_reduce_` without its checks.

    Args as there, but

        restores: whether an error leaves x and the residuals as they were. Without it x is
            overwritten while some of it is still on its way, and no residual is copied.
        on_nonfinite: called at the end with what holds NaN or infinity: x plus the residual, or
            numbers like it where only a sum over ranks does. Needs both residuals, and a CPU. None
            does not look.
    """
    size, numel, given = group_size(group), x.numel(), states.given()
    if size == 1 or numel == 0:
        for name in ("residual", "server_residual"):
            if name in given and size == 1:
                x.view(-1).add_(given.get(f"{name}_in", given[name])[:numel])
                given[name].zero_()
        if on_nonfinite is not None and non_finite(x):
            on_nonfinite(x)
        return Reduction.done(x)
    shard = shard_numel(numel, size, block)
    plan = _plan_of(x, numel, shard, group, format, block, average, given, restores=restores)
    plan = replace(plan, looks=on_nonfinite is not None)
    inputs = [x.detach().view(-1), *given.values()]

    def finish(found: list[Tensor]) -> Tensor:
        if on_nonfinite is not None and not bool(torch.isfinite(found[1]).all()):
            _find_nonfinite(states, on_nonfinite)
        return x

    found = run(
        all_reduce_stages(plan),
        inputs,
        group,
        "quantized_all_reduce_",
        finish=finish,
        async_op=async_op,
    )
    return found if isinstance(found, Pending) else Reduction.done(found)


def _find_nonfinite(states: States, on_nonfinite: Callable[[Tensor], None]) -> None:
    """Tell what new residuals keep that is not finite, if anything is: sums of scales overflow."""
    owed, of_sum = states.residual, states.server_residual
    assert owed is not None and of_sum is not None
    if non_finite(owed):
        on_nonfinite(owed)
    elif bool(of_sum.isinf().any()):
        # Finite numbers add up to infinity at most; NaN has come from a rank that tells of it.
        on_nonfinite(torch.full_like(owed, torch.inf))


def _plan_of(
    x: Tensor,
    numel: int,
    shard: int,
    group: ProcessGroup | None,
    format: str,
    block: int,
    average: bool,
    given: dict[str, Tensor],
    *,
    restores: bool = True,
) -> Plan:
    """Of numel elements in P shards, the last of which may be shorter."""
    size = group_size(group)
    return Plan(
        numel=numel,
        shard=shard,
        size=size,
        rank=group_rank(group),
        format=format,
        block=block,
        piece=piece_numel(x, shard, format, block),
        chunk=chunk_numel(x),
        divisor=size if average else 1,
        given=tuple(given),
        restores=restores,
    )


def _check_shards(
    name: str, whole: Tensor, shard: Tensor, size: int, names: tuple[str, str]
) -> str | None:
    problem = _tensor_problem(whole, names[0]) or _tensor_problem(shard, names[1])
    if problem is None and whole.numel() != size * shard.numel():
        return (
            f"expected {names[0]} to hold {size} times the {shard.numel()} elements of {names[1]}, "
            f"got {whole.numel()}"
        )
    return problem


def quantized_reduce_scatter(
    output: Tensor,
    input: Tensor,
    *,
    format: str = "int8",
    block: int = 256,
    residual: Tensor | None = None,
    rng_state: Tensor | None = None,
    residual_in: Tensor | None = None,
    group: ProcessGroup | None = None,
    average: bool = True,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Reduction:
    """This rank's shard of the mean over ranks, of which only codes travel.

    The first half of `quantized_all_reduce_`: one quantisation, sum in float32 (ZeRO++ qgZ).

    Args:
        output (Tensor): float32, bfloat16 or float16, contiguous, N / P elements; filled.
        input (Tensor): float32, bfloat16 or float16, contiguous, N elements: shard p is for rank p.
        format (str): as `quantized_all_reduce_`.
        block (int): as `quantized_all_reduce_`; blocks begin anew in each shard.
        residual (Tensor[N]): as `quantized_all_reduce_`.
        rng_state (Tensor[4]): as `quantized_all_reduce_`.
        residual_in (Tensor[N]): as `quantized_all_reduce_`.
        group: as `quantized_all_reduce_`.
        average (bool): as `quantized_all_reduce_`.
        validate (bool): as `quantized_all_reduce_`.
        async_op (bool): as `quantized_all_reduce_`.

    Returns:
        Tensor: output; or a `Reduction` of it. A rank alone copies input plus residual, which
        becomes zero.

    Raises:
        ValueError: as `quantized_all_reduce_`.
        RankFailureError: a rank died or did not answer; output and residual are as they were.

    Deterministic: shards are added in the order of the ranks.
    """
    name = "quantized_reduce_scatter"
    ranks = resolve(group, name)
    size, numel = group_size(ranks), input.numel()
    problem = _check_shards(name, input, output, size, ("input", "output"))
    problem = problem or _option_problem(format, block, rng_state)
    states = States(residual=residual, rng_state=rng_state, residual_in=residual_in)
    problem = problem or _states_problem(states, numel, size, block)
    if problem is None and validate:
        problem = _finite_problem(input, "input")
    facts = {
        "numel": numel,
        "dtype": input.dtype,
        "format": format,
        "block": block,
        "average": average,
        "having a residual": residual is not None,
    }
    check_call(name, facts, problem, ranks, input.device, validate=validate)
    given = states.given()
    if size == 1 or numel == 0:
        output.view(-1).copy_(input.view(-1))
        if residual is not None and size == 1:
            owed = given.get("residual_in", given["residual"])
            output.view(-1).copy_(input.view(-1) + owed)
            residual.zero_()
        return Reduction.done(output) if async_op else output
    plan = _plan_of(input, numel, numel // size, ranks, format, block, average, given)
    inputs = [input.detach().view(-1), output.detach().view(-1), *given.values()]
    stages = reduce_scatter_stages(plan)
    return run(stages, inputs, ranks, name, finish=lambda _: output, async_op=async_op)


def quantized_all_gather(
    output: Tensor,
    input: Tensor,
    *,
    format: str = "int8",
    block: int = 256,
    rng_state: Tensor | None = None,
    group: ProcessGroup | None = None,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Reduction:
    """What all ranks hold, of which only codes travel (ZeRO++ qwZ).

    Args:
        output (Tensor): float32, bfloat16 or float16, contiguous, N elements; filled. Every rank's
            own shard is read from its codes too, so that all hold the same.
        input (Tensor): float32, bfloat16 or float16, contiguous, N / P elements.
        format (str): as `quantized_all_reduce_`.
        block (int): as `quantized_all_reduce_`; blocks begin anew in each shard.
        rng_state (Tensor[4]): as `quantized_all_reduce_`.
        group: as `quantized_all_reduce_`.
        validate (bool): as `quantized_all_reduce_`.
        async_op (bool): as `quantized_all_reduce_`.

    Returns:
        Tensor: output; or a `Reduction` of it. A rank alone copies its input.

    Raises:
        ValueError: as `quantized_all_reduce_`.
        RankFailureError: a rank died or did not answer; output is as it was.

    Deterministic.
    """
    name = "quantized_all_gather"
    ranks = resolve(group, name)
    size, shard = group_size(ranks), input.numel()
    problem = _check_shards(name, output, input, size, ("output", "input"))
    problem = problem or _option_problem(format, block, rng_state)
    if problem is None and validate:
        problem = _finite_problem(input, "input")
    facts = {"numel": output.numel(), "dtype": input.dtype, "format": format, "block": block}
    check_call(name, facts, problem, ranks, input.device, validate=validate)
    if size == 1 or shard == 0:
        output.view(-1).copy_(input.view(-1))
        return Reduction.done(output) if async_op else output
    given = States(rng_state=rng_state).given()
    plan = _plan_of(output, output.numel(), shard, ranks, format, block, False, given)
    inputs = [input.detach().view(-1), output.detach().view(-1), *given.values()]
    stages = all_gather_stages(plan)
    return run(stages, inputs, ranks, name, finish=lambda _: output, async_op=async_op)
