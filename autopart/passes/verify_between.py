"""Rules between ranks: transfers match, groups agree on their collectives, and all ranks end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, TypeAlias

from autopart.codegen.recording_world import Event
from autopart.codegen.shapes import shown
from autopart.collectives import SCHEMAS
from autopart.errors import VerificationError
from autopart.ir.action import COMPUTE, Kind
from autopart.passes.verify_texts import Text, fault, told
from autopart.schedules.progress import check

if TYPE_CHECKING:
    import networkx as nx

Position = tuple[int, int]
"""Rank, and number of the event on it."""

Meeting: TypeAlias = tuple[Position, ...]
"""What happens at once on several ranks: a send and its receive, or one collective of all of a group."""

BUFFERS = frozenset({"average_buffers", "maximum_buffers", "broadcast_buffers"})
PARAMETERS = frozenset({"all_gather", "prefetch", "regather", "reduce_scatter", "all_reduce"})
VALUES = frozenset({f"{name}_values" for name in SCHEMAS})
COLLECTIVES = BUFFERS | PARAMETERS | VALUES | {"summed", "total", "everywhere"}


def transfers(texts: Sequence[Text]) -> list[Meeting]:
    """Every send with its receive. Raises VerificationError where the k-th of a channel are not of the same values."""
    sends: dict[tuple[int, int], list[Position]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Position]] = defaultdict(list)
    for text in texts:
        for number, event in enumerate(text.events):
            if event.call in ("send", "recv"):
                peer = _peer(text, event)
                if event.call == "send":
                    sends[text.rank, peer].append((text.rank, number))
                else:
                    receives[peer, text.rank].append((text.rank, number))
    made = []
    for channel in sorted(sends.keys() | receives.keys()):
        for send, receive in zip_longest(sends[channel], receives[channel]):
            made.append(_pair(texts, channel, send, receive))
    return made


def _peer(text: Text, event: Event) -> int:
    """The other rank of a transfer."""
    assert event.action is not None
    stage, peer = event.action.stage, event.action.peer
    remedy = "name the stages of an edge that leaves or enters this rank"
    if stage not in text.stages:
        raise fault("transfers", text.at(event), f"stage {stage} is not on this rank", remedy)
    if not 0 <= peer < len(text.place) or peer in text.stages:
        raise fault("transfers", text.at(event), f"stage {peer} is not on another rank", remedy)
    return text.rank_of(peer)


def _pair(texts: Sequence[Text], channel: tuple[int, int], send: Position | None, receive: Position | None) -> Meeting:
    """A send and its receive, None where a side has no more."""
    source, target = channel
    remedy = f"the sends of rank {source} to rank {target} and the receives there must be the same, in the same order"
    if send is None or receive is None:
        one = _event(texts, send or receive)  # type: ignore[arg-type]
        missing = f"rank {target} never receives it" if send else f"rank {source} never sends it"
        raise fault("transfers", texts[source if send else target].at(one), missing, remedy)
    sent, taken = _event(texts, send), _event(texts, receive)
    assert sent.action is not None and taken.action is not None
    a, b = sent.action, taken.action
    if (a.stage, a.peer, a.microbatch) != (b.peer, b.stage, b.microbatch):
        raise fault("transfers", texts[source].at(sent), f"it meets the receive of {texts[target].at(taken)}", remedy)
    if sent.what != taken.what:
        shapes = f"it sends {shown(sent.what)}, but {texts[target].at(taken)} expects {shown(taken.what)}"
        raise fault("transfers", texts[source].at(sent), shapes, remedy)
    return send, receive


def collectives(texts: Sequence[Text]) -> list[Meeting]:
    """The collectives of all groups of several ranks. Raises VerificationError where members of a group disagree."""
    rows: dict[tuple[int, ...], dict[int, list[Position]]] = {}
    for text in texts:
        known: dict[object, tuple[int, ...]] = {}
        for number, event in enumerate(text.events):
            if event.call in COLLECTIVES:
                who = event.axis, event.stages, event.call == "broadcast_buffers"
                if who not in known:
                    _check_group(text, event)
                    known[who] = text.group(event)
                group = known[who]
                if len(group) > 1:
                    rows.setdefault(group, {}).setdefault(text.rank, []).append((text.rank, number))
    made = []
    for group, members in sorted(rows.items()):
        for meeting in zip_longest(*(members.get(rank, []) for rank in group)):
            made.append(_check_meeting(texts, group, meeting))
    return made


def _check_group(text: Text, event: Event) -> None:
    axes = dict(text.mesh.axes)
    if event.axis != "world" and event.axis not in axes and event.axis not in ("pp", "dp"):
        problem, remedy = f"the mesh has no axis {event.axis!r}", f"name one of {', '.join(axes)}"
        raise fault("collectives", text.at(event), problem, remedy)
    if not set(event.stages) <= set(range(len(text.place))):
        problem, remedy = f"stages {event.stages} are not all there", f"name some of 0 to {len(text.place) - 1}"
        raise fault("collectives", text.at(event), problem, remedy)
    if text.rank not in text.group(event):
        problem = f"this rank is not in the group {text.group(event)}"
        raise fault("collectives", text.at(event), problem, "only the members of a group may call its collectives")


def _check_meeting(texts: Sequence[Text], group: tuple[int, ...], meeting: Sequence[Position | None]) -> Meeting:
    """One collective as each member has it, None where a member has no more."""
    found = [position for position in meeting if position is not None]
    first = _event(texts, found[0])
    remedy = f"the ranks {group} must call the same collectives in the same order"
    for rank, position in zip(group, meeting, strict=True):
        if position is None:
            raise fault("collectives", texts[found[0][0]].at(first), f"rank {rank} does not take part", remedy)
        other = _event(texts, position)
        if _same(first) != _same(other):
            problem = f"at that point {texts[rank].at(other)} is called with axis {other.axis!r}"
            where = f"{texts[found[0][0]].at(first)} with axis {first.axis!r}"
            raise fault("collectives", where, problem, remedy)
    return tuple(found)


def _same(event: Event) -> tuple[object, ...]:
    """What all members of a group must have in common."""
    shapes = {"total": event.what[:1], "everywhere": event.what, "summed": event.what}.get(event.call, ())
    exchanged = event.exchange.same() if event.exchange is not None else ()
    return event.call, event.unit, event.together, event.axis, event.stages, event.buffers, shapes, exchanged


def ends(texts: Sequence[Text], meetings: Sequence[Meeting]) -> int:
    """Raise VerificationError unless all ranks end when all wait for each other; the number of meetings looked at.

    A meeting happens when all who take part have come to it, so it waits for whatever each of them does before. These
    waits have a cycle exactly if the ranks deadlock.
    """
    import networkx as nx

    _check_columns(texts)
    _check_yields(texts, meetings)
    event: dict[Position, Meeting] = {position: meeting for meeting in meetings for position in meeting}
    waits: nx.DiGraph[Meeting] = nx.DiGraph()
    waits.add_nodes_from(meetings)
    for text in texts:
        row = [event[at] for number in range(len(text.events)) if (at := (text.rank, number)) in event]
        waits.add_edges_from(pairwise(row))
    if not nx.is_directed_acyclic_graph(waits):
        found = nx.find_cycle(waits)
        cycle = min((nx.shortest_path(waits, after, before) for before, after in found), key=len)[::-1]
        told = [_told(texts, meeting) for meeting in [*cycle, cycle[0]]]
        circle = "\n  waits for ".join(told)
        remedy = "call what ranks do together in one order on all of them"
        raise VerificationError(f"rule deadlock: these wait for each other; {remedy}\n  {circle}")
    return len(meetings)


def _check_yields(texts: Sequence[Text], meetings: Sequence[Meeting]) -> None:
    """A step that waits for the gradients of its outputs waits on all ranks: what meets is before that, or after it."""
    for meeting in meetings:
        early = [number < texts[rank].recording.early for rank, number in meeting]
        if len(set(early)) > 1:
            remedy = "do on both sides of a transfer, and on all ranks of a collective, what comes before the yield"
            raise VerificationError(f"rule deadlock: {_told(texts, meeting)} is on both sides of the yield; {remedy}")


def _told(texts: Sequence[Text], meeting: Meeting) -> str:
    """What meets, and where each side stands: ``1SEND0>0 with 0RECV0>1 (rank 2 line 110, rank 0 line 100)``."""
    events = [_event(texts, position) for position in meeting]
    names = [str(event.action) if event.call in ("send", "recv") else told(event) for event in events]
    lines = ", ".join(f"rank {rank} line {event.line}" for (rank, _), event in zip(meeting, events, strict=True))
    return f"{' with '.join(dict.fromkeys(names))} ({lines})"


def _check_columns(texts: Sequence[Text]) -> None:
    """Sends and receives alone, for each part of the batch: the error then says on which transports the ranks hang."""
    columns: dict[tuple[tuple[str, int], ...], list[Text]] = defaultdict(list)
    for text in texts:
        where = text.mesh.coordinate(text.rank)
        columns[tuple(item for item in where.items() if item[0] != "pp")].append(text)
    kinds = COMPUTE | {Kind.SEND, Kind.RECV}
    for rest, column in columns.items():
        ordered = sorted(column, key=lambda text: text.mesh.coordinate(text.rank).get("pp", 0))
        rows = [[a for a in text.recording.actions if a.kind in kinds] for text in ordered]
        try:
            check(rows, ordered[0].place)
        except VerificationError as error:
            at = "".join(f" at {axis} {place}" for axis, place in rest)
            ranks = ", ".join(str(text.rank) for text in ordered)
            rule = f"rule deadlock: pp ranks 0 to {len(rows) - 1}{at} (in the world {ranks})"
            raise VerificationError(f"{rule}: {error}\nlet one of them receive before it sends") from None


def _event(texts: Sequence[Text], position: Position) -> Event:
    rank, number = position
    return texts[rank].events[number]
