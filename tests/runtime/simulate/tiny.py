"""Real classes at tiny sizes: a simulated pipeline takes a second or two, and the same parts can run for real."""

from __future__ import annotations

from typing import Any

from app.runtime.simulate.families import Family, Part
from app.runtime.simulate.values import Shape

SHAPE = Shape(height=64, width=96, num_frames=9)

T5: dict[str, Any] = {
    "vocab_size": 100,
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 8,
    "num_heads": 4,
    "num_layers": 2,
    "feed_forward_proj": "gated-gelu",
}
QWEN: dict[str, Any] = {
    "text_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
    },
    "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32},
}
CLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 32,
    "vocab_size": 100,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 77,
}
KANDINSKY_TRANSFORMER: dict[str, Any] = {
    "in_visual_dim": 4,
    "in_text_dim": 32,
    "in_text_dim2": 32,
    "time_dim": 32,
    "out_visual_dim": 4,
    "model_dim": 64,
    "ff_dim": 128,
    "num_text_blocks": 1,
    "num_visual_blocks": 4,
    "axes_dims": [8, 12, 12],
}
HUNYUAN_VAE: dict[str, Any] = {
    "block_out_channels": [8, 8, 8, 8],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
}
WAN_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "ffn_dim": 64,
    "num_layers": 4,
    "text_dim": 32,
    "freq_dim": 32,
    "in_channels": 4,
    "out_channels": 4,
}
WAN_VAE: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}
LTX_TRANSFORMER: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "cross_attention_dim": 64,
    "num_layers": 3,
    "caption_channels": 32,
}


def kandinsky(dtype: str = "bfloat16") -> Family:
    return Family(
        model="tiny-kandinsky",
        pipeline="Kandinsky5T2VPipeline",
        parts={
            "transformer": part("Kandinsky5Transformer3DModel", KANDINSKY_TRANSFORMER, dtype),
            "vae": part("AutoencoderKLHunyuanVideo", HUNYUAN_VAE, dtype),
            "text_encoder": part("Qwen2_5_VLForConditionalGeneration", QWEN, dtype),
            "text_encoder_2": part("CLIPTextModel", CLIP, dtype),
        },
        tokenizers={"tokenizer": 640, "tokenizer_2": 77},
        scheduler={"class": "FlowMatchEulerDiscreteScheduler", "shift": 5.0},
        guidance_scale=5.0,
        height=SHAPE.height,
        width=SHAPE.width,
        num_frames=SHAPE.num_frames,
    )


def wan(dtype: str = "bfloat16") -> Family:
    return Family(
        model="tiny-wan",
        pipeline="WanPipeline",
        parts={
            "transformer": part("WanTransformer3DModel", WAN_TRANSFORMER, dtype),
            "vae": part("AutoencoderKLWan", WAN_VAE, "float32"),
            "text_encoder": part("UMT5EncoderModel", T5, dtype),
        },
        tokenizers={"tokenizer": 64},
        scheduler={
            "class": "UniPCMultistepScheduler",
            "prediction_type": "flow_prediction",
            "use_flow_sigmas": True,
            "flow_shift": 3.0,
        },
        guidance_scale=5.0,
        height=SHAPE.height,
        width=SHAPE.width,
        num_frames=SHAPE.num_frames,
    )


def part(name: str, config: dict[str, Any], dtype: str = "float32") -> Part:
    library = "transformers" if name.startswith(("Qwen", "CLIP", "T5", "UMT5")) else "diffusers"
    return Part(class_path=f"{library}.{name}", config=config, dtype=dtype)
