"""Sends updates over a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext._checks import check_kind, check_rule
from moe_ext.comm import collectives
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import group_size, small_message_device
from moe_ext.sync.encoder import DeltaEncoder
from moe_ext.sync.receiver import DeltaReceiver
from moe_ext.sync.update import Update

_OP = "sync_weights"


def sync_weights(
    end: DeltaEncoder | DeltaReceiver,
    group: ProcessGroup,
    *,
    sources: Sequence[int] = (0,),
) -> int:
    """Bring all receivers of a group to the version of its encoders (collective).

    Receivers get the updates that they miss. If one joined late, or missed more updates than the
    encoders keep, all get a full update. Encoders call `encode` before.

    Args:
        end: this rank's encoder, if it is one of ``sources``, else its receiver.
        group: the ranks with encoders and receivers.
        sources: ranks of the group with encoders. Their parts together make up the tensors.

    Returns:
        Bytes of the updates that were broadcast.

    Raises:
        TypeError: ``group`` is not a group of this rank.
        ValueError: on all ranks: a rank has the wrong end; encoders are of different versions, or
            keep different numbers of updates; or a receiver refuses an update, which is then
            written nowhere.
        RankFailureError: a rank died or did not answer; the message names it. Each receiver then
            holds a whole version, which its `version` tells: that before the call, or a later one
            if one of several updates had been written already.
    """
    check_kind(_OP, "group", group, ProcessGroup, required=True)
    device, rank = small_message_device(group), group.rank()
    with Agreement(_OP, group) as agreement:
        sources = [int(source) for source in sources]
        encodes = rank in sources
        members = [source for source in sources if 0 <= source < group_size(group)]
        rule = f"ranks of {group_size(group)}, each once"
        fits = len(sources) > 0 and sorted(set(sources)) == sorted(members)
        check_rule(_OP, "sources", sources, rule, fits)
        if encodes != isinstance(end, DeltaEncoder):
            wanted, found = "DeltaEncoder" if encodes else "DeltaReceiver", type(end).__name__
            raise ValueError(f"{_OP}: expected end to be a {wanted} on rank {rank}, got {found}")
        told = agreement.compare({"sources": sources}, values=[end.version])
    versions = [values[0] for values in told]
    now = {versions[source] for source in sources}
    if len(now) > 1:
        raise ValueError(f"{_OP}: expected encoders of one version, got versions {sorted(now)}")
    chains = collectives.gather_objects(end.chain, group, operation=_OP)
    chain = "+".join(chains[source] for source in sources)
    receivers = [r for r in range(group_size(group)) if r not in sources]
    oldest = min((versions[r] if chains[r] == chain else -1 for r in receivers), default=-1)
    sent = 0
    packets: list[list[Tensor]] = []
    for source in sources:
        mine = end.since(oldest) if rank == source and isinstance(end, DeltaEncoder) else []
        count = torch.tensor([len(mine)], dtype=torch.int64, device=device)
        collectives.broadcast_(count, group, source, operation=_OP)
        packets.append(
            [_broadcast(u.to_bytes(), group, source, device) for u in mine]
            or [_broadcast(None, group, source, device) for _ in range(int(count))]
        )
        sent += sum(packet.numel() for packet in packets[-1])
    if len({len(own) for own in packets}) > 1:
        raise ValueError(
            f"{_OP}: expected sources to keep as many updates as each other, got "
            f"{[len(own) for own in packets]}; give their encoders the same history"
        )
    # All receivers check an update before any of them writes it, and a write does not fail. A rank
    # that raises has therefore not written it.
    for parts in zip(*packets, strict=True):
        write: Callable[[], None] | None = None
        with Agreement(f"{_OP}: apply", group) as agreement:
            if isinstance(end, DeltaReceiver):
                first, *others = (Update.from_bytes(part) for part in parts)
                update = first.merged(*others)
                if update.kind != "delta" or update.base_version >= end.version:
                    write = end.prepare(update)
            agreement.compare({})
        if write is not None:
            write()
    return sent


def _broadcast(
    data: Tensor | None, group: ProcessGroup, source: int, device: torch.device
) -> Tensor:
    size = torch.tensor([0 if data is None else data.numel()], dtype=torch.int64, device=device)
    collectives.broadcast_(size, group, source, operation=_OP)
    room = torch.empty(int(size), dtype=torch.uint8, device=device)
    if data is not None:
        room.copy_(data)
    return collectives.broadcast_(room, group, source, operation=_OP).cpu()
