"""The tab "History": every video of the owner, newest first; one of them with its video, report and settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gradio as gr

from app.errors import NotFound
from app.web.make import EVENT, Components, MakeTab, html_part, picked, picks
from app.web.owner import owner_of
from app.web.render import history_html

if TYPE_CHECKING:
    from app.jobs import JobService

PAGE_ROWS = 30


class HistoryTab:
    """Handlers of the tab. `build` draws it and binds them."""

    def __init__(self, service: JobService, make: MakeTab) -> None:
        self._service = service
        self._make = make

    def build(self, parts: Components, tab: gr.Tab, tabs: gr.Tabs) -> None:
        """Draw inside `tab`; `parts` are the other tab's, filled by "Use these settings again"."""
        with gr.Row(elem_classes="pr-columns"):
            with gr.Column(scale=2, min_width=300):
                rows = html_part("", elem_id="history", js_on_load=picks())
                more = gr.Button("Show more", size="sm", visible=False, elem_id="more")
            with gr.Column(scale=3, min_width=300):
                detail = html_part(_choose(), elem_id="detail", js_on_load=picks())
                with gr.Row():
                    again = gr.Button("Use these settings again", size="sm", visible=False, elem_id="history-again")
                    stop = gr.Button(
                        "Cancel this video", size="sm", variant="stop", visible=False, elem_id="history-cancel"
                    )
        selected, limit = gr.State(None), gr.State(PAGE_ROWS)
        listing = [rows, more]
        chosen = [rows, more, detail, again, stop, selected]
        tab.select(self.refresh, [selected, limit], chosen, **EVENT)
        # something of the owner's began or ended: a list that is open shows it
        parts.shown.change(self.refresh, [selected, limit], chosen, **EVENT)
        rows.select(self.choose, [limit], chosen, **EVENT)
        detail.select(self.resume, [limit], chosen, **EVENT)
        more.click(self.show_more, [selected, limit], [*listing, limit], **EVENT)
        stop.click(self.stop, [selected, limit], chosen, **EVENT)
        again.click(self.use_again, [selected], [*parts.form, parts.plan, parts.saved, tabs], **EVENT)

    def refresh(self, request: gr.Request, selected: Any, limit: Any) -> tuple[Any, ...]:
        """The list, and the chosen job as it is now."""
        owner = owner_of(request)
        try:
            job = self._service.get(selected, owner=owner) if isinstance(selected, str) else None
        except NotFound:
            job = None
        listing = self._list(owner, job.id if job else None, limit)
        if job is None:
            return (*listing, _choose(), gr.Button(visible=False), gr.Button(visible=False), None)
        return (
            *listing,
            self._make.show(job, owner),
            gr.Button(visible=True),
            gr.Button(visible=not job.status.final),
            job.id,
        )

    def choose(self, request: gr.Request, limit: Any, event: gr.EventData) -> tuple[Any, ...]:
        """A line was clicked."""
        return self.refresh(request, picked(event), limit)

    def resume(self, request: gr.Request, limit: Any, event: gr.EventData) -> tuple[Any, ...]:
        """Take up again the chosen job, which failed."""
        job_id = picked(event)
        self._make.resume_job(job_id, owner_of(request))
        return self.refresh(request, job_id, limit)

    def show_more(self, request: gr.Request, selected: Any, limit: Any) -> tuple[Any, ...]:
        """A longer list."""
        longer = _rows(limit) + PAGE_ROWS
        return (*self._list(owner_of(request), selected, longer), longer)

    def stop(self, request: gr.Request, selected: Any, limit: Any) -> tuple[Any, ...]:
        """Cancel the chosen job."""
        try:
            self._service.cancel(selected if isinstance(selected, str) else "", owner=owner_of(request))
        except NotFound as error:
            raise gr.Error(str(error), print_exception=False) from None
        return self.refresh(request, selected, limit)

    def use_again(self, request: gr.Request, selected: Any) -> tuple[Any, ...]:
        """Fill the form from the chosen job and go to it."""
        filled = self._make.form_of_job(request, selected if isinstance(selected, str) else None)
        return (*filled, gr.Tabs(selected="make"))

    def _list(self, owner: str, selected: Any, limit: Any) -> tuple[Any, Any]:
        rows = _rows(limit)
        jobs = self._service.list(owner=owner, limit=rows + 1)
        shown = history_html(jobs[:rows], self._make.titles, selected=selected if isinstance(selected, str) else None)
        return shown, gr.Button(visible=len(jobs) > rows)


def _rows(limit: Any) -> int:
    return limit if isinstance(limit, int) and 0 < limit <= 100_000 else PAGE_ROWS


def _choose() -> str:
    return '<div class="pr-empty"><p class="pr-quiet">Choose a video to see it, with its report and settings.</p></div>'
