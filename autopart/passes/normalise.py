"""normalise: Captured -> Captured. The same step in the form in which its microbatches add up to the whole batch.

In this order:

* every random number is a function of seed, call, operation and element, so that it can be drawn piece by piece
  (`draws`); bags of one length are computed each by itself (`bags`); what a person would not have written is gone
  (`simplify`);
* a parameter used in several places has one gradient output a use (their sum is its gradient);
* gradients of inputs are values of their own, and outputs say which ranks get them (`boundary`); new values of buffers
  are made by nodes;
* a mean over the batch is a sum divided by the size of the *whole* batch (`decompose`), or of the slice where each
  slice computes as if it were the batch (`slices`, `weights`);
* what is equal on all microbatches is scaled by the microbatch's share where it joins a sum over them (`judge`);
* what depends on the whole batch's inputs alone (the count of valid targets) is a prologue, computed once a step;
* views of parameters that the backward reads are made again there, so a forward saves none of them.

before: loss = nll_sum / count                      (count of this microbatch)
after:  prologue: count (of the whole batch); loss = nll_sum / count, a part of the whole loss
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace

import torch

from autopart.errors import CaptureError
from autopart.ir.captured import Captured, dead_code_eliminated
from autopart.ir.graph import Arg, Input, Node, Output, Ref, Share, Size, Value, ancestors, descendants
from autopart.ir.placement import Partial, Shard
from autopart.passes.accumulate import trees
from autopart.passes.bags import with_bags
from autopart.passes.boundary import check_detached, with_everywhere, with_own_input_gradients
from autopart.passes.decompose import decompose_means, explicit_squeezes
from autopart.passes.draws import with_draws
from autopart.passes.judge import Judgement, Site, judge
from autopart.passes.simplify import simplify
from autopart.passes.slices import of_the_slice, without_running_statistics
from autopart.passes.weights import counts, judge_batch, judge_slices
from autopart.rules.factor import argument, with_argument

VIEWS = frozenset(
    ("t", "permute", "transpose", "view", "expand", "unsqueeze", "squeeze", "alias", "slice", "select", "_unsafe_view")
)


def normalise(
    captured: Captured, *, semantics: str = "exact", outputs: str | None = None, together: bool = False
) -> Captured:
    """Normalise a captured step. With `outputs` = "all", every rank gets those beside the loss whole, too.

    With semantics "accumulate", a step that couples a batch's samples is left as it is for each slice of the batch
    (`passes.slices`); with "exact" and if its samples may compute `together`, as there is one microbatch, for the
    batch. Raises CaptureError for random operators that cannot be drawn in pieces, and else with "exact" for what
    couples a batch's samples and for buffers that are updated from them.
    """
    captured = _prepared(captured, outputs)
    if semantics == "exact":
        try:
            return _with_judgement(*_exact(captured))
        except CaptureError as error:
            if not together:
                raise
            return _together(captured, error)
    nodes = without_running_statistics(of_the_slice(captured.nodes))
    sliced = dead_code_eliminated(replace(captured, nodes=nodes, sliced=True))
    with contextlib.suppress(CaptureError):  # nothing couples, so the slices add up to the whole batch
        exact, judgement = _exact(captured)
        # Of what the whole batch decides, a slice takes the counts that divide its loss, and nothing else.
        if not judgement.prologue or set(judgement.prologue) <= counts(sliced.inputs, sliced.nodes, sliced.outputs):
            return _with_judgement(exact, judgement)
    return _with_judgement(sliced, judge_slices(sliced.inputs, sliced.nodes, sliced.outputs))


def _together(captured: Captured, why: CaptureError) -> Captured:
    """The step for one slice, which is the batch. Raises `why` again where there is no such step either."""
    nodes = without_running_statistics(of_the_slice(decompose_means(captured.inputs, captured.nodes)))
    sliced = dead_code_eliminated(replace(captured, nodes=nodes, sliced=True, coupled=str(why)))
    try:
        return _with_judgement(sliced, judge_batch(sliced.inputs, sliced.nodes, sliced.outputs))
    except CaptureError:
        raise why from None


def _prepared(captured: Captured, outputs: str | None) -> Captured:
    """The step without what means nothing to a part of the batch."""
    _refuse(captured)
    check_detached(captured)
    captured = with_draws(captured)
    nodes = with_bags(captured.inputs, captured.nodes)
    nodes, alias = simplify(nodes, (item.value for item in captured.inputs))
    named = tuple(replace(out, name=alias.get(out.name, out.name)) for out in captured.outputs)
    result = tuple(alias.get(item, item) if isinstance(item, str) else item for item in captured.result)
    captured = replace(captured, nodes=nodes, outputs=_gradients_by_use(nodes, named), result=result)
    captured = _with_made_updates(with_everywhere(with_own_input_gradients(captured), outputs))
    return replace(captured, nodes=explicit_squeezes(captured.inputs, captured.nodes))


def _exact(captured: Captured) -> tuple[Captured, Judgement]:
    """The step with its means taken apart, and how its microbatches add up to the whole batch."""
    nodes = decompose_means(captured.inputs, captured.nodes)
    captured = dead_code_eliminated(replace(captured, nodes=nodes))
    judgement = judge(captured.inputs, captured.nodes, captured.outputs)
    _check_updates(captured)
    return captured, judgement


def _with_judgement(captured: Captured, judgement: Judgement) -> Captured:
    captured = _with_whole_batch(_with_output_placements(captured, judgement), judgement)
    captured = _with_prologue(captured, judgement.prologue)
    return dead_code_eliminated(_with_parameter_views(captured))


def _refuse(captured: Captured) -> None:
    kinds = {item.target: item.kind for item in captured.inputs}
    for out in captured.updates():
        if (kind := kinds.get(out.target, "buffer")) != "buffer":
            place = next((node.place() for node in captured.nodes if out.name in node.names()), "")
            raise CaptureError(
                f"{place}the {kind} {out.target} is changed in place during the forward, which "
                "is not supported; work on a copy of it"
            )


def _check_updates(captured: Captured) -> None:
    """Refuse a step that computes with a buffer which its forward updates: it is not the same on all microbatches."""
    held = {item.target: item.value.name for item in captured.of_kind("buffer")}
    for out in captured.updates():
        reached = descendants(captured.nodes, {held[out.target]} if out.target in held else ())
        if reader := next((o for o in captured.outputs if o.name in reached and o.kind != "mutation"), None):
            place = next((node.place() for node in captured.nodes if out.name in node.names()), "")
            raise CaptureError(
                f"{place}the buffer {out.target} is updated by every microbatch, and the {reader.kind} "
                f"{reader.target} depends on it, so it would not be that of the whole batch; pass "
                'microbatches=1 to update it once, or semantics="accumulate" to update it by each microbatch in order, '
                "or update it in the loop"
            )


def _with_made_updates(captured: Captured) -> Captured:
    """The new value of a buffer that no node makes (another buffer, say) is made by a copy at the end."""
    updated = {out.name for out in captured.updates()}
    for node in captured.nodes if updated else ():
        updated.difference_update(node.names())
    if not updated:
        return captured
    captured, copies = _copied(captured, [out.name for out in captured.updates() if out.name in updated])
    outputs = (replace(o, name=copies.get(o.name, o.name)) if o.kind == "mutation" else o for o in captured.outputs)
    return replace(captured, outputs=tuple(outputs))


def _gradients_by_use(nodes: tuple[Node, ...], outputs: tuple[Output, ...]) -> tuple[Output, ...]:
    """Cut the sum at a gradient output into an output for each of its terms, so that each layer hands over its own
    part.

    Gradients come in the parameters' order, those of one parameter in the order in which the backward makes them.
    """
    sums = {tree.root: tree.leaves for tree in trees(nodes, (out.name for out in outputs))}
    place = {name: i for i, node in enumerate(nodes) for name in node.names()}
    order = {out.target: i for i, out in enumerate(outputs) if out.kind == "grad"}
    grads = [out for out in outputs if out.kind == "grad"]
    terms = [replace(out, name=leaf) for out in grads for leaf in sums.get(out.name, (out.name,))]
    terms.sort(key=lambda out: (order[out.target], place.get(out.name, -1)))
    return (*(out for out in outputs if out.kind != "grad"), *terms)


def _with_output_placements(captured: Captured, judgement: Judgement) -> Captured:
    """Say of each output how microbatches combine."""
    outputs = []
    for index, out in enumerate(captured.outputs):
        placement = judgement.placements[out.name]
        if isinstance(placement, Shard) and placement.outer != 1:
            raise CaptureError(
                f"the output {out.name} has the batch inside dim {placement.dim}, so microbatches cannot be joined "
                "along it; return it before the batch is folded into another dim"
            )
        partial = isinstance(placement, Partial) or index in judgement.output_shares
        outputs.append(replace(out, dim=placement.dim if isinstance(placement, Shard) else None, partial=partial))
    return replace(captured, outputs=tuple(outputs))


def _with_whole_batch(captured: Captured, judgement: Judgement) -> Captured:
    """Apply the judgement: sizes of the whole batch, and shares of the batch where a constant joins a sum."""
    edits: dict[int, list[tuple[Site, bool]]] = {}
    for site in judgement.whole:
        edits.setdefault(site.node, []).append((site, True))
    for site in judgement.shares:
        edits.setdefault(site.node, []).append((site, False))
    values = {value.name: value for value in captured.values()}
    nodes: list[Node] = []
    shares: dict[tuple[str, str, bool], str] = {}  # one a module and phase, so that none travels far
    for index, node in enumerate(captured.nodes):
        for site, whole in edits.get(index, ()):
            arg = argument(node, site.path)
            if whole:
                node = with_argument(node, site.path, replace(arg, whole=True))
            elif isinstance(arg, Ref):
                key = arg.name, node.module, node.backward
                if key not in shares:
                    shares[key] = f"{arg.name}_share{len(nodes)}"
                    nodes.append(_scaled(values[arg.name], shares[key], node))
                node = with_argument(node, site.path, Ref(shares[key]))
            else:
                node = with_argument(node, site.path, Share(arg))
        nodes.append(node)
    outputs = list(captured.outputs)
    made = {name: node for node in nodes for name in node.names()}
    for index in judgement.output_shares:
        out = outputs[index]
        backward = out.kind in ("grad", "input_grad")
        like = made.get(out.name) or next(node for node in reversed(nodes) if node.backward is backward)
        name = f"{out.name}_share"
        scaled = _scaled(values[out.name], name if name not in made else f"{name}{len(nodes)}", like)
        nodes.append(scaled)
        made[scaled.names()[0]] = scaled
        outputs[index] = replace(out, name=scaled.names()[0])
    renamed = {old.name: new.name for old, new in zip(captured.outputs, outputs, strict=True) if old.kind != "grad"}
    result = tuple(renamed.get(item, item) if isinstance(item, str) else item for item in captured.result)
    return replace(captured, nodes=tuple(nodes), outputs=tuple(outputs), result=result)


def _scaled(value: Value, name: str, like: Node) -> Node:
    """``value * b / B``, belonging where `like` does."""
    op = torch.ops.aten.mul.Tensor
    return replace(
        like, op=op, args=(Ref(value.name), Share()), kwargs=(), outs=(replace(value, name=name),), single=True
    )


def _with_prologue(captured: Captured, wanted: Iterable[str]) -> Captured:
    """Move the values in `wanted` to a prologue on the whole batch; they become inputs of the rest."""
    wanted = set(wanted)
    if not wanted:
        return captured
    cone = ancestors(captured.nodes, wanted)[0]
    values = {value.name: value for value in captured.values()}
    names = {name: name if name in wanted else f"{name}_whole" for node in cone for name in node.names()}
    prologue = tuple(_whole(node.renamed(names)) for node in cone)
    inputs = tuple(Input(values[name], "prologue", name) for node in cone for name in node.names() if name in wanted)
    nodes = tuple(_without(node, wanted) for node in captured.nodes)
    captured = replace(
        captured,
        inputs=(*captured.inputs, *inputs),
        nodes=tuple(node for node in nodes if any(node.names())),
        prologue=prologue,
    )
    return _with_copies(captured, wanted)


def _whole(node: Node) -> Node:
    """The node on the whole batch, of which the share is 1."""
    return node.mapped(lambda arg: arg.factor if isinstance(arg, Share) else arg)


def _with_copies(captured: Captured, given: set[str]) -> Captured:
    """A prologue value that the step returns is made by its last layer, as every output is: copy it there."""
    returned = [out.name for out in captured.outputs if out.name in given]
    if not returned:
        return captured
    captured, copies = _copied(captured, returned)
    return replace(
        captured,
        outputs=tuple(replace(out, name=copies.get(out.name, out.name)) for out in captured.outputs),
        result=tuple(copies.get(item, item) if isinstance(item, str) else item for item in captured.result),
    )


def _copied(captured: Captured, names: list[str]) -> tuple[Captured, dict[str, str]]:
    """The step with copies of some values made by its last layer's forward, and the copies' names."""
    values = {value.name: value for value in captured.values()}
    last = max(i for i, node in enumerate(captured.nodes) if not node.backward)
    like, copies = captured.nodes[last], {name: f"{name}_copy" for name in names}
    made = [
        replace(
            like,
            op=torch.ops.aten.clone.default,
            args=(Ref(name),),
            kwargs=(),
            outs=(replace(values[name], name=copy),),
            single=True,
        )
        for name, copy in copies.items()
    ]
    return replace(captured, nodes=(*captured.nodes[: last + 1], *made, *captured.nodes[last + 1 :])), copies


def _without(node: Node, names: set[str]) -> Node:
    if names.isdisjoint(node.names()):
        return node
    return replace(node, outs=tuple(out if out is not None and out.name not in names else None for out in node.outs))


def _with_parameter_views(captured: Captured) -> Captured:
    """Make views of parameters again in the backward, next to their first use there, instead of saving them."""
    parameters = {item.value.name for item in captured.of_kind("parameter")}
    views: dict[str, Node] = {}
    for node in captured.nodes:
        sources = node.refs()
        held = not node.backward and sources and all(s in parameters or s in views for s in sources)
        if held and node.aten in VIEWS and not _moves(node.args):
            views.update(dict.fromkeys(node.names(), node))
    again: dict[str, str] = {}
    nodes: list[Node] = []

    def remake(name: str, user: Node) -> None:
        if name in again or name not in views:
            return
        for source in views[name].refs():
            remake(source, user)
        again[name] = f"{name}_again"
        copy = views[name].renamed(again)
        nodes.append(replace(copy, backward=True, sequence=user.sequence, module=user.module, source=user.source))

    for node in captured.nodes:
        if node.backward:
            for name in tuple(node.refs()):
                remake(name, node)
            node = node.renamed(again)
        nodes.append(node)
    return replace(captured, nodes=tuple(nodes))


def _moves(arg: Arg) -> bool:
    """Whether a size that moves with the batch is anywhere in an argument."""
    if isinstance(arg, tuple):
        return any(_moves(item) for item in arg)
    return isinstance(arg, Size)
