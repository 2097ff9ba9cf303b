"""Do the lowered rows of all ranks end, whatever the transport does? Deadlock freedom as acyclicity.

An event cannot happen before those it waits for; rows deadlock exactly when these waits have a cycle. Three models of a
transport, each adding waits to the one before:

* ``dirfifo``: a send never waits; a receive waits for the matching send and all that comes before it in its row.
* ``pairfifo``: the two ranks of a pair share one stream (NCCL, one communicator a pair): a transfer happens on both
  sides at once, after the pair's earlier transfers in either direction.
* ``block``: a send, too, holds up all that comes after it in its row until the receive is posted.

S, T, E and D have exchanges of their own, which hold up only what needs their results: all ranks begin those of S and
T in one order.

Before that, channels: with messages told apart by order alone, the k-th RECV of a channel must be of the k-th SEND.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, TypeAlias

from autopart.errors import VerificationError
from autopart.ir.action import SHARED, Action, Kind
from autopart.schedules.text import grid

if TYPE_CHECKING:
    import networkx as nx

MODELS = ("dirfifo", "pairfifo", "block")

TRANSFERS = frozenset({Kind.SEND, Kind.RECV})

ANY = -1
"""In place of a stage: whichever it is."""

Rows = Sequence[Sequence[Action]]
Position = tuple[int, int]
"""Rank and step."""

Event = tuple[Position, ...]
"""What happens at once: one action, or a SEND and its RECV."""

Exchanges = Mapping[Position, Sequence[Position]]
"""What an action waits for that other ranks did, beside messages."""

Places = Sequence[Sequence[int]]
"""The rank of every stage, pipe by pipe."""

Waits: TypeAlias = "nx.DiGraph[Event]"


def check(rows: Rows, place: Sequence[int], mirrors: Places = (), barriers: int = 0) -> None:
    """Raise VerificationError unless the rows, one a pipeline rank, match and end under all three models.

    ``place[stage]`` is the rank of a stage in pipe 0, ``mirrors[k][stage]`` in pipe k + 1; `barriers` is that of the
    schedule. Every action but SEND, RECV, S, T, E and D counts as work of the rank alone. The message names the model,
    the action at which each rank is stuck and the cycle of waits, and shows the rows with these in brackets.
    """
    import networkx as nx

    places = (place, *mirrors)
    peers, exchanges = _match(rows, places), _exchanges(rows, len(place) - 1, barriers) if barriers else {}
    # The last model has all waits of the others: rows that end under it need no more looking at.
    if _ends(rows, peers, exchanges):
        return
    graphs = ((model, _waits(rows, places, peers, exchanges, model)) for model in MODELS)
    raise next(_deadlock(rows, waits, model) for model, waits in graphs if not nx.is_directed_acyclic_graph(waits))


def _ends(rows: Rows, peers: Mapping[Position, Position], exchanges: Exchanges) -> bool:
    """Whether all rows end under the last model: each rank does what stands next, a SEND and its RECV together."""
    partner = {**peers, **{receive: send for send, receive in peers.items()}}
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                position = (rank, at[rank])
                other = partner.get(position)
                if other is not None and at[other[0]] != other[1]:
                    break
                if exchanges and any(at[peer] <= step for peer, step in exchanges.get(position, ())):
                    break
                at[rank] += 1
                if other is not None:
                    at[other[0]] += 1
                moved = True
    return all(done == len(row) for done, row in zip(at, rows, strict=True))


def _exchanges(rows: Rows, last: int, barriers: int) -> Exchanges:
    """S waits for the last stage's forward, T for S of all ranks, and that stage's backward for all S, or all T.

    The first stage's forward waits for E of all ranks, if there are some, and D for that stage's backward.
    """
    _check_order(rows)
    every = [((rank, step), part) for rank, row in enumerate(rows) for step, a in enumerate(row) for part in a.parts]
    done: dict[tuple[Kind, int, int, int], list[Position]] = defaultdict(list)
    for position, part in every:
        for stage in {part.stage, ANY}:
            done[part.kind, stage, part.microbatch, part.slice].append(position)

    def needs(part: Action) -> list[tuple[Kind, int]]:
        match part.kind:
            case Kind.S:
                return [(Kind.F, last)]
            case Kind.T:
                return [(Kind.S, ANY)]
            case Kind.D:
                return [(Kind.B, 0), (Kind.I, 0)]
            case Kind.F if part.stage == 0:
                return [(Kind.E, ANY)]
            case Kind.B | Kind.I if part.stage == last:
                return [(Kind.S if barriers == 1 else Kind.T, ANY)]
        return []

    found: dict[Position, list[Position]] = defaultdict(list)
    for position, part in every:
        for kind, stage in needs(part):
            found[position] += done[kind, stage, part.microbatch, part.slice]
    return found


def _check_order(rows: Rows) -> None:
    """Refuse rows whose S and T are not the same, in one order: exchanges are told apart by that."""
    shared = [[(step, a) for step, a in enumerate(row) if a.kind in SHARED] for row in rows]
    for number, sides in enumerate(zip_longest(*shared)):
        first, *others = ((side[1].kind, side[1].microbatch, side[1].slice) if side else None for side in sides)
        for rank, other in enumerate(others, 1):
            if other != first:
                marks = {(at, side[0]): "" for at, side in ((0, sides[0]), (rank, sides[rank])) if side}
                said = [str(side[1]) if side else "nothing" for side in (sides[0], sides[rank])]
                raise VerificationError(
                    f"S and T number {number}: {said[0]} on rank 0, but {said[1]} on rank {rank}; all ranks perform "
                    f"them together, in one order\n{grid(rows, marks)}"
                )


def _match(rows: Rows, places: Places) -> dict[Position, Position]:
    """The RECV of every SEND."""
    sends: dict[tuple[int, int], list[Position]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Position]] = defaultdict(list)
    for rank, row in enumerate(rows):
        fits: set[tuple[int, int, int]] = set()
        for step, action in enumerate(row):
            if action.kind in TRANSFERS:
                if (ends := (action.stage, action.peer, action.pipe)) not in fits:
                    _check_ends(rows, places, (rank, step))
                    fits.add(ends)
                peer = places[action.pipe][action.peer]
                if action.kind is Kind.SEND:
                    sends[rank, peer].append((rank, step))
                else:
                    receives[peer, rank].append((rank, step))
    peers = {}
    for channel in sorted(sends.keys() | receives.keys()):
        for send, receive in zip_longest(sends[channel], receives[channel]):
            if send is None or receive is None or not _meet(rows[send[0]][send[1]], rows[receive[0]][receive[1]]):
                raise _mismatch(rows, channel, send, receive)
            peers[send] = receive
    return peers


def _check_ends(rows: Rows, places: Places, position: Position) -> None:
    rank, step = position
    action = rows[rank][step]
    place = places[action.pipe] if action.pipe < len(places) else ()
    stages = range(len(place))
    fault = ""
    if action.stage not in stages or action.peer not in stages:
        fault = f"names a stage that is not among 0 to {len(places[0]) - 1}"
        fault = fault if place else f"names a pipe that is not among 0 to {len(places) - 1}"
    elif place[action.stage] != rank:
        fault = f"is of a stage of rank {place[action.stage]}"
    elif place[action.peer] == rank:
        fault = "is between two stages of one rank, which hand over without a message"
    if fault:
        raise VerificationError(f"rank {rank}, step {step}: {action} {fault}\n{grid(rows, {position: ''})}")


def _meet(send: Action, receive: Action) -> bool:
    """Whether a RECV takes a SEND's message."""
    sent = (send.peer, send.stage, send.microbatch, send.slice, send.pipe, send.unit)
    taken = (receive.stage, receive.peer, receive.microbatch, receive.slice, receive.pipe, receive.unit)
    return sent == taken


def _mismatch(
    rows: Rows, channel: tuple[int, int], send: Position | None, receive: Position | None
) -> VerificationError:
    source, target = channel
    sent = f"sends {rows[send[0]][send[1]]}" if send else "sends nothing more"
    taken = f"takes it as {rows[receive[0]][receive[1]]}" if receive else "receives nothing more"
    marks = {position: "" for position in (send, receive) if position}
    return VerificationError(
        f"channel from rank {source} to rank {target}: rank {source} {sent}, but rank {target} {taken}; "
        f"receives must follow the order of the sends\n{grid(rows, marks)}"
    )


def _waits(rows: Rows, places: Places, peers: Mapping[Position, Position], exchanges: Exchanges, model: str) -> Waits:
    """The graph of what must happen before what under a model: an edge leads from an event to one that waits for it."""
    import networkx as nx

    event: dict[Position, Event] = {
        (rank, step): ((rank, step),) for rank, row in enumerate(rows) for step in range(len(row))
    }
    waits: Waits = nx.DiGraph()
    if model == "dirfifo":
        waits.add_edges_from((event[send], event[receive]) for send, receive in peers.items())
    else:
        event |= {side: (send, receive) for send, receive in peers.items() for side in (send, receive)}
    waits.add_nodes_from(event.values())
    waits.add_edges_from((event[need], event[position]) for position, needs in exchanges.items() for need in needs)
    for rank, row in enumerate(rows):
        order = pairwise(range(len(row))) if model == "block" else _sends_free(row, places, streams=model == "pairfifo")
        waits.add_edges_from((event[rank, before], event[rank, after]) for before, after in order)
    return waits


def _sends_free(row: Sequence[Action], places: Places, *, streams: bool) -> Iterator[tuple[int, int]]:
    """The (before, after) steps of a row where only the stream of a pair, if it has one, waits for sends."""
    held: int | None = None
    last: dict[int, int] = {}
    for step, action in enumerate(row):
        if held is not None:
            yield held, step
        if streams and action.kind in TRANSFERS:
            peer = places[action.pipe][action.peer]
            if peer in last:
                yield last[peer], step
            last[peer] = step
        if action.kind is not Kind.SEND:
            held = step


def _deadlock(rows: Rows, waits: Waits, model: str) -> VerificationError:
    """The error for waits with a cycle: where every rank is stuck, and why."""
    import networkx as nx

    cyclic = [events for events in nx.strongly_connected_components(waits) if len(events) > 1]
    never = {event for events in cyclic for event in events}
    for layer in list(nx.bfs_layers(waits, never)):
        never.update(layer)
    stuck: dict[int, int] = {}
    for rank, step in sorted(position for event in never for position in event):
        stuck.setdefault(rank, step)
    where = "; ".join(f"rank {rank} is stuck at {rows[rank][step]} (step {step})" for rank, step in stuck.items())
    cycle = [event for event, _ in nx.find_cycle(waits)][::-1]
    talk = [" with ".join(str(rows[r][s]) for r, s in event) for event in cycle if _is_talk(rows, event)]
    marks = {position: "" for position in stuck.items()}
    return VerificationError(
        f"deadlock under the {model} model: {where}; cycle: {' waits for '.join([*talk, talk[0]])}\n{grid(rows, marks)}"
    )


def _is_talk(rows: Rows, event: Event) -> bool:
    rank, step = event[0]
    return rows[rank][step].kind in TRANSFERS | SHARED
