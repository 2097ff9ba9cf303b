"""Rules between ranks: transfers match, groups agree on their collectives, and all ranks end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, TypeAlias

from autopart.codegen.recording_world import Event
from autopart.codegen.shapes import Spec, shown
from autopart.collectives import SCHEMAS
from autopart.errors import VerificationError
from autopart.ir.action import COMPUTE, Kind
from autopart.ir.dealing import EQUAL, SUM, How, part_of, received, sent
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


Half = tuple[Position, tuple[Spec | None, ...]]
"""One side of a transfer: where it is, and the shapes that it sends, or expects."""

Deals = Mapping[tuple[int, int], tuple[How, ...]]
"""How the values of each edge are dealt, by its stages."""


def transfers(texts: Sequence[Text], deals: Deals) -> list[Meeting]:
    """Every send with its receive. Raises VerificationError where the k-th of a channel are not of the same values.

    `deals` are the edges between stages of unlike width: what is sent there has a receive on each rank that it is for.
    """
    sends: dict[tuple[int, int], list[Half]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Half]] = defaultdict(list)
    for text in texts:
        for number, event in enumerate(text.events):
            if event.call in ("send", "recv"):
                for peer, what in _halves(text, event, deals):
                    channel, halves = (
                        ((text.rank, peer), sends) if event.call == "send" else ((peer, text.rank), receives)
                    )
                    halves[channel].append(((text.rank, number), what))
    made = []
    for channel in sorted(sends.keys() | receives.keys()):
        for send, receive in zip_longest(sends[channel], receives[channel]):
            made.append(_pair(texts, channel, send, receive))
    return made


def _halves(text: Text, event: Event, deals: Deals) -> list[tuple[int, tuple[Spec | None, ...]]]:
    """The ranks that a send, or a receive, is between this one and, each with what passes."""
    _check_ends(text, event)
    assert event.action is not None
    outward, stage, other = event.call == "send", event.action.stage, event.action.peer
    wanted = deals.get((stage, other) if outward else (other, stage), ())
    if event.deal != wanted:
        problem = f"it deals what passes by {event.deal}" if event.deal else "it does not say how what passes is dealt"
        remedy = f"the graph has deal={wanted}" if wanted else "the stages have as many data ranks: leave deal= out"
        raise fault("transfers", text.at(event), problem, remedy)
    if not wanted:
        return [(text.rank_of(other), event.what)]
    here, there = (text.spans(each, event.action.microbatch) for each in (stage, other))
    place, ranks = text.mesh.coordinate(text.rank)["dp"], text.mesh.column(text.place[other])
    specs = [spec for spec in event.what if spec is not None]
    if [how for how, spec in zip(wanted, specs, strict=False) if how in (EQUAL, SUM) or len(spec.shape) > int(how)] != [
        *wanted
    ]:
        return [(ranks[0], event.what)]  # which does not fit what the other side has
    passing = sent(specs, wanted, place, here, there) if outward else received(specs, wanted, place, there, here)
    found: dict[int, list[Spec | None]] = {}
    for at, spec, how, (_, count) in passing:
        part = part_of(spec.shape, how, count, here[place][1])
        found.setdefault(ranks[at], []).append(replace(spec, shape=part))
    return [(rank, tuple(specs)) for rank, specs in found.items()]


def _check_ends(text: Text, event: Event) -> None:
    """Raise VerificationError unless a transfer is between a stage of this rank and one of another."""
    assert event.action is not None
    stage, peer = event.action.stage, event.action.peer
    remedy = "name the stages of an edge that leaves or enters this rank"
    if stage not in text.stages:
        raise fault("transfers", text.at(event), f"stage {stage} is not on this rank", remedy)
    if not 0 <= peer < len(text.place) or peer in text.stages:
        raise fault("transfers", text.at(event), f"stage {peer} is not on another rank", remedy)


def _pair(texts: Sequence[Text], channel: tuple[int, int], send: Half | None, receive: Half | None) -> Meeting:
    """A send and its receive, None where a side has no more."""
    source, target = channel
    remedy = f"the sends of rank {source} to rank {target} and the receives there must be the same, in the same order"
    if send is None or receive is None:
        one = _event(texts, (send or receive)[0])  # type: ignore[index]
        missing = f"rank {target} never receives it" if send else f"rank {source} never sends it"
        raise fault("transfers", texts[source if send else target].at(one), missing, remedy)
    (here, given), (there, wanted) = send, receive
    one, other = _event(texts, here), _event(texts, there)
    assert one.action is not None and other.action is not None
    a, b = one.action, other.action
    if (a.stage, a.peer, a.microbatch) != (b.peer, b.stage, b.microbatch):
        raise fault("transfers", texts[source].at(one), f"it meets the receive of {texts[target].at(other)}", remedy)
    if given != wanted:
        shapes = f"it sends {shown(given)}, but {texts[target].at(other)} expects {shown(wanted)}"
        raise fault("transfers", texts[source].at(one), shapes, remedy)
    return here, there


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
    made, common = [], _Common()
    for group, members in sorted(rows.items()):
        for meeting in zip_longest(*(members.get(rank, []) for rank in group)):
            made.append(_check_meeting(texts, group, meeting, common))
    return made


class _Common(dict[int, int]):
    """A number for each event, equal for events that members of a group may have in one collective.

    By the event's identity: ranks that do the same have one recording.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[tuple[object, ...], int] = {}

    def of(self, event: Event) -> int:
        """The number of an event, which has to live on."""
        found = self.get(id(event))
        if found is None:
            found = self[id(event)] = self.numbers.setdefault(_same(event), len(self.numbers))
        return found


def _check_group(text: Text, event: Event) -> None:
    axes = text.mesh.names
    if event.axis != "world" and event.axis not in axes and event.axis not in ("pp", "dp"):
        problem, remedy = f"the mesh has no axis {event.axis!r}", f"name one of {', '.join(axes)}"
        raise fault("collectives", text.at(event), problem, remedy)
    if not set(event.stages) <= set(range(len(text.place))):
        problem, remedy = f"stages {event.stages} are not all there", f"name some of 0 to {len(text.place) - 1}"
        raise fault("collectives", text.at(event), problem, remedy)
    if text.rank not in text.group(event):
        problem = f"this rank is not in the group {text.group(event)}"
        raise fault("collectives", text.at(event), problem, "only the members of a group may call its collectives")


def _check_meeting(
    texts: Sequence[Text], group: tuple[int, ...], meeting: Sequence[Position | None], common: _Common
) -> Meeting:
    """One collective as each member has it, None where a member has no more."""
    found = [position for position in meeting if position is not None]
    first = _event(texts, found[0])
    wanted = common.of(first)
    remedy = f"the ranks {group} must call the same collectives in the same order"
    for rank, position in zip(group, meeting, strict=True):
        if position is None:
            raise fault("collectives", texts[found[0][0]].at(first), f"rank {rank} does not take part", remedy)
        other = _event(texts, position)
        if other is not first and common.of(other) != wanted:
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
    _check_columns(texts)
    _check_yields(texts, meetings)
    rows: dict[int, list[tuple[int, int]]] = {text.rank: [] for text in texts}
    for which, meeting in enumerate(meetings):
        for rank, number in meeting:
            rows[rank].append((number, which))
    ordered = {rank: [which for _, which in sorted(row)] for rank, row in rows.items()}
    if not _all_happen(meetings, ordered):
        raise _deadlock(texts, [[meetings[which] for which in row] for row in ordered.values()])
    return len(meetings)


def _all_happen(meetings: Sequence[Meeting], rows: Mapping[int, Sequence[int]]) -> bool:
    """Whether all ranks come to the end of their meetings, in order, each of which waits for all who take part."""
    at = dict.fromkeys(rows, 0)
    missing = list(map(len, meetings))
    moved = [rank for rank, row in rows.items() if row]
    while moved:
        rank = moved.pop()
        which = rows[rank][at[rank]]
        missing[which] -= 1
        if not missing[which]:
            for member, _ in meetings[which]:
                at[member] += 1
                if at[member] < len(rows[member]):
                    moved.append(member)
    return not any(missing)


def _deadlock(texts: Sequence[Text], rows: Sequence[Sequence[Meeting]]) -> VerificationError:
    """The error for ranks that wait for each other, with a shortest circle."""
    import networkx as nx

    waits: nx.DiGraph[Meeting] = nx.DiGraph()
    for row in rows:
        waits.add_edges_from(pairwise(row))
    found = nx.find_cycle(waits)
    cycle = min((nx.shortest_path(waits, after, before) for before, after in found), key=len)[::-1]
    told = [_told(texts, meeting) for meeting in [*cycle, cycle[0]]]
    circle = "\n  waits for ".join(told)
    remedy = "call what ranks do together in one order on all of them"
    return VerificationError(f"rule deadlock: these wait for each other; {remedy}\n  {circle}")


def _check_yields(texts: Sequence[Text], meetings: Sequence[Meeting]) -> None:
    """A step that waits for the gradients of its outputs waits on all ranks: what meets is before that, or after it."""
    if not any(text.recording.early for text in texts):
        return
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
        if text.mesh.widths and where["dp"]:  # the first of each pipeline rank stand for all: `ends` has the others
            continue
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
