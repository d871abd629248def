"""The simulator on the command line.

    python -m app.runtime.simulate models
    python -m app.runtime.simulate run wan2.1-t2v-14b --size 832x480 --frames 81 --vram 12GiB --strategy leaf_stream
    python -m app.runtime.simulate run MODEL --vram 8GiB,12GiB --component transformer=leaf_stream@cuda:1 --json
    python -m app.runtime.simulate fit MODEL --out FILE.toml
    python -m app.runtime.simulate fit MODEL --out FILE.toml --quick
    python -m app.runtime.simulate fit assets/demo --name built-in --size 96x96 --frames 33
    python -m app.runtime.simulate plans < jobs.jsonl

Tables are for people; `--json` prints one JSON document and nothing else. Exit codes: 0 it fits, 2 wrong arguments,
3 it does not fit.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from rich.console import Console
from rich.table import Table

from app.coefficients import Coefficients
from app.errors import BadInput, PocketreelError
from app.runtime.simulate import families, planned
from app.runtime.simulate.families import Family
from app.runtime.simulate.fit import fit, fit_quick
from app.runtime.simulate.run import Session, default_shape, versions
from app.runtime.simulate.toml import to_toml
from app.runtime.simulate.values import ComponentSetup, GpuSpec, Hold, MachineSpec, Peak, Setup, Shape, Simulation
from app.schema import GIB, Stage

STRATEGIES: dict[str, dict[str, Any]] = {
    "resident": {"hold": Hold.RESIDENT},
    "model_offload": {"hold": Hold.MODEL_OFFLOAD},
    "block": {"hold": Hold.BLOCK},
    "block_stream": {"hold": Hold.BLOCK, "use_stream": True},
    "leaf": {"hold": Hold.LEAF},
    "leaf_stream": {"hold": Hold.LEAF, "use_stream": True},
    "leaf_low": {"hold": Hold.LEAF, "use_stream": True, "low_cpu_mem_usage": True},
    "leaf_disk": {"hold": Hold.LEAF, "use_stream": True, "offload_to_disk": True},
    "sequential": {"hold": Hold.SEQUENTIAL},
    "cpu": {"hold": Hold.CPU},
}
"""Names for the usual setups of a component."""

_UNITS = {"": 1, "B": 1, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "KB": 1000, "MB": 1000**2, "GB": 1000**3}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    options = _parser().parse_args(argv)
    torch.set_num_threads(1)  # nothing is computed
    diffusers.utils.logging.set_verbosity_error()
    try:
        return int(options.command(options))
    except PocketreelError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except (torch.OutOfMemoryError, MemoryError) as error:
        where = " ".join(getattr(error, "__notes__", ()))
        if options.json:
            sys.stdout.write(json.dumps({"fits": False, "error": str(error), "where": where}) + "\n")
        else:
            sys.stderr.write(f"It does not fit: {error} ({where})\n")
        return 3


def parse_bytes(text: str) -> int:
    """`12GiB`, `450 MiB`, `24GB` or plain bytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 12GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(parse_bytes(part) for part in text.split(","))


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT, for example 768x512")
    return int(match[1]), int(match[2])


def parse_strategy(text: str) -> dict[str, Any]:
    """`leaf_stream` or `leaf_stream@cuda:1` or `leaf_stream+float8_e4m3fn@cuda:1`."""
    match = re.fullmatch(r"(\w+)(?:\+(\w+))?(?:@(\S+))?", text)
    if match is None or match[1] not in STRATEGIES:
        raise argparse.ArgumentTypeError(f"{text!r}: the strategies are {', '.join(STRATEGIES)}")
    fields = dict(STRATEGIES[match[1]])
    if match[2] is not None:
        fields["storage_dtype"] = match[2]
    if match[3] is not None:
        fields["device"] = match[3]
    return fields


def _component(text: str) -> tuple[str, dict[str, Any]]:
    name, _, strategy = text.partition("=")
    return name, parse_strategy(strategy)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m app.runtime.simulate", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)

    models = commands.add_parser("models", help="the models of the catalogue")
    models.add_argument("--json", action="store_true")
    models.set_defaults(command=_models)

    run = commands.add_parser("run", help="simulate one run and show what it takes")
    run.add_argument("model", help="a name of the catalogue or the path of a model folder")
    run.add_argument("--size", type=_size, metavar="WIDTHxHEIGHT")
    run.add_argument("--frames", type=int)
    run.add_argument("--steps", type=int, default=2)
    run.add_argument("--guidance", type=float)
    run.add_argument("--tokens", type=int, help="tokens of the prompt; default: the longest")
    run.add_argument("--vram", type=_sizes, metavar="12GiB[,8GiB]", help="one size per GPU; default: no limit")
    run.add_argument("--ram", type=parse_bytes, metavar="32GiB")
    run.add_argument("--context", type=parse_bytes, default=450 * 1024**2, help="CUDA context, counted under --vram")
    run.add_argument("--strategy", type=parse_strategy, default=STRATEGIES["resident"], metavar="NAME[+DTYPE][@DEVICE]")
    run.add_argument("--component", type=_component, action="append", default=[], metavar="NAME=STRATEGY")
    run.add_argument("--tiling", action="store_true", help="decode in tiles")
    run.add_argument("--latent", action="store_true", help="leave the decoding out")
    run.add_argument("--json", action="store_true")
    run.set_defaults(command=_run)

    fitting = commands.add_parser("fit", help="fit the memory laws of a model; prints TOML")
    fitting.add_argument("model")
    fitting.add_argument(
        "--size", type=_size, metavar="WIDTHxHEIGHT", help="around which it is fitted; of a folder give it"
    )
    fitting.add_argument("--frames", type=int)
    fitting.add_argument("--name", help="the model's name in the result; default: MODEL, for a folder the folder's")
    fitting.add_argument("--out", type=Path, metavar="FILE")
    fitting.add_argument("--no-tiled", action="store_true", help="leave tiled decoding out: much quicker")
    fitting.add_argument(
        "--quick",
        action="store_true",
        help="only what takes seconds, encoding and offloading by layers; all else stays as it stands in --out's file",
    )
    fitting.add_argument("--json", action="store_true", help="JSON instead of TOML")
    fitting.set_defaults(command=_fit)
    plans = commands.add_parser("plans", help="run plans, one JSON document a line; for `pocketreel bench matrix`")
    plans.set_defaults(command=lambda _options: planned.main(), json=True)
    return parser


def _models(options: argparse.Namespace) -> int:
    found = [families.find(name) for name in families.names()]
    if options.json:
        sys.stdout.write(json.dumps([f.model for f in found]) + "\n")
        return 0
    table = Table("model", "pipeline", "default size", "sizes are")
    for f in found:
        table.add_row(f.model, f.pipeline, f"{f.width}x{f.height}, {f.num_frames}", "sure" if f.sure else "assumed")
    Console().print(table)
    return 0


def _run(options: argparse.Namespace) -> int:
    family = families.find(options.model)
    default = default_shape(family)
    width, height = options.size or (default.width, default.height)
    shape = Shape(
        height=height,
        width=width,
        num_frames=options.frames or default.num_frames,
        num_inference_steps=options.steps,
        guidance_scale=options.guidance,
        prompt_tokens=options.tokens,
    )
    setup = Setup(
        default=ComponentSetup(**options.strategy),
        components={name: ComponentSetup(**fields) for name, fields in options.component},
        vae_tiling=options.tiling,
    )
    capacities: tuple[int | None, ...] = options.vram or (None,)
    gpus = tuple(GpuSpec(capacity_bytes=c, context_bytes=options.context if c else 0) for c in capacities)
    with Session(family, setup, MachineSpec(gpus=gpus, ram_bytes=options.ram), prompt_tokens=options.tokens) as session:
        result = session.run(shape, "latent" if options.latent else "np")
    if options.json:
        sys.stdout.write(result.model_dump_json() + "\n")
    else:
        _show(Console(), result)
    return 0


def _show(console: Console, result: Simulation) -> None:
    table = Table("stage", "memory", "before", "peak", "reserved", "what lives at the peak", title=_title(result))
    for peak in sorted(result.peaks, key=lambda p: (list(Stage).index(p.stage), p.device)):
        if peak.peak_bytes:
            sizes = (peak.start_bytes, peak.peak_bytes, peak.reserved_bytes)
            table.add_row(peak.stage, peak.device, *(f"{n / GIB:.2f}" for n in sizes), _shares(peak))
    console.print(table)
    console.print("GiB. Pinned RAM:", f"{result.pinned_requested_bytes / GIB:.2f} wanted,", end=" ")
    console.print(f"{result.pinned_bytes / GIB:.2f} taken. Simulated in {result.seconds:.0f} s.")
    for guess in result.guesses:
        console.print(f"A value was made up: {guess}")


def _title(result: Simulation) -> str:
    shape = result.shape
    return f"{result.model}, {shape.width}x{shape.height}, {shape.num_frames} frames"


def _shares(peak: Peak) -> str:
    large = [s for s in peak.shares if s.bytes >= max(peak.peak_bytes / 100, 1)]
    return ", ".join(f"{s.component} {s.kind} {s.bytes / GIB:.2f}" for s in large[:6])


def _fit_again(family: Family, file: Path | None) -> Coefficients:
    """What stands in a file, with what takes seconds fitted anew."""
    if file is None:
        raise BadInput("--quick changes a file: name it with --out.")
    with file.open("rb") as opened:
        content = tomllib.load(opened)
    here = {name: version for name, version in versions().items() if name != "accelerate"}  # takes no part in it
    then = content.get("versions", {})
    if not here.items() <= then.items():
        raise BadInput(f"{file} was fitted with {then}, here is {here}: fit it without --quick.")
    if content.get("pipeline") != family.pipeline or not content.get("components", {}).keys() <= family.parts.keys():
        raise BadInput(f"{file} is of another model than {family.model}: name its own file with --out.")
    return Coefficients.model_validate({**content, **fit_quick(family)})


def _fit(options: argparse.Namespace) -> int:
    family = families.find(options.model)
    width, height = options.size or (family.width, family.height)
    shape = {"width": width, "height": height, "num_frames": options.frames or family.num_frames}
    # a folder's pipeline class tells of no size: it would be fitted around another model's, and be wrong at its own
    family = family.model_copy(update=shape)
    if options.quick:
        found = _fit_again(family, options.out)
    else:
        found = fit(family, tiled=not options.no_tiled)
        found = found.model_copy(update={"model": options.name or Path(found.model).name})
    text = found.model_dump_json(indent=2) + "\n" if options.json else to_toml(found)
    if options.out is None:
        sys.stdout.write(text)
    else:
        options.out.write_text(text, "utf-8")
    return 0
