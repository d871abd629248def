"""The ways in which each group of components can be held, with what each takes and how long it lasts.

The set of options depends on the model, the cards and the preset, never on how much memory is free: that is why more
memory can only add plans that fit, and never yields a slower one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from operator import add
from typing import Final, NamedTuple

from app.estimate import Cost, cost_of
from app.plans import stage_of
from app.quantization import WORTH_PACKING_BYTES, Quantization, WhileLoading, missing, refusal, unsupported
from app.schema import Backend, Gpu, HardwarePreset, Placement, Shard, Stage, Strategy
from app.speed import Machine
from app.workload import Sizes, Task, packable, sizes_of, stored_bytes

FP8: Final = "float8_e4m3fn"
GROUP_SIZES: Final = (1, 4)
"""Blocks per group without a stream; with one, diffusers allows groups of one only."""
STAYING_SHARES: Final = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9)
"""Of a denoiser's blocks, with our own streaming engine."""
SHARD_STEPS: Final = {2: 16, 3: 8, 4: 8}
"""By number of cards, into how many parts the blocks are cut to try all divisions."""
_VRAM_STAGES: Final = (Stage.ENCODE, Stage.DENOISE, Stage.DECODE)
"""Loading and exporting never hold more on a card than these."""


class How(NamedTuple):
    """One way to hold a group, before it is applied to its components."""

    strategy: Strategy
    device: str
    blocks: int | None = None
    stream: bool = False
    low_cpu: bool = False
    fp8: bool = False
    quantization: WhileLoading | None = None
    """While loading. What lies quantized on the disk is held so whatever this says."""
    stay: float = 0.0
    """Share of the blocks that stays on the card."""
    shares: tuple[tuple[str, int], ...] = ()
    """Of a sharded one: devices with their parts of `SHARD_STEPS`."""


class Option(NamedTuple):
    """One way to hold a group (or the whole pipeline): seconds it adds, bytes it adds by slot (see `slots`)."""

    seconds: float
    bytes: tuple[int, ...]
    placements: tuple[Placement, ...]
    tiling: bool


class Space(NamedTuple):
    """All there is to choose from: one option of each group makes a plan."""

    slots: tuple[tuple[str, Stage], ...]
    groups: tuple[tuple[Option, ...], ...]


def slots(devices: Sequence[str]) -> tuple[tuple[str, Stage], ...]:
    """The memories and stages that a plan must fit: of page-locked RAM one stage stands for all."""
    cards = [(device, stage) for device in devices for stage in _VRAM_STAGES]
    return (*cards, *(("ram", stage) for stage in Stage), ("pinned", Stage.DENOISE))


def space_of(
    task: Task,
    machine: Machine,
    gpus: tuple[Gpu, ...],
    preset: HardwarePreset,
    packages: Mapping[str, str] | None = None,
) -> Space:
    """Everything that may be planned on these cards; without cards, on the CPU. `packages`: installed optional ones."""
    chooser = _Chooser(task, machine, gpus, preset, packages or {})
    return Space(chooser.slots, chooser.groups())


class _Chooser:
    def __init__(
        self,
        task: Task,
        machine: Machine,
        gpus: tuple[Gpu, ...],
        preset: HardwarePreset,
        packages: Mapping[str, str],
    ) -> None:
        self.task, self.machine, self.gpus = task, machine, gpus
        self.dtypes = {f"cuda:{gpu.index}": card_dtype(gpu) for gpu in gpus}
        self.slots = slots(tuple(self.dtypes))
        self.fp8 = preset.fp8_storage
        self.waiting = set(Strategy) - (set() if preset.streaming_engine else {Strategy.STREAM})
        if preset.prefer_disk:
            self.waiting -= {Strategy.MODEL_OFFLOAD, Strategy.BLOCK, Strategy.LEAF, Strategy.STREAM}
        self.quantization = preset.quantization if unused(preset, gpus, packages) is None else None
        self._formats: dict[tuple[str, str, tuple[tuple[str, int], ...]], str] = {}
        self._known: dict[tuple[str, str, bool, Quantization | None], Sizes] = {}
        self.fp8_cards = {f"cuda:{gpu.index}" for gpu in gpus if gpu.supports["fp8_storage"]}

    def groups(self) -> tuple[tuple[Option, ...], ...]:
        by_stage: dict[Stage, list[str]] = {}
        for name in self.task.coefficients.components:
            by_stage.setdefault(stage_of(name), []).append(name)
        tilings = (False, True) if self.task.tiled_bytes is not None else (False,)
        if not self.gpus:
            every = tuple(self.task.coefficients.components)
            whole = [self._option(every, How(Strategy.CPU, "cpu"), tiling) for tiling in tilings]
            return (_sorted(whole),)
        order = [stage for stage in (Stage.DENOISE, Stage.DECODE, Stage.ENCODE) if stage in by_stage]
        ways = {Stage.DENOISE: self._denoise, Stage.DECODE: self._decode, Stage.ENCODE: self._encode}
        return tuple(
            _sorted(
                [
                    self._option(tuple(by_stage[stage]), how, tiling)
                    for how in ways[stage]()
                    for tiling in (tilings if stage is Stage.DECODE else (False,))
                ]
            )
            for stage in order
        )

    def _denoise(self) -> Iterator[How]:
        plain = []
        for device in self.dtypes:
            plain += [How(Strategy.RESIDENT, device), How(Strategy.MODEL_OFFLOAD, device)]
            plain += [How(Strategy.BLOCK, device, blocks=count) for count in GROUP_SIZES]
            plain += [How(Strategy.BLOCK, device, 1, stream=True, low_cpu=low) for low in (False, True)]
            plain += [How(Strategy.LEAF, device), How(Strategy.DISK, device)]
            plain += [How(Strategy.LEAF, device, stream=True, low_cpu=low) for low in (False, True)]
            plain += [How(Strategy.STREAM, device, stay=share) for share in STAYING_SHARES]
        plain += self._shards()
        stored = self._lies_quantized(Stage.DENOISE)
        if stored:  # of two denoisers, one may be unquantized: it is held like the other
            plain = [how for how in plain if self._holds_packed(how, Stage.DENOISE)]
        yield from (how for how in plain if how.strategy in self.waiting)
        yield from self._packed(plain, Stage.DENOISE)
        if self.fp8 and not stored:
            for how in plain:
                cards = {how.device, *(device for device, _ in how.shares)}
                if (
                    how.strategy in self.waiting
                    and how.strategy not in (Strategy.DISK, Strategy.STREAM)
                    and cards <= self.fp8_cards
                ):
                    yield how._replace(fp8=True)

    def _lies_quantized(self, stage: Stage) -> bool:
        return any(stage_of(name) is stage for name in self.task.stored)

    def _holds_packed(self, how: How, stage: Stage) -> bool:
        """What lies quantized on the disk can be held so, on cards that compute with it."""
        methods = {one.method for name, one in self.task.stored.items() if stage_of(name) is stage and one.method}
        cards = {how.device, *(device for device, _ in how.shares)}
        able = all(
            unsupported(method, gpu) is None for method in methods for gpu in self.gpus if f"cuda:{gpu.index}" in cards
        )
        return able and refusal(how.strategy, None) is None

    def _packed(self, plain: list[How], stage: Stage) -> Iterator[How]:
        """The same, packed while loading: on the cards, where computing with few bits is worth it."""
        names = [name for name in self.task.coefficients.components if stage_of(name) is stage]
        if self.quantization is None or not any(self._packs(name) for name in names):
            return
        for how in plain:
            if how.strategy in self.waiting and how.device != "cpu" and refusal(how.strategy, None) is None:
                yield how._replace(quantization=self.quantization)

    def _packs(self, name: str) -> bool:
        facts = self.task.coefficients.components[name]
        large = stage_of(name) is Stage.DENOISE or stored_bytes(facts) >= WORTH_PACKING_BYTES
        return large and packable(facts) and name not in self.task.stored

    def _quantization(self, name: str, how: How) -> Quantization | None:
        if (stored := self.task.stored.get(name)) is not None:
            return stored.method
        return how.quantization if how.quantization is not None and self._packs(name) else None

    def _shards(self) -> list[How]:
        fastest = sorted(self.dtypes, key=lambda name: (-self.machine.devices[name].flops_16bit, name))
        found = []
        for count, steps in SHARD_STEPS.items():
            for cards in combinations(fastest, count):
                for cuts in combinations(range(1, steps), count - 1):
                    parts = [high - low for low, high in zip((0, *cuts), (*cuts, steps), strict=True)]
                    found.append(How(Strategy.RESIDENT, cards[0], shares=tuple(zip(cards, parts, strict=True))))
        return found

    def _decode(self) -> Iterator[How]:
        for device in self.dtypes:
            yield How(Strategy.RESIDENT, device)
            yield How(Strategy.MODEL_OFFLOAD, device)  # small enough to wait in RAM whatever is preferred
        yield How(Strategy.CPU, "cpu")

    def _encode(self) -> Iterator[How]:
        hows = []
        for device in self.dtypes:
            hows += [How(strategy, device) for strategy in (Strategy.RESIDENT, Strategy.MODEL_OFFLOAD, Strategy.DISK)]
            hows += [How(Strategy.LEAF, device), How(Strategy.LEAF, device, stream=True, low_cpu=True)]
        hows.append(How(Strategy.CPU, "cpu"))
        if self._lies_quantized(Stage.ENCODE):
            hows = [how for how in hows if self._holds_packed(how, Stage.ENCODE)]
        yield from (how for how in hows if how.strategy in self.waiting)
        yield from self._packed(hows, Stage.ENCODE)

    def _option(self, components: tuple[str, ...], how: How, tiling: bool) -> Option:
        placements = tuple(self._placement(name, how) for name in components)
        costs = [
            cost_of(
                self.task,
                self.machine,
                placement,
                tuple(self.dtypes),
                tiling=tiling,
                sizes=self._sizes(placement.component, how),
            )
            for placement in placements
        ]
        seconds = sum(part.seconds for cost in costs for part in cost.time)
        return Option(seconds, as_bytes(costs, self.slots), placements, tiling)

    def _placement(self, name: str, how: How) -> Placement:
        facts = self.task.coefficients.components[name]
        return Placement(
            component=name,
            strategy=how.strategy,
            device=how.device,
            dtype=self._dtype(name, how),
            weight_bytes=self._sizes(name, how).weights,
            num_blocks_per_group=how.blocks,
            use_stream=how.stream,
            low_cpu_mem_usage=how.low_cpu,
            storage_dtype=FP8 if how.fp8 else None,
            quantization=self._quantization(name, how),
            resident_blocks=int(facts.block_count * how.stay),
            shards=_shards_of(facts.block_count, how.shares),
        )

    def _sizes(self, name: str, how: How) -> Sizes:
        key = (name, self._dtype(name, how), how.fp8, self._quantization(name, how))
        if key not in self._known:
            facts, stored = self.task.coefficients.components[name], self.task.stored.get(name)
            self._known[key] = sizes_of(facts, key[1], FP8 if how.fp8 else None, key[3], stored)
        return self._known[key]

    def _dtype(self, name: str, how: How) -> str:
        key = (name, how.device, how.shares)
        if key not in self._formats:
            self._formats[key] = self._format(*key)
        return self._formats[key]

    def _format(self, name: str, device: str, shares: tuple[tuple[str, int], ...]) -> str:
        if device == "cpu":
            wanted = set(self.dtypes.values())
            return "bfloat16" if wanted == {"bfloat16"} else "float32"
        devices = [one for one, _ in shares] or [device]
        dtype = max((self.dtypes[one] for one in devices), key=("bfloat16", "float16", "float32").index)
        usual = self.task.coefficients.components[name].dtype
        if usual == "float32" or (dtype == "float16" and name == "vae"):
            return "float32"  # a VAE in float16 turns black on many cards; what was made for float32 keeps it
        return dtype


def unused(preset: HardwarePreset, gpus: tuple[Gpu, ...], packages: Mapping[str, str]) -> str | None:
    """Why the quantization that the preset allows is not used here, in words; None: it is, or it allows none."""
    method = preset.quantization
    if method is None:
        return None
    if not gpus:
        return "the CPU computes, which gains nothing from packed weights but time to unpack them"
    why = missing(method, packages)
    return why or next((words for gpu in gpus if (words := unsupported(method, gpu)) is not None), None)


def card_dtype(gpu: Gpu) -> str:
    """The number format that the card computes fast: bf16 from Ampere on, fp16 on Volta and Turing, else fp32."""
    if gpu.supports["bf16"]:
        return "bfloat16"
    known = gpu.backend is Backend.CUDA and gpu.compute_capability is not None
    return "float32" if known and not gpu.supports["fp8_storage"] else "float16"  # Pascal: fp16 at a 64th of the rate


@lru_cache(maxsize=64)
def _numbered(places: tuple[tuple[str, Stage], ...]) -> dict[tuple[str, Stage], int]:
    return {place: number for number, place in enumerate(places)}


def as_bytes(costs: Sequence[Cost], places: tuple[tuple[str, Stage], ...]) -> tuple[int, ...]:
    """Bytes by slot: what is held adds up, of what is active the largest counts. The same sums as `estimate.add_up`."""
    numbers = _numbered(places)
    held, active = [0] * len(places), [0] * len(places)
    for cost in costs:
        for part in cost.held:
            for stage in part.stages:
                if (number := numbers.get((part.memory, stage))) is not None:
                    held[number] += part.size
        own: dict[int, int] = {}
        for part in cost.active:
            for stage in part.stages:
                if (number := numbers.get((part.memory, stage))) is not None:
                    own[number] = own.get(number, 0) + part.size
        for number, size in own.items():
            active[number] = max(active[number], size)
    return tuple(map(add, held, active))


def _shards_of(block_count: int, shares: tuple[tuple[str, int], ...]) -> tuple[Shard, ...]:
    """Blocks by card, in order; a component with too few blocks stays whole on the first card."""
    if not shares or block_count < len(shares):
        return ()
    steps, first, done, shards = sum(part for _, part in shares), 0, 0, []
    for device, part in shares:
        done += part
        last = round(block_count * done / steps)
        if last > first:
            shards.append(Shard(device=device, first_block=first, count=last - first))
        first = last
    return tuple(shards)


def _sorted(options: list[Option]) -> tuple[Option, ...]:
    """Fastest first; of equally fast ones the one that was named first."""
    return tuple(sorted(options, key=lambda option: option.seconds))
