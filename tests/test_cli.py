"""The command line as a person or a script uses it: in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.mp4 import read_metadata

ROOT = Path(__file__).resolve().parent.parent
QUICK = ["--frames", "5", "--steps", "4", "--size", "64x64", "--seed", "1"]


def run(*arguments: str, cwd: Path = ROOT, **more: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "app", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, **more)


def test_generate_for_people_and_history(tmp_path: Path) -> None:
    ran = run("generate", "a red ball", "-o", str(tmp_path / "ein Clip é.mp4"), *QUICK)
    assert ran.returncode == 0, ran.stderr
    assert "Done:" in ran.stdout
    assert "peak RAM" in ran.stdout
    assert "no GPU was used" in ran.stdout
    assert "seed 1" in ran.stdout
    assert (tmp_path / "ein Clip é.mp4").stat().st_size > 500
    listed = run("history")
    assert "a red ball" in listed.stdout
    assert "completed" in listed.stdout
    said = run("history", "--from", str(tmp_path / "ein Clip é.mp4"))
    assert "prompt: a red ball" in said.stdout
    assert "seed: 1" in said.stdout


def test_generate_as_json_is_one_document(tmp_path: Path) -> None:
    ran = run("generate", "a red ball", "-o", str(tmp_path / "clip.mp4"), "--frames", "6", *QUICK[2:], "--json")
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert document["status"] == "completed"
    assert document["request"]["num_frames"] == 5
    assert "num_frames" in {notice["field"] for notice in document["notices"]}
    assert document["report"]["peak_ram_bytes"] > 10**8
    assert document["report"]["output"]["path"] == str(tmp_path / "clip.mp4")
    assert "6 frames -> 5" in ran.stderr
    assert json.loads(run("history", "--json").stdout)[0]["id"] == document["id"]
    assert json.loads(run("history", "--from", str(tmp_path / "clip.mp4"), "--json").stdout)["job"] == document["id"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", ""], "prompt is empty"),
        (["generate", "x", "--size", "big"], "WIDTHxHEIGHT"),
        (["generate", "x", "--size", "0x64"], "between"),
        (["generate", "x", "--frames", "-3"], "num_frames"),
        (["generate", "x", "--steps", "0"], "num_inference_steps"),
        (["generate", "x", "--guidance", "nan"], "guidance_scale"),
        (["generate", "x", "--preset", "huge"], "no preset"),
        (["generate", "x", "--model", "biult-in"], "built-in"),
        (["generate", "x", "--model", "/nowhere/at/all"], "nowhere"),
        (["generate", "x", "-o", "clip.gif"], "mp4"),
        (["generate", "x", "--timeout", "-1"], "timeout"),
        (["generate", "x", "--frames", "many"], "--frames"),
        (["generate", "x", "--frames", "9" * 400], "num_frames"),
        (["generate", "x", "--size", "9" * 5000 + "x64"], "WIDTHxHEIGHT"),
        (["generate", "x", "-o", "x" * 300 + ".mp4"], "cannot be written"),
        (["generate", "x", "--model", "wan-2.1-i2v-14b-480p"], "start image"),
        (["history", "--from", "nothing.mp4"], "no file"),
        (["unknown-command"], "unknown-command"),
    ],
)
def test_bad_input_is_2_with_words_and_no_traceback(arguments: list[str], words: str, tmp_path: Path) -> None:
    ran = run(*arguments, cwd=tmp_path)
    assert ran.returncode == 2, ran.stderr
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr
    assert list(tmp_path.glob("*.mp4")) == []


def test_bad_input_as_json(tmp_path: Path) -> None:
    ran = run("generate", "", "--json", cwd=tmp_path)
    assert ran.returncode == 2
    assert json.loads(ran.stdout)["exit_code"] == 2


def test_existing_output_is_refused_then_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "clip.mp4"
    target.write_text("precious")
    ran = run("generate", "a red ball", "-o", str(target), *QUICK)
    assert (ran.returncode, target.read_text()) == (2, "precious")
    assert "--overwrite" in ran.stderr
    assert run("generate", "a red ball", "-o", str(target), *QUICK, "--overwrite").returncode == 0
    assert read_metadata(target)["request"]["seed"] == 1


def test_does_not_fit_is_3(data_dir: Path, tmp_path: Path) -> None:
    folder = data_dir / "presets" / "hardware"
    folder.mkdir(parents=True)
    (folder / "tiny.toml").write_text(
        'id = "tiny"\ntitle = "Tiny"\nsummary = "almost no memory"\nram_limit = "64 MiB"\n', "utf-8"
    )
    ran = run("generate", "a red ball", "--preset", "tiny", "-o", str(tmp_path / "clip.mp4"))
    assert ran.returncode == 3, ran.stderr
    assert "RAM" in ran.stderr


def test_timeout_is_124(tmp_path: Path) -> None:
    ran = run("generate", "a red ball", "-o", str(tmp_path / "clip.mp4"), "--timeout", "1", "--json")
    assert ran.returncode == 124, ran.stderr
    assert json.loads(ran.stdout)["error_kind"] == "timeout"
    assert list(tmp_path.iterdir()) == [tmp_path / "données de test"]


def _started(tmp_path: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A long `generate`, and its worker once it computes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "generate", "a red ball", "-o", str(tmp_path / "clip.mp4"), "--steps", "200"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    until = time.monotonic() + 60
    while not (children := psutil.Process(process.pid).children()):
        assert time.monotonic() < until
        time.sleep(0.05)
    # one that dies before its job is sent is replaced without a word, so it must have begun: torch alone is this large
    while children[0].memory_info().rss < 200 * 1024**2:
        assert time.monotonic() < until
        time.sleep(0.05)
    return process, children[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_cancel_by_signal_is_130_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process, worker = _started(tmp_path)
    time.sleep(0.3)
    with process:
        process.send_signal(number)
        assert process.wait(10) == 130
        assert "Canceled." in process.stderr.read()
    assert not psutil.wait_procs([worker], timeout=5)[1]
    assert list(tmp_path.iterdir()) == [tmp_path / "données de test"]


@pytest.mark.parametrize("by_itself", [False, True])
def test_a_killed_worker_is_4_and_said(tmp_path: Path, by_itself: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the setting only a second one is."""
    if by_itself:
        monkeypatch.setenv("POCKETREEL_RESUME_BY_ITSELF", "true")
    process, worker = _started(tmp_path)
    with process:
        worker.kill()
        if by_itself:
            until = time.monotonic() + 60
            while not (others := [child for child in psutil.Process(process.pid).children() if child != worker]):
                assert time.monotonic() < until
                time.sleep(0.05)
            while others[0].memory_info().rss < 200 * 1024**2:
                assert time.monotonic() < until
                time.sleep(0.05)
            others[0].kill()
        assert process.wait(30) == 4
        said = process.stderr.read()
    assert "SIGKILL" in said
    assert ("Trying again: the same again in a fresh process." in said) == by_itself
    assert ("happened twice" in said) == by_itself
    assert ".log" in said
    assert "pocketreel resume" in said


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
@pytest.mark.slow
def test_progress_is_shown_in_a_terminal(tmp_path: Path) -> None:
    import pty

    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "generate", "a red ball", "-o", str(tmp_path / "clip.mp4"), *QUICK],
        cwd=ROOT,
        stderr=side,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(side)
    seen = b""
    with process:
        while True:
            try:
                chunk = os.read(main, 65536)
            except OSError:  # the terminal closes with the process
                break
            if not chunk:
                break
            seen += chunk
    os.close(main)
    assert process.returncode == 0
    assert b"Loading the model" in seen
    assert b"Making the video" in seen


def test_probe_and_doctor() -> None:
    assert "RAM" in run("probe").stdout
    assert json.loads(run("probe", "--json").stdout)["ram_total_bytes"] > 10**9
    findings = json.loads(run("doctor", "--no-worker", "--json").stdout)
    assert all(finding["fix"] for finding in findings if finding["level"] != "ok")


def test_settings_errors_name_the_file(data_dir: Path) -> None:
    data_dir.mkdir()
    (data_dir / "config.toml").write_text("prot = 1\n")
    ran = run("probe")
    assert ran.returncode == 2
    assert "config.toml" in ran.stderr
    assert "prot" in ran.stderr


def test_a_folder_called_app_does_not_shadow_ours(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise SystemExit('the wrong app')")
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from app.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, "generate", "a red ball", "-o", str(tmp_path / "clip.mp4"), *QUICK],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_strange_prompts_do_not_break_the_history(data_dir: Path) -> None:
    from app.store import Store
    from tests import values

    store = Store(data_dir / "pocketreel.sqlite3")
    for number, prompt in enumerate([r"a \[/red] b", "[bold]x[/]", ":cat:", "\x1b[31mred", "日本 🎈"]):
        store.add(values.job(f"j{number}", request=values.request(prompt=prompt)), runner="r")
    store.close()
    ran = run("history")
    assert ran.returncode == 0, ran.stderr
    for words in (r"a \[/red] b", "[bold]x[/]", ":cat:", "日本 🎈"):
        assert words in ran.stdout
    assert "\x1b" not in ran.stdout


def test_old_code_pages_do_not_break_the_output(data_dir: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    command = [sys.executable, "-m", "app", "generate", "日本", "--model", "nöwhere", "--json"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert ran.returncode == 2, ran.stderr
    assert "nöwhere" in json.loads(ran.stdout)["error"]


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("pocketreel 0.")
    assert "generate" in run("--help").stdout


def test_what_was_predicted_and_what_came_of_it(tmp_path: Path) -> None:
    empty = json.loads(run("plan", "--accuracy", "--json").stdout)
    ran = run("generate", "a red ball", "-o", str(tmp_path / "clip.mp4"), *QUICK)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(run("plan", "--accuracy", "--json").stdout)
    assert {one["what"] for one in said[: len(said) - len(empty)]} == {"ram", "seconds"}
    assert "inside the band" in run("plan", "--accuracy").stdout
    assert any("adjusted to" in reason for reason in json.loads(run("plan", "--json").stdout)["plan"]["reasons"])
    assert "plain again" in run("plan", "--reset-calibration").stdout
    assert not any("adjusted to" in reason for reason in json.loads(run("plan", "--json").stdout)["plan"]["reasons"])


@pytest.mark.slow
def test_the_simulator_knows_cards_by_their_id() -> None:
    ran = run("simulate", "built-in", "--size", "64x64", "--frames", "5", "--vram", "2GiB", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["output_shape"] == [1, 5, 64, 64, 3]
