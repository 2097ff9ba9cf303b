"""``torch.compile(f, backend="autopart")``: each region runs as a forward and a backward that autopart has written out.

For one device and for reading: torch finds the regions and their gradients, autopart prints each as it prints the
bodies of its programs, with the user's modules and lines, and runs that text. Nothing is placed or planned.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopart import _torch
from autopart.capture.convert import module_path, source
from autopart.capture.decompositions import table
from autopart.codegen.functions import function
from autopart.codegen.parsed import load
from autopart.errors import CaptureError
from autopart.ir.graph import Arg, Node, Ref, Value

Show = Callable[[str], object]


def backend(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: Any = None
) -> Callable[..., Any]:
    """Compile one region. ``options={"show": print}`` hands the text of every forward and backward to `show`.

    Sizes are fixed: pass ``dynamic=False`` to ``torch.compile``, which then compiles each new shape anew. Raises
    ValueError for another option, CaptureError for a region with sizes that vary, or with an operator that has no
    name in ``torch.ops``; torch wraps it.
    """
    unknown = set(options or {}) - {"show"}
    if unknown or mode is not None:
        what = f"option {sorted(unknown)[0]!r}" if unknown else f"mode {mode!r}"
        raise ValueError(f"backend='autopart': {what} is not known; only options={{'show': a function of text}} is")
    show: Show | None = (options or {}).get("show")
    if show is not None and not callable(show):
        raise TypeError(f"backend='autopart': show must be a function of text, not {show!r}")

    def compiler(phase: str) -> Callable[..., Any]:
        def compiled(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            text, constants = written(gm, phase)
            if show is not None:
                show(text)
            namespace = load(text, f"<{phase} of a region>")
            namespace |= constants
            run: Callable[..., Any] = namespace[phase]
            return run

        return compiled

    return _torch.autograd_backend(graph, inputs, compiler("forward"), compiler("backward"), table())


def written(gm: torch.fx.GraphModule, phase: str) -> tuple[str, dict[str, torch.Tensor]]:
    """The text of one function called `phase`, and the tensors that it reads by name beside its arguments."""
    names = {node: node.name for node in gm.graph.nodes}
    formals = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    constants = {node.name: _attribute(gm, str(node.target)) for node in gm.graph.nodes if node.op == "get_attr"}
    _refuse_symbols(gm)
    (results,) = gm.graph.output_node().args
    result = "".join(f"{names[item] if item is not None else None}, " for item in results)  # type: ignore[union-attr]
    nodes = tuple(_node(node) for node in gm.graph.nodes if node.op == "call_function" and not _picks(node))
    lines = function(phase, formals, nodes, f"({result.rstrip()})", doc=f"{phase.capitalize()} of a region.")
    header = ["import torch", "", "aten = torch.ops.aten", f"DEVICE = torch.device({str(_device(gm))!r})", "", ""]
    return "\n".join([*header, *lines]) + "\n", constants


def _picks(node: torch.fx.Node) -> bool:
    return node.target is operator.getitem


def _node(node: torch.fx.Node) -> Node:
    """One FX call as autopart's node; its results are named as the nodes that pick them are."""
    if not isinstance(node.target, _torch.OpOverload):
        raise CaptureError(f"{source(node) or module_path(node)}: {node.target} has no text; call the region eagerly")
    result = node.meta.get("val")
    outs: tuple[Value | None, ...] = (_value(node),)
    if isinstance(result, list | tuple):
        picked = {user.args[1]: user for user in node.users if _picks(user)}
        outs = tuple(_value(picked[i]) if i in picked else None for i in range(len(result)))
    return Node(
        op=node.target,
        args=tuple(_argument(arg) for arg in node.args),
        kwargs=tuple((key, _argument(arg)) for key, arg in node.kwargs.items()),
        outs=outs,
        single=not isinstance(result, list | tuple),
        backward=False,
        module=re.sub(r"^L\['\w+'\]\.?", "", module_path(node)),  # Dynamo's name of the root
        source=source(node),
    )


def _value(node: torch.fx.Node) -> Value:
    tensor = node.meta.get("val")
    if not isinstance(tensor, torch.Tensor):
        return Value(node.name, (), torch.float32)
    return Value(node.name, tuple(int(size) for size in tensor.shape), tensor.dtype)


def _argument(arg: Any) -> Arg:
    if isinstance(arg, list | tuple):
        return tuple(_argument(item) for item in arg)
    return Ref(arg.name) if isinstance(arg, torch.fx.Node) else arg


def _attribute(gm: torch.fx.GraphModule, path: str) -> torch.Tensor:
    found: Any = gm
    for name in path.split("."):
        found = getattr(found, name)
    if not isinstance(found, torch.Tensor):
        raise CaptureError(f"the region holds {path}, a {type(found).__name__}, which has no text; call it eagerly")
    return found


def _refuse_symbols(gm: torch.fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
            raise CaptureError(
                "backend='autopart': the region has sizes that vary; pass dynamic=False to torch.compile, so that each "
                "new shape is compiled anew"
            )


def _device(gm: torch.fx.GraphModule) -> torch.device:
    """The one device that the region's calls name."""
    flat = [arg for node in gm.graph.nodes for arg in _torch.pytree.tree_leaves((node.args, node.kwargs))]
    named = dict.fromkeys(arg for arg in flat if isinstance(arg, torch.device))
    if len(named) > 1:
        raise CaptureError(f"backend='autopart': the region makes tensors on {', '.join(map(str, named))}; use one")
    return next(iter(named), torch.device("cpu"))
