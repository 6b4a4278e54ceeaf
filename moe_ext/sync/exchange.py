"""Updates over a process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.distributed import comm
from moe_ext.distributed.agreement import agree
from moe_ext.distributed.groups import group_size, small_message_device
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

    Receivers that follow get the updates that they miss; where one joined late or missed more than
    the encoders keep, all get a full one. Encoders call `encode` before.

    Args:
        end: this rank's encoder, if it is one of ``sources``, else its receiver.
        group: encoders and receivers.
        sources: ranks of the group with encoders, whose parts make up the tensors.

    Returns:
        Bytes of the updates that were broadcast.

    Raises:
        ValueError: on all ranks: a rank has the wrong end, encoders are of different versions, or a
            receiver refuses an update, which then has changed nothing there; receivers that took it
            keep it, and the next call brings the others up to date.
        RankFailureError: a rank died or did not answer; the message names it.
    """
    device, rank = small_message_device(group), group.rank()
    encodes = rank in sources
    problem = None
    if encodes != isinstance(end, DeltaEncoder):
        wanted = "DeltaEncoder" if encodes else "DeltaReceiver"
        problem = f"expected end to be a {wanted} on rank {rank}, got {type(end).__name__}"
    told = agree(_OP, {"sources": list(sources)}, problem, group, device, values=[end.version])
    versions = [values[0] for values in told]
    now = {versions[source] for source in sources}
    if len(now) > 1:
        raise ValueError(f"{_OP}: expected encoders of one version, got versions {sorted(now)}")
    chains = comm.gather_objects(end.chain, group, operation=_OP)
    chain = "+".join(chains[source] for source in sources)
    receivers = [r for r in range(group_size(group)) if r not in sources]
    oldest = min((versions[r] for r in receivers if chains[r] == chain), default=-1)
    if any(chains[r] != chain for r in receivers):
        oldest = -1
    sent = 0
    found: list[list[Update]] = []
    for source in sources:
        mine = end.since(oldest) if rank == source and isinstance(end, DeltaEncoder) else []
        count = torch.tensor([len(mine)], dtype=torch.int64, device=device)
        comm.broadcast_(count, group, source, operation=_OP)
        packets = [_broadcast(u.to_bytes(), group, source, device) for u in mine] or [
            _broadcast(None, group, source, device) for _ in range(int(count))
        ]
        sent += sum(packet.numel() for packet in packets)
        found.append([] if encodes else [Update.from_bytes(packet) for packet in packets])
    error: Exception | None = None
    if isinstance(end, DeltaReceiver):
        try:
            for parts in zip(*found, strict=True):
                update = parts[0].merged(*parts[1:])
                if update.kind != "delta" or update.base_version >= end.version:
                    end.apply(update)
        except ValueError as caught:
            error = caught
    agree(f"{_OP}: apply", {}, error, group, device)
    return sent


def _broadcast(
    data: Tensor | None, group: ProcessGroup, source: int, device: torch.device
) -> Tensor:
    size = torch.tensor([0 if data is None else data.numel()], dtype=torch.int64, device=device)
    comm.broadcast_(size, group, source, operation=_OP)
    room = torch.empty(int(size), dtype=torch.uint8, device=device)
    if data is not None:
        room.copy_(data)
    return comm.broadcast_(room, group, source, operation=_OP).cpu()
