"""The transformer's own parts: places among the latents, the factor that training leaves out, noise levels."""

from __future__ import annotations

import copy

import torch

from app.demo.clips import KEYFRAMES
from app.demo.folder import SETTINGS
from app.demo.stages import StepRandom
from app.demo.transformer import PLACE_SCALE, make_transformer, noise_levels, places, predict, scale_places
from app.demo.vae import CHANNELS, GRID, LATENTS, PLACES


def test_places_tell_all_cells_and_keys_apart() -> None:
    found = places(range(KEYFRAMES), 2 * GRID)
    assert found.shape == (KEYFRAMES, 2 * GRID, 2 * GRID, PLACES)
    assert found.abs().max() <= 1
    flat = found.reshape(-1, PLACES)
    distance = torch.cdist(flat, flat) + torch.eye(len(flat)) * 9
    # far above the noise that is left of a place once the picture begins to show (sigma 0.9: 0.18)
    assert distance.min() > 0.5


def test_the_factor_of_places_goes_into_the_weights() -> None:
    torch.manual_seed(0)
    trained = make_transformer().eval()
    torch.nn.init.normal_(trained.out_layer.out_layer.weight, std=0.1)
    shipped = copy.deepcopy(trained)
    scale_places(shipped)
    noisy = torch.randn(2, 3, 2 * GRID, 2 * GRID, LATENTS)
    scaled = noisy.clone()
    scaled[..., CHANNELS:] *= PLACE_SCALE
    width = trained.config.in_text_dim
    text = (torch.randn(2, 5, width), torch.randn(2, trained.config.in_text_dim2))
    sigma = torch.tensor([0.4, 0.8])
    with torch.no_grad():
        expected = predict(trained, noisy, sigma, [0, 4, 8], text)
        found = predict(shipped, scaled, sigma, [0, 4, 8], text)
    found[..., CHANNELS:] /= PLACE_SCALE
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-2)


def test_noise_levels_cover_every_step_of_the_shipped_schedule() -> None:
    levels = noise_levels(20_000, StepRandom(1, 1))
    assert 0 < float(levels.min()) < 0.01
    assert 0.99 < float(levels.max()) < 1
    steps = torch.linspace(1, 1 / SETTINGS.steps, SETTINGS.steps)
    for sigma in (SETTINGS.shift * steps / (1 + (SETTINGS.shift - 1) * steps)).tolist():
        assert ((levels - sigma).abs() < 0.05).float().mean() > 0.03
