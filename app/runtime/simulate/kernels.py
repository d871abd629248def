"""What kernels do that the operations' inputs and outputs do not show: workspace, and which attention kernel runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from app.runtime.simulate.values import Attention

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)


def workspace_bytes(func: Any, args: tuple[Any, ...], out: torch.Tensor, *, conv3d: bool) -> int:
    """Memory that the CUDA kernel takes besides its output while it runs.

    Only convolutions are known to need any worth counting:
    - half-precision conv3d: input + output + weight. cuDNN's tensor-core kernels want NDHWC, so all three are
      transposed. Inferred, not read in a source: with this rule HunyuanVideo at 512x768x121 comes out at 60.09 GiB,
      published 60.10; without it 46 (facts/memory.md).
    - any other convolution of an input that is not contiguous: a contiguous copy of it (ATen/native/cudnn/ConvShared).
    """
    if func is not aten.convolution.default:
        return 0
    x, weight = args[0], args[1]
    if conv3d and x.dim() == 5 and x.dtype in _HALF:
        return int((x.numel() + out.numel() + weight.numel()) * x.element_size())
    channels_last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    if x.is_contiguous() or (x.dim() in (4, 5) and x.is_contiguous(memory_format=channels_last)):
        return 0
    return int(x.numel() * x.element_size())


def cpu_workspace_bytes(func: Any, args: tuple[Any, ...], out: torch.Tensor) -> int:
    """Workspace of convolutions on the CPU: `slow_conv2d` and `slow_conv3d` write one column per output position.

    oneDNN, which PyTorch takes for larger inputs, allocates outside torch's allocator: not counted.
    Source: ATen/native/ConvolutionMM2d.cpp, ConvolutionMM3d.cpp and `use_mkldnn` in Convolution.cpp.
    """
    if func is not aten.convolution.default or args[0].dim() not in (4, 5) or args[6]:
        return 0
    x, weight, stride, padding, dilation, groups = args[0], args[1], args[3], args[4], args[5], args[8]
    plain = all(n == 1 for n in (*stride, *dilation))
    if plain and all(n == 1 for n in weight.shape[2:]) and not any(padding):
        return 0  # the input itself serves as columns
    if torch.backends.mkldnn.is_available() and _onednn_takes(x, weight, groups, plain):  # type: ignore[no-untyped-call]
        return 0
    columns = math.prod(weight.shape[1:]) * groups * math.prod(out.shape[2:]) * int(x.shape[0])
    return int(columns * x.element_size())


def _onednn_takes(x: torch.Tensor, weight: torch.Tensor, groups: int, plain: bool) -> bool:
    if x.dtype is not torch.float32:
        return x.dtype in _HALF  # where the processor has instructions for them; assumed
    worth_it = not plain or x.shape[0] >= 16 or weight.shape[-1] != 1 or weight.shape[-2] != 1
    large = groups > 1 or x.shape[0] > 1 or (weight.shape[-1] > 3 and weight.shape[-2] > 3)
    return worth_it and (large or math.prod(x.shape[:4]) > 20480)


def attention(kind: Attention, stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A stand-in for `torch.nn.functional.scaled_dot_product_attention` that chooses as CUDA chooses.

    On fake tensors the stock function finds no CUDA device and falls apart into matrix products: hundreds of GiB.
    `stock` still serves the CPU.
    """

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if query.device.type != "cuda":
            return stock(
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        _check_attention(query, key, value, attn_mask)
        flash = kind is Attention.FLASH and query.dtype in _HALF and attn_mask is None and query.dim() == 4
        flash = flash and query.shape[-1] <= 256 and query.shape[-1] == value.shape[-1]
        if enable_gqa and query.shape[-3] != key.shape[-3] and not flash:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        if flash:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if kind is Attention.MATH or query.dim() != 4 or query.shape[-1] != value.shape[-1]:
            return _math(query, key, value, attn_mask, scale)
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)

    return scaled_dot_product_attention


def _check_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
) -> None:
    """Raises:
    RuntimeError: operands on different devices or of different types, as the real kernel.
    """
    others = [key, value] + ([attn_mask] if attn_mask is not None else [])
    for other in others:
        if other.device != query.device:
            raise RuntimeError(
                "Expected query, key, value and attn_mask to be on the same device, "
                f"but got {query.device} and {other.device}"
            )
        if other.dtype not in (query.dtype, torch.bool):
            raise RuntimeError(
                f"Expected query, key, and value to have the same dtype, but got {query.dtype} and {other.dtype}"
            )


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    head = query.shape[-1]
    pad = -head % 8  # flash wants heads of a multiple of 8 and pads others (sdp_utils.cpp)
    if pad:
        scale = scale if scale is not None else head**-0.5
        query, key, value = (torch.nn.functional.pad(x, (0, pad)) for x in (query, key, value))
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :head] if pad else out


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    if mask is not None:
        mask = _additive(mask, query.dtype)
        length = mask.shape[-1]
        if length % 16:  # pad_bias in attention.cpp: the last dimension rounded up to 16, then cut again
            mask = torch.nn.functional.pad(mask, (0, 16 - length % 16))[..., :length]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    out: torch.Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, False, dropout_p, is_causal, scale=scale
    )[0]
    return out


def _math(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Holds the whole score matrix: what cards without a fused kernel do.

    In float32 also for half-precision operands, as PyTorch does since 2.5 (`_scaled_dot_product_attention_math`).
    """
    dtype = query.dtype
    if dtype in _HALF:
        query, key, value = query.float(), key.float(), value.float()
    root = math.sqrt(scale if scale is not None else query.shape[-1] ** -0.5)
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if mask is not None:
        scores = scores + _additive(mask, query.dtype)
    return (torch.softmax(scores, -1) @ value).to(dtype)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))
