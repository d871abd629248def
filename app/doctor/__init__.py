"""What is wrong with this installation or this machine, and the one thing to paste against each.

    finding       the value; pip lines and torch wheels by card and driver
    installation  library versions, torch wheel, ffmpeg, SQLite, settings, the built-in model and presets
    machine       RAM and its limits, swap, disks, other programs' VRAM, drivers
    worker        what the worker's torch reports, compared with what the driver reports

Runs in the front process: torch is read as files, never imported. Not covered: whether a run fits (the planner says),
the network, and hardware faults.
"""

from __future__ import annotations

from app.config import Settings
from app.doctor.finding import Finding
from app.doctor.installation import Installation, examine_installation
from app.doctor.machine import examine_machine
from app.doctor.worker import compare
from app.schema import Hardware

__all__ = ["Finding", "Installation", "compare", "examine"]


def examine(settings: Settings, hardware: Hardware, installation: Installation | None = None) -> list[Finding]:
    """All checks that need no worker, the problems first. Takes about a second: ffmpeg is started once."""
    here = installation if installation is not None else Installation()
    findings = [*examine_installation(settings, hardware, here), *examine_machine(settings, hardware)]
    order = {"problem": 0, "warning": 1, "ok": 2}
    return sorted(findings, key=lambda finding: order[finding.level])
