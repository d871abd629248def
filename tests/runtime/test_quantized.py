"""Packed weights: what is packed, its bytes against the planner's, the video against the unquantized one, refusals."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers.quantizers.bitsandbytes.utils import replace_with_bnb_linear
from diffusers.quantizers.gguf.utils import GGUFLinear
from safetensors.torch import save_file

from app.errors import ModelNotUsable, NotTrainable
from app.presets import as_stored
from app.runtime import guard, quantized
from app.runtime import packed as packed_layers
from app.runtime.checkpoint_files import load_empty
from app.runtime.placement.sharding import block_lists
from app.runtime.simulate.inspection import inspect_component
from app.workload import sizes_of
from tests import values
from tests.runtime.families import FAMILIES, frames
from tests.runtime.packed import METHODS, Q4_0, bytes_of, folder, gguf_file, pipeline, transformer, write_gguf

DIFFERENCE = {"gguf": 0.002, "bitsandbytes_8bit": 0.008, "torchao_int8": 0.008, "bitsandbytes_4bit": 0.09}
"""Mean difference of a pixel (0 to 1) from the unquantized video that is still taken, about twice of what was seen. The
random weights of the tiny models forgive less than trained ones: their pixels have a standard deviation of 0.3. In the
GGUF file only one matrix in ten has rows that Q8_0 can pack."""
WHILE_LOADING = METHODS[1:]


def buffers_of(module: torch.nn.Module) -> int:
    """Wan's rotary table, which is in no file: as large in the tiny model as in the real ones, where it is nothing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in module.buffers())


@cache
def unquantized(family: str) -> Any:
    return frames(FAMILIES[family](), family)


# ---------------------------------------------------------------------------------------------------------- the video


@pytest.mark.parametrize("method", METHODS)
def test_the_video_is_nearly_that_of_the_unquantized_model(method: str) -> None:
    seen = np.abs(frames(pipeline(method), "wan") - unquantized("wan")).mean()
    assert 0 < seen <= DIFFERENCE[method]
    if method == "bitsandbytes_4bit":
        assert seen > 3 * DIFFERENCE["torchao_int8"]


@pytest.mark.parametrize(
    "family", ["ltx", *(pytest.param(f, marks=pytest.mark.slow) for f in ("hunyuan", "kandinsky"))]
)
def test_other_families_are_packed_too(family: str) -> None:
    seen = np.abs(frames(pipeline("torchao_int8", family), family) - unquantized(family)).mean()
    assert 0 < seen <= DIFFERENCE["torchao_int8"]


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_computes_with_its_unpacked_weight(method: str) -> None:
    """LLM.int8() rounds the activations too, so there it is only near."""
    layers = [part for part in transformer(method).modules() if isinstance(part, packed_layers.Packed)]
    layer = layers[0]
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = torch.nn.functional.linear(x, layer.unpacked(torch.float32), layer.bias)
        assert torch.allclose(layer(x), wanted, atol=0.05 if method == "bitsandbytes_8bit" else 1e-5)


# ------------------------------------------------------------------------------------------------------------ the bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["wan", "hunyuan"])
@pytest.mark.parametrize("method", WHILE_LOADING)
def test_predicted_bytes_are_those_of_the_packed_module(method: Any, family: str, dtype: str) -> None:
    torch_dtype = getattr(torch, dtype)
    place = folder(family) / "transformer"
    packed = transformer(method, family, torch_dtype)
    facts = inspect_component(load_empty(type(packed), place, torch_dtype), torch_dtype)
    sizes = sizes_of(facts, dtype, None, method)
    assert sizes.weights == bytes_of(packed)
    assert sizes.weights < 0.85 * facts.weight_bytes
    (path, _), *_ = block_lists(packed)
    largest = max(bytes_of(block) for block in packed.get_submodule(path))
    assert abs(max(sizes.block, largest) - largest) <= 0.01 * largest or len(facts.blocks) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_bytes_of_a_gguf_file_are_those_of_the_module(kind: str, dtype: str) -> None:
    file = gguf_file("wan", Q4_0) if kind == "Q4_0" else gguf_file("wan")
    card = values.card(pipeline="WanPipeline", gguf={"transformer": str(file)})
    stored = as_stored(card).stored["transformer"]
    cls: Any = diffusers.WanTransformer3DModel
    module = quantized.load_gguf(cls, file, folder() / "transformer", getattr(torch, dtype))
    kept = sum(
        2 * weight.numel() for weight in module.parameters() if weight.dtype is torch.float32 and dtype == "bfloat16"
    )  # what the class keeps in float32: tables and norms, a thousandth of a real model
    assert stored.title == f"GGUF {kind}"
    assert stored.bytes(dtype) == bytes_of(module) - buffers_of(module) - kept


# ------------------------------------------------------------------------------------------------------- what is packed


def test_what_is_kept_in_float32_or_sensitive_stays(tmp_path: Path) -> None:
    pipe = FAMILIES["kandinsky"]()
    names = {f"{name}" for _, name, _ in quantized.layers_of(pipe.transformer)}
    assert names
    packed = transformer("torchao_int8", "kandinsky")
    left = {name for name, part in packed.named_modules() if type(part) is torch.nn.Linear}
    assert any("modulation" in name for name in left)  # kept in float32 by the class
    encoder = FAMILIES["wan"]().text_encoder
    assert {name for _, name, _ in quantized.layers_of(encoder)} == {"q", "k", "v", "o", "wi_0", "wi_1"}  # no `wo`


def test_a_text_encoder_is_packed_and_reads_the_prompt() -> None:
    cls: Any = transformers.UMT5EncoderModel
    encoder = quantized.load(cls, folder() / "text_encoder", torch.float32, "torchao_int8")
    plain = FAMILIES["wan"]().text_encoder
    tokens = torch.arange(4, 14)[None]
    with torch.no_grad():
        wanted, found = plain(tokens)[0], encoder(tokens)[0]
    off = (found - wanted).abs().mean() / wanted.abs().mean()
    assert 0 < off < 0.05


def test_t5_would_round_its_activations_to_a_packed_wo_library() -> None:
    """Why `wo` is never packed: transformers casts what goes into it to its weight's type, but for int8."""
    encoder = FAMILIES["wan"]().text_encoder
    seen: list[torch.dtype] = []
    wo = encoder.encoder.block[0].layer[-1].DenseReluDense.wo
    wo.register_forward_pre_hook(lambda _m, args: seen.append(args[0].dtype))
    wo.weight = torch.nn.Parameter(wo.weight.to(torch.uint8), requires_grad=False)
    with torch.no_grad():
        encoder(torch.arange(4, 14)[None])  # computes, without a word
    assert seen == [torch.uint8]


# ------------------------------------------------------------------------------------------------------------ GGUF


def test_gguf_unpacks_to_the_numbers_of_the_library() -> None:
    cls: Any = diffusers.WanTransformer3DModel
    options = {"config": str(folder() / "transformer"), "torch_dtype": torch.float32, "local_files_only": True}
    theirs = cls.from_single_file(
        str(gguf_file("wan", Q4_0)),
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
        **options,
    )
    ours = quantized.load_gguf(cls, gguf_file("wan", Q4_0), folder() / "transformer", torch.float32)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    compared = 0
    for name, layer in theirs.named_modules():
        if isinstance(layer, GGUFLinear) and hasattr(layer.weight, "quant_type"):
            with torch.no_grad():
                assert torch.equal(layer(x), ours.get_submodule(name)(x))
            compared += 1
    assert compared == 4


def test_gguf_with_the_names_of_the_original_checkpoint(tmp_path: Path) -> None:
    """As nearly all files that people share: diffusers renames them."""
    originals = {
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "condition_embedder.time_proj": "time_projection.1",
        "proj_out": "head.head",
        "attn1.to_q": "self_attn.q", "attn1.to_k": "self_attn.k", "attn1.to_v": "self_attn.v",
        "attn1.to_out.0": "self_attn.o", "attn1.norm_q": "self_attn.norm_q", "attn1.norm_k": "self_attn.norm_k",
        "attn2.to_q": "cross_attn.q", "attn2.to_k": "cross_attn.k", "attn2.to_v": "cross_attn.v",
        "attn2.to_out.0": "cross_attn.o", "attn2.norm_q": "cross_attn.norm_q", "attn2.norm_k": "cross_attn.norm_k",
        "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2", "norm2": "norm3",
    }  # fmt: skip
    state = {}
    for name, tensor in FAMILIES["wan"]().transformer.state_dict().items():
        renamed = "head.modulation" if name == "scale_shift_table" else name.replace("scale_shift_table", "modulation")
        for ours, theirs in originals.items():
            renamed = renamed.replace(ours, theirs)
        state[renamed] = tensor
    file = write_gguf(tmp_path / "original.gguf", state)
    cls: Any = diffusers.WanTransformer3DModel
    module = quantized.load_gguf(cls, file, folder() / "transformer", torch.float32)
    wanted = transformer("gguf").state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in module.state_dict().items())


def test_packed_numbers_that_are_no_matrix_are_unpacked_for_good(tmp_path: Path) -> None:
    state = FAMILIES["wan"]().transformer.state_dict()
    file = write_gguf(tmp_path / "bf16.gguf", state)
    import gguf

    writer = gguf.GGUFWriter(str(file), "wan")
    for name, tensor in state.items():
        array = tensor.float().numpy()
        if name == "patch_embedding.weight" or name.endswith("ffn.net.2.weight"):
            packed = gguf.quants.quantize(array, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    cls: Any = diffusers.WanTransformer3DModel
    module = quantized.load_gguf(cls, file, folder() / "transformer", torch.float32)
    assert type(module.patch_embedding.weight) is torch.nn.Parameter
    assert torch.equal(module.patch_embedding.weight, state["patch_embedding.weight"].bfloat16().float())


def test_a_file_without_packed_matrices_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "plain.gguf", FAMILIES["wan"]().transformer.state_dict(), blocks="nothing")
    cls: Any = diffusers.WanTransformer3DModel
    with pytest.raises(ModelNotUsable, match="no quantized matrices"):
        quantized.load_gguf(cls, file, folder() / "transformer", torch.float32)


# ---------------------------------------------------------------------------------------- folders that lie quantized


def quantized_folder(place: Path, *, bits: int, nested: bool = False) -> torch.nn.Module:
    """What bitsandbytes' own layers save, with the config that diffusers writes; returns the module with those."""
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": nested}
    config = diffusers.BitsAndBytesConfig(**options) if bits == 4 else diffusers.BitsAndBytesConfig(load_in_8bit=True)
    module = FAMILIES["wan"]().transformer
    weights = {
        name: part.weight.detach().clone() for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)
    }
    biases = {n: p.bias.detach().clone() for n, p in module.named_modules() if getattr(p, "bias", None) is not None}
    skipped = ["proj_out", "condition_embedder"]
    module = replace_with_bnb_linear(module, modules_to_not_convert=skipped, quantization_config=config)
    for name, part in module.named_modules():
        if isinstance(part, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            options4 = {"quant_type": "nf4", "compress_statistics": nested}
            new: Any = (
                bnb.nn.Params4bit(weights[name], requires_grad=False, module=part, **options4)
                if bits == 4
                else bnb.nn.Int8Params(weights[name], requires_grad=False, has_fp16_weights=False)
            )
            part.weight = new.to("cpu")
            part.bias = torch.nn.Parameter(biases[name])
            # else a CPU with AVX512-BF16 computes in bfloat16, and refuses layers this small
            part.support_avx512bf16_for_cpu = False
    place.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in module.state_dict().items()},
              place / "diffusion_pytorch_model.safetensors")  # fmt: skip
    told = json.loads((folder() / "transformer" / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**told, "quantization_config": config.to_dict()}))
    return module.eval()


@pytest.mark.parametrize(("bits", "nested"), [(4, False), (4, True), (8, False)])
def test_a_folder_of_bitsandbytes_gives_the_numbers_of_its_own_layers(bits: int, nested: bool, tmp_path: Path) -> None:
    theirs = quantized_folder(tmp_path / "transformer", bits=bits, nested=nested)
    cls: Any = diffusers.WanTransformer3DModel
    ours = quantized.load_stored(cls, tmp_path / "transformer", torch.float32)
    assert packed_layers.quantization_of(ours) == f"bitsandbytes_{bits}bit"
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, ours.config.in_channels, 2, 8, 8, generator=generator),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 7, ours.config.text_dim, generator=generator),
    }
    with torch.no_grad():
        wanted, found = theirs(**inputs)[0], ours(**inputs)[0]
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(("bits", "nested"), [(4, False), (4, True), (8, False)])
def test_its_bytes_are_known_from_the_headers(bits: int, nested: bool, tmp_path: Path) -> None:
    quantized_folder(tmp_path / "transformer", bits=bits, nested=nested)
    (tmp_path / "model_index.json").write_text(
        '{"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}'
    )
    stored = as_stored(values.card(repo_id=None, folder=tmp_path)).stored["transformer"]
    cls: Any = diffusers.WanTransformer3DModel
    module = quantized.load_stored(cls, tmp_path / "transformer", torch.float32)
    assert stored.bytes("float32") == bytes_of(module) - buffers_of(module)
    assert stored.method == f"bitsandbytes_{bits}bit"


def test_a_packed_wo_of_t5_is_unpacked_for_good(tmp_path: Path) -> None:
    cls: Any = transformers.UMT5EncoderModel
    encoder = FAMILIES["wan"]().text_encoder
    state = {name: tensor.contiguous() for name, tensor in encoder.state_dict().items() if "embed_tokens" not in name}
    name = "encoder.block.0.layer.1.DenseReluDense.wo"
    packed, scales = bnb.functional.quantize_4bit(state[f"{name}.weight"], quant_type="nf4", compress_statistics=False)
    state[f"{name}.weight"] = packed
    state |= {f"{name}.weight.{key}": value for key, value in scales.as_dict(packed=True).items()}
    save_file(state, tmp_path / "model.safetensors")
    told = json.loads((folder() / "text_encoder" / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(ModelNotUsable, match="none of its weights is"):  # nothing else of it was packed
        quantized.load_stored(cls, tmp_path, torch.float32)
    name = "encoder.block.0.layer.0.SelfAttention.q"
    packed, scales = bnb.functional.quantize_4bit(state[f"{name}.weight"], quant_type="nf4", compress_statistics=False)
    state[f"{name}.weight"] = packed
    state |= {f"{name}.weight.{key}": value for key, value in scales.as_dict(packed=True).items()}
    save_file(state, tmp_path / "model.safetensors")
    found = quantized.load_stored(cls, tmp_path, torch.float32)
    assert type(found.encoder.block[0].layer[1].DenseReluDense.wo) is torch.nn.Linear
    with torch.no_grad():
        assert torch.isfinite(found(torch.arange(4, 14)[None])[0]).all()


def test_other_quantized_folders_are_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "quanto"}}')
    cls: Any = diffusers.WanTransformer3DModel
    with pytest.raises(ModelNotUsable, match="quantized by quanto, which Pocketreel cannot read"):
        quantized.load_stored(cls, tmp_path, torch.float32)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_missing_package_is_named_with_the_line_to_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "installed", dict)
    cls: Any = diffusers.WanTransformer3DModel
    for method, extra in (("torchao_int8", "torchao"), ("bitsandbytes_4bit", "bitsandbytes")):
        with pytest.raises(ModelNotUsable, match=rf"install 'pocketreel\[{extra}\]'"):
            quantized.load(cls, folder() / "transformer", torch.float32, method)  # type: ignore[arg-type]
    with pytest.raises(ModelNotUsable, match=r"install 'pocketreel\[gguf\]'"):
        quantized.load_gguf(cls, gguf_file(), folder() / "transformer", torch.float32)


def test_scales_cannot_be_cast() -> None:
    module = transformer("bitsandbytes_4bit")
    with pytest.raises(ModelNotUsable, match="cannot be cast"):
        module.to(torch.bfloat16)


@pytest.mark.parametrize("method", METHODS)
def test_packed_weights_are_not_trained(method: str) -> None:
    pipe = pipeline(method)
    with pytest.raises(NotTrainable, match="quantized"):
        guard.prepare_for_training(pipe, "cpu")
    pipe.transformer.proj_out.requires_grad_(True)  # something could be
    with pytest.raises(NotTrainable, match="quantized"):
        guard.assert_trainable(pipe)
