"""Laws fitted from a few runs predict other runs; coefficients survive TOML; the command line works."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from app.coefficients import Coefficients
from app.runtime.simulate import MachineSpec, Shape, Simulation, laws, simulate
from app.runtime.simulate.command import main, parse_bytes
from app.runtime.simulate.families import Family
from app.runtime.simulate.fit import fit
from app.runtime.simulate.run import Session
from app.runtime.simulate.toml import to_toml
from app.runtime.simulate.values import ComponentSetup, Hold, Setup
from app.schema import Stage
from tests.runtime.simulate import tiny

NEW = Shape(height=128, width=192, num_frames=13)


@pytest.fixture(scope="module")
def family() -> Family:
    return tiny.kandinsky().model_copy(update={"height": 128, "width": 128, "num_frames": 17})


@pytest.fixture(scope="module")
def coefficients(family: Family) -> Coefficients:
    return fit(family, tiled=False)


@pytest.fixture(scope="module")
def another(family: Family) -> Simulation:
    return simulate(family, NEW, machine=MachineSpec(caching_allocator=False))


def _weights(result: Simulation) -> int:
    return sum(share.bytes for peak in result.peaks[:1] for share in peak.shares)


def test_the_denoising_law_predicts_another_size(coefficients: Coefficients, another: Simulation) -> None:
    assert coefficients.denoise_guided is not None
    tokens = coefficients.lattice.tokens(NEW.height, NEW.width, NEW.num_frames)
    assert tokens == 4 * 8 * 12
    denoise = _weights(another) + coefficients.denoise_guided.bytes(tokens)
    assert denoise == pytest.approx(another.peak("cuda:0", Stage.DENOISE), rel=0.02)


def test_the_decoding_grid_predicts_another_size(coefficients: Coefficients, another: Simulation) -> None:
    seen = another.peak("cuda:0", Stage.DECODE) - _weights(another)
    assert coefficients.decode.bytes(NEW.height, NEW.width, NEW.num_frames) == pytest.approx(seen, rel=0.04)
    assert coefficients.decode.max_error < 0.04


def test_components_are_described(coefficients: Coefficients) -> None:
    transformer = coefficients.components["transformer"]
    assert transformer.class_name == "Kandinsky5Transformer3DModel"
    assert {b.path: b.count for b in transformer.blocks} == {"visual_transformer_blocks": 4}
    assert sum(b.total_bytes for b in transformer.blocks) + transformer.other_bytes == transformer.weight_bytes
    assert 0 < transformer.fp32_bytes < transformer.weight_bytes
    assert "time_embeddings" in " ".join(transformer.kept_in_fp32)
    assert transformer.pinned_bytes >= transformer.weight_bytes
    assert coefficients.text["text_encoder"].tokens == (160, 320, 640)
    assert set(coefficients.encode_bytes) == {"text_encoder", "text_encoder_2"}
    assert 0 < coefficients.answer_bytes < max(coefficients.encode_bytes.values())
    assert set(coefficients.versions) == {"torch", "diffusers", "transformers", "accelerate"}


def test_what_takes_seconds_is_fitted_again_alone(
    family: Family, coefficients: Coefficients, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "model", tmp_path / "coefficients.toml"
    folder.mkdir()
    _write_folder(folder, family)
    nothing = {"encode_bytes": {"text_encoder": 1}, "answer_bytes": 1, "layers": {}, "layers_guided": {}}
    stale = coefficients.model_copy(update=nothing)
    again = ["fit", str(folder), "--size", "128x128", "--frames", "17", "--quick"]

    file.write_text(to_toml(stale), "utf-8")
    assert main([*again, "--out", str(file)]) == 0
    found = Coefficients.model_validate(tomllib.loads(file.read_text("utf-8")))
    anew = {"encode_bytes", "answer_bytes", "kept_bytes", "layers", "layers_guided"}
    kept = found.model_dump(mode="json", exclude=anew)
    assert kept == Coefficients.model_validate(tomllib.loads(to_toml(stale))).model_dump(mode="json", exclude=anew)
    assert found.answer_bytes > 1
    assert set(found.layers) == {"text_encoder", "text_encoder_2", "transformer"}

    older = stale.model_copy(update={"versions": {**stale.versions, "diffusers": "0.1.0"}})
    file.write_text(to_toml(older), "utf-8")
    capsys.readouterr()
    assert main([*again, "--out", str(file)]) == 2
    assert "fit it without --quick" in " ".join(capsys.readouterr().err.split())
    assert file.read_text("utf-8") == to_toml(older)
    foreign = stale.model_copy(update={"pipeline": "WanPipeline"})
    file.write_text(to_toml(foreign), "utf-8")
    assert main([*again, "--out", str(file)]) == 2
    assert "of another model" in " ".join(capsys.readouterr().err.split())
    assert file.read_text("utf-8") == to_toml(foreign)
    assert main(again) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("size", [NEW, Shape(height=64, width=64, num_frames=9)])
def test_layers_take_at_most_what_their_law_says(
    family: Family, coefficients: Coefficients, size: Shape, *, guided: bool
) -> None:
    layer = ComponentSetup(hold=Hold.LEAF, use_stream=True)
    setup = Setup(components={name: layer for name in family.parts if name != "vae"})
    with Session(family, setup, MachineSpec(caching_allocator=False)) as session:
        rests = session.machine.gpus[0].ledger.total
        scale = {} if guided else {"guidance_scale": 1.0}
        seen = session.run(size.model_copy(update=scale), "latent").peak("cuda:0", Stage.DENOISE) - rests
    law = coefficients.denoise_guided if guided else coefficients.denoise
    layers = (coefficients.layers_guided if guided else coefficients.layers)["transformer"]
    assert law is not None
    working = law.bytes(coefficients.lattice.tokens(size.height, size.width, size.num_frames))
    largest = coefficients.components["transformer"].largest_leaf_bytes
    assert seen <= working + layers.bytes(working, 2 * largest) <= 1.01 * seen
    assert layers.brought_bytes[-1] < largest / 2


def test_coefficients_survive_toml(coefficients: Coefficients) -> None:
    text = to_toml(coefficients)
    assert text.startswith("# Written by")
    again = Coefficients.model_validate(tomllib.loads(text) | {"decode_tiled": None})
    assert again.components == coefficients.components
    assert again.decode.bytes(512, 768, 121) == pytest.approx(coefficients.decode.bytes(512, 768, 121), rel=1e-6)


def test_least_squares_finds_the_law_that_made_the_points() -> None:
    law = laws.fit_tokens([100, 1000, 5000], [1_000_000 + 50_000 * n for n in (100, 1000, 5000)])
    assert law.bytes(2000) == pytest.approx(101_000_000, rel=1e-6)
    assert law.max_error < 1e-6
    assert law.short is None


def test_a_law_of_two_lines_is_found_where_small_videos_take_what_the_prompt_takes() -> None:
    def work(tokens: int) -> int:
        return max(1_000_000 + 100 * tokens, 400_000 + 2_000 * tokens)

    tokens = [50, 200, 500, 900, 1300]
    law = laws.fit_tokens(tokens, [work(n) for n in tokens])
    assert law.short is not None
    assert [law.bytes(n) for n in (10, 100, 300, 700, 5000)] == [
        pytest.approx(work(n), rel=1e-6) for n in (10, 100, 300, 700, 5000)
    ]
    assert law.max_error < 1e-6


def test_a_law_of_pairs_is_found_where_a_mask_has_an_entry_for_each() -> None:
    tokens = [500, 2500, 4800, 9300, 15700]
    law = laws.fit_tokens(tokens, [1_000_000 + 20_000 * n + 6 * n * n for n in tokens])
    assert (law.short, law.bytes_per_pair) == (None, pytest.approx(6, rel=1e-6))
    assert law.max_error < 1e-6


def test_sizes_on_the_command_line() -> None:
    assert parse_bytes("12GiB") == 12 * 1024**3
    assert parse_bytes("1.5 MB") == 1_500_000
    with pytest.raises(SystemExit):
        main(["run", "wan2.1-t2v-1.3b", "--vram", "twelve"])


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    assert "wan2.1-t2v-14b" in json.loads(capsys.readouterr().out)
    assert main(["run", "no-such-model"]) == 2


def test_a_model_folder_runs_and_what_does_not_fit_exits_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _write_folder(tmp_path, tiny.wan("float32"))
    arguments = ["run", str(folder), "--size", "96x64", "--frames", "9", "--json"]
    assert main([*arguments, "--strategy", "leaf_stream", "--vram", "1GiB"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["output_shape"] == [1, 9, 64, 96, 3]
    assert result["setup"]["default"]["use_stream"] is True
    assert main([*arguments, "--vram", "451MiB"]) == 3
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert main([*arguments[:-1], "--strategy", "model_offload"]) == 0
    assert "denoise" in capsys.readouterr().out


def _write_folder(folder: Path, family: Family) -> Path:
    """A folder in diffusers' layout, without weights."""
    index: dict[str, object] = {"_class_name": family.pipeline, "_diffusers_version": "0.42.1", "boundary_ratio": None}
    for name, part in family.parts.items():
        index[name] = list(part.class_path.rsplit(".", 1))
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(part.config))
    (folder / "scheduler").mkdir()
    options = {k: v for k, v in family.scheduler.items() if k != "class"}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(options))
    index["scheduler"] = ["diffusers", family.scheduler["class"]]
    index |= {name: ["transformers", "T5TokenizerFast"] for name in family.tokenizers}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
