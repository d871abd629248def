"""Train the built-in model from nothing: ``python -m app.demo.train --out DIR [--work DIR] [--threads N]``.

Stages: tokenizers; text encoders on captions; the autoencoder's decoder and, at the same time in a second process,
the transformer; then the folder is written and measured.  Every stage keeps a checkpoint in the work folder and goes
on from it when the program is started again after a kill, or after ``--time-limit`` has stopped it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from app.demo.card import write_card
from app.demo.evaluate import evaluate, table
from app.demo.folder import SETTINGS, load_folder, save_folder
from app.demo.limit import end_with_parent, run_limited
from app.demo.stages import seconds_spent
from app.demo.text import train_text
from app.demo.tokenizers import build_tokenizers
from app.demo.transformer import averaged_transformer, caption_cache, fine, rough, train_transformer
from app.demo.vae import train_decoder, with_places
from app.errors import TimedOut


class Scale(NamedTuple):
    """How much is trained and measured."""

    text_steps: int
    captions: int
    crops: int
    wholes: int
    rough_steps: int
    fine_steps: int
    prompts: int


FULL = Scale(text_steps=1800, captions=16000, crops=1800, wholes=220, rough_steps=3200, fine_steps=4000, prompts=200)
SMOKE = Scale(text_steps=12, captions=192, crops=4, wholes=1, rough_steps=6, fine_steps=4, prompts=2)
"""Everything once, at a size that only shows that it runs."""
SMOKE_SECONDS = 900.0
"""The time limit of a smoke run unless another is given; it takes about three minutes on two slow, busy cores."""
STAGES = ("text", "decoder", "transformer", "fine")


def _decoder_process(work: Path, smoke: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "app.demo.train", "--out", os.devnull, "--work", str(work), "--threads", "1"]
    command += ["--decoder-only", "--supervised", *(["--smoke"] if smoke else [])]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def _finish(child: subprocess.Popen[bytes] | None) -> None:
    if child is not None and child.wait() != 0:
        raise RuntimeError(f"training the decoder failed with exit status {child.returncode}; its messages are above")


def train(out: Path, work: Path, scale: Scale, threads: int, smoke: bool = False) -> None:
    """Run every stage that is not done yet; write the folder, its card and its measurements to out."""
    work.mkdir(parents=True, exist_ok=True)
    child = _decoder_process(work, smoke) if threads > 1 else None
    try:
        torch.set_num_threads(max(1, threads - 1))
        tokenizers = work / "tokenizers"
        if not (tokenizers / "tokenizer_2" / "tokenizer.json").exists():
            build_tokenizers(tokenizers)
        encoders, accuracy = train_text(tokenizers, work / "text.pt", scale.text_steps)
        print(
            "text encoders, held-out captions:", {key: round(value, 3) for key, value in accuracy.items()}, flush=True
        )
        cache = caption_cache(work / "captions.pt", encoders, scale.captions)

        def more_threads() -> None:
            # The decoder's core is free once it is done.
            if child is not None and child.poll() == 0:
                torch.set_num_threads(threads)

        first = work / "transformer.pt"
        train_transformer(first, cache, rough(scale.rough_steps), more_threads)
        train_transformer(work / "fine.pt", cache, fine(scale.fine_steps), more_threads, start=first)
        _finish(child)
    finally:
        if child is not None and child.poll() is None:
            child.terminate()
            child.wait()
    torch.set_num_threads(threads)
    vae = train_decoder(work / "decoder.pt", scale.crops, scale.wholes)
    save_folder(out, encoders, with_places(vae), averaged_transformer(work / "fine.pt"))
    licence = Path(__file__).parents[2] / "LICENSE"
    if licence.exists():
        shutil.copyfile(licence, out / "LICENSE")
    result = evaluate(load_folder(out), scale.prompts, SETTINGS, work / "contact-sheet.png", drawn=scale.prompts)
    result["text"] = accuracy
    result["seconds"] = {name: seconds_spent(work / f"{name}.pt") for name in STAGES}
    (work / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    write_card(out, result)
    print(table(result))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m app.demo.train", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the diffusers folder to write")
    parser.add_argument("--work", type=Path, help="checkpoints (default: OUT with .work appended)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps of everything: shows that it runs, learns nothing"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help=f"stop after this long, exit status 124; 0: no limit (default: {SMOKE_SECONDS:g} with --smoke, else 0)",
    )
    parser.add_argument("--decoder-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.supervised:  # by `run_limited`, or by the training that this is the decoder's part of
        end_with_parent()
    scale = SMOKE if options.smoke else FULL
    work = options.work or options.out.with_name(options.out.name + ".work")
    limit = options.time_limit if options.time_limit is not None else SMOKE_SECONDS if options.smoke else 0.0
    if limit > 0 and not options.supervised:
        given = sys.argv[1:] if arguments is None else arguments
        try:
            return run_limited([sys.executable, "-m", "app.demo.train", *given, "--supervised"], limit)
        except TimedOut as error:
            print(f"{error} Started again, it goes on from {work}; --time-limit sets another limit.", file=sys.stderr)
            return error.exit_code
    # torch says so on machines without a GPU driver whenever it looks for one.
    warnings.filterwarnings("ignore", message=".*CUDA.*", category=UserWarning)
    if options.decoder_only:
        torch.set_num_threads(options.threads)
        train_decoder(work / "decoder.pt", scale.crops, scale.wholes)
    else:
        train(options.out, work, scale, max(1, options.threads), options.smoke)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
