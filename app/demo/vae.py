"""The video autoencoder: an encoder that is a fixed linear map, and a trained decoder that draws crisp frames from it.

Encoder: the latent of frame group k is keyframe 4k averaged over 4x4 pixels (a 24x24 picture), with its 2x2 blocks of
pixels as 12 channels of an 8x8-pixel cell, ordered (row, column, RGB).  Built by initialisation, never trained.
Decoder: 4x super-resolution in space, 4x interpolation in time, trained on noisy latents so that it mends what the
transformer gets slightly wrong.

Further channels say where a cell is.  RoPE is relative and attention normalises, so a token of a noisy picture finds
its own place from the borders only, and vaguely, which shows as wobbling outlines; with the places among what is
denoised, it reads them off its own input after the first step.  They are cosines, because networks learn sharp
functions of waves and not of a ramp.  Both convolutional halves pass them over.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLHunyuanVideo
from torch import Tensor, nn

from app.demo import clips
from app.demo.clips import KEYFRAMES, POOL, SIZE, STRIDE, random_attributes
from app.demo.muon import Muon, split_parameters
from app.demo.stages import StepRandom, run_steps
from app.runtime.guard import assert_trainable, prepare_for_training

CHANNELS = 12
"""Latent channels that hold the picture."""
GRID = 6
"""Tokens of the transformer along each side of a keyframe, 2x2 cells each."""
WAVES = 5
"""Cosines for each of key, row and column; with the constant they tell all six tokens of a row apart."""
PLACES = 3 * WAVES
"""Latent channels that hold where a cell is.  The decoder does not read them."""
LATENTS = CHANNELS + PLACES
WIDTHS = (24, 32, 64)
SCALE = 1.5
"""Latents times this have about unit variance; stored as the autoencoder's scaling factor."""
CELL = 8
"""Pixels per latent cell."""
WINDOW = 5
"""Latent frames that the stock decoder sees at once."""
_SEED = 11
_BALLAST = 128.0
"""Encoder: a constant channel pair of this size keeps GroupNorm's deviation constant within 0.1 %."""
_DECODER_BALLAST = 6.0


def make_vae() -> Any:
    """An untrained autoencoder without places: exact encoder, decoder initialised to a blurry enlargement."""
    vae = _stock_vae(CHANNELS)
    _build_encoder(vae)
    _initialise_decoder(vae)
    return vae


def with_places(vae: Any) -> Any:
    """The same autoencoder with PLACES more latent channels: zero when encoded, not read when decoded."""
    wide = _stock_vae(LATENTS)
    picture = torch.arange(CHANNELS)
    moments = torch.cat([picture, LATENTS + picture])  # means, then log-variances
    new = wide.state_dict()
    for name, old in vae.state_dict().items():
        where = [
            torch.arange(have) if have == want else moments if have == 2 * CHANNELS else picture
            for have, want in zip(old.shape[:2], new[name].shape[:2], strict=True)
        ]
        new[name].zero_()
        new[name][tuple(torch.meshgrid(*where, indexing="ij"))] = old
    wide.quant_conv.bias.data[LATENTS + CHANNELS :] = -14.0
    return wide.eval().requires_grad_(False)


def _stock_vae(channels: int) -> Any:
    return AutoencoderKLHunyuanVideo(
        latent_channels=channels,
        block_out_channels=WIDTHS,
        down_block_types=("HunyuanVideoDownBlock3D",) * len(WIDTHS),
        up_block_types=("HunyuanVideoUpBlock3D",) * len(WIDTHS),
        layers_per_block=1,
        norm_num_groups=1,
        spatial_compression_ratio=CELL,
        temporal_compression_ratio=STRIDE,
        mid_block_add_attention=False,
        scaling_factor=SCALE,
    )


def pack(rgb: Tensor) -> Tensor:
    """Pooled keyframes (batch, keys, 24, 24, 3) in [-1, 1] to scaled latents (batch, keys, 12, 12, CHANNELS)."""
    b, k, h, w, _ = rgb.shape
    cells = rgb.view(b, k, h // 2, 2, w // 2, 2, 3).permute(0, 1, 2, 4, 3, 5, 6)
    return cells.reshape(b, k, h // 2, w // 2, CHANNELS) * SCALE


def unpack(latents: Tensor) -> Tensor:
    """The inverse of pack."""
    b, k, h, w, _ = latents.shape
    cells = (latents / SCALE).view(b, k, h, w, 2, 2, 3).permute(0, 1, 2, 4, 3, 5, 6)
    return cells.reshape(b, k, 2 * h, 2 * w, 3)


@torch.no_grad()
def _build_encoder(vae: Any) -> None:
    encoder = vae.encoder
    for parameter in encoder.parameters():
        parameter.zero_()
    for module in encoder.modules():
        if isinstance(module, nn.GroupNorm):
            module.weight.fill_(1)
    # With conv2 at zero every residual block passes its input on; shortcuts copy the three colours.
    convs = [encoder.conv_in.conv]
    convs += [r.conv_shortcut.conv for b in encoder.down_blocks for r in b.resnets if r.conv_shortcut is not None]
    for conv in convs:
        _, _, t, y, x = conv.weight.shape
        for c in range(3):
            conv.weight[c, c, t - 1, y // 2, x // 2] = 1
    # Causal padding: the last temporal tap of a strided convolution is frame 2t, the spatial taps 1 and 2 are the cell.
    for block in encoder.down_blocks[:2]:
        for c in range(3):
            block.downsamplers[0].conv.conv.weight[c, c, 2, 1:, 1:] = 0.25
    last = encoder.down_blocks[2].downsamplers[0].conv.conv
    for channel, (y, x, c) in enumerate((y, x, c) for y in (1, 2) for x in (1, 2) for c in range(3)):
        last.weight[channel, c, 2, y, x] = 1
        last.weight[CHANNELS + channel, c, 2, y, x] = -1
    last.bias[2 * CHANNELS], last.bias[2 * CHANNELS + 1] = _BALLAST, -_BALLAST
    # SiLU(a) - SiLU(-a) = a, so the pairs come out of the last activation as they went in, divided by the deviation.
    deviation = _BALLAST * (2 / WIDTHS[-1]) ** 0.5
    for channel in range(CHANNELS):
        encoder.conv_out.conv.weight[channel, channel, 2, 1, 1] = deviation
        encoder.conv_out.conv.weight[channel, CHANNELS + channel, 2, 1, 1] = -deviation
    vae.quant_conv.weight.zero_()
    vae.quant_conv.bias.zero_()
    vae.quant_conv.bias[CHANNELS:] = -14.0
    for channel in range(CHANNELS):
        vae.quant_conv.weight[channel, channel] = 1
    vae.encoder.requires_grad_(False)
    vae.quant_conv.requires_grad_(False)


@torch.no_grad()
def _initialise_decoder(vae: Any) -> None:
    """Let the colours through from the start; plain initialisation takes thousands of steps to find them.

    Channels of the main path: 0-2 colours, 3-5 their negatives, 6 and 7 the constant pair (GroupNorm would otherwise
    destroy absolute colour in so narrow a net).  At the lowest resolution the 12 latent channels and their negatives
    are carried as 0-11 and 12-23, the pair as 24 and 25.
    """
    decoder = vae.decoder
    low = 2 * CHANNELS

    def copy(conv: nn.Conv3d, channels: int) -> None:
        conv.weight[:channels] = 0
        assert conv.bias is not None
        conv.bias[:channels] = 0
        y, x = conv.weight.shape[3] // 2, conv.weight.shape[4] // 2
        for c in range(channels):
            conv.weight[c, c, -1, y, x] = 1

    conv = decoder.conv_in.conv
    conv.weight[: low + 2] = 0
    conv.bias[: low + 2] = 0
    for c in range(CHANNELS):
        conv.weight[c, c, -1, 1, 1] = 1
        conv.weight[CHANNELS + c, c, -1, 1, 1] = -1
    conv.bias[low], conv.bias[low + 1] = _DECODER_BALLAST, -_DECODER_BALLAST
    blocks = [(r, low + 2) for r in (*decoder.mid_block.resnets, *decoder.up_blocks[0].resnets)]
    blocks += [(r, 8) for block in decoder.up_blocks[1:] for r in block.resnets]
    for resnet, channels in blocks:
        resnet.conv2.conv.weight.mul_(0.1)
        resnet.conv2.conv.bias.zero_()
        resnet.conv2.conv.weight[:channels] = 0
        if resnet.conv_shortcut is not None:
            copy(resnet.conv_shortcut.conv, 8)
    # Depth to space.  After nearest enlargement a convolution cannot tell even from odd pixels, but the tap that lies
    # outwards of a sub-pixel meets it once and its mirror image once: each pixel becomes the mean of 2x2 neighbours.
    conv = decoder.up_blocks[0].upsamplers[0].conv.conv
    conv.weight[:8] = 0
    conv.bias[:8] = 0
    for channel, (y, x, c) in enumerate((y, x, c) for y in (2, 0) for x in (2, 0) for c in range(3)):
        for sign in (0, 1):
            conv.weight[c + 3 * sign, channel + CHANNELS * sign, -1, y, x] = 0.25
    conv.weight[6, low, -1, 1, 1] = conv.weight[7, low + 1, -1, 1, 1] = 1
    for block in decoder.up_blocks[1:]:
        if block.upsamplers is not None:
            copy(block.upsamplers[0].conv.conv, 8)
    out = decoder.conv_out.conv
    out.weight.mul_(0.1)
    out.bias.zero_()
    deviation = (2 * _DECODER_BALLAST**2 / WIDTHS[0]) ** 0.5
    for c in range(3):
        out.weight[c, c, -1, 1, 1], out.weight[c, c + 3, -1, 1, 1] = deviation, -deviation
    vae.post_quant_conv.weight.copy_(torch.eye(CHANNELS)[:, :, None, None, None])
    vae.post_quant_conv.bias.zero_()


def _constant_inputs(vae: Any) -> list[tuple[Tensor, slice]]:
    """Decoder weights that read the constant pair, and where: they must not move, being huge biases in effect."""
    decoder = vae.decoder
    low, high = slice(2 * CHANNELS, 2 * CHANNELS + 2), slice(6, 8)
    first, *rest = decoder.up_blocks
    # The first residual block after an enlargement reads the pair where the main path of that level carries it.
    convs = [(r.conv1.conv, low) for r in (*decoder.mid_block.resnets, *first.resnets)]
    convs.append((first.upsamplers[0].conv.conv, low))
    for block in rest:
        for resnet in block.resnets:
            convs.append((resnet.conv1.conv, high))
            if resnet.conv_shortcut is not None:
                convs.append((resnet.conv_shortcut.conv, high))
        if block.upsamplers is not None:
            convs.append((block.upsamplers[0].conv.conv, high))
    convs.append((decoder.conv_out.conv, high))
    return [(conv.weight, where) for conv, where in convs]


def _crop(path: clips.Path, rng: random.Random, extent: int) -> tuple[slice, slice]:
    """A window on whole latent cells, most often over the shape's outline."""
    frame = rng.randrange(len(path.x))
    starts = []
    for centre in (path.y[frame], path.x[frame]):
        middle = (float(centre) + rng.uniform(-1.2, 1.2) * float(path.radius[frame]) + 1) * SIZE / 2
        start = round((middle - extent / 2) / CELL) * CELL
        starts.append(min(max(start, 0), SIZE - extent))
    return slice(starts[0], starts[0] + extent), slice(starts[1], starts[1] + extent)


def decoder_batch(rng: StepRandom, count: int, keys: int, extent: int) -> tuple[Tensor, Tensor]:
    """Noisy latents (count, CHANNELS, keys, extent / 8, extent / 8), unscaled, and the frames they should become.

    Frames: (count, 3, 4 * (keys - 1) + 1, extent, extent) in [-1, 1].  A window that starts in mid-clip is no special
    case, because the first latent of any window is exactly its first frame.
    """
    latents, frames = [], []
    for _ in range(count):
        a = random_attributes(rng.python, None)
        first = rng.python.randint(0, KEYFRAMES - keys) * STRIDE
        path = clips.trajectory(a, rng.python, loose=1.0)
        path = clips.Path(*(axis[first : first + STRIDE * (keys - 1) + 1] for axis in path))
        alpha = clips.coverage(a.shape, path, window=_crop(path, rng.python, extent))
        fore, back = clips.rgb_of(a.color), clips.rgb_of(a.background)
        if rng.python.random() < 0.3:
            fore = np.asarray([rng.python.uniform(-1, 1) for _ in range(3)], np.float32)
        rgb = clips.blend(alpha, fore, back)
        pooled = clips.blend(clips.pool(alpha[::STRIDE], POOL), fore, back)
        frames.append(torch.from_numpy(rgb))
        latents.append(pack(damage(torch.from_numpy(pooled)[None], rng))[0] / SCALE)
    return torch.stack(latents).permute(0, 4, 1, 2, 3), torch.stack(frames).permute(0, 4, 1, 2, 3)


def damage(pooled: Tensor, rng: StepRandom) -> Tensor:
    """Blur pooled keyframes (1, keys, h, w, 3) a little and add noise, as the transformer's output may be."""
    if rng.python.random() < 0.4:
        planes = pooled[0].permute(0, 3, 1, 2)
        blurred = F.avg_pool2d(F.pad(planes, (1, 1, 1, 1), mode="replicate"), 3, 1).permute(0, 2, 3, 1)[None]
        pooled = pooled.lerp(blurred, rng.python.uniform(0, 0.7))
    if rng.python.random() < 0.85:
        deviation = rng.python.uniform(0, 0.25) / SCALE
        noise = torch.randn(pooled.shape, generator=rng.torch)
        pooled = pooled + deviation * noise
    return pooled


def edge_weight(frames: Tensor) -> Tensor:
    """Loss weights (batch, 1, frames, height, width): 4 near outlines, 1 elsewhere."""
    down = F.pad((frames[..., 1:, :] - frames[..., :-1, :]).abs().sum(1, True), (0, 0, 0, 1))
    across = F.pad((frames[..., :, 1:] - frames[..., :, :-1]).abs().sum(1, True), (0, 1, 0, 0))
    edge = ((down + across) > 0.2).float()
    return 1 + 3 * F.max_pool3d(edge, (1, 5, 5), 1, (0, 2, 2))


def decoder_step(vae: Any, optimizer: Muon, latents: Tensor, frames: Tensor) -> float:
    """One update on unscaled latents and the frames they should become; returns the mean error in 255ths."""
    drawn = vae.decoder(vae.post_quant_conv(latents))
    weight = edge_weight(frames)
    error = drawn - frames
    loss = ((error.abs() + 0.5 * error.square()) * weight).mean() / weight.mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter, where in _constant_inputs(vae):
        if parameter.grad is not None:
            parameter.grad[:, where] = 0
    nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
    optimizer.step()
    return float(error.detach().abs().mean()) * 127.5


def train_decoder(checkpoint: Path, crops: int, wholes: int) -> Any:
    """Train the decoder on `crops` steps of crops, then `wholes` steps of whole frames; returns the autoencoder."""
    torch.manual_seed(_SEED)
    vae = make_vae()
    trained = nn.ModuleList([vae.decoder, vae.post_quant_conv])  # the encoder stays as it was built
    prepare_for_training(trained, "cpu")
    optimizer = Muon(*split_parameters(vae), rate=5e-4, adam_rate=3e-4)
    assert_trainable(trained, optimizer)
    total = crops + wholes

    def step(index: int) -> float:
        rng = StepRandom(_SEED, index)
        optimizer.scale = min(1.0, (index + 1) / 30, 0.02 + (total - index) / (0.4 * total))
        # Four crops of three latents first: cheap, and most of the outline; then the window that the pipeline decodes.
        count, keys, extent = (4, 3, SIZE // 2) if index < crops else (1, WINDOW, SIZE)
        latents, frames = decoder_batch(rng, count, keys, extent)
        return decoder_step(vae, optimizer, latents, frames)

    run_steps(checkpoint, {"vae": vae, "optimizer": optimizer}, total, step)
    return vae.eval().requires_grad_(False)
