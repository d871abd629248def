"""What each pipeline class of diffusers 0.42 wants: defaults of its `__call__`, and the lattice its components imply.

Read from the sources of the installed library. Numbers that a folder's own configs state win over the ones here.
Not covered: pipelines for images, for editing existing video, and those whose input is more than a prompt and an image.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from app.schema import Defaults, Lattice, Value


class Family(Value):
    """One pipeline class. Compression ratios are of its usual VAE, in pixels or frames per latent."""

    tasks: tuple[Literal["t2v", "i2v"], ...] = ("t2v",)
    height: int
    width: int
    num_frames: int
    fps: int
    num_inference_steps: int = 50
    guidance_scale: float
    vae_spatial: int = 8
    vae_temporal: int = 4
    patch: int = 2
    """Latent pixels per token along a side, where the transformer's config tells none."""
    checked_multiple: int = 1
    """What `check_inputs` demands of height and width, whatever the components are."""
    frame_chunk: int = 1
    """Latent frames that the VAE decodes together; num_frames counts in such chunks."""
    max_num_frames: int = 257
    timeout_seconds: float = 4 * 3600.0


_KANDINSKY5: Final = Family(
    height=512, width=768, num_frames=121, fps=24, guidance_scale=5.0, checked_multiple=16, max_num_frames=241
)
_WAN: Final = Family(height=480, width=832, num_frames=81, fps=16, guidance_scale=5.0, checked_multiple=16)
_COGVIDEOX: Final = Family(height=480, width=720, num_frames=49, fps=8, guidance_scale=6.0, max_num_frames=161)
_LTX: Final = Family(
    height=512,
    width=704,
    num_frames=161,
    fps=25,
    guidance_scale=3.0,
    vae_spatial=32,
    vae_temporal=8,
    patch=1,
    checked_multiple=32,
)
_LTX2: Final = _LTX.model_copy(update={"width": 768, "num_frames": 121, "fps": 24, "num_inference_steps": 30})
_HUNYUAN: Final = Family(height=720, width=1280, num_frames=129, fps=24, guidance_scale=6.0, checked_multiple=16)
_HUNYUAN15: Final = Family(
    height=480, width=848, num_frames=121, fps=24, guidance_scale=6.0, vae_spatial=16, patch=1, checked_multiple=16
)
_IMAGE: Final = {"tasks": ("i2v",)}

FAMILIES: Final[dict[str, Family]] = {
    "Kandinsky5T2VPipeline": _KANDINSKY5,
    "Kandinsky5I2VPipeline": _KANDINSKY5.model_copy(update=_IMAGE),
    "Kandinsky6TI2VAPipeline": _KANDINSKY5.model_copy(
        update={"height": 480, "width": 864, "tasks": ("t2v", "i2v"), "max_num_frames": 121}
    ),
    "WanPipeline": _WAN,
    "WanImageToVideoPipeline": _WAN.model_copy(update=_IMAGE),
    "CogVideoXPipeline": _COGVIDEOX,
    "CogVideoXImageToVideoPipeline": _COGVIDEOX.model_copy(update=_IMAGE),
    "LTXPipeline": _LTX,
    "LTXImageToVideoPipeline": _LTX.model_copy(update=_IMAGE),
    "LTXConditionPipeline": _LTX.model_copy(update={"tasks": ("t2v", "i2v")}),
    "LTX2Pipeline": _LTX2,
    "LTX2ImageToVideoPipeline": _LTX2.model_copy(update=_IMAGE),
    "HunyuanVideoPipeline": _HUNYUAN,
    "HunyuanVideoImageToVideoPipeline": _HUNYUAN.model_copy(update={**_IMAGE, "guidance_scale": 1.0}),
    "HunyuanVideo15Pipeline": _HUNYUAN15,
    "HunyuanVideo15ImageToVideoPipeline": _HUNYUAN15.model_copy(update=_IMAGE),
    "MochiPipeline": Family(
        height=480,
        width=848,
        num_frames=85,
        fps=30,
        num_inference_steps=64,
        guidance_scale=4.5,
        vae_temporal=6,
        max_num_frames=163,
    ),
}


def derive(family: Family, vae: dict[str, Any], transformer: dict[str, Any]) -> tuple[Defaults, Lattice]:
    """Defaults and lattice of a folder from the configs of its VAE and transformer, where they state numbers."""
    family = _generation(family, vae, transformer)
    spatial = _ratio(vae, ("spatial_compression_ratio", "scale_factor_spatial"), family.vae_spatial)
    temporal = (
        _ratio(vae, ("temporal_compression_ratio", "scale_factor_temporal"), family.vae_temporal) * family.frame_chunk
    )
    patch = transformer.get("patch_size", family.patch)
    if isinstance(patch, list):  # (time, height, width)
        patch = max((side for side in patch[1:] if isinstance(side, int)), default=family.patch)
    multiple = spatial * (patch if isinstance(patch, int) and patch > 0 else family.patch)
    while multiple % family.checked_multiple:
        multiple *= 2
    snapped = Defaults(
        height=max(1, round(family.height / multiple)) * multiple,
        width=max(1, round(family.width / multiple)) * multiple,
        num_frames=(family.num_frames - 1) // temporal * temporal + 1,
        fps=family.fps,
        num_inference_steps=family.num_inference_steps,
        guidance_scale=family.guidance_scale,
    )
    lattice = Lattice(
        spatial_multiple=multiple,
        temporal_multiple=temporal,
        min_side=min(multiple * 4, snapped.height, snapped.width),
        max_side=max(2048, snapped.height, snapped.width),
        max_num_frames=max(family.max_num_frames, snapped.num_frames),
    )
    return snapped, lattice


def _generation(family: Family, vae: dict[str, Any], transformer: dict[str, Any]) -> Family:
    """Generations that share a pipeline class are told apart by their configs.

    CogVideoX 1.5 has temporal patches, and only the older models want 8k + 1 frames; Wan 2.2 5B has a VAE of 16x16.
    """
    kind = vae.get("_class_name")
    if kind == "AutoencoderKLCogVideoX" and transformer.get("patch_size_t"):
        return family.model_copy(update={"height": 768, "width": 1360, "num_frames": 81, "fps": 16})
    if kind == "AutoencoderKLCogVideoX":
        return family.model_copy(update={"frame_chunk": 2, "max_num_frames": 49})
    if kind == "AutoencoderKLWan" and vae.get("scale_factor_spatial") == 16:
        return family.model_copy(update={"height": 704, "width": 1280, "num_frames": 121, "fps": 24})
    return family


def _ratio(config: dict[str, Any], names: tuple[str, ...], otherwise: int) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return otherwise
