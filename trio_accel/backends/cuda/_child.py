"""Runs a program of this backend in a process of its own, for what must not happen in the application."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["ChildError", "ask"]

_GRACE = 1.0
# Processes that do not even end when they are killed: one that hangs inside of the kernel's module.
_stuck: list[subprocess.Popen[bytes]] = []


class ChildError(Exception):
    """The program gave no answer; the text says how it ended, as a clause without a subject."""


def ask(program: Path, options: Sequence[str], question: object, patience: float) -> Any:
    """Run a program that reads JSON and prints JSON as its last line; blocks.

    Args:
        program: Its file.
        options: Of the interpreter.
        question: What it reads from its standard input.
        patience: Seconds that it may take.

    Raises:
        ChildError: It crashed, hung, could not be started, or printed something else.
    """
    command = [sys.executable, *options, str(program)]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)  # noqa: S603  # our own
    except OSError as error:
        raise ChildError(f"could not be started ({error})") from error
    try:
        out, err = process.communicate(json.dumps(question).encode(), timeout=patience)
    except subprocess.TimeoutExpired:
        _end(process)
        raise ChildError(f"did not answer within {patience:g} s") from None
    except BaseException:
        _end(process)
        raise
    if process.returncode:
        raise ChildError(_how_it_ended(process.returncode, err))
    try:
        return json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        raise ChildError("gave no answer") from None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    if process.returncode is None:
        _stuck.append(process)


def _how_it_ended(code: int, err: bytes) -> str:
    words = err.decode(errors="replace").strip().splitlines()
    if code > 0:
        return f"ended with code {code}" + (f" ({words[-1]})" if words else "")
    try:
        return f"crashed ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashed (signal {-code})"
