"""The measured report and the settings of a job as HTML tables. Pure, and every text is escaped."""

from __future__ import annotations

from html import escape

from app.schema import Job, Report, StageReport
from app.web.words import STAGES, Titles, device_name, duration, memory, moment, size

_NOT_COUNTED = "\u2013"


def report_html(job: Job) -> str:
    """Seconds, memory and disk per stage, with what was predicted beside what was measured."""
    report = job.report
    if report is None or not report.stages:
        return ""
    rows = "".join(_row(stage, report) for stage in report.stages)
    return (
        '<section class="pr-report"><h3>Memory and time</h3>'
        f"{_summary(report)}"
        # it scrolls sideways on a phone; with a tab stop also by keyboard
        '<div class="pr-scroll" tabindex="0" role="region" aria-label="Memory and time by stage">'
        f"<table>{_head(report)}<tbody>{rows}{_total(report)}</tbody></table></div>"
        f'<p class="pr-quiet">{_predicted(job, report)}</p></section>'
    )


def _summary(report: Report) -> str:
    allocated, reserved = report.peak_vram(), report.peak_vram(reserved=True)
    # an empty CUDA context can be seen on a device that computed nothing: zero there is still "used"
    facts = [("Time", duration(report.total_seconds)), ("Peak RAM", memory(report.peak_ram_bytes))]
    for device in sorted({*allocated, *reserved}):
        used = f"{memory(allocated.get(device, 0))} used, {memory(reserved.get(device, 0))} reserved"
        facts.append((f"Peak VRAM, {device_name(device)}", used))
    if not allocated and not reserved:
        facts.append(("VRAM", "no GPU was used"))
    facts.append(("Ran on", report.device))
    if report.attention:
        facts.append(("Attention by", report.attention))
    facts += [("Note", notice) for notice in report.notices]
    facts.append(("Model", "already loaded (warm)" if report.warm else "loaded for this video (cold)"))
    if report.output is not None:
        output = report.output
        shape = f"{size(output.width, output.height)}, {output.num_frames} frames"
        padded = ", padded to an even size" if output.padded else ""
        facts.append(("File", f"{shape}, {memory(output.size_bytes)}{padded}"))
    return facts_html(facts)


def facts_html(facts: list[tuple[str, str]]) -> str:
    """Names and values side by side."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="pr-facts">{items}</dl>'


def _gpus(report: Report) -> list[str]:
    return sorted({*report.peak_vram(), *report.peak_vram(reserved=True)})


def _head(report: Report) -> str:
    names = ["Stage", "Time", "Peak RAM"]
    for device in _gpus(report):
        names += [f"VRAM used, {device}", f"VRAM reserved, {device}"]
    names += ["Disk read", "Disk written"]
    return "<thead><tr>" + "".join(f'<th scope="col">{escape(name)}</th>' for name in names) + "</tr></thead>"


def _row(stage: StageReport, report: Report) -> str:
    cells = [duration(stage.seconds), memory(stage.peak_ram_bytes)]
    for device in _gpus(report):
        by_kind = (stage.peak_vram_allocated_bytes, stage.peak_vram_reserved_bytes)
        cells += [memory(peaks[device]) if device in peaks else _NOT_COUNTED for peaks in by_kind]
    cells += [memory(n) if n is not None else _NOT_COUNTED for n in (stage.read_bytes, stage.written_bytes)]
    return f'<tr><th scope="row">{STAGES[stage.stage]}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _total(report: Report) -> str:
    cells = [duration(report.total_seconds), memory(report.peak_ram_bytes)]
    allocated, reserved = report.peak_vram(), report.peak_vram(reserved=True)
    for device in _gpus(report):
        cells += [memory(allocated.get(device, 0)), memory(reserved.get(device, 0))]
    for counted in ([s.read_bytes for s in report.stages], [s.written_bytes for s in report.stages]):
        known = [value for value in counted if value is not None]
        cells.append(memory(sum(known)) if known else _NOT_COUNTED)
    return '<tr class="pr-total"><th scope="row">All</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _predicted(job: Job, report: Report) -> str:
    parts = [f"RAM: {memory(job.plan.predicted_ram_bytes)} predicted, {memory(report.peak_ram_bytes)} measured"]
    measured = report.peak_vram(reserved=True)
    for device, value in job.plan.predicted_vram_bytes.items():
        parts.append(
            f"VRAM of {device_name(device)}: {memory(value)} predicted, {memory(measured.get(device, 0))} measured"
        )
    return escape(". ".join(parts)) + "."


def settings_html(job: Job, *, titles: Titles, local: bool) -> str:
    """Everything needed to make the same video again."""
    request = job.request
    rows = [
        ("Model", titles.model(request.model)),
        ("Hardware", titles.preset(request.preset)),
        ("Size", f"{size(request.width, request.height)} pixels"),
        ("Frames", f"{request.num_frames} at {request.fps} per second"),
        ("Steps", str(request.num_inference_steps)),
        ("Prompt strength", f"{request.guidance_scale:g}"),
        ("Seed", str(request.seed)),
        ("Time limit", duration(request.timeout_seconds)),
        ("Made", moment(job.created_at)),
    ]
    if request.negative_prompt:
        rows.append(("Leave out", request.negative_prompt))
    if local and job.status == "completed":
        rows.append(("File", str(job.output_path)))
    return f'<section class="pr-settings"><h3>Settings</h3>{facts_html(rows)}</section>'
