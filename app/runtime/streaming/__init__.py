"""Blocks travel to the device one ahead of the computation; the weights wait in RAM or on the disk.

    streamed = stream(transformer, torch.device("cuda:0"))          # from page-locked RAM
    streamed = stream(transformer, device, source=CheckpointSource(folder))   # from the model's own files
    ...any number of forwards...
    streamed.remove()

A unit is an entry of one of the module's block lists. All its parameters lie in one flat buffer, which is copied in
one go into one of a few flat slots on the device; during its forward the block's parameters are views of that slot.
What is in no unit, in more than one, or a buffer, goes to the device once and stays. Peak on the device: that, the
resident blocks, and `slots` times the largest unit.

Nothing is ever computed from a slot without looking which unit it holds. The order of the units is only a guess,
learned while they run; a wrong guess costs time. An exception in mid-block leaves all weights where they were.

Not covered: training (a backward pass through streamed blocks raises), weights changed while they are streamed (LoRA:
remove, change, stream again; a replaced parameter is refused, a value changed in place may be seen late), quantized
parameters (refused), and `torch.compile`, which would compile anew for each slot.
"""

from app.runtime.streaming.apply import stream
from app.runtime.streaming.disk import CheckpointSource
from app.runtime.streaming.engine import Streamed
from app.runtime.streaming.layout import Entry, Layout
from app.runtime.streaming.sources import HostBuffer, PinnedSource, Source

__all__ = ["CheckpointSource", "Entry", "HostBuffer", "Layout", "PinnedSource", "Source", "Streamed", "stream"]
