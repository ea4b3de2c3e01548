"""Programs with methods that yield; workers import this module."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trio_accel.programs import Array, is_cancelled, method, report_progress


def squares(count: int) -> Iterator[int]:
    for number in range(count):
        yield number * number


class Streams:
    """Notes what became of its generators."""

    def __init__(self, rows: Array) -> None:
        self.rows = rows
        self.ended: list[str] = []
        self.made = 0

    def count(self, stop: int) -> Iterator[int]:
        for number in range(stop):
            self.made += 1
            yield number

    def everything(self) -> Iterator[Any]:
        yield from (None, 1, 2.5, "text" * 300, b"\xff", [1, {"two": (3, 4)}])

    def scaled(self, x: Array, factors: Sequence[float]) -> Iterator[npt.NDArray[Any]]:
        for factor in factors:
            yield x * factor

    def shapes(self) -> Iterator[npt.NDArray[Any]]:
        for length in (1, 3, 3, 3, 0, 2):
            yield np.full(length, float(length))

    def first_of(self, x: Array) -> Generator[float, None, None]:
        """Its argument is also read between items."""
        for index in range(len(x)):
            yield float(x[index])

    def takes(self, x: Any) -> Iterator[list[int]]:
        """Other libraries take the array between items as before."""
        for _ in range(3):
            assert hasattr(x, "__cuda_array_interface__") or x.__array_interface__["data"][0]
            yield list(x.shape)

    def nothing(self) -> Iterator[int]:
        yield from ()

    @method(refuses=(KeyError,))
    def refuses_third(self) -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("the third")

    def fails_at_third(self) -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("the third")

    def stranger(self) -> Iterator[Any]:
        yield 1
        yield object()

    def noting(self, name: str) -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            self.ended.append(name)

    def goes_on(self) -> Iterator[int]:
        """It ignores that it is closed."""
        while True:
            with suppress(GeneratorExit):
                yield 1

    def fails_at_its_end(self) -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            raise RuntimeError("at its end")

    def until_left(self, pipe: str) -> Iterator[int]:
        yield 1
        Path(pipe).write_text("begun")
        pause = threading.Event()
        for _ in range(5000):
            if is_cancelled():
                break
            pause.wait(0.002)
        self.ended.append("left" if is_cancelled() else "late")
        yield 2

    def slow(self) -> Iterator[int]:
        try:
            yield 1
            # clock: the time that this work takes decides nothing
            time.sleep(1.5)
            yield 2
        finally:
            self.ended.append("slow")

    def progress(self) -> Iterator[int]:
        for number in range(3):
            report_progress(number)
            yield number

    @method(resumes=True)
    def resumed(self, stop: int, resume: Sequence[int] = ()) -> Iterator[int]:
        """Each item depends on the items before, as in a text."""
        items = list(resume)
        for _ in range(len(resume), stop):
            items.append((3 * sum(items) + len(items)) % 101)
            yield items[-1]

    @method(resumes="count", prefetch=4)
    def resumed_at(self, x: Array, stop: int, resume: int = 0) -> Iterator[npt.NDArray[Any]]:
        for number in range(resume, stop):
            yield x + number

    @method(updates=["self.rows"], idempotent=True, resumes="count")
    def fill(self, value: float, resume: int = 0) -> Iterator[int]:
        for row in range(resume, len(self.rows)):
            self.rows[row] = value + row
            yield row

    @method(updates=["self.rows"])
    def add(self, value: float) -> Iterator[int]:
        for row in range(len(self.rows)):
            self.rows[row] += value
            yield row

    @method(updates=["self.rows"], idempotent=True, refuses=(ValueError,))
    def fill_some(self, values: Array) -> None:
        for row, value in enumerate(values):
            if value < 0:
                raise ValueError("a negative value")
            self.rows[row] = value

    def writes_undeclared(self) -> Iterator[int]:
        yield 1
        self.rows[0] = 1.0
        yield 2

    def seen(self) -> tuple[int, list[str]]:
        return self.made, self.ended


class Declared:
    @method(out=lambda: ((1,), "float64"))
    def generate(self) -> Iterator[int]:
        yield 1


class WithoutResume:
    @method(resumes=True)
    def generate(self) -> Iterator[int]:
        yield 1


class Plain:
    @method(resumes=True)
    def generate(self, resume: Sequence[int] = ()) -> int:
        return len(resume)


def sum_slowly(x: Array, note: str) -> float:
    """Report its beginning, and take half a second."""
    Path(note).touch()
    threading.Event().wait(0.5)
    return float(x.sum())
