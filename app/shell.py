"""What all commands of the command line share: consoles, one JSON document, errors as messages and exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console

from app.errors import BadInput, GenerationCanceled, GenerationFailed, InvalidRequest, PocketreelError

out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

P = ParamSpec("P")
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout, all else to stderr.")]


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Our own errors become a message (a document with `--json`) and an exit code; anything else shows as a bug."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except PocketreelError as error:
            if kwargs.get("as_json"):
                kind = error.kind if isinstance(error, GenerationFailed) else None
                print_json({"error": str(error), "kind": kind, "exit_code": error.exit_code})
            else:
                err.print(f"[bold red]{_title(error)}[/] ", end="")
                err.print(str(error), markup=False)
            raise typer.Exit(error.exit_code) from None
        except BrokenPipeError:  # `pocketreel history | head`
            sys.stderr.close()
            raise typer.Exit(0) from None

    return run


def _title(error: PocketreelError) -> str:
    if isinstance(error, BadInput):
        return "Not started:"
    if isinstance(error, GenerationCanceled):
        return "Canceled."
    return "Does not fit:" if error.exit_code == 3 else "Failed:"


def print_json(document: Any) -> None:
    json.dump(document, sys.stdout, ensure_ascii=False, indent=2, default=str)
    sys.stdout.write("\n")
    sys.stdout.flush()


def parse_size(text: str | None) -> tuple[int | None, int | None]:
    """`768x512` -> (768, 512); None -> (None, None).

    Raises:
        InvalidRequest: it is written otherwise.
    """
    if text is None:
        return None, None
    width, x, height = text.lower().replace("*", "x").partition("x")
    if not (x and width.strip().isdecimal() and height.strip().isdecimal() and len(text) < 30):
        raise InvalidRequest(f"The size {text!r} is not WIDTHxHEIGHT, e.g. 768x512.", field="size")
    return int(width), int(height)
