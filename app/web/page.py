"""The page: two tabs, a theme of system fonts, and a little script. Nothing on it is loaded from another host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import gradio as gr

from app.web.history import HistoryTab
from app.web.make import EVENT, MakeTab

if TYPE_CHECKING:
    from app.jobs import JobService

_HERE = Path(__file__).parent
STYLE = _HERE / "style.css"
_SCRIPT = _HERE / "page.js"
_FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
_MONO_FONTS = ("ui-monospace", "SFMono-Regular", "Consolas", "DejaVu Sans Mono", "monospace")


def build_page(service: JobService) -> gr.Blocks:
    """The Gradio Blocks, ready to be mounted."""
    page = gr.Blocks(title="Pocketreel", analytics_enabled=False, fill_width=True)
    with page:
        gr.HTML(_header(), apply_default_css=False, js_on_load=None)
        make = MakeTab(service)
        with gr.Tabs(selected="make") as tabs:
            with gr.Tab("Make", id="make"):
                parts = make.build()
            with gr.Tab("History", id="history") as history_tab:
                HistoryTab(service, make).build(parts, history_tab, tabs)
        page.load(make.load, [parts.saved], [*parts.form, parts.plan, parts.generate, *parts.watch], **EVENT)
    return page


def page_theme() -> gr.themes.Base:
    """Calm colours, and fonts that every system has: a web font would be a request to somebody else's server."""
    theme = gr.themes.Base(
        primary_hue="teal",
        secondary_hue="teal",
        neutral_hue="slate",
        text_size="md",
        spacing_size="sm",
        radius_size="md",
        font=_FONTS,
        font_mono=_MONO_FONTS,
    )
    # the theme's own greys and its bright button are too faint to read (WCAG asks for 4.5 to 1)
    return theme.set(
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        block_label_text_color="*neutral_700",
        block_title_text_color="*neutral_700",
        input_placeholder_color="*neutral_500",
        link_text_color="*primary_700",
        link_text_color_dark="*primary_300",
        color_accent="*primary_600",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_600",
        button_cancel_text_color="#b91c1c",
        button_cancel_text_color_dark="#fecaca",
    )


def page_script() -> str:
    """For the head of the page: the icon, and Ctrl+Enter."""
    icon = '<link rel="icon" href="/favicon.svg" type="image/svg+xml">'
    return f"{icon}<script>{_SCRIPT.read_text(encoding='utf-8')}</script>"


def _header() -> str:
    return (
        '<header class="pr-header"><img src="/favicon.svg" alt="" width="28" height="28"><h1>Pocketreel</h1>'
        "<p>Video on the computer you own</p></header>"
    )
