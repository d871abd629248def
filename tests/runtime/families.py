"""Real pipelines at tiny size with random weights: the families on which strategies are compared, number by number.

    pipe = FAMILIES["wan"]()             # on the CPU, float32, the same weights at every call
    video = frames(pipe, "wan")          # [num_frames, height, width, 3], the same numbers at every call

Every weight is drawn anew, because architectures start with some at zero (gates, output layers), and a block that adds
nothing cannot show that it was computed wrongly. The pipelines can be saved and loaded: their tokenizers are real ones,
which know single letters. Transformers have four blocks or more, text encoders two.

Not covered: prompts in the models' sense (random weights understand nothing), and the sizes of real models.
"""

from __future__ import annotations

import math
import string
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image

from tests.runtime.simulate import tiny

DEMO = Path(__file__).parents[2] / "assets" / "demo"

_LETTERS = string.ascii_letters + string.digits + string.punctuation
_FLOW = {"class": "FlowMatchEulerDiscreteScheduler", "shift": 5.0}
_UNIPC = {
    "class": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}

_T5 = {**tiny.T5, "vocab_size": 256}
_LLAMA: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,  # the pipeline takes the third from the end
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_CLIP = {**tiny.CLIP, "vocab_size": 1212, "bos_token_id": 1210, "eos_token_id": 1211}  # the built-in model's tokenizer
_COGVIDEOX_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 32,
    "text_embed_dim": 32,
    "num_layers": 4,
    "sample_width": 12,
    "sample_height": 8,
    "sample_frames": 9,
    "max_text_seq_length": 32,
    "use_rotary_positional_embeddings": True,
}
_COGVIDEOX_VAE: dict[str, Any] = {
    "block_out_channels": [8, 8, 8, 16],
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "sample_height": 64,
    "sample_width": 96,
}
_LTX_VAE: dict[str, Any] = {
    "latent_channels": 8,
    "block_out_channels": [8, 8, 8, 8],
    "decoder_block_out_channels": [8, 8, 8, 8],
    "layers_per_block": [1, 1, 1, 1, 1],
    "decoder_layers_per_block": [1, 1, 1, 1, 1],
}
_HUNYUAN_TRANSFORMER: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "num_layers": 2,
    "num_single_layers": 4,
    "num_refiner_layers": 2,  # a list inside another part
    "mlp_ratio": 2.0,
    "text_embed_dim": 32,
    "pooled_projection_dim": 32,
    "rope_axes_dim": [8, 12, 12],
}
_MOCHI_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "num_layers": 4,
    "pooled_projection_dim": 32,
    "in_channels": 12,
    "text_embed_dim": 32,
    "time_embed_dim": 32,
    "max_sequence_length": 32,
}
_MOCHI_VAE: dict[str, Any] = {
    "encoder_block_out_channels": [32, 32, 32, 32],  # its norms have 32 groups
    "decoder_block_out_channels": [32, 32, 32, 32],
    "layers_per_block": [1, 1, 1, 1, 1],
}

Frames = npt.NDArray[np.float32]


# ---------------------------------------------------------------------------------------------------------- pipelines


def kandinsky() -> Any:
    """The built-in model: trained weights, six visual blocks, a CLIP and a Qwen2.5-VL text encoder."""
    return load(DEMO)


def kandinsky_i2v() -> Any:
    """The built-in model's encoders and VAE around a random transformer that also sees a first frame."""
    text_to_video = kandinsky()
    config = dict(text_to_video.transformer.config) | {"visual_cond": True, "num_visual_blocks": 4}
    parts = dict(text_to_video.components) | {"transformer": _part("Kandinsky5Transformer3DModel", config, seed=1)}
    return _quiet(diffusers.Kandinsky5I2VPipeline(**parts))


def wan() -> Any:
    return _pipeline(
        "WanPipeline",
        _UNIPC,
        tokenizer=t5_tokenizer(),
        text_encoder=_part("UMT5EncoderModel", _T5, seed=0),
        transformer=_part("WanTransformer3DModel", tiny.WAN_TRANSFORMER, seed=1),
        vae=_part("AutoencoderKLWan", tiny.WAN_VAE, seed=2),
    )


def wan_two_transformers() -> Any:
    """Wan 2.2's layout: `transformer` for the noisy steps, `transformer_2`, of the same class, for the rest."""
    pipe = wan()
    second = _part("WanTransformer3DModel", tiny.WAN_TRANSFORMER, seed=3)
    parts = dict(pipe.components) | {"transformer_2": second}
    return _quiet(diffusers.WanPipeline(**parts, boundary_ratio=0.875))


def cogvideox() -> Any:
    return _pipeline(
        "CogVideoXPipeline",
        {"class": "CogVideoXDDIMScheduler"},
        tokenizer=t5_tokenizer(),
        text_encoder=_part("T5EncoderModel", _T5, seed=0),
        transformer=_part("CogVideoXTransformer3DModel", _COGVIDEOX_TRANSFORMER, seed=1),
        vae=_part("AutoencoderKLCogVideoX", _COGVIDEOX_VAE, seed=2),
    )


def ltx() -> Any:
    return _pipeline(
        "LTXPipeline",
        {"class": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True, "shift_terminal": 0.1},
        tokenizer=t5_tokenizer(),
        text_encoder=_part("T5EncoderModel", _T5, seed=0),
        transformer=_part("LTXVideoTransformer3DModel", {**tiny.LTX_TRANSFORMER, "num_layers": 4}, seed=1),
        vae=_part("AutoencoderKLLTXVideo", _LTX_VAE, seed=2),
    )


def hunyuan() -> Any:
    return _pipeline(
        "HunyuanVideoPipeline",
        _FLOW,
        tokenizer=llama_tokenizer(),
        text_encoder=_part("LlamaModel", _LLAMA, seed=0),
        tokenizer_2=transformers.CLIPTokenizer.from_pretrained(DEMO / "tokenizer_2"),
        text_encoder_2=_part("CLIPTextModel", _CLIP, seed=3),
        transformer=_part("HunyuanVideoTransformer3DModel", _HUNYUAN_TRANSFORMER, seed=1),
        vae=_part("AutoencoderKLHunyuanVideo", tiny.HUNYUAN_VAE, seed=2),
    )


def mochi() -> Any:
    return _pipeline(
        "MochiPipeline",
        {"class": "FlowMatchEulerDiscreteScheduler", "invert_sigmas": True},
        tokenizer=t5_tokenizer(),
        text_encoder=_part("T5EncoderModel", _T5, seed=0),
        transformer=_part("MochiTransformer3DModel", _MOCHI_TRANSFORMER, seed=1),
        vae=_part("AutoencoderKLMochi", _MOCHI_VAE, seed=2),
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "kandinsky": kandinsky,
    "kandinsky_i2v": kandinsky_i2v,
    "wan": wan,
    "wan_two_transformers": wan_two_transformers,
    "cogvideox": cogvideox,
    "ltx": ltx,
    "hunyuan": hunyuan,
    "mochi": mochi,
}

_SIZE = {"height": 64, "width": 96, "num_inference_steps": 2}
CALLS: dict[str, dict[str, Any]] = {
    "kandinsky": {"height": 96, "width": 96, "num_inference_steps": 2, "num_frames": 5, "guidance_scale": 2.0},
    # it takes the first frames' contrast from the latent frames after the fourth, so there must be a fifth
    "kandinsky_i2v": {"height": 64, "width": 64, "num_inference_steps": 2, "num_frames": 17, "guidance_scale": 2.0},
    "wan": {**_SIZE, "num_frames": 5, "guidance_scale": 3.0, "max_sequence_length": 32},
    "wan_two_transformers": {**_SIZE, "num_frames": 5, "guidance_scale": 3.0, "max_sequence_length": 32},
    "cogvideox": {**_SIZE, "num_frames": 9, "guidance_scale": 3.0, "max_sequence_length": 32},
    "ltx": {**_SIZE, "num_frames": 9, "guidance_scale": 3.0, "max_sequence_length": 32},
    "hunyuan": {
        **_SIZE,
        "num_frames": 5,
        "guidance_scale": 3.0,
        "max_sequence_length": 32,
        "prompt_template": {"template": "{}", "crop_start": 0},  # the stock template's words are letters here
    },
    "mochi": {**_SIZE, "num_frames": 7, "guidance_scale": 3.0, "max_sequence_length": 32},
}
"""Arguments of each family's `__call__` besides the prompt, for about a second of computing."""


def frames(pipe: Any, family: str, *, seed: int = 0, **changes: Any) -> Frames:
    """The video, shape [num_frames, height, width, 3], values 0 to 1; noise is drawn on the CPU, from `seed`."""
    arguments: dict[str, Any] = {"prompt": "a red ball bouncing", **CALLS[family]}
    if family == "kandinsky_i2v":
        picture = np.linspace(0, 255, 64 * 64 * 3).astype(np.uint8).reshape(64, 64, 3)
        arguments["image"] = Image.fromarray(picture)
    arguments |= {"generator": torch.Generator("cpu").manual_seed(seed), "output_type": "np", **changes}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "In CPU autocast")  # Mochi asks for float32, which is what it gets anyway
        video: Frames = np.asarray(pipe(**arguments).frames[0], dtype=np.float32)
    return video


def load(folder: Path, **options: Any) -> Any:
    """A saved pipeline, with its weights copied out of the mapped files.

    Files are mapped at any multiple of 4 bytes, where the CPU's kernels add up in another order than at one of 64:
    results differ by some 1e-6, and strategies could not be compared exactly.
    """
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, **{"dtype": torch.float32, **options})
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            for tensor in (*component.parameters(), *component.buffers()):
                tensor.data = tensor.data.clone()
    return _quiet(pipe)


# -------------------------------------------------------------------------------------------------------------- parts


def _pipeline(name: str, scheduler: dict[str, Any], **parts: Any) -> Any:
    options = dict(scheduler)
    parts["scheduler"] = getattr(diffusers, options.pop("class"))(**options)
    return _quiet(getattr(diffusers, name)(**parts))


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _part(name: str, config: dict[str, Any], *, seed: int) -> Any:
    """A component in float32 with the class's architecture and weights drawn from `seed`."""
    cls: Any = getattr(diffusers if hasattr(diffusers, name) else transformers, name)
    if issubclass(cls, diffusers.ModelMixin):
        module = cls.from_config(config)
    else:
        module = cls(cls.config_class.from_dict(config))
    draw_weights(module, seed)
    return module.eval()


def draw_weights(module: torch.nn.Module, seed: int) -> None:
    """Draw every parameter: matrices so that they keep the size of what they multiply, gains around 1, the rest small.

    Follows the names in their order, so the same architecture and seed give the same weights.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.dim() >= 2:
                drawn /= math.sqrt(math.prod(weight.shape[1:]))
            elif name.endswith("weight"):
                drawn = 1 + 0.1 * drawn
            else:
                drawn *= 0.1
            weight.copy_(drawn)


def t5_tokenizer() -> Any:
    """Splits into letters; ids below 256."""
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return transformers.T5Tokenizer(vocab=[*specials, *((letter, -3.0) for letter in _LETTERS)], extra_ids=0)


def llama_tokenizer() -> Any:
    """Splits into letters; ids below 256; pads, as HunyuanVideo's does."""
    tokens = ["<unk>", "<s>", "</s>", "<pad>", "▁", *_LETTERS]
    vocab = {token: index for index, token in enumerate(tokens)}
    return transformers.LlamaTokenizer(vocab=vocab, merges=[], pad_token="<pad>", padding_side="right")  # noqa: S106
