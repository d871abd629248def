"""The doctor on made-up machines and made-up site-packages; the real installation is examined once."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.config import Settings
from app.doctor import Finding, Installation, compare, examine
from app.doctor.installation import requirements, torch_build
from app.doctor.worker import has_kernels
from app.hardware import probe
from app.hardware.nvidia import DRIVER_MISSING, OWN_WORKER
from app.schema import GIB, Backend, Disk, Gpu, GpuProcess, Hardware, Limit

unhurried = hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Whoever shares the machine must not fail a test."""


def gpu(**changes: Any) -> Gpu:
    values: dict[str, Any] = {
        "index": 0,
        "uuid": "GPU-aa",
        "name": "NVIDIA GeForce RTX 3060",
        "compute_capability": (8, 6),
        "total_bytes": 12 * GIB,
        "free_bytes": 12 * GIB,
        "driver": "580.65.06",
    }
    return Gpu(**{**values, **changes})


def hardware(*gpus: Gpu, **changes: Any) -> Hardware:
    disk = Disk(path=Path("/data"), free_bytes=500 * GIB, total_bytes=1000 * GIB)
    values: dict[str, Any] = {
        "system": "Linux 6.8 x86_64",
        "cpu_name": "Some CPU",
        "cpu_count": 8,
        "gpus": gpus,
        "ram_total_bytes": 32 * GIB,
        "ram_available_bytes": 24 * GIB,
        "ram_limit": Limit(value_bytes=32 * GIB, source="physical memory"),
        "swap_total_bytes": 8 * GIB,
        "data_disk": disk,
        "spill_disk": disk,
    }
    return Hardware(**{**values, **changes})


class SitePackages:
    """A folder that looks like an environment in which all is in order, with a torch for CUDA 13.0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.install("pocketreel", "0.1.0", requires=["torch>=2.9", "pydantic>=2.11,<3", 'ruff; extra == "test"'])
        self.install("pydantic", "2.14.4")
        self.torch(
            "2.14.1",
            "'13.0'",
            requires=[
                'nvidia-cudnn-cu13==9.24; platform_system == "Linux"',
                'nvidia-other; platform_system == "Plan 9"',
            ],
        )
        self.install("nvidia-cudnn-cu13", "9.24")

    def install(self, name: str, version: str, requires: list[str] | None = None) -> None:
        for old in self.folder.glob(f"{name.replace('-', '_')}-*"):
            (old / "METADATA").unlink()
            old.rmdir()
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        needs = "".join(f"Requires-Dist: {need}\n" for need in requires or ())
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{needs}")

    def torch(self, version: str, cuda: str, hip: str = "None", requires: list[str] | None = None) -> None:
        self.install("torch", version, requires)
        (self.folder / "torch").mkdir(exist_ok=True)
        (self.folder / "torch/version.py").write_text(
            f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n"
            f"hip: Optional[str] = {hip}\n"
        )

    def remove(self, name: str) -> None:
        for info in self.folder.glob(f"{name.replace('-', '_')}-*"):
            (info / "METADATA").unlink()
            info.rmdir()


@pytest.fixture
def site(tmp_path: Path) -> SitePackages:
    return SitePackages(tmp_path / "site-packages")


def program(folder: Path, body: str) -> str:
    path = folder / "ffmpeg"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """A model folder that loads, so that the checks do not depend on the built-in one."""
    import json

    folder = tmp_path / "demo"
    (folder / "scheduler").mkdir(parents=True)
    index = {"_class_name": "Kandinsky5T2VPipeline", "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def look(settings: Settings, found: Hardware, site: SitePackages, demo: Path, **changes: Any) -> list[Finding]:
    """What is not in order."""
    values: dict[str, Any] = {
        "site_packages": (str(site.folder),),
        "environ": {},
        "ffmpeg": lambda: program(site.folder, "echo ' V....D libx264  H.264'"),
        "pyproject": site.folder / "pyproject.toml",
        "demo": demo,
    }
    findings = examine(settings, found, Installation(**{**values, **changes}))
    assert findings == sorted(findings, key=lambda finding: ["problem", "warning", "ok"].index(finding.level))
    return [finding for finding in findings if finding.level != "ok"]


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def test_a_machine_in_order_has_no_findings(settings: Settings, site: SitePackages, demo: Path) -> None:
    assert look(settings, hardware(gpu()), site, demo) == []
    assert look(settings, hardware(), site, demo) == []


def test_the_real_installation() -> None:
    """Everything but the model, which is made by a training, is in order where the tests run."""
    settings = Settings()
    findings = examine(settings, probe(settings))
    titles = [finding.title for finding in findings if finding.level == "ok"]
    assert any("ffmpeg writes H.264" in title for title in titles)
    assert any("hardware presets" in title for title in titles)
    assert any(title.startswith("SQLite") for title in titles)


def test_a_finding_has_exactly_one_fix() -> None:
    with pytest.raises(ValidationError, match="has a fix"):
        Finding(level="problem", title="x")
    with pytest.raises(ValidationError, match="has none"):
        Finding(level="ok", title="x", fix="y")


# ------------------------------------------------------------------------------------------------------- installation


@pytest.mark.parametrize(("version", "said"), [("2.10.0", "pydantic 2.10.0 does not fit"), ("3.0", "3.0 does not fit")])
def test_versions_that_do_not_fit(settings: Settings, site: SitePackages, demo: Path, version: str, said: str) -> None:
    site.install("pydantic", version)
    found = only(look(settings, hardware(), site, demo))
    assert said in found.title
    assert found.fix == f'"{sys.executable}" -m pip install "pydantic<3,>=2.11"'


def test_a_library_that_is_missing(settings: Settings, site: SitePackages, demo: Path) -> None:
    site.remove("torch")
    assert only(look(settings, hardware(), site, demo)).title == "torch is not installed"


def test_requirements_of_a_checkout_come_from_its_pyproject(site: SitePackages, tmp_path: Path) -> None:
    pyproject = tmp_path / "pyproject.toml"
    recorded = Installation(site_packages=(str(site.folder),), pyproject=pyproject)
    assert [item.name for item in requirements(recorded)] == ["torch", "pydantic"]
    pyproject.write_text('[project]\ndependencies = ["newer>=2"]')
    assert [str(item) for item in requirements(recorded)] == ["newer>=2"]


def test_a_folder_without_any_record(settings: Settings, site: SitePackages, demo: Path) -> None:
    site.remove("pocketreel")
    assert "not recorded" in only(look(settings, hardware(), site, demo)).title


def test_lost_files_come_back_from_where_the_program_came_from(
    settings: Settings, site: SitePackages, demo: Path, tmp_path: Path
) -> None:
    (demo / "model_index.json").unlink()
    assert only(look(settings, hardware(), site, demo)).fix.endswith('--no-deps "pocketreel"')
    info = site.folder / "pocketreel-0.1.0.dist-info"
    (info / "direct_url.json").write_text('{"url": "file:///home/a/pocketreel-0.1.0.whl"}')
    assert only(look(settings, hardware(), site, demo)).fix.endswith('"file:///home/a/pocketreel-0.1.0.whl"')
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text('[project]\ndependencies = ["torch"]')
    found = only(look(settings, hardware(), site, demo, pyproject=pyproject))
    assert found.fix.startswith("git -C ")
    assert found.fix.endswith("checkout -- assets/demo")


@pytest.mark.parametrize(
    ("version", "cuda", "built"),
    [("2.9.0+cpu", "None", None), ("2.9.0+cu128", "'12.8'", "12.8"), ("2.9.0", "'13.0'", "13.0")],
)
def test_torchs_build_is_read_without_importing_it(
    site: SitePackages, version: str, cuda: str, built: str | None
) -> None:
    site.torch(version, cuda)
    distribution = Installation(site_packages=(str(site.folder),)).distribution("torch")
    assert distribution is not None
    assert torch_build(distribution) == {"version": version, "cuda": built, "hip": None}
    (site.folder / "torch/version.py").unlink()
    assert torch_build(distribution)["cuda"] == ("12.8" if "cu128" in version else None)


def test_the_real_torchs_build() -> None:
    distribution = Installation().distribution("torch")
    assert distribution is not None
    assert str(torch_build(distribution)["version"]).startswith(distribution.version.partition("+")[0])


def test_a_cpu_wheel_beside_an_nvidia_card(settings: Settings, site: SitePackages, demo: Path) -> None:
    site.torch("2.14.1+cpu", "None")
    found = only(look(settings, hardware(gpu()), site, demo))
    assert (found.level, found.title) == (
        "problem",
        "torch 2.14.1+cpu is a CPU-only build, but NVIDIA GeForce RTX 3060 is built in",
    )
    assert found.fix.endswith("--index-url https://download.pytorch.org/whl/cu130")
    assert look(settings, hardware(), site, demo) == [], "without a card a CPU wheel is right"


@pytest.mark.parametrize(
    ("capability", "driver", "build"),
    [
        ((8, 6), "580.65.06", "cu130"),
        ((6, 1), "580.65.06", "cu126"),
        ((7, 0), "580.65.06", "cu126"),
        ((7, 5), None, "cu130"),
        ((12, 0), "575.51", "cu128"),
        ((8, 9), "550.1", "cu126"),
    ],
)
def test_the_wheel_fits_card_and_driver(
    settings: Settings, site: SitePackages, demo: Path, capability: tuple[int, int], driver: str | None, build: str
) -> None:
    site.torch("2.14.1+cpu", "None")
    found = only(look(settings, hardware(gpu(compute_capability=capability, driver=driver)), site, demo))
    assert found.fix.endswith(f"/{build}")


def test_a_driver_that_is_too_old(settings: Settings, site: SitePackages, demo: Path) -> None:
    found = only(look(settings, hardware(gpu(driver="551.10")), site, demo))
    assert found.title == "NVIDIA's driver 551.10 is too old for torch's CUDA 13.0"
    assert found.fix.endswith("/cu126")
    found = only(look(settings, hardware(gpu(driver="470.1")), site, demo))
    assert found.fix == "https://www.nvidia.com/drivers"


def test_cuda_libraries_that_are_missing(settings: Settings, site: SitePackages, demo: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("torch brings them along elsewhere")
    site.install("nvidia-cudnn-cu13", "9.1")
    found = only(look(settings, hardware(gpu()), site, demo))
    assert "nvidia-cudnn-cu13 is missing or has another version" in found.title
    assert found.fix.endswith('"nvidia-cudnn-cu13==9.24"')
    assert look(settings, hardware(), site, demo) == [], "without a card they do not matter"


def test_an_amd_card_with_a_torch_for_cuda(settings: Settings, site: SitePackages, demo: Path) -> None:
    amd = gpu(name="Radeon", backend=Backend.ROCM, driver=None)
    assert only(look(settings, hardware(amd), site, demo)).title == "torch 2.14.1 has no ROCm, but Radeon is built in"
    site.torch("2.14.1+rocm7.2", "None", hip="'7.2'")
    assert look(settings, hardware(amd), site, demo) == []


def test_ffmpeg(settings: Settings, site: SitePackages, demo: Path, tmp_path: Path) -> None:
    def missing() -> str:
        raise RuntimeError("No ffmpeg exe could be found")

    without = program(tmp_path, "echo ' V....D mpeg4'")
    odd = {"IMAGEIO_FFMPEG_EXE": without}
    assert "does not run" in only(look(settings, hardware(), site, demo, ffmpeg=missing)).title
    assert "does not run" in only(look(settings, hardware(), site, demo, ffmpeg=lambda: "/nowhere/ffmpeg")).title
    found = only(look(settings, hardware(), site, demo, ffmpeg=lambda: without))
    assert "cannot write H.264" in found.title
    assert "imageio-ffmpeg" in found.fix
    own = only(look(settings, hardware(), site, demo, ffmpeg=lambda: without, environ=odd))
    assert own.fix == "unset IMAGEIO_FFMPEG_EXE"
    (tmp_path / "broken").mkdir()
    broken = program(tmp_path / "broken", "echo bad library >&2; exit 3")
    found = only(look(settings, hardware(), site, demo, ffmpeg=lambda: broken))
    assert "bad library" in found.explanation


def test_an_old_sqlite(settings: Settings, site: SitePackages, demo: Path) -> None:
    assert "SQLite 3.31.1" in only(look(settings, hardware(), site, demo, sqlite_version=(3, 31, 1))).title


def test_a_data_folder_that_cannot_be_written(tmp_path: Path, site: SitePackages, demo: Path) -> None:
    (tmp_path / "a file").write_text("")
    settings = Settings(data_dir=tmp_path / "a file" / "data")
    found = only(look(settings, hardware(), site, demo))
    assert "cannot be written" in found.title
    assert found.fix == 'export POCKETREEL_DATA_DIR="$HOME/pocketreel"'
    assert (
        found.fix
        != only(look(settings, hardware(system="Windows 11 AMD64", swap_total_bytes=99 * GIB), site, demo)).fix
    )


def test_the_data_folder_is_not_made_by_looking(settings: Settings, site: SitePackages, demo: Path) -> None:
    look(settings, hardware(), site, demo)
    assert not settings.data_dir.exists()


def test_variables_that_do_nothing(settings: Settings, site: SitePackages, demo: Path) -> None:
    environ = {"POCKETREEL_PROT": "8000", "POCKETREEL_PORT": "8000", "OTHER": "1"}
    found = only(look(settings, hardware(), site, demo, environ=environ))
    assert found.title == "The variable POCKETREEL_PROT is not known, so it does nothing"
    assert 'did you mean "POCKETREEL_PORT"' in found.explanation


def test_a_config_file_that_is_not_read(tmp_path: Path, site: SitePackages, demo: Path) -> None:
    settings = Settings(data_dir=tmp_path / "elsewhere")
    settings.data_dir.mkdir()
    (settings.data_dir / "config.toml").write_text("")
    assert "config.toml is not read" in only(look(settings, hardware(), site, demo)).title


def test_the_config_file_that_is_read(settings: Settings, site: SitePackages, demo: Path) -> None:
    settings.data_dir.mkdir()
    (settings.data_dir / "config.toml").write_text("")
    assert look(settings, hardware(), site, demo) == []


def test_presets_and_the_built_in_model(settings: Settings, site: SitePackages, demo: Path) -> None:
    own = settings.user_presets / "hardware"
    own.mkdir(parents=True)
    (own / "mine.toml").write_text('id = "mine"\ntitle = "x"\nsummary = "x"\nvram_limit = "8 GB"\n')
    found = only(look(settings, hardware(), site, demo))
    assert found.title == "Your preset mine.toml is left out"
    assert found.fix == f"edit {own / 'mine.toml'} in line 4"
    (own / "mine.toml").unlink()
    (demo / "model_index.json").unlink()
    found = only(look(settings, hardware(), site, demo))
    assert (found.level, found.title) == ("problem", "The built-in model cannot be loaded")


# ------------------------------------------------------------------------------------------------------------ machine


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("cgroup v2 (/sys/fs/cgroup/memory.max)", 'docker update --memory 0 --memory-swap 0 "$(hostname)"'),
        ("cgroup v1 (/sys/fs/cgroup/memory/docker-ab.scope/memory.limit_in_bytes)", "docker update"),
        (
            "cgroup v2 (/sys/fs/cgroup/system.slice/x.service/memory.max)",
            "sudo systemctl set-property --runtime x.service",
        ),
        ("cgroup v2 (/sys/fs/cgroup/user.slice/user@1.service/app.slice/a.scope/memory.high)", "systemctl --user set-"),
    ],
)
def test_a_limit_on_ram(settings: Settings, site: SitePackages, demo: Path, source: str, fix: str) -> None:
    limited = hardware(ram_limit=Limit(value_bytes=4 * GIB, source=source), ram_available_bytes=3 * GIB)
    found = only(look(settings, limited, site, demo))
    assert found.title == "RAM is limited to 4 GiB of 32 GiB"
    assert source in found.explanation
    assert found.fix.startswith(fix)


def test_wsl(settings: Settings, site: SitePackages, demo: Path) -> None:
    wsl = hardware(
        system="Linux 5.15 x86_64 (WSL)",
        ram_total_bytes=8 * GIB,
        ram_limit=Limit(value_bytes=8 * GIB, source=r"the WSL virtual machine (memory= in %UserProfile%\.wslconfig)"),
        swap_total_bytes=2 * GIB,
    )
    found = only(look(settings, wsl, site, demo))
    assert found.fix == "[wsl2]\nmemory=12GB\nswap=16GB"


def test_a_small_pagefile(settings: Settings, site: SitePackages, demo: Path) -> None:
    windows = hardware(system="Windows 11 AMD64", swap_total_bytes=2 * GIB)
    found = only(look(settings, windows, site, demo))
    assert "1455" in found.explanation
    assert look(settings, hardware(system="Windows 11 AMD64", swap_total_bytes=32 * GIB), site, demo) == []
    limit = Limit(value_bytes=64 * GIB, source="Windows' commit limit (RAM and pagefile)")
    used_up = hardware(system="Windows 11 AMD64", swap_total_bytes=32 * GIB, ram_limit=limit)
    assert "left to promise" in only(look(settings, used_up, site, demo)).title


def test_little_ram_without_swap(settings: Settings, site: SitePackages, demo: Path) -> None:
    small: dict[str, Any] = {"ram_total_bytes": 8 * GIB, "swap_total_bytes": 0}
    assert "swapon" in only(look(settings, hardware(**small), site, demo)).fix
    limit = Limit(value_bytes=8 * GIB, source="cgroup v2 (/sys/fs/cgroup/memory.max)")
    assert look(settings, hardware(**small, ram_limit=limit), site, demo) == [], "a container has no swap of its own"


def test_memory_pressure(settings: Settings, site: SitePackages, demo: Path) -> None:
    assert "short of RAM" in only(look(settings, hardware(memory_pressure=30.0), site, demo)).title
    assert look(settings, hardware(memory_pressure=2.0), site, demo) == []


@pytest.mark.parametrize(("free", "level"), [(0, "problem"), (GIB // 2, "problem"), (5 * GIB, "warning")])
def test_little_room_on_the_disk(settings: Settings, site: SitePackages, demo: Path, free: int, level: str) -> None:
    disk = Disk(path=Path("/data"), free_bytes=free, total_bytes=100 * GIB if free else 0)
    found = only(look(settings, hardware(data_disk=disk), site, demo))
    assert found.level == level
    assert found.fix.startswith("export POCKETREEL_DATA_DIR=")


def test_other_programs_on_the_gpu(settings: Settings, site: SitePackages, demo: Path) -> None:
    programs = (
        GpuProcess(pid=1, name="gnome-shell", used_bytes=2 * GIB),
        GpuProcess(pid=2, name=OWN_WORKER, used_bytes=2 * GIB),
        GpuProcess(pid=3, name="blender", used_bytes=GIB),
    )
    found = only(look(settings, hardware(gpu(free_bytes=6 * GIB, processes=programs)), site, demo))
    assert found.title == "6 GiB of 12 GiB on NVIDIA GeForce RTX 3060 are in use: gnome-shell 2 GiB, blender 1 GiB"
    assert found.fix == "kill 3", "never the desktop, never our own worker"
    assert look(settings, hardware(gpu(free_bytes=6 * GIB, processes=programs[:2])), site, demo) == []
    assert look(settings, hardware(gpu(free_bytes=11 * GIB, processes=programs)), site, demo) == [], "hardly anything"


def test_a_card_without_a_driver(settings: Settings, site: SitePackages, demo: Path) -> None:
    found = only(look(settings, hardware(notes=(DRIVER_MISSING,)), site, demo))
    assert found.fix == "https://www.nvidia.com/drivers"


# ------------------------------------------------------------------------------------------------------------- worker


def view(*devices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "torch": "2.14.1",
        "cuda": "13.0",
        "hip": None,
        "arch_list": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
        "cuda_available": True,
        "devices": list(devices),
    }
    return {**values, **changes}


def device(**changes: Any) -> dict[str, Any]:
    values = {"name": "NVIDIA GeForce RTX 3060", "uuid": "GPU-aa", "total_bytes": 12 * GIB, "capability": [8, 6]}
    return {**values, **changes}


def test_the_worker_sees_what_the_driver_sees() -> None:
    assert [finding.level for finding in compare(hardware(gpu()), view(device()))] == ["ok"]
    assert [finding.level for finding in compare(hardware(), view(cuda=None, cuda_available=False))] == ["ok"]


def test_a_cpu_wheel_is_told_as_from_the_files(settings: Settings, site: SitePackages, demo: Path) -> None:
    site.torch("2.14.1+cpu", "None")
    seen = view(torch="2.14.1+cpu", cuda=None, cuda_available=False, arch_list=[])
    assert compare(hardware(gpu()), seen) == look(settings, hardware(gpu()), site, demo)


def test_cuda_that_does_not_start() -> None:
    broken = view(cuda_available=False, arch_list=[])
    assert "too old" in only(compare(hardware(gpu(driver="550.1")), broken)).title
    assert only(compare(hardware(gpu()), broken)).fix == "nvidia-smi"


def test_cards_without_kernels() -> None:
    blackwell = gpu(name="RTX 5090", compute_capability=(12, 0))
    old = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
    found = only(
        compare(hardware(blackwell), view(device(name="RTX 5090", capability=[12, 0]), arch_list=old, cuda="12.6"))
    )
    assert found.title == "torch 2.14.1 has no kernels for RTX 5090 (sm_120)"
    assert found.fix.endswith("/cu130")
    pascal = gpu(name="GTX 1080", compute_capability=(6, 1))
    found = only(compare(hardware(pascal), view(device(name="GTX 1080", capability=[6, 1]))))
    assert found.fix.endswith("/cu126")


def test_different_cards_and_orders() -> None:
    two = hardware(gpu(), gpu(index=1, uuid="GPU-bb", name="Large"))
    found = only(compare(two, view(device())))
    assert "not to torch: Large" in found.title
    assert found.fix == "export CUDA_VISIBLE_DEVICES=GPU-aa,GPU-bb"
    found = only(compare(hardware(gpu()), view(device(), device(uuid="cc", name="Other"))))
    assert "only to torch: Other" in found.title
    found = only(compare(two, view(device(uuid="BB", name="Large"), device(uuid="AA"))))
    assert found.fix == "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    assert "did not show it" in only(compare(hardware(), view(device()))).title


def test_an_instance_of_a_split_card_is_the_same_card() -> None:
    assert [f.level for f in compare(hardware(gpu(uuid="MIG-aa")), view(device(uuid="GPU-aa")))] == ["ok"]


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (["sm_86"], (8, 6), True),
        (["sm_80"], (8, 9), True),
        (["sm_89"], (8, 6), False),
        (["sm_90"], (12, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_120"], (12, 1), True),
        (["compute_90"], (12, 0), True),
        (["compute_90"], (8, 9), False),
        (["compute_90a"], (12, 0), False),
        (["gfx1100", "junk", "sm_"], (8, 6), False),
        ([], (8, 6), False),
    ],
)
def test_which_kernels_run_where(built: list[str], capability: tuple[int, int], runs: bool) -> None:
    assert has_kernels(built, capability) is runs


@unhurried
@given(st.integers(1, 12), st.integers(0, 9), st.integers(0, 9))
def test_kernels_of_a_card_run_on_it_and_newer_minors(major: int, built: int, minor: int) -> None:
    assert has_kernels([f"sm_{major}{built}"], (major, minor)) is (minor >= built)
    assert not has_kernels([f"sm_{major}{built}"], (major + 1, minor))
