"""Read-outs of the transformer's intermediate states, for training only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.demo.clips import Keyframes
from app.demo.vae import CHANNELS, GRID, SCALE


class Probes(nn.Module):
    """Training-only linear read-outs of intermediate states, which turn a long search into a short one.

    Two blocks are asked where the shape is, relative to the token, two for the shape's mask, free of colours, and one
    for the clean picture.
    """

    def __init__(self, model: Any, width: int = 128) -> None:
        super().__init__()
        self.pose = nn.ModuleList(nn.Linear(width, 4) for _ in range(2))
        self.mask = nn.ModuleList(nn.Linear(width, 16) for _ in range(2))
        self.picture = nn.Linear(width, CHANNELS * 4)
        self._seen: dict[int, Tensor] = {}
        for index in range(1, 5):
            model.visual_transformer_blocks[index].register_forward_hook(self._catch(index))

    def _catch(self, index: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            self._seen[index] = F.layer_norm(output, output.shape[-1:])

        return hook

    def forward(self, keys: Sequence[int], drawn: Keyframes) -> Tensor:
        """The auxiliary loss of the forward pass just made on these keyframes."""
        batch = len(drawn.pose)
        side = torch.linspace(-1, 1, GRID) * (1 - 1 / GRID)
        y, x = torch.meshgrid(side, side, indexing="ij")
        tokens = torch.stack([x, y], -1).expand(len(keys), -1, -1, -1).reshape(1, -1, 2)
        pose = torch.from_numpy(drawn.pose)[:, :, None].expand(-1, -1, GRID * GRID, -1).reshape(batch, -1, 4)
        # Where the shape is as seen from the token: (x, y) relative, radius and angle as they are.
        pose = pose - F.pad(tokens, (0, 2))
        mask = _patches(torch.from_numpy(drawn.alpha)[..., None])
        picture = _patches(torch.from_numpy(drawn.rgb)) * SCALE
        near = 1 + 3 * ((mask > 0.02) & (mask < 0.98)).any(-1, keepdim=True)
        losses = [0.5 * _square_error(read(self._seen[1 + i]), pose) for i, read in enumerate(self.pose)]
        losses += [((read(self._seen[3 + i]) - mask) ** 2 * near).mean() for i, read in enumerate(self.mask)]
        losses.append(0.1 * _square_error(self.picture(self._seen[3]), picture))
        return torch.stack(losses).sum()


def _patches(pictures: Tensor) -> Tensor:
    """The tokens' parts of pooled pictures (batch, keys, 24, 24, channels): (batch, tokens, 16 * channels)."""
    b, k, h, w, c = pictures.shape
    cells = pictures.view(b, k, GRID, h // GRID, GRID, w // GRID, c).permute(0, 1, 2, 4, 3, 5, 6)
    return cells.reshape(b, k * GRID * GRID, -1)


def _square_error(read: Tensor, truth: Tensor) -> Tensor:
    return ((read - truth) ** 2).mean()
