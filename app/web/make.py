"""The tab "Make": the form, what will happen, what happens now, what came out.

No state lives in the browser. A tab shows what the service knows of its owner: it asks twice a second while something
runs and rarely otherwise, so a reload, a second tab or another device of the same owner shows the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import gradio as gr

from app.config import LOCAL_OWNER
from app.errors import NotFound, PocketreelError, StoreError
from app.schema import Job, JobStatus
from app.web.form import Form, card_of, draft_of, form_for_card, form_for_request, form_from_browser
from app.web.owner import owner_of
from app.web.render import (
    empty_html,
    hint_html,
    preview_html,
    problem_html,
    progress_html,
    result_html,
    waiting_html,
)
from app.web.words import Titles

if TYPE_CHECKING:
    from app.jobs import JobService

BUSY_SECONDS = 0.5
IDLE_SECONDS = 4.0
"""Between two looks: while something of the owner's waits or runs, and otherwise."""

# All events take the direct way (`queue=False`): every handler returns in milliseconds, a generation never waits in
# one, and Gradio's queue routes can stay closed (guards.py). None shows in an API listing.
EVENT: dict[str, Any] = {"queue": False, "api_visibility": "private", "show_progress": "hidden"}


FormPart = gr.Dropdown | gr.Textbox | gr.Number


class Shown(NamedTuple):
    """What a browser tab shows at the moment, so that only changes are sent. Kept by the server per page load."""

    active: str | None = None
    waiting: tuple[str, ...] = ()
    result: str | None = None


@dataclass(frozen=True)
class Components:
    """What the handlers write to."""

    form: tuple[FormPart, ...]
    plan: gr.HTML
    now: gr.HTML
    waiting: gr.HTML
    result: gr.HTML
    generate: gr.Button
    cancel: gr.Button
    again: gr.Button
    timer: gr.Timer
    shown: gr.State
    saved: gr.BrowserState

    @property
    def watch(self) -> list[Any]:
        """What one look at the service may change, in the order of `MakeTab.look`."""
        return [self.now, self.waiting, self.result, self.cancel, self.again, self.timer, self.shown]


class MakeTab:
    """Handlers of the tab. `build` draws it and binds them."""

    def __init__(self, service: JobService) -> None:
        self._service = service
        self._catalogue = service.catalogue
        self.titles = Titles(
            models={card_id: card.title for card_id, card in service.catalogue.models.items()},
            presets={preset_id: preset.title for preset_id, preset in service.catalogue.hardware.items()},
        )

    # ------------------------------------------------------------------------------------------------ drawing

    def build(self) -> Components:
        """Draw the tab inside the current `gr.Tab`."""
        first = form_for_card(next(iter(self._catalogue.models.values())))
        with gr.Row(elem_classes="pr-columns"):
            with gr.Column(scale=2, min_width=300, elem_classes="pr-form"):
                form = self._form(first)
                with gr.Row(elem_classes="pr-buttons"):
                    # enabled by `load`: until then the form may still be filled under the person's hands
                    generate = gr.Button("Generate", variant="primary", elem_id="generate", interactive=False)
                    cancel = gr.Button("Cancel", variant="stop", visible=False, elem_id="cancel")
                plan = html_part(hint_html(self._catalogue.models[first.model]), elem_id="plan")
            with gr.Column(scale=3, min_width=300, elem_id="now-column"):
                now = html_part("", elem_id="now")
                waiting = html_part("", elem_id="waiting", js_on_load=picks())
                result = html_part(empty_html(), elem_id="result", js_on_load=picks())
                again = gr.Button("Use these settings again", size="sm", visible=False, elem_id="again")
        parts = Components(
            form, plan, now, waiting, result, generate, cancel, again,
            timer=gr.Timer(IDLE_SECONDS),
            shown=gr.State(Shown()),
            saved=gr.BrowserState(None, storage_key="pocketreel-form", secret="pocketreel"),  # noqa: S106 - hides nothing
        )  # fmt: skip
        self._bind(parts)
        return parts

    def _form(self, first: Form) -> tuple[FormPart, ...]:
        models = [(card.title, card.id) for card in self._catalogue.models.values()]
        presets = [(preset.title, preset.id) for preset in self._catalogue.hardware.values()]
        prompt = gr.Textbox(
            label="Prompt",
            placeholder="a red ball bouncing on a blue background",
            lines=3,
            max_lines=8,
            elem_id="prompt",
        )
        with gr.Row():
            model = gr.Dropdown(models, value=first.model, label="Model", elem_id="model", min_width=140)
            preset = gr.Dropdown(presets, value=first.preset, label="Hardware", elem_id="preset", min_width=140)
        with gr.Row():
            size = gr.Dropdown(
                self._sizes(first.model), value=first.size, label="Size (width x height, pixels)",
                allow_custom_value=True, elem_id="size", min_width=140,
            )  # fmt: skip
            seed = gr.Textbox(
                label="Seed (empty: random)", placeholder="random", elem_id="seed", min_width=140, max_lines=1
            )
        with gr.Row():
            frames = gr.Number(first.num_frames, label="Frames", elem_id="frames", min_width=100)
            fps = gr.Number(first.fps, label="Frames per second", elem_id="fps", min_width=100)
            steps = gr.Number(first.num_inference_steps, label="Steps", elem_id="steps", min_width=100)
        with gr.Accordion("More settings", open=False):
            negative = gr.Textbox(label="Leave out (negative prompt)", lines=2, elem_id="negative")
            with gr.Row():
                guidance = gr.Number(
                    first.guidance_scale,
                    label="Prompt strength (guidance)",
                    step=0.5,
                    elem_id="guidance",
                    min_width=120,
                )
                minutes = gr.Number(
                    None, label="Time limit (minutes)", placeholder="the model's", elem_id="minutes", min_width=120
                )
        return (model, preset, prompt, negative, size, frames, fps, steps, guidance, seed, minutes)

    def _sizes(self, model: str) -> list[str]:
        card = self._catalogue.models[model]
        usual = f"{card.defaults.width}x{card.defaults.height}"
        return list(dict.fromkeys([usual, *card.lattice.trained_sizes]))

    def _bind(self, parts: Components) -> None:
        form, shown, watch = list(parts.form), parts.shown, parts.watch
        model = parts.form[0]
        # by the person only (`input`), not when a handler fills the form: that would put the defaults over it
        model.input(self.choose_model, form, [*form, parts.plan, parts.saved], **EVENT)
        typed: list[Callable[..., Any]] = [part.input for part in parts.form[1:]]
        typed += [part.blur for part in parts.form[1:]]  # a list that is typed into tells its value only then
        # `always_last`: while one preview is on its way, of all further keystrokes only the last is asked for
        gr.on(typed, self.preview, form, [parts.plan, parts.saved], trigger_mode="always_last", **EVENT)
        parts.generate.click(self.generate, [shown, *form], [parts.plan, *watch], **EVENT)
        parts.cancel.click(self.cancel, [shown], watch, **EVENT)
        parts.waiting.select(self.cancel_waiting, [shown], watch, **EVENT)
        parts.result.select(self.resume, [shown], watch, **EVENT)
        parts.again.click(self.use_again, [shown], [*form, parts.plan, parts.saved], **EVENT)
        parts.timer.tick(self.look, [shown], watch, **EVENT)

    # ------------------------------------------------------------------------------------------------ handlers

    def load(self, request: gr.Request, saved: Any) -> tuple[Any, ...]:
        """A page was opened: the form as it was left, and whatever the owner has running."""
        form = form_from_browser(saved, self._catalogue)
        if form is None and (jobs := self._service.list(owner=owner_of(request), limit=1)):
            # the seed belongs to that video; a new one should not be its twin unless asked for
            form = form_for_request(jobs[0].request, self._catalogue)._replace(seed="")
        skips = [gr.skip()] * (len(Form._fields) + 1)
        filled = (*self.fill(form), self._plan(form)) if form else skips
        return (*filled, gr.Button(interactive=True), *self.look(request, Shown()))

    def fill(self, form: Form) -> tuple[Any, ...]:
        """Updates that put `form` into the components."""
        values = list(form)
        values[4] = gr.Dropdown(choices=self._sizes(form.model), value=form.size)
        return tuple(values)

    def choose_model(self, *values: Any) -> tuple[Any, ...]:
        """Another model: its defaults."""
        form = Form(*values)
        card = card_of(form, self._catalogue)
        if card is None:
            raise gr.Error("Choose a model from the list.", print_exception=False)
        form = form_for_card(card, form=form)
        return (*self.fill(form), self._plan(form), form._asdict())

    def preview(self, *values: Any) -> tuple[str, dict[str, Any]]:
        """What will happen, after each change."""
        form = Form(*values)
        return self._plan(form), form._asdict()

    def generate(self, request: gr.Request, shown: Any, *values: Any) -> tuple[Any, ...]:
        """Queue the job; returns at once."""
        form = Form(*values)
        try:
            self._service.submit(draft_of(form, self._catalogue), owner=owner_of(request))
        except PocketreelError as error:
            return (problem_html(str(error)), *self.look(request, shown))
        return (self._plan(form), *self.look(request, shown))

    def cancel(self, request: gr.Request, shown: Any) -> tuple[Any, ...]:
        """End the job that this tab shows as running."""
        return self._cancel(request, shown, _shown(shown).active)

    def cancel_waiting(self, request: gr.Request, shown: Any, event: gr.EventData) -> tuple[Any, ...]:
        """End one of the waiting jobs."""
        return self._cancel(request, shown, picked(event))

    def resume(self, request: gr.Request, shown: Any, event: gr.EventData) -> tuple[Any, ...]:
        """Take up again a job that failed."""
        self.resume_job(picked(event), owner_of(request))
        return self.look(request, shown)

    def resume_job(self, job_id: str | None, owner: str) -> None:
        """Raises gr.Error with words for the person."""
        try:
            self._service.resume(job_id or "", owner=owner)
        except PocketreelError as error:
            words = str(error)
            if owner != LOCAL_OWNER:  # where things lie here is nobody else's matter
                words = words.replace(str(self._service.settings.data_dir), "the data folder")
            raise gr.Error(escape(words), print_exception=False) from None

    def _cancel(self, request: gr.Request, shown: Any, job_id: str | None) -> tuple[Any, ...]:
        if job_id is not None:
            try:
                self._service.cancel(job_id, owner=owner_of(request))
            except NotFound as error:
                raise gr.Error(str(error), print_exception=False) from None
        return self.look(request, shown)

    def use_again(self, request: gr.Request, shown: Any) -> tuple[Any, ...]:
        """The settings of the shown video, into the form."""
        result = _shown(shown).result
        return self.form_of_job(request, result.partition(":")[0] if result else None)

    def form_of_job(self, request: gr.Request, job_id: str | None) -> tuple[Any, ...]:
        """Updates for form, plan and the browser's copy of the form."""
        try:
            job = self._service.get(job_id or "", owner=owner_of(request))
        except NotFound as error:
            raise gr.Error(str(error), print_exception=False) from None
        if job.request.model not in self._catalogue.models:
            gr.Warning("The model of that video is not in the list, so another one is chosen. The rest is as it was.")
        form = form_for_request(job.request, self._catalogue)
        return (*self.fill(form), self._plan(form), form._asdict())

    def look(self, request: gr.Request, shown: Any) -> tuple[Any, ...]:
        """Ask the service once; updates for what has changed since `shown` (in the order of `Components.watch`)."""
        before, owner = _shown(shown), owner_of(request)
        try:
            active, waiting, ended = self._of_owner(owner)
        except StoreError as error:  # a full or vanished disk: told in place, and looked at again
            return (problem_html(str(error)), *[gr.skip()] * 6)
        after = Shown(
            active=active.id if active else None,
            waiting=tuple(job.id for job in waiting),
            result=f"{ended.id}:{ended.status}" if ended else None,
        )
        fresh = shown is None or before == Shown()
        skip = gr.skip()
        now: Any = skip
        if active is not None:
            progress = self._service.progress(active.id)
            now = progress_html(active, progress, self._service.queue_position(active.id))
        elif before.active or fresh:
            now = ""
        result: Any = skip
        if ended is not None and after.result != before.result:
            result = self.show(ended, owner)
        elif ended is None and before.result is not None:  # the only one is being resumed
            result = empty_html()
        changed_activity = (before.active is None) != (active is None) or fresh
        return (
            now,
            waiting_html(waiting) if after.waiting != before.waiting else skip,
            result,
            gr.Button(visible=active is not None) if changed_activity else skip,
            gr.Button(visible=True) if ended is not None and before.result is None else skip,
            gr.Timer(BUSY_SECONDS if active is not None else IDLE_SECONDS) if changed_activity else skip,
            after if after != before else skip,
        )

    def show(self, job: Job, owner: str) -> str:
        """The result of a job as HTML."""
        return result_html(job, titles=self.titles, local=owner == LOCAL_OWNER)

    def _of_owner(self, owner: str) -> tuple[Job | None, list[Job], Job | None]:
        """The job that runs or is next, those that wait after it, and the newest one that has ended."""
        for limit in (12, 500):  # the usual look reads few rows; only a queue longer than that needs more
            jobs = self._service.list(owner=owner, limit=limit)
            ended = next((job for job in jobs if job.status.final), None)
            if ended is not None or len(jobs) < limit:
                break
        unfinished = [job for job in reversed(jobs) if not job.status.final]
        unfinished.sort(key=lambda job: job.status is not JobStatus.RUNNING)  # stable: then in the order they came
        return (unfinished[0] if unfinished else None), unfinished[1:], ended

    def _plan(self, form: Form) -> str:
        card = card_of(form, self._catalogue)
        if card is not None and form.prompt in (None, ""):
            return hint_html(card)
        try:
            return preview_html(self._service.preview(draft_of(form, self._catalogue)))
        except PocketreelError as error:
            return problem_html(str(error))


def picked(event: gr.EventData) -> str | None:
    """The job id that a click inside one of our HTML parts carries; any browser can send anything here."""
    job_id = (event._data or {}).get("job") if isinstance(event._data, dict) else None
    return job_id if isinstance(job_id, str) and len(job_id) <= 64 else None


def _shown(value: Any) -> Shown:
    """The session's state; a server that was restarted under an open page has none."""
    return value if isinstance(value, Shown) else Shown()


def picks() -> str:
    """Script for an HTML part whose buttons carry `data-job`: one listener for all that will ever be drawn in it."""
    return (
        "element.addEventListener('click', (click) => {"
        "const button = click.target.closest('button[data-job]');"
        "if (button) trigger('select', {job: button.dataset.job});"
        "});"
    )


def html_part(value: str, *, elem_id: str, js_on_load: str | None = None) -> gr.HTML:
    """HTML of ours, styled by style.css alone."""
    return gr.HTML(value, elem_id=elem_id, apply_default_css=False, js_on_load=js_on_load)
