"""Who may ask what: each guard is shown by a request that only this guard refuses."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.errors import ConfigError
from app.jobs import JobService
from app.schema import Draft, Job, JobStatus
from app.web import guards
from app.web.guards import Guards, HostNames
from app.web.owner import COOKIE, LOCAL_OWNER, Access, is_loopback, owner_of
from app.web.server import create_app, serve

from .conftest import ROOT, TestClient, finished

LOCAL = "http://127.0.0.1:7860"
PREDICT = "/gradio_api/run/predict"


@pytest.fixture(scope="module")
def loopback_app(service: JobService) -> FastAPI:
    return create_app(service)


@pytest.fixture(scope="module")
def lan_app(service: JobService) -> FastAPI:
    return create_app(service, host="0.0.0.0")  # noqa: S104


@pytest.fixture
def client(loopback_app: FastAPI) -> Iterator[TestClient]:
    """The whole application, bound to loopback."""
    with contextlib.closing(TestClient(loopback_app, base_url=LOCAL)) as client:
        yield client


@pytest.fixture
def lan(lan_app: FastAPI) -> Iterator[TestClient]:
    """The whole application as others on a network reach it."""
    with contextlib.closing(TestClient(lan_app, base_url=LOCAL, follow_redirects=False)) as client:
        yield client


@pytest.fixture
def video(service: JobService) -> Job:
    """A finished video of the local owner."""
    job = finished(service, service.submit(Draft(prompt="a red ball"), owner=LOCAL_OWNER))
    assert job.status is JobStatus.COMPLETED, job.error
    return job


def join(client: TestClient) -> str:
    """Become a browser with a session, as a browser does it; returns the owner."""
    client.cookies.clear()
    assert "session=ask" in client.get("/").text
    answer = client.get("/?session=ask")
    assert answer.status_code == 303
    value = answer.cookies[COOKIE]
    assert client.get(answer.headers["location"]).headers["location"] == "/"
    return "browser-" + hashlib.sha256(value.encode()).hexdigest()[:32]


# ------------------------------------------------------------------------------------------------------- host, origin


@pytest.mark.parametrize(
    "host", ["127.0.0.1:7860", "localhost", "LOCALHOST:80", "localhost.", "[::1]:7860", "127.1.2.3"]
)
def test_loopback_names_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/health", headers={"host": host}).json()["status"] == "ok"


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "localhost.evil.example", "192.168.1.5", "0.0.0.0"],  # noqa: S104
)
def test_dns_rebinding_is_refused(client: TestClient, host: str) -> None:
    for path in ("/", "/health", "/assets/x.js", "/media/x.mp4"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 421, path
        assert "does not know" in answer.text


@pytest.mark.parametrize("host", ["", "a b", "user@127.0.0.1", "127.0.0.1/../x", "[::1", "127.0.0.1:port"])
def test_malformed_hosts_are_refused(client: TestClient, host: str) -> None:
    assert client.get("/health", headers={"host": host}).status_code == 400


def test_own_names_and_addresses_on_a_network() -> None:
    names = HostNames.of("0.0.0.0", ["Reel.example"])  # noqa: S104
    assert names.allow("192.168.1.5", "192.168.1.5")
    assert not names.allow("192.168.1.6", "192.168.1.5")
    assert not names.allow("evil.example", "evil.example")  # a name is never an address
    assert names.allow("reel.example", "192.168.1.5")
    assert names.allow(socket.gethostname().lower(), "192.168.1.5")
    assert not HostNames.of("127.0.0.1").allow("192.168.1.5", "192.168.1.5")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://127.0.0.1:9999", "http://localhost:7860", "null", "http://[", ""]
)
def test_another_sites_page_cannot_act(client: TestClient, service: JobService, origin: str) -> None:
    before = len(service.list(owner=LOCAL_OWNER))
    answer = client.post(PREDICT, json=_generate(client), headers={"origin": origin})
    assert answer.status_code == 403
    assert len(service.list(owner=LOCAL_OWNER)) == before


def test_own_page_can_act(client: TestClient, service: JobService) -> None:
    before = len(service.list(owner=LOCAL_OWNER))
    answer = client.post(PREDICT, json=_generate(client), headers={"origin": LOCAL})
    assert answer.status_code == 200, answer.text
    assert len(service.list(owner=LOCAL_OWNER)) == before + 1


def test_a_foreign_post_without_origin_is_told_by_fetch_metadata(client: TestClient) -> None:
    answer = client.post(PREDICT, json=_generate(client), headers={"sec-fetch-site": "cross-site"})
    assert answer.status_code == 403


def test_websockets_pass_the_same_checks() -> None:
    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(owner_of(socket))
        await socket.close()

    inner = Starlette(routes=[WebSocketRoute("/", echo)])
    client = TestClient(Guards(inner, access=Access(shared=False), hosts=HostNames.of("127.0.0.1")), base_url=LOCAL)
    for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/", headers=headers):
            pass
    with client.websocket_connect("/", headers={"host": "127.0.0.1:7860", "origin": LOCAL}) as accepted:
        assert accepted.receive_text() == LOCAL_OWNER


def _generate(client: TestClient) -> dict[str, Any]:
    """The request that a click on Generate sends, built from the page's own configuration."""
    page = client.get("/").text
    config = json.loads(page.split("window.gradio_config = ", 1)[1].split(";</script>", 1)[0])
    by_id = {component["id"]: component for component in config["components"]}
    button = next(c["id"] for c in config["components"] if c["props"].get("elem_id") == "generate")
    event = next(d for d in config["dependencies"] if [button, "click"] in [list(t) for t in d["targets"]])
    values = [by_id[part]["props"].get("value") for part in event["inputs"]]
    values = [None, *values[1:]]
    values[3] = "a red ball"
    return {"data": values, "fn_index": event["id"], "trigger_id": button, "session_hash": "abc"}


# ------------------------------------------------------------------------------------------------------- body, routes


def test_big_bodies_are_refused(client: TestClient) -> None:
    body = {**_generate(client), "data": ["x" * guards.MAX_BODY_BYTES]}
    assert client.post(PREDICT, json=body).status_code == 413


def test_bodies_of_unknown_length_are_refused(client: TestClient) -> None:
    assert client.post(PREDICT, content=iter([b"{}"])).status_code == 411


def test_gradio_reads_no_files(client: TestClient, service: JobService, video: Job) -> None:
    logs = next(service.settings.logs.iterdir())
    secrets = [Path("/etc/passwd"), service.settings.database, video.output_path, logs, ROOT / "pyproject.toml"]
    for path in secrets:
        assert path.exists()
        for route in ("/gradio_api/file=", "/file=", "/gradio_api/file/", "/gradio_api//file=", "/GRADIO_API/file="):
            answer = client.get(f"{route}{path}")
            assert answer.status_code == 404, (route, path)
            assert answer.text == "Not found."


def test_gradio_itself_would_refuse_the_data_folder(client: TestClient) -> None:
    """Behind the closed routes Gradio's own check stands too, in case one of them is ever opened."""
    from gradio.routes import App

    blocks = next(r.app for r in client.app.routes if isinstance(getattr(r, "app", None), App)).get_blocks()
    assert blocks.allowed_paths == []
    assert len(blocks.blocked_paths) == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/gradio_api/upload"),
        ("POST", "/gradio_api/queue/join"),
        ("GET", "/gradio_api/queue/data?session_hash=abc"),
        ("POST", "/gradio_api/component_server"),
        ("POST", "/gradio_api/process_recording"),
        ("GET", "/gradio_api/proxy=https://x.hf.space/"),
        ("GET", "/gradio_api/info"),
        ("GET", "/gradio_api/runs"),
        ("POST", "/gradio_api/vibe-edit"),
        ("GET", "/monitoring"),
        ("GET", "/config"),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "/static/../routes.py"),
        ("GET", "/assets/../../../routes.py"),
        ("GET", "/static/js/%2e%2e/%2e%2e/index.html"),
        ("DELETE", "/"),
        ("OPTIONS", "/"),
        ("POST", "/media/x.mp4"),
    ],
)
def test_other_routes_do_not_exist(client: TestClient, method: str, path: str) -> None:
    assert client.request(method, path).status_code == 404


def test_safe_headers_on_everything(client: TestClient) -> None:
    for path in ("/", "/health", "/nowhere", "/media/none.mp4"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["referrer-policy"] == "same-origin"
        assert headers["cross-origin-resource-policy"] == "same-origin"


def test_page_names_no_other_host(client: TestClient) -> None:
    theme = client.get("/theme.css").text
    assert set(re.findall(r"https?://[^/\"' ]+", theme)) <= {"http://www.w3.org"}  # a namespace in an inline SVG
    assert "googleapis" not in client.get("/").text


def test_health(client: TestClient) -> None:
    assert set(client.get("/health").json()) == {"status", "version"}


# ------------------------------------------------------------------------------------------------------------- owners


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),  # noqa: S104
        ("192.168.1.2", False),
        ("::", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_session_cookie(lan: TestClient) -> None:
    cookie = lan.get("/?session=ask").headers["set-cookie"]
    value = cookie.split(";")[0].split("=")[1]
    assert len(bytes.fromhex(value)) * 8 == 128
    for flag in ("HttpOnly", "SameSite=Strict", "Path=/"):
        assert flag in cookie
    lan.cookies.clear()
    assert value != lan.get("/?session=ask").headers["set-cookie"].split(";")[0].split("=")[1]


def test_a_link_from_another_site_does_not_cost_the_session(lan: TestClient) -> None:
    """A Strict cookie is absent on such a visit; the first answer must not replace it."""
    answer = lan.get("/")
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers
    assert "/?session=ask" in answer.text


def test_a_browser_without_cookies_is_told(lan: TestClient) -> None:
    answer = lan.get("/?session=set")
    assert answer.status_code == 403
    assert "cookie" in answer.text


def test_no_session_no_answer(lan: TestClient, video: Job) -> None:
    assert lan.get(f"/media/{video.id}.mp4").status_code == 401
    assert lan.post(PREDICT, json={"data": [], "fn_index": 0, "session_hash": "abc"}).status_code == 401
    lan.cookies.set(COOKIE, "short")
    assert lan.get(f"/media/{video.id}.mp4").status_code == 401


def test_owner_is_a_hash_of_the_cookie(lan: TestClient, service: JobService) -> None:
    owner = join(lan)
    assert lan.post(PREDICT, json=_generate(lan)).status_code == 200
    (job,) = service.list(owner=owner)
    assert lan.cookies[COOKIE] not in job.model_dump_json()


def test_local_is_nobodys_cookie(service: JobService) -> None:
    access = Access(shared=True)
    scope = {"type": "http", "headers": [(b"cookie", f"{COOKIE}=local".encode())]}
    assert access.find(HTTPConnection(scope)) is None


def test_a_request_past_the_guards_has_no_owner() -> None:
    with pytest.raises(PermissionError):
        owner_of(HTTPConnection({"type": "http", "headers": []}))


def test_owner_cannot_be_set_from_outside() -> None:
    async def who(request: Request) -> PlainTextResponse:
        return PlainTextResponse(owner_of(request))

    inner = Starlette(routes=[Route("/", who)])
    client = TestClient(Guards(inner, access=Access(shared=False), hosts=HostNames.of("127.0.0.1")), base_url=LOCAL)
    assert client.get("/", headers={"pocketreel.owner": "x", "x-forwarded-user": "x"}).text == LOCAL_OWNER


# -------------------------------------------------------------------------------------------------------------- media


def test_media_is_served_with_ranges(client: TestClient, video: Job) -> None:
    whole = client.get(f"/media/{video.id}.mp4")
    assert whole.status_code == 200
    assert whole.headers["content-type"] == "video/mp4"
    assert whole.content == video.output_path.read_bytes()
    part = client.get(f"/media/{video.id}.mp4", headers={"range": "bytes=100-199"})
    assert part.status_code == 206
    assert part.content == whole.content[100:200]
    assert part.headers["content-range"] == f"bytes 100-199/{len(whole.content)}"
    assert client.head(f"/media/{video.id}.mp4").headers["content-length"] == str(len(whole.content))


def test_media_download_has_a_name(client: TestClient, video: Job) -> None:
    disposition = client.get(f"/media/{video.id}.mp4?download=1").headers["content-disposition"]
    assert disposition == f'attachment; filename="a-red-ball-{video.request.seed}.mp4"'


def test_media_of_another_owner_does_not_exist(lan: TestClient, service: JobService, video: Job) -> None:
    join(lan)
    refused, unknown = lan.get(f"/media/{video.id}.mp4"), lan.get("/media/261130-000000-ffffff.mp4")
    assert refused.status_code == unknown.status_code == 404
    assert refused.text == unknown.text
    assert str(service.settings.data_dir) not in refused.text


def test_media_of_an_unfinished_job(client: TestClient, service: JobService) -> None:
    job = service.submit(Draft(prompt="fail"), owner=LOCAL_OWNER)
    finished(service, job)
    job.output_path.write_bytes(b"not from this job")
    answer = client.get(f"/media/{job.id}.mp4")
    assert answer.status_code == 404
    assert "failed" in answer.text


def test_a_deleted_file_is_told(client: TestClient, video: Job) -> None:
    video.output_path.unlink()
    answer = client.get(f"/media/{video.id}.mp4")
    assert answer.status_code == 404
    assert answer.text == f"The file was moved or deleted: {video.output_path}"


def test_a_deleted_file_is_told_without_its_path_to_others(lan: TestClient, service: JobService) -> None:
    job = finished(service, service.submit(Draft(prompt="a red ball"), owner=join(lan)))
    assert lan.get(f"/media/{job.id}.mp4").status_code == 200
    job.output_path.unlink()
    assert lan.get(f"/media/{job.id}.mp4").text == "The file was moved or deleted."


def test_a_replaced_file_is_not_passed_off_as_this_video(client: TestClient, video: Job) -> None:
    video.output_path.write_bytes(b"another video")
    assert "replaced" in client.get(f"/media/{video.id}.mp4").text
    video.output_path.unlink()
    video.output_path.mkdir()
    assert client.get(f"/media/{video.id}.mp4").status_code == 404


# -------------------------------------------------------------------------------------------------------------- serve


class Closable:
    """What `serve` needs of a service before it has an address."""

    closed = False

    def close(self) -> None:
        self.closed = True


def test_a_busy_port_says_what_to_do() -> None:
    service = Closable()
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Port {port} is already in use.*--port"):
            serve(service, host="127.0.0.1", port=port, open_browser=False)  # type: ignore[arg-type]
    assert service.closed


def test_a_host_of_another_machine() -> None:
    with pytest.raises(ConfigError, match=r"not an address of this machine.*--host"):
        serve(Closable(), host="192.0.2.1", port=0, open_browser=False)  # type: ignore[arg-type]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to send")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    code = """
        from app.config import load_settings
        from app.jobs import JobService
        from app.web.server import serve
        service = JobService(load_settings())
        serve(service, host="127.0.0.1", port=0, open_browser=False)
        print("closed", service._closing)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split()[3]
        # an open page: its heartbeat stream must not hold the end up
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as page:
            host = url.removeprefix("http://")
            page.sendall(f"GET /gradio_api/heartbeat/abc HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert b"200 OK" in page.recv(1000)
            process.send_signal(number)
            out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out == "closed True\n"
    assert err == ""


def test_importing_the_page_is_light_and_turns_analytics_off() -> None:
    code = """
        import os, sys, app.web.server
        print(sorted({"torch", "diffusers", "transformers"} & set(sys.modules)))
        print(os.environ["GRADIO_ANALYTICS_ENABLED"])
    """
    environment = {**os.environ, "GRADIO_ANALYTICS_ENABLED": "True"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n") == ["[]", "False", ""]
