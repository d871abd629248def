"""The worker's torch against the driver: the same cards, with kernels for each of them?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from app.doctor.finding import Finding, cpu_only, driver_too_old, nvidia_gpus, ok, problem, torch_wheel, warning
from app.schema import Gpu, Hardware


def compare(hardware: Hardware, view: Mapping[str, Any]) -> list[Finding]:
    """Differences between what the driver shows and what the worker's torch can use.

    `view` is what the worker reports: `torch`, `cuda` and `hip` (versions or None), `arch_list` ("sm_86", ...),
    `cuda_available`, `devices` with `name`, `uuid`, `total_bytes`, `capability` each.
    """
    gpus = nvidia_gpus(hardware)
    if not gpus:
        return list(_without_card(view))
    if not view.get("cuda"):
        return [cpu_only(gpus, str(view.get("torch")))]
    if not view.get("cuda_available"):
        return [_not_available(gpus, str(view["cuda"]))]
    found = [*_same_cards(gpus, view["devices"]), *_kernels(gpus, view)]
    if not found:
        names = ", ".join(gpu.name for gpu in gpus)
        found.append(ok(f"The worker's torch {view.get('torch')} (CUDA {view['cuda']}) can use {names}."))
    return found


def _without_card(view: Mapping[str, Any]) -> Iterable[Finding]:
    devices = [str(device["name"]) for device in view.get("devices", ())]
    if devices and not view.get("hip"):
        yield warning(
            f"torch finds {', '.join(devices)}, but the driver did not show it",
            "NVML did not answer, so free VRAM and other programs' VRAM are unknown and plans are made for the CPU.",
            "nvidia-smi",
        )
    elif not devices:
        yield ok(f"The worker's torch {view.get('torch')} computes on the CPU.")


def _not_available(gpus: list[Gpu], cuda: str) -> Finding:
    old = driver_too_old(gpus, cuda)
    if old is not None:
        return old
    return problem(
        f"torch cannot start CUDA {cuda}, although the driver shows {gpus[0].name}",
        "Often the driver was updated while it was in use, or a container has no access to the card's devices; "
        "after a restart this line tells the reason.",
        "nvidia-smi",
    )


def _same_cards(gpus: list[Gpu], devices: list[Mapping[str, Any]]) -> Iterable[Finding]:
    ours = [_bare(gpu.uuid) for gpu in gpus]
    theirs = [_bare(str(device["uuid"])) for device in devices]
    missing = [gpu.name for gpu in gpus if _bare(gpu.uuid) not in theirs]
    extra = [str(device["name"]) for device in devices if _bare(str(device["uuid"])) not in ours]
    if missing or extra:
        what = [f"not to torch: {', '.join(missing)}"] if missing else []
        what += [f"only to torch: {', '.join(extra)}"] if extra else []
        yield problem(
            f"The driver and torch do not see the same cards ({'; '.join(what)})",
            "Plans would be made for a card that the worker cannot reach. Usually CUDA_VISIBLE_DEVICES is the reason.",
            "export CUDA_VISIBLE_DEVICES=" + ",".join(gpu.uuid for gpu in gpus),
        )
    elif ours != theirs:
        yield warning(
            "torch counts the cards in another order than the driver",
            "Pocketreel goes by UUID, but other programs and CUDA_VISIBLE_DEVICES=0 may mean another card than you do.",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


def _bare(uuid: str) -> str:
    """NVML writes GPU-... and MIG-..., torch the bare number."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _kernels(gpus: list[Gpu], view: Mapping[str, Any]) -> Iterable[Finding]:
    built = [str(arch) for arch in view.get("arch_list", ())]
    without = [
        device
        for device in view["devices"]
        if built and not has_kernels(built, (device["capability"][0], device["capability"][1]))
    ]
    if without:
        names = ", ".join(
            f"{device['name']} (sm_{device['capability'][0]}{device['capability'][1]})" for device in without
        )
        yield problem(
            f"torch {view.get('torch')} has no kernels for {names}",
            f"It was built for {', '.join(built)}; the first computation would end with "
            '"no kernel image is available for execution on the device".',
            torch_wheel(gpus),
        )


def has_kernels(arch_list: Iterable[str], capability: tuple[int, int]) -> bool:
    """Whether one of the built architectures runs on a card.

    Machine code (sm_86) runs on cards of the same major version with an equal or higher minor one, that of sm_90a only
    on exactly 9.0; intermediate code (compute_90) on every card from its version on.
    """
    major, minor = capability
    for arch in arch_list:
        kind, _, number = arch.partition("_")
        digits = number.rstrip("af")
        if not digits.isdecimal():
            continue
        built = int(digits[:-1]), int(digits[-1])
        exact = number.endswith("a")
        if kind == "sm" and built[0] == major and (minor == built[1] if exact else minor >= built[1]):
            return True
        if kind == "compute" and not exact and (major, minor) >= built:
            return True
    return False
