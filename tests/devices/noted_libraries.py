"""A stream strategy that notes which libraries its context opens, in this process or in a worker."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import attrs

import trio_accel as ta
from trio_accel.backends.base import AccelDevice, KernelLibrary
from trio_accel.devices import StreamSource

__all__ = ["NotedLibraries"]


@attrs.frozen
class NotedLibraries:
    """Streams as usual. The library that an engine opens for itself is not noted.

    Attributes:
        folder: Each opening adds a line to a file there when it begins: process, context, thread, library.
            When the library is open, it adds one to another file: process, library. A file
            ``refuse-<library>`` makes an opening fail, ``lose-<library>`` makes it find its context lost,
            ``exit-<library>`` makes it end its process, and a named pipe ``wait-<library>`` makes it wait
            until the writer has closed that.
    """

    folder: Path

    def open(self, device: AccelDevice) -> StreamSource:
        inner = device.open_library

        def open_library(name: str) -> KernelLibrary:
            is_loop = threading.current_thread() is threading.main_thread()
            with (self.folder / "opened").open("a", encoding="utf-8") as file:
                file.write(f"{os.getpid()} {id(inner)} {'loop' if is_loop else 'thread'} {name}\n")
            if (self.folder / f"wait-{name}").exists():
                (self.folder / f"wait-{name}").read_bytes()
            if (self.folder / f"exit-{name}").exists():
                os._exit(5)
            if (self.folder / f"lose-{name}").exists():
                raise ta.ContextPoisonedError(f"lost over {name}")
            if (self.folder / f"refuse-{name}").exists():
                raise ta.NotSupportedError(f"{name} is refused on purpose")
            library = inner(name)
            with (self.folder / "open").open("a", encoding="utf-8") as file:
                file.write(f"{os.getpid()} {name}\n")
            return library

        device.open_library = open_library  # type: ignore[method-assign]
        return ta.PerActorStreams().open(device)

    @property
    def opened(self) -> list[tuple[int, str, str]]:
        """The opened libraries: process, thread, name."""
        return [(pid, thread, name) for pid, _, thread, name in self._lines()]

    def names(self, pid: int | None = None) -> list[str]:
        """The opened libraries, in order, by all processes or by one."""
        return [name for of, _, name in self.opened if pid in (None, of)]

    def holders(self, name: str) -> set[int]:
        """The processes that opened a library and did so to the end without an error."""
        try:
            text = (self.folder / "open").read_text(encoding="utf-8")
        except FileNotFoundError:
            return set()
        return {int(pid) for pid, library in map(str.split, text.splitlines()) if library == name}

    def by_context(self) -> list[list[str]]:
        """The opened libraries of each context with any."""
        contexts: dict[tuple[int, str], list[str]] = {}
        for pid, context, _, name in self._lines():
            contexts.setdefault((pid, context), []).append(name)
        return list(contexts.values())

    def hold(self, name: str) -> Path:
        """Let the next openings of a library wait: each until the end that opens this pipe closes it."""
        pipe = self.folder / f"wait-{name}"
        os.mkfifo(pipe)
        return pipe

    def _lines(self) -> list[tuple[int, str, str, str]]:
        try:
            text = (self.folder / "opened").read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        lines = [line.split() for line in text.splitlines()]
        return [(int(pid), context, thread, name) for pid, context, thread, name in lines]
