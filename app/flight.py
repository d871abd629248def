"""The flight record: all that is known of one job, as one JSON. It lies beside the video and, less its end, inside it.

    pocketreel history show ID     prints it
    pocketreel replay FILE         makes the same again, on this machine's own plan, and names what differs

It tells nothing of the person: no paths, no names of other programs.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from app import __version__
from app.errors import BadInput, NotFound
from app.mp4 import read_metadata
from app.schema import Draft, Hardware, Job, JsonObject, ModelCard, Plan, Request, Stage

SUFFIX = ".pocketreel.json"


def facts_of(card: ModelCard, hardware: Hardware) -> JsonObject:
    """What the job itself does not say: kept with it when it begins."""
    return {
        "model": card.model_dump(mode="json", include={"id", "title", "repo_id", "revision", "license", "pipeline"}),
        "hardware": hardware_of(hardware),
    }


def record(job: Job) -> JsonObject:
    """All that is known of a job, as far as it has come."""
    named = {"status", "request", "attempts", "report", "error_kind", "error", "receipt"}
    times = {"created_at", "started_at", "finished_at"}
    known = job.model_dump(mode="json", include=named | times)
    if known["report"] is not None and known["report"]["output"] is not None:
        del known["report"]["output"]["path"]
    if known["error"] is not None and job.log_path is not None:
        known["error"] = known["error"].replace(str(job.log_path), job.log_path.name)
    return {
        "pocketreel": __version__,
        "job": job.id,
        **job.facts,
        **known,
        "notices": [notice.text for notice in job.notices],
        "plan": job.plan.model_dump(mode="json", exclude={"ladder", "estimate"}),
        "predicted": predicted(job.plan),
    }


def predicted(plan: Plan) -> JsonObject:
    """Bytes and seconds by stage; empty where the plan was too coarse to say."""
    if plan.estimate is None:
        return {}
    return {
        stage.value: {
            "seconds": plan.estimate.seconds(stage),
            **{f"{memory}_bytes": plan.estimate.bytes(memory, stage) for memory in plan.estimate.memories},
        }
        for stage in Stage
    }


def hardware_of(found: Hardware) -> JsonObject:
    """The machine, without what else runs on it."""
    document = found.model_dump(
        mode="json",
        include={"system", "cpu_name", "cpu_count", "ram_total_bytes", "ram_available_bytes", "ram_limit"},
    )
    fields = {"name", "backend", "compute_capability", "total_bytes", "free_bytes", "driver"}
    document["gpus"] = [gpu.model_dump(mode="json", include=fields) for gpu in found.gpus]
    return document


def write_beside(video: Path, document: JsonObject) -> Path | None:
    """Put a record beside its video; None where that cannot be done, for the video matters more."""
    target = video.with_name(video.stem + SUFFIX)
    half = target.with_suffix(".half")
    try:
        if target.exists() and _job_of(target) is None:  # somebody else's file
            target = video.with_name(f"{video.stem}-{document['job']}{SUFFIX}")
        half.write_text(json.dumps(document, ensure_ascii=False, indent=1), "utf-8")
        half.replace(target)
    except OSError:
        with suppress(OSError):
            half.unlink(missing_ok=True)
        return None
    return target


def read_record(path: Path) -> JsonObject:
    """What a record, or the video that carries one, says.

    Raises:
        NotFound: no such file.
        BadInput: neither.
    """
    if path.suffix.lower() != ".json":
        return read_metadata(path)
    if not path.is_file():
        raise NotFound(f"There is no file {path}.")
    document = _read(path)
    if document is None:
        raise BadInput(f"{path} is no record of Pocketreel. Give an MP4 made by it, or the {SUFFIX} beside one.")
    return document


def draft_from(document: JsonObject) -> Draft:
    """The same intent, to be planned anew: every setting as it was, the seed too.

    Raises:
        BadInput: the settings are missing or of another version.
    """
    try:
        request = Request.model_validate(document["request"])
    except KeyError:
        raise BadInput("The record holds no settings.") from None
    except ValidationError as error:
        wrong = ", ".join(dict.fromkeys(str(problem["loc"][0]) for problem in error.errors()))
        raise BadInput(f"The record holds no settings that this version understands (see {wrong}).") from None
    return Draft(**request.model_dump())


def differences(document: JsonObject, job: Job) -> list[str]:
    """In words, what is not as it was when the record was made, now that the same was made again."""
    before, now = document, record(job)
    names = ("device", "dtype", "strategy", "vae_tiling")
    found = [
        *_changes("setting", before.get("request"), now["request"]),
        *_changes("plan", before.get("plan"), {name: now["plan"][name] for name in names}),
        *_changes("machine", _machine(before), _machine(now)),
        *_changes("version", _versions(before), _versions(now)),
    ]
    frames = [((one.get("report") or {}).get("output") or {}).get("frames_sha256") for one in (before, now)]
    if all(frames) and frames[0] != frames[1]:
        found.append("frames: they are not the same, bit for bit")
    return found


def _machine(document: JsonObject) -> JsonObject:
    found = document.get("hardware") or {}
    known = {name: found[name] for name in ("system", "cpu_name", "cpu_count") if name in found}
    return {**known, "gpus": ", ".join(gpu["name"] for gpu in found["gpus"]) or "none"} if "gpus" in found else known


def _versions(document: JsonObject) -> JsonObject:
    report = document.get("report") or {}
    return {"pocketreel": document.get("pocketreel"), **(report.get("versions") or {})}


def _changes(what: str, before: JsonObject | None, now: JsonObject) -> list[str]:
    known = before or {}
    return [
        f"{what}: {name} was {known[name]}, is {value}"
        for name, value in now.items()
        if name in known and known[name] != value
    ]


def _job_of(path: Path) -> str | None:
    document = _read(path)
    return None if document is None else str(document.get("job"))


def _read(path: Path) -> JsonObject | None:
    try:
        if path.stat().st_size > 64 * 2**20:
            return None
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and "pocketreel" in document and "request" in document else None
