"""One launcher process for the tests of a pytest process, which has imported NumPy and SciPy once.

A launcher takes as much processor time to import them as ten tests take for all the rest. So a system with an
orderly end of its launcher hands the process on to the next one: empty, and only to a system that would have
started a launcher of the same environment. A test with the marker `own_launcher` has one of its own.

The process is started and thrown away only between tests, so a test finds its own leftovers.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from trio_accel.devices.launcher._link import EndOfLink, LauncherLink

# Per test: workers get these, and forks of a launcher cannot show them.
_OF_A_TEST = ("PYTEST_CURRENT_TEST", "TRIO_ACCEL_TEST_MARK")
# Modules of other packages may be a test's own, with another content in the next one.
_INSTALLED = frozenset({"trio_accel", "cuda", "nvmath"})
_EMPTY = 2.0
_LAST = -1
# Modules next to tests are the same in each of them.
_FOLDER = Path(__file__).parent

Circumstances: TypeAlias = tuple[object, ...]


def _circumstances() -> Circumstances:
    """The inheritance of a launcher process, which it hands down to its workers."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_TEST}
    stderr = os.fstat(2)
    umask = next(line for line in Path("/proc/self/status").read_text().splitlines() if "Umask" in line)
    limits = [resource.getrlimit(which) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)]
    return (environment, stderr.st_dev, stderr.st_ino, umask, limits)


@attrs.define(eq=False)
class Left:
    """Leftovers of its system in a launcher process."""

    workers: set[int] = attrs.field(factory=set)
    chunks: set[int] = attrs.field(factory=set)
    imports: set[int] = attrs.field(factory=set)
    is_as_before: bool = True


class KeptLink(LauncherLink):
    """A launcher process that outlives its system, if nothing is left in it."""

    idle: ClassVar[Self | None] = None
    """The one that the next system gets."""
    is_wanted: ClassVar[bool] = False
    """Whether a system would have taken one, and there was none, or none like it."""

    _left: Left | None = None
    _started_in: Circumstances = ()

    @classmethod
    @enable_ki_protection
    async def open(cls) -> Self:
        kept = cls.idle
        if kept is None or kept._started_in != _circumstances():
            cls.is_wanted = True
            return await super().open()
        cls.idle = None
        kept._left = Left()
        return kept

    @classmethod
    def prepare(cls) -> None:
        """Have a launcher that can be handed on, if there is a use for it; between tests."""
        if not cls.is_wanted:
            return
        cls.is_wanted = False
        if cls.idle is None or cls.idle._started_in != _circumstances():
            cls.end()
            trio.run(cls._start)

    @classmethod
    def end(cls) -> None:
        """End the idle one."""
        if cls.idle is not None:
            trio.run(super(KeptLink, cls.idle).close)
            cls.idle = None
            cls.is_wanted = True

    @classmethod
    async def _start(cls) -> None:
        cls.idle = await super().open()
        cls.idle._started_in = _circumstances()

    def send(self, kind: str, number: int, detail: object = None, descriptors: Sequence[int] = ()) -> None:
        super().send(kind, number, detail, descriptors)
        left = self._left
        if left is None:
            return
        if kind == "start":
            assert isinstance(detail, dict)
            left.workers.add(number)
            packages = {name.partition(".")[0] for name in detail.get("preload", ())}
            left.is_as_before &= packages <= _INSTALLED
        elif kind == "import":
            assert isinstance(detail, dict)
            left.imports.add(number)
            left.is_as_before &= all(_is_lasting(module) for module, _ in detail["modules"])
        elif kind == "keep":
            left.chunks.add(number)
        elif kind == "forget":
            left.chunks.discard(number)

    @enable_ki_protection
    async def receive(self) -> Any:
        report = await super().receive()
        if self._left is not None:
            if report.kind == "tried":
                self._left.imports.discard(report.number)
            if report.kind in ("failed", "exited"):
                self._left.workers.discard(report.number)
            self._left.is_as_before &= report.kind != "fresh"
        return report

    @enable_ki_protection
    async def close(self) -> str:
        if self._left is not None:
            with trio.move_on_after(_EMPTY, shield=True):
                if await self._is_emptied(self._left):
                    self._be_new()
                    return "exited with code 0"
        return await super().close()

    async def _is_emptied(self, left: Left) -> bool:
        """Do the work at a process's end: end workers, forget chunks. Returns whether nothing is left."""
        try:
            for chunk in tuple(left.chunks):
                self.send("forget", chunk)
            for worker in left.workers:
                self.send("kill", worker)
            if self._outbox:
                return False
            while left.workers or left.imports:
                _close(await self.receive())
            self.send("ping", _LAST)
            while (report := await self.receive()).number != _LAST:
                _close(report)
        except EndOfLink:
            return False
        return left.is_as_before and not self._descendants()

    def _descendants(self) -> str:
        """It adopts its workers' orphans."""
        found = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return "".join(pid for pid in found if "template" not in Path(f"/proc/{pid}/comm").read_text())

    def _be_new(self) -> None:
        assert KeptLink.idle is None or KeptLink.idle is self
        self._left = None
        self._has_asked = trio.Event()
        KeptLink.idle = self


def _is_lasting(module: str) -> bool:
    """Whether a module has the same content in each test."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None and _FOLDER in Path(spec.origin).parents


def _close(report: Any) -> None:
    for descriptor in report.descriptors:
        os.close(descriptor)
