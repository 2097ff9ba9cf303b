"""The command line: `autopart demo | plan | inspect | verify | simulate | profile | run`, covers of the library.

Exit status: 0; 1 where something fails or is refused; 2 where the request itself is wrong.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from autopart import demo as demonstration
from autopart.errors import AutopartError
from autopart.ir.mesh import Sizes

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)

Target = Annotated[
    str,
    typer.Argument(
        help="FILE.py:NAME or MODULE:NAME of a function that returns (model, args) or (model, args, kwargs)"
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(help="sizes of the mesh axes, such as pp=2,dp=2, or dp=3:1 for unequal shares; default: chosen"),
]
Placement = Annotated[str | None, typer.Option(help="ddp, zero1, zero2 or fsdp; default: chosen")]
Schedule = Annotated[
    str | None,
    typer.Option(help="a pipeline schedule, such as 1f1b or 'interleaved(chunks=3)', or auto to search; default: 1f1b"),
]
Microbatches = Annotated[int | None, typer.Option(help="how many; default: chosen")]
Memory = Annotated[str | None, typer.Option(help="the limit per device, such as 16GiB")]
Stages = Annotated[int | None, typer.Option(help="how many pipeline stages, over all ranks; default: chosen")]
Folder = Annotated[Path, typer.Argument(help="a folder that `inspect --out` or Program.write made")]
Devices = Annotated[int | None, typer.Option(help="how many ranks; default: the size of the mesh")]


def parse_mesh(text: str | None) -> Sizes | None:
    """``{"pp": 2, "dp": 2}`` for ``pp=2,dp=2``, ``{"dp": (3, 1)}`` for ``dp=3:1``, ``pp=2:1`` alike; None for None.

    Raises:
        ValueError: `text` is not of that form.
    """
    if text is None:
        return None
    pairs = [part.strip().partition("=") for part in text.split(",")]
    if not all(axis and all(n.isdecimal() for n in size.split(":")) for axis, _, size in pairs):
        raise ValueError(f"mesh: {text!r} is not of the form pp=2,dp=2, or dp=3:1 for unequal shares of the batch")
    sizes = ((axis, [int(n) for n in size.split(":")]) for axis, _, size in pairs)
    return {axis: tuple(found) if len(found) > 1 else found[0] for axis, found in sizes}


def load_target(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model and the sample call, positional and keyword arguments, that the function named by `target` returns.

    Raises:
        ValueError: there is no such function, or it returns something else.
    """
    place, _, name = target.rpartition(":")
    if not place:
        raise ValueError(f"target: {target!r} is not of the form FILE.py:NAME or MODULE:NAME")
    module = demonstration.load_file(place) if place.endswith(".py") else import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"target: {place} has no function {name!r}")
    made = function()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[1], tuple):
        raise ValueError(f"target: {name}() must return (model, args) or (model, args, kwargs), with args a tuple")
    return made[0], made[1], made[2] if len(made) == 3 else {}


def import_module(place: str) -> ModuleType:
    """The module of that name.

    Raises:
        ValueError: there is none. What goes wrong inside of it is raised as it is.
    """
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"target: there is no module {error.name!r}; a file is named with its .py") from error


def chosen(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


@app.command()
def demo(
    nproc: Annotated[int, typer.Option(min=1, help="how many processes, one a rank")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 300,
    batch: Annotated[int, typer.Option(min=1, help="samples a step, over all ranks")] = 16,
    mesh: Mesh = None,
    placement: Placement = None,
    schedule: Schedule = None,
    microbatches: Microbatches = None,
    model: Annotated[Path | None, typer.Option(help="a file like examples/gpt.py, which is the default")] = None,
    out: Annotated[Path, typer.Option(help="folder for losses, weights, log and the ranks' sources")] = Path(
        "out/demo"
    ),
) -> None:
    """Train a small GPT on several processes of this machine and compare with one process, step by step."""
    # The model is so small that one data axis would be chosen; two stages show more.
    sizes = parse_mesh(mesh) or ({"pp": 2, "dp": nproc // 2} if nproc % 2 == 0 else None)
    demonstration.run(
        demonstration.Settings(
            model=str((model or demonstration.default_model()).resolve()),
            out=str(out.resolve()),
            nproc=nproc,
            steps=steps,
            batch=batch,
            mesh=sizes,
            placement=placement,
            schedule=schedule,
            microbatches=microbatches,
        )
    )


@app.command()
def plan(
    target: Target,
    devices: Devices = None,
    mesh: Mesh = None,
    stages: Stages = None,
    placement: Placement = None,
    schedule: Schedule = None,
    microbatches: Microbatches = None,
    memory: Memory = None,
    cluster: Annotated[Path | None, typer.Option(help="the devices: a file of `profile`, or of Cluster.save")] = None,
    save: Annotated[Path | None, typer.Option(help="also write the plan to this file")] = None,
) -> None:
    """Print the plan for a model: stages, placements, schedule, predicted bytes and memory."""
    from autopart.cluster import Cluster

    machines = None if cluster is None else Cluster.load(cluster)
    model, args, kwargs = load_target(target)
    made = make_plan(
        model,
        args,
        kwargs,
        devices=devices,
        mesh=parse_mesh(mesh),
        stages=stages,
        placement=placement,
        schedule=schedule,
        microbatches=microbatches,
        memory=memory,
        cluster=machines,
    )
    typer.echo(made.summary())
    if save is not None:
        made.save(save)


@app.command()
def inspect(
    target: Target,
    devices: Devices = None,
    mesh: Mesh = None,
    stages: Stages = None,
    placement: Placement = None,
    schedule: Schedule = None,
    microbatches: Microbatches = None,
    memory: Memory = None,
    rank: Annotated[int, typer.Option(min=0, help="whose source to print")] = 0,
    out: Annotated[Path | None, typer.Option(help="write all ranks' sources to this folder instead")] = None,
) -> None:
    """Print the program that a rank runs, or write those of all ranks to a folder."""
    import autopart

    model, args, kwargs = load_target(target)
    made = make_plan(
        model,
        args,
        kwargs,
        devices=devices,
        mesh=parse_mesh(mesh),
        stages=stages,
        placement=placement,
        schedule=schedule,
        microbatches=microbatches,
        memory=memory,
    )
    program = autopart.compile(model, made, args, kwargs)
    if out is not None:
        program.write(out)
        typer.echo(f"the sources of {len(program.ranks)} ranks are in {out}")
    elif rank >= len(program.ranks):
        raise ValueError(f"rank: {rank} is not one of the {len(program.ranks)} ranks, which count from 0")
    else:
        typer.echo(program.ranks[rank].source)


@app.command()
def verify(folder: Folder) -> None:
    """Check a written program, edited or not, by the gate that every program passes."""
    import autopart

    typer.echo(str(autopart.verify(autopart.Program.read(folder))))


@app.command()
def simulate(
    path: Annotated[Path, typer.Argument(help="a plan's file, or the folder of a written program")],
    device: Annotated[str | None, typer.Option(help="time a program on these devices, such as h100-80")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="how many machines of these devices")] = 1,
    svg: Annotated[Path | None, typer.Option(help="also draw it: an SVG picture, time to the right")] = None,
    trace: Annotated[Path | None, typer.Option(help="also write it as JSON for Perfetto or chrome://tracing")] = None,
) -> None:
    """Print the predicted timeline of a step, in seconds: its length, the bubble, what each rank does when."""
    import autopart

    if not path.exists():
        raise ValueError(f"path: there is no {path}")
    subject = autopart.Program.read(path) if path.is_dir() else autopart.Plan.load(path)
    plan = subject.plan if isinstance(subject, autopart.Program) else subject
    devices = -(-plan.mesh.size // nodes)
    cluster = None if device is None else autopart.Cluster.preset(device, nodes=nodes, per_node=devices)
    timeline = autopart.simulate(subject, cluster)
    if svg is not None:
        svg.write_text(timeline.to_svg())
    if trace is not None:
        trace.write_text(timeline.to_chrome())
    typer.echo(str(timeline))


@app.command()
def profile(
    processes: Annotated[int, typer.Option(min=2, help="how many ranks share the machine's cores")] = 2,
    seconds: Annotated[float, typer.Option(help="about how long to measure")] = 4.0,
    out: Annotated[Path, typer.Option(help="the file to write, for `plan --cluster` and Cluster.load")] = Path(
        "profile.json"
    ),
) -> None:
    """Measure this machine's processor: matrix products, memory, and collectives over gloo between its ranks."""
    from rich.progress import Progress

    from autopart import profiling

    if not out.resolve().parent.is_dir():
        raise ValueError(f"out: there is no folder {out.resolve().parent}")
    try:
        with Progress(transient=True) as progress:
            bar = progress.add_task(f"measuring on {processes} ranks", total=len(profiling.PHASES))
            made = profiling.profile(processes, seconds, lambda done: progress.update(bar, completed=done))
    except KeyboardInterrupt:
        typer.echo("autopart: interrupted; nothing is written", err=True)
        raise typer.Exit(130) from None
    made.save(out)
    typer.echo(f"{made}\nlatency {made.link_latency:.2g} s a message; written to {out}")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="the script; what follows it are its own arguments")],
    nproc: Annotated[int, typer.Option(min=1, help="how many processes, one a rank")] = 1,
) -> None:
    """Run a script on several processes of this machine, one a rank, as torchrun does."""
    from autopart.launcher import launch

    raise typer.Exit(launch(script, context.args, nproc))


def make_plan(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Any:
    """`autopart.plan` with the options that were given; `devices` is the size of the mesh where only that was."""
    import autopart
    from autopart.ir.mesh import Mesh as DeviceMesh

    if options["devices"] is None and options["mesh"] is not None:
        options["devices"] = DeviceMesh.of(options["mesh"]).size
    return autopart.plan(model, args, kwargs, **chosen(**options))


def main() -> None:
    """The entry point. Errors that speak to the user are printed without a traceback."""
    try:
        app()
    except (AutopartError, ValueError, OSError) as error:
        typer.echo(f"autopart: {error}", err=True)
        sys.exit(1 if isinstance(error, AutopartError) else 2)


if __name__ == "__main__":
    main()
