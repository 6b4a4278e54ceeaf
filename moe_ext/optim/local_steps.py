"""Local steps for slow links: workers train alone and average their progress at intervals.

An inner optimizer takes `sync_every` steps on each worker. Then an outer optimizer takes one step
on the pseudo-gradient, the mean over workers of (weights at the last round - weights now).

Shape suffixes: N elements of a message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer

from moe_ext._checks import check_kind, check_numbers, check_rule
from moe_ext._compile import outside_graphs
from moe_ext.comm.agreement import Agreement, checksum, is_nonfinite
from moe_ext.comm.groups import (
    group_rank,
    group_ranks,
    group_size,
    resolve_group,
    small_message_device,
)
from moe_ext.comm.pending import Pending
from moe_ext.compression.codecs import Codec, PayloadCodec, codec_of
from moe_ext.compression.codecs.chunked import ChunkedTopK
from moe_ext.compression.feedback import CodecMemory
from moe_ext.distributed.dtensor import is_dtensor, local_part, with_local
from moe_ext.distributed.gradients import fingerprint, let_differ
from moe_ext.distributed.placement import Placement, placements
from moe_ext.distributed.replicas import replica_group
from moe_ext.distributed.state_dict import unwrapped
from moe_ext.optim._arguments import divided_within
from moe_ext.optim.muon import Muon

# Bits of an option's checksum in a manager's all-reduce, by which replica groups compare it.
_MARK_BITS = 16


class Manager(Protocol):
    """Methods of `torchft.Manager` that are called here."""

    def allreduce(self, tensor: Tensor) -> Any:
        """Replace a tensor by the mean over the replica groups that take part."""

    def start_quorum(self) -> None:
        """Begin a round with the replica groups that are alive."""

    def should_commit(self) -> bool:
        """Return True if no rank of the round had an error."""


class _Part:
    """Parameters of a fragment that are averaged over the same ranks."""

    def __init__(self, named: dict[str, nn.Parameter], group: ProcessGroup | None, key: int):
        self.names, parameters = list(named), list(named.values())
        self.parameters, self.group = parameters, group
        self.original = [local_part(p.detach()).clone() for p in parameters]
        shapes = [x.shape for x in self.original]
        self.memory = CodecMemory(shapes, self.original[0].device, key=key)
        self.pending: Pending[Tensor] | None = None

    def pairs(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Pair each parameter with its weights at the last round."""
        return list(zip(self.parameters, self.original, strict=True))

    def delta(self) -> Tensor:
        """Return the weights at the last round minus the weights now, flat."""
        pairs = [(local_part(p), x) for p, x in self.pairs()]
        return torch.cat([(x.to(p.device).float() - p.float()).flatten() for p, x in pairs])


class _Fragment:
    """Part of a model with its own outer optimizer."""

    def __init__(self, parts: list[_Part], outer: Optimizer) -> None:
        self.parts, self.outer = parts, outer
        self.underway = False

    def drop_round(self) -> None:
        """Drop the message of a round that failed, and restore the residuals from before it."""
        for part in self.parts:
            part.memory.rollback()
            part.pending = None
        self.underway = False


class DiLoCo:
    """Inner steps on each worker, and an outer step on the mean of their progress (DiLoCo).

    ::

        inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with DiLoCo(None, [model], inner, outer, sync_every=100):
            for batch in batches:
                inner.zero_grad()
                loss(model, batch).backward()
                inner.step()               # each 100th one ends a round

    Names and order of the arguments are torchft's. Several fragments each have a round of
    `sync_every` steps, at different times (streaming DiLoCo). A fragment is sent as one message
    during the next `fragment_sync_delay` inner steps.

    Experts or columns that lie over the ranks of the group itself (DTensors) are averaged over the
    ranks that hold the same experts or columns. If only one rank holds them, only the inner
    optimizer trains them. Experts over ranks outside of the group are averaged like all other
    parameters, because each island of workers holds all experts.

    Args:
        manager: the workers: a process group, None for the default group, or a `torchft.Manager`
            over replica groups, whose rounds continue without a group that died. A manager sends
            dense numbers, so a codec only rounds them and saves no bytes.
        model_fragments: modules. Parameters of no fragment are left to the inner optimizer.
            Parameters of several fragments, such as tied weights, belong to the first. With a
            process group the initial weights are compared by a checksum: seed every worker alike.
            A manager copies weights to a new replica group, as torchft does. If all workers freeze
            a parameter later, it stays fixed after its steps so far are averaged.
        inner_optimizer: optimizer whose steps are counted. Workers may have different ones, with
            other options.
        outer_optimizer: optimizer of the fragment's parameters, or a list with one per fragment.
            Its options are compared in every round, with those of this object.
        sync_every: inner steps of a round; a multiple of the number of fragments.
        backup_device: device where the weights of the last round are kept; None is that of the
            model.
        pin_memory: argument of torchft; without effect.
        use_bucketization: argument of torchft; a fragment is one message in any case.
        bucket_cap_mb: argument of torchft; without effect.
        should_quantize: `codec="int8"`.
        fragment_sync_delay: inner steps between the beginning and the end of a message.
        fragment_update_alpha: share of a worker's own weights in the weights after a round, in
            [0, 1].
        codec: codec of `moe_ext.compression`, by name or object. Its residual is added in the next
            round.

    Attributes:
        round: number of rounds that have ended.

    Raises:
        ValueError: an argument is out of its range, or differs between workers; by the inner step
            that ends a round, on every worker: weights of any of them are NaN or infinite.
        TypeError: a parameter is not real floating-point.

    A round fails if a rank died, if weights are not finite or if a manager does not commit. The
    residuals are then as before the round. With a process group the weights stay those of the inner
    optimizer; with a manager they return to those of the last round, as in torchft. A round that
    could not begin is tried again after the next inner step.

    Reference: Douillard et al., DiLoCo (arXiv 2311.08105); Streaming DiLoCo (arXiv 2501.18512).
    """

    def __init__(
        self,
        manager: Manager | ProcessGroup | None,
        model_fragments: Sequence[nn.Module],
        inner_optimizer: Optimizer,
        outer_optimizer: Optimizer | Sequence[Optimizer],
        sync_every: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        use_bucketization: bool = False,
        bucket_cap_mb: int | None = None,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        *,
        codec: str | Codec = "none",
    ) -> None:
        check_numbers(
            type(self).__name__, DiLoCo.__init__.__annotations__, locals(), ["bucket_cap_mb"]
        )
        owner, fragments = type(self).__name__, list(model_fragments)
        if isinstance(outer_optimizer, Optimizer):
            outer_optimizer = [outer_optimizer]
        outers = list(outer_optimizer)
        for module in fragments:
            check_kind(owner, "model_fragments", module, nn.Module, required=True)
        for optimizer in outers:
            check_kind(owner, "outer_optimizer", optimizer, Optimizer, required=True)
        check_kind(owner, "inner_optimizer", inner_optimizer, Optimizer, required=True)
        # The wrappers of Accelerate run no step hooks of their own and skip some steps, so the hook
        # that counts steps goes to the optimizer inside.
        inner_optimizer = unwrapped(inner_optimizer, owner)
        outers = [unwrapped(optimizer, owner) for optimizer in outers]
        check_kind(owner, "backup_device", backup_device, torch.device)
        count, delay, alpha = len(fragments), fragment_sync_delay, fragment_update_alpha
        steps, rest = divmod(sync_every, max(count, 1))
        multiple = f"a positive multiple of the {count} fragments"
        for name, value, fits, rule in (
            ("model_fragments", count, count > 0, "one or more modules"),
            ("outer_optimizer", len(outers), len(outers) == count, "one a fragment"),
            ("sync_every", sync_every, steps > 0 and rest == 0, multiple),
            ("fragment_sync_delay", delay, 0 <= delay < max(steps, 1), f"in [0, {steps})"),
            ("fragment_update_alpha", alpha, 0.0 <= alpha <= 1.0, "in [0, 1]"),
        ):
            check_rule(owner, name, value, rule, fits)
        self._codec = codec_of("int8" if should_quantize else codec, owner=owner)
        self._manager: Manager | None = None
        self._group: ProcessGroup | None = None
        if manager is None or isinstance(manager, ProcessGroup):
            self._group = resolve_group(manager, owner)
        elif hasattr(manager, "allreduce") and hasattr(manager, "should_commit"):
            self._manager = manager
        else:
            raise TypeError(
                f"{owner}: expected manager to be a process group, a torchft.Manager or None, got "
                f"{type(manager).__name__}"
            )
        self._steps, self._delay = steps, delay
        self._alpha, self._inner = alpha, inner_optimizer
        self.round, self._local_step = 0, 0
        self._fragments = []
        # Parameters that are not averaged, because they were frozen at the start.
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._seen: set[nn.Parameter] = set()
        for module, outer in zip(fragments, outers, strict=True):
            parts = self._parts(module, backup_device)
            wanted = {id(p) for part in parts for p in part.parameters}
            held = {id(p) for group in outer.param_groups for p in group["params"]}
            if not wanted <= held:
                raise ValueError(
                    f"{owner}: expected outer_optimizer to hold the parameters of its fragment, "
                    f"got one without {len(wanted - held)} of {len(wanted)}"
                )
            self._fragments.append(_Fragment(parts, outer))
            let_differ(module.parameters())
        self._hook: Any = None
        self._check_alike()

    def _parts(self, module: nn.Module, backup: torch.device | None) -> list[_Part]:
        """Split trained parameters, of no earlier fragment, by the ranks that average them."""
        found: dict[ProcessGroup | None, dict[str, nn.Parameter]] = defaultdict(dict)
        places = placements(module)
        for name, parameter in module.named_parameters():
            if parameter in self._seen:
                continue
            self._seen.add(parameter)
            if not parameter.requires_grad:
                self._frozen.append((name, parameter))
                continue
            if not parameter.is_floating_point():
                raise TypeError(
                    f"{type(self).__name__}: expected parameters to be real floating-point "
                    f"tensors, got {parameter.dtype} for {name}"
                )
            group = self._group
            if divided_within(parameter, group):
                assert group is not None
                group = self._holders(name, parameter, places.get(name), group)
                if group is None:
                    continue
            found[group][name] = parameter
        parts = [_Part(named, group, key) for key, (group, named) in enumerate(found.items())]
        if backup is not None:
            for part in parts:
                part.original = [x.to(backup) for x in part.original]
        return parts

    def _holders(
        self, name: str, parameter: Tensor, place: Placement | None, workers: ProcessGroup
    ) -> ProcessGroup | None:
        """Return the workers with the same part of a divided parameter; None if only this one."""
        assert is_dtensor(parameter)
        owner, mesh = type(self).__name__, parameter.device_mesh
        if place is None and mesh.ndim == 1:
            divides: ProcessGroup | None = mesh.get_group()
        else:
            divides = None if place is None or place.is_managed(parameter) else place.group
        if divides is None:
            raise ValueError(
                f"{owner}: expected the parts of {name}, which FSDP2 divides, to lie on one worker "
                f"each, got several on {sorted(group_ranks(workers))}"
            )
        group = replica_group(divides, small_message_device(workers))
        if group is not None and not {*group_ranks(group)} <= {*group_ranks(workers)}:
            raise ValueError(
                f"{owner}: expected the ranks that hold the experts {name} to be workers, got "
                f"{sorted(group_ranks(group))}"
            )
        return group

    def _check_alike(self) -> None:
        """Compare options and initial weights before the first round."""
        if self._group is None:
            return
        parts = [part for fragment in self._fragments for part in fragment.parts]
        # Experts over ranks are compared among the ranks that hold the same experts.
        for group in dict.fromkeys([self._group, *(part.group for part in parts)]):
            values = [x for part in parts if part.group is group for x in part.original]
            facts = {
                "options": self._options(),
                "elements": sum(x.numel() for x in values),
                "the values of the parameters at first (seed every worker alike)": fingerprint(
                    [("", x) for x in values]
                ),
            }
            Agreement(type(self).__name__, group).compare(facts)

    def _options(self) -> dict[str, object]:
        """Return options that must be equal on all workers in a round, by name."""
        outers = [fragment.outer for fragment in self._fragments]
        parts = [part for fragment in self._fragments for part in fragment.parts]
        named = [each for part in parts for each in zip(part.names, part.parameters, strict=True)]
        found: dict[str, object] = {
            "codec": self._codec,
            "model_fragments": len(outers),
            "sync_every": self._steps * len(outers),
            "fragment_sync_delay": self._delay,
            "fragment_update_alpha": self._alpha,
            "outer_optimizer": [type(outer).__name__ for outer in outers],
            "parameters that are frozen by now": [n for n, p in named if not p.requires_grad],
        }
        groups = [group for outer in outers for group in outer.param_groups]
        for name in dict.fromkeys(name for group in groups for name in group if name != "params"):
            found[f"{name} of outer_optimizer"] = [group.get(name) for group in groups]
        return found

    def _find_unfrozen(self) -> str | None:
        """Return the error text for a parameter that was frozen at the start and is trained now."""
        found = [name for name, parameter in self._frozen if parameter.requires_grad]
        if not found:
            return None
        return (
            "expected parameters to require gradients from the start, since others are not "
            f"averaged, got a later one for {found[0]}; make the optimizer anew"
        )

    # -- rounds ------------------------------------------------------------------------------

    def __enter__(self) -> DiLoCo:
        self._hook = self._inner.register_step_post_hook(lambda *_: self._count())
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    @outside_graphs
    def _count(self) -> None:
        """Count an inner step; begin or end a round if it is due."""
        self._local_step += 1
        fragment = self._fragments[self.round % len(self._fragments)]
        # The comparison is `>=`, so that a beginning that failed is repeated after the next step.
        if self._local_step >= self._steps - self._delay and not fragment.underway:
            self._start(fragment)
        if self._local_step >= self._steps:
            self._local_step = 0
            self._finish(fragment)

    @torch.no_grad()
    def _start(self, fragment: _Fragment) -> None:
        owner, unfrozen = type(self).__name__, self._find_unfrozen()
        if self._manager is not None:
            if unfrozen is not None:
                raise ValueError(f"{owner}: {unfrozen}")
            self._manager.start_quorum()
        deltas = [part.delta() for part in fragment.parts]
        problem = self._find_nonfinite(fragment, deltas)
        if self._manager is None:
            facts = {
                "the round": self.round,
                "the inner steps in it": self._local_step,
                "options": self._options(),
            }
            Agreement(owner, self._group).compare(facts, problem=unfrozen or problem)
        elif problem is not None:
            # A manager has no message for an error. NaN in the mean tells all groups of it.
            for delta_N in deltas:
                delta_N.fill_(torch.nan)
        try:
            for part, delta_N in zip(fragment.parts, deltas, strict=True):
                part.memory.begin()
                if self._manager is not None:
                    marks_N = self._marks(delta_N) if part is fragment.parts[0] else delta_N[:0]
                    part.pending = self._by_manager(part, delta_N, marks_N)
                elif part.group is None or group_size(part.group) == 1:
                    part.pending = Pending.done(delta_N)
                else:
                    part.pending = self._codec.start(
                        delta_N, part.memory, group=part.group, step=self.round
                    )
        except BaseException:
            fragment.drop_round()
            raise
        fragment.underway = True

    def _find_nonfinite(self, fragment: _Fragment, deltas: list[Tensor]) -> str | None:
        """Return the error text for weights that are not finite; None if all are finite."""
        for part, delta_N in zip(fragment.parts, deltas, strict=True):
            if not is_nonfinite(delta_N):
                continue
            named = zip(part.names, part.memory.pieces(delta_N), strict=True)
            bad = [name for name, piece in named if is_nonfinite(piece)]
            return f"expected weights to be finite, got NaN or infinity in {bad[0]}"
        return None

    def _options_of_manager(self) -> dict[str, object]:
        """Return the options, with those of all outer optimizers in one entry."""
        options = self._options()
        outer = {name: options.pop(name) for name in [*options] if "outer_optimizer" in name}
        return {**options, "the options of outer_optimizer": outer}

    def _marks(self, like: Tensor) -> Tensor:
        """Return bits of the options' checksums; a mean between 0 and 1 shows a difference."""
        numbers = [checksum({name: value}) for name, value in self._options_of_manager().items()]
        bits = [number >> bit & 1 for number in numbers for bit in range(_MARK_BITS)]
        return torch.tensor(bits, dtype=like.dtype, device=like.device)

    def _find_other_option(self, marks_N: Tensor) -> str | None:
        """Return the error text for an option that differs between replica groups, or None."""
        # NOTE: device-to-host sync, after that of the check of the means.
        bits = marks_N.tolist()
        for i, (name, value) in enumerate(self._options_of_manager().items()):
            if not {0.0, 1.0}.issuperset(bits[i * _MARK_BITS : (i + 1) * _MARK_BITS]):
                return f"expected {name} to be equal in every replica group, got {value} in this"
        return None

    def _by_manager(self, part: _Part, delta_N: Tensor, marks_N: Tensor) -> Pending[Tensor]:
        """Start a manager's all-reduce of rounded numbers and marks; both come uncompressed."""
        assert self._manager is not None
        if isinstance(self._codec, PayloadCodec):
            rng_state = part.memory.rng_state(self.round, 0) if self._codec.stochastic else None
            owed_N = part.memory.whole_residual() if self._codec.feeds_back else None
            coding = self._codec.coding()
            payload = coding.encode(delta_N, owed_N, rng_state=rng_state)
            delta_N = torch.zeros_like(delta_N)
            coding.decode_add_(delta_N, payload)
        sent_N = torch.cat([delta_N, marks_N])
        work = self._manager.allreduce(sent_N)

        def finish(_: object) -> Tensor:
            work.wait()
            return sent_N

        return Pending.done(None).then(finish)

    @torch.no_grad()
    def _finish(self, fragment: _Fragment) -> None:
        manager = self._manager
        try:
            means = [part.pending.wait() for part in fragment.parts if part.pending is not None]
            marks_N = torch.empty(0)
            if manager is not None and means:
                length = fragment.parts[0].memory.numel
                means[0], marks_N = means[0][:length], means[0][length:]
            found = self._find_nonfinite(fragment, means)
            if found is None and len(marks_N):
                found = self._find_other_option(marks_N)
            error = None if found is None else ValueError(f"{type(self).__name__}: {found}")
            if error is not None and manager is None:
                raise error
        except BaseException:
            fragment.drop_round()
            raise
        fragment.underway = False
        averaged = [each for part in fragment.parts for each in part.pairs()]
        local = [local_part(p).clone() for p, _ in averaged]
        for p, x in averaged:
            local_part(p).copy_(x)
        if manager is not None:
            if error is not None and hasattr(manager, "report_error"):
                manager.report_error(error)
            if not manager.should_commit() or error is not None:
                fragment.drop_round()
                if error is not None:
                    raise error
                return
        # The outer optimizer may also hold parameters that are not averaged, such as experts that
        # no other rank has. Their gradients are set aside, because they belong to inner steps.
        held = [p for group in fragment.outer.param_groups for p in group["params"]]
        grads = [p.grad for p in held]
        for p in held:
            p.grad = None
        for part, mean_N in zip(fragment.parts, means, strict=True):
            for p, mean in zip(part.parameters, part.memory.pieces(mean_N), strict=True):
                mean = mean.to(local_part(p))
                if p.requires_grad:
                    p.grad = with_local(p, mean)
                else:
                    # The parameter was frozen in this round. The mean of its steps so far is
                    # applied directly, because outer momentum would move it in later rounds too.
                    local_part(p).sub_(mean)
        stepped = False
        try:
            fragment.outer.step()
            stepped = True
        finally:
            for p, grad in zip(held, grads, strict=True):
                p.grad = grad
            for (p, x), own in zip(averaged, local, strict=True):
                weights = local_part(p)
                if not stepped:
                    weights.copy_(own)
                    continue
                x.copy_(weights)
                if self._alpha:
                    weights.lerp_(own, self._alpha)
            for part in fragment.parts:
                part.memory.commit() if stepped else part.memory.rollback()
        self.round += 1

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the last round, outer optimizers, and this rank's residuals.

        Call it after any step while no message is underway. Within a round also save the model and
        the inner optimizer of each rank. Every rank saves its own state. Entries that differ
        between ranks have the rank in their key, so that DCP keeps all of them.

        Raises:
            RuntimeError: a message is underway; save before it begins or after it ends.
        """
        self._check_idle("state_dict", "save")
        return {
            "round": self.round,
            "local_step": self._local_step,
            "outer": [fragment.outer.state_dict() for fragment in self._fragments],
            f"rank{group_rank(self._group)}": {
                key: {
                    "original": [x.clone() for x in part.original],
                    "owed": {kind: part.memory.copy_of(kind) for kind in part.memory.kinds()},
                    "server_start": part.memory.server_start,
                }
                for key, part in self._parts_by_key().items()
            },
        }

    def _check_idle(self, method: str, verb: str) -> None:
        """Raise RuntimeError while a message is underway."""
        if any(fragment.underway for fragment in self._fragments):
            raise RuntimeError(
                f"{type(self).__name__}.{method}: expected no message to be underway, got a "
                f"fragment between its beginning and its end; {verb} after the round"
            )

    def _parts_by_key(self) -> dict[str, _Part]:
        return {
            f"{i}.{j}": part
            for i, fragment in enumerate(self._fragments)
            for j, part in enumerate(fragment.parts)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of this rank, bit for bit.

        Raises:
            ValueError: the state is of other fragments, or of another rank. Nothing has changed.
            RuntimeError: a message is underway; load before it begins or after it ends.
        """
        self._check_idle("load_state_dict", "load")
        rank, parts = group_rank(self._group), self._parts_by_key()
        own = state.get(f"rank{rank}", {})
        for key, part in parts.items():
            found = [tuple(x.shape) for x in own[key]["original"]] if key in own else None
            wanted = [tuple(x.shape) for x in part.original]
            if found != wanted:
                raise ValueError(
                    f"{type(self).__name__}.load_state_dict: expected rank{rank} to hold fragment "
                    f"{key} of shapes {wanted}, got {found}"
                )
        outers = [fragment.outer for fragment in self._fragments]
        before = [outer.state_dict() for outer in outers]
        try:
            for outer, new in zip(outers, state["outer"], strict=True):
                outer.load_state_dict(new)
            self.round, self._local_step = int(state["round"]), int(state["local_step"])
        except BaseException:
            for outer, old in zip(outers, before, strict=True):
                outer.load_state_dict(old)
            raise
        for key, part in parts.items():
            for x, saved in zip(part.original, own[key]["original"], strict=True):
                x.copy_(saved)
            for kind in part.memory.kinds():
                part.memory.put(kind, None)
            part.memory.take(own[key]["owed"])
            part.memory.server_start = own[key]["server_start"]


class SparseLoCo(DiLoCo):
    """DiLoCo that sends the largest elements of each chunk, in 2 bits each (SparseLoCo).

    The residual keeps all other elements, decays, and takes the place of the outer momentum. Pass
    `torch.optim.SGD(lr=1.0)` without momentum as outer optimizer.

    Args:
        *args: as `DiLoCo`.
        density: share of the elements that is sent; the paper has 0.01 to 0.03.
        chunk: elements of a chunk, of which the largest are sent.
        bits: bits of a value, 2 or 32.
        decay: factor on the residual in each round.
        **kwargs: as `DiLoCo`, but `codec` and `should_quantize`.

    Raises:
        ValueError: as `DiLoCo`, or the outer optimizer has a momentum.

    Reference: arXiv 2508.15706.
    """

    def __init__(
        self,
        *args: Any,
        density: float = 1 / 64,
        chunk: int = 4096,
        bits: int = 2,
        decay: float = 0.95,
        **kwargs: Any,
    ) -> None:
        check_numbers("SparseLoCo", SparseLoCo.__init__.__annotations__, locals())
        check_rule("SparseLoCo", "density", density, "in (0, 1]", 0.0 < density <= 1.0)
        codec = ChunkedTopK(max(1, round(density * chunk)), chunk, bits, decay=decay)
        super().__init__(*args, **kwargs, codec=codec)
        if any(g.get("momentum") for f in self._fragments for g in f.outer.param_groups):
            raise ValueError(
                "SparseLoCo: expected an outer_optimizer without momentum, which what is owed "
                "stands for, got one with it"
            )


class MuLoCo(DiLoCo):
    """DiLoCo with Muon as inner optimizer, by default in 2 bits with error feedback (MuLoCo).

    Args:
        *args: as `DiLoCo`; the inner optimizer is a `moe_ext.optim.Muon`.
        codec: as `DiLoCo`.
        **kwargs: as `DiLoCo`.

    Raises:
        ValueError: as `DiLoCo`.
        TypeError: another inner optimizer.

    Reference: Therien et al. (arXiv 2505.23725).
    """

    def __init__(self, *args: Any, codec: str | Codec = "int2", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, codec=codec)
        if not isinstance(self._inner, Muon):
            raise TypeError(
                "MuLoCo: expected inner_optimizer to be a moe_ext.optim.Muon, got "
                f"{type(self._inner).__name__}"
            )
