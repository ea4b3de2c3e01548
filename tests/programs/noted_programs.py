"""A program that notes where it is made; workers import this module."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio_accel as ta
from trio_accel.programs import Array


class Noted:
    """Notes its events by process, waits on request, and refuses on request."""

    def __init__(self, x: Array, *, folder: str) -> None:
        self.folder = Path(folder)
        self.x = x
        self.note("made")
        if (self.folder / "refuse").exists():
            raise KeyError("refused on purpose")
        if (self.folder / "hold").exists():
            # Until it has had a writer.
            (self.folder / "hold").read_bytes()
        # A bad habit of a program: its value is from the moment when it was made.
        self.first = float(x[0])

    def warm_up(self) -> None:
        self.note("warm")

    def note(self, what: str, *, append: Callable[..., int] = os.open) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = append(self.folder / what, flags)
        os.write(descriptor, b"%d\n" % os.getpid())
        os.close(descriptor)

    def sum(self) -> float:
        return float(self.x.sum())

    def told_first(self) -> float:
        return self.first

    @ta.programs.method(updates=["self.x"])
    def add(self, number: float) -> None:
        self.x += number

    def __del__(self) -> None:
        self.note("gone")


class Placed:
    """Notes where it is made, and knows the address of its array, on any backend."""

    def __init__(self, x: Any, *, folder: str) -> None:
        of_host: dict[str, Any] | None = getattr(x, "__array_interface__", None)
        interface = of_host or x.__cuda_array_interface__
        self.found = int(interface["data"][0]), tuple(interface["shape"])
        with (Path(folder) / "made").open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")

    def where(self) -> tuple[Any, ...]:
        return (os.getpid(), *self.found)
