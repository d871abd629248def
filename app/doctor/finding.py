"""One finding of the doctor, and the lines to paste that several checks share."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import model_validator

from app.pip import pip_install
from app.schema import Backend, Gpu, Hardware, Value

DRIVERS: Final = "https://www.nvidia.com/drivers"
_WHEELS: Final = "https://download.pytorch.org/whl"
CUDA_DRIVERS: Final = {11: 450, 12: 525, 13: 580}
"""Oldest driver branch for each CUDA major version, on Linux and Windows alike:
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"""


class Finding(Value):
    """What was looked at, in one line; for what is not in order also why it matters, and exactly one thing to do."""

    level: Literal["ok", "warning", "problem"]
    title: str
    explanation: str = ""
    fix: str = ""
    """A line to paste into a terminal or a file, or a page to open; empty when all is in order."""

    @model_validator(mode="after")
    def _one_fix(self) -> Self:
        if (self.level == "ok") == bool(self.fix):
            raise ValueError("a finding that is not ok has a fix, one that is ok has none")
        return self


def ok(title: str, explanation: str = "") -> Finding:
    return Finding(level="ok", title=title, explanation=explanation)


def warning(title: str, explanation: str, fix: str) -> Finding:
    return Finding(level="warning", title=title, explanation=explanation, fix=fix)


def problem(title: str, explanation: str, fix: str) -> Finding:
    return Finding(level="problem", title=title, explanation=explanation, fix=fix)


def nvidia_gpus(hardware: Hardware) -> list[Gpu]:
    return [gpu for gpu in hardware.gpus if gpu.backend is Backend.CUDA]


def driver_branch(gpus: list[Gpu]) -> int | None:
    """580 of `580.65.06`; None where the driver does not tell."""
    versions = [gpu.driver.split(".")[0] for gpu in gpus if gpu.driver]
    return int(versions[0]) if versions and versions[0].isdecimal() else None


def torch_wheel(gpus: list[Gpu]) -> str:
    """The line that installs a torch with kernels for all these cards that their driver can run.

    By the architectures PyTorch builds: CUDA 12.6 for 5.0 to 9.0, 12.8 for 7.0 to 12.0, 13.0 for 7.5 to 12.0.
    """
    capabilities = [gpu.compute_capability for gpu in gpus if gpu.compute_capability is not None]
    oldest, newest = min(capabilities, default=(7, 5)), max(capabilities, default=(7, 5))
    branch = driver_branch(gpus)
    if oldest >= (7, 5) and (branch is None or branch >= CUDA_DRIVERS[13]):
        build = "cu130"
    elif newest >= (10, 0):
        build = "cu128"
    else:
        build = "cu126"
    return torch_from(build)


def cpu_only(gpus: list[Gpu], version: str) -> Finding:
    """Told alike from the installed files and from the worker, so that it can be shown once."""
    return problem(
        f"torch {version} is a CPU-only build, but {gpus[0].name} is built in",
        "pip on Windows installs a torch without CUDA by default, so the GPU stays unused.",
        torch_wheel(gpus),
    )


def driver_too_old(gpus: list[Gpu], cuda: str) -> Finding | None:
    """Whether the driver cannot run torch's CUDA version, e.g. "13.0"; None when it can or does not tell."""
    major = int(cuda.partition(".")[0])
    needed, branch = CUDA_DRIVERS.get(major), driver_branch(gpus)
    if needed is None or branch is None or branch >= needed:
        return None
    title = f"NVIDIA's driver {gpus[0].driver} is too old for torch's CUDA {cuda}"
    if branch < CUDA_DRIVERS[12]:
        return problem(
            title, f"No torch that Pocketreel can use runs on it. CUDA {major} needs driver {needed}.", DRIVERS
        )
    return problem(
        title,
        f"CUDA {major} needs driver {needed} or newer; this installs a torch for an older CUDA, which runs on yours.",
        torch_wheel(gpus),
    )


def set_variable(name: str, value: str, *, windows: bool) -> str:
    return f'setx {name} "{value}"' if windows else f'export {name}="{value}"'


def unset_variable(name: str, *, windows: bool) -> str:
    return f'setx {name} ""' if windows else f"unset {name}"


def on_windows(hardware: Hardware) -> bool:
    return hardware.system.startswith("Windows")


def torch_from(build: str) -> str:
    # forced, because pip takes 2.9.0+cpu for good enough where 2.9.0+cu130 is asked for
    return pip_install(f'--force-reinstall "torch>=2.9" "torchvision>=0.24" --index-url {_WHEELS}/{build}')
