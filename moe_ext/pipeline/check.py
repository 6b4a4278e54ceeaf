"""Refuses a table that would compute something else, or never end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from moe_ext._checks import check_sizes
from moe_ext.pipeline.simulate import Costs, Replay
from moe_ext.pipeline.table import COMPUTE, MESSAGES, OF_STAGE, UPDATE, Action, ActionTable


class _Place(NamedTuple):
    rank: int
    row: int
    action: Action


# By action, its version apart.
_Places = dict[Action, list[_Place]]


def check_table(table: ActionTable, *, max_in_flight: int | None = None) -> None:
    """Refuse a table that is not complete and in order, or in which ranks wait for ever.

    Every stage lies on one rank and runs each micro-batch of its chain forward once and backward
    once, whole or as input gradient and weight gradients; slices forward in order and backward in
    reverse; backward with the version of the weights that went forward. Versions are made one after
    the other, before their use, of the same micro-batches in all stages. Where there are messages,
    each result that another rank needs is sent behind it and received before its use. No rank waits
    for ever even if messages have no buffer, so that a send ends when its receive is posted.

    Args:
        table: with messages or without.
        max_in_flight: micro-batches of which a rank may hold activations at once, counted for each
            of its stages; None for any number.

    Raises:
        ValueError: with rank, stage, micro-batch and action of what is wrong.
    """
    for problem in _problems(table):
        raise ValueError(f"check_table: expected {problem}")
    if max_in_flight is None:
        return
    check_sizes("check_table", max_in_flight=max_in_flight)
    for rank in range(table.num_ranks):
        count, place = _most_in_flight(table, rank)
        if count > max_in_flight:
            raise ValueError(
                f"check_table: expected table to hold max_in_flight {max_in_flight} micro-batches "
                f"at most, got {count} at {_at(place)}"
            )


def in_flight(table: ActionTable) -> tuple[int, ...]:
    """The most micro-batches of which each rank holds activations at once.

    Counted for each of its stages, from the forward pass to the end of the backward pass, weight
    gradients included.
    """
    return tuple(_most_in_flight(table, rank)[0] for rank in range(table.num_ranks))


def weight_versions(table: ActionTable) -> tuple[int, ...]:
    """The most versions of its weights that a stage of each rank keeps at once."""
    kept = kept_versions(table)
    return tuple(
        max(
            (len(k) for (chain, stage, _), k in kept.items() if table.rank_of[chain, stage] == r),
            default=1,
        )
        for r in range(table.num_ranks)
    )


def kept_versions(table: ActionTable) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """For each update (chain, stage, version): the versions that are used behind it, and itself."""
    found: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for rank in range(table.num_ranks):
        used: dict[tuple[int, int], set[int]] = {}
        for action in reversed(list(table.actions(rank))):
            behind = used.setdefault((action.chain, action.stage), set())
            if action.kind == UPDATE:
                made = action.version
                kept = {made, *(v for v in behind if v < made)}
                found[action.chain, action.stage, made] = tuple(sorted(kept))
            elif action.kind in COMPUTE:
                behind.add(action.version)
    return found


def messages_of_pairs(table: ActionTable) -> dict[tuple[int, int], list[Action]]:
    """The sends of each (sender, receiver), in the order that both ranks have.

    NCCL knows messages by that order alone.

    Raises:
        ValueError: a rank receives in another order than the other one sends.
    """
    sends: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(table.rows):
        for action in row:
            if action.kind in MESSAGES:
                peer = table.peer(action)
                if action.kind.startswith("SEND"):
                    sends.setdefault((rank, table.rank(peer)), []).append(action)
                else:
                    received.setdefault((table.rank(peer), rank), []).append(peer)
    for pair in sorted({*sends, *received}):
        both = zip_longest(sends.get(pair, ()), received.get(pair, ()))
        for number, (sent, taken) in enumerate(both):
            if sent != taken:
                raise ValueError(
                    "Pipeline: expected table to have the messages of two ranks in one order on "
                    f"both, got message {number} of rank {pair[0]} to rank {pair[1]} as "
                    f"{sent or 'nothing'} and {taken and table.peer(taken) or 'nothing'}"
                )
    return sends


def updates_of(table: ActionTable) -> dict[tuple[int, int], dict[int, int]]:
    """Map, for each (chain, stage), a micro-batch to the version that its gradients make.

    0 where there is none behind its backward pass; empty for a table without updates.
    """
    found: dict[tuple[int, int], dict[int, int]] = {}
    for rank in range(table.num_ranks):
        for action in table.actions(rank):
            of_stage = found.setdefault((action.chain, action.stage), {})
            if action.kind in ("B", "W") and action.micro_batch is not None:
                of_stage[action.micro_batch] = 0
            elif action.kind == UPDATE:
                of_stage |= {number: v or action.version for number, v in of_stage.items()}
    return found if any(any(of_stage.values()) for of_stage in found.values()) else {}


def _most_in_flight(table: ActionTable, rank: int) -> tuple[int, _Place]:
    now, found = 0, (0, _Place(rank, 0, Action(0, "F")))
    for row, action in enumerate(table.actions(rank)):
        now += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        if now > found[0]:
            found = now, _Place(rank, row, action)
    return found


def _at(place: _Place) -> str:
    rank, _, action = place
    return f"{action} (rank {rank}, {action.described()})"


def _problems(table: ActionTable) -> Iterator[str]:
    """Mistakes in a table, each before those that follow from it; callers stop at the first."""
    places: _Places = {}
    for rank, row in enumerate(table.rows):
        for number, action in enumerate(row):
            for part in action.parts or (action,):
                place = _Place(rank, number, part)
                places.setdefault(part._replace(version=0), []).append(place)
    yield from _of_stages(table, places)
    yield from _of_versions(table)
    units = _units(table)
    yield from _of_micro_batches(table, units)
    for (chain, stage), rank in sorted(table.rank_of.items()):
        for micro_batch, slice_ in units[chain]:
            forward = Action(stage, "F", micro_batch, chain, slice_)
            yield from _of_unit(table, places, forward, rank)
    if table.has_messages:
        yield from _of_messages(table, places)
    yield from _of_end(table)


def _units(table: ActionTable) -> dict[int, list[tuple[int, int]]]:
    """The (micro-batch, slice) pairs of each chain."""
    found: dict[int, set[tuple[int, int]]] = {}
    for rank in range(table.num_ranks):
        for a in table.actions(rank):
            if a.micro_batch is not None:
                found.setdefault(a.chain, set()).add((a.micro_batch, a.slice))
    return {chain: sorted(pairs) for chain, pairs in found.items()}


def _of_stages(table: ActionTable, places: _Places) -> Iterator[str]:
    for action, found in places.items():
        if action.kind not in (*COMPUTE, *MESSAGES, *OF_STAGE) or action.stage < 0:
            yield f"actions of known kinds, of stages from 0, got {_at(found[0])}"
        if (action.chain, action.stage) not in table.rank_of:
            yield f"each stage to run forward, got {_at(found[0])} alone"
        for place in found:
            if place.rank != table.rank(action):
                yield (
                    f"each stage to lie on one rank, got stage {action.stage} on rank "
                    f"{table.rank(action)} and {_at(place)}"
                )
    for chain in {chain for chain, _ in table.rank_of}:
        for stage in range(table.num_stages):
            if (chain, stage) not in table.rank_of:
                yield f"every chain to have all stages, got no stage {stage} in chain {chain}"


def _of_versions(table: ActionTable) -> Iterator[str]:
    made: dict[tuple[int, int], int] = {}
    for rank in range(table.num_ranks):
        for row, action in enumerate(table.actions(rank)):
            place, where = _Place(rank, row, action), (action.chain, action.stage)
            if action.kind == UPDATE:
                made[where] = made.get(where, 0) + 1
                if action.version != made[where]:
                    yield f"updates to make one version after the other, got {_at(place)}"
            elif action.version > made.get(where, 0):
                yield f"weights to be used behind the update that makes them, got {_at(place)}"
    updates = updates_of(table)
    for (chain, stage), of_stage in sorted(updates.items()):
        for number, version in sorted(of_stage.items()):
            first = updates[chain, 0].get(number, 0)
            if not version or first != version:
                yield (
                    "each micro-batch's gradients to go into one update, the same in all stages, "
                    f"got micro-batch {number} in {version} at stage {stage} and {first} at stage 0"
                )


def _of_micro_batches(table: ActionTable, units: dict[int, list[tuple[int, int]]]) -> Iterator[str]:
    for number in range(table.num_micro_batches):
        chains = [chain for chain, pairs in units.items() if number in dict(pairs)]
        if len(chains) != 1:
            yield f"each micro-batch to be in one chain, got micro-batch {number} in {chains}"
    for pairs in units.values():
        for number, part in pairs:
            if part and (number, part - 1) not in pairs:
                yield f"slices from 0 on, got slice {part} alone of micro-batch {number}"


def _of_unit(table: ActionTable, places: _Places, forward: Action, rank: int) -> Iterator[str]:
    """A micro-batch in a stage: each pass once, in order, with the same weights."""

    def found(kind: str, ahead: int = 0) -> list[_Place]:
        return places.get(forward._replace(kind=kind, slice=forward.slice + ahead), [])

    whole = len(found("B")) > 0 and not (found("I") or found("W"))
    for kind in "FB" if whole else "FIW":
        if len(found(kind)) != 1:
            yield (
                f"table to have {_at(_Place(rank, 0, forward._replace(kind=kind)))} once, got it "
                f"{len(found(kind))} times"
            )
    if not whole and found("B"):
        yield f"table to have I and W or a B, got both with {_at(found('B')[0])}"
    order = [found(kind)[0] for kind in ("FB" if whole else "FIW")]
    yield from _in_order(order)
    for place in order[1:]:
        if place.action.version != order[0].action.version:
            yield (
                f"a backward pass with the weights of its forward pass {order[0].action}, got "
                f"{_at(place)}"
            )
    if found("F", 1):
        yield from _in_order([order[0], found("F", 1)[0]])
    backward = [(found("B", ahead) or found("I", ahead))[:1] for ahead in (1, 0)]
    if all(backward):
        yield from _in_order([place for each in backward for place in each])


def _in_order(order: Sequence[_Place]) -> Iterator[str]:
    for before, after in zip(order, order[1:], strict=False):
        if before.row >= after.row:
            yield (
                f"{_at(after)} to stand behind {before.action}, got places {after.row} and "
                f"{before.row}"
            )


def _of_messages(table: ActionTable, places: _Places) -> Iterator[str]:
    wanted = set()
    for compute, found in places.items():
        if compute.kind not in COMPUTE:
            continue
        receive, send = table.receive(compute), table.send(compute)
        for message in filter(None, (receive, send)):
            wanted.add(message)
            own = places.get(message, [])
            if len(own) != 1:
                yield (
                    f"table to have {_at(found[0]._replace(action=message))} once, got it "
                    f"{len(own)} times"
                )
        if receive:
            yield from _in_order([places[receive][0], found[0]])
        if send:
            yield from _in_order([found[0], places[send][0]])
    for action, found in places.items():
        if action.kind in MESSAGES and action not in wanted:
            yield f"messages between ranks alone, got {_at(found[0])}"


def _of_end(table: ActionTable) -> Iterator[str]:
    stuck = Replay(table, Costs(), blocking=True).stuck()
    if not stuck:
        return
    path = [min(stuck)]
    while path.count(path[-1]) < 2:
        path.append(_waits_for(table, stuck[path[-1]], stuck))
    circle = path[path.index(path[-1]) : -1]
    words = " waits for ".join(_at(_Place(rank, 0, stuck[rank])) for rank in circle)
    yield f"table to come to its end, got a circle: {words} waits for rank {circle[0]}"


def _waits_for(table: ActionTable, action: Action, stuck: dict[int, Action]) -> int:
    if action.kind in MESSAGES:
        return table.rank(table.peer(action))
    sources = [table.rank(s) for part in action.parts or (action,) if (s := table.source(part))]
    return next(rank for rank in sources if rank in stuck)
