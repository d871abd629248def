"""How fast this machine computes, copies and reads: measured where it was measured, else assumed, and the plan says so.

Source of the card table: peak dense tensor throughput in 16 bit with 32-bit accumulation, from the makers' data sheets
and architecture papers. For GeForce 30, 40 and 50 it is twice the fp32 shader rate (RTX 3090 71 of 35.6, RTX 4090 165
of 82.6), for Turing four times. What a video model reaches of the peak is an assumption (`EFFICIENCY`), as are all
numbers named ASSUMED here: nothing of this was measured by this project.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from app.schema import Backend, Gpu, Hardware

EFFICIENCY: Final = 0.5
"""ASSUMED: share of the peak that attention and large matrix products reach together."""
FP32_SHARE: Final = 0.5
"""ASSUMED: float32 runs at half of the 16-bit rate (GeForce's shader rate; convolutions use TF32)."""
CPU_FLOPS_PER_CORE: Final = 20e9
"""After the built-in model's 1.2 s a clip on two cores (facts/demo-model.md), rounded; other CPUs ASSUMED alike."""
PCIE_LANE_BYTES_PER_SECOND: Final = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""The standard's rate of one lane after coding."""
PCIE_EFFICIENCY: Final = 0.8
"""ASSUMED: share of it that a copy from page-locked RAM reaches."""
PAGEABLE_SHARE: Final = 0.5
"""ASSUMED: a copy from ordinary RAM against one from page-locked RAM."""
PIN_COPY_BYTES_PER_SECOND: Final = 10e9
"""ASSUMED: copying within RAM on one thread, what `low_cpu_mem_usage` does before each transfer."""
DISK_BYTES_PER_SECOND: Final = 1.0e9
"""ASSUMED: an SSD that was not measured, between SATA (0.5e9) and NVMe (3e9 and more)."""

_CARDS: Final = {  # longest match first; 1e12 operations a second
    "H200": 989, "H100 PCIE": 756, "H100": 989, "B200": 2250, "A100": 312, "A30": 165, "A10": 125, "A40": 150,
    "L40S": 362, "L40": 181, "L4": 121, "T4": 65, "V100": 125,
    "RTX PRO 6000": 252, "RTX 6000 ADA": 364, "RTX 5000 ADA": 261, "RTX 4500 ADA": 158, "RTX 4000 ADA": 107,
    "RTX A6000": 155, "RTX A5000": 111, "RTX A4500": 95, "RTX A4000": 77, "RTX A2000": 32,
    "RTX 5090": 209, "RTX 5080": 113, "RTX 5070 TI": 88, "RTX 5070": 62, "RTX 5060 TI": 47, "RTX 5060": 38,
    "RTX 4090": 165, "RTX 4080 SUPER": 104, "RTX 4080": 97, "RTX 4070 TI SUPER": 88, "RTX 4070 TI": 80,
    "RTX 4070 SUPER": 71, "RTX 4070": 58, "RTX 4060 TI": 44, "RTX 4060": 30,
    "RTX 3090 TI": 80, "RTX 3090": 71, "RTX 3080 TI": 68, "RTX 3080": 60, "RTX 3070 TI": 43, "RTX 3070": 41,
    "RTX 3060 TI": 32, "RTX 3060": 25, "RTX 3050": 18,
    "RTX 2080 TI": 54, "RTX 2080 SUPER": 45, "RTX 2080": 40, "RTX 2070 SUPER": 36, "RTX 2070": 30, "RTX 2060": 26,
    "GTX 1660": 10, "GTX 1650": 6, "GTX 1080 TI": 11, "GTX 1080": 9, "GTX 1070": 6,
    "RX 7900 XTX": 123, "RX 7900 XT": 103, "RX 9070 XT": 195, "MI300X": 1307, "MI250": 181,
}  # fmt: skip
_BY_CAPABILITY: Final = (
    (12, 0, 40),
    (10, 0, 1000),
    (9, 0, 750),
    (8, 9, 40),
    (8, 6, 25),
    (8, 0, 165),
    (7, 5, 25),
    (7, 0, 100),
)
"""Cards without a row, by compute capability: the slower ones of each generation, so that no plan promises too much."""
_UNKNOWN_TERAFLOPS: Final = 10.0
_LAPTOP_SHARE: Final = 0.7
"""ASSUMED: a laptop's card of the same name, at less power."""


class Rate(NamedTuple):
    """A speed with its source in words."""

    per_second: float
    source: str


class Device(NamedTuple):
    """One GPU as the cost model sees it. Operations and bytes a second."""

    name: str
    """As torch says it: `cuda:0`."""
    title: str
    flops_16bit: float
    pinned: float
    pageable: float


class Machine(NamedTuple):
    """All speeds that an estimate needs."""

    devices: dict[str, Device]
    cpu_flops: float
    disk: float
    copy: float
    """Within RAM, on one thread."""
    sources: tuple[str, ...]
    """Where the numbers are from, in words for a plan's reasons."""


def throughput(gpu: Gpu) -> Rate:
    """16-bit operations a second that a model is likely to reach on the card."""
    name = re.sub(r"[^A-Z0-9]+", " ", gpu.name.upper())
    share = EFFICIENCY * (_LAPTOP_SHARE if "LAPTOP" in name or "MAX Q" in name else 1.0)
    for card in sorted(_CARDS, key=len, reverse=True):
        if re.search(rf"\b{card}(?![0-9])", name):
            return Rate(
                _CARDS[card] * 1e12 * share, f"{_CARDS[card]} TFLOPS by its data sheet, {share:.0%} of it assumed"
            )
    # other makers' numbers are no compute capabilities
    capability = (gpu.compute_capability or (0, 0)) if gpu.backend is Backend.CUDA else (0, 0)
    peak = next((t for major, minor, t in _BY_CAPABILITY if capability >= (major, minor)), _UNKNOWN_TERAFLOPS)
    return Rate(peak * 1e12 * share, f"{peak:g} TFLOPS assumed, the card is not in the table; {share:.0%} of it")


def link(gpu: Gpu) -> Rate:
    """Bytes a second from page-locked RAM to the card."""
    if gpu.pinned_bytes_per_second:
        return Rate(gpu.pinned_bytes_per_second, "measured")
    generation, width = gpu.pcie_generation, gpu.pcie_width
    known = generation in PCIE_LANE_BYTES_PER_SECOND and bool(width)
    lane = PCIE_LANE_BYTES_PER_SECOND.get(generation or 3, PCIE_LANE_BYTES_PER_SECOND[3])
    speed = lane * (width or 8) * PCIE_EFFICIENCY
    words = f"PCIe {generation if known else 3} x{width or 8}" + ("" if known else ", assumed")
    return Rate(speed, f"{words}, {PCIE_EFFICIENCY:.0%} of it")


def machine(hardware: Hardware, gpus: tuple[Gpu, ...]) -> Machine:
    """The speeds of this machine with these of its GPUs."""
    devices, sources = {}, []
    for gpu in gpus:
        compute, copy = throughput(gpu), link(gpu)
        pageable = gpu.pageable_bytes_per_second or copy.per_second * PAGEABLE_SHARE
        name = f"cuda:{gpu.index}"
        devices[name] = Device(name, gpu.name, compute.per_second, copy.per_second, pageable)
        sources.append(f"{gpu.name}: {compute.source}; copies: {copy.source}")
    measured = (hardware.download_disk or hardware.data_disk).read_bytes_per_second  # where the weights lie
    sources.append("disk speed measured" if measured else f"disk {DISK_BYTES_PER_SECOND / 1e9:g} GB/s, assumed")
    return Machine(
        devices=devices,
        cpu_flops=CPU_FLOPS_PER_CORE * hardware.cpu_count,
        disk=measured or DISK_BYTES_PER_SECOND,
        copy=hardware.copy_bytes_per_second or PIN_COPY_BYTES_PER_SECOND,
        sources=tuple(dict.fromkeys(sources)),
    )
