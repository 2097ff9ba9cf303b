"""Rules about values: every layer is given those that the graph gives it, and what it returns goes where it belongs.

Shapes know where they come from: which input, parameter, buffer or draw they are, or which call of a body returned
them, and where in its result. The calls of an action, in order, are those of its stage's segments, so each value has a
name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

from autopart.codegen.exchange import Exchange, exchanges
from autopart.codegen.parsed import PROLOGUE
from autopart.codegen.recording_world import Call, Event
from autopart.codegen.shapes import Spec
from autopart.ir.action import Action, Kind
from autopart.ir.segmented import Phase, Segment
from autopart.ir.staged import Staged
from autopart.ir.state import Unit, used_units
from autopart.passes.verify_texts import Text, fault

Paths = Mapping[tuple[int, ...], str]
"""The names of what a function returns, by the place in its result."""


class Values:
    """What each layer of a program takes and returns, by name: once a program, for the texts of all its ranks."""

    def __init__(self, staged: Staged) -> None:
        captured = staged.segmented.captured
        self.staged, self.homes = staged, staged.state.homes
        self.sources = {(_kind(item.kind), item.target): item.value.name for item in captured.inputs}
        for edge in staged.edges:
            named = ((("edge", f"{edge.source} {edge.target} {i}"), v.name) for i, v in enumerate(edge.values))
            self.sources.update(named)
        read = {name for node in captured.prologue for name in node.refs()}
        held = captured.of_kind("input", "buffer", "constant")
        self.prologue = tuple(item.value.name for item in held if item.value.name in read)
        self.counted = _paths([item.value.name for item in captured.of_kind("prologue")])
        self.edges = {(edge.source, edge.target): tuple(v.name for v in edge.values) for edge in staged.edges}
        self._parameters = {item.target: item.value.name for item in captured.of_kind("parameter")}
        self._known: dict[tuple[str, Kind], tuple[tuple[str, ...], Paths]] = {}
        self._exchanges: dict[tuple[int, Kind, int], tuple[Exchange, ...]] = {}
        self._unread: dict[tuple[int, Kind], frozenset[str]] = {}

    def layers(self, action: Action) -> list[Segment]:
        """The segments whose functions an action calls, in order."""
        return [segment for segment, _ in self.staged.phases(action.stage, action.kind)]

    def of(self, segment: Segment, kind: Kind) -> tuple[tuple[str, ...], Paths]:
        """The names of what a layer's function takes and of what it returns."""
        key = segment.name, kind
        if key not in self._known:
            self._known[key] = self._phase(segment, self.staged.segmented.phase(segment, kind))
        return self._known[key]

    def exchanges(self, segment: Segment, kind: Kind, samples: int) -> tuple[Exchange, ...]:
        """The collectives inside a layer's function, for a microbatch of so many samples."""
        if self.staged.segmented.here is None:
            return ()
        key = segment.body, kind, samples
        if key not in self._exchanges:
            phase = self.staged.segmented.phase(segment, kind)
            self._exchanges[key] = exchanges(phase.function, samples) if phase is not None else ()
        return self._exchanges[key]

    def unread(self, segment: Segment, kind: Kind) -> frozenset[str]:
        """What a layer's function makes and neither reads nor returns, as some that is recomputed later."""
        key = segment.body, kind
        if key not in self._unread:
            phase = self.staged.segmented.phase(segment, kind)
            assert phase is not None, "a layer that is called"
            nodes = phase.function.nodes
            read = {name for node in nodes for name in node.refs()} | {*phase.function.outputs, *(phase.keeps or ())}
            self._unread[key] = frozenset(name for node in nodes for name in node.names() if name not in read)
        return self._unread[key]

    def _phase(self, segment: Segment, phase: Phase | None) -> tuple[tuple[str, ...], Paths]:
        assert phase is not None, "a layer that is called"
        read = [unit for unit in self._units(segment) if unit.holds(phase.reads)]
        kept = self._kept(segment, phase.kept)
        takes = (*phase.takes, *kept, *phase.fixed, *(name for unit in read for name in self._whole(unit)))
        returned: list[str | Sequence[str]] = list(phase.gives)
        returned += [[updated(target) for target in phase.updates]] if phase.updates else []
        returned += [self._kept(segment, phase.keeps)] if phase.keeps is not None else []
        units = [unit for unit in self._units(segment) if unit.trainable and unit.holds(phase.gradients)]
        returned += [[gradient(p.target) for p in unit.parameters] for unit in units]
        return takes, _paths(returned)

    def _kept(self, segment: Segment, names: Sequence[str]) -> list[str]:
        return [f"{name} kept by {segment.name}" for name in names]

    def _units(self, segment: Segment) -> tuple[Unit, ...]:
        return used_units(segment.parameters, self.homes)

    def _whole(self, unit: Unit) -> Iterator[str]:
        """The parameters of a unit, which passes whole; one that this step does not read has its own name."""
        return (self._parameters.get(p.target, p.target) for p in unit.parameters)


def gradient(target: str) -> str:
    """The name of what one layer contributes to a parameter's gradient."""
    return f"the gradient of {target}"


def updated(target: str) -> str:
    """The name of a buffer's new value."""
    return f"the new {target}"


def values(text: Text, known: Values) -> int:
    """Check where every value of a rank comes from and goes; the number of values that layers are given."""
    names = _Names(text, known)
    for event in text.events:
        _check_event(text, event, known, names)
    for results in text.recording.handed_out:
        for name, spec in results.items() if isinstance(results, dict) else ():
            wrong = [found for found in map(names.of, getattr(spec, "parts", ())) if found != name]
            if wrong:
                problem = f"step gives {wrong[0] or 'something else'} as {name!r}"
                raise fault("values", f"rank {text.rank}", problem, "hand out each output under its own name")
    return names.count


class _Names:
    """The names of the values of one rank's text, known from the calls that made them."""

    def __init__(self, text: Text, known: Values) -> None:
        self.sources, self.count = known.sources, 0
        self.returned: dict[int, Paths] = {}
        calls: dict[Action | None, list[tuple[int, Call]]] = {}
        for number, call in enumerate(text.recording.calls):
            calls.setdefault(call.within, []).append((number, call))
        for number, call in calls.pop(None, []):
            if call.function == PROLOGUE:
                self._check(text, call, "the prologue", known.prologue)
                self.returned[number] = known.counted
        for action in text.performed:  # in order, so that what a call is given has a name by then
            self._check_action(text, action, calls.get(action, []), known)

    def of(self, spec: Spec | None) -> str:
        """The name of a value in the graph, "" for what is none of its values."""
        if spec is None:
            return "None"
        if spec.call >= 0:
            return self.returned.get(spec.call, {}).get(spec.path, "")
        kind, target = spec.source
        return self.sources.get(spec.source, target if kind == "parameter" else "")

    def _check_action(self, text: Text, action: Action, calls: Sequence[tuple[int, Call]], known: Values) -> None:
        layers = known.layers(action)
        if len(calls) != len(layers):
            problem = f"{len(calls)} functions of layers are called, but the stage has {len(layers)} layers here"
            raise fault("values", text.during(action), problem, "call the function of each layer once, in their order")
        for segment, (number, call) in zip(layers, calls, strict=True):
            takes, self.returned[number] = known.of(segment, action.kind)
            self._check(text, call, segment.name, takes)
            _check_exchanges(text, call, known.exchanges(segment, action.kind, text.samples[action.microbatch]))
            _check_read(text, call, known.unread(segment, action.kind))

    def _check(self, text: Text, call: Call, layer: str, takes: Iterable[str]) -> None:
        for found, wanted in zip_longest(map(self.of, call.given), takes):
            if found != wanted:
                where = f"{text.during(call.within)}, {call.function} ({text.where(call.line)})"
                problem = f"it is given {found or 'something else'} where {layer} takes {wanted or 'nothing more'}"
                raise fault("values", where, problem, "give each layer what the graph gives it, in that order")
            self.count += 1


def _check_exchanges(text: Text, call: Call, wanted: Sequence[Exchange]) -> None:
    """A layer exchanges what its graph has, in that order."""
    for made, needed in zip_longest(call.exchanges, wanted):
        if made is None or needed is None or (made.same(), made.value) != (needed.same(), needed.value):
            where = f"{text.during(call.within)}, {call.function} ({text.where(call.line)})"
            problem = f"inside it comes {made or 'no collective more'} where {needed or 'none'} is due"
            raise fault("values", where, problem, "exchange what the graph of this place exchanges, in that order")


def _check_read(text: Text, call: Call, unread: frozenset[str]) -> None:
    """A layer uses all that its graph uses: no place's part is left out, no chunk's."""
    for line, name in text.recording.unread.get(call.function, ()):
        if name not in unread:
            where = f"{text.during(call.within)}, {call.function} ({text.where(line)})"
            remedy = "use what is exchanged, what is made of it, and what a chunk adds"
            raise fault("values", where, f"{name} is never read", remedy)


def _check_event(text: Text, event: Event, known: Values, names: _Names) -> None:
    """What is sent, added to gradients or stored in a buffer is what it is said to be."""
    wanted: Sequence[str] = ()
    if event.call == "send" and event.action is not None:
        wanted = known.edges.get((event.action.stage, event.action.peer), ())
    elif event.call == "update_buffer":
        wanted = [updated(event.buffers[0])]
    elif event.call in ("accumulate", "reduce_scatter"):
        wanted = [gradient(p.target) for p in known.staged.state.unit(event.unit).parameters]
    else:
        return
    for spec, name in zip(event.what, wanted, strict=False):
        if spec is not None and names.of(spec) != name:
            problem = f"{names.of(spec) or 'something else'} is passed where {name} belongs"
            raise fault("values", text.at(event), problem, "pass on what the layer returned for it")


def _kind(kind: str) -> str:
    """The kind as a text asks for it: constants are among the buffers."""
    return "buffer" if kind == "constant" else kind


def _paths(returned: Sequence[str | Sequence[str]]) -> Paths:
    """A single result is not in a tuple; several are, and what is saved or belongs to a unit is a tuple among them."""
    if len(returned) == 1:
        (only,) = returned
        return {(): only} if isinstance(only, str) else {(i,): name for i, name in enumerate(only)}
    paths: dict[tuple[int, ...], str] = {}
    for place, item in enumerate(returned):
        paths |= {(place,): item} if isinstance(item, str) else {(place, i): name for i, name in enumerate(item)}
    return paths
