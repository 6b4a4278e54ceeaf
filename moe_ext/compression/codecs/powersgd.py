"""PowerSGD as a codec: runs torch's DDP hook, with residual and Q in the codec's memory.

Shape suffixes: N elements of a flat gradient, B matrices of one shape, n by m, r their rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from moe_ext._checks import check_numbers_of_fields, check_rule
from moe_ext.comm.collectives import all_reduce_bytes
from moe_ext.comm.failures import naming_failed_ranks
from moe_ext.comm.groups import group_size
from moe_ext.comm.pending import Pending
from moe_ext.comm.traffic import record_traffic
from moe_ext.compression.codecs.base import Calls, Codec, StartOptions
from moe_ext.compression.feedback import CodecMemory

_FACTORS = "powersgd"


class _Matrices(NamedTuple):
    """Matrices of one shape that are factored together."""

    batch: int
    rows: int
    cols: int
    rank: int


@dataclass(frozen=True)
class PowerSGD(Codec):
    r"""Low-rank factors of matrices, with error feedback and warm start.

    Each matrix :math:`M = g + e` is sent as :math:`P Q^T`. :math:`P = M Q` is summed over ranks and
    orthogonalised. :math:`Q = M^T P` is averaged, and the next step starts from it. The residual
    keeps :math:`e = M - P Q^T`. Stacked experts ``[E, n, m]`` are factored one by one (batched);
    other parameters of more than two dimensions are flattened to ``[n, all others]``. A parameter
    that is too small for a gain of ``min_compression_rate`` is reduced densely in the same step.

    The algorithm is `torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`. Residual and Q are
    kept by parameter name, as for other codecs: DDP may rebuild its buckets, a step that fails
    leaves both unchanged, and the `state_dict` holds both. Torch's ``start_powerSGD_iter`` is
    therefore not needed; a warm-up of the state replaces it. A column of Q that has become zero,
    because no token reached an expert for a step, starts anew from random numbers; otherwise it
    would stay zero for ever. All columns start anew if the rank r has changed.

    On CPU `start` waits for the result, because torch's hook waits for one message in the callback
    of another. With two buckets at a time this would block all of Gloo's threads.

    Args:
        rank: r, columns of P and Q; 1 to 4 for image models, up to 32 for transformers.
        min_compression_rate: a matrix is factored if n m is larger than (n + m) r times this rate.
        warm_start: start from the last Q, not from random numbers.
        feedback: keep the error in the residual.
        epsilon: added to the norm by which a column is divided, for ranks r up to 2.
        seed: seed of the random numbers.

    Raises:
        ValueError: a number is out of its range.

    Deterministic, with the same bits on all ranks.

    Reference: Vogels et al., PowerSGD, 2019 (arXiv 1905.13727).
    """

    name: ClassVar[str] = "powersgd"
    shardable: ClassVar[bool] = False

    rank: int = 4
    min_compression_rate: float = 2.0
    warm_start: bool = True
    feedback: bool = True
    epsilon: float = 1e-8
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a number out of its range."""
        check_numbers_of_fields(self)
        rate, epsilon = self.min_compression_rate, self.epsilon
        check_rule("PowerSGD", "rank", self.rank, "at least 1", self.rank >= 1)
        check_rule("PowerSGD", "min_compression_rate", rate, "at least 1", rate >= 1.0)
        fits = epsilon > 0.0 and math.isfinite(epsilon)
        check_rule("PowerSGD", "epsilon", epsilon, "above 0 and finite", fits)

    @property
    def feeds_back(self) -> bool:
        """See `Codec`."""
        return self.feedback

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`; an estimate, as if the gradient were one square matrix."""
        side = math.isqrt(max(numel, 1))
        coded = 2 * side * min(self.rank, side)
        sent = coded if coded * self.min_compression_rate < numel else numel
        return all_reduce_bytes(4 * sent, world_size)

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`: all-reduces of the dense parameters, of P and of Q follow each other."""
        return 6 * (world_size - 1)

    def matrices_of(self, shapes: Sequence[torch.Size]) -> list[tuple[int, ...]]:
        """Return the matrices into which parameters are split: ``(n, m)``, or ``(n,)`` if dense."""
        found: list[tuple[int, ...]] = []
        for shape in shapes:
            found += [self._matrix(part) for part in self._parts(shape)]
        return found

    def _start(self, grad_N: Tensor, memory: CodecMemory, how: StartOptions) -> Pending[Tensor]:
        """See `Codec`. The result has the dtype of the gradient."""
        group, size = how.group, group_size(how.group)
        x_N = grad_N.reshape(-1).float()
        residual_N = memory.whole_residual() if self.feedback else None
        if (size == 1 or not self.feedback) and memory.has("residual"):
            # The residual is sent once and cleared. One rank loses nothing, and without feedback
            # the residual stems from another codec.
            owed_N = memory.whole_residual()
            x_N = x_N + owed_N
            owed_N.zero_()
        if size == 1:
            return Pending.done(x_N.to(grad_N.dtype))
        plan = self._plan(memory.shapes)
        state, warm = self._state(plan, memory, group, how.step)
        if residual_N is not None:
            state.error_dict[0] = residual_N
        self._record(plan, x_N, size)
        views = self._views(memory.pieces(x_N))
        # `bucket` stands in for a DDP bucket: it has the methods that torch's hook calls. The hook
        # needs `is_last` for its statistics only.
        bucket: Any = SimpleNamespace(
            buffer=lambda: x_N, gradients=lambda: views, index=lambda: 0, is_last=lambda: False
        )

        def finish(found: Any) -> Tensor:
            reduced_N: Tensor = found
            if residual_N is not None:
                residual_N.copy_(state.error_dict[0])
                # For dense parameters torch stores the difference between this rank's gradient and
                # the mean. Nothing was left out of that mean, so the residual is zero.
                for view in self._views(memory.pieces(residual_N)):
                    if view.dim() == 1:
                        view.zero_()
            if warm is not None:
                warm.copy_(state.q_memory_dict[0])
            if not how.average:
                reduced_N = reduced_N * size
            return reduced_N.to(grad_N.dtype)

        with naming_failed_ranks(group, "PowerSGD"):
            reduction = Pending(powerSGD_hook(state, bucket), finish, group, "PowerSGD")
        if x_N.device.type == "cpu":
            reduction.wait()
        return reduction

    def passes(self, world_size: int) -> tuple[float, float]:
        """See `Codec`: factors are multiplied once for the result, and once for the residual."""
        return 1.0, 2.0

    def rehearsal(self, grad_N: Tensor, memory: CodecMemory) -> Calls:
        """See `Codec`."""

        def encode() -> list[tuple[Tensor, Tensor]]:
            views, found = self._views(memory.pieces(grad_N.float())), []
            for count, rows, cols, rank in self._plan(memory.shapes):
                m_Bnm = torch.stack([view for view in views if view.shape == (rows, cols)])
                q_Bmr = torch.linalg.qr(m_Bnm.new_ones((count, cols, rank)))[0]
                p_Bnr = torch.linalg.qr(m_Bnm @ q_Bmr)[0]
                found.append((p_Bnr, p_Bnr.transpose(1, 2) @ m_Bnm))
            return found

        factors = encode()
        return encode, lambda: [p_Bnr @ q_Brm for p_Bnr, q_Brm in factors]

    def _gains(self, rows: int, cols: int) -> bool:
        rank = min(rows, cols, self.rank)
        return (rows + cols) * rank * self.min_compression_rate < rows * cols

    def _matrix(self, shape: torch.Size) -> tuple[int, ...]:
        cols = math.prod(shape[1:])
        if len(shape) > 1 and self._gains(shape[0], cols):
            return (shape[0], cols)
        return (math.prod(shape),)

    def _parts(self, shape: torch.Size) -> list[torch.Size]:
        """Return the shape of a parameter, or the shapes of the experts that it stacks."""
        if len(shape) == 3 and self._gains(shape[1], shape[2]):
            return [torch.Size(shape[1:])] * shape[0]
        return [shape]

    def _views(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        for piece in pieces:
            parts = self._parts(piece.shape)
            views = list(piece.unbind(0)) if len(parts) > 1 or parts[0] != piece.shape else [piece]
            found += [view.view(self._matrix(view.shape)) for view in views if view.numel()]
        return found

    def _plan(self, shapes: Sequence[torch.Size]) -> list[_Matrices]:
        """Return the matrices that are factored, grouped by shape in the order of torch's hook."""
        counts: dict[tuple[int, ...], int] = {}
        for shape in self.matrices_of(shapes):
            if len(shape) == 2:
                counts[shape] = counts.get(shape, 0) + 1
        return [_Matrices(c, n, m, min(n, m, self.rank)) for (n, m), c in counts.items()]

    def _state(
        self, plan: list[_Matrices], memory: CodecMemory, group: ProcessGroup | None, step: int
    ) -> tuple[_State, Tensor | None]:
        """Return the hook's state, and the tensor that keeps Q for the next step."""
        state = _State(self, group, step)
        numel = sum(count * cols * rank for count, _, cols, rank in plan)
        if not self.warm_start or numel == 0:
            return state, None
        is_first = not memory.has(_FACTORS)
        warm = memory.tensor(_FACTORS, numel)
        if warm.numel() != numel:
            # The rank r has changed, by a cost model or by a loaded state.
            is_first, warm = True, memory.fresh(_FACTORS, numel)
        if not is_first:
            generator = torch.Generator().manual_seed(state.rng.randint(1_000_000_000))
            state.q_memory_dict[0] = _without_zero_columns(warm, plan, generator)
            rows = sum(count * rows * rank for count, rows, _, rank in plan)
            state.p_memory_dict[0] = warm.new_empty(rows)
        return state, warm

    def _record(self, plan: list[_Matrices], x_N: Tensor, size: int) -> None:
        coded = sum(count * rows * cols for count, rows, cols, _ in plan)
        for numel in (
            x_N.numel() - coded,
            sum(count * rows * rank for count, rows, _, rank in plan),
            sum(count * cols * rank for count, _, cols, rank in plan),
        ):
            record_traffic("all_reduce", all_reduce_bytes(4 * numel, size))


def _without_zero_columns(
    warm: Tensor, plan: list[_Matrices], generator: torch.Generator
) -> Tensor:
    """Copy all Qs, with random numbers in columns of zeros; no host synchronisation."""
    found, start = [], 0
    for count, _, cols, rank in plan:
        numel = count * cols * rank
        q_Bmr = warm[start : start + numel].view(count, cols, rank)
        drawn_Bmr = torch.randn(q_Bmr.shape, generator=generator, dtype=warm.dtype, device="cpu")
        random_Bmr = drawn_Bmr.to(warm.device)
        is_zero_B1r = (q_Bmr == 0).all(dim=1, keepdim=True)
        found.append(torch.where(is_zero_B1r, random_Bmr, q_Bmr).view(-1))
        start += numel
    return torch.cat(found)


class _Numbers:
    """Stands in for the numpy generator from which torch's hook draws seeds; numpy is optional."""

    def __init__(self, seed: int, step: int) -> None:
        self._generator = torch.Generator().manual_seed((int(seed) << 32) + step + 1)

    def randint(self, high: int) -> int:
        """Draw a number in [0, high)."""
        return int(torch.randint(high, (), generator=self._generator, device="cpu"))


class _State(PowerSGDState):
    """State of torch's hook for one call. The codec's memory keeps residual and Q between calls."""

    def __init__(self, codec: PowerSGD, group: ProcessGroup | None, step: int) -> None:
        self.process_group = group
        self.matrix_approximation_rank = codec.rank
        self.start_powerSGD_iter = 0
        self.min_compression_rate = codec.min_compression_rate
        self.use_error_feedback = codec.feedback
        # `PowerSGD._state` decides if the hook starts from the last Q. With False here, the hook
        # would clear `q_memory_dict`, from which `finish` reads Q.
        self.warm_start = True
        self.orthogonalization_epsilon = codec.epsilon
        self.batch_tensors_with_same_shape = True
        self.rng: Any = _Numbers(codec.seed, step)
        self.error_dict: dict[int, Tensor] = {}
        self.p_memory_dict: dict[int, Tensor] = {}
        self.q_memory_dict: dict[int, Tensor] = {}
        self.iter = 1
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.compression_stats_logging_frequency = 1
        self.next_stats_report = 0
