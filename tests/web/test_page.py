"""Values -> HTML, the form -> Draft: pure functions with hostile input, and what a browser tab is shown when."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from starlette.requests import Request

from app.errors import InvalidRequest, PocketreelError, StoreError
from app.jobs import JobService, Preview
from app.presets import Catalogue
from app.schema import (
    GIB,
    Draft,
    ErrorKind,
    Job,
    JobStatus,
    Notice,
    OutputReport,
    Progress,
    Receipt,
    Report,
    Stage,
    StageReport,
)
from app.web import render
from app.web.form import Form, draft_of, form_for_card, form_for_request, form_from_browser
from app.web.history import PAGE_ROWS, HistoryTab
from app.web.make import MakeTab, Shown, picked
from app.web.owner import LOCAL_OWNER, SCOPE_KEY
from app.web.report import report_html
from app.web.words import Titles, duration, in_form_words, memory, moment
from tests import values

from .conftest import finished, until

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
TITLES = Titles(models={"tiny": "Tiny"}, presets={"auto": "Automatic"})
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\" ' onload=x ${alert(1)} {{value}} & </article>"
CATALOGUE = Catalogue(models={"tiny": values.card()}, hardware={"auto": values.preset()})


class Tags(HTMLParser):
    """The tags and attribute names of a piece of HTML, as a browser sees them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def output(path: Path, **changes: Any) -> OutputReport:
    facts: dict[str, Any] = {
        "path": path,
        "size_bytes": path.stat().st_size if path.exists() else 1000,
        "sha256": "0" * 64,
        "frames_sha256": "0" * 64,
        "width": 96,
        "height": 96,
        "num_frames": 33,
        "fps": 16,
        "mean_luma": 100.0,
    }
    return OutputReport(**{**facts, **changes})


def report(*, vram: dict[str, int] | None = None, **changes: Any) -> Report:
    used = vram or {}
    stages = tuple(
        StageReport(
            stage=stage,
            seconds=1.5,
            peak_ram_bytes=2 * GIB,
            peak_vram_allocated_bytes=used,
            peak_vram_reserved_bytes={name: value + GIB for name, value in used.items()},
            read_bytes=100 * 2**20,
            written_bytes=None,
        )
        for stage in Stage
    )
    return Report(**{"stages": stages, "device": "CPU (a test)", "warm": False, "versions": {}, **changes})


def completed(tmp_path: Path, **changes: Any) -> Job:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"x" * 1000)
    facts = {"status": JobStatus.COMPLETED, "output_path": path, "report": report(output=output(path))}
    return values.job(started_at=NOW, finished_at=NOW + timedelta(seconds=8), **{**facts, **changes})


# ------------------------------------------------------------------------------------------------------------ escaping


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    request = values.request(prompt=HOSTILE, negative_prompt=HOSTILE, model=HOSTILE, preset=HOSTILE)
    plan = values.plan(reasons=(HOSTILE,))
    notices = (Notice(field="prompt", text=HOSTILE),)
    job = completed(tmp_path, request=request, plan=plan, notices=notices)
    job = job.model_copy(update={"report": report(device=HOSTILE, output=output(job.output_path), vram={HOSTILE: GIB})})
    failed = values.job(
        status=JobStatus.FAILED,
        request=request,
        error_kind=ErrorKind.CRASH,
        error=HOSTILE,
        log_path=Path("/logs") / HOSTILE,
    )
    gone = job.model_copy(update={"output_path": Path("/nowhere") / HOSTILE})
    pieces = [
        render.preview_html(Preview(request=request, notices=notices, plan=plan)),
        render.hint_html(values.card(summary=HOSTILE)),
        render.problem_html(HOSTILE),
        render.progress_html(values.job(request=request), None, 0),
        render.waiting_html([values.job(request=request)]),
        render.history_html([job, failed], TITLES, selected=None),
        *(render.result_html(each, titles=TITLES, local=True) for each in (job, failed, gone)),
    ]
    for piece in pieces:
        tags = Tags(piece)
        assert not tags.tags & {"script", "img"}, piece
        assert not {name for name in tags.attributes if name.startswith("on")}, piece
        assert "<script>alert(1)</script>" in tags.text, piece


# ------------------------------------------------------------------------------------------------------- what is shown


def test_preview_tells_values_changes_place_and_memory() -> None:
    notice = Notice(field="num_frames", text="100 frames -> 97: this model makes 4k+1 frames.")
    preview = Preview(request=values.request(num_frames=97), notices=(notice,), plan=values.plan())
    html = render.preview_html(preview)
    assert "97 frames at 16 per second: <b>6.1 s of video</b>" in html
    assert "100 frames -&gt; 97" in html
    assert "up to 1.0 GiB of RAM; no GPU is used" in html
    assert "a test" in html
    on_card = values.plan(device="cuda:0", predicted_vram_bytes={"cuda:0": 5 * GIB})
    assert "5.0 GiB of VRAM on graphics card 0" in render.preview_html(preview.model_copy(update={"plan": on_card}))


def test_progress_of_each_state() -> None:
    running = values.job(status=JobStatus.RUNNING, started_at=NOW)
    at = NOW + timedelta(seconds=5)
    html = render.progress_html(running, Progress(stage=Stage.DENOISE, step=4, total=10, eta_seconds=12), 0, now=at)
    assert "step 4 of 10 · about 12 s left" in html
    assert 'value="4" max="10"' in html
    assert "running for 5.0 s" in html
    assert html.count("pr-done") == 2
    assert "Starting" in render.progress_html(running, None, 0, now=at)
    assert "2 videos before it" in render.progress_html(values.job(), None, 2)
    assert "next in line" in render.progress_html(values.job(), None, 0)


def test_result_with_report(tmp_path: Path) -> None:
    html = render.result_html(completed(tmp_path), titles=TITLES, local=True)
    assert re.search(r'<video controls loop [^>]*src="/media/j1.mp4"', html)
    assert 'href="/media/j1.mp4?download=1"' in html
    text = Tags(html).text
    for words in ("no GPU was used", "7.5 s", "2.0 GiB", "100 MiB", "loaded for this video (cold)", "CPU (a test)"):
        assert words in text
    assert "1.0 GiB predicted, 2.0 GiB measured" in text
    assert "Automatic" in text
    assert str(tmp_path) in text
    assert str(tmp_path) not in render.result_html(completed(tmp_path), titles=TITLES, local=False)


def test_report_of_a_run_on_a_card() -> None:
    job = values.job(
        plan=values.plan(predicted_vram_bytes={"cuda:0": 4 * GIB}), report=report(vram={"cuda:0": 5 * GIB}, warm=True)
    )
    text = Tags(report_html(job)).text
    assert "5.0 GiB used, 6.0 GiB reserved" in text
    assert "no GPU" not in text
    assert "4.0 GiB predicted, 6.0 GiB measured" in text
    assert "already loaded (warm)" in text


def test_a_deleted_video_does_not_break_the_page(tmp_path: Path) -> None:
    job = completed(tmp_path)
    job.output_path.unlink()
    html = render.result_html(job, titles=TITLES, local=True)
    assert "<video" not in html
    assert "moved or deleted" in html
    assert "Seed" in html
    assert str(tmp_path) not in render.result_html(job, titles=TITLES, local=False)


def test_a_failure_tells_kind_message_and_log() -> None:
    job = values.job(
        status=JobStatus.FAILED, error_kind=ErrorKind.OOM, error="Choose fewer frames.", log_path=Path("/logs/w.log")
    )
    text = Tags(render.result_html(job, titles=TITLES, local=True)).text
    for words in ("ran out of memory (VRAM)", "oom", "Choose fewer frames.", "/logs/w.log"):
        assert words in text
    assert "/logs" not in render.result_html(job, titles=TITLES, local=False)
    named = job.model_copy(update={"error": "It crashed. The log: /logs/w.log"})
    assert render.result_html(named, titles=TITLES, local=True).count("/logs/w.log") == 1
    assert "/logs" not in render.result_html(named, titles=TITLES, local=False)


def test_history_lines(tmp_path: Path) -> None:
    job = completed(tmp_path)
    text = Tags(render.history_html([job], TITLES, selected="j1", now=NOW)).text
    for words in ("a red ball", "Tiny", "finished", "8.0 s", "2.0 GiB RAM", "seed 1"):
        assert words in text
    assert 'aria-pressed="true"' in render.history_html([job], TITLES, selected="j1")
    assert "No videos yet" in render.history_html([], TITLES, selected=None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.44, "0.4 s"), (9.96, "10 s"), (75, "75 s"), (120, "2 min"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_words() -> None:
    assert memory(int(1.5 * GIB)) == "1.5 GiB"
    assert memory(300 * 2**20) == "300 MiB"
    assert in_form_words("num_inference_steps is 0; it must lie between 1 and 9.").startswith("Steps is 0")
    assert in_form_words("width 100 -> 96: why.") == "Width 100 -> 96: why."
    assert in_form_words("The prompt is empty.") == "The prompt is empty."
    assert moment(NOW, now=NOW + timedelta(days=2)).startswith("2026-11-30")


# ---------------------------------------------------------------------------------------------------------------- form


def form(**changes: Any) -> Form:
    return form_for_card(values.card())._replace(**{"prompt": "a red ball", **changes})


def test_form_becomes_a_draft() -> None:
    draft = draft_of(form(seed=" 9007199254740993 ", minutes=2, guidance_scale=2.5, num_frames=21.0), CATALOGUE)
    assert draft == Draft(
        model="tiny",
        preset="auto",
        prompt="a red ball",
        width=96,
        height=96,
        num_frames=21,
        fps=16,
        num_inference_steps=10,
        guidance_scale=2.5,
        seed=9007199254740993,  # beyond what a browser's number holds
        timeout_seconds=120,
    )


def test_an_empty_form_leaves_all_to_the_model() -> None:
    assert draft_of(Form(model="tiny", prompt="x"), CATALOGUE) == Draft(model="tiny", prompt="x")


@pytest.mark.parametrize("size", ["768x512", "768 x 512", "768X512", "768*512", "768 512", "768,512", "768\u00d7512"])
def test_sizes(size: str) -> None:
    draft = draft_of(form(size=size), CATALOGUE)
    assert (draft.width, draft.height) == (768, 512)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/etc"}, "Choose a model"),
        ({"model": ["tiny"]}, "Choose a model"),
        ({"model": {"tiny": 1}}, "Choose a model"),
        ({"preset": "none"}, "Choose a hardware"),
        ({"prompt": 3}, "Prompt must be text"),
        ({"negative_prompt": ["x"]}, "must be text"),
        ({"size": "wide"}, "768x512"),
        ({"size": 96}, "768x512"),
        ({"size": "96x96x96"}, "768x512"),
        ({"num_frames": 3.5}, "Frames must be a whole number"),
        ({"num_frames": "many"}, "Frames must be a number"),
        ({"num_frames": True}, "Frames must be a number"),
        ({"fps": float("nan")}, "must be a number"),
        ({"fps": float("inf")}, "must be a number"),
        ({"fps": "1e400"}, "must be a number"),
        ({"num_inference_steps": [1]}, "Steps must be a number"),
        ({"seed": "lucky"}, "Seed must be a number"),
        ({"seed": {}}, "Seed must be a number"),
        ({"minutes": "soon"}, "Time limit must be a number"),
    ],
)
def test_what_a_browser_may_send_instead(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        draft_of(form(**changes), CATALOGUE)


def test_form_of_a_request_makes_it_again() -> None:
    request = values.request(seed=2**62 + 1, num_frames=21, negative_prompt="blur", timeout_seconds=30)
    draft = draft_of(form_for_request(request, CATALOGUE), CATALOGUE)
    for name in ("prompt", "negative_prompt", "num_frames", "seed", "timeout_seconds", "width", "guidance_scale"):
        assert getattr(draft, name) == getattr(request, name), name
    usual = form_for_request(values.request(), CATALOGUE)
    assert usual.minutes is None


def test_form_of_a_request_with_an_unknown_model() -> None:
    made = form_for_request(values.request(model="/models/own", preset="gone"), CATALOGUE)
    assert (made.model, made.preset) == ("tiny", "auto")


@pytest.mark.parametrize("saved", [None, 3, "x", [], {}, {"model": "gone"}, {"model": ["tiny"]}, {"model": {}}])
def test_a_useless_copy_of_the_form(saved: Any) -> None:
    assert form_from_browser(saved, CATALOGUE) is None


def test_a_copy_of_the_form() -> None:
    assert form_from_browser(form()._asdict(), CATALOGUE) == form(negative_prompt="")
    odd = {"model": "tiny", "prompt": ["x"], "num_frames": "9", "fps": True, "seed": 5, "guidance_scale": float("inf")}
    kept = form_from_browser(odd, CATALOGUE)
    assert kept is not None
    assert (kept.prompt, kept.num_frames, kept.fps, kept.seed, kept.guidance_scale) == ("", None, None, "", None)


# ------------------------------------------------------------------------------------------------------------ handlers


def asked_by(owner: str) -> gr.Request:
    return gr.Request(Request({"type": "http", "headers": [], SCOPE_KEY: owner}))


@pytest.fixture
def make(service: JobService) -> MakeTab:
    return MakeTab(service)


def click(make: MakeTab, owner: str, prompt: str) -> tuple[Any, ...]:
    first = form_for_card(make._catalogue.models["built-in"])
    return make.generate(asked_by(owner), Shown(), *first._replace(prompt=prompt))


def test_a_run_as_a_tab_sees_it(make: MakeTab, service: JobService) -> None:
    me = asked_by("one")
    plan, now, _, _, cancel, *_, shown = click(make, "one", "a red ball")
    assert "What will happen" in plan
    assert "pr-now" in now
    assert cancel.visible
    (job,) = service.list(owner="one")
    assert shown.active == job.id
    finished(service, job)
    now, _, result, cancel, again, timer, after = make.look(me, shown)
    assert now == ""
    assert f"/media/{job.id}.mp4" in result
    assert not cancel.visible
    assert again.visible
    assert timer.value > 1
    # the next look changes nothing: the video must not start over twice a second
    assert all(update == gr.skip() for update in make.look(me, after)[1:])
    # a reload finds it, with the form as it was
    loaded = make.load(me, None)
    assert loaded[2] == "a red ball"
    assert f"/media/{job.id}.mp4" in loaded[len(Form._fields) + 4]


def test_a_server_restarted_under_an_open_page(make: MakeTab) -> None:
    now, *_ = make.look(asked_by("nobody"), None)
    assert now == ""


def test_a_first_visit_leaves_the_form_alone(make: MakeTab) -> None:
    loaded = make.load(asked_by("new"), None)
    assert all(update == gr.skip() for update in loaded[: len(Form._fields) + 1])
    assert loaded[len(Form._fields) + 1].interactive


def test_a_database_that_is_gone_is_told(make: MakeTab, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> None:
        raise StoreError("The disk is full.")

    monkeypatch.setattr(make._service, "list", full)
    now, *rest = make.look(asked_by("new"), Shown())
    assert "The disk is full." in now
    assert all(update == gr.skip() for update in rest)


def test_problems_stand_beside_the_form(make: MakeTab, service: JobService) -> None:
    plan, *_ = click(make, "two", "")
    assert "prompt is empty" in plan
    assert service.list(owner="two") == []


def test_cancel_is_for_owners(make: MakeTab, service: JobService) -> None:
    click(make, "three", "a red ball")
    (job,) = service.list(owner="three")
    with pytest.raises(gr.Error, match="no job"):
        make.cancel(asked_by("four"), Shown(active=job.id))
    with pytest.raises(gr.Error, match="no job"):
        make.form_of_job(asked_by("four"), job.id)
    make.cancel(asked_by("three"), Shown(active=job.id))
    assert finished(service, job).status is JobStatus.CANCELED
    *_, shown = make.look(asked_by("four"), Shown())
    assert shown == gr.skip()


def test_resuming_is_for_owners(make: MakeTab, service: JobService) -> None:
    failed = finished(service, service.submit(Draft(prompt="fail"), owner="ann"))
    event = gr.EventData(None, {"job": failed.id})
    with pytest.raises(gr.Error, match="no job"):
        make.resume(asked_by("bob"), Shown(), event)
    assert 'data-job="' in make.show(failed, "ann")
    assert "Resume this video" in make.show(failed, "ann")
    make.resume(asked_by("ann"), Shown(), event)
    again = finished(service, service.get(failed.id, owner="ann"))
    assert [attempt.then for attempt in again.attempts] == ["resumed"]
    canceled = again.model_copy(update={"status": JobStatus.CANCELED, "error_kind": None})
    assert "Resume" not in make.show(canceled, "ann")


def test_the_only_video_that_is_resumed_leaves_the_page(make: MakeTab, service: JobService) -> None:
    failed = finished(service, service.submit(Draft(prompt="fail"), owner="carl"))
    shown = make.look(asked_by("carl"), Shown())[-1]
    service.resume(failed.id, owner="carl")
    assert "Your video will appear here" in make.look(asked_by("carl"), shown)[2] or (
        service.get(failed.id, owner="carl").status.final
    )
    finished(service, service.get(failed.id, owner="carl"))


def test_a_cancel_shows_its_receipt() -> None:
    receipt = Receipt(
        seconds=0.24,
        forced=False,
        model_kept=True,
        ram_before_bytes=3 * GIB,
        ram_after_bytes=2 * GIB,
        vram_before_bytes={"cuda:0": 8 * GIB},
        vram_after_bytes={"cuda:0": 2 * GIB},
    )
    job = values.job(status=JobStatus.CANCELED, receipt=receipt, started_at=NOW, finished_at=NOW)
    text = render.result_html(job, titles=TITLES, local=True)
    back = f"{memory(GIB)} of RAM and {memory(6 * GIB)} of VRAM"
    assert f"within 0.2 s and gave back {back}; the model stays loaded" in text


def test_waiting_jobs_can_be_canceled(make: MakeTab, service: JobService) -> None:
    for _ in range(3):
        *_, shown = click(make, "five", "a red ball")
    jobs = service.list(owner="five")
    assert shown.active == jobs[2].id
    assert shown.waiting == (jobs[1].id, jobs[0].id)
    event = gr.EventData(None, {"job": jobs[0].id})
    *_, shown = make.cancel_waiting(asked_by("five"), shown, event)
    assert finished(service, jobs[0]).status is JobStatus.CANCELED
    until(lambda: all(job.status.final for job in service.list(owner="five")))


@pytest.mark.parametrize("data", [None, "x", 3, [], {}, {"job": 3}, {"job": None}, {"job": "x" * 65}])
def test_a_click_that_says_nothing(data: Any) -> None:
    assert picked(gr.EventData(None, data)) is None


def test_another_model_brings_its_defaults(make: MakeTab) -> None:
    other = next(card for card in make._catalogue.models.values() if card.id != "built-in")
    values_ = make.choose_model(*Form(model=other.id, prompt="kept"))
    assert values_[2] == "kept"
    assert values_[5] == other.defaults.num_frames
    with pytest.raises(gr.Error):
        make.choose_model(*Form(model="/etc"))


def test_history_is_ones_own_and_long_ones_come_in_pieces(
    make: MakeTab, service: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = HistoryTab(service, make)
    many = [values.job(f"j{index}", owner="six") for index in range(PAGE_ROWS + 5)]
    monkeypatch.setattr(service, "list", lambda *, owner, limit: many[:limit] if owner == "six" else [])
    rows, more, *_ = history.refresh(asked_by("six"), None, PAGE_ROWS)
    assert rows.count("<li>") == PAGE_ROWS
    assert more.visible
    rows, more, limit = history.show_more(asked_by("six"), None, PAGE_ROWS)
    assert rows.count("<li>") == PAGE_ROWS + 5
    assert not more.visible
    assert limit == 2 * PAGE_ROWS
    assert "No videos yet" in history.refresh(asked_by("seven"), None, -1)[0]


def test_history_shows_nobody_elses_job(make: MakeTab, service: JobService) -> None:
    history = HistoryTab(service, make)
    click(make, "eight", "a red ball")
    (job,) = service.list(owner="eight")
    finished(service, job)
    mine = history.choose(asked_by("eight"), PAGE_ROWS, gr.EventData(None, {"job": job.id}))
    assert f"/media/{job.id}.mp4" in mine[2]
    theirs = history.choose(asked_by("nine"), PAGE_ROWS, gr.EventData(None, {"job": job.id}))
    assert job.id not in theirs[2]
    assert theirs[-1] is None
    for call in (history.stop, lambda *args: history.use_again(*args[:2])):
        with pytest.raises(gr.Error):
            call(asked_by("nine"), job.id, PAGE_ROWS)


def test_failures_are_told(make: MakeTab, service: JobService) -> None:
    for prompt, words in (("fail", "VRAM &lt;b&gt;ran out"), ("crash", "worker process ended")):
        click(make, LOCAL_OWNER, prompt)
        job = finished(service, service.list(owner=LOCAL_OWNER)[0])
        html = make.show(job, LOCAL_OWNER)
        assert words in html
        assert ".log" in html


def test_every_error_of_the_core_is_shown_not_raised(make: MakeTab, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(draft: Draft) -> None:
        raise PocketreelError("It does not fit.")

    monkeypatch.setattr(make._service, "preview", refuse)
    plan, saved = make.preview(*Form(prompt="x"))
    assert "It does not fit." in plan
    assert saved["prompt"] == "x"
