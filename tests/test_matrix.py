"""Plans of the planner in the simulator: within their own prediction. The full matrix is `pocketreel bench matrix`."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import Settings
from app.errors import GenerationFailed
from app.matrix import CARDS, Case, Explored, Row, document, explore, row_words, run_all, summary, summary_words, table
from app.plans import PlannedOutcome
from app.presets import load_catalogue
from app.schema import GIB


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("data"))
    found = explore(settings, ("built-in",), cards=((1,), (4,)), rams=(16,), sizes=("small", "default"))
    assert found.cases
    assert (found.refused, found.on_cpu) == (0, 0)
    return found.cases


SAMPLE = [
    ("cogvideox-2b", (6, 12), 32, "default"),
    ("hunyuanvideo", (8,), 16, "small"),
    ("kandinsky-5-t2v-lite-sft-5s", (8, 8), 32, "small"),
    ("ltx-video-2b", (4,), 16, "small"),
    ("wan-2.1-t2v-1.3b", (6,), 32, "small"),
]
"""A cell of some families, over the kinds of machines."""


def assert_kept(rows: list[Row]) -> None:
    """All ran, and no card took more than predicted, nor more than 10 % less."""
    for row in rows:
        assert row.outcome.error is None, (row.case.title, row.outcome.error)
        assert row.shares, row.case.title
        assert min(row.shares) >= 0, (row.case.title, row.shares)
        assert max(row.shares) <= 0.10, (row.case.title, row.shares)


def test_a_sample_of_the_matrix_keeps_its_word(settings: Settings) -> None:
    cases = [
        case
        for model, cards, ram, size in SAMPLE
        for case in explore(settings, (model,), cards=(cards,), rams=(ram,), sizes=(size,)).cases
    ]
    assert len(cases) == len(SAMPLE)
    rows = run_all(cases, 2)
    assert_kept(rows)
    assert summary(rows).median_excess <= 0.04


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_models_default_keeps_its_word(settings: Settings) -> None:
    """Each on the next kind of machine on which it fits."""
    machines = [(cards, ram) for ram in (64, 32, 16) for cards in CARDS]
    cases: list[Case] = []
    models = sorted(load_catalogue(settings).models)
    for turn, model in enumerate(models):
        for cards, ram in machines[turn % len(machines) :] + machines:
            if found := explore(settings, (model,), cards=(cards,), rams=(ram,), sizes=("default",)).cases:
                cases += found
                break
    not_simulated = {f"cogvideox-{size}-i2v" for size in ("5b", "1.5-5b")}
    of_hunyuan = {f"hunyuanvideo-1.5-{task}-{size}p" for task in ("t2v", "i2v") for size in (480, 720)}  # fits no card
    assert set(models) - {case.model for case in cases} == not_simulated | of_hunyuan
    rows = run_all(cases, 2)
    assert_kept(rows)
    assert summary(rows).median_excess <= 0.04


def test_the_built_in_models_plans_keep_their_word(sample: list[Case]) -> None:
    shown: list[str] = []
    rows = run_all(sample, 2, lambda row: shown.append(row_words(row)))
    assert [row.case for row in rows] == sample
    assert len(shown) == len(sample)
    assert_kept(rows)
    found = summary(rows)
    assert (found.runs, found.failed, found.over) == (len(sample), 0, 0)
    assert table(rows).count("\n") == len(sample) + 1
    page = document(Explored(sample, 3, 0), rows)
    assert f"7 cells: 4 with a plan for cards ({len(sample)} different" in page
    assert f"{len(sample)} plans simulated" in page


def test_equal_plans_are_run_once_on_the_smallest_machine(settings: Settings, sample: list[Case]) -> None:
    assert sum(case.cells for case in sample) == 4
    assert len({case.run.model_dump_json() for case in sample}) == len(sample)
    found = explore(settings, ("built-in",), cards=((24,), (8, 8), (12,)), rams=(64, 16), sizes=("default",))
    assert [(case.cards, case.cells) for case in found.cases if len(case.cards) == 1] == [((12,), 4)]
    assert "6 cells: " in found.words()


def test_what_was_kept_is_not_simulated_again(sample: list[Case], tmp_path: Path) -> None:
    keep, shown = tmp_path / "outcomes.jsonl", list[str]()
    first = run_all(sample[:1], 1, lambda row: shown.append(row.case.title), keep)
    with keep.open("a", encoding="utf-8") as file:
        file.write('{"run": "cut o')
    again = run_all(sample[:1], 1, lambda row: shown.append(row.case.title), keep)
    assert again == first
    assert shown == [sample[0].title]


def test_cells_in_which_nothing_fits_are_counted(settings: Settings) -> None:
    found = explore(settings, ("wan-2.1-t2v-1.3b",), cards=((1,), (24,)), rams=(2, 64), sizes=("default",))
    assert found.refused == 3
    assert "3 in which nothing fits" in found.words()


def rows_with(sample: list[Case], *shares: float | None) -> list[Row]:
    """One row a share: by how much the prediction exceeds what was seen; None for one that did not run."""
    case = sample[0]
    predicted = case.plan.predicted_vram_bytes["cuda:0"]
    return [
        Row(case, PlannedOutcome(error="does not fit"))
        if share is None
        else Row(case, PlannedOutcome(vram_bytes={"cuda:0": round(predicted / (1 + share))}))
        for share in shares
    ]


def test_the_summary_tells_of_what_is_over_and_what_did_not_run(sample: list[Case]) -> None:
    found = summary(rows_with(sample, 0.02, 0.04, -0.01, None))
    assert (found.runs, found.failed, found.over) == (4, 1, 1)
    assert found.median_excess == pytest.approx(0.02, abs=1e-4)
    assert found.largest_excess == pytest.approx(0.04, abs=1e-4)
    assert "1 took more VRAM than predicted" in summary_words(found)
    assert "does not fit" in table(rows_with(sample, None))
    assert row_words(rows_with(sample, 0.02)[0]).startswith("prediction +2.0%")


def test_a_simulator_that_dies_is_named(sample: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.matrix.command_line", lambda _module: ["false"])
    with pytest.raises(GenerationFailed, match="The simulator ended while it ran built-in"):
        run_all(sample[:1], 1)


def test_the_cards_are_as_large_as_asked(sample: list[Case]) -> None:
    assert {case.run.vram_bytes for case in sample} <= {(GIB,), (4 * GIB,)}
    assert all(Path(case.run.model).is_dir() for case in sample)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cards", [(24, 24), (8, 12), (6, 12, 24)], ids=str)
@pytest.mark.parametrize("model", ["kandinsky-5-t2v-lite-sft-5s", "kandinsky-5-i2v-lite-5s", "wan-2.1-t2v-14b"])
def test_several_cards_hold_what_was_planned(settings: Settings, model: str, cards: tuple[int, ...]) -> None:
    found = explore(settings, (model,), cards=(cards,), rams=(64,), sizes=("default",)).cases
    assert found
    rows = run_all(found, 2)
    assert_kept(rows)
    for row in rows:
        used = set(row.case.plan.predicted_vram_bytes)
        assert {device for device, peak in row.outcome.vram_bytes.items() if peak} >= used
