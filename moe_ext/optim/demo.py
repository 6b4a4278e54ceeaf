"""DeMo: each rank keeps its own momentum and sends only its largest cosine coefficients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext._bytes import as_bytes
from moe_ext._checks import check_numbers, check_rule, check_sizes
from moe_ext._compile import outside_graphs
from moe_ext.comm.agreement import Agreement, checksum, is_nonfinite
from moe_ext.comm.collectives import all_reduce_
from moe_ext.comm.groups import group_size, resolve_group
from moe_ext.compression.codecs.chunked import ChunkedTopK
from moe_ext.compression.feedback import CodecMemory, committing
from moe_ext.distributed.dtensor import dtensor_of, is_dtensor, local_part, mesh_of, shard_of
from moe_ext.distributed.gradients import fingerprint
from moe_ext.distributed.state_dict import OF_RANKS
from moe_ext.optim._arguments import (
    CheckedOptimizer,
    divided_within,
    is_own_part,
    loading,
    loss_of,
    saving,
)
from moe_ext.optim._saved_states import by_name

_MARK_BYTES = 8


@dataclass(frozen=True)
class _MarkedTopK(ChunkedTopK):
    """ChunkedTopK with a checksum of the options at the end of each payload.

    Attributes:
        marks: this rank's checksum, then for each decoded payload whether its checksum is equal.
    """

    marks: list[Tensor] = field(default_factory=list, compare=False, repr=False)

    def mark(self, number: int, device: torch.device) -> None:
        """Set the checksum of the next payload."""
        mine = as_bytes(torch.tensor([number], dtype=torch.int64, device=device))
        self.marks[:] = [mine]

    def payload_bytes(self, numel: int) -> int:
        """See `PayloadCodec`."""
        return super().payload_bytes(numel) + _MARK_BYTES

    def encode(
        self,
        x_N: Tensor,
        residual_N: Tensor | None = None,
        *,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        """See `PayloadCodec`."""
        payload = super().encode(x_N, residual_N, rng_state=rng_state)
        return torch.cat([payload, self.marks[0]])

    def decode_add_(self, out_N: Tensor, payload: Tensor) -> None:
        """See `PayloadCodec`."""
        self.marks.append((payload[-_MARK_BYTES:] == self.marks[0]).all())
        super().decode_add_(out_N, payload[:-_MARK_BYTES])


class DeMo(CheckedOptimizer):
    """Sign descent on the largest cosine coefficients of the ranks' own momentums.

    On each rank m <- decay m + g. The k largest coefficients q of the cosine transform of each
    chunk of m are sent and subtracted from m. The step is lr sign(mean of the ranks' q), the same
    on all ranks. Do not average gradients before: train without DDP.

    Args:
        params: parameters or groups of them, the same on all ranks: plain tensors, or experts of
            which the ranks of ``process_group`` hold the same part. Their values are compared by a
            checksum in the first step: seed every rank alike. Frozen parameters do not change.
        lr: learning rate.
        compression_decay: decay of the momentum.
        compression_topk: k, coefficients of a chunk.
        compression_chunk: elements of a chunk, in the order of memory; the paper's chunks of a
            matrix are squares.
        weight_decay: decoupled decay; weights decay by lr times this number.
        process_group: the ranks; None is the default group.

    Raises:
        ValueError: an argument is out of its range, or a step has another number of elements than
            the first step; on every rank: a gradient of any rank is NaN or infinite, or options,
            steps or, at the first step, parameters differ between ranks.
        TypeError: in `step`: a gradient is not dense, or a parameter not real floating-point.

    A step that fails leaves parameters and momentums as they were.

    Reference: Peng, Quesnelle, Kingma, DeMo: Decoupled Momentum Optimization (arXiv 2411.19870).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        compression_decay: float = 0.999,
        compression_topk: int = 8,
        compression_chunk: int = 64,
        weight_decay: float = 0.0,
        process_group: ProcessGroup | None = None,
    ) -> None:
        check_numbers("DeMo", DeMo.__init__.__annotations__, locals())
        check_sizes("DeMo", compression_topk=compression_topk, compression_chunk=compression_chunk)
        self._codec = _MarkedTopK(
            compression_topk, compression_chunk, bits=32, dct=True, decay=compression_decay
        )
        self._group = resolve_group(process_group, "DeMo")
        self._round = 0
        self._memory: CodecMemory | None = None
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        # True once ranks have compared options and parameters, before their first step.
        self._compared = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, which may have its own options; only before the first step."""
        if self._memory is not None:
            raise ValueError(f"{self._op}: expected all groups to be added before the first step")
        super().add_param_group(param_group)

    def _options(self) -> dict[str, object]:
        """Return options that must be equal on all ranks; lists have one value per group."""
        groups = self.param_groups
        return {
            "compression_topk": self._codec.k,
            "compression_chunk": self._codec.chunk,
            "compression_decay": self._codec.decay,
            "lr": [float(group["lr"]) for group in groups],
            "weight_decay": [float(group["weight_decay"]) for group in groups],
            "shapes of params": [
                [tuple(local_part(p).shape) for p in group["params"]] for group in groups
            ],
            "requires_grad of params": [[p.requires_grad for p in g["params"]] for g in groups],
            "the number of the step": self._round,
        }

    def _compare_first(self, options: dict[str, object], device: torch.device) -> None:
        """Compare options before the first step, because the length of payloads depends on them."""
        values = 0
        if group_size(self._group) > 1:
            values = fingerprint([("", local_part(p)) for p in self._parameters()])
        name = "the values of the parameters at the first step (seed every rank alike)"
        Agreement("DeMo", self._group, device).compare({"options": options, name: values})
        self._compared = True

    def _problem_of(self, parameter: Tensor, group: dict[str, Any], name: str) -> str | None:
        if is_own_part(parameter) and not divided_within(parameter, self._group):
            return None
        return (
            "expected plain tensors, or experts in an optimizer of their own with the "
            f"process_group of the ranks that hold the same ones, got a DTensor for {name}"
        )

    def _check_options(self, group: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            check_rule(self._op, name, group[name], "0 or more", group[name] >= 0.0)

    @outside_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step, on all ranks (collective)."""
        loss = loss_of(closure)
        self._trained()  # raises for sparse gradients and for complex or integer parameters
        memory = self._new_memory() if self._memory is None else self._memory
        if memory.numel != sum(local_part(p).numel() for p in self._parameters()):
            raise ValueError(
                f"DeMo.step: expected the {memory.numel} elements of the first step, got others"
            )
        options, device = self._options(), memory.device
        if not self._compared:
            self._compare_first(options, device)
        self._codec.mark(checksum(options), device)
        flat_N = torch.cat([_flat(p, p.grad) for p in self._parameters()])
        with committing(memory):
            mean_N = self._codec.start(flat_N, memory, group=self._group, step=self._round).wait()
            # NOTE: device-to-host sync, here and in `is_nonfinite` below.
            if not all(map(bool, self._codec.marks[1:])):
                Agreement("DeMo", self._group, device).compare({"options": options})
            # NaN counts as the largest coefficient and is sent, so every rank finds it in the mean.
            if is_nonfinite(mean_N):
                self._refuse()
        self._round += 1
        signs = iter(memory.pieces(mean_N.sign_()))
        for group in self.param_groups:
            lr = float(group["lr"])
            for parameter in group["params"]:
                p, sign = local_part(parameter), next(signs)
                if parameter.requires_grad:
                    p.mul_(1.0 - lr * group["weight_decay"])
                    p.add_(sign.to(p.dtype), alpha=-lr)
        return loss

    def _refuse(self) -> None:
        """Raise, on all ranks, with the name of the rank whose gradients are not finite."""
        rule = "expected gradients to be finite"
        with Agreement("DeMo.step", self._group) as agreement:
            for p, _, name in self._named():
                if p.grad is not None and is_nonfinite(local_part(p.grad)):
                    raise ValueError(f"DeMo.step: {rule}, got NaN or infinity in {name}")
            agreement.compare({})
        raise ValueError(f"DeMo.step: {rule}, got momentums that overflow float32")

    @saving
    def state_dict(self) -> dict[str, Any]:
        """Return the state with this rank's momentum, which differs between ranks.

        `moe_ext.distributed.checkpoint` saves each rank's momentum, and the mean of all.
        """
        memory = self._memory
        owed = {} if memory is None else {kind: memory.copy_of(kind) for kind in memory.kinds()}
        return {**super().state_dict(), "momentum": owed, "round": self._round}

    @loading
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of this rank.

        Raises:
            ValueError: the state lacks the momentum, or has options that DeMo does not know.
        """
        state = dict(state_dict)
        if not {"momentum", "round"} <= state.keys():
            raise ValueError(
                "DeMo: expected a state with this rank's momentum and round, got one without, as "
                "torch's get_optimizer_state_dict makes it; save state_dict() on every rank, or "
                "moe_ext.distributed.checkpoint"
            )
        owed, rounds = state.pop("momentum"), state.pop("round")
        saved = by_name(self._op, self.param_groups, state)
        super().load_state_dict(saved)
        if saved is not state:  # the names are in another order
            names, there = _names(self.param_groups), _names(state["param_groups"])
            sizes = dict(
                zip(names, (local_part(p).numel() for p in self._parameters()), strict=True)
            )
            lengths, places = [sizes[name] for name in there], [there.index(n) for n in names]
            owed = {
                kind: torch.cat([row_N.split(lengths)[place] for place in places])
                for kind, row_N in owed.items()
            }
        self._round = rounds
        self._new_memory().take(owed)

    def _new_memory(self) -> CodecMemory:
        trained = [local_part(p) for p in self._parameters()]
        self._memory = CodecMemory([p.shape for p in trained], trained[0].device)
        return self._memory

    def checkpoint_state(self) -> tuple[dict[nn.Parameter, dict[str, Any]], dict[str, int]]:
        """Return all ranks' momentums and their mean by parameter, and the round; collective."""
        found: dict[nn.Parameter, dict[str, Any]] = {p: {} for p in self._parameters()}
        memory = self._memory
        owed_N = None if memory is None else memory.whole("residual")
        if memory is not None and owed_N is not None:
            mean_N = all_reduce_(owed_N.clone(), self._group, operation="DeMo")
            mean_N.div_(group_size(self._group))
            pieces = zip(memory.pieces(mean_N), memory.pieces(owed_N), strict=True)
            for (p, state), (mean, own) in zip(found.items(), pieces, strict=True):
                state["momentum"] = mean
                state.update(self._of_ranks(p, own))
        return found, {"round": self._round}

    def _of_ranks(self, parameter: Tensor, own: Tensor) -> dict[str, Tensor]:
        """Make a DTensor of all ranks' momentums for a parameter, from this rank's momentum.

        The result is empty for experts over ranks: only the mean over their copies is saved.
        """
        group = self._group
        if group is None or group_size(group) == 1 or is_dtensor(parameter):
            return {}
        shape = torch.Size([group_size(group), *own.shape])
        mesh = mesh_of(group, own.device, ("ranks",))
        whole = dtensor_of(own.unsqueeze(0), mesh, [shard_of(0, 1)], shape)
        return {f"momentum{OF_RANKS}": whole}

    def tensors_to_load(self, owing: bool) -> tuple[dict[nn.Parameter, dict[str, Any]], object]:
        """Return zeros to read this rank's momentum into, from a checkpoint of as many ranks."""
        zeros = {
            p: torch.zeros_like(local_part(p), dtype=torch.float32) for p in self._parameters()
        }
        return {p: self._of_ranks(p, own) for p, own in zeros.items()}, None

    def load_checkpoint_state(
        self,
        states: dict[nn.Parameter, dict[str, Any]],
        counters: Mapping[str, int],
        holders: object = None,
    ) -> None:
        """Continue from the result of `checkpoint_state`.

        Each rank gets its own momentum if the number of ranks is the same, otherwise the mean.
        """
        self._round, memory = counters.get("round", 0), self._new_memory()
        if any("momentum" in state for state in states.values()):
            owed = []
            for p in self._parameters():
                state = states.get(p, {})
                own = state.get(f"momentum{OF_RANKS}", state.get("momentum"))
                owed.append(_flat(p, own))
            memory.put("residual", torch.cat(owed))


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for group in groups for name in group["param_names"]]


def _flat(parameter: Tensor, value: Tensor | None) -> Tensor:
    """Flatten this rank's part of a parameter's tensor in float32; None stands for zeros."""
    part = local_part(parameter)
    return (torch.zeros_like(part) if value is None else local_part(value)).float().flatten()
