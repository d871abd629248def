"""NVIDIA cards through NVML, which answers without a CUDA context and without torch.

API: https://docs.nvidia.com/deploy/nvml-api/; MIG and CUDA_VISIBLE_DEVICES:
https://docs.nvidia.com/datacenter/tesla/mig-user-guide/. Whatever a card or driver does not tell becomes a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeVar

import psutil

from app.hardware.memory import Ram
from app.hardware.sources import Sources
from app.hardware.visible import select
from app.schema import Backend, Gpu, GpuProcess

T = TypeVar("T")

OWN_WORKER = "Pocketreel (worker)"
"""Name given to this program's own processes on a GPU: their memory comes back when the worker ends."""

DRIVER_MISSING = "An NVIDIA card is built in, but its driver is not installed or not loaded."

_ABSENT = ("Library Not Found", "Driver Not Loaded", "LibraryNotFound", "DriverNotLoaded")
_PCI_NVIDIA = "0x10de"


@dataclass(frozen=True)
class _Device:
    """What CUDA counts as one device: a card, or an instance of a card that is split (MIG)."""

    handle: Any
    card: Any
    """The handle of the whole card; the same as `handle` where it is not split."""
    ids: tuple[str, ...]
    name: str
    mig: bool = False


def nvidia_gpus(sources: Sources, ram: Ram, notes: list[str]) -> tuple[Gpu, ...]:
    """The cards that CUDA would show, in its order. Empty without a driver."""
    try:
        nvml = sources.nvml()
    except ImportError as error:
        notes.append(f"NVIDIA cards could not be looked for: {error}.")
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        reason = f"{type(error).__name__} {error}"
        if not any(word in reason for word in _ABSENT):
            notes.append(f"NVIDIA's driver does not answer: {error}. Restarting the machine often helps.")
        elif _card_without_driver(sources):
            notes.append(DRIVER_MISSING)
        return ()
    try:
        return _Nvml(nvml, sources, ram, notes).gpus()
    except nvml.NVMLError as error:
        notes.append(f"NVIDIA's driver stopped answering: {error}.")
        return ()
    finally:
        _ask(nvml, nvml.nvmlShutdown, None)


def _ask(nvml: Any, call: Callable[[], T], otherwise: T) -> T:
    """The answer, or `otherwise` where this card or driver has none. For what the caller can tell by the value."""
    try:
        return call()
    except nvml.NVMLError:
        return otherwise


class _Nvml:
    """One conversation with NVML, between init and shutdown."""

    def __init__(self, nvml: Any, sources: Sources, ram: Ram, notes: list[str]) -> None:
        self.nvml = nvml
        self.sources = sources
        self.ram = ram
        self.notes = notes

    def gpus(self) -> tuple[Gpu, ...]:
        cards = list(self._cards())
        visible = self._visible(cards)
        self._note_order(cards)
        driver = _ask(self.nvml, lambda: str(self.nvml.nvmlSystemGetDriverVersion()), None)
        if driver is None:
            self.notes.append("NVIDIA's driver does not tell its version.")
        return tuple(self._gpu(index, device, driver) for index, device in enumerate(visible))

    def _cards(self) -> Iterable[_Device]:
        for position in range(self.nvml.nvmlDeviceGetCount()):
            try:
                handle = self.nvml.nvmlDeviceGetHandleByIndex(position)
                uuid = str(self.nvml.nvmlDeviceGetUUID(handle))
                name = str(self.nvml.nvmlDeviceGetName(handle))
            except self.nvml.NVMLError as error:  # one card that fell off the bus must not hide the others
                self.notes.append(f"NVIDIA card {position} does not answer and is left out: {error}.")
                continue
            yield _Device(handle, handle, (uuid,), name)

    def _visible(self, cards: list[_Device]) -> list[_Device]:
        """Apply CUDA_VISIBLE_DEVICES and put an instance in the place of each card that is split."""
        value = self.sources.environ.get("CUDA_VISIBLE_DEVICES")
        instances = {card.ids[0]: list(self._instances(card)) for card in cards}
        if value is not None and value.startswith("MIG-"):
            known = [instance for card in cards for instance in instances[card.ids[0]]]
            chosen = [known[i] for i in select(value, [device.ids for device in known])]
            hidden = [device for device in known if device not in chosen]
        else:
            chosen = [cards[i] for i in select(value, [card.ids for card in cards])]
            hidden = [card for card in cards if card not in chosen]
        if value is not None and hidden:
            names = ", ".join(device.name for device in hidden)
            self.notes.append(f'CUDA_VISIBLE_DEVICES="{value}" hides {len(hidden)} of the NVIDIA devices: {names}.')
        visible = []
        for device in chosen:
            parts = instances.get(device.ids[0], [])
            if device.mig or not self._is_split(device):
                visible.append(device)
            elif parts:
                visible.append(parts[0])
                self.notes.append(
                    f"{device.name} is split into {len(parts)} instances (MIG); CUDA uses one of them. "
                    f"Choose it with CUDA_VISIBLE_DEVICES={parts[0].ids[0]}."
                )
            else:
                self.notes.append(f"{device.name} is in MIG mode without an instance, so it cannot be used.")
        return visible

    def _is_split(self, device: _Device) -> bool:
        current, _ = _ask(self.nvml, lambda: tuple(self.nvml.nvmlDeviceGetMigMode(device.card)), (0, 0))
        return bool(current)

    def _instances(self, card: _Device) -> Iterable[_Device]:
        if not self._is_split(card):
            return
        nvml = self.nvml
        for position in range(_ask(nvml, lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(card.handle)), 0)):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card.handle, position)
                uuid = str(nvml.nvmlDeviceGetUUID(handle))
            except nvml.NVMLError:
                continue  # NOT_FOUND: a free place on the card
            gi = _ask(nvml, lambda handle=handle: int(nvml.nvmlDeviceGetGpuInstanceId(handle)), -1)  # type: ignore[misc]
            ci = _ask(nvml, lambda handle=handle: int(nvml.nvmlDeviceGetComputeInstanceId(handle)), -1)  # type: ignore[misc]
            name = _ask(nvml, lambda handle=handle: str(nvml.nvmlDeviceGetName(handle)), card.name)  # type: ignore[misc]
            # drivers before R470 called the instance after its card
            yield _Device(handle, card.handle, (uuid, f"MIG-{card.ids[0]}/{gi}/{ci}"), name, mig=True)

    def _note_order(self, cards: list[_Device]) -> None:
        order = self.sources.environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
        if len({card.name for card in cards}) > 1 and order != "PCI_BUS_ID":
            self.notes.append(
                "The NVIDIA cards differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID, so CUDA may count them in another "
                "order than the driver (fastest first); Pocketreel goes by UUID."
            )

    def _gpu(self, index: int, device: _Device, driver: str | None) -> Gpu:
        nvml, card = self.nvml, device.card
        total, free, integrated = self._memory(device)
        capability = _ask(nvml, lambda: tuple(map(int, nvml.nvmlDeviceGetCudaComputeCapability(card))), None)
        # the current generation falls while the card idles, so the one that card and board can do is told; a narrow
        # slot, however, shows only in the current width
        generation = _ask(nvml, lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(card)), None)
        width = _ask(nvml, lambda: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(card)), None)
        if capability is None:
            self.notes.append(f"{device.name} does not tell its compute capability.")
        if not integrated and (generation is None or width is None):
            self.notes.append(f"{device.name} does not tell its PCIe link.")
        return Gpu(
            index=index,
            uuid=device.ids[0],
            name=device.name,
            backend=Backend.CUDA,
            compute_capability=(capability[0], capability[1]) if capability else None,
            total_bytes=total,
            free_bytes=free,
            processes=tuple(self._processes(device)),
            driver=driver,
            pcie_generation=generation or None,
            pcie_width=width or None,
            integrated=integrated,
        )

    def _memory(self, device: _Device) -> tuple[int, int, bool]:
        """Total, free, and whether it is the machine's own RAM."""
        try:
            memory = self.nvml.nvmlDeviceGetMemoryInfo(device.handle)
        except self.nvml.NVMLError as error:
            # a chip that shares the machine's RAM (Jetson, GB10) has no memory of its own to tell
            self.notes.append(
                f"{device.name} does not tell its memory ({error}); it is taken to share the machine's RAM."
            )
            return self.ram.physical_bytes, self.ram.available_bytes, True
        return int(memory.total), min(int(memory.free), int(memory.total)), False

    def _processes(self, device: _Device) -> list[GpuProcess]:
        """What other programs hold, the largest first. A program that computes and draws is listed once."""
        held: dict[int, int | None] = {}
        for kind in ("Compute", "Graphics"):
            call = getattr(self.nvml, f"nvmlDeviceGet{kind}RunningProcesses")
            found = _ask(self.nvml, lambda call=call: list(call(device.handle)), None)  # type: ignore[misc]
            if found is None:
                self.notes.append(f"{device.name} does not tell which programs use it ({kind.lower()}).")
                continue
            for process in found:
                sizes = [size for size in (held.get(process.pid), process.usedGpuMemory) if size is not None]
                held[process.pid] = max(sizes, default=None)
        held.pop(self.sources.pid, None)
        named = [GpuProcess(pid=pid, name=self._process_name(pid), used_bytes=used) for pid, used in held.items()]
        return sorted(named, key=lambda process: (-(process.used_bytes or 0), process.pid))

    def _process_name(self, pid: int) -> str:
        name = process_name(self.sources, pid)
        if name is None:  # of another user, or of another container
            name = _ask(self.nvml, lambda: str(self.nvml.nvmlSystemGetProcessName(pid)), "")
        return PurePath(name.replace("\\", "/")).name or f"unknown program (process {pid})"


def process_name(sources: Sources, pid: int) -> str | None:
    """A program's name as a person knows it; a Python program is told by its script. None when it cannot be seen."""
    if sources.system != "Linux":
        try:
            process = psutil.Process(pid)
            own = any(parent.pid == sources.pid for parent in process.parents())
            return OWN_WORKER if own else str(process.name())
        except psutil.Error:
            return None
    unread: list[str] = []  # a process of somebody else, or one that has just ended: not worth a note
    if _descends(sources, pid):
        return OWN_WORKER
    words = [word for word in (sources.text(f"/proc/{pid}/cmdline", unread) or "").split("\0") if word]
    if not words:
        return sources.text(f"/proc/{pid}/comm", unread)
    program = PurePath(words[0]).name
    if program.startswith("python"):
        scripts = [word for word in words[1:] if not word.startswith("-")]
        return f"{program} ({PurePath(scripts[0]).name})" if scripts else program
    return program


def _descends(sources: Sources, pid: int) -> bool:
    """Whether the process was started by this one, directly or not. /proc/PID/stat: pid (name) state parent ..."""
    seen: set[int] = set()
    while pid not in seen:
        seen.add(pid)
        fields = (sources.text(f"/proc/{pid}/stat", []) or "").rpartition(")")[2].split()
        if len(fields) < 2:
            return False
        pid = int(fields[1])
        if pid == sources.pid:
            return True
    return False


def _card_without_driver(sources: Sources) -> bool:
    """A display or 3D controller of NVIDIA on the PCI bus (class 0x03....)."""
    devices = sources.path("/sys/bus/pci/devices")
    if not devices.is_dir():
        return False
    return any(
        sources.text(f"/sys/bus/pci/devices/{child.name}/vendor", []) == _PCI_NVIDIA
        and (sources.text(f"/sys/bus/pci/devices/{child.name}/class", []) or "").startswith("0x03")
        for child in devices.iterdir()
    )
