"""The memory simulator: a model's real pipeline on fake tensors, on a machine of any number of GPUs of any size.

    from app.runtime.simulate import Shape, simulate
    simulate("wan2.1-t2v-1.3b", Shape(height=480, width=832, num_frames=81)).peak("cuda:0")   # bytes

Neither weights nor a GPU are needed; configurations are enough. How close it comes is tested (tests/runtime/simulate)
against real allocations of tiny models and against published figures. `python -m app.runtime.simulate --help`.

What it does not cover: time; the CUDA context and library handles (set `GpuSpec.context_bytes`); kernels' workspace
except conv3d's, whose rule is inferred; quantized weights (bitsandbytes, GGUF, torchao), torch.compile, flex attention
(10-second Kandinsky), LoRA, `expandable_segments`.
"""

from app.runtime.simulate.devices import SimulatedMachine
from app.runtime.simulate.families import find, names
from app.runtime.simulate.run import Session, simulate
from app.runtime.simulate.values import (
    Attention,
    ComponentSetup,
    GpuSpec,
    Hold,
    MachineSpec,
    Setup,
    Shape,
    Simulation,
)

__all__ = [
    "Attention",
    "ComponentSetup",
    "GpuSpec",
    "Hold",
    "MachineSpec",
    "Session",
    "Setup",
    "Shape",
    "SimulatedMachine",
    "Simulation",
    "find",
    "names",
    "simulate",
]
