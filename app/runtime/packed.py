"""Layers with packed weights, whose tensors are plain ones: whatever moves weights moves these too.

The libraries' arithmetic unpacks them. `quantized` makes them.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from functools import cache
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from app.errors import ModelNotUsable
from app.quantization import NF4_BLOCK, Quantization


class Packed(torch.nn.Linear):
    """A Linear layer whose `weight` is packed. Makes an ordinary matrix of it for each forward."""

    method: ClassVar[Quantization]

    def __init__(
        self, shape: tuple[int, int], packed: torch.Tensor, scale: torch.Tensor | None, bias: torch.nn.Parameter | None
    ) -> None:
        """`shape` is [out_features, in_features] of the unpacked weight."""
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = shape
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.scale = None if scale is None else torch.nn.Parameter(scale, requires_grad=False)
        self.register_parameter("bias", bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = None if self.scale is None else self.scale.dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scale is not None and self.scale.dtype is not before:  # `.to(bfloat16)` would round the scales
            raise ModelNotUsable("Scales of quantized weights cannot be cast: load the model again in that type.")
        return self

    @abstractmethod
    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight as an ordinary matrix, where the packed one is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, None if self.bias is None else self.bias.to(x.dtype))

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Of the input and the weight, and the bias in the input's type."""
        return F.linear(x, self.unpacked(x.dtype), bias)


class Packed4bit(Packed):
    """bitsandbytes, 4 bit."""

    method = "bitsandbytes_4bit"
    blocksize: int = NF4_BLOCK
    quant_type: str = "nf4"

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        import bitsandbytes.functional as bnb  # noqa: PLC0415 - seconds, and an extra

        shape = torch.Size((self.out_features, self.in_features))
        state = bnb.QuantState(
            absmax=self.scale, shape=shape, dtype=dtype, blocksize=self.blocksize, quant_type=self.quant_type
        )
        matrix: torch.Tensor = bnb.dequantize_4bit(self.weight, state)
        return matrix


class Packed8bit(Packed):
    """bitsandbytes, LLM.int8(): activations are rounded too, but for the outlying ones."""

    method = "bitsandbytes_8bit"

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        assert self.scale is not None  # noqa: S101 - for the type checker
        return (self.weight.to(torch.float32) * (self.scale[:, None] / 127)).to(dtype)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        bnb = _bitsandbytes()
        state = bnb.MatmulLtState()
        state.CB, state.SCB, state.has_fp16_weights, state.threshold = self.weight, self.scale, False, 6.0
        state.is_training = False  # else it computes otherwise on a CPU than on a card
        result: torch.Tensor = bnb.matmul(x, self.weight, state=state, bias=bias)
        return result


@cache
def _bitsandbytes() -> Any:
    """The package, which would log at each layer of each step that activations are rounded."""
    import bitsandbytes  # noqa: PLC0415 - seconds, and an extra

    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    return bitsandbytes


class PackedInt8(Packed):
    """torchao, 8 bit, weights only."""

    method = "torchao_int8"

    def _tensor(self, dtype: torch.dtype) -> Any:
        from torchao.quantization import Int8Tensor  # noqa: PLC0415 - seconds, and an extra

        return Int8Tensor(self.weight, self.scale, [1, self.in_features], dtype)

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        matrix: torch.Tensor = self._tensor(dtype).dequantize()
        return matrix

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self._tensor(x.dtype), bias)


class PackedGguf(Packed):
    """A matrix of a GGUF file."""

    method = "gguf"
    quant_type: Any = None

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        return unpacked_gguf(self.weight, self.quant_type).to(dtype)


def unpacked_gguf(packed: torch.Tensor, quant_type: Any) -> torch.Tensor:
    """What diffusers' `dequantize_gguf_tensor` makes of a tensor, from a plain one: float32 or float16."""
    from diffusers.quantizers.gguf.utils import GGML_QUANT_SIZES, dequantize_functions  # noqa: PLC0415 - an extra

    block, size = GGML_QUANT_SIZES[quant_type]
    raw = packed.detach().view(torch.uint8)
    blocks = raw.reshape(-1, size)
    matrix: torch.Tensor = dequantize_functions[quant_type](blocks, block, size)
    return matrix.reshape(*raw.shape[:-1], raw.shape[-1] // size * block)


def quantization_of(module: torch.nn.Module) -> Quantization | None:
    """How its weights are packed; None: they are not."""
    return next((part.method for part in module.modules() if isinstance(part, Packed)), None)
