"""Apply a plan to a loaded pipeline. Prices of each strategy stand in `schema.Strategy`."""

from __future__ import annotations

from typing import Any

import torch

from app.errors import PlanError
from app.schema import Plan, Strategy


def apply(pipe: Any, plan: Plan) -> None:
    """Place the pipeline's components as planned.

    Raises:
        PlanError: the plan names a device that this worker does not see, or strategies that cannot be combined.
    """
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    device = torch.device(plan.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise PlanError(
            f"The plan uses {plan.device}, but the worker's torch sees {torch.cuda.device_count()} CUDA devices. "
            "Run `pocketreel doctor`: it compares the driver with the installed torch."
        )
    strategies = {placement.strategy for placement in plan.placements} or {plan.strategy}
    if strategies == {Strategy.MODEL_OFFLOAD}:
        pipe.enable_model_cpu_offload(gpu_id=device.index or 0, device=device.type)
    elif len(strategies) == 1 and strategies <= {Strategy.RESIDENT, Strategy.CPU}:
        pipe.to(device)
    else:
        raise PlanError(f"This version cannot apply {', '.join(sorted(strategies))} in one plan.")
    if plan.vae_tiling and hasattr(getattr(pipe, "vae", None), "enable_tiling"):
        pipe.vae.enable_tiling()
