"""The autoencoder: its encoder is exactly the pooling that the transformer is trained on."""

import random

import numpy as np
import pytest
import torch

from app.demo import clips
from app.demo.clips import random_attributes, trajectory
from app.demo.stages import StepRandom
from app.demo.vae import (
    CHANNELS,
    LATENTS,
    SCALE,
    WINDOW,
    decoder_batch,
    edge_weight,
    make_vae,
    pack,
    unpack,
    with_places,
)


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(0)
    return make_vae().eval()


def _clip(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(frames (1, 3, FRAMES, SIZE, SIZE), their pooled keyframes (1, KEYFRAMES, 24, 24, 3))."""
    rng = random.Random(seed)
    a = random_attributes(rng)
    alpha = clips.coverage(a.shape, trajectory(a, rng))
    frames = torch.from_numpy(clips.paint(alpha, a.color, a.background)).permute(3, 0, 1, 2)[None]
    return frames, torch.from_numpy(clips.paint(clips.pool(alpha[:: clips.STRIDE]), a.color, a.background))[None]


def test_pack_and_unpack_are_inverse() -> None:
    pictures = torch.rand(2, 3, 24, 24, 3)
    packed = pack(pictures)
    assert packed.shape == (2, 3, 12, 12, CHANNELS)
    # The channels of a cell are its pixels, row by row.
    torch.testing.assert_close(packed[0, 0, 0, 0, 3:6], pictures[0, 0, 0, 1] * SCALE)
    torch.testing.assert_close(unpack(packed), pictures)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_encoder_is_the_pooling(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Stored as float16 and loaded again, as the shipped weights are.
    vae = make_vae().to(dtype).float().eval()
    for seed in range(3):
        frames, pooled = _clip(seed)
        with torch.no_grad():
            posterior = vae.encode(frames).latent_dist
        latents = posterior.mode().permute(0, 2, 3, 4, 1) * vae.config.scaling_factor
        assert (latents - pack(pooled)).abs().max() < 0.01
        assert posterior.std.max() < 0.01


def test_latents_have_about_unit_variance() -> None:
    values = torch.cat([pack(_clip(seed)[1]) for seed in range(30)])
    assert 0.7 < float(values.std()) < 1.3


def test_untrained_decoder_lets_colours_through(vae) -> None:
    frames, _ = _clip(3)
    with torch.no_grad():
        drawn = vae.decode(vae.encode(frames).latent_dist.mode()).sample
    assert drawn.shape == frames.shape
    correlation = np.corrcoef(drawn.flatten().numpy(), frames.flatten().numpy())[0, 1]
    assert correlation > 0.85


def test_decoder_batches_match_their_latents() -> None:
    latents, frames = decoder_batch(StepRandom(1, 2), 2, WINDOW, 48)
    assert latents.shape == (2, CHANNELS, WINDOW, 6, 6)
    assert frames.shape == (2, 3, 17, 48, 48)
    again, _ = decoder_batch(StepRandom(1, 2), 2, WINDOW, 48)
    torch.testing.assert_close(latents, again)
    pictures = unpack(latents.permute(0, 2, 3, 4, 1) * SCALE)
    means = frames[:, :, ::4].reshape(2, 3, WINDOW, 12, 4, 12, 4).mean((4, 6)).permute(0, 2, 3, 4, 1)
    assert (pictures - means).abs().mean() < 0.25
    weight = edge_weight(frames)
    assert weight.shape == (2, 1, 17, 48, 48)
    assert weight.min() >= 1
    assert weight.max() == 4


def test_places_are_passed_over(vae) -> None:
    wide = with_places(vae)
    latents = torch.randn(1, LATENTS, 3, 6, 6)
    frames = torch.rand(1, 3, 9, 48, 48) * 2 - 1
    with torch.no_grad():
        torch.testing.assert_close(wide.decode(latents).sample, vae.decode(latents[:, :CHANNELS]).sample)
        found, expected = wide.encode(frames).latent_dist, vae.encode(frames).latent_dist
    torch.testing.assert_close(found.mode()[:, :CHANNELS], expected.mode())
    assert found.mode()[:, CHANNELS:].abs().max() == 0
    assert found.std.max() < 0.01
