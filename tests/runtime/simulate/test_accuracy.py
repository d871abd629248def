"""The simulator against reality: peaks of the CPU allocator's own events while tiny models run for real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from app.runtime.simulate import MachineSpec, Setup, SimulatedMachine
from app.runtime.simulate.families import Family, Part, build_part, build_pipeline, load_class, load_classes
from app.runtime.simulate.run import call_arguments
from tests.runtime.simulate import tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # hints of the libraries about speed

CPU_ONLY = MachineSpec(gpus=())


@contextmanager
def one_thread() -> Iterator[None]:
    """Kernels take a buffer per thread; the simulator counts one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def measured_peak(work: Callable[[], Any]) -> int:
    """Highest number of bytes above the start, over all CPU allocations while `work` runs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with one_thread(), torch.no_grad():
        work()  # what is only made once is not working memory
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            kept = work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    assert len(events) > 50, "the profiler saw no allocations"
    del kept
    return peak


def simulated_peak(machine: SimulatedMachine, work: Callable[[], Any]) -> int:
    work()
    mark = machine.host.ledger.set_mark()
    kept = work()
    machine.host.ledger.close(mark)
    del kept
    return mark.peak - mark.start


def _kandinsky_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.ones(1, 3, 8, 8, 4),
        "encoder_hidden_states": torch.ones(1, 7, 32),
        "timestep": torch.tensor([500.0]),
        "pooled_projections": torch.ones(1, 32),
        "visual_rope_pos": [torch.arange(3), torch.arange(4), torch.arange(4)],
        "text_rope_pos": torch.arange(7),
        "scale_factor": (1.0, 2.0, 2.0),
    }


def _wan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.ones(1, 4, 3, 16, 16),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.ones(1, 7, 32),
    }


COMPONENTS = [
    ("Kandinsky5Transformer3DModel", tiny.KANDINSKY_TRANSFORMER, "forward", _kandinsky_inputs),
    ("WanTransformer3DModel", tiny.WAN_TRANSFORMER, "forward", _wan_inputs),
    ("AutoencoderKLHunyuanVideo", tiny.HUNYUAN_VAE, "decode", lambda: {"z": torch.ones(1, 4, 3, 16, 16)}),
    ("AutoencoderKLWan", tiny.WAN_VAE, "decode", lambda: {"z": torch.ones(1, 4, 3, 16, 16)}),
]


@pytest.mark.parametrize(("name", "config", "method", "inputs"), COMPONENTS, ids=[c[0] for c in COMPONENTS])
def test_component_takes_what_it_really_takes(
    name: str, config: dict[str, Any], method: str, inputs: Callable[[], dict[str, Any]]
) -> None:
    cls = load_class(f"diffusers.{name}")
    real = cls.from_config(config).eval()
    arguments = inputs()
    measured = measured_peak(lambda: getattr(real, method)(**arguments, return_dict=False)[0])
    with SimulatedMachine(CPU_ONLY) as machine:
        fake = build_part(Part(class_path=f"diffusers.{name}", config=config, dtype="float32"))
        arguments = inputs()
        simulated = simulated_peak(machine, lambda: getattr(fake, method)(**arguments, return_dict=False)[0])
    assert simulated == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("family", [tiny.kandinsky("float32"), tiny.wan("float32")], ids=lambda f: str(f.model))
def test_whole_pipeline_takes_what_it_really_takes(family: Family) -> None:
    load_classes(family)
    pipe = _real_pipeline(family)
    measured = measured_peak(lambda: pipe(**call_arguments(pipe, family, tiny.SHAPE, "pt")))
    with SimulatedMachine(CPU_ONLY) as machine:
        fake = build_pipeline(family, Setup())
        simulated = simulated_peak(machine, lambda: fake(**call_arguments(fake, family, tiny.SHAPE, "pt")))
        assert not machine.guesses
    assert simulated == pytest.approx(measured, rel=0.01)


def _real_pipeline(family: Family) -> Any:
    """The same pipeline with real weights, random ones but finite."""
    pipe = build_pipeline(family, Setup())
    generator = torch.Generator().manual_seed(0)
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module):
            for parameter in module.parameters():
                parameter.data.normal_(0, 0.02, generator=generator)
    return pipe
