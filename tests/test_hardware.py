"""The probe on machines that are folders: a fake /proc and /sys, and a fake of the library pynvml."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from app.config import Settings
from app.errors import BadInput
from app.hardware import Sources, probe
from app.hardware.measured import Link, Measured, disk_read_rate, keep_measured
from app.hardware.nvidia import DRIVER_MISSING, OWN_WORKER
from app.hardware.visible import select
from app.schema import GIB, Backend, Hardware

unhurried = hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Whoever shares the machine must not fail a test."""

MEMINFO = (
    "MemTotal: 33554432 kB\nMemFree: 1000 kB\nMemAvailable: 25165824 kB\nSwapTotal: 2097152 kB\nSwapFree: 1048576 kB\n"
)
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801 - named as in pynvml
    def __str__(self) -> str:
        return "NVML Shared Library Not Found"


class NVMLError_NotSupported(NVMLError):  # noqa: N801
    def __str__(self) -> str:
        return "Not Supported"


class Card:
    """One card as NVML tells of it. A value that is an exception is raised when it is asked for."""

    def __init__(self, uuid: Any, **changes: Any) -> None:
        self.uuid = uuid
        self.name: Any = "NVIDIA GeForce RTX 3060"
        self.memory: Any = SimpleNamespace(total=12 * GIB, free=11 * GIB, used=GIB)
        self.capability: Any = (8, 6)
        self.compute: Any = []
        self.graphics: Any = []
        self.link: Any = (4, 16)
        self.instances: list[Card] = []
        self.mig = False
        self.place = (1, 0)
        self.__dict__.update(changes)


def answer(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


class FakeNvml:
    """The part of pynvml that the probe uses, over cards that a test made up."""

    NVMLError = NVMLError

    def __init__(self, *cards: Card, fails: Exception | None = None, driver: Any = "580.65.06") -> None:
        self.cards, self.fails, self.driver = cards, fails, driver
        self.open = False
        self.names: dict[int, str] = {}

    def nvmlInit(self) -> None:  # noqa: N802 - the library's names, here and below
        answer(self.fails)
        self.open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open = False

    def nvmlSystemGetDriverVersion(self) -> Any:  # noqa: N802
        return answer(self.driver)

    def nvmlSystemGetProcessName(self, pid: int) -> str:  # noqa: N802
        if pid not in self.names:
            raise NVMLError("Not Found")
        return self.names[pid]

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: Card) -> Any:  # noqa: N802
        return answer(card.uuid)

    def nvmlDeviceGetName(self, card: Card) -> Any:  # noqa: N802
        return answer(card.name)

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:  # noqa: N802
        return answer(card.memory)

    def nvmlDeviceGetCudaComputeCapability(self, card: Card) -> Any:  # noqa: N802
        return answer(card.capability)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: Card) -> Any:  # noqa: N802
        return answer(card.link)[0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, card: Card) -> Any:  # noqa: N802
        return answer(card.link)[1]

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> Any:  # noqa: N802
        return answer(card.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: Card) -> Any:  # noqa: N802
        return answer(card.graphics)

    def nvmlDeviceGetMigMode(self, card: Card) -> Any:  # noqa: N802
        if not card.mig:
            raise NVMLError_NotSupported
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:  # noqa: N802
        if index >= len(card.instances):
            raise NVMLError("Not Found")
        return card.instances[index]

    def nvmlDeviceGetGpuInstanceId(self, card: Card) -> int:  # noqa: N802
        return card.place[0]

    def nvmlDeviceGetComputeInstanceId(self, card: Card) -> int:  # noqa: N802
        return card.place[1]


def test_the_fake_has_only_what_the_library_has() -> None:
    """A name that pynvml does not have would make every test below meaningless."""
    import pynvml

    assert [name for name in vars(FakeNvml) if name.startswith("nvml") and not hasattr(pynvml, name)] == []


class Machine:
    """A folder that looks like / of a Linux machine with 32 GiB of RAM, 24 of them available."""

    def __init__(self, root: Path, settings: Settings) -> None:
        self.root, self.settings = root, settings
        self.write("/proc/meminfo", MEMINFO)
        self.write("/proc/cpuinfo", "processor\t: 0\nmodel name\t: Some  CPU 9000\n")
        self.write("/proc/sys/kernel/osrelease", "6.8.0-generic\n")
        self.write("/proc/self/cgroup", "0::/\n")
        self.write("/proc/self/mountinfo", V2_MOUNT)

    def write(self, path: str, text: str) -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def cgroup(self, folder: str, **files: str) -> None:
        for name, text in files.items():
            self.write(f"/sys/fs/cgroup{folder}/{name.replace('__', '.')}", text + "\n")

    def probe(self, nvml: FakeNvml | None = None, **changes: Any) -> Hardware:
        fake = nvml if nvml is not None else FakeNvml(fails=NVMLError_LibraryNotFound())
        values: dict[str, Any] = {
            "root": self.root,
            "system": "Linux",
            "machine": "x86_64",
            "environ": {},
            "pid": 1000,
            "nvml": lambda: fake,
            "affinity": lambda: 8,
        }
        found = probe(self.settings, Sources(**{**values, **changes}))
        assert not fake.open, "NVML was left open"
        return found


@pytest.fixture
def machine(tmp_path: Path, settings: Settings) -> Machine:
    return Machine(tmp_path / "machine", settings)


# ------------------------------------------------------------------------------------------------- a CPU and no more


def test_a_machine_with_only_a_cpu(machine: Machine) -> None:
    found = machine.probe()
    assert found.gpus == ()
    assert (found.cpu_name, found.cpu_count, found.system) == ("Some CPU 9000", 8, "Linux 6.8.0-generic x86_64")
    assert (found.ram_total_bytes, found.ram_available_bytes) == (32 * GIB, 24 * GIB)
    assert found.ram_limit.source == "physical memory"
    assert (found.swap_total_bytes, found.swap_free_bytes) == (2 * GIB, GIB)
    assert found.memory_pressure is None
    assert found.notes == ("No GPU that torch could use was found; everything runs on the CPU.",)


def test_the_real_machine_answers_quickly(settings: Settings) -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        found = probe(settings)
        seconds.append(time.perf_counter() - start)
    assert 0 < found.ram_available_bytes <= found.ram_total_bytes
    assert found.data_disk.total_bytes > 0
    assert found.cpu_count >= 1
    if not found.gpus:
        assert min(seconds) < 0.1


def test_the_probe_imports_no_torch() -> None:
    code = (
        "import sys; from app import hardware, doctor, presets; from app.config import load_settings;"
        "s = load_settings(); doctor.examine(s, hardware.probe(s));"
        "print(sorted({'torch', 'diffusers', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_values_survive_json(machine: Machine) -> None:
    found = machine.probe(FakeNvml(Card("GPU-1")))
    assert Hardware.model_validate_json(found.model_dump_json()) == found


@hypothesis_settings(unhurried, max_examples=60)
@given(
    files=st.dictionaries(
        st.sampled_from(
            [
                "/proc/meminfo",
                "/proc/cpuinfo",
                "/proc/self/cgroup",
                "/proc/self/mountinfo",
                "/proc/pressure/memory",
                "/sys/fs/cgroup/memory.max",
                "/sys/fs/cgroup/memory.current",
                "/sys/fs/cgroup/memory.stat",
                "/sys/fs/cgroup/cpu.max",
                "/sys/class/kfd/kfd/topology/nodes/1/properties",
                "/sys/class/drm/renderD128/device/mem_info_vram_total",
                "/sys/class/drm/card0/device/vendor",
            ]
        ),
        st.one_of(
            st.text("0129²max:-_./ \n\té", max_size=40),
            st.sampled_from(["max", "-1", "0", "0::/\n", "4:memory:/a\n", "simd_count 9\n", "0x8086", V2_MOUNT, "1 0"]),
        ),
    )
)
def test_no_content_of_the_system_files_makes_it_raise(
    files: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("junk")
    machine = Machine(folder, Settings(data_dir=folder / "data"))
    for path, text in files.items():
        (machine.root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (machine.root / path.lstrip("/")).write_text(text, "utf-8", errors="replace")
    found = machine.probe()
    assert found.ram_available_bytes >= 0
    assert found.cpu_count >= 1


# ------------------------------------------------------------------------------------------------------------ NVIDIA


def held(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def test_a_card_with_all_its_facts(machine: Machine) -> None:
    (gpu,) = machine.probe(FakeNvml(Card("GPU-aa"))).gpus
    assert (gpu.index, gpu.uuid, gpu.backend) == (0, "GPU-aa", Backend.CUDA)
    assert (gpu.total_bytes, gpu.free_bytes) == (12 * GIB, 11 * GIB)
    assert (gpu.compute_capability, gpu.driver) == ((8, 6), "580.65.06")
    assert (gpu.pcie_generation, gpu.pcie_width) == (4, 16)
    assert not gpu.integrated
    assert not gpu.verified


def test_other_programs_are_named_and_counted_once(machine: Machine) -> None:
    machine.write("/proc/11/cmdline", "/usr/bin/blender\0--background\0")
    machine.write("/proc/12/cmdline", "/usr/bin/python3\0-u\0/home/a/secret folder/train.py\0--lr\0")
    machine.write("/proc/13/comm", "Xorg\n")  # kernel threads and closed processes have an empty command line
    card = Card(
        "GPU-aa",
        compute=[held(11, 2 * GIB), held(12, 3 * GIB), held(14, None), held(15, 5), held(1000, 7 * GIB)],
        graphics=[held(11, GIB), held(13, 10)],
    )
    nvml = FakeNvml(card)
    nvml.names[15] = r"C:\Games\game.exe"
    (gpu,) = machine.probe(nvml).gpus
    assert [(process.name, process.used_bytes) for process in gpu.processes] == [
        ("python3 (train.py)", 3 * GIB),
        ("blender", 2 * GIB),
        ("Xorg", 10),
        ("game.exe", 5),
        ("unknown program (process 14)", None),
    ]


def test_our_own_worker_is_told_from_other_programs(machine: Machine) -> None:
    machine.write("/proc/21/cmdline", "/usr/bin/python3\0-m\0app.runtime.loop\0")
    machine.write("/proc/21/stat", "21 (odd ) name) S 20 1 1\n")
    machine.write("/proc/20/stat", "20 (sh) S 1000 1 1\n")
    machine.write("/proc/22/cmdline", "/usr/bin/python3\0other.py\0")
    machine.write("/proc/22/stat", "22 (python3) S 22 1 1\n")  # its own parent: never in truth, and no endless loop
    (gpu,) = machine.probe(FakeNvml(Card("GPU-aa", compute=[held(21, 2), held(22, 1)]))).gpus
    assert [process.name for process in gpu.processes] == [OWN_WORKER, "python3 (other.py)"]


def test_a_broken_card_does_not_hide_the_others(machine: Machine) -> None:
    found = machine.probe(FakeNvml(Card(NVMLError("GPU is lost")), Card("GPU-b")))
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-b"]
    assert any("card 0 does not answer" in note and "GPU is lost" in note for note in found.notes)


def test_what_a_card_does_not_tell_is_noted(machine: Machine) -> None:
    missing = NVMLError_NotSupported()
    card = Card("GPU-a", name="Odd", link=missing, compute=missing, graphics=missing, capability=missing)
    found = machine.probe(FakeNvml(card, driver=missing))
    assert (found.gpus[0].pcie_generation, found.gpus[0].compute_capability, found.gpus[0].driver) == (None, None, None)
    for word in ("PCIe", "(compute)", "(graphics)", "compute capability", "its version"):
        assert any(word in note for note in found.notes), word


def test_a_chip_without_memory_of_its_own_shares_the_ram(machine: Machine) -> None:
    found = machine.probe(FakeNvml(Card("GPU-a", name="NVIDIA GB10", memory=NVMLError_NotSupported())))
    assert found.gpus[0].integrated
    assert (found.gpus[0].total_bytes, found.gpus[0].free_bytes) == (32 * GIB, 24 * GIB)
    assert any("share the machine's RAM" in note for note in found.notes)


def test_no_driver_is_silent_only_without_a_card(machine: Machine) -> None:
    assert DRIVER_MISSING not in machine.probe().notes
    machine.write("/sys/bus/pci/devices/0000:01:00.1/vendor", "0x10de\n")
    machine.write("/sys/bus/pci/devices/0000:01:00.1/class", "0x040300\n")  # the sound device of a card
    assert DRIVER_MISSING not in machine.probe().notes
    machine.write("/sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    machine.write("/sys/bus/pci/devices/0000:01:00.0/class", "0x030000\n")
    assert DRIVER_MISSING in machine.probe().notes


def test_a_driver_that_fails_is_noted(machine: Machine) -> None:
    found = machine.probe(FakeNvml(fails=NVMLError("RM has detected an NVML/RM version mismatch.")))
    assert found.gpus == ()
    assert any("version mismatch" in note for note in found.notes)


def test_a_driver_that_stops_answering_is_noted(machine: Machine) -> None:
    class Stopping(FakeNvml):
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            raise NVMLError("GPU is lost")

    found = machine.probe(Stopping(Card("GPU-a")))
    assert found.gpus == ()
    assert "NVIDIA's driver stopped answering: GPU is lost." in found.notes


def test_a_missing_library_is_noted(machine: Machine) -> None:
    def missing() -> Any:
        raise ImportError("No module named 'pynvml'")

    found = probe(machine.settings, Sources(root=machine.root, nvml=missing))
    assert any("No module named 'pynvml'" in note for note in found.notes)


def test_the_real_library_without_a_driver() -> None:
    """pynvml itself, not the fake: whatever this machine has, it answers or is noted."""
    import pynvml

    assert issubclass(pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError)
    assert "NVML Shared Library Not Found" in str(pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))


# ------------------------------------------------------------------------------------------- CUDA_VISIBLE_DEVICES

UUIDS = [("GPU-aa11",), ("GPU-aa22",), ("GPU-bb33",)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 2 , 0 ", [2, 0]),
        ("0,-1,1", [0]),
        ("0,7,1", [0]),
        ("0,0", []),
        ("1gpu", [1]),
        ("GPU-bb33", [2]),
        ("GPU-b", [2]),
        ("GPU-aa", []),
        ("GPU-bb,GPU-aa1", [2, 0]),
        ("GPU-bb,GPU-zz,GPU-aa1", [2]),
        ("GPU-bb,0", [2]),
        ("GPU-bb,GPU-zz,GPU-zz", []),
        ("GPU-bb33,GPU-bb33", []),
        ("GPU-bb,GPU-bb3", []),
        ("MIG-1", []),
    ],
)
def test_visible_devices(value: str | None, expected: list[int]) -> None:
    assert select(value, UUIDS) == expected


entries = st.one_of(
    st.integers(-2, 5).map(str),
    st.sampled_from(["", " 1", "GPU-a", "GPU-aa1", "GPU-bb33", "GPU-", "MIG-x", "1x", "x", "+2"]),
)


@unhurried
@given(st.lists(entries, max_size=5).map(",".join))
def test_visible_devices_are_distinct_and_there(value: str) -> None:
    chosen = select(value, UUIDS)
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= {0, 1, 2}


@pytest.mark.slow
def test_visible_devices_agree_with_torch() -> None:
    """torch's own reading of the variable, in a process of its own, over a few thousand values."""
    code = """
import itertools, json, os, sys
from torch.cuda import _parse_visible_devices, _transform_uuid_to_ordinals
words = ["0", "1", "2", "3", "-1", "", " 1", "1x", "+2", "x", "GPU-a", "GPU-aa1", "GPU-bb33", "GPU-", "MIG-x"]
uuids = ["GPU-aa11", "GPU-aa22", "GPU-bb33"]
told = {}
for count in (1, 2, 3):
    for chosen in itertools.product(words, repeat=count):
        value = ",".join(chosen)
        os.environ["CUDA_VISIBLE_DEVICES"] = value
        parsed = _parse_visible_devices()
        if parsed and isinstance(parsed[0], str):
            parsed = _transform_uuid_to_ordinals(parsed, uuids)
        told[value] = list(itertools.takewhile(lambda index: index < 3, parsed))
json.dump(told, sys.stdout)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert len(told) > 3000
    assert {value: select(value, UUIDS) for value in told} == told


def test_hidden_cards_are_noted_and_the_index_is_torchs(machine: Machine) -> None:
    nvml = FakeNvml(Card("GPU-a", name="Small"), Card("GPU-b", name="Large"))
    found = machine.probe(nvml, environ={"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [(gpu.index, gpu.uuid) for gpu in found.gpus] == [(0, "GPU-b")]
    assert any('CUDA_VISIBLE_DEVICES="1" hides 1' in note and "Small" in note for note in found.notes)
    assert not any("CUDA_DEVICE_ORDER" in note for note in found.notes)


def test_unequal_cards_in_an_unknown_order_are_noted(machine: Machine) -> None:
    unequal = FakeNvml(Card("GPU-a", name="Small"), Card("GPU-b", name="Large"))
    assert any("CUDA_DEVICE_ORDER" in note for note in machine.probe(unequal).notes)
    equal = FakeNvml(Card("GPU-a"), Card("GPU-b"))
    assert not any("CUDA_DEVICE_ORDER" in note for note in machine.probe(equal).notes)


@pytest.fixture
def split() -> FakeNvml:
    parts = [
        Card("MIG-11", name="A100 MIG 1g.5gb", memory=SimpleNamespace(total=5 * GIB, free=5 * GIB), place=(7, 0)),
        Card("MIG-22", name="A100 MIG 2g.10gb", memory=SimpleNamespace(total=10 * GIB, free=9 * GIB), place=(8, 0)),
    ]
    return FakeNvml(Card("GPU-a", name="A100", capability=(8, 0), mig=True, instances=parts))


@pytest.mark.parametrize(
    ("value", "uuid"),
    [(None, "MIG-11"), ("0", "MIG-11"), ("MIG-22", "MIG-22"), ("MIG-2", "MIG-22"), ("MIG-GPU-a/8/0", "MIG-22")],
)
def test_an_instance_of_a_split_card(machine: Machine, split: FakeNvml, value: str | None, uuid: str) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    (gpu,) = machine.probe(split, environ=environ).gpus
    assert (gpu.uuid, gpu.index, gpu.compute_capability) == (uuid, 0, (8, 0))
    assert gpu.total_bytes == (5 if uuid == "MIG-11" else 10) * GIB


def test_a_split_card_without_instances_cannot_be_used(machine: Machine) -> None:
    found = machine.probe(FakeNvml(Card("GPU-a", mig=True)))
    assert found.gpus == ()
    assert any("MIG mode without an instance" in note for note in found.notes)


# --------------------------------------------------------------------------------------------------- other makers


def rocm(machine: Machine, node: int, unique: int, used: int = GIB, version: int = 110000) -> None:
    minor = 127 + node
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    machine.write(f"{nodes}/0/properties", "cpu_cores_count 16\nsimd_count 0\n")
    machine.write(
        f"{nodes}/{node}/properties",
        f"cpu_cores_count 0\nsimd_count 192\ndrm_render_minor {minor}\n"
        f"gfx_target_version {version}\nunique_id {unique}\n",
    )
    machine.write(f"{nodes}/{node}/gpu_id", f"{node}00\n")
    device = f"/sys/class/drm/renderD{minor}/device"
    machine.write(f"{device}/mem_info_vram_total", f"{24 * GIB}\n")
    machine.write(f"{device}/mem_info_vram_used", f"{used}\n")
    machine.write(f"{device}/max_link_speed", "16.0 GT/s PCIe\n")
    machine.write(f"{device}/current_link_width", "16\n")


def test_amd_gpus(machine: Machine) -> None:
    rocm(machine, 1, 0xABC)
    rocm(machine, 2, 0xDEF, used=2 * GIB, version=90010)
    machine.write("/sys/class/drm/renderD128/device/product_name", "Radeon RX 7900 XTX\n")
    machine.write("/sys/class/kfd/kfd/proc/77/vram_200", f"{GIB}\n")
    machine.write("/sys/class/kfd/kfd/proc/1000/vram_200", f"{GIB}\n")  # this process
    machine.write("/proc/77/cmdline", "/usr/bin/ollama\0")
    first, second = machine.probe().gpus
    assert (first.name, first.backend, first.uuid) == ("Radeon RX 7900 XTX", Backend.ROCM, "GPU-0000000000000abc")
    assert (first.free_bytes, first.pcie_generation, first.pcie_width, first.verified) == (23 * GIB, 4, 16, False)
    assert (second.name, second.index, second.compute_capability) == ("AMD GPU (gfx90a)", 1, (9, 0))
    assert [(process.name, process.used_bytes) for process in second.processes] == [("ollama", GIB)]
    notes = machine.probe().notes
    assert any(note.startswith("Not verified") and "7900" in note for note in notes)
    assert not any("left out" in note for note in notes), "a node that is a CPU is no broken GPU"
    (machine.root / "sys/class/drm/renderD128/device/mem_info_vram_total").unlink()
    found = machine.probe()
    assert [(gpu.index, gpu.name) for gpu in found.gpus] == [(0, "AMD GPU (gfx90a)")]
    assert any("7900" in note and "left out" in note for note in found.notes)


@pytest.mark.parametrize(
    ("environ", "uuids"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "0"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000000000000001"}, [1]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_amd_visibility(machine: Machine, environ: dict[str, str], uuids: list[int]) -> None:
    rocm(machine, 1, 1)
    rocm(machine, 2, 2)
    found = machine.probe(environ=environ)
    assert [(gpu.index, int(gpu.uuid[4:], 16)) for gpu in found.gpus] == list(enumerate(uuids))
    assert any("hides" in note for note in found.notes)


def test_an_amd_card_without_rocm_is_noted(machine: Machine) -> None:
    machine.write("/sys/class/drm/card0/device/vendor", "0x1002\n")
    found = machine.probe()
    assert found.gpus == ()
    assert any("kfd" in note for note in found.notes)


def test_intel_gpus(machine: Machine) -> None:
    for card, address in (("card0", "0000:00:02.0"), ("card1", "0000:03:00.0")):
        machine.write(f"/sys/devices/{address}/vendor", "0x8086\n")
        machine.write(f"/sys/devices/{address}/device", "0x56a0\n")
        machine.write(f"/sys/class/drm/{card}/dev", "226:0\n")
        (machine.root / f"sys/class/drm/{card}/device").symlink_to(machine.root / "sys/devices" / address)
    machine.write("/sys/devices/0000:03:00.0/tile0/physical_vram_size_bytes", f"0x{16 * GIB:x}\n")
    found = machine.probe(environ={"ZE_AFFINITY_MASK": "0"})
    inside, card = found.gpus
    assert (inside.integrated, inside.total_bytes, inside.free_bytes) == (True, 32 * GIB, 24 * GIB)
    assert (card.integrated, card.total_bytes, card.uuid, card.index) == (False, 16 * GIB, "XPU-0000:03:00.0", 1)
    assert any("counts as free" in note for note in found.notes)
    assert any("ZE_AFFINITY_MASK" in note for note in found.notes)


def test_apple_chips_share_the_ram(machine: Machine) -> None:
    told = {"hw.memsize": str(64 * GIB), "machdep.cpu.brand_string": "Apple M4 Max"}
    changes: dict[str, Any] = {
        "root": machine.root / "nothing",
        "system": "Darwin",
        "machine": "arm64",
        "virtual_memory": lambda: (64 * GIB, 40 * GIB),
        "swap_memory": lambda: (0, 0),
    }
    found = machine.probe(sysctl=told.__getitem__, **changes)
    (gpu,) = found.gpus
    assert (gpu.backend, gpu.name, gpu.integrated) == (Backend.MPS, "Apple M4 Max", True)
    assert (gpu.total_bytes, gpu.free_bytes, found.cpu_name) == (64 * GIB, 40 * GIB, "Apple M4 Max")

    def broken(name: str) -> str:
        raise subprocess.CalledProcessError(1, ["sysctl", name])

    found = machine.probe(sysctl=broken, **changes)
    assert found.gpus[0].total_bytes == 64 * GIB
    assert any("sysctl" in note for note in found.notes)


# --------------------------------------------------------------------------------------------------- RAM and limits


def test_a_limit_of_cgroup_v2_counts_what_is_in_use(machine: Machine) -> None:
    machine.cgroup(
        "", memory__max=str(4 * GIB), memory__current=str(GIB), memory__stat=f"anon 1\ninactive_file {GIB // 2}"
    )
    found = machine.probe()
    assert found.ram_limit.source == "cgroup v2 (/sys/fs/cgroup/memory.max)"
    assert found.ram_limit.value_bytes == 4 * GIB
    assert found.ram_available_bytes == 4 * GIB - GIB // 2  # the page cache can be dropped
    assert found.ram_total_bytes == 32 * GIB


def test_the_smallest_limit_of_all_parents_holds(machine: Machine) -> None:
    machine.write("/proc/self/cgroup", "0::/user.slice/app.scope\n")
    machine.cgroup("/user.slice/app.scope", memory__max="max", memory__high="max", memory__current="5")
    machine.cgroup("/user.slice", memory__max=str(8 * GIB), memory__high=str(6 * GIB), memory__current=str(GIB))
    machine.cgroup("", memory__max=str(16 * GIB), memory__current=str(2 * GIB))
    found = machine.probe()
    assert found.ram_limit.source == "cgroup v2 (/sys/fs/cgroup/user.slice/memory.high)"
    assert found.ram_available_bytes == 5 * GIB


def test_a_full_parent_is_tighter_than_a_smaller_limit(machine: Machine) -> None:
    machine.write("/proc/self/cgroup", "0::/a\n")
    machine.cgroup("/a", memory__max=str(4 * GIB), memory__current="0")
    machine.cgroup("", memory__max=str(16 * GIB), memory__current=str(15 * GIB))
    found = machine.probe()
    assert (found.ram_available_bytes, found.ram_limit.value_bytes) == (GIB, 16 * GIB)


def test_a_container_that_sees_a_part_of_cgroup_v1(machine: Machine) -> None:
    """Docker without a cgroup namespace: the path in /proc counts from the host's root, the mount shows a part."""
    machine.write("/proc/self/cgroup", "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc/inner\n")
    machine.write(
        "/proc/self/mountinfo",
        "40 30 0:1 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "41 30 0:2 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n",
    )
    machine.cgroup(
        "/memory/inner",
        memory__limit_in_bytes=str(2 * GIB),
        memory__usage_in_bytes=str(GIB),
        memory__stat=f"inactive_file 7\ntotal_inactive_file {GIB // 4}",
    )
    machine.cgroup("/memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes=str(GIB))
    machine.cgroup("/cpu,cpuacct", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    found = machine.probe()
    assert found.ram_limit.source == "cgroup v1 (/sys/fs/cgroup/memory/inner/memory.limit_in_bytes)"
    assert found.ram_available_bytes == GIB + GIB // 4
    assert found.cpu_count == 2
    assert any("2.5 CPUs" in note for note in found.notes)


def test_unlimited_cgroup_v1(machine: Machine) -> None:
    machine.write("/proc/self/cgroup", "4:memory:/\n")
    machine.write("/proc/self/mountinfo", "40 30 0:1 / /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n")
    machine.cgroup("/memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="0")
    assert machine.probe().ram_limit.source == "physical memory"


def test_a_process_outside_of_its_cgroup_namespace(machine: Machine) -> None:
    """nsenter and some sandboxes: the path climbs out of what is mounted, so only the mount point can be read."""
    machine.write("/proc/self/cgroup", "0::/../other\n")
    machine.cgroup("", memory__max=str(4 * GIB), memory__current="0")
    machine.write("/sys/fs/other/memory.max", "1")
    assert machine.probe().ram_limit.value_bytes == 4 * GIB


def test_physical_memory_is_named_when_it_is_the_tighter_one(machine: Machine) -> None:
    machine.cgroup("", memory__max=str(31 * GIB), memory__current="0")
    found = machine.probe()
    assert (found.ram_limit.source, found.ram_available_bytes) == ("physical memory", 24 * GIB)


def test_a_limit_without_a_usage_is_noted(machine: Machine) -> None:
    machine.cgroup("", memory__max=str(4 * GIB))
    found = machine.probe()
    assert found.ram_available_bytes == 4 * GIB
    assert any("memory.current is missing" in note for note in found.notes)


@pytest.mark.parametrize(("text", "count"), [("max 100000", 8), ("150000 100000", 1), ("50000 100000", 1), ("junk", 8)])
def test_cpu_time_of_cgroup_v2(machine: Machine, text: str, count: int) -> None:
    machine.cgroup("", cpu__max=text)
    assert machine.probe().cpu_count == count


def test_wsl_is_the_limits_name(machine: Machine) -> None:
    machine.write("/proc/sys/kernel/osrelease", "5.15.167.4-microsoft-standard-WSL2\n")
    found = machine.probe()
    assert ".wslconfig" in found.ram_limit.source
    assert found.system.endswith("(WSL)")
    machine.write("/proc/sys/kernel/osrelease", "6.1.0-own\n")
    assert "WSL" not in machine.probe().system
    machine.write("/proc/sys/fs/binfmt_misc/WSLInterop", "enabled\n")
    assert "WSL" in machine.probe().system


def test_windows_commit_limit(machine: Machine) -> None:
    changes: dict[str, Any] = {
        "root": machine.root / "nothing",
        "system": "Windows",
        "virtual_memory": lambda: (32 * GIB, 20 * GIB),
        "swap_memory": lambda: (4 * GIB, 4 * GIB),
    }
    found = machine.probe(commit=lambda: (36 * GIB, 3 * GIB), **changes)
    assert (found.ram_available_bytes, found.swap_total_bytes) == (3 * GIB, 4 * GIB)
    assert "commit limit" in found.ram_limit.source

    def silent() -> tuple[int, int]:
        raise OSError("no")

    found = machine.probe(commit=silent, **changes)
    assert found.ram_available_bytes == 20 * GIB
    assert any("commit limit could not be read" in note for note in found.notes)


def test_old_kernels_and_closed_files(machine: Machine) -> None:
    machine.write("/proc/meminfo", "MemTotal: 1048576 kB\nMemFree: 1024 kB\nCached: 1024 kB\n")
    found = machine.probe()
    assert found.ram_available_bytes == 2 * 1024**2
    assert any("MemAvailable" in note for note in found.notes)
    (machine.root / "proc/meminfo").unlink()
    (machine.root / "proc/meminfo").mkdir()  # any error but "no such file"
    found = machine.probe(virtual_memory=lambda: (GIB, GIB), swap_memory=lambda: (0, 0))
    assert any("/proc/meminfo could not be read" in note for note in found.notes)

    def unknown() -> tuple[int, int]:
        raise RuntimeError("no way to tell")

    found = machine.probe(virtual_memory=unknown, swap_memory=unknown)
    assert found.ram_available_bytes == 0
    assert any("RAM could not be read" in note for note in found.notes)
    assert any("Swap could not be read" in note for note in found.notes)


def test_a_number_that_is_none_is_noted(machine: Machine) -> None:
    machine.cgroup("", memory__max="lots")
    assert any("'lots' where a number was expected" in note for note in machine.probe().notes)


def test_memory_pressure(machine: Machine) -> None:
    machine.write("/proc/pressure/memory", "some avg10=12.50 avg60=1.00 avg300=0.10 total=9\nfull avg10=3.00\n")
    assert machine.probe().memory_pressure == 12.5


def test_disks_are_those_of_the_folders_even_before_they_exist(machine: Machine) -> None:
    found = machine.probe()
    assert found.data_disk.path == machine.settings.data_dir
    assert found.spill_disk.path == machine.settings.data_dir / "spill"
    assert not machine.settings.data_dir.exists(), "the probe made the folder"
    assert 0 < found.data_disk.free_bytes <= found.data_disk.total_bytes


# ---------------------------------------------------------------------------------------- a real limit, where allowed


@pytest.fixture
def real_cgroup() -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """A cgroup of this machine with a limit of 4 GiB, and a command prefix that runs inside of it."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    name = f"pocketreel-test-{time.time_ns()}"
    folder, file = (v1 / name, "memory.limit_in_bytes") if v1.is_dir() else (v2 / name, "memory.max")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not (folder / file).exists():
            pytest.skip("the memory controller is not delegated here")
        try:
            (folder / file).write_text(str(4 * GIB))
        except OSError as error:
            pytest.skip(f"no limit can be set here: {error}")
        yield file, lambda: ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    finally:
        folder.rmdir()


def test_a_real_limit_of_4_gib(real_cgroup: tuple[str, Callable[[], list[str]]], data_dir: Path) -> None:
    file, inside = real_cgroup
    code = (
        "from app.config import load_settings; from app.hardware import probe;"
        "print(probe(load_settings()).model_dump_json())"
    )
    done = subprocess.run([*inside(), sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "write error" in done.stderr or "cgroup.procs" in done.stderr:
        pytest.skip(f"no process may be moved here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    found = Hardware.model_validate_json(done.stdout)
    if found.ram_total_bytes < 5 * GIB:
        pytest.skip("this machine has hardly more than the limit")
    assert found.ram_limit.value_bytes == 4 * GIB
    assert file in found.ram_limit.source
    assert 3 * GIB < found.ram_available_bytes < 4 * GIB


def test_what_was_measured_comes_with_the_probe(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert probe(settings).data_disk.read_bytes_per_second is None
    kept = Measured(
        at=datetime.now(UTC),
        links={"GPU-a": Link(pinned=20e9, pageable=8e9)},
        disks={str(tmp_path): 2e9},
        copy_bytes_per_second=9e9,
    )
    assert keep_measured(settings, kept).parent == tmp_path
    found = probe(settings)
    assert found.data_disk.read_bytes_per_second == 2e9
    assert found.spill_disk.read_bytes_per_second is None
    assert found.copy_bytes_per_second == 9e9
    assert [path.name for path in tmp_path.iterdir()] == ["measured.json"]


def test_a_measured_card_is_known_by_its_uuid(machine: Machine, settings: Settings) -> None:
    keep_measured(settings, Measured(links={"GPU-a": Link(pinned=20e9, pageable=8e9)}))
    first, second = machine.probe(FakeNvml(Card("GPU-a"), Card("GPU-b"))).gpus
    assert (first.pinned_bytes_per_second, first.pageable_bytes_per_second) == (20e9, 8e9)
    assert second.pinned_bytes_per_second is None


def test_a_damaged_file_of_measurements_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_text("{]")
    found = probe(Settings(data_dir=tmp_path))
    assert found.data_disk.read_bytes_per_second is None
    assert any("bench link" in note for note in found.notes)


def test_measurements_that_cannot_be_kept_are_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="POCKETREEL_DATA_DIR"):
        keep_measured(Settings(data_dir=tmp_path / "file"), Measured())


def test_reading_from_a_disk_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    rate = disk_read_rate(tmp_path, seconds=0.2)
    assert rate is not None
    assert 1e6 < rate < 1e12
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=10**6))
    assert disk_read_rate(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
