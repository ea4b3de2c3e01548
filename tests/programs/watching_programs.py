"""Programs that look whether their caller has left, and report their actions; workers import this module."""

from __future__ import annotations

import contextvars
import os
import signal
import threading
from pathlib import Path
from typing import Any

from trio_accel.programs import Array, is_cancelled, method, report_progress


def until_left(pipe: str) -> tuple[bool, bool]:
    """Write to a pipe, and continue until the caller has left; returns the first and last observation."""
    first, pause = is_cancelled(), threading.Event()
    Path(pipe).write_text("begun")
    for _ in range(5000):
        if is_cancelled():
            break
        pause.wait(0.002)
    return first, is_cancelled()


def watches(x: Array, pipe: str, note: str) -> bool:
    """The same in a function, which notes it in a file."""
    Path(note).write_text(str(until_left(pipe)))
    return is_cancelled()


def looks(x: Array) -> bool:
    return is_cancelled()


def counts(x: Array, first: int, last: int) -> int:
    for number in range(first, last):
        report_progress(number)
    return last


class Watches:
    def __init__(self, start: Array) -> None:
        self.seen: list[tuple[bool, bool]] = []
        self.ends = threading.Event()
        self.thread: threading.Thread | None = None

    def plain(self, pipe: str) -> bool:
        self.seen.append(until_left(pipe))
        return is_cancelled()

    @method(out=lambda pipe: None)
    def declared(self, pipe: str) -> None:
        self.plain(pipe)

    @method(out=lambda pipe: None, refuses=(TimeoutError,))
    def refuses(self, pipe: str) -> None:
        self.plain(pipe)
        raise TimeoutError("nobody waits")

    def all_seen(self) -> tuple[bool, list[tuple[bool, bool]]]:
        return is_cancelled(), self.seen

    def reports(self, values: list[Any], pipe: str | None = None) -> int:
        """Report values; with a pipe, wait after each until somebody has read it."""
        for value in values:
            report_progress(value)
            if pipe is not None:
                Path(pipe).read_text()
        return len(values)

    @method(out=lambda last: None)
    def counts(self, last: int) -> None:
        for number in range(last):
            report_progress(number)

    def reports_wrongly(self, start: Array) -> list[str]:
        return [refusal(start), refusal({1: 2}), refusal("x" * (1 << 20))]

    def reports_and_waits(self, pipe: str) -> bool:
        report_progress("begun")
        return self.plain(pipe)

    def goes_on(self) -> int:
        """Have a thread continue reporting after the call."""
        self.ends.clear()
        report = contextvars.copy_context().run

        def run() -> None:
            while not self.ends.wait(0.001):
                report(report_progress, "late")

        report_progress("own")
        self.thread = threading.Thread(target=run)
        self.thread.start()
        return 7

    def stops(self) -> int:
        assert self.thread is not None
        self.ends.set()
        self.thread.join()
        return 8

    def dies_once(self, pipe: str, note: str) -> str:
        """Report, be killed at the first time once somebody has heard that, and end well at the second."""
        report_progress("first")
        Path(pipe).read_text()
        if not Path(note).exists():
            Path(note).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        report_progress("last")
        return "done"


def refusal(value: object) -> str:
    try:
        report_progress(value)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
