"""A person at a browser: Debian's Chromium driven by Playwright, the real server, a real worker process.

All but the last test use the actor as worker (quick, and slow where it has to be); the last one the built-in model.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from app.config import Settings, bundled
from app.jobs import JobService
from app.schema import JobStatus
from app.web.owner import LOCAL_OWNER

from .conftest import Live, live, until

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE = "slow <script>alert(1)</script><img src=x onerror=alert(1)> ${alert(1)} {{alert(1)}} \\ ` \" '"
LONG = 60_000
"""Milliseconds to wait on a busy machine."""


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if found := shutil.which(name):
            return found
    reason = "no Chromium on this machine: apt-get install chromium"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own."""
    path = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(service: JobService) -> Iterator[Live]:
    with live(service) as site:
        yield site


class Watched:
    """A browser context that notes what should never happen."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.context = context
        self.url = url
        self.outside: list[str] = []
        self.errors: list[str] = []
        context.set_default_timeout(LONG)
        context.on("request", self._request)
        context.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        context.on("weberror", lambda error: self.errors.append(str(error.error)))
        context.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        context.on("response", lambda got: self.errors.append(f"{got.status} {got.url}") if got.status >= 400 else None)

    def _request(self, request: object) -> None:
        url = str(getattr(request, "url", ""))
        if not url.startswith((self.url, "data:", "blob:")):
            self.outside.append(url)

    def open(self) -> Page:
        page = self.context.new_page()
        page.goto(self.url)
        expect(page.get_by_role("button", name="Generate")).to_be_enabled(timeout=LONG)
        return page

    def check(self) -> None:
        assert self.outside == []
        assert self.errors == []


@pytest.fixture
def me(browser: Browser, site: Live) -> Iterator[Watched]:
    """A person at this machine."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    watched = Watched(context, site.url)
    yield watched
    context.close()
    watched.check()


def ask(page: Page, prompt: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_role("button", name="Generate").click()


def plays(page: Page, where: str = "#result") -> None:
    """The video is decoded by the browser and can be sought in."""
    video = page.locator(f"{where} video")
    expect(video).to_be_visible(timeout=LONG)
    ready = "v => new Promise(done => { const look = () => v.readyState >= 2 ? done(v.duration) : setTimeout(look, 50);"
    assert video.evaluate(f"{ready} look(); }})") > 0
    seek = "v => new Promise(done => { v.pause(); v.onseeked = () => done(v.currentTime); v.currentTime = 0.5; })"
    assert video.evaluate(seek) == 0.5


def test_from_a_prompt_to_a_video(me: Watched, service: JobService) -> None:
    page = me.open()
    page.get_by_label("Prompt", exact=True).press_sequentially("a red ball and an elephant")
    page.get_by_label("Frames", exact=True).fill("30")
    plan = page.locator("#plan")
    expect(plan).to_contain_text("does not know: elephant", timeout=LONG)
    expect(plan).to_contain_text("30 frames -> 29", timeout=LONG)
    expect(plan).to_contain_text("no GPU is used")
    page.get_by_label("Frames", exact=True).fill("-3")
    expect(plan.get_by_role("alert")).to_contain_text("Frames", timeout=LONG)
    page.get_by_label("Frames", exact=True).fill("21")
    expect(plan).to_contain_text("21 frames", timeout=LONG)
    page.keyboard.press("Control+Enter")
    plays(page)
    report = page.locator("#result .pr-report")
    for words in ("no GPU was used", "Peak RAM", "Drawing"):
        expect(report).to_contain_text(words)
    assert service.list(owner=LOCAL_OWNER)[0].request.num_frames == 21
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_be_hidden()


def test_reload_in_mid_run_and_a_second_tab(me: Watched) -> None:
    other = me.open()
    page = me.open()
    page.get_by_label("Steps", exact=True).fill("10")
    ask(page, "slow yellow star")
    now = page.locator("#now")
    expect(now).to_contain_text(re.compile(r"step [1-9] of 10 · .* left"), timeout=LONG)
    expect(other.locator("#now")).to_contain_text("slow yellow star", timeout=LONG)
    page.reload()
    expect(now).to_contain_text("slow yellow star", timeout=LONG)
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("slow yellow star")
    page.close()
    expect(other.locator("#result")).to_contain_text("slow yellow star", timeout=LONG)
    plays(other)


def test_cancel_and_the_queue(me: Watched, service: JobService) -> None:
    page = me.open()
    waiting = page.locator("#waiting li")
    # Gradio takes no second click while the first is on its way, so that a double click makes one video
    ask(page, "slow first")
    expect(page.locator("#now")).to_contain_text("slow first", timeout=LONG)
    ask(page, "slow second")
    expect(waiting).to_have_count(1, timeout=LONG)
    ask(page, "slow third")
    expect(waiting).to_have_count(2, timeout=LONG)
    expect(page.locator("#now")).to_contain_text("slow first")
    waiting.filter(has_text="slow second").get_by_role("button").click()
    expect(waiting).to_have_count(1, timeout=LONG)
    page.get_by_role("button", name="Cancel", exact=True).and_(page.locator("#cancel")).click()
    expect(page.locator("#now")).to_contain_text("slow third", timeout=LONG)
    page.locator("#cancel").click()
    expect(page.locator("#now")).not_to_contain_text("slow", timeout=LONG)
    expect(page.locator("#result")).to_contain_text("Canceled", timeout=LONG)
    jobs = until(lambda: [job for job in service.list(owner=LOCAL_OWNER, limit=3) if job.status.final])
    assert {job.status for job in jobs} == {JobStatus.CANCELED}


def test_hostile_prompts_and_history(me: Watched) -> None:
    page = me.open()
    ask(page, HOSTILE)
    expect(page.locator("#now")).to_contain_text("<script>alert(1)</script>", timeout=LONG)
    page.locator("#cancel").click()
    expect(page.locator("#result")).to_contain_text("${alert(1)} {{alert(1)}} \\ ` \" '", timeout=LONG)
    ask(page, "a green square")
    plays(page)
    page.get_by_role("tab", name="History").click()
    lines = page.locator("#history button")
    expect(lines.first).to_contain_text("a green square", timeout=LONG)
    expect(lines.nth(1)).to_contain_text("<img src=x onerror=alert(1)>")
    lines.nth(1).focus()
    page.keyboard.press("Enter")
    expect(page.locator("#detail")).to_contain_text("Canceled", timeout=LONG)
    lines.first.click()
    plays(page, "#detail")
    page.locator("#history-again").click()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("a green square", timeout=LONG)
    expect(page.get_by_label("Seed")).to_have_value(re.compile("[0-9]+"))


def test_a_failed_run_is_told(me: Watched) -> None:
    page = me.open()
    ask(page, "crash")
    expect(page.locator("#result")).to_contain_text("worker process ended", timeout=LONG)
    expect(page.locator("#result")).to_contain_text(".log")
    page.get_by_role("button", name="Resume this video").click()
    expect(page.locator("#result")).to_contain_text("Then: resumed.", timeout=LONG)
    expect(page.locator("#result")).to_contain_text("worker process ended", timeout=LONG)


def test_two_browsers_on_a_network_see_only_their_own(browser: Browser, service: JobService) -> None:
    with live(service, shared=True) as site:
        first = Watched(browser.new_context(), site.url)
        second = Watched(browser.new_context(viewport={"width": 390, "height": 844}), site.url)
        page = first.open()
        ask(page, "a purple heart")
        plays(page)
        address = page.locator("#result video").get_attribute("src")
        other = second.open()
        expect(other.locator("#result")).to_contain_text("Your video will appear here", timeout=LONG)
        expect(other.get_by_label("Prompt", exact=True)).to_have_value("")
        other.get_by_role("tab", name="History").click()
        expect(other.locator("#history")).to_contain_text("No videos yet", timeout=LONG)
        assert other.evaluate("document.documentElement.scrollWidth") <= 390
        assert first.context.request.get(f"{site.url}{address}").status == 200
        assert second.context.request.get(f"{site.url}{address}").status == 404
        (cookie,) = first.context.cookies()
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"
        assert page.evaluate("document.cookie") == ""
        for watched in (first, second):
            watched.context.close()
            watched.check()


def test_the_built_in_model(browser: Browser, tmp_path: Path) -> None:
    """Nothing played: the program as it ships makes a clip of a prompt."""
    if not list(bundled("assets", "demo").rglob("*.safetensors")):
        pytest.fail("assets/demo holds no weights")
    service = JobService(Settings(data_dir=tmp_path / "data"))
    try:
        with live(service) as site:
            watched = Watched(browser.new_context(), site.url)
            page = watched.open()
            ask(page, "a red ball bouncing on a blue background")
            expect(page.locator(".pr-now, .pr-result").first).to_be_visible(timeout=LONG)
            expect(page.locator("#result .pr-result")).to_be_visible(timeout=150_000)
            plays(page)
            expect(page.locator("#result .pr-report")).to_contain_text("no GPU was used")
            watched.context.close()
            watched.check()
    finally:
        service.close()
