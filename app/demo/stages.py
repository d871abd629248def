"""Resumable training loops: every step draws from its own seed, so that a run killed and resumed sees the same data."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

Item = TypeVar("Item")


class Stateful(Protocol):
    """Anything with a state that can be saved: modules, optimisers, averages."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class StepRandom:
    """The random numbers of one step: a Python and a torch generator, both seeded by (seed, step)."""

    def __init__(self, seed: int, step: int) -> None:
        self.python = random.Random(seed * 1_000_003 + step)
        self.torch = torch.Generator().manual_seed(seed * 1_000_003 + step)


def save_atomically(state: Any, path: Path) -> None:
    """Write a checkpoint so that a kill leaves either the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def load_checkpoint(path: Path) -> Any:
    """A checkpoint of tensors and plain values; nothing is executed."""
    return torch.load(path, map_location="cpu", weights_only=True)


def run_steps(
    path: Path,
    parts: Mapping[str, Stateful],
    total: int,
    step: Callable[[int], float],
    save_seconds: float = 60.0,
) -> None:
    """Call step(0), ..., step(total - 1), each returning its loss; go on from the checkpoint if there is one."""
    done, spent = 0, 0.0
    if path.exists():
        state = load_checkpoint(path)
        done, spent = int(state["step"]), float(state["seconds"])
        for name, part in parts.items():
            part.load_state_dict(state[name])
    started = saved = time.monotonic()

    def save() -> None:
        seconds = spent + time.monotonic() - started
        state = {name: part.state_dict() for name, part in parts.items()}
        save_atomically({**state, "step": done, "seconds": seconds}, path)

    recent: list[float] = []
    with tqdm(total=total, initial=done, desc=path.stem, unit="step", mininterval=5.0) as bar:
        while done < total:
            recent = [*recent[-49:], step(done)]
            done += 1
            bar.update()
            if done % 10 == 0:
                bar.set_postfix(loss=f"{sum(recent) / len(recent):.4f}", refresh=False)
            if time.monotonic() - saved > save_seconds:
                save()
                saved = time.monotonic()
    if recent:
        save()


def progress(items: Iterable[Item], name: str) -> Iterator[Item]:
    """The items, with a progress bar on stderr."""
    yield from tqdm(items, desc=name, mininterval=5.0)


def seconds_spent(path: Path) -> float:
    """Wall time that the steps behind a checkpoint took."""
    return float(load_checkpoint(path)["seconds"])
