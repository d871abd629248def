"""The installed libraries and files: versions, torch's build, ffmpeg, SQLite, settings, the built-in model, presets."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from app.config import Settings, bundled, default_data_dir
from app.doctor.finding import (
    Finding,
    cpu_only,
    driver_too_old,
    nvidia_gpus,
    ok,
    on_windows,
    problem,
    set_variable,
    unset_variable,
    warning,
)
from app.errors import ModelNotUsable, PresetError
from app.pip import pip_install
from app.presets import card_for_folder, load_catalogue
from app.presets.files import suggestion
from app.schema import Backend, Hardware

_OLDEST_SQLITE = (3, 35, 0)
"""RETURNING came with it; below, statements of the store do not parse."""


def _ffmpeg() -> str:
    """Path of imageio-ffmpeg's program.

    Raises:
        ImportError, RuntimeError: the package or its program is not there.
    """
    import imageio_ffmpeg  # noqa: PLC0415 - 20 ms, only needed here

    return str(imageio_ffmpeg.get_ffmpeg_exe())


@dataclass(frozen=True)
class Installation:
    """Where the checks look. Tests hand in a folder that looks like site-packages."""

    site_packages: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    ffmpeg: Callable[[], str] = _ffmpeg
    sqlite_version: tuple[int, ...] = sqlite3.sqlite_version_info[:3]
    pyproject: Path = field(default_factory=lambda: bundled("pyproject.toml"))
    """Only there in a checkout, and then newer than what was recorded when it was installed."""
    demo: Path = field(default_factory=lambda: bundled("assets", "demo"))

    def distribution(self, name: str) -> importlib.metadata.Distribution | None:
        found = importlib.metadata.distributions(name=name, path=list(self.site_packages))
        return next(iter(found), None)


def examine_installation(settings: Settings, hardware: Hardware, here: Installation) -> Iterable[Finding]:
    """Checks on what was installed and set."""
    yield from _versions(here)
    yield from _torch(hardware, here)
    yield from _check_ffmpeg(here, windows=on_windows(hardware))
    yield from _sqlite(here)
    yield from _data_folder(settings, windows=on_windows(hardware))
    yield from _settings(settings, here, windows=on_windows(hardware))
    yield from _catalogue(settings, here)


def requirements(here: Installation) -> list[Requirement]:
    """What pyproject.toml asks for: from the file of a checkout, else from the installed distribution."""
    distribution = here.distribution("pocketreel")
    texts: list[str] = list(distribution.requires or ()) if distribution is not None else []
    if here.pyproject.is_file():
        texts = tomllib.loads(here.pyproject.read_text("utf-8"))["project"]["dependencies"]
    found = [Requirement(text) for text in texts]
    return [item for item in found if item.marker is None or item.marker.evaluate({"extra": ""})]


def _versions(here: Installation) -> Iterable[Finding]:
    wanted = requirements(here)
    if not wanted:
        yield warning(
            "Pocketreel's own requirements are not recorded",
            "It runs from a folder without its metadata, so versions cannot be checked. Installing it anew helps.",
            _restore(here, "pyproject.toml"),
        )
        return
    wrong = 0
    for item in wanted:
        distribution = here.distribution(item.name)
        have = distribution.version if distribution is not None else None
        if have is not None and item.specifier.contains(have, prereleases=True):
            continue
        wrong += 1
        title = f"{item.name} is not installed" if have is None else f"{item.name} {have} does not fit"
        extras = f"[{','.join(sorted(item.extras))}]" if item.extras else ""
        yield problem(
            title,
            f"Pocketreel {_asks(item)}.",
            pip_install(f'"{item.name}{extras}{item.specifier}"'),
        )
    if not wrong:
        yield ok(f"All {len(wanted)} libraries have versions that fit.")


def _asks(item: Requirement) -> str:
    return f"asks for {item.name} {item.specifier}" if str(item.specifier) else f"asks for {item.name}"


def _torch(hardware: Hardware, here: Installation) -> Iterable[Finding]:
    """Torch's build against the cards, from its files alone: importing it takes seconds and half a GiB."""
    distribution = here.distribution("torch")
    if distribution is None:
        return  # told with the versions
    build = torch_build(distribution)
    gpus = nvidia_gpus(hardware)
    if not gpus:
        yield from _torch_without_nvidia(hardware, distribution.version, build)
        return
    if build["cuda"] is None:
        yield cpu_only(gpus, str(build["version"]))
        return
    missing = _missing_cuda_libraries(distribution, here)
    if missing:
        yield problem(
            f"torch's CUDA libraries are not complete: {missing[0].name} is missing or has another version",
            f"{len(missing)} of the packages that torch {distribution.version} asks for do not fit.",
            pip_install(" ".join(f'"{item.name}{item.specifier}"' for item in missing)),
        )
    old = driver_too_old(gpus, build["cuda"])
    if old is not None:
        yield old
    elif not missing:
        yield ok(f"torch {build['version']} with CUDA {build['cuda']} fits the driver.")


def _torch_without_nvidia(hardware: Hardware, version: str, build: Mapping[str, str | None]) -> Iterable[Finding]:
    amd = [gpu for gpu in hardware.gpus if gpu.backend is Backend.ROCM]
    if amd and build["hip"] is None:
        yield warning(
            f"torch {version} has no ROCm, but {amd[0].name} is built in",
            "The GPU stays unused. Choose Pip and ROCm on this page; Pocketreel was never measured on AMD.",
            "https://pytorch.org/get-started/locally/",
        )
    elif build["cuda"] is not None:
        yield ok(f"torch {version} is built for CUDA {build['cuda']}; without an NVIDIA card it computes on the CPU.")
    else:
        yield ok(f"torch {version}.")


def torch_build(distribution: importlib.metadata.Distribution) -> dict[str, str | None]:
    """`version`, `cuda` and `hip` from torch/version.py; from the version's +cpu or +cu130 where that is not there."""
    try:
        text = Path(str(distribution.locate_file("torch/version.py"))).read_text("utf-8")
    except OSError:
        text = ""  # an odd build; the version's ending says as much
    found: dict[str, str] = dict(re.findall(r"^(__version__|cuda|hip)\b[^=]*= '([^']*)'", text, re.MULTILINE))
    version = found.get("__version__", distribution.version)
    local = re.search(r"\+cu(\d+)(\d)$", version)
    cuda = found.get("cuda") or (f"{local[1]}.{local[2]}" if local else None)
    return {"version": version, "cuda": cuda, "hip": found.get("hip")}


def _missing_cuda_libraries(distribution: importlib.metadata.Distribution, here: Installation) -> list[Requirement]:
    missing = []
    for text in distribution.requires or ():
        try:
            item = Requirement(text)
        except InvalidRequirement:
            continue  # of torch's making, and pip's business
        applies = item.marker is None or item.marker.evaluate({"extra": ""})
        if applies and canonicalize_name(item.name).startswith("nvidia-"):
            found = here.distribution(item.name)
            if found is None or not item.specifier.contains(found.version, prereleases=True):
                missing.append(item)
    return missing


def _check_ffmpeg(here: Installation, *, windows: bool) -> Iterable[Finding]:
    again = pip_install("--force-reinstall --no-deps imageio-ffmpeg")
    try:
        program = here.ffmpeg()
        done = subprocess.run(
            [program, "-hide_banner", "-encoders"], capture_output=True, text=True, timeout=30, check=False
        )
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        yield problem("ffmpeg does not run", f"Videos cannot be written: {error}.", again)
        return
    if done.returncode != 0:
        yield problem(f"ffmpeg ({program}) fails", f"Videos cannot be written: {done.stderr.strip()[-200:]}", again)
    elif not re.search(r"\blibx264\b", done.stdout):
        fix = again
        if here.environ.get("IMAGEIO_FFMPEG_EXE"):
            fix = unset_variable("IMAGEIO_FFMPEG_EXE", windows=windows)
        yield problem(f"ffmpeg ({program}) cannot write H.264", "It was built without libx264.", fix)
    else:
        yield ok("ffmpeg writes H.264.")


def _sqlite(here: Installation) -> Iterable[Finding]:
    version = ".".join(map(str, here.sqlite_version))
    if here.sqlite_version < _OLDEST_SQLITE:
        yield problem(
            f"SQLite {version} is too old",
            f"The history needs {'.'.join(map(str, _OLDEST_SQLITE))} or newer. It comes with Python.",
            "https://www.python.org/downloads/",
        )
    else:
        yield ok(f"SQLite {version}.")


def _data_folder(settings: Settings, *, windows: bool) -> Iterable[Finding]:
    """Really write: permissions, read-only mounts and full disks all show in it. The folder itself is not made."""
    place = settings.data_dir
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"pocketreel")
            file.flush()
    except OSError as error:
        home = "%USERPROFILE%\\Pocketreel" if windows else "$HOME/pocketreel"
        yield problem(
            f"The data folder {settings.data_dir} cannot be written",
            f"{place}: {error.strerror or error}. This chooses another one.",
            set_variable("POCKETREEL_DATA_DIR", home, windows=windows),
        )
    else:
        yield ok(f"The data folder {settings.data_dir} can be written.")


def _settings(settings: Settings, here: Installation, *, windows: bool) -> Iterable[Finding]:
    known = {f"POCKETREEL_{name.upper()}" for name in Settings.model_fields}
    for name in sorted(here.environ):
        if name.upper().startswith("POCKETREEL_") and name.upper() not in known:
            yield warning(
                f"The variable {name} is not known, so it does nothing",
                f"In the list of settings, {suggestion(name.upper(), known)}",
                unset_variable(name, windows=windows),
            )
    elsewhere = settings.data_dir / "config.toml"
    read = default_data_dir() / "config.toml"
    if elsewhere != read and elsewhere.is_file():
        yield warning(
            f"{elsewhere} is not read",
            f"Settings come from {read}, because the data folder was not chosen by POCKETREEL_DATA_DIR.",
            set_variable("POCKETREEL_DATA_DIR", str(settings.data_dir), windows=windows),
        )


def _catalogue(settings: Settings, here: Installation) -> Iterable[Finding]:
    try:
        catalogue = load_catalogue(settings)
    except PresetError as error:
        yield problem("The presets that ship with Pocketreel are damaged", str(error), _restore(here, "presets"))
    else:
        yield ok(f"{len(catalogue.models)} models and {len(catalogue.hardware)} hardware presets.")
        for text in catalogue.problems:
            file, line, _ = _place(text)
            yield warning(f"Your preset {Path(file).name} is left out", text, f"edit {file} in line {line}")
    try:
        card_for_folder(here.demo)
    except ModelNotUsable as error:
        yield problem("The built-in model cannot be loaded", str(error), _restore(here, "assets/demo"))
    else:
        yield ok("The built-in model is whole.")


def _restore(here: Installation, path: str) -> str:
    """Puts back a file or folder that ships: from git in a checkout, else from where the program was installed from."""
    if here.pyproject.is_file():
        return f'git -C "{bundled()}" checkout -- {path}'
    distribution = here.distribution("pocketreel")
    origin = distribution.read_text("direct_url.json") if distribution is not None else None
    source = str(json.loads(origin)["url"]) if origin else "pocketreel"
    return pip_install(f'--force-reinstall --no-deps "{source}"')


def _place(text: str) -> tuple[str, str, str]:
    """File, line and the rest of `file:line: ...`; a Windows path has a colon of its own."""
    found = re.match(r"(.+?):(\d+): (.*)", text, re.DOTALL)
    return (found[1], found[2], found[3]) if found else (text, "1", "")
