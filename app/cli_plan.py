"""Commands that foresee and measure: plan, simulate, bench."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from app.errors import InvalidRequest
from app.shell import AsJson, err, guarded, out, parse_size, print_json

bench = typer.Typer(help="Measure this installation; the figures in the README come from here.", no_args_is_help=True)
PASSED_ON: Final[dict[str, Any]] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
}
"""For `simulate`, whose arguments are the simulator's own."""


@guarded
def plan(
    model: Annotated[str, typer.Argument(help="Model id, a diffusers folder, or a Hub id owner/name.")] = "built-in",
    every: Annotated[bool, typer.Option("--all", help="Show what fits of every model.")] = False,
    cliff: Annotated[bool, typer.Option("--cliff", help="Find where a little more makes it much slower.")] = False,
    size: Annotated[str | None, typer.Option(help="Width x height, e.g. 768x512.")] = None,
    frames: Annotated[int | None, typer.Option(help="Number of frames.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    preset: Annotated[str, typer.Option(help="Hardware preset.")] = "auto",
    vram: Annotated[str | None, typer.Option(help="Plan for a card of that size instead, e.g. 8GiB.")] = None,
    gpus: Annotated[str | None, typer.Option(help="Plan for several cards instead, e.g. 6GiB,12GiB.")] = None,
    ram: Annotated[str | None, typer.Option(help="Plan for that much RAM instead, e.g. 16GiB.")] = None,
    accuracy: Annotated[
        bool, typer.Option("--accuracy", help="Show what was predicted of the last runs, and what they took.")
    ] = False,
    reset: Annotated[
        bool, typer.Option("--reset-calibration", help="Forget what earlier runs taught the predictions.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say beforehand whether it fits, how, and how long it takes; nothing is started."""
    from app import tables
    from app.config import load_settings
    from app.planning import Asked

    width, height = parse_size(size)
    asked = Asked(
        model=model, preset=preset, width=width, height=height, num_frames=frames, num_inference_steps=steps,
        vram=vram, ram=ram, gpus=gpus,
    )  # fmt: skip
    settings = load_settings()
    if reset:
        answer = tables.reset(settings)
    elif accuracy:
        answer = tables.accuracy(settings)
    else:
        answer = tables.answer(settings, asked, every=every, cliff=cliff)
    if as_json:
        print_json(answer.document)
        return
    for part in answer.parts:
        out.print(part, markup=False) if isinstance(part, str) else out.print(part)


@bench.command()
@guarded
def startup(
    rounds: Annotated[int, typer.Option(min=1, help="Starts of each, alternating.")] = 5, as_json: AsJson = False
) -> None:
    """Time from process start to the page answering, against a bare Gradio page of the same version."""
    from app import bench as benches

    result = benches.startup(rounds)
    _show(result, benches.startup_text(result), as_json=as_json)


@bench.command()
@guarded
def overhead(
    rounds: Annotated[int, typer.Option(min=1, help="Warm clips of each, alternating.")] = 5, as_json: AsJson = False
) -> None:
    """Warm time of a built-in clip against a ten-line diffusers script, and whether the frames are identical."""
    from app import bench as benches

    result = benches.overhead(rounds)
    _show(result, benches.overhead_text(result), as_json=as_json)


@bench.command()
@guarded
def link(
    seconds: Annotated[float, typer.Option(min=1, help="About how long it may take.")] = 30.0, as_json: AsJson = False
) -> None:
    """Measure RAM to GPU, RAM to RAM and reading from the disks, and keep it: plans here use it from then on."""
    from app import bench as benches
    from app import hardware
    from app.config import load_settings

    settings = load_settings()
    measured = benches.link(settings, seconds)
    names = {gpu.uuid: gpu.name for gpu in hardware.probe(settings).gpus}
    _show(measured.model_dump(mode="json"), benches.link_text(measured, names), as_json=as_json)


@bench.command()
@guarded
def matrix(
    model: Annotated[list[str] | None, typer.Option(help="Only these models; repeatable.")] = None,
    cards: Annotated[str | None, typer.Option(help="Only this machine, e.g. 8 or 6+12 (GB of VRAM).")] = None,
    ram: Annotated[int | None, typer.Option(help="Only this much RAM, in GB.")] = None,
    size: Annotated[str | None, typer.Option(help="Only small, default or largest.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Simulators at once; each takes a core.")] = 2,
    to: Annotated[Path | None, typer.Option(help="Write the table to this file as Markdown.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Keep outcomes in this file, and take what stands there: to go on another time.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run every plan for many machines in the simulator, and compare its peak with the prediction. Takes hours."""
    from app import matrix as plans
    from app.config import load_settings

    settings = load_settings()
    machines = (_cards(cards),) if cards else plans.CARDS
    if size is not None and size not in plans.SIZES:
        raise InvalidRequest(f"--size is one of {', '.join(plans.SIZES)}.", field="size")
    if to is not None and not to.absolute().parent.is_dir():
        raise InvalidRequest(f"The folder of {to} does not exist. Make it, or name another file.", field="to")
    found = plans.explore(
        settings, model or (), machines, (ram,) if ram else plans.RAMS, (size,) if size else plans.SIZES
    )
    if not found.cases:
        raise InvalidRequest("No fitted model has a plan there. `pocketreel plan --all` shows the models' ids.")
    err.print(found.words())
    rows = plans.run_all(
        found.cases, processes, lambda row: err.print(f"{row.case.title}: {plans.row_words(row)}"), keep
    )
    result = plans.summary(rows)
    _show(result._asdict(), f"{found.words()}\n{plans.summary_words(result)}", as_json=as_json)
    if to is not None:
        to.write_text(plans.document(found, rows), "utf-8")


@bench.command()
@guarded
def offload(
    engines: Annotated[
        list[str] | None, typer.Option("--engine", help="Only these, beside resident; repeatable.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model id, a diffusers folder, or a Hub id owner/name.")] = "built-in",
    size: Annotated[str | None, typer.Option(help="Width x height, e.g. 768x512.")] = None,
    frames: Annotated[int | None, typer.Option(help="Number of frames.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    vram: Annotated[str | None, typer.Option(help="Imitate a smaller card, e.g. 8GiB: the rest is taken.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare ways to hold a model's denoiser: time a step, memory, and whether the frames are the same."""
    from app import engines as ways
    from app.config import load_settings
    from app.events import Engine
    from app.presets import parse_bytes
    from app.schema import Draft

    unknown = sorted(set(engines or ()) - set(Engine))
    if unknown:
        raise InvalidRequest(
            f"No engine is called {', '.join(unknown)}. There are {', '.join(Engine)}.", field="engine"
        )
    width, height = parse_size(size)
    draft = Draft(
        model=model, prompt="a red ball bouncing on a blue background", width=width, height=height, num_frames=frames,
        num_inference_steps=steps, seed=0,
    )  # fmt: skip
    try:
        limit = parse_bytes(vram) if vram is not None else None
    except ValueError as error:
        raise InvalidRequest(f"--vram: {error}.", field="vram") from None
    found = ways.compare(
        load_settings(), draft, [Engine(one) for one in engines or ()], limit,
        lambda outcome: None if as_json else out.print(ways.words(outcome), markup=False),
    )  # fmt: skip
    if as_json:
        print_json([one.model_dump(mode="json") for one in found])


def _cards(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(one) for one in text.split("+"))
    except ValueError:
        raise InvalidRequest(f"--cards {text!r} is not GB of VRAM like 8 or 6+12.", field="cards") from None


def _show(document: Any, text: str, *, as_json: bool) -> None:
    print_json(document) if as_json else out.print(text, markup=False)


@guarded
def simulate(context: typer.Context) -> None:
    """Run a model on simulated devices, from its configuration alone: the peak of each memory in each stage."""
    from app.config import load_settings
    from app.planning import simulator_names
    from app.worker import command_line

    arguments = list(context.args)
    if not arguments or arguments[0].startswith("-"):
        arguments = arguments or ["--help"]
    elif arguments[0] not in ("models", "run", "fit", "plans"):
        arguments.insert(0, "run")
    names = simulator_names(load_settings())
    known = [names.get(argument, argument) for argument in arguments]
    raise typer.Exit(subprocess.run([*command_line("simulate.command"), *known], check=False).returncode)
