"""What a machine has: GPUs, RAM and its limits, disks. Sizes in bytes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import Field

from app.value import Bytes, Value


class Backend(StrEnum):
    CUDA = "cuda"
    ROCM = "rocm"
    MPS = "mps"
    XPU = "xpu"


class GpuProcess(Value):
    """Another program that holds memory on a GPU. `used_bytes` is None where the driver does not tell (Windows)."""

    pid: int
    name: str
    used_bytes: Bytes | None = None


class Gpu(Value):
    """One GPU as the driver reports it. `index` is the position among the *visible* devices, as torch counts them."""

    index: int
    uuid: str
    name: str
    backend: Backend = Backend.CUDA
    compute_capability: tuple[int, int] | None = None
    total_bytes: Bytes
    free_bytes: Bytes
    processes: tuple[GpuProcess, ...] = ()
    driver: str | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    integrated: bool = False
    pinned_bytes_per_second: float | None = None
    """From page-locked RAM, as `pocketreel bench link` measured it; None: not measured."""
    pageable_bytes_per_second: float | None = None
    verified: bool = False
    """Whether Pocketreel was ever measured on this kind of card; False is shown as "not verified"."""

    @property
    def supports(self) -> dict[str, bool]:
        """Number formats by compute capability: bf16 and fp16 arithmetic, fp8 storage and fp8 arithmetic apart."""
        if self.backend is not Backend.CUDA:
            # other makers count differently (gfx 11.0 is no compute capability); 16-bit formats are safe to assume
            return {"fp16": True, "bf16": self.backend is not Backend.MPS, "fp8_storage": False, "fp8_compute": False}
        cc = self.compute_capability or (0, 0)
        return {
            "fp16": cc >= (5, 3),
            "bf16": cc >= (8, 0),
            "fp8_storage": cc >= (7, 0),  # upcast before use: any card with fp16 arithmetic worth having
            "fp8_compute": cc >= (8, 9),
        }


class Limit(Value):
    """A number with its source, e.g. RAM limited by `cgroup v2 (/sys/fs/cgroup/memory.max)`."""

    value_bytes: Bytes
    source: str


class Disk(Value):
    """Room and speed where a folder lies."""

    path: Path
    free_bytes: Bytes
    total_bytes: Bytes
    read_bytes_per_second: float | None = None


class Hardware(Value):
    """What `hardware.probe` found, before every run anew. RAM is the smallest of physical, cgroup and WSL limits."""

    system: str
    cpu_name: str
    cpu_count: int
    gpus: tuple[Gpu, ...] = ()
    ram_total_bytes: Bytes
    ram_available_bytes: Bytes
    ram_limit: Limit
    swap_total_bytes: Bytes = 0
    swap_free_bytes: Bytes = 0
    memory_pressure: float | None = None
    """PSI `some avg10` of memory in percent, where the kernel has it."""
    data_disk: Disk
    spill_disk: Disk
    download_disk: Disk | None = None
    """Of the Hub's cache, where models are downloaded to; None: the data folder's."""
    packages: dict[str, str] = Field(default_factory=dict)
    """Versions of the optional packages for quantized weights that are installed."""
    copy_bytes_per_second: float | None = None
    """Within RAM, on one thread, as `pocketreel bench link` measured it."""
    notes: tuple[str, ...] = ()
    """Plain sentences: what was not found and why, what was ignored (CUDA_VISIBLE_DEVICES), ..."""
