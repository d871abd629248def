"""A run that goes on where another process left it, on pipelines whose `__call__` is not changed.

What a run has computed by the end of a step are the results of `encode_prompt` and of the last `scheduler.step`, the
scheduler's own memory and the generators' states. `Keeper` collects them from outside and writes them now and then. To
resume, the pipeline is called as before: what it asks of the text encoders and of the steps that were done is answered
from the file (a denoiser's answer does not matter, only its shape does), and from the next step on it computes. So
the frames are those of the uninterrupted run, for any pipeline with a step callback and any scheduler whose memory
consists of numbers and tensors. Weights that were not needed are never brought to a card.

Not covered: caches that a denoiser keeps from step to step (none of the catalogue does), and noise drawn on the card
from torch's own generator instead of the request's.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from app.errors import InvalidOutput
from app.events import Keep
from app.runtime import checkpoint
from app.schema import JsonObject, ModelCard, Request

PROMPT, STEPS = "prompt.safetensors", "steps.safetensors"
MOST_LOST_SECONDS, MOST_LOST_SHARE = 60.0, 0.05
"""A run that is cut off has at most so much to compute again, whichever is less, and the step that was cut."""
LEAST_SECONDS, WRITING_SHARE = 2.0, 20
"""But it is not worth more: what took no two seconds is quickly made again, and writing takes at most one part in so
many of the time that computing takes."""


def facts_of(job_id: str, card: ModelCard, request: Request, dtype: str, versions: dict[str, str]) -> JsonObject:
    """What a checkpoint belongs to.

    Another plan may go on from it, but not in another number format, and no other model, request or diffusers.
    """
    model = card.model_dump(mode="json", include={"repo_id", "revision", "folder", "pipeline", "gguf"})
    if card.folder is not None:
        seen = [
            (path.relative_to(card.folder).as_posix(), path.stat().st_size, path.stat().st_mtime_ns)
            for path in sorted(card.folder.rglob("*"))
            if path.suffix in (".safetensors", ".json")
        ]
        model["files"] = hashlib.sha256(repr(seen).encode()).hexdigest()
    asked = request.model_dump(mode="json", exclude={"timeout_seconds", "preset", "fps"})
    known = {name: versions[name] for name in ("torch", "diffusers", "transformers")}
    return {"job": job_id, "model": model, "request": asked, "dtype": dtype, "versions": known}


class Keeper:
    """What one run leaves behind for the next, and what it found of the last."""

    def __init__(self, order: Keep, facts: JsonObject) -> None:
        self.notes: list[str] = []
        """What went wrong with files, in words; the run goes on without."""
        self.resumed_at = 0
        """Steps that were answered from the file."""
        self._order, self._facts = order, facts
        self._began = self._written_at = self._cost = 0.0
        self._prompts: list[Any] = []
        self._prompt_calls = 0
        self._prompts_kept = False
        self._kept: dict[str, Any] | None = None
        self._schedulers: list[Any] = []
        self._calls: list[int] = []
        self._results: list[Any] = []
        self._answers: dict[str, Any] = {}
        self._steps = 0
        self._device = torch.device("cpu")

    @contextmanager
    def watching(self, pipe: Any, denoisers: dict[str, torch.nn.Module], generator: torch.Generator) -> Iterator[None]:
        """Inside, `pipe` may be called once; what was kept is answered, what is new is collected."""
        self._device = torch.device(pipe._execution_device)
        self._generator = generator
        self._find()
        with ExitStack() as exits:
            if hasattr(pipe, "encode_prompt"):
                _replace(pipe, "encode_prompt", self._encoding(pipe.encode_prompt), exits)
            _replace(type(pipe.scheduler), "step", self._stepping(type(pipe.scheduler).step), exits)
            names = {id(module): name for name, module in denoisers.items()}
            for kind in {type(module) for module in denoisers.values()}:
                _replace(kind, "__call__", self._denoising(kind.__call__, names), exits)
            yield

    @property
    def skipping(self) -> bool:
        """Whether the steps that are asked for now were done by an earlier run."""
        return self._kept is not None and self._steps < self._kept["steps"]

    def step_ended(self, done: int, total: int) -> None:
        """To be called after each step, answered or computed.

        Raises:
            InvalidOutput: its result holds NaN or infinite numbers.
        """
        was_skipping = self.skipping
        self._steps = done
        if was_skipping:
            if not self.skipping:
                self._go_on()
                self._began = time.monotonic()
            return
        if not all(_finite(result) for result in self._results):
            raise InvalidOutput(
                f"Step {done} of {total} gave invalid numbers (NaN), so the run was stopped there. This is usually a "
                "number format the card cannot handle: choose the CPU preset or another model."
            )
        if done >= total or time.monotonic() - self._written_at >= self._pause(done, total):
            self._write()

    def _pause(self, done: int, total: int) -> float:
        """Seconds between two writings."""
        if self._order.seconds is not None:
            return self._order.seconds
        whole = (time.monotonic() - self._began) / (done - self.resumed_at) * total
        return max(min(MOST_LOST_SECONDS, whole * MOST_LOST_SHARE), LEAST_SECONDS, WRITING_SHARE * self._cost)

    # ---------------------------------------------------------------------------------------------- what was kept

    def _find(self) -> None:
        self._began = self._written_at = time.monotonic()
        if not self._order.resume:
            return
        folder = self._order.folder
        try:
            self._prompts = checkpoint.read(folder / PROMPT, self._facts, self._device)
            self._prompts_kept = True
        except checkpoint.CheckpointRefused as error:
            self._refused(folder / PROMPT, error)
        try:
            kept = checkpoint.read(folder / STEPS, self._facts, self._device)
            self._kept, self._answers, self.resumed_at = kept, dict(kept["answers"]), int(kept["steps"])
        except checkpoint.CheckpointRefused as error:
            self._refused(folder / STEPS, error)

    def _refused(self, path: Path, error: Exception) -> None:
        if path.exists():  # a run that was stopped early has not come to it
            self.notes.append(f"What was kept could not be used, so that part was computed again: {error}")

    def _go_on(self) -> None:
        """The last step that was answered has ended: schedulers and generator become what they were then."""
        assert self._kept is not None  # noqa: S101 - for the type checker
        for scheduler, memory in zip(self._schedulers, self._kept["schedulers"], strict=True):
            for name, value in memory.items():
                there = getattr(scheduler, name, None)
                moved = isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor)
                setattr(scheduler, name, value.to(there.device) if moved else value)  # type: ignore[union-attr]
        self._generator.set_state(_state(self._kept["generator"]))
        torch.set_rng_state(_state(self._kept["torch"]))
        self._kept = None

    # --------------------------------------------------------------------------------------------------- writing

    def _write(self) -> None:
        began = time.monotonic()
        folder = self._order.folder
        tree = {
            "steps": self._steps,
            "calls": self._calls,
            "results": self._results,
            "answers": self._answers,
            "schedulers": [_memory(scheduler) for scheduler in self._schedulers],
            "generator": _state_words(self._generator.get_state()),
            "torch": _state_words(torch.get_rng_state()),
        }
        if self._prompts_kept or self._write_prompts():
            self._put(folder / STEPS, tree, also=checkpoint.size_of(self._prompts))
        self._written_at = time.monotonic()
        self._cost = self._written_at - began

    def _write_prompts(self) -> bool:
        self._prompts_kept = self._put(self._order.folder / PROMPT, self._prompts, also=0)
        return self._prompts_kept

    def _put(self, path: Path, tree: Any, *, also: int) -> bool:
        """Whether it was written; `also` are bytes that lie there already."""
        if self._order.quota_bytes == 0:  # the person wants none
            return False
        size = checkpoint.size_of(tree) + also
        if size > self._order.quota_bytes:
            self._lost(f"it needs {size / 2**20:.0f} MiB, more than is left of the quota for such files")
            return False
        try:
            checkpoint.write(path, tree, self._facts, self._device)
        except (OSError, checkpoint.NotKept) as error:
            self._lost(getattr(error, "strerror", None) or str(error))
            return False
        return True

    def _lost(self, why: str) -> None:
        text = f"This run could not have been resumed for a part of it: nothing could be kept ({why})."
        if text not in self.notes:
            self.notes.append(text)

    # ------------------------------------------------------------------------------------ what the pipeline calls

    def _encoding(self, encode: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(encode)
        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            number = self._prompt_calls
            self._prompt_calls += 1
            if self._prompts_kept and number < len(self._prompts):
                return self._prompts[number]
            result = encode(*args, **kwargs)
            self._prompts.append(result)
            return result

        return encode_prompt

    def _stepping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)  # pipelines look at signatures
        def stepped(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            number = self._number_of(scheduler)
            self._calls[number] += 1
            if self._kept is not None and self._calls[number] <= self._kept["calls"][number]:
                return self._kept["results"][number]
            self._results[number] = step(scheduler, *args, **kwargs)
            return self._results[number]

        return stepped

    def _denoising(self, call: Callable[..., Any], names: dict[int, str]) -> Callable[..., Any]:
        @wraps(call)
        def called(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = names.get(id(module))
            if name is None:
                return call(module, *args, **kwargs)
            if self.skipping and self._kept is not None and name in self._kept["answers"]:
                return _zeros(self._kept["answers"][name], self._device)
            if not self._prompts_kept and time.monotonic() - self._began > LEAST_SECONDS:
                self._write_prompts()  # the first step is where memory falls short
            result = call(module, *args, **kwargs)
            if name not in self._answers:
                with suppress(checkpoint.NotKept):  # then its steps are computed again
                    self._answers[name] = _form(result)
            return result

        return called

    def _number_of(self, scheduler: Any) -> int:
        for number, known in enumerate(self._schedulers):
            if known is scheduler:
                return number
        self._schedulers.append(scheduler)
        self._calls.append(0)
        self._results.append(None)
        return len(self._schedulers) - 1


def _replace(owner: Any, name: str, value: Any, exits: ExitStack) -> None:
    own = vars(owner).get(name)
    setattr(owner, name, value)
    if own is None:
        exits.callback(delattr, owner, name)
    else:
        exits.callback(setattr, owner, name, own)


def _state_words(state: torch.Tensor) -> str:
    """Five kilobytes that never see a device."""
    return bytes(state.tolist()).hex()


def _state(words: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(words), dtype=torch.uint8)


def _memory(scheduler: Any) -> dict[str, Any]:
    """All that a scheduler knows beside its configuration."""
    return {name: value for name, value in vars(scheduler).items() if name != "_internal_dict" and not callable(value)}


def _form(result: Any) -> Any:
    """The same tree with shape and number format in place of each tensor, as lists that a checkpoint can hold."""
    if isinstance(result, torch.Tensor):
        return {"shape": list(result.shape), "dtype": result.dtype}
    if isinstance(result, dict):
        return {"class": type(result).__name__, "entries": {name: _form(value) for name, value in result.items()}}
    if isinstance(result, list | tuple):
        return [_form(value) for value in result]
    if result is None:
        return None
    raise checkpoint.NotKept(f"A {type(result).__name__} cannot be kept.")


def _zeros(form: Any, device: torch.device) -> Any:
    if form is None:
        return None
    if isinstance(form, list):
        return tuple(_zeros(entry, device) for entry in form)
    if "shape" in form:
        return torch.zeros((), dtype=form["dtype"], device=device).expand(form["shape"])
    from diffusers.models.modeling_outputs import Transformer2DModelOutput  # noqa: PLC0415

    # diffusers' denoisers answer with this one, or with a class of the same field
    return Transformer2DModelOutput(**{name: _zeros(entry, device) for name, entry in form["entries"].items()})


def _finite(result: Any) -> bool:
    if isinstance(result, torch.Tensor):
        return not result.is_floating_point() or bool(torch.isfinite(result).all())
    if isinstance(result, dict):
        return all(map(_finite, result.values()))
    return all(map(_finite, result)) if isinstance(result, list | tuple) else True
