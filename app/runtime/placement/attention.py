"""Which kernel computes attention: PyTorch's own, or flash or sage where they are installed and run on the card.

A package that is missing shows at once; a kernel that the card does not have shows in the first forward only. In both
cases the denoiser goes on with PyTorch's own, and says so. Not covered: kernels from the Hub.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import torch

NATIVE: Final = "native"
"""diffusers' name for `scaled_dot_product_attention`."""


def use(name: str, module: Any, backend: str, notices: list[str], exits: ExitStack) -> None:
    """Have a denoiser compute attention with `backend`; closing `exits` undoes it. What went otherwise: `notices`."""
    if backend == NATIVE or not hasattr(module, "set_attention_backend"):
        return
    try:
        module.set_attention_backend(backend)
    except (RuntimeError, ImportError, ValueError) as error:
        notices.append(f"{name}: attention by {backend} cannot be used, PyTorch's own is: {_first(error)}")
        return
    exits.callback(module.set_attention_backend, NATIVE)
    exits.callback(_take_off, module, module.__dict__.get("forward"))
    module.__dict__["forward"] = _guarded(name, module, module.forward, backend, notices)


def words(device: str) -> str:
    """PyTorch's own, with what it may choose from on a card."""
    if not device.startswith("cuda"):
        return "PyTorch"
    cuda: Any = torch.backends.cuda
    kinds = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }
    return f"PyTorch ({', '.join(kind for kind, on in kinds.items() if on) or 'math'})"


def _guarded(name: str, module: Any, stock: Callable[..., Any], backend: str, notices: list[str]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.__dict__.get("_attention_in_doubt", True):
            return stock(*args, **kwargs)
        try:
            result = stock(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, ImportError) as error:
            notices.append(f"{name}: attention by {backend} failed here, PyTorch's own is used: {_first(error)}")
            module.set_attention_backend(NATIVE)
            result = stock(*args, **kwargs)
        module.__dict__["_attention_in_doubt"] = False
        return result

    return forward


def _take_off(module: Any, own: Any) -> None:
    """`own`: the instance's forward before, where hooks had put one."""
    module.__dict__.pop("forward", None)
    if own is not None:
        module.__dict__["forward"] = own
    module.__dict__.pop("_attention_in_doubt", None)


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
