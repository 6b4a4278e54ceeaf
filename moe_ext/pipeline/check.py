"""Checks that a table computes each gradient once and in order, and that all ranks end."""

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


# Places of each action in a table. Actions are keyed with version 0, whatever version they use.
_Places = dict[Action, list[_Place]]


def check_table(table: ActionTable, *, max_in_flight: int | None = None) -> None:
    """Refuse a table that is incomplete or out of order, or in which ranks wait for ever.

    Every stage lies on one rank, and runs each micro-batch of its chain forward once and backward
    once. A backward pass is "B", or the pair of "I" and "W". Slices go forward in order and
    backward in reverse order. A backward pass uses the version of the weights of its forward pass.
    Versions are made one after the other, before their use, from the same micro-batches in all
    stages. In a table with messages, each result for another rank is sent after it was computed,
    and received before its use. The ranks come to their end even if messages have no buffer, so
    that a send ends only when its receive is posted.

    Args:
        table: table with or without messages.
        max_in_flight: largest number of micro-batches of which a rank may hold activations at once,
            counted for each of its stages; None for any number.

    Raises:
        ValueError: the table is wrong; the text names rank, stage, micro-batch and action.
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
    """Return for each rank the most micro-batches of which it holds activations at once.

    A micro-batch counts once for each stage of the rank, from its forward pass to the end of its
    backward pass, including the gradients of weights.
    """
    return tuple(_most_in_flight(table, rank)[0] for rank in range(table.num_ranks))


def weight_versions(table: ActionTable) -> tuple[int, ...]:
    """Return for each rank the most versions of weights that one of its stages keeps at once."""
    kept = kept_versions(table)
    return tuple(
        max(
            (len(k) for (chain, stage, _), k in kept.items() if table.rank_of[chain, stage] == r),
            default=1,
        )
        for r in range(table.num_ranks)
    )


def kept_versions(table: ActionTable) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """Map each update (chain, stage, version) to its version and the older ones used after it."""
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
    """Map each (sender, receiver) to its sends, in the order of the table.

    NCCL matches the messages of a pair by their order alone.

    Raises:
        ValueError: a receiver expects messages in another order than the sender sends them.
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

    The version is 0 if no update follows the backward pass. The map is empty for a table without
    updates.
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
    """Yield mistakes of a table.

    Callers must stop at the first mistake, because each check assumes that earlier ones passed.
    """
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
    """Map each chain to its (micro-batch, slice) pairs."""
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
    """Check a slice of a micro-batch in a stage: each pass once, in order, of one version."""

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
