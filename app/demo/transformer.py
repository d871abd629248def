"""The denoising transformer: tiny configuration, fast attention for training, and flow matching on drawn keyframes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers import Kandinsky5Transformer3DModel
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5Attention, Kandinsky5AttnProcessor
from torch import Tensor, nn

from app.demo.clips import (
    KEYFRAMES,
    Attributes,
    random_attributes,
    random_caption,
    render_keyframes,
    with_defaults,
)
from app.demo.muon import Muon, split_parameters
from app.demo.probes import Probes
from app.demo.stages import StepRandom, load_checkpoint, progress, run_steps, save_atomically
from app.demo.text import PADS, WIDTH, TextEncoders
from app.demo.vae import CHANNELS, GRID, LATENTS, SCALE, WAVES, pack
from app.demo.vocabulary import ATTRIBUTES, DEFAULT_NEGATIVE
from app.runtime.guard import assert_trainable, prepare_for_training

ROPE_SCALE = (1.0, 3.16, 3.16)
"""What the pipeline passes for pictures below 480 pixels."""


class Course(NamedTuple):
    """One course of training: the second begins with the weights of the first."""

    steps: int
    phases: tuple[tuple[float, int, int], ...]
    """(share of the steps, keyframes drawn at random from a clip, clips a step): parts of a clip cost less."""
    loose: float
    """How much trajectories vary beyond their lanes."""
    peak: float
    """Of the learning rates."""
    hold: float
    """Share of the steps before they begin to fall."""


def rough(steps: int) -> Course:
    """Where things are and how they move: varied clips, so that nothing is learned by heart."""
    return Course(steps, ((0.75, 3, 24), (0.15, 5, 20), (0.10, KEYFRAMES, 16)), loose=1.0, peak=1.0, hold=0.3)


def fine(steps: int) -> Course:
    """Outlines: the same few ways in every clip."""
    return Course(steps, ((0.80, 3, 16), (0.12, 5, 12), (0.08, KEYFRAMES, 8)), loose=0.0, peak=0.5, hold=0.05)


PLACE_SCALE = 50.0
"""Places are in [-1, 1] times this, so that they stand out of the noise from the second step on.

In training they are in [-1, 1] and their noise is divided by it: `scale_places` puts the factor into the weights.
"""
SHIFT = 4.0
"""The scheduler's shift when sampling."""
DROPOUT = 0.1
_SEED = 23
_UNCONDITIONAL = ("", DEFAULT_NEGATIVE)


def make_transformer() -> Any:
    """The untrained transformer."""
    model = Kandinsky5Transformer3DModel(
        in_visual_dim=LATENTS,
        out_visual_dim=LATENTS,
        in_text_dim=WIDTH,
        in_text_dim2=WIDTH,
        time_dim=256,
        patch_size=(1, 2, 2),
        model_dim=128,
        ff_dim=384,
        num_text_blocks=1,
        num_visual_blocks=6,
        axes_dims=(8, 12, 12),
        visual_cond=False,
        attention_type="regular",
    )
    # The stock class closes every gate at first; half open, all blocks learn from the first step.
    with torch.no_grad():
        for block in model.visual_transformer_blocks:
            block.visual_modulation.out_layer.bias.view(9, -1)[2::3] = 0.5
        for block in model.text_transformer_blocks:
            block.text_modulation.out_layer.bias.view(6, -1)[2::3] = 0.5
        model.out_layer.out_layer.weight.zero_()
    return model


class FastAttention:
    """The stock attention in plain float32, for training only: complex RoPE, not 2x2 matrices, and no bf16 rounding."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        sparse_params: None = None,  # noqa: ARG002
    ) -> Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        batch, length, _ = hidden_states.shape
        query = attn.query_norm(attn.to_query(hidden_states).view(batch, length, attn.num_heads, -1))
        key = attn.key_norm(attn.to_key(source).view(batch, source.shape[1], attn.num_heads, -1))
        value = attn.to_value(source).view(batch, source.shape[1], attn.num_heads, -1)
        if rotary_emb is not None:
            turn = torch.view_as_complex(rotary_emb[..., :, 0].contiguous())
            query, key = (_rotate(x, turn) for x in (query, key))
        out = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return attn.out_layer(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)


def use_fast_attention(model: nn.Module, fast: bool) -> None:
    """Switch between FastAttention and the stock processor."""
    for module in model.modules():
        if isinstance(module, Kandinsky5Attention):
            module.processor = FastAttention() if fast else Kandinsky5AttnProcessor()


class CaptionCache:
    """Captions with their attributes and frozen text embeddings, grouped by length; the unconditional ones apart."""

    def __init__(self, state: dict[str, Any]) -> None:
        names = [tuple(values) for values in ATTRIBUTES.values()]
        self.attributes = [
            Attributes(*(values[i] for values, i in zip(names, row, strict=True)))
            for row in state["attributes"].tolist()
        ]
        self.pooled: Tensor = state["pooled"]
        self.tokens: Tensor = state["tokens"]
        self.starts: list[int] = state["starts"].tolist()
        self.lengths: list[int] = state["lengths"].tolist()
        self.buckets: dict[int, list[int]] = {}
        for index in range(len(self.attributes)):
            self.buckets.setdefault(self.lengths[index], []).append(index)
        self.widths = sorted(self.buckets)
        self.weights = [len(self.buckets[width]) for width in self.widths]

    def draw(self, count: int, rng: random.Random, dropout: float = DROPOUT) -> tuple[list[Attributes], Tensor, Tensor]:
        """Attributes, Qwen states (count, tokens, WIDTH) and CLIP vectors of `count` captions of one length.

        A share of `dropout` of the batches gets unconditional prompts instead of their captions.
        """
        if rng.random() < dropout:
            index = len(self.attributes) + rng.randrange(len(_UNCONDITIONAL))
            items = [random_attributes(rng) for _ in range(count)]
            width, chosen = self.lengths[index], [index] * count
        else:
            width = rng.choices(self.widths, self.weights)[0]
            chosen = rng.choices(self.buckets[width], k=count)
            items = [self.attributes[index] for index in chosen]
        width += 0 if rng.random() < 0.8 else rng.randint(1, PADS)
        tokens = torch.stack([self.tokens[self.starts[i] : self.starts[i] + width] for i in chosen])
        return items, tokens.float(), self.pooled[chosen].float()


@torch.no_grad()
def caption_cache(path: Path, encoders: TextEncoders, count: int) -> CaptionCache:
    """Load the cache at path, or encode `count` random training captions into it."""
    if not path.exists():
        rng = random.Random(_SEED)
        described = [with_defaults(random_attributes(rng), rng) for _ in range(count)]
        captions = [random_caption(attributes, named, rng) for attributes, named in described]
        captions += _UNCONDITIONAL
        pooled, tokens, lengths = [], [], []
        for start in progress(range(0, len(captions), 64), "captions"):
            batch = encoders(captions[start : start + 64], pads=PADS)
            pooled.append(batch.pooled.half())
            for row, length in zip(batch.tokens, batch.lengths.tolist(), strict=True):
                tokens.append(row[: length + PADS].half())
                lengths.append(length)
        sizes = torch.tensor([0, *(len(row) for row in tokens)])
        rows = [[v.index(a) for v, a in zip(ATTRIBUTES.values(), item, strict=True)] for item, _ in described]
        state = {
            "attributes": torch.tensor(rows),
            "pooled": torch.cat(pooled),
            "tokens": torch.cat(tokens),
            "starts": sizes.cumsum(0)[:-1],
            "lengths": torch.tensor(lengths),
        }
        save_atomically(state, path)
    return CaptionCache(load_checkpoint(path))


def noise_levels(count: int, rng: StepRandom) -> Tensor:
    """Random sigmas in (0, 1): most where a sampler of few steps stops, the rest everywhere.

    With the shipped scheduler's shift the last of 8 steps goes from sigma 0.36 straight to the picture, so nearly all
    that is seen is decided above; one in seven keeps longer schedules defined.
    """
    u = torch.rand(count, generator=rng.torch)
    shifted = SHIFT * u / (1 + (SHIFT - 1) * u)
    return torch.where(torch.rand(count, generator=rng.torch) < 0.15, u, 0.3 + 0.7 * shifted)


def shape_weight(rgb: Tensor) -> Tensor:
    """Loss weights laid out like the latents: 3 on the shape and one pixel around it, 1 elsewhere, scaled to mean 1."""
    b, k, h, w, _ = rgb.shape
    contrast = (rgb - rgb[:, :, :1, :1]).abs().amax(-1).view(b * k, 1, h, w)
    near = F.max_pool2d((contrast > 0.05).float(), 3, 1, 1).view(b, k, h, w, 1).expand_as(rgb)
    weight = 1 + 2 * pack(near) / SCALE
    return weight / weight.mean()


def places(keys: Sequence[int], side: int) -> Tensor:
    """Waves of key, row and column of every cell, in [-1, 1]: (keys, side, side, PLACES)."""
    wave = torch.arange(1, WAVES + 1)

    def waves(line: Tensor) -> Tensor:
        return torch.cos(torch.pi * line[:, None] * wave)

    row = waves((torch.arange(side) + 0.5) / side)
    time = waves((torch.tensor(keys) + 0.5) / KEYFRAMES)
    shape = (len(keys), side, side, WAVES)
    parts = (time[:, None, None], row[None, :, None], row[None, None, :])
    return torch.cat([part.expand(shape) for part in parts], -1)


class Average:
    """Exponential moving average of a model's parameters, quick at first."""

    def __init__(self, model: nn.Module, decay: float = 0.998) -> None:
        self.decay = decay
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged parameters by name."""
        return self.values

    def load_state_dict(self, state: Any, /) -> None:
        """Restore the averaged parameters."""
        self.values = dict(state)

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the parameters after a step."""
        decay = min(self.decay, (step + 1) / (step + 20))
        for name, p in model.named_parameters():
            self.values[name].lerp_(p, 1 - decay)


def phase(step: int, course: Course) -> tuple[int, int]:
    """(keyframes of each clip, clips) that are trained on at this step."""
    share = 0.0
    for part, keys, clips in course.phases:
        share += part
        if step < share * course.steps:
            return keys, clips
    return course.phases[-1][1:]


def predict(model: Any, noisy: Tensor, sigma: Tensor, keys: Sequence[int], text: tuple[Tensor, Tensor]) -> Tensor:
    """The velocity, noise minus truth, of latents (batch, keys, 12, 12, LATENTS) at noise levels (batch,)."""
    tokens, pooled = text
    side = torch.arange(GRID)
    velocity: Tensor = model(
        hidden_states=noisy,
        encoder_hidden_states=tokens,
        timestep=sigma * 1000,
        pooled_projections=pooled,
        visual_rope_pos=[torch.tensor(keys), side, side],
        text_rope_pos=torch.arange(tokens.shape[1]),
        scale_factor=ROPE_SCALE,
        return_dict=False,
    )
    return velocity


def flow_loss(
    model: Any, probes: Probes, cache: CaptionCache, rng: StepRandom, count: int, batch: int, loose: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(weighted velocity error, the same plus the probes' losses) on `count` keyframes of each of `batch` clips."""
    items, tokens, pooled = cache.draw(batch, rng.python)
    keys = sorted(rng.python.sample(range(KEYFRAMES), count))
    drawn = render_keyframes(items, rng.python, keys, loose)
    rgb = torch.from_numpy(drawn.rgb)
    picture = pack(rgb)
    clean = torch.cat([picture, places(keys, 2 * GRID).expand(batch, -1, -1, -1, -1)], -1)
    noise = torch.randn(clean.shape, generator=rng.torch)
    noise[..., CHANNELS:] /= PLACE_SCALE
    sigma = noise_levels(batch, rng)
    level = sigma.view(-1, 1, 1, 1, 1)
    velocity = predict(model, clean.lerp(noise, level), sigma, keys, (tokens, pooled))
    error = (velocity - (noise - clean)) ** 2
    loss = (error[..., :CHANNELS] * shape_weight(rgb)).mean()
    probed = probes(keys, drawn) + 0.5 * error[..., CHANNELS:].mean()
    return loss, loss + probed


def train_transformer(
    checkpoint: Path,
    cache: CaptionCache,
    course: Course,
    before_step: Callable[[], None] = lambda: None,
    start: Path | None = None,
) -> Any:
    """Train (or resume, or just load when done); returns the transformer with its averaged weights.

    Args:
        start: a checkpoint to begin with; None: from nothing.
    """
    torch.manual_seed(_SEED)
    model = make_transformer()
    use_fast_attention(model, True)
    probes = Probes(model)
    trained = nn.ModuleList([model, probes])
    prepare_for_training(trained, "cpu")
    if start is not None:
        before = load_checkpoint(start)
        model.load_state_dict(before["average"], strict=False)
        probes.load_state_dict(before["probes"])
    average = Average(model)
    hidden = [n for n, p in model.named_parameters() if p.dim() == 2 and "blocks" in n and "modulation" not in n]
    matrices, others = split_parameters(model, hidden)
    optimizer = Muon(matrices, [*others, *probes.parameters()], rate=3e-3, adam_rate=1.5e-3, decay=0.02)
    assert_trainable(trained, optimizer)
    seed = _SEED + (start is not None)

    def step(index: int) -> float:
        before_step()
        falling = 0.01 + (course.steps - index) / ((1 - course.hold) * course.steps)
        optimizer.scale = course.peak * min(1.0, (index + 1) / 50, falling)
        rng = StepRandom(seed, index)
        loss, total = flow_loss(model, probes, cache, rng, *phase(index, course), course.loose)
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update(model, index)
        return float(loss.detach())

    parts = {"model": model, "probes": probes, "optimizer": optimizer, "average": average}
    run_steps(checkpoint, parts, course.steps, step)
    return averaged_transformer(checkpoint)


def averaged_transformer(checkpoint: Path) -> Any:
    """The transformer with the averaged weights of a checkpoint, in its stock form."""
    model = make_transformer()
    model.load_state_dict(load_checkpoint(checkpoint)["average"], strict=False)
    scale_places(model)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def scale_places(model: Any) -> None:
    """From places in [-1, 1], as in training, to noise of variance 1 in all channels, as a sampler draws it."""
    width = model.config.model_dim
    model.visual_embeddings.in_layer.weight.view(width, -1, LATENTS)[:, :, CHANNELS:] /= PLACE_SCALE
    out = model.out_layer.out_layer
    out.weight.view(LATENTS, -1, width)[CHANNELS:] *= PLACE_SCALE
    out.bias.view(LATENTS, -1)[CHANNELS:] *= PLACE_SCALE
