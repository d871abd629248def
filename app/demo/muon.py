"""Muon (momentum orthogonalised by Newton-Schulz iterations) for matrices, Adam for everything else."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of a batch of matrices (batch, n, m) towards 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    result: Tensor = x.transpose(1, 2) if tall else x
    return result


class Muon(torch.optim.Optimizer):
    """Both update rules in one optimiser; `scale` multiplies the two base rates for a common schedule."""

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        rate: float,
        adam_rate: float,
        decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.98),
    ) -> None:
        groups = [
            {"params": list(matrices), "muon": True, "base": rate},
            {"params": list(others), "muon": False, "base": adam_rate},
        ]
        super().__init__(groups, {"decay": decay, "momentum": momentum, "betas": betas})
        self.scale = 1.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One update from the gradients; parameters without one are left alone."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            rate = group["base"] * self.scale
            if group["muon"]:
                self._muon(parameters, rate, group["momentum"], group["decay"])
            elif parameters:
                self._adam(parameters, rate, group["betas"])

    def _muon(self, parameters: list[nn.Parameter], rate: float, momentum: float, decay: float) -> None:
        alike: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}
        for p in parameters:
            assert p.grad is not None
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buffer.lerp_(p.grad, 1 - momentum)
            update = p.grad.lerp(buffer, momentum).flatten(1)
            alike.setdefault(update.shape, []).append((p, update))
        for shape, pairs in alike.items():
            # The factor gives the update the root mean square that Adam's would have.
            updates = orthogonalise(torch.stack([update for _, update in pairs])) * (0.2 * max(shape) ** 0.5)
            for (p, _), update in zip(pairs, updates, strict=True):
                p.mul_(1 - rate * decay)
                p.add_(update.reshape(p.shape), alpha=-rate)

    def _adam(self, parameters: list[nn.Parameter], rate: float, betas: tuple[float, float]) -> None:
        for p in parameters:
            assert p.grad is not None
            state = self.state[p]
            count = state["count"] = state.get("count", 0) + 1
            mean = state.setdefault("mean", torch.zeros_like(p))
            square = state.setdefault("square", torch.zeros_like(p))
            mean.lerp_(p.grad, 1 - betas[0])
            square.mul_(betas[1]).addcmul_(p.grad, p.grad, value=1 - betas[1])
            spread = (square / (1 - betas[1] ** count)).sqrt_().add_(1e-8)
            p.addcdiv_(mean, spread, value=-rate / (1 - betas[0] ** count))


def split_parameters(
    module: nn.Module, matrices: Iterable[str] | None = None
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters of two or more dimensions, and the others; `matrices` restricts the former by name."""
    names = None if matrices is None else set(matrices)
    first: list[nn.Parameter] = []
    second: list[nn.Parameter] = []
    for name, p in module.named_parameters():
        if p.requires_grad:
            (first if p.dim() > 1 and (names is None or name in names) else second).append(p)
    return first, second
