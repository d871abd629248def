"""Values -> HTML for the page: what will happen, what happens now, what came out. Every text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape

from app.jobs import Preview
from app.schema import Job, JobStatus, ModelCard, Notice, Progress, Stage
from app.shelf import offer_of, offer_words
from app.web.media import media_url, video_gone
from app.web.report import report_html, settings_html
from app.web.words import (
    ERRORS,
    SHORT_STAGES,
    STAGES,
    STATUSES,
    Titles,
    attempt_words,
    device_name,
    duration,
    elapsed,
    in_form_words,
    memory,
    moment,
    peak,
    receipt_words,
    size,
)


def hint_html(card: ModelCard) -> str:
    """Before anything was typed: what the chosen model is."""
    return (
        '<div class="pr-plan"><h3>What will happen</h3>'
        f"<p>{escape(card.summary or card.title)}</p>"
        f'<p class="pr-quiet">{escape(offer_words(offer_of(card)))}</p>'
        '<p class="pr-quiet">Type a prompt: here stands what will be made, where, and what memory it takes.</p>'
        "</div>"
    )


def preview_html(preview: Preview) -> str:
    """What Generate would do: the clip, every changed value with its reason, the device and the memory."""
    request, plan = preview.request, preview.plan
    clip = (
        f"{size(request.width, request.height)} pixels, {request.num_frames} frames at {request.fps} per second: "
        f"<b>{duration(request.num_frames / request.fps)} of video</b>, {request.num_inference_steps} steps."
    )
    needs = f"up to {memory(plan.predicted_ram_bytes)} of RAM"
    vram = [f"{memory(value)} of VRAM on {device_name(name)}" for name, value in plan.predicted_vram_bytes.items()]
    needs += " and " + ", ".join(vram) if vram else ("; no GPU is used" if plan.device == "cpu" else "")
    reasons = "".join(f"<li>{escape(in_form_words(reason))}</li>" for reason in plan.reasons)
    return (
        '<div class="pr-plan"><h3>What will happen</h3>'
        f"<p>{clip}</p>{notices_html(preview.notices)}"
        f"<p>Runs on {escape(device_name(plan.device))}, expected {escape(needs)}.</p>"
        f'<ul class="pr-quiet">{reasons}</ul></div>'
    )


def problem_html(message: str) -> str:
    """Why Generate would refuse."""
    return (
        '<div class="pr-plan pr-bad" role="alert"><h3>This cannot be made yet</h3>'
        f"<p>{escape(in_form_words(message))}</p></div>"
    )


def notices_html(notices: tuple[Notice, ...]) -> str:
    """What was changed on the way, and what the model will not understand."""
    if not notices:
        return ""
    return '<ul class="pr-notices">' + "".join(f"<li>{escape(in_form_words(n.text))}</li>" for n in notices) + "</ul>"


def progress_html(job: Job, progress: Progress | None, position: int, *, now: datetime | None = None) -> str:
    """The job that runs or is next. Redrawn twice a second: nothing in it can be clicked."""
    if job.status is JobStatus.PENDING:
        waits = "next in line" if position == 0 else f"{position} video{'s' * (position != 1)} before it"
        title, detail, bar = "Waiting", waits, ""
    elif progress is None:
        title, detail, bar = "Starting", "", ""
    else:
        title = STAGES[progress.stage]
        detail = f"step {progress.step} of {progress.total}" if progress.total else ""
        if progress.eta_seconds is not None:
            left = f"about {duration(progress.eta_seconds)} left" if progress.eta_seconds >= 1 else "nearly there"
            detail = f"{detail} · {left}" if detail else left
        bar = f'value="{progress.step}" max="{progress.total}"' if progress.total else ""
    running = f" · running for {duration(elapsed(job, now=now))}" if job.status is JobStatus.RUNNING else ""
    return (
        '<section class="pr-now" aria-label="Progress">'
        f'<div class="pr-line"><b>{escape(title)}</b><span>{escape(detail)}</span></div>'
        f'<progress aria-label="Progress of this stage" {bar}></progress>'
        f"{_stages(progress.stage if progress else None)}{_attempts(job)}"
        f'<p class="pr-quiet">{_quoted(job)}{running}</p></section>'
    )


def _attempts(job: Job) -> str:
    """What went wrong on the way, and what was done about it."""
    rows = "".join(f"<li>{escape(attempt_words(attempt))}</li>" for attempt in job.attempts)
    return f'<ul class="pr-notices" aria-label="Earlier tries">{rows}</ul>' if rows else ""


def _stages(current: Stage | None) -> str:
    order = list(Stage)
    at = order.index(current) if current else -1
    items = []
    for index, stage in enumerate(order):
        state = "pr-done" if index < at else "pr-current" if index == at else ""
        here = ' aria-current="step"' if index == at else ""
        items.append(f'<li class="{state}"{here}>{SHORT_STAGES[stage]}</li>')
    return f'<ol class="pr-stages">{"".join(items)}</ol>'


def waiting_html(jobs: list[Job]) -> str:
    """The owner's further jobs, each with its own cancel. Redrawn only when it changes, so that a click is not lost."""
    if not jobs:
        return ""
    rows = ""
    for job in jobs:
        label = f"Cancel {_quoted(job, limit=60)}"
        button = f'<button type="button" data-job="{escape(job.id)}" aria-label="{label}">Cancel</button>'
        rows += f"<li><span>{_quoted(job)}</span>{button}</li>"
    return f'<section class="pr-waiting"><h3>Waiting after it</h3><ul>{rows}</ul></section>'


def empty_html() -> str:
    """Before the first video."""
    return (
        '<div class="pr-empty"><p>Your video will appear here.</p>'
        '<p class="pr-quiet">It keeps running when you close this page, and is here when you come back.</p></div>'
    )


def result_html(job: Job, *, titles: Titles, local: bool) -> str:
    """A job that has ended (or, in the history, has not): the video or why there is none, report, settings."""
    report = report_html(job) if job.report else ""
    about = f'<p class="pr-caption">{_quoted(job, limit=600)}</p>{notices_html(job.notices)}{_attempts(job)}'
    if job.status is JobStatus.COMPLETED and not video_gone(job):
        about += (
            f'<p class="pr-actions"><a href="{escape(media_url(job, download=True))}" download>Save the video</a></p>'
        )
    return (
        f'<article class="pr-result" role="status" data-job="{escape(job.id)}" data-status="{job.status}">'
        f'<div class="pr-top">{_outcome(job, local=local)}<div>{about}</div></div>{report}'
        f"{settings_html(job, titles=titles, local=local)}</article>"
    )


def _outcome(job: Job, *, local: bool) -> str:
    if job.status is JobStatus.COMPLETED:
        gone = video_gone(job)
        return (
            _video(job) if gone is None else _message("The video is not there any more", _gone_text(job, gone, local))
        )
    if job.status is JobStatus.FAILED:
        title = ERRORS[job.error_kind] if job.error_kind else "The run failed"
        text = job.error or "No reason was recorded."
        log = str(job.log_path) if job.log_path is not None else ""
        if log and not local:  # messages of the core name the log; its path is for the person at this machine
            text = text.replace(log, "on the computer that runs Pocketreel")
        text = escape(text)
        if log and local and escape(log) not in text:
            text += f'</p><p class="pr-quiet">Details: <code>{escape(log)}</code>'
        if job.resumable:
            text += f'</p><p><button type="button" data-job="{escape(job.id)}">Resume this video</button>'
        return _message(title, text, kind=job.error_kind.value if job.error_kind else "failed")
    if job.status is JobStatus.CANCELED:
        receipt = f"{receipt_words(job.receipt)} " if job.receipt is not None else ""
        after = f" after {duration(job.seconds)}" if job.seconds is not None else " before it began"
        return _message(
            "Canceled",
            f"It was stopped{after}; nothing was saved. {receipt}Earlier videos are under History.",
            mild=True,
        )
    return _message(f"This video is {STATUSES[job.status]}", "Its progress is shown under Make.", mild=True)


def _gone_text(job: Job, gone: str, local: bool) -> str:
    where = f": <code>{escape(str(job.output_path))}</code>" if local else "."
    return f"The file was {gone}{where} Its settings and seed are below, so it can be made again."


def _message(title: str, text: str, *, kind: str = "", mild: bool = False) -> str:
    tag = f' <span class="pr-tag">{escape(kind)}</span>' if kind else ""
    return (
        f'<div class="pr-message{" pr-mild" if mild else " pr-bad"}"><h3>{escape(title)}{tag}</h3><p>{text}</p></div>'
    )


def _video(job: Job) -> str:
    output = job.report.output if job.report else None
    width, height = (output.width, output.height) if output else (job.request.width, job.request.height)
    # tiny clips are shown larger than they are, large ones never wider than the page
    shown = min(max(width, 420), 960)
    return (
        f'<video controls loop autoplay muted playsinline preload="metadata" src="{escape(media_url(job))}" '
        f'style="aspect-ratio: {width} / {height}; width: min(100%, {shown}px)" '
        f'aria-label="Video: {escape(job.request.prompt[:200])}"></video>'
    )


def history_html(jobs: Sequence[Job], titles: Titles, *, selected: str | None, now: datetime | None = None) -> str:
    """One line a job, newest first; each line is a button."""
    if not jobs:
        return '<div class="pr-empty"><p>No videos yet.</p><p class="pr-quiet">What you make is listed here.</p></div>'
    return '<ul class="pr-history">' + "".join(_row(job, titles, job.id == selected, now) for job in jobs) + "</ul>"


def _row(job: Job, titles: Titles, selected: bool, now: datetime | None) -> str:
    facts = [titles.model(job.request.model)]
    if job.seconds is not None:
        facts.append(duration(job.seconds))
    if job.report is not None and job.report.stages:
        facts.append(peak(job.report))
    facts.append(f"seed {job.request.seed}")
    return (
        f'<li><button type="button" data-job="{escape(job.id)}" aria-pressed="{"true" if selected else "false"}">'
        f'<span class="pr-prompt">{escape(job.request.prompt[:160])}</span>'
        f'<span class="pr-tag pr-{job.status}">{STATUSES[job.status]}</span>'
        f'<span class="pr-quiet">{escape(" · ".join(facts))}</span>'
        f'<time class="pr-quiet" datetime="{job.created_at.isoformat()}">{moment(job.created_at, now=now)}</time>'
        "</button></li>"
    )


def _quoted(job: Job, *, limit: int = 160) -> str:
    prompt = job.request.prompt
    return f"“{escape(prompt[:limit])}{'…' if len(prompt) > limit else ''}”"
