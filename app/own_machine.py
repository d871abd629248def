"""Plans for the machine as it is now: what the warm worker holds is free, and finished jobs have taught something."""

from __future__ import annotations

import logging
from typing import Any

from app import calibration, hardware, planner, presets
from app.config import Settings
from app.errors import StoreError
from app.estimate import GPU_CONTEXT_BYTES
from app.presets import Catalogue
from app.runner import Planned
from app.schema import Backend, Gpu, Hardware, Learned, ModelCard, Request
from app.store import Store
from app.worker import Worker

_log = logging.getLogger(__name__)


class OwnMachine:
    """The planner of jobs (`runner.Planner`)."""

    def __init__(self, settings: Settings, catalogue: Catalogue, store: Store, worker: Worker) -> None:
        self._settings, self._catalogue, self._store, self._worker = settings, catalogue, store, worker
        self._kept_learned: tuple[Any, Learned] | None = None

    def __call__(self, request: Request, card: ModelCard, **limits: int) -> Planned:
        """Against the machine as it is now: other programs come and go. `limits` tighten the preset's.

        `vram_limit_bytes` is of what torch allocates; what the driver takes comes on top, as the preset counts it.

        Raises:
            PlanError: it does not fit.
        """
        if "vram_limit_bytes" in limits:
            limits["vram_limit_bytes"] += GPU_CONTEXT_BYTES
        found = self.with_own_worker(hardware.probe(self._settings))
        if nvidia := [gpu.uuid for gpu in found.gpus if gpu.backend is Backend.CUDA]:
            # by UUID, so that torch counts them as the probe does whatever CUDA_DEVICE_ORDER says
            self._worker.environment = {"CUDA_VISIBLE_DEVICES": ",".join(nvidia)}
        card = presets.as_stored(card)
        preset = self._catalogue.hardware[request.preset]
        if "ram_limit_bytes" in limits:
            preset = preset.model_copy(update={"prefer_disk": True})
        tighter = {name: min(value, getattr(preset, name) or value) for name, value in limits.items()}
        plan = planner.plan(
            found,
            card,
            request,
            preset.model_copy(update=tighter),
            presets.tensor_counts(card),
            learned=self._learned(card, found),
            presets=self._catalogue.hardware.values(),
        )
        return Planned(plan, found)

    def _learned(self, card: ModelCard, found: Hardware) -> Learned | None:
        """From the history; kept until it changes, because a preview comes with every key that is pressed."""
        if card.coefficients is None:
            return None
        try:
            key = (card.coefficients.fingerprint, calibration.machine_key(found), calibration.revision(self._store))
            kept = self._kept_learned
            if kept is None or kept[0] != key:
                kept = self._kept_learned = (key, calibration.learned(self._store, card.coefficients, key[1]))
            return kept[1]
        except StoreError:  # plain predictions are better than none
            _log.exception("reading what earlier runs taught")
            return None

    def with_own_worker(self, found: Hardware) -> Hardware:
        """What the warm worker holds is free for the next job: it gives back what that does not need."""
        pid, held_ram = self._worker.pid, self._worker.rss_bytes()
        if pid is None:
            return found
        reserved = self._worker.vram_bytes

        def free(gpu: Gpu) -> int:
            told = [process.used_bytes for process in gpu.processes if process.pid == pid]
            # Windows tells no amounts per process: then what torch said that it has reserved
            held = sum(amount if amount is not None else reserved.get(f"cuda:{gpu.index}", 0) for amount in told)
            return min(gpu.free_bytes + held, gpu.total_bytes)

        return found.model_copy(
            update={
                "ram_available_bytes": min(found.ram_available_bytes + held_ram, found.ram_limit.value_bytes),
                "gpus": tuple(gpu.model_copy(update={"free_bytes": free(gpu)}) for gpu in found.gpus),
            }
        )
