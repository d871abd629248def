"""Weights from the checkpoint's own files: right or refused, nothing written, RAM bounded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

from app.errors import ModelNotUsable
from app.runtime import checkpoint_files
from app.runtime.checkpoint_files import CheckpointFiles, load_empty, renaming
from app.runtime.streaming import CheckpointSource, stream
from tests.runtime import families
from tests.runtime.test_streaming import CPU, X, linears, run, same, save, state, wan

WEIGHTS = "diffusion_pytorch_model.safetensors"
WAN = diffusers.WanTransformer3DModel


@pytest.fixture(scope="module", autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    wan().save_pretrained(tmp_path / "transformer")
    return tmp_path / "transformer"


def read_all(folder: Path, module: Any | None = None) -> None:
    """What a first forward does: open, look all up, read all."""
    module = module if module is not None else load_empty(WAN, folder, torch.float32)
    source = CheckpointSource(folder)
    try:
        streamed = stream(module, CPU, source=source)
        run(module)
        streamed.remove()
    finally:
        source.close()


# -------------------------------------------------------------------------------------------------------------- right


@pytest.mark.parametrize("family", ["kandinsky", "wan", "cogvideox", "ltx", "hunyuan", "mochi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_component_is_the_one_that_would_be_loaded(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pipe = families.FAMILIES[family]()
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        part = pipe.components.get(name)
        if part is None:
            continue
        part.save_pretrained(tmp_path / name)
        loaded = type(part).from_pretrained(tmp_path / name, dtype=dtype)
        empty = load_empty(type(part), tmp_path / name, dtype)
        assert not empty.training
        assert all(p.is_meta for p in empty.parameters())
        assert {n: (p.shape, p.dtype) for n, p in empty.named_parameters()} == {
            n: (p.shape, p.dtype) for n, p in loaded.named_parameters()
        }
        streamed = stream(empty, CPU, source=CheckpointSource(tmp_path / name, rename=renaming(empty)))
        for index in range(len(streamed._units)):
            streamed.before(index)
            for weight in streamed._units[index].weights:
                owner, attribute = weight.sites[0]
                assert torch.equal(getattr(owner, attribute), loaded.get_parameter(weight.names[0])), weight.names
            streamed.after(index)
        in_units = {n for unit in streamed._units for weight in unit.weights for n in weight.names}
        for key, parameter in empty.named_parameters():
            if key not in in_units:
                assert torch.equal(parameter, loaded.get_parameter(key)), key
        buffers = dict(loaded.named_buffers())
        assert dict(empty.named_buffers()).keys() == buffers.keys()
        for key, buffer in empty.named_buffers():
            assert buffer.dtype is buffers[key].dtype
            assert torch.equal(buffer, buffers[key]), key
        streamed.remove()
        assert all(p.is_meta for p in empty.parameters())


class Computing(diffusers.ModelMixin, diffusers.ConfigMixin):
    """Has a buffer in whatever type is the default when it is made."""

    @diffusers.configuration_utils.register_to_config
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)
        self.register_buffer("table", torch.linspace(0, 1, size), persistent=False)


def test_buffers_are_computed_in_the_type_that_loading_computes_them_in(tmp_path: Path) -> None:
    Computing().save_pretrained(tmp_path)
    loaded = Computing.from_pretrained(tmp_path, dtype=torch.bfloat16)
    empty = load_empty(Computing, tmp_path, torch.bfloat16)
    assert empty.table.dtype is loaded.table.dtype is torch.bfloat16
    assert torch.equal(empty.table, loaded.table)


def test_a_whole_pipeline_without_ever_loading_weights(tmp_path: Path) -> None:
    pipe = families.wan_two_transformers()
    expected = families.frames(pipe, "wan_two_transformers", num_inference_steps=4)
    pipe.save_pretrained(tmp_path)
    parts: dict[str, Any] = {}
    streamed = []
    for name in ("text_encoder", "transformer", "transformer_2", "vae"):
        module = load_empty(type(pipe.components[name]), tmp_path / name, torch.float32)
        streamed.append(stream(module, CPU, source=CheckpointSource(tmp_path / name, rename=renaming(module))))
        parts[name] = module
    others = {name: part for name, part in pipe.components.items() if name not in parts}
    empty = diffusers.WanPipeline(**parts, **others, boundary_ratio=0.875)
    empty.set_progress_bar_config(disable=True)
    assert (families.frames(empty, "wan_two_transformers", num_inference_steps=4) == expected).all()
    for one in streamed:
        one.remove()


def test_sharded_and_variant_files(tmp_path: Path) -> None:
    module = wan()
    expected = run(module)
    module.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    module.save_pretrained(tmp_path / "variant", variant="fp16")
    module.save_pretrained(tmp_path / "both", variant="fp16", max_shard_size="100KB")
    for name, variant in (("sharded", None), ("variant", "fp16"), ("both", "fp16")):
        empty = load_empty(WAN, tmp_path / name, torch.float32)
        streamed = stream(empty, CPU, source=CheckpointSource(tmp_path / name, variant=variant))
        assert torch.equal(run(empty), expected)
        streamed.remove()
    with pytest.raises(ModelNotUsable, match="no weights"):
        CheckpointFiles(tmp_path / "variant")


def test_fp8_from_a_float32_file_rounds_as_loading_and_casting_do(folder: Path) -> None:
    loaded = WAN.from_pretrained(folder, dtype=torch.bfloat16)
    loaded.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
    empty = load_empty(WAN, folder, torch.bfloat16)
    streamed = stream(empty, CPU, source=CheckpointSource(folder), storage_dtype=torch.float8_e4m3fn)
    assert torch.equal(run(empty), run(loaded))
    streamed.remove()


def test_large_tensors_are_cast_piece_by_piece(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = WAN.from_pretrained(folder, dtype=torch.bfloat16)
    monkeypatch.setattr(checkpoint_files, "_CHUNK_BYTES", 1000)
    empty = load_empty(WAN, folder, torch.bfloat16)
    streamed = stream(empty, CPU, source=CheckpointSource(folder))
    assert torch.equal(run(empty), run(loaded))
    streamed.remove()


def test_renamed_tied_and_missing_names(tmp_path: Path) -> None:
    module = linears()
    expected = module(X)
    module.blocks[1].twin = module.blocks[1].weight
    tensors = {f"model.{name}": value.clone() for name, value in module.state_dict().items() if "1.weight" not in name}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")

    def strip(name: str) -> str | None:
        return name.removeprefix("model.")

    streamed = stream(module, CPU, source=CheckpointSource(tmp_path, rename=strip))
    assert torch.equal(module(X), expected)
    streamed.remove()
    with pytest.raises(ModelNotUsable, match=r"no weight (first|blocks)"):
        stream(module, CPU, source=CheckpointSource(tmp_path))
    assert torch.equal(module(X), expected)
    without = CheckpointSource(tmp_path, rename=lambda name: None if "first.bias" in name else strip(name))
    with pytest.raises(ModelNotUsable, match=r"no weight first\.bias"):
        stream(module, CPU, source=without)
    assert not any(hasattr(inner, "_diffusers_hook") for inner in module.modules())


def test_a_real_module_gets_its_own_weights_back(tmp_path: Path) -> None:
    module = linears()
    save(module, tmp_path)
    for parameter in module.parameters():
        parameter.add_(1)
    other, before = module(X), state(module)
    streamed = stream(module, CPU, source=CheckpointSource(tmp_path))
    assert not torch.equal(module(X), other), "all weights come from the files"
    streamed.remove()
    assert same(state(module), before)


# ------------------------------------------------------------------------------------------------------------ bounded


def test_ram_is_two_blocks(folder: Path) -> None:
    empty = load_empty(WAN, folder, torch.float32)
    source = CheckpointSource(folder)
    streamed = stream(empty, CPU, source=source)
    largest = max(layout.host_bytes for layout in streamed._layouts)
    whole = sum(layout.host_bytes for layout in streamed._layouts)
    for _ in range(3):
        run(empty)
        assert source.host_bytes == 2 * largest < whole
    assert len(source._buffers) == 2
    assert source.read_bytes >= 3 * sum(p.nbytes for p in empty.blocks.parameters())
    thread = source._thread
    assert thread is not None
    assert thread.is_alive()
    streamed.remove()
    assert source.host_bytes == 0
    assert not thread.is_alive()


def test_the_reader_is_ahead_of_the_computation(folder: Path) -> None:
    """While a block computes, the next one is being read."""
    empty = load_empty(WAN, folder, torch.float32)
    source = CheckpointSource(folder)
    streamed = stream(empty, CPU, source=source)
    run(empty)
    asked: list[int] = []
    for index, block in enumerate(empty.blocks):

        def look(*_: Any, index: int = index) -> None:
            following = (index + 1) % 4
            with source._turn:
                ahead = following in source._queue or source._holding(following) is not None
            if ahead or streamed._slot_of(following) is not None:
                asked.append(index)

        block.ffn.register_forward_pre_hook(look)
    run(empty)
    assert asked == [0, 1, 2, 3]
    streamed.remove()


def test_nothing_is_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tree() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")}

    before = tree()
    opened: list[tuple[Any, Any]] = []
    watching = True

    def audit(event: str, arguments: Any) -> None:
        if watching and event == "open":
            opened.append((arguments[0], arguments[2]))

    import sys

    sys.addaudithook(audit)
    try:
        read_all(folder)
    finally:
        watching = False
    assert any(str(name).endswith(WEIGHTS) for name, _ in opened)
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    assert [name for name, flags in opened if isinstance(flags, int) and flags & writing] == []
    assert tree() == before


# ------------------------------------------------------------------------------------------------------------ refused


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def _zero_pages(path: Path) -> None:
    data = path.read_bytes()
    kept = (len(data) - 20000) // 4096 * 4096
    path.write_bytes(data[:kept] + bytes(len(data) - kept))


def _zero_most(path: Path) -> None:
    data = path.read_bytes()
    kept = len(data) // 3 // 4096 * 4096 + 1234
    path.write_bytes(data[:kept] + bytes(len(data) - kept))


def _no_header(path: Path) -> None:
    path.write_bytes(bytes(8) + path.read_bytes())


def _pickle(path: Path) -> None:
    torch.save({"x": torch.zeros(3)}, path)


def _overlap(path: Path) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    first, second = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])[:2]
    header[second]["data_offsets"][0] = header[first]["data_offsets"][0]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)[:length]
    path.write_bytes(raw[:8] + text + raw[8 + length :])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, "download was not finished"),
        (_lengthen, "should be"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"abc"), "cut short"),
        (_zero_pages, "are zeros"),
        (_zero_most, "are zeros"),
        (_no_header, "no safetensors file"),
        (_pickle, "no safetensors file"),
        (lambda path: path.write_bytes(b"<html>not found</html>" * 1000), "no safetensors file"),
        (_overlap, "does not lie where"),
        (lambda path: path.unlink(), "no weights"),
    ],
)
def test_damaged_files_are_refused_when_they_are_opened(folder: Path, damage: Any, words: str) -> None:
    read_all(folder)
    damage(folder / WEIGHTS)
    with pytest.raises(ModelNotUsable, match=words):
        CheckpointFiles(folder)


def test_zeros_that_were_trained_are_no_damage(tmp_path: Path) -> None:
    half = torch.ones(64, 64)
    half[7:] = 0
    ends: dict[str, dict[str, torch.Tensor]] = {
        "vector": {"a": torch.ones(64, 64), "b": torch.zeros(3000)},
        "unused rows": {"a": torch.ones(50, 50), "b": half},
        "one matrix": {"a": torch.ones(50, 50), "z": torch.zeros(64, 64)},
    }
    for tensors in ends.values():
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
        files = CheckpointFiles(tmp_path)
        assert sorted(files.names()) == sorted(tensors)
        files.close()


def test_zeros_from_a_page_on_are_damage_even_within_one_matrix(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.ones(50, 50), "z": torch.ones(64, 64)}, path)
    CheckpointFiles(tmp_path).close()
    data = path.read_bytes()
    kept = (len(data) - 5000) // 4096 * 4096
    path.write_bytes(data[:kept] + bytes(len(data) - kept))
    with pytest.raises(ModelNotUsable, match="are zeros"):
        CheckpointFiles(tmp_path)


def test_a_block_of_zeros_is_refused(tmp_path: Path) -> None:
    module = wan()
    for parameter in module.blocks[1].parameters():
        parameter.zero_()
    module.save_pretrained(tmp_path)
    with pytest.raises(ModelNotUsable, match=r"blocks\.1 are zeros"):
        read_all(tmp_path)
    module.blocks[1].norm2.weight[-1] = 1.0
    module.save_pretrained(tmp_path)
    read_all(tmp_path)


def test_wrong_shapes_and_types_are_refused_before_anything_runs(folder: Path, tmp_path: Path) -> None:
    wan(ffn_dim=32).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / WEIGHTS, folder / WEIGHTS)
    with pytest.raises(ModelNotUsable, match="has the shape"):
        read_all(folder)
    module = linears()
    tensors = {name: value.to(torch.float8_e4m3fn) for name, value in module.state_dict().items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotUsable, match="quantized"):
        stream(module, CPU, source=CheckpointSource(tmp_path))


def test_damaged_indexes(tmp_path: Path) -> None:
    wan().save_pretrained(tmp_path, max_shard_size="100KB")
    index = tmp_path / f"{WEIGHTS}.index.json"
    good = json.loads(index.read_text())
    name, shard = next(iter(good["weight_map"].items()))
    (tmp_path.parent / "outside.safetensors").write_bytes((tmp_path / shard).read_bytes())
    bad: list[tuple[Any, str]] = [
        ("{", "cannot be understood"),
        ({"weight_map": []}, "cannot be understood"),
        ({"weight_map": {name: "../outside.safetensors"}}, "not trusted"),
        ({"weight_map": {**good["weight_map"], "more": shard}}, "lacks more"),
        ({"weight_map": {**good["weight_map"], name: "gone.safetensors"}}, "cannot be read"),
    ]
    for content, words in bad:
        index.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(ModelNotUsable, match=words):
            CheckpointFiles(tmp_path)


def test_a_file_that_changes_while_it_is_read_is_refused_and_one_that_is_replaced_is_not(folder: Path) -> None:
    empty = load_empty(WAN, folder, torch.float32)
    streamed = stream(empty, CPU, source=CheckpointSource(folder))
    expected = run(empty)
    other = wan(seed=1)
    other.save_pretrained(folder.parent / "other")
    (folder.parent / "other" / WEIGHTS).replace(folder / WEIGHTS)
    assert torch.equal(run(empty), expected)
    streamed.remove()
    streamed = stream(empty, CPU, source=CheckpointSource(folder))
    run(empty)
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-4] + b"abcd")
    os.utime(folder / WEIGHTS, ns=(1, 1))
    for _ in range(2):
        with pytest.raises(ModelNotUsable, match="was changed"):
            run(empty)
    streamed.remove()
    assert all(p.is_meta for p in empty.parameters())


def test_a_disk_that_fails_does_not_hang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = load_empty(WAN, folder, torch.float32)
    streamed = stream(empty, CPU, source=CheckpointSource(folder))
    expected = run(empty)

    def fail(*_: Any) -> None:
        raise MemoryError("whatever it is")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFiles, "read", fail)
        with pytest.raises(MemoryError):
            run(empty)
    assert torch.equal(run(empty), expected), "a fault that passed is forgotten"
    streamed.source.close()
    with pytest.raises(ModelNotUsable, match="closed"):
        run(empty)
    streamed.remove()


def test_classes_and_configs_that_cannot_be_made_empty(tmp_path: Path) -> None:
    with pytest.raises(ModelNotUsable, match="not a model of diffusers or transformers"):
        load_empty(nn.Linear, tmp_path, torch.float32)
    with pytest.raises(ModelNotUsable, match=r"no readable config"):
        load_empty(WAN, tmp_path, torch.float32)
    with pytest.raises(ModelNotUsable, match=r"no readable config"):
        load_empty(transformers.UMT5EncoderModel, tmp_path, torch.float32)
    wan().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotUsable, match="is quantized"):
        load_empty(WAN, tmp_path, torch.float32)
    assert torch.get_default_dtype() is torch.float32
